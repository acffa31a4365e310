"""Django's connections without its guard against event loops: lock() has its own, and threads have no loop."""

from __future__ import annotations

import inspect
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from math import ceil
from typing import Any

from django.core.signals import request_finished, request_started
from django.db import InterfaceError, OperationalError, connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.utils import load_backend
from django.utils.asyncio import async_unsafe

from ...utils import fork
from ...utils.clock import clock
from .errors import final, is_final
from .sqlite import ForkGate, make_file, prepare_file
from .watchdog import Watchdog

GUARDED = "connect", "ensure_connection", "cursor", "get_new_connection", "create_cursor"
GUARD = async_unsafe.__code__.co_filename


@lru_cache
def own_class(engine: str) -> Any:
    """The DatabaseWrapper of an engine, for connections of our own, whose ``watched`` bounds what opens them.

    Under gevent all greenlets share what asyncio knows of a thread. While one of them runs an event loop, Django
    takes all others for calls from inside of it, and refused to renew leases.
    """
    theirs: Any = load_backend(engine).DatabaseWrapper

    def init_connection_state(self: Any) -> None:
        with self.watched(self):  # these are the first statements; the connection was not there before
            theirs.init_connection_state(self)

    methods = {name: _unguarded(theirs, name) for name in GUARDED}
    methods |= {"close": inspect.unwrap(BaseDatabaseWrapper.close), "init_connection_state": init_connection_state}
    return type("DatabaseWrapper", (theirs,), methods)


