"""Waiters for the messages of one connection: one of them reads it, for all."""

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
    """A place in the line of readers. ``wake()`` ends its sleep or read, also one that is about to begin."""

    is_reading = False

    def __init__(self, end_read: Callable[[], object]) -> None:
        self._end_read = end_read
        self._sleeping = threading.Lock()
        self._sleeping.acquire()

    def wake(self) -> None:
        try:  # noqa: SIM105 - each hand-off waits for this, and suppress() takes longer than all the rest
            self._sleeping.release()
        except RuntimeError:  # woken twice
            pass
        if self.is_reading:
            self._end_read()

    def sleep(self, timeout: float) -> bool:
        """Whether it was woken."""
        return self._sleeping.acquire(timeout=timeout)


class Readers:
    """The readers of one connection. They stand in a line: the first one reads, and wakes those that got a message.

    The others sleep until they are first. So a single waiter needs no other thread to wake it.

    A place is given up by one call, the first one in a ``finally``. No interrupt comes before it, so a thread that no
    longer waits does not stay in the line. If an interrupt comes before the next reader is woken, that reader wakes
    after its nap. The last one in the line closes a connection that is over.

    A signal handler that waits itself, on top of the reader, stands behind it: it and the others learn of their turn
    from looks.
    """

    failure: Exception | None = None  # met by a waiter
    left_at = -inf  # when a waiter last was in the line
    _is_over = False
    _is_torn = False  # while a message is taken out, and for ever if that was interrupted
    _is_drained = False  # no message that has come is left

    def __init__(
        self,
        source: Any,
        take: Callable[[], object],
        close: Callable[[], object],
        error: type[Exception],
        on_failure: Callable[[], object],
    ) -> None:
        """``source``: is readable when a message has come. ``take``: takes messages out, without waiting.

        ``error``: the class that ``take`` raises if the connection is lost. ``on_failure``: called as soon as a waiter
        has met this error.
        """
        self._take, self._error, self._on_failure = take, error, on_failure
        self._closing = {"close": close}  # a dict, from which only one thread can take it
        self._line: dict[Place, None] = {}
        self._selector = selectors.DefaultSelector()  # unlike select(), it supports descriptors from 1024 on
        self._woken, self._waker = socket.socketpair()
        finalize(self, _close, self._woken, self._waker).atexit = False  # a thread may be reading
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for one in (source, self._woken):
            self._selector.register(one, selectors.EVENT_READ)

    def wait(self, event: WakeEvent, timeout: float, nap: float) -> None:
        """Until the event is set, at most ``timeout`` seconds.

        ``nap``: seconds without a message after which a reader checks that the connection is still open.
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
        """Read for waiters outside the line: at once if it ``is_wanted``, else if no waiter has come for a ``nap``.

        Returns False if it must not be read so. Raises the error that readers have met.
        """
        if self.failure:
            raise self.failure
        first = self._first()
        if first:
            if not first.is_reading:  # else an interrupt came before it was woken
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
        """In a forked child: the connection belongs to the parent, and copied waiters no longer read it."""
        self._is_over = True
        self._closing.clear()

    def wake(self) -> None:
        """Wake the reader."""
        with suppress(OSError):
            self._waker.send(b"!")

    def _first(self) -> Place | None:
        return next(iter([*self._line]), None)

    def _pass_on(self) -> None:
        """A reader has left the line: wake the next one."""
        first = self._first()
        if first is None:
            if self._is_over and (close := self._closing.pop("close", None)):
                self._selector.close()  # first, because gevent requires it
                _close(self._woken, self._waker)
                close()
        elif not first.is_reading:
            first.wake()

    def _read_or_sleep(self, place: Place, nap: float, seconds: float) -> bool:
        """False if the connection is of no use any more."""
        try:
            if not (self._is_over or self.failure):
                if self._first() is place:
                    self._read(place, min(seconds, nap))
                else:
                    place.sleep(seconds)
                return True
        except self._error as error:  # another error comes from a signal handler
            self.failure = error
            self._on_failure()
        self._line.pop(place, None)
        self._pass_on()
        return False

    def _read(self, place: Place, timeout: float) -> None:
        """Read for so many seconds, or until it is woken."""
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
