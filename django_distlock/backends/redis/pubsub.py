"""How waiters wake: one subscription per backend and process, for all its waiting threads and tasks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from redis.exceptions import RedisError, ResponseError, TimeoutError

from ...types import LockRequest
from ...utils import fork
from ...utils.clock import clock
from ...utils.threads import Post, end_with_interpreter
from ...utils.wakeup import WakeEvent
from .config import Location
from .errors import is_transient
from .scripts import pack

logger = logging.getLogger("django_distlock")

IDLE = 20.0  # seconds without a waiter after which the connection is closed
NAP = 1.0  # seconds between looks at whether there is still something to do
AGAIN = 0.2  # seconds before another subscription, whatever ended the last one
DEAF = 2.0  # seconds without the echo of a look after which the connection is taken for dead

# Sharded first: a plain pattern subscriber, such as a monitor, would make dead waiters look alive.
KINDS = (("SSUBSCRIBE", "S"), ("SUBSCRIBE", "P"))


class NoListener(RedisError):
    """The thread that listens does not run, or failed by itself: waiters look."""


class Listener:
    """Receives ``"token key"`` when the lock at the key was handed to the token, and sets the request's event.

    A hint is a hint: the truth is the lease in the store. A hint for a token that nobody here has any more
    goes to ``hand_back(token, key)``. A look publishes ``?`` to its own inbox, so that silence can be told
    from a dead connection.
    """

    def __init__(
        self, location: Location, new_channel: Callable[[], str], hand_back: Callable[[str, str], None], name: str
    ) -> None:
        self._location = location
        self._new_channel = new_channel
        self._hand_back = hand_back
        self._name = name
        # Weak, because a lease that was lost is never released here.
        self._requests: WeakValueDictionary[str, LockRequest] = WeakValueDictionary()
        self._connection: Any = None
        self._has_told = False
        self._begin()
        fork.in_child(self._begin_anew)
        end_with_interpreter(self)

    def _begin(self) -> None:
        self._channel = self._new_channel()
        self.is_ready = False  # whether the subscription stands
        self._starters: set[WakeEvent] = set()
        self._failure: Exception | None = None
        self._post = Post()
        self._inbox = ""
        self._touched_at = 0.0
        self._heard_at = 0.0  # when something came last
        self._asked_at = 0.0  # when the look was sent whose echo is still to come, if that is later
        self._resubscribe = False

    def _begin_anew(self) -> None:
        """In a forked child: while it kept the socket open, its parent would look alive after it was killed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
        self._begin()

    def hears(self, name: str) -> bool:
        """Whether a waiter for that lock would be told."""
        return self.is_ready

    def start(self, name: str, within: float) -> None:
        """Return when the subscription stands.

        Raises redis-py's error if it does not in so many seconds, NoListener if there is no thread for it.
        """
        with self.starter() as event:
            if not self.is_ready:
                event.wait(within)
            self._check_ready(within)

    async def astart(self, name: str, within: float) -> None:
        with self.starter() as event:
            if not self.is_ready:
                await event.await_set(within)
            self._check_ready(within)

    @contextmanager
    def starter(self) -> Iterator[WakeEvent]:
        """An event that is set when the subscription stands, or cannot."""
        event = WakeEvent()
        self._starters.add(event)
        try:
            self._revive()
            yield event
        finally:
            self._starters.discard(event)

    def _check_ready(self, within: float) -> None:
        if not self.is_ready:
            raise self._failure or TimeoutError(f"no answer to SUBSCRIBE within {within:.1f} s")

    def _revive(self) -> None:
        self._touched_at = clock()
        if self._post.thread is not None:
            return
        self._failure = None
        name = f"distlock-listener-{self._name}"
        thread = threading.Thread(target=self._run, args=(os.getpid(),), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads here
            self._tell_once(error)
            raise NoListener(str(error)) from error
        self._has_told = False

    def _tell_once(self, error: RuntimeError) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "Who waits for a lock of %r looks once a second, in no order, because the thread that listens cannot"
                " be started: %s",
                self._name, error,
            )  # fmt: skip

    def stop(self) -> None:
        """Nobody will wait any more; the thread notices within a second."""
        self._touched_at = -IDLE

    def end(self) -> threading.Thread | None:
        self.stop()
        thread, connection = self._post.thread, self._connection
        with suppress(AttributeError, OSError):
            connection._sock.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 - redis-py has no public way to wake who reads
        return thread

    def expect(self, request: LockRequest) -> None:
        """Wake this request from now on. To be called before the store may know of it."""
        request.inbox = request.inbox or self._inbox
        self._requests[request.token] = request
        self._touched_at = clock()

    def forget(self, request: LockRequest) -> None:
        if self._requests.get(request.token) is request:
            del self._requests[request.token]

    def will_look(self, request: LockRequest) -> None:
        """A look is about to be sent."""
        self._touched_at = now = clock()
        if self._post.thread is None:
            with suppress(NoListener):
                self._revive()
        elif self._asked_at > self._heard_at and now - self._asked_at > DEAF:
            self._resubscribe = True

    def looked(self, request: LockRequest, ears: int, sent_at: float) -> None:
        """A look was answered, and its echo sent to so many listeners. Looks that are granted the lock send none."""
        if ears == 0:
            self._resubscribe = self._resubscribe or self.is_ready
        elif self._asked_at <= self._heard_at:
            self._asked_at = sent_at

    # In the thread

    def _run(self, pid: int) -> None:
        while not fork.is_copy(pid) and self._is_wanted and self._post.take():
            try:
                self._work_on(pid)
            finally:
                if not fork.is_copy(pid):
                    self._post.leave()

    @property
    def _is_wanted(self) -> bool:
        return clock() - self._touched_at < IDLE

    def _work_on(self, pid: int) -> None:
        while self._is_wanted:
            connection = None
            try:
                connection = self._connection = self._location.connected(protocol=2, socket_timeout=NAP)
                self._subscribe(connection)
                self.is_ready, self._failure = True, None
                self._wake_all()  # what was published while nobody listened
                self._listen(connection)
            except Exception as error:
                if fork.is_copy(pid):
                    return
                self._failed(error)
            finally:
                if not fork.is_copy(pid):
                    self.is_ready, self._connection = False, None
                if connection is not None:
                    connection.disconnect()
            if fork.is_copy(pid):
                return
            if self._is_wanted:
                time.sleep(AGAIN)

    def _failed(self, error: Exception) -> None:
        """Whatever it was, the next attempt may succeed; nobody would see the thread die."""
        if isinstance(error, RedisError | OSError):
            logger.debug("The listener of %r lost its connection: %s", self._name, error)
            failure = error
        else:
            logger.exception("The listener of %r failed and begins again", self._name)
            failure = NoListener(str(error))
        self.is_ready, self._failure = False, failure
        if not is_transient(failure):
            self._ring_starters()  # no use in waiting for it

    def _subscribe(self, connection: Any) -> None:
        for verb, kind in KINDS:
            connection.send_packed_command([pack(verb, self._channel)], check_health=False)
            try:
                connection.read_response(disable_decoding=True)
            except ResponseError:
                if (verb, kind) == KINDS[-1]:
                    raise
                continue  # sharded: since Redis 7
            self._inbox = kind + self._channel
            break
        self._heard_at, self._resubscribe = clock(), False

    def _listen(self, connection: Any) -> None:
        while self._connection is connection and not self._resubscribe:
            try:
                message = connection.read_response(disable_decoding=True, disconnect_on_error=False)
            except TimeoutError:
                if not self._is_wanted:
                    return
            else:
                self._heard(message)

    def _heard(self, message: Any) -> None:
        self._heard_at = clock()
        text: bytes = message[2]
        if text == b"?":
            return
        token, _, key = text.decode().partition(" ")
        if request := self._requests.get(token):
            request.event.set()
        else:
            self._hand_back(token, key)

    def _wake_all(self) -> None:
        self._ring_starters()
        for reference in self._requests.valuerefs():  # a list, where values() would meet those that come meanwhile
            if request := reference():
                request.event.set()

    def _ring_starters(self) -> None:
        for event in list(self._starters):
            event.set()
