"""Notifications of PostgreSQL, which wake the waiters of a process."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any
from weakref import finalize

from django.db import Error

from ...types import LockRequest, new_token
from ...utils.clock import clock
from ...utils.threads import Post
from ...utils.wakeup import WakeEvent
from ..common.state import INBOX_LENGTH
from ..common.timing import Timing
from ..common.wakeup_listener import WakeupListener
from .connections import Pool, class_of, is_psycopg3, vendor_of
from .sql import CHANNEL

logger = logging.getLogger("django_distlock")


class PostgresListener(WakeupListener):
    """Hears ``"token"`` when the lock was handed to the request of that token, and sets its event.

    It is an improvement, not a need: until the echo of its own voice has come on another connection, and after
    that stays away, waiters look by themselves.

    A thread that waits reads the connection itself, for all, if nobody else does: so no other thread need wake it. The
    listener's own thread reads where others wait as well, and where nobody reads. Who reads has the connection's
    ``reader``.
    """

    connection_errors = (Error, OSError)

    def __init__(self, pool: Pool, name: str, timing: Timing) -> None:
        self._pool = pool
        super().__init__(name, timing)

    def _reset_after_fork(self) -> None:
        super()._reset_after_fork()
        self.inbox = new_token()[:INBOX_LENGTH]
        self._echo_until = inf
        self._deaf_until = -inf
        self._has_told_of_pooler = False
        self._sleepers: dict[str, None] = {}  # tokens of those that wait and do not read
        self._wanted_at = -inf  # when a waiter last came to read, or left
        self._rest = WakeEvent()  # ends that of the listener's thread
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        finalize(self, _close, self._woken, self._waker).atexit = False  # its thread may be waiting for them

    @property
    def is_started(self) -> bool:
        """Also where it is of no use to start it now."""
        return self._worker.thread is not None or clock() < self._deaf_until

    def _inbox_of(self, request: LockRequest) -> str:
        return self.inbox

    def stop(self) -> None:
        """Close the connection now, unless somebody waits."""
        super().stop()
        thread = self._worker.thread
        if thread is not None and thread.is_alive() and not self._waiters:
            self._wake_reader()
            thread.join(self._timing.echo_timeout)

    def _interrupt(self) -> None:
        super().stop()
        self._wake_reader()

    def _wake_reader(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")
        self._rest.set()

    @property
    def _is_wanted(self) -> bool:
        return super()._is_wanted and clock() >= self._deaf_until

    # For waiters

    def wait_for_message(self, request: LockRequest, timeout: float) -> None:
        """Until the event of the request is set, at the latest after ``timeout`` seconds."""
        wrapper, token = self._connection, request.token
        # A handler of a signal may wait while the thread that it interrupts reads.
        may_read = wrapper is not None and self.is_ready and wrapper.reader.thread is not threading.current_thread()
        try:
            self._sleepers[token] = None
            if may_read and wrapper.reader.take():
                self._sleepers.pop(token, None)
                request.event.wait_by(
                    partial(self._read_by_waiter, wrapper), partial(self._wake_if_other, wrapper), timeout
                )
            else:
                self._wanted_at = clock()
                request.event.wait(timeout)
        finally:
            self._sleepers.pop(token, None)
            if may_read and wrapper.reader.thread is threading.current_thread():
                self._leave(wrapper)

    async def await_message(self, request: LockRequest, timeout: float) -> None:
        """``wait_for_message()`` for tasks, which never read."""
        try:
            self._sleepers[request.token] = None
            self._rest.set()
            await request.event.await_set(timeout)
        finally:
            self._sleepers.pop(request.token, None)

    def _read_by_waiter(self, wrapper: Any, seconds: float) -> bool:
        """False if it is of no use any more."""
        if self._connection is wrapper and wrapper.failure is None:
            try:
                self._receive_all(wrapper, min(seconds, self._timing.listener_nap))
                return True
            except Error as error:  # another one is of a handler of a signal
                wrapper.failure = error
        self._leave(wrapper)
        return False

    def _wake_if_other(self, wrapper: Any) -> None:
        """Something else than a message has set the event of who reads."""
        if wrapper.reader.thread is not threading.current_thread():
            self._wake_reader()

    def _leave(self, wrapper: Any) -> None:
        """Of who reads."""
        self._wanted_at = clock()
        if wrapper.is_torn and self._connection is wrapper:
            self._resubscribe = True  # an interrupt may have taken a message along
        wrapper.reader.leave()
        if self._connection is not wrapper:
            self.disconnect(wrapper)
        elif self._sleepers or self._resubscribe or wrapper.failure:
            self._rest.set()

    # In the thread

    def connect(self) -> Any:
        selector = selectors.DefaultSelector()  # first: it may fail. Unlike select() it knows descriptors from 1024 on
        try:
            wrapper = self._pool.open_until(clock() + 2 * self._pool.timeout)
        except BaseException:
            selector.close()
            raise
        wrapper.reader = Post()
        wrapper.failure = None  # that a waiter has met
        wrapper.is_torn = False  # while messages are taken out
        wrapper.selector = selector
        for source in (wrapper.connection, self._woken):
            wrapper.selector.register(source, selectors.EVENT_READ)
        return wrapper

    def subscribe(self, wrapper: Any) -> None:
        within = self._timing.echo_timeout
        with self._pool.watching(wrapper, within):
            if not (self._pool.is_direct or self._keeps_session(wrapper)):
                self._give_up()
                return
            with wrapper.cursor() as cursor:
                cursor.execute(f'LISTEN "{CHANNEL}{self.inbox}"')
        with self._pool.connection(within) as other, other.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '?')", [CHANNEL + self.inbox])
        self._echo_until = clock() + within

    def read(self, wrapper: Any, timeout: float) -> None:
        if wrapper.failure:
            raise wrapper.failure
        is_missed = self._sleepers or clock() - self._wanted_at > self._timing.listener_nap
        if is_missed and wrapper.reader.take():
            try:
                self._receive_all(wrapper, timeout)
            finally:
                wrapper.reader.leave()
        else:
            self._rest.wait(timeout)
        if not self.is_ready and clock() > self._echo_until:
            self._give_up()

    def _receive_all(self, wrapper: Any, timeout: float) -> None:
        """What comes within so many seconds, or until ``_wake_reader()``."""
        with wrapper.wrap_database_errors:
            ready = [key.fileobj for key, _ in wrapper.selector.select(timeout)]
            if self._woken in ready:
                with suppress(OSError):
                    self._woken.recv(64)
            if wrapper.connection not in ready or self._connection is not wrapper:
                return
            wrapper.is_torn, connection = True, wrapper.connection.pgconn
            connection.consume_input()
            for message in iter(connection.notifies, None):
                self._receive(message.extra.decode())
            wrapper.is_torn = False

    def disconnect(self, wrapper: Any) -> None:
        """By whom nobody reads; else that one does it when it leaves."""
        self._wake_reader()
        if wrapper.reader.take():
            wrapper.selector.close()  # first, says gevent
            self._pool.close(wrapper)

    def _receive(self, text: str) -> None:
        if text == "?":
            self._mark_ready()
        else:
            self._sleepers.pop(text, None)
            self._wanted_at = clock()  # it may come again, and then reads itself
            self._waiters.wake(text)

    def _keeps_session(self, wrapper: Any) -> bool:
        """Whether a pooler leaves a session of the server to the connection for as long as that lasts.

        Else that session would go on to listen for us, and so be woken by each notification, when it is another's.
        """
        with (
            wrapper.cursor() as cursor,
            self._pool.connection(self._timing.echo_timeout) as other,
            other.cursor() as others,
        ):
            first, anothers, again = map(_session, (cursor, others, cursor))
            return bool(first == again != anothers)

    def _give_up(self) -> None:
        self._deaf_until, self._resubscribe = clock() + self._timing.deaf_for, True
        if self._has_told_of_pooler:
            return
        self._has_told_of_pooler = True
        logger.warning(
            "Notifications do not come through to the locks of %r, so that waiters ask the database several times a"
            " second. A pooler such as pgbouncer in transaction mode does not pass them on; a LOCATION that leads"
            " directly to the server does.",
            self._name,
        )


def can_listen(alias: str) -> bool:
    """Whether the database notifies, and its driver (psycopg 3) lets a thread wait for that."""
    return vendor_of(alias) == "postgresql" and is_psycopg3(class_of(alias))


def _session(cursor: Any) -> int:
    cursor.execute("SELECT pg_backend_pid()")
    return int(cursor.fetchone()[0])


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()
