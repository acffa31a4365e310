"""Notifications of PostgreSQL, which wake the waiters of a process."""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import Any

from django.db import Error

from ...types import LockRequest, new_token
from ...utils.clock import clock
from ...utils.events import about_event
from ..common.readers import Readers
from ..common.state import INBOX_LENGTH
from ..common.timing import Timing
from ..common.wakeup_listener import WakeupListener
from .connections import Pool
from .engines import class_of, is_psycopg3, vendor_of
from .sql import CHANNEL

logger = logging.getLogger("django_distlock")

SESSION_CHECKS = 5


class PostgresListener(WakeupListener):
    """Hears ``"token"`` when the lock was handed to the request of that token, and sets the event of the request.

    ``"token number"``: the request may take its lease by this message, and that is its fencing number.

    Waiters do not depend on it. They look by themselves until an echo has come, sent on another connection, and again
    when the echo stays away.
    """

    connection_error = Error

    def __init__(self, pool: Pool, name: str, timing: Timing) -> None:
        self._pool = pool
        super().__init__(name, timing)

    def _reset_after_fork(self) -> None:
        super()._reset_after_fork()
        self.inbox = new_token()[:INBOX_LENGTH]
        self._echo_until = inf
        self._deaf_until = -inf
        self._has_told_of_pooler = False

    @property
    def is_started(self) -> bool:
        """True also if it is of no use to start it now."""
        return self._worker.thread is not None or clock() < self._deaf_until

    def _inbox_of(self, request: LockRequest) -> str:
        return self.inbox

    def stop(self) -> None:
        """Close the connection now, unless somebody waits."""
        super().stop()
        thread = self._worker.thread
        if thread is not None and thread.is_alive() and not self._waiters:
            self._interrupt()
            thread.join(self._timing.echo_timeout)

    @property
    def _is_wanted(self) -> bool:
        return super()._is_wanted and clock() >= self._deaf_until

    # In the thread

    def connect(self) -> Any:
        return self._pool.open_until(clock() + 2 * self._pool.timeout)

    def readers(self, wrapper: Any) -> Readers:
        with wrapper.wrap_database_errors:
            source = wrapper.connection.fileno()
        take, close = partial(self._take, wrapper), partial(self.disconnect, wrapper)
        return Readers(source, take, close, Error, on_failure=self._rest.set)

    def subscribe(self, wrapper: Any) -> None:
        within = self._timing.echo_timeout
        if not (self._pool.is_direct or self._keeps_session(wrapper)):
            self._give_up()
            return
        with self._pool.watching(wrapper, within), wrapper.cursor() as cursor:
            cursor.execute(f'LISTEN "{CHANNEL}{self.inbox}"')
        with self._pool.connection(within) as other, other.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '?')", [CHANNEL + self.inbox])
        self._echo_until = clock() + within

    def read(self, wrapper: Any, timeout: float) -> None:
        super().read(wrapper, timeout)
        if not self.is_ready and clock() > self._echo_until:
            self._give_up()

    def _take(self, wrapper: Any) -> None:
        with wrapper.wrap_database_errors:
            connection = wrapper.connection.pgconn
            connection.consume_input()
            for message in iter(connection.notifies, None):
                self._receive(message.extra.decode())

    def disconnect(self, wrapper: Any) -> None:
        self._pool.close(wrapper)

    def _receive(self, text: str) -> None:
        if text == "?":
            self._mark_ready()
        else:
            token, _, fence = text.partition(" ")
            self._waiters.wake(token, (1, int(fence)) if fence.isdecimal() else None)

    def _keeps_session(self, wrapper: Any) -> bool:
        """Whether the connection keeps its session of the server for as long as it lasts, also behind a pooler.

        Otherwise the session would still listen for us, and each notification would wake it, when others use it. One
        check is not enough: a pooler may give us the same session again by chance, while others use the rest.
        """
        within, sessions = self._timing.echo_timeout, set()  # the time is for each check
        for _ in range(SESSION_CHECKS):
            with (
                self._pool.watching(wrapper, within),
                wrapper.cursor() as cursor,
                self._pool.connection(within) as other,
                other.cursor() as others,
            ):
                first, anothers, again = map(session_of, (cursor, others, cursor))
            sessions |= {first, again}
            if len(sessions) > 1 or anothers in sessions:
                return False
        return True

    def _give_up(self) -> None:
        self._deaf_until, self._resubscribe = clock() + self._timing.deaf_for, True
        if self._has_told_of_pooler:
            return
        self._has_told_of_pooler = True
        logger.warning(
            "Notifications do not come through to the locks of %r, so that waiters ask the database several times a"
            " second. A pooler such as pgbouncer in transaction mode does not pass them on; a LOCATION that leads"
            " directly to the server does.",
            self._name, extra=about_event("no-notifications", alias=self._name),
        )  # fmt: skip


def can_listen(alias: str) -> bool:
    """Whether the database notifies, and its driver (psycopg 3) lets a thread wait for a notification."""
    return vendor_of(alias) == "postgresql" and is_psycopg3(class_of(alias))


def session_of(cursor: Any) -> int:
    cursor.execute("SELECT pg_backend_pid()")
    return int(cursor.fetchone()[0])
