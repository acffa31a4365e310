"""How waiters wake: one subscription per backend and process, for all its waiting threads and tasks."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any

from redis.exceptions import RedisError, ResponseError, TimeoutError

from ...types import TOKEN_LENGTH, LockRequest
from ...utils.clock import clock
from ...utils.events import about_event
from ...utils.wakeup import WakeEvent
from ..common.readers import Readers
from ..common.timing import Timing
from ..common.wakeup_listener import Waiters, WakeupListener
from .config import Location
from .errors import is_transient
from .scripts import pack
from .timers import TOO_LATE

logger = logging.getLogger("django_distlock")

# Sharded first: a plain pattern subscriber, such as a monitor, would make dead waiters look alive.
KINDS = (("SSUBSCRIBE", "S"), ("SUBSCRIBE", "P"))
MESSAGE = re.compile(rb"([0-9a-f]{%d}) (\d{1,4}) (\d{1,19}) (.*)" % TOKEN_LENGTH, re.DOTALL)  # see lock.lua
PUBLISHED = (b"smessage", b"message")
BY_MESSAGE = {"S": "T", "P": "Q"}  # the inboxes of those who may take their lease by the message


class NoListener(RedisError):
    """The thread that listens does not run, or failed by itself: waiters look."""


class RedisListener(WakeupListener):
    """Receives the messages of ``lock.lua``, and sets the events of those whom they name.

    What was handed to a token that nobody here has any more goes to ``hand_back(token, key)``. What a waiter may have
    taken by the message does not: that waiter may be in another process, which has the same inbox. A look publishes
    ``?`` to its own inbox, so that silence can be told from a dead connection.
    """

    connection_error = RedisError
    in_cluster = False

    def __init__(
        self,
        location: Location,
        new_channel: Callable[[], str],
        hand_back: Callable[[str, str], None],
        name: str,
        timing: Timing,
        waiters: Waiters | None = None,
    ) -> None:
        self._location = location
        self._new_channel = new_channel
        self._hand_back = hand_back
        self.gives_leases = not location.failover_timeout  # by its messages; a former master tells of its own leases
        super().__init__(name, timing, waiters)

    def _reset_after_fork(self) -> None:
        if self._connection is not None:
            # In a forked child. While it kept the socket open, its parent would look alive after it was killed.
            self._connection.disconnect()
        super()._reset_after_fork()
        self._channel = self._new_channel()
        self._starters: dict[WakeEvent, None] = {}  # in the order in which they came
        self._failure: Exception | None = None
        self._inbox = ""
        self._heard_at = 0.0  # when something came last
        self._asked_at = 0.0  # when the look was sent whose echo is still to come, if that is later
        self._counted_at = -inf  # when the last look was sent whose echo was counted here
        self._is_counted = False  # this subscription, by the scripts of the server
        self._was_missed = False  # the one before it
        self._deaf_until = -inf  # waiters poll
        self._has_told_of_counts = False

    def start(self, name: str, timeout: float) -> None:
        """Return when the subscription stands.

        Raises redis-py's error if it does not within ``timeout`` seconds, NoListener if there is no thread for it.
        """
        for event, seconds in self._starts(timeout):
            event.wait(seconds)

    async def astart(self, name: str, timeout: float) -> None:
        for event, seconds in self._starts(timeout):
            await event.await_set(seconds)

    def _starts(self, timeout: float) -> Iterator[tuple[WakeEvent, float]]:
        """Until the subscription stands: what to wait for, and for how long. It may break as soon as it stands."""
        deadline = clock() + timeout
        while not self.is_ready:
            with self.starter() as event:
                if not self.is_ready:
                    yield event, deadline - clock()
            if not self.is_ready:
                self.raise_failure(deadline, timeout)

    @contextmanager
    def starter(self) -> Iterator[WakeEvent]:
        """An event that is set when the subscription stands, or cannot."""
        event = WakeEvent()
        self._starters[event] = None
        try:
            if self._worker.thread is None:
                self._failure = None
            self.touch()
            yield event
        finally:
            self._starters.pop(event, None)

    def raise_failure(self, deadline: float, timeout: float) -> None:
        """If it is of no use to wait on for the subscription."""
        failure = self._failure
        is_final = failure is not None and not is_transient(failure, in_cluster=self.in_cluster)
        if is_final or clock() >= deadline:
            raise failure or TimeoutError(f"no answer to SUBSCRIBE within {timeout:.1f} s")

    def _on_refusal(self, error: RuntimeError) -> None:
        super()._on_refusal(error)
        self._failure = NoListener(str(error))
        self._wake_starters()

    def _interrupt(self) -> None:
        super()._interrupt()
        with suppress(AttributeError, OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _inbox_of(self, request: LockRequest) -> str:
        if not (request.takes_by_message and self.gives_leases):
            return self._inbox
        kind = self._inbox[:1]
        return BY_MESSAGE.get(kind, kind) + self._inbox[1:]

    # Whether a hand-over can be trusted to have been heard

    def is_counted(self, name: str) -> bool:
        return self._is_counted

    def is_deaf(self, name: str) -> bool:
        return clock() < self._deaf_until

    def inbox(self, name: str) -> str:
        return self._inbox

    def note_count(self, name: str, counts: bool | None) -> None:
        """What was found out about this subscription. None: nobody seemed to listen.

        It may have ended, or the server not be the one any more that scripts run on: that is believed of two only.
        """
        if counts:
            self._is_counted, self._was_missed = True, False
        elif counts is None and (self._resubscribe or not self._was_missed):
            self._was_missed = self._resubscribe = True
        else:
            self._deaf_until = clock() + self._timing.deaf_for
            if not self._has_told_of_counts:
                self._has_told_of_counts = True
                logger.warning(
                    "Scripts at the server of the locks of %r are not told who receives a message, so nobody can be"
                    " handed a lock there: waiters look every 0.1 to 1 s instead, in their order. A proxy before the"
                    " server may be the reason.",
                    self._name, extra=about_event("no-receivers-told", alias=self._name),
                )  # fmt: skip

    def will_look(self, request: LockRequest) -> bool:
        """A look is about to be sent. Returns whether it is to send an echo.

        Many waiters look, and the echo of one of them counts for all. A message that was heard does not: a server that
        became a replica delivers what its successor publishes, which counts nobody there.
        """
        self.touch()
        if self._asked_at > self._heard_at and clock() - self._asked_at > self._timing.echo_timeout:
            self._resubscribe = True
        return clock() - self._counted_at >= self._timing.echo_interval

    def looked(self, request: LockRequest, ears: int, sent_at: float) -> None:
        """A look was answered, and its echo sent to so many listeners. Looks that are granted the lock send none."""
        if ears == 0:
            self._resubscribe = self._resubscribe or self.is_ready
            return
        self._counted_at = sent_at
        if self._asked_at <= self._heard_at:
            self._asked_at = sent_at

    # In the thread

    def connect(self) -> Any:
        return self._location.connected(protocol=2)

    def subscribe(self, connection: Any) -> None:
        for verb, kind in KINDS:
            connection.send_packed_command([pack(verb, self._channel)], check_health=False)
            try:
                self.next_message(connection)
            except ResponseError:
                if (verb, kind) == KINDS[-1]:
                    raise
                continue  # sharded: since Redis 7
            self._inbox = kind + self._channel
            break
        self._mark_ready()

    @staticmethod
    def next_message(connection: Any) -> Any:
        """What answers a subscription, or stands before that. Raises redis-py's errors, TimeoutError among them."""
        if (message := connection.receive(connection.socket_timeout)) is None:
            raise TimeoutError(TOO_LATE)
        return message

    def readers(self, connection: Any) -> Readers | None:
        if not connection.can_read_without_waiting():
            return None
        take, close = partial(self._take, connection), partial(self.disconnect, connection)
        return Readers(connection.sock, take, close, RedisError, on_failure=self._rest.set)

    def read(self, connection: Any, timeout: float) -> None:
        if connection.new_login:  # who is subscribed cannot tell it to the server
            self._resubscribe = True
        elif self._readers:
            super().read(connection, timeout)
        elif (message := connection.receive(timeout)) is not None:
            self._receive(message)

    def _take(self, connection: Any) -> None:
        while (message := connection.receive(0.0)) is not None:
            self._receive(message)
            if not connection.may_have_more():
                return

    def disconnect(self, connection: Any) -> None:
        connection.disconnect()

    def _mark_ready(self) -> None:
        self._heard_at, self._failure, self._is_counted, self._counted_at = clock(), None, False, -inf
        super()._mark_ready()

    def _receive(self, message: Any) -> None:
        """Anybody may have published it. It must not fail: who waits for a lock would get the error."""
        if message[0] not in PUBLISHED:
            return
        self._heard_at = clock()
        if not (found := MESSAGE.fullmatch(message[2])):
            return  # an echo, or of somebody else
        token, slot, fence, key = found[1].decode(), int(found[2]), int(found[3]), found[4].decode(errors="replace")
        handed = (slot, fence) if fence else None
        if not self._waiters.wake(token, handed) and slot and not handed:
            self._hand_back(token, key)

    def _note_failure(self, error: Exception) -> None:
        super()._note_failure(error)
        failure = error if self._is_loss(error) else NoListener(str(error))
        self.is_ready, self._failure = False, failure
        if not is_transient(failure):
            self._wake_starters()  # no use in waiting for it

    def _wake_all(self) -> None:
        self._wake_starters()
        super()._wake_all()

    def _wake_starters(self) -> None:
        for event in list(self._starters):
            event.set()
