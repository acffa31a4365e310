"""Those who wait for what one connection tells: one of them reads it, for all."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any
from weakref import finalize

from ...utils.clock import clock
from ...utils.wakeup import WakeEvent


class Place:
    """In the line of readers. ``wake()`` ends its sleep or its read, also one that is about to begin."""

    is_reading = False

    def __init__(self, end_read: Callable[[], object]) -> None:
        self._end_read = end_read
        self._sleeping = threading.Lock()
        self._sleeping.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # woken twice
            self._sleeping.release()
        if self.is_reading:
            self._end_read()

    def sleep(self, timeout: float) -> bool:
        """Whether it was woken."""
        return self._sleeping.acquire(timeout=timeout)


class Readers:
    """Of one connection. They stand in a line: the first one reads, and wakes those for whom something has come.

    The others sleep until they are first. So nobody needs another thread to be woken who waits alone.

    A place is given up by one call, the first one of a ``finally``: there no interrupt comes between, so no thread that
    waits no more stays in the line. Where one strikes before the next is woken, that one wakes after its nap. The last
    one in the line closes a connection that is over.
    """

    failure: Exception | None = None  # that a waiter has met
    left_at = -inf  # when a waiter last was in the line
    _is_over = False
    _is_torn = False  # while what has come is taken out, and for ever where that was interrupted
    _is_drained = False  # nothing is left that has come already

    def __init__(
        self,
        source: Any,
        take: Callable[[], object],
        close: Callable[[], object],
        error: type[Exception],
        on_failure: Callable[[], object],
    ) -> None:
        """``source``: what can be read when something has come. ``take``: takes that out, waits for nothing.

        ``error``: the class of what ``take`` raises where the connection is lost. ``on_failure``: called as soon as a
        waiter has met that.
        """
        self._take, self._error, self._on_failure = take, error, on_failure
        self._closing = {"close": close}  # a dict, from which one thread alone can take it
        self._line: dict[Place, None] = {}
        self._selector = selectors.DefaultSelector()  # unlike select() it knows descriptors from 1024 on
        self._woken, self._waker = socket.socketpair()
        finalize(self, _close, self._woken, self._waker).atexit = False  # a thread may be reading
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for one in (source, self._woken):
            self._selector.register(one, selectors.EVENT_READ)

    def wait(self, event: WakeEvent, timeout: float, nap: float) -> None:
        """Until the event is set, at the latest after ``timeout`` seconds.

        ``nap``: after which who hears nothing looks whether the connection still stands.
        """
        place = Place(self.wake)
        try:
            self._line[place] = None
            event.wait_by(partial(self._read_or_sleep, place, nap), place.wake, timeout)
        finally:
            self._line.pop(place, None)
            self.left_at = clock()
            self._pass_on()

    def read_if_missed(self, timeout: float, nap: float, *, is_wanted: bool) -> bool:
        """For those who wait in no line, at once if it ``is_wanted``, else if no waiter has come for a ``nap``.

        False if it is not to be read so. Raises what readers have met.
        """
        if self.failure:
            raise self.failure
        first = self._first()
        if first:
            if not first.is_reading:  # an interrupt may have come before it was woken
                first.wake()
            return False
        if not is_wanted and clock() - self.left_at <= nap:
            return False
        place = Place(self.wake)
        try:
            self._line[place] = None
            if self._first() is place:
                self._read(place, timeout)
        finally:
            self._line.pop(place, None)
            self._pass_on()
        return True

    def end(self) -> None:
        """The connection is of no use any more."""
        self._is_over = True
        for place in [*self._line]:
            place.wake()
        self._pass_on()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's. Who waits here was copied, and reads it no more."""
        self._is_over = True
        self._closing.clear()

    def wake(self) -> None:
        """Who reads."""
        with suppress(OSError):
            self._waker.send(b"!")

    def _first(self) -> Place | None:
        return next(iter([*self._line]), None)

    def _pass_on(self) -> None:
        """Somebody has left the line."""
        first = self._first()
        if first is None:
            if self._is_over and (close := self._closing.pop("close", None)):
                self._selector.close()  # first, says gevent
                _close(self._woken, self._waker)
                close()
        elif not first.is_reading:
            first.wake()

    def _read_or_sleep(self, place: Place, nap: float, seconds: float) -> bool:
        """False if it is of no use any more."""
        try:
            if not (self._is_over or self.failure):
                if self._first() is place:
                    self._read(place, min(seconds, nap))
                else:
                    place.sleep(seconds)
                return True
        except self._error as error:  # another one is of a handler of a signal
            self.failure = error
            self._on_failure()
        self._line.pop(place, None)
        self._pass_on()
        return False

    def _read(self, place: Place, timeout: float) -> None:
        """What comes within so many seconds, or until it is woken."""
        if self._is_torn:
            raise self._error("An interrupt may have taken along what the connection had told.")
        if self._is_drained:
            place.is_reading = True
            ready = [] if place.sleep(0) else [key.fileobj for key, _ in self._selector.select(timeout)]
            place.is_reading = False
            if self._woken in ready:
                with suppress(OSError):
                    self._woken.recv(64)
        if not self._is_over:
            self._is_torn = True
            self._take()
            self._is_torn, self._is_drained = False, True


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()
