"""When a waiter looks that nobody can wake."""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary, finalize

from django.db import Error

from ...types import LockRequest, new_token
from ...utils import fork
from ...utils.clock import clock
from ...utils.threads import Post, end_with_interpreter
from ..common.state import INBOX_LENGTH
from .connections import Pool, class_of, is_psycopg3, vendor_of
from .sql import CHANNEL, Turn

SHORTEST, LONGEST = 0.002, 0.25  # seconds between two looks
GROWTH = 1.5


class PollBackoff:
    """The looks of one waiter, through all its waits for a turn.

    The pause grows while the lock stays with the same holder, and begins anew when it went to another. Those
    further behind look less often. It is random by a third, so that processes do not look at the same moment.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._pause = SHORTEST
        self._seen = Turn(False)
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Another wait."""
        self._until = clock() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._until - clock())

    def go_on(self) -> bool:
        return self.left > 0

    def pause(self) -> float:
        """Seconds until the next look."""
        longest = LONGEST * random.uniform(0.7, 1)
        return min(self.left, longest, self._pause * (1 + self._seen.ahead) * random.uniform(0.7, 1.3))

    def see(self, turn: Turn) -> bool:
        """Whether it has come."""
        self._pause = SHORTEST if turn.fence != self._seen.fence else self._pause * GROWTH
        self._seen = turn
        return turn.has_come


logger = logging.getLogger("django_distlock")

IDLE = 20.0  # seconds without a waiter after which the connection is closed
NAP = 1.0  # seconds between looks at whether there is still something to do
AGAIN = 1.0  # seconds before another attempt after the connection was lost
ECHO_WITHIN = 2.0  # seconds in which the listener must hear what was said on another connection
DEAF_FOR = 60.0  # seconds for which a pooler that passes on no notifications is not tried again


class Listener:
    """Hears ``"token"`` when the lock was handed to the request of that token, and sets its event.

    It is an improvement, not a need: until the echo of its own voice has come on another connection, and after
    that stays away, waiters look by themselves.
    """

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool = pool
        self._name = name
        self._requests: WeakValueDictionary[str, LockRequest] = WeakValueDictionary()
        self._begin()
        fork.in_child(self._begin)
        end_with_interpreter(self)

    def _begin(self) -> None:
        self.inbox = new_token()[:INBOX_LENGTH]
        self._post = Post()
        self._touched_at = 0.0
        self._deaf_until = 0.0
        self._has_told = False
        self._woken, self._waker = socket.socketpair()
        finalize(self, _close, self._woken, self._waker).atexit = False  # its thread may be waiting for them
        self.hears = False  # the echo has come: waiters need not look by themselves

    @property
    def is_started(self) -> bool:
        """Also where it is of no use to start it now."""
        return self._post.thread is not None or clock() < self._deaf_until

    def expect(self, request: LockRequest) -> None:
        """Wake this request from now on."""
        request.inbox = request.inbox or self.inbox
        self._requests[request.token] = request
        self._touched_at = clock()
        if self._post.thread is None and self._is_wanted:
            self._start()

    def forget(self, request: LockRequest) -> None:
        if self._requests.get(request.token) is request:
            del self._requests[request.token]

    def stop(self) -> None:
        """Close the connection now, unless somebody waits."""
        thread = self._post.thread
        self._touched_at = -IDLE
        if thread is not None and thread.is_alive() and not self._requests:
            with suppress(OSError):
                self._waker.send(b"!")
            thread.join(NAP)

    def end(self) -> threading.Thread | None:
        self.stop()
        return self._post.thread

    def _start(self) -> None:
        name = f"distlock-listener-{self._name}"
        with suppress(RuntimeError):  # no more threads here: waiters look
            threading.Thread(target=self._run, args=(os.getpid(),), name=name, daemon=True).start()

    @property
    def _is_wanted(self) -> bool:
        now = clock()
        return now - self._touched_at < IDLE and now >= self._deaf_until

    # In the thread

    def _run(self, pid: int) -> None:
        while not fork.is_copy(pid) and self._is_wanted and self._post.take():
            try:
                self._work_on(pid)
            finally:
                if not fork.is_copy(pid):
                    self._post.leave()

    def _work_on(self, pid: int) -> None:
        while not fork.is_copy(pid) and self._is_wanted:
            try:
                self._listen()
            except (Error, OSError) as error:
                logger.debug("The listener of %r lost its connection: %s", self._name, error)
                _ready(AGAIN, self._woken)
            except Exception:
                if fork.is_copy(pid):
                    return
                logger.exception("The listener of %r failed; waiters look until it listens again", self._name)
                _ready(AGAIN, self._woken)

    def _listen(self) -> None:
        wrapper = self._pool.open_until(clock() + 2 * self._pool.timeout)
        try:
            with self._pool.watching(wrapper, ECHO_WITHIN):
                if not (self._pool.is_direct or self._keeps_session(wrapper)):
                    self._give_up()
                    return
                with wrapper.cursor() as cursor:
                    cursor.execute(f'LISTEN "{CHANNEL}{self.inbox}"')
            with self._pool.connection(ECHO_WITHIN) as other, other.cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, '?')", [CHANNEL + self.inbox])
            with wrapper.wrap_database_errors:
                self._hear(wrapper.connection, clock() + ECHO_WITHIN)
        finally:
            self.hears = False
            self._pool.close(wrapper)

    def _keeps_session(self, wrapper: Any) -> bool:
        """Whether a pooler leaves a session of the server to the connection for as long as that lasts.

        Else that session would go on to listen for us, and so be woken by each notification, when it is another's.
        """
        with wrapper.cursor() as cursor, self._pool.connection(ECHO_WITHIN) as other, other.cursor() as others:
            first, anothers, again = map(_session, (cursor, others, cursor))
            return bool(first == again != anothers)

    def _hear(self, connection: Any, echo_until: float) -> None:
        while clock() - self._touched_at < IDLE:
            ready = _ready(NAP, connection, self._woken)
            if self._woken in ready:
                self._woken.recv(1)
            if connection in ready:
                connection.pgconn.consume_input()
                while message := connection.pgconn.notifies():
                    self._heard(message.extra.decode())
            if not self.hears and clock() > echo_until:
                self._give_up()
                return

    def _heard(self, text: str) -> None:
        if text == "?":
            self.hears = True
            for request in list(self._requests.values()):
                request.event.set()  # what was said while nobody listened
        elif told := self._requests.get(text):
            told.event.set()

    def _give_up(self) -> None:
        self._deaf_until = clock() + DEAF_FOR
        if self._has_told:
            return
        self._has_told = True
        logger.warning(
            "Notifications do not come through to the locks of %r, so that waiters ask the database several times a"
            " second. A pooler such as pgbouncer in transaction mode does not pass them on; a LOCATION that leads"
            " directly to the server does.",
            self._name,
        )


def can_listen(alias: str) -> bool:
    """Whether the database notifies, and its driver (psycopg 3) lets a thread wait for that."""
    return vendor_of(alias) == "postgresql" and is_psycopg3(class_of(alias))


def _ready(seconds: float, *sources: Any) -> list[Any]:
    """Those of which something can be read. Unlike select() it knows descriptors from 1024 on."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def _session(cursor: Any) -> int:
    cursor.execute("SELECT pg_backend_pid()")
    return int(cursor.fetchone()[0])


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()
