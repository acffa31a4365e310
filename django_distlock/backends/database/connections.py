"""Separate connections to a database of Django, and their pool."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from django.core.signals import request_finished, request_started
from django.db import Error, InterfaceError, OperationalError, connections
from django.db.backends.base.base import NO_DB_ALIAS
from django.db.backends.signals import connection_created

from ...utils import fork
from ...utils.clock import clock, monotonic
from ...utils.guards import new_guard
from ...utils.threads import start_thread
from ...utils.weak import WeakList
from ..common.backoff import Backoff, retry
from ..common.timing import Timing
from .engines import address, is_psycopg3, own_class, own_settings
from .errors import final, is_final
from .sqlite import ForkGate, make_file, prepare_file
from .statement import Statement
from .watchdog import Watchdog


def open_with_timeout(timeout: float, connect: Callable[[], Any], close: Callable[[Any], None], name: str) -> Any:
    """The connection. Raises OperationalError after ``timeout`` seconds; a connection that comes later is closed.

    It is opened in a thread. Drivers count whole seconds, anew for each address. They do not count the look-up of a
    name, nor the time for which a pooler keeps a client waiting while its server is away.
    """
    opening: Future[Any] = Future()

    def work() -> None:
        try:
            opened = connect()
        except BaseException as error:
            if opening.set_running_or_notify_cancel():
                opening.set_exception(error)
            return
        if opening.set_running_or_notify_cancel():
            opening.set_result(opened)
        else:
            close(opened)

    try:
        if start_thread(name, work) is None:
            return connect()
        return opening.result(max(0.0, timeout))
    except TimeoutError as error:
        if opening.cancel():
            raise OperationalError(f"no connection within {timeout:.1f} s") from error
        return opening.result()  # it came just now
    except BaseException:  # connect() failed, or the caller is interrupted
        if not opening.cancel() and opening.exception() is None:
            close(opening.result())
        raise


MAX_IDLE = 8  # connections kept after a rush
CPU_SHARE = 0.04  # the share of a processor that attempts to connect may use while a server is away

Wrapper = Any  # django.db.backends.base.base.BaseDatabaseWrapper; its attributes are not typed

_open_connections: set[Wrapper] = set()  # strong: collecting a connection in a forked child would end the parent's
_inherited: list[Wrapper] = []  # kept, so that the garbage collector does not close the parent's connections
_pools: WeakList[Pool] = WeakList()
_gate = ForkGate()  # of connections to SQLite
_unusable_files: set[str] = set()  # of SQLite, in which this process cannot lock


class Pool:
    """Connections to the database of one alias, each used by one call at a time.

    They use a copy of the settings of the alias. CONN_MAX_AGE counts at the begin and end of requests, as for Django's
    connections. But if it is 0, requests do not open and close one each. A connection that nobody used for twenty
    seconds is closed when a request begins or ends, or by the next call, which does not use it. A process without
    requests and calls keeps its idle connections, at most eight. A waiter has none while it waits.
    """

    prepare_after = 5  # executions of a statement on one connection; half of their time is parsing and planning

    def __init__(self, alias: str, timeout: float, file: str | None, name: str, timing: Timing) -> None:
        """``timeout``: seconds for an answer; ``file``: of SQLite, else None; ``name``: the alias of the locks."""
        self.timing = timing
        self.alias = alias
        self.timeout = timeout
        self.file = file
        self._begin()
        fork.in_child(self._begin)
        self._watchdog = Watchdog(name)
        self.uses_prepared_statements = True  # until a statement turns out to be prepared in another session
        self.is_direct = True  # when a connection was last opened, no pooler was in between
        self._cpu_time = 0.0  # seconds of CPU time that the last attempt to connect took
        self.on_close: Callable[[], None] = lambda: None  # for a connection that is held outside the pool
        _pools.add(self)

    def _begin(self) -> None:
        self._idle: list[tuple[float, Wrapper]] = []
        self._guard = new_guard()  # a signal handler may ask for a lock while this very thread is inside

    @contextmanager
    def connection(self, timeout: float, deadline: float | None = None) -> Iterator[Wrapper]:
        """A connection that nobody else uses, shut down after ``timeout`` seconds. An error closes it.

        ``deadline``: for getting one, on ``clock()``; by default after twice the timeout.
        """
        fork.notice()  # a child must not talk on its parent's connections
        with self._no_fork():
            deadline = clock() + 2 * timeout if deadline is None else deadline
            wrapper = self._take(deadline)
            try:
                with self.watching(wrapper, self.time_for_call(timeout, deadline)):
                    yield wrapper
            except BaseException:
                _close(wrapper)
                raise
            self._give_back(wrapper)

    def post(self, statement: Statement, parameters: Sequence[Any]) -> bool:
        """Send a statement on an idle connection, without waiting for anything; the next call there reads the answer.

        False: none was used lately, or the answer to another one is still to be read there, or it failed.
        """
        fork.notice()
        if (idle := self._pop_latest()) is None:
            return False
        since, wrapper = idle
        try:
            libpq, is_trusted = wrapper.libpq, clock() - since < self.timing.idle_trusted
            if is_posted := bool(libpq and not libpq.has_posted and is_trusted):
                with wrapper.wrap_database_errors:
                    libpq.post(statement, parameters)
        except Error:
            _close(wrapper)
            return False
        except BaseException:
            _close(wrapper)
            raise
        self._keep(since, wrapper)
        return is_posted

    def time_for_call(self, timeout: float, deadline: float) -> float:
        """Seconds for an answer on an existing connection."""
        return min(timeout, max(self.timing.shortest_call, deadline - clock()))

    def watching(self, wrapper: Wrapper, timeout: float) -> AbstractContextManager[None]:
        """Shuts the connection down after ``timeout`` seconds, and then raises CallTimeout. SQLite does not need it."""
        if self.file is not None:
            return nullcontext()
        return self._watchdog.watching(partial(_socket_of, wrapper), timeout)

    def open_until(self, deadline: float) -> Wrapper:
        """As ``open()``. Raises OperationalError if there is no connection at the ``deadline``, on ``clock()``."""
        if self.file is not None:
            return self.open(min(self.timeout, max(self.timing.shortest_call, (deadline - clock()) / 2)))
        return open_with_timeout(deadline - clock(), self.open, self.close, f"distlock-connecting-{self.alias}")

    def open(self, timeout: float | None = None) -> Wrapper:
        """A new connection; close it with ``close()``. ``timeout``: seconds for each answer while it opens."""
        timeout = self.timeout if timeout is None else timeout
        if self.file in _unusable_files:
            raise final(
                f"This process was forked while a lock in {self.file} was asked for, and so cannot lock in that file:"
                " SQLite takes the locks of the parent for its own. Fork where no other thread asks for locks, or"
                " start another program in the child. uWSGI forks so with its defaults: start it with --lazy-apps."
            )
        settings = own_settings(self.alias, timeout, self.file, self.prepare_after)
        wrapper = own_class(settings["ENGINE"])(settings, self.alias)
        wrapper.watched = partial(self.watching, timeout=self.timeout)
        wrapper.inc_thread_sharing()
        wrapper.queries_log = deque(maxlen=0)  # with DEBUG; Django resets only the logs of its own connections
        wrapper.libpq = None
        _open_connections.add(wrapper)
        began = time.thread_time()
        try:
            if self.file is not None:
                make_file(self.file)
                wrapper.opened_file = _identity(self.file)
            wrapper.ensure_connection()
            if self.file is not None:
                wrapper.opened_file = wrapper.opened_file or _identity(self.file)  # SQLite may have made it
            if wrapper.vendor == "sqlite":
                with wrapper.wrap_database_errors:
                    prepare_file(wrapper, timeout, self.timing)
            elif wrapper.vendor == "postgresql":
                with wrapper.watched(wrapper):
                    self.is_direct = _set_up_session(wrapper)
                if is_psycopg3(wrapper):
                    from .libpq import Libpq  # needs psycopg

                    wrapper.libpq = Libpq(wrapper.connection)
                    if not (self.is_direct and self.uses_prepared_statements):
                        wrapper.connection.prepare_threshold = None
        except BaseException:
            self._cpu_time = time.thread_time() - began
            _close(wrapper)
            raise
        return wrapper

    def close(self, wrapper: Wrapper) -> None:
        _close(wrapper)

    def close_idle(self) -> None:
        fork.notice()
        with self._no_fork():
            with self._guard:
                idle, self._idle = self._idle, []
            for _, wrapper in idle:
                _close(wrapper)

    def close_old(self) -> None:
        """Close connections older than CONN_MAX_AGE; if it is 0, those long idle. Broken ones are closed already."""
        fork.notice()
        with self._no_fork():
            with self._guard:  # other threads use the rest meanwhile
                old = self._take_old()
            for wrapper in old:
                _close(wrapper)

    def _take_old(self) -> list[Wrapper]:
        old = []
        for idle in self._idle.copy():
            since, wrapper = idle
            wrapper.health_check_done = False
            if self._is_old(since, wrapper):
                with suppress(ValueError):  # a signal handler has taken it meanwhile
                    self._idle.remove(idle)
                    old.append(wrapper)
        return old

    def _no_fork(self) -> AbstractContextManager[None]:
        return nullcontext() if self.file is None else _gate.using()

    def _take(self, deadline: float) -> Wrapper:
        """An idle connection, else a new one. If a server refuses, it is tried again, because it may be restarting."""
        return self._take_idle(deadline) or retry(
            lambda: self._take_idle(deadline) or self.open_until(deadline),
            self._may_reconnect,
            Backoff(deadline, self.timing.reconnect_pause_shortest, self.timing.reconnect_pause_longest),
            lambda: self._cpu_time / CPU_SHARE,  # PyMySQL reads all certificates of the system before it connects
        )

    def _may_reconnect(self, error: Exception) -> bool:
        return isinstance(error, OperationalError | InterfaceError) and self.file is None and not is_final(error)

    def _take_idle(self, deadline: float) -> Wrapper | None:
        while (idle := self._pop_latest()) is not None:
            since, wrapper = idle
            try:
                if not self._is_old(since, wrapper) and self._is_usable(wrapper, since, deadline):
                    return wrapper
            except BaseException:
                _close(wrapper)
                raise
            _close(wrapper)
        return None

    def _pop_latest(self) -> tuple[float, Wrapper] | None:
        """The idle connection that was used last, and when."""
        with self._guard:
            try:
                return self._idle.pop()
            except IndexError:  # also if a signal handler has just taken it
                return None

    def _is_old(self, since: float, wrapper: Wrapper) -> bool:
        """``since``: when it was last used, on ``clock()``."""
        max_age = wrapper.settings_dict["CONN_MAX_AGE"]
        if max_age == 0:
            return clock() - since > self.timing.database_idle_kept
        # Django's own method asks the database, which unit tests may forbid here.
        return bool(max_age and monotonic() >= wrapper.close_at)

    def _is_usable(self, wrapper: Wrapper, since: float, deadline: float) -> bool:
        if self.file is not None and wrapper.opened_file != _identity(self.file):
            return False  # the file was deleted or replaced; other processes lock in the new one
        # The test runner renames the database after the settings were read.
        if self.file is None and address(wrapper.settings_dict) != address(connections.settings[self.alias]):
            return False
        libpq = wrapper.libpq
        if libpq and libpq.has_posted:
            try:
                with self.watching(wrapper, min(self.timeout, deadline - clock())), wrapper.wrap_database_errors:
                    libpq.read_posted()
            except Error:
                return False
        elif libpq and clock() - since >= self.timing.idle_trusted and libpq.has_ended():
            return False
        if wrapper.settings_dict["CONN_HEALTH_CHECKS"]:
            with self.watching(wrapper, min(self.timeout, deadline - clock())):
                wrapper.close_if_health_check_failed()  # now: a cursor would connect anew, without a time limit
        return wrapper.connection is not None

    def _give_back(self, wrapper: Wrapper) -> None:
        now = clock()
        self._keep(now, wrapper)
        while (old := self._pop_older_than(now - self.timing.database_idle_kept)) is not None:
            _close(old)

    def _pop_older_than(self, moment: float) -> Wrapper | None:
        """The connection that was idle longest, if it was given back before that moment."""
        with self._guard:
            if self._idle and self._idle[0][0] < moment:
                return self._idle.pop(0)[1]
        return None

    def _keep(self, since: float, wrapper: Wrapper) -> None:
        with self._guard:
            if len(self._idle) < MAX_IDLE:
                self._idle.append((since, wrapper))
                return
        _close(wrapper)


def _set_up_session(wrapper: Wrapper) -> bool:
    """Set READ COMMITTED, whatever the role or the database is set to: each statement sees what others have committed.

    False if a pooler is in between. It could send each statement to another session, and those are not ours to set. A
    pooler is recognised because it gives its clients another number than the process id of the server.
    """
    with wrapper.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('default_transaction_isolation', 'read committed', false) WHERE pg_backend_pid() = %s",
            [wrapper.connection.info.backend_pid],
        )
        return cursor.fetchone() is not None


def _close(wrapper: Wrapper) -> None:
    wrapper.close()
    _open_connections.discard(wrapper)  # now: one that could not be closed before a fork is still open in the child


def _on_request(**_: object) -> None:
    for pool in _pools:
        pool.close_old()


def _identity(file: str) -> tuple[int, int] | None:
    """Identifies the file that has this path now. None: there is none."""
    try:
        status = Path(file).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _on_connection(connection: Wrapper, **_: object) -> None:
    """Close all if a connection without a database is opened: tests that begin or end create or drop a database."""
    if connection.alias == NO_DB_ALIAS:
        for pool in _pools:
            pool.close_idle()
            pool.on_close()


def _before_fork() -> None:
    """Close all connections to SQLite when the calls that are under way have ended."""
    longest = max((pool.timeout for pool in _pools if pool.file is not None), default=0.0)
    if _gate.close(longest + 1.0):
        for wrapper in _open_files():
            _close(wrapper)


def _open_files() -> list[Wrapper]:
    return [wrapper for wrapper in list(_open_connections) if wrapper.vendor == "sqlite"]


def _after_fork() -> None:
    """In the child, which must neither use nor end its parent's connections."""
    global _gate
    _gate = ForkGate()
    _unusable_files.update(str(wrapper.settings_dict["NAME"]) for wrapper in _open_files())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for wrapper in list(_open_connections):
        if (descriptor := _socket_of(wrapper)) is not None:
            # What the driver sends when it is collected goes nowhere, and the server notices the end of the parent.
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
    _inherited.extend(_open_connections)
    _open_connections.clear()


def _socket_of(wrapper: Wrapper) -> int | None:
    """The descriptor of its socket; None if there is none any more, or the driver does not show it."""
    raw = wrapper.connection
    if raw is None or wrapper.vendor == "sqlite":
        return None
    if hasattr(raw, "fileno"):
        try:
            return int(raw.fileno())
        except wrapper.Database.Error:  # it is closed
            return None
    own = getattr(raw, "_sock", None)  # PyMySQL
    return None if own is None else int(own.fileno())


request_started.connect(_on_request)
request_finished.connect(_on_request)
connection_created.connect(_on_connection)
fork.around(_before_fork, in_parent=lambda: _gate.open())
fork.in_child(_after_fork)