def _unguarded(theirs: Any, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(theirs, name)  # now: test runners put methods of their own there for a while
        is_guard = getattr(found, "__code__", None) is not None and found.__code__.co_filename == GUARD
        return (found.__wrapped__ if is_guard else found)(self, *args, **kwargs)

    return method


def open_within(seconds: float, connect: Callable[[], Any], close: Callable[[Any], None], name: str) -> Any:
    """What ``connect()`` returns. Raises OperationalError after ``seconds``; what comes later is closed.

    In a thread of its own: drivers count whole seconds, for each address anew, and none while they look up a name. Nor
    do they count how long a pooler lets wait that is there while its server is not.
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

    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter exits
            return connect()
        return opening.result(max(0.0, seconds))
    except TimeoutError as error:
        if opening.cancel():
            raise OperationalError(f"no connection within {seconds:.1f} s") from error
        return opening.result()  # it came at this very moment
    except BaseException:  # of a connect() that failed, or of a caller that is interrupted
        if not opening.cancel() and opening.exception() is None:
            close(opening.result())
        raise


MAX_IDLE = 8  # connections kept after a rush
PREPARE_AFTER = 5  # executions of a statement on one connection; half of its time is parsing and planning
LEAST = 0.5  # seconds for an answer, however long it took to connect
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.25  # seconds before a server is tried again that took no connection
SHARE = 0.04  # of the time that a server is away: what attempts to connect may take of a processor
IDLE = 20.0  # seconds after which a connection that nobody used is closed

Wrapper = Any  # django.db.backends.base.base.BaseDatabaseWrapper, whose attributes are not typed

_open: set[Wrapper] = set()  # strong: a connection that is collected in a forked child ends that of its parent
_inherited: list[Wrapper] = []
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_gate = ForkGate()  # for users of SQLite
_lost_files: set[str] = set()  # of SQLite, in which this process cannot lock


class Pool:
    """Connections to the database of one alias, each used by one call at a time.

    Made from a copy of the alias' settings. They are closed by CONN_MAX_AGE at the begin and end of requests, as
    Django closes its own. Those that nobody used for twenty seconds are closed when a call ends: a process
    that makes no calls keeps what it has, eight at most. A waiter has none while it waits.
    """

    def __init__(self, alias: str, timeout: float, file: str | None, name: str) -> None:
        """``timeout``: seconds for an answer; ``file``: of SQLite, else None; ``name``: of the locks' alias."""
        self.alias = alias
        self.timeout = timeout
        self.file = file
        self._begin()
        fork.in_child(self._begin)
        self._watchdog = Watchdog(name)
        self.prepares = True  # statements, where a session is ours alone
        self.is_direct = True  # no pooler was in between when a connection was opened last
        self._cpu = 0.0  # seconds of the processor that the last attempt to connect took
        self.closes_with_it: Callable[[], None] = lambda: None
        _pools.add(self)

    def _begin(self) -> None:
        self._idle: list[tuple[float, Wrapper]] = []
        self._guard = threading.RLock()  # a signal handler may ask for a lock while this very thread is inside

    @contextmanager
    def connection(self, seconds: float, deadline: float | None = None) -> Iterator[Wrapper]:
        """One that nobody else uses. What goes wrong closes it; after ``seconds`` it is shut down.

        It is tried for until ``deadline``, on ``clock()``; by default, for twice that time. What was got at the last
        moment is given half a second.
        """
        fork.notice()  # a child must not talk on its parent's connections
        with self._no_fork():
            deadline = clock() + 2 * seconds if deadline is None else deadline
            wrapper = self._take(deadline)
            try:
                allowed = min(seconds, max(LEAST, deadline - clock()))
                if self.file is not None:
                    wrapper.connection.execute(f"PRAGMA busy_timeout = {ceil(1000 * allowed)}")
                with self.watching(wrapper, allowed):
                    yield wrapper
            except BaseException:
                _close(wrapper)
                raise
            self._give_back(wrapper)

    def watching(self, wrapper: Wrapper, seconds: float) -> AbstractContextManager[None]:
        """Shuts the connection down after ``seconds``, and raises NoAnswer then."""
        return self._watchdog.watching(partial(_socket_of, wrapper), seconds)

    def open_until(self, deadline: float) -> Wrapper:
        """As ``open()``. Raises OperationalError if there is none at the ``deadline``, on ``clock()``."""
        if self.file is not None:
            return self.open(min(self.timeout, max(LEAST, (deadline - clock()) / 2)))
        return open_within(deadline - clock(), self.open, self.close, f"distlock-connecting-{self.alias}")

    def open(self, timeout: float | None = None) -> Wrapper:
        """A new one, which the caller closes with ``close()``; ``timeout``: seconds for an answer meanwhile."""
        timeout = self.timeout if timeout is None else timeout
        if self.file in _lost_files:
            raise final(
                f"This process was forked while a lock in {self.file} was asked for, and so cannot lock in that file:"
                " SQLite takes the locks of the parent for its own. Fork where no other thread asks for locks, or"
                " start another program in the child. uWSGI forks so with its defaults: start it with --lazy-apps."
            )
        settings = own_settings(self.alias, timeout, self.file)
        wrapper = own_class(settings["ENGINE"])(settings, self.alias)
        wrapper.watched = partial(self.watching, seconds=self.timeout)
        wrapper.inc_thread_sharing()
        wrapper.queries_log = deque(maxlen=0)  # with DEBUG; only those of Django's own connections are ever reset
        _open.add(wrapper)
        began = time.thread_time()
        try:
            if self.file is not None:
                make_file(self.file)
            wrapper.ensure_connection()
            if wrapper.vendor == "sqlite":
                with wrapper.wrap_database_errors:
                    prepare_file(wrapper, timeout)
            elif wrapper.vendor == "postgresql":
                with wrapper.watched(wrapper):
                    self.is_direct = _set_up_session(wrapper)
                if is_psycopg3(wrapper) and not (self.is_direct and self.prepares):
                    wrapper.connection.prepare_threshold = None
        except BaseException:
            self._cpu = time.thread_time() - began
            _close(wrapper)
            raise
        return wrapper

    def close(self, wrapper: Wrapper) -> None:
        _close(wrapper)

    def close_idle(self) -> None:
        fork.notice()
        with self._no_fork():
            for _, wrapper in self._all_idle():
                _close(wrapper)

    def close_old(self) -> None:
        """By the rules of Django: what is older than CONN_MAX_AGE. What broke was closed at once."""
        fork.notice()
        with self._no_fork():
            for since, wrapper in self._all_idle():
                # Not by Django's own method, which looks into the database: unit tests may forbid that here.
                if wrapper.close_at is not None and time.monotonic() >= wrapper.close_at:
                    _close(wrapper)
                else:
                    wrapper.health_check_done = False
                    self._keep(since, wrapper)

    def _no_fork(self) -> AbstractContextManager[None]:
        return nullcontext() if self.file is None else _gate.using()

    def _all_idle(self) -> list[tuple[float, Wrapper]]:
        with self._guard:
            idle, self._idle = self._idle, []
        return idle

    def _take(self, deadline: float) -> Wrapper:
        """An idle one, else a new one. A server that takes none is tried again: it may just be restarting."""
        pause = SHORTEST_PAUSE
        while True:
            if (wrapper := self._fit_one(deadline)) is not None:
                return wrapper
            try:
                return self.open_until(deadline)
            except (OperationalError, InterfaceError) as error:
                # PyMySQL reads all certificates of the system before it connects.
                rest = max(pause, self._cpu / SHARE)
                if self.file is not None or is_final(error) or clock() + rest >= deadline:
                    raise
            time.sleep(rest * random.uniform(0.7, 1))
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _fit_one(self, deadline: float) -> Wrapper | None:
        while True:
            with self._guard:
                try:
                    _, wrapper = self._idle.pop()
                except IndexError:
                    return None
            if self._is_fit(wrapper, deadline):
                return wrapper
            _close(wrapper)

    def _is_fit(self, wrapper: Wrapper, deadline: float) -> bool:
        max_age = wrapper.settings_dict["CONN_MAX_AGE"]
        if max_age and time.monotonic() >= wrapper.close_at:
            return False
        # The test runner renames the database after the settings were read.
        if self.file is None and address(wrapper.settings_dict) != address(connections.settings[self.alias]):
            return False
        if wrapper.settings_dict["CONN_HEALTH_CHECKS"]:
            with self.watching(wrapper, min(self.timeout, deadline - clock())):
                wrapper.close_if_health_check_failed()  # now: a cursor would connect anew, unwatched
        return wrapper.connection is not None

    def _give_back(self, wrapper: Wrapper) -> None:
        now = clock()
        self._keep(now, wrapper)
        while (old := self._pop_older_than(now - IDLE)) is not None:
            _close(old)

    def _pop_older_than(self, moment: float) -> Wrapper | None:
        """The one that nobody has used for longest, if it was given back before that moment."""
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


def own_settings(alias: str, timeout: float, file: str | None) -> dict[str, Any]:
    theirs = connections.settings[alias]
    own: dict[str, Any] = {**theirs, "ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "OPTIONS": {**theirs["OPTIONS"]}}
    options, whole, twice = own["OPTIONS"], ceil(timeout), ceil(2 * timeout)
    if file is not None:
        return {**own, "NAME": file, "OPTIONS": {"timeout": timeout}, "CONN_HEALTH_CHECKS": False}
    if vendor_of(alias) == "mysql":
        for limit, seconds in (("connect_timeout", twice), ("read_timeout", whole), ("write_timeout", whole)):
            options.setdefault(limit, seconds)
        options["isolation_level"] = "read committed"
    else:
        options.setdefault("connect_timeout", twice)
        for option in ("isolation_level", "pool"):
            options.pop(option, None)
        if is_psycopg3(class_of(alias)):
            options["server_side_binding"] = True
            options.setdefault("prepare_threshold", PREPARE_AFTER)
    return own


def class_of(alias: str) -> Any:
    return load_backend(connections.settings[alias]["ENGINE"]).DatabaseWrapper


def vendor_of(alias: str) -> str:
    return str(class_of(alias).vendor)


def is_psycopg3(wrapper: Any) -> bool:
    """``wrapper``: a connection of Django, or its class."""
    return bool(wrapper.Database.__name__ == "psycopg")


def _set_up_session(wrapper: Wrapper) -> bool:
    """Let each statement see what others have committed meanwhile, whatever the role or the database is set to.

    False where a pooler is in between, which could send each statement to another session: those are not ours to
    set. To be able to cancel a statement of its clients, a pooler gives them numbers of its own.
    """
    with wrapper.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('default_transaction_isolation', 'read committed', false) WHERE pg_backend_pid() = %s",
            [wrapper.connection.info.backend_pid],
        )
        return cursor.fetchone() is not None


def address(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which database it is."""
    return tuple(settings[key] for key in ("NAME", "HOST", "PORT", "USER"))


def _close(wrapper: Wrapper) -> None:
    wrapper.close()
    _open.discard(wrapper)  # now: what could not be closed before a fork is still open in the child


def _on_request(**_: object) -> None:
    for pool in list(_pools):
        pool.close_old()


def _on_connection(connection: Wrapper, **_: object) -> None:
    """A connection to no database is there to create or drop one, which needs all others gone: tests begin or end."""
    if connection.alias == NO_DB_ALIAS:
        for pool in list(_pools):
            pool.close_idle()
            pool.closes_with_it()


def _before_fork() -> None:
    """Close all connections to SQLite, once the calls that are under way have ended."""
    longest = max((pool.timeout for pool in list(_pools) if pool.file is not None), default=0.0)
    if _gate.close(longest + 1.0):
        for wrapper in _open_files():
            _close(wrapper)


def _open_files() -> list[Wrapper]:
    return [wrapper for wrapper in list(_open) if wrapper.vendor == "sqlite"]


def _after_fork() -> None:
    """In the child: its parent's connections must neither be used nor ended here."""
    global _gate
    _gate = ForkGate()
    _lost_files.update(str(wrapper.settings_dict["NAME"]) for wrapper in _open_files())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for wrapper in list(_open):
        if (descriptor := _socket_of(wrapper)) is not None:
            # What the driver sends when it is collected goes nowhere; and its parent is seen to die.
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
    _inherited.extend(_open)
    _open.clear()


def _socket_of(wrapper: Wrapper) -> int | None:
    """Its descriptor; None where there is none, or the driver does not tell."""
    raw = wrapper.connection
    if raw is None or wrapper.vendor == "sqlite":
        return None
    if hasattr(raw, "fileno"):
        return int(raw.fileno())
    own = getattr(raw, "_sock", None)  # PyMySQL
    return None if own is None else int(own.fileno())


request_started.connect(_on_request)
request_finished.connect(_on_request)
connection_created.connect(_on_connection)
fork.around(_before_fork, in_parent=lambda: _gate.open())
fork.in_child(_after_fork)
