"""Whatever becomes of its database, a call ends a second after its time at the latest, and takes 0.2 s of CPU at most.

A sample of all databases, faults, calls and ways runs by default; ``DISTLOCK_SOAK=1`` runs all, and measures strictly.
"""

from __future__ import annotations

import gc
import os
import time
import zlib
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from math import inf

import pytest
from django.db import Error, connections

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.database.errors import is_final
from django_distlock.testing.tools import WAYS, calling
from tests.support.databases import ALIAS, known_database
from tests.support.proxy import Proxy
from tests.support.stores import DATABASE
from tests.support.timed import timed
from tests.support.tools import PATIENCE, eventually, insist, renewer_of

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(1)]

EVERYTHING = bool(os.environ.get("DISTLOCK_SOAK"))
SAMPLE = 12  # of so many cases one runs by default
SLOW_MACHINE = 0.5 if EVERYTHING else 20.0  # seconds that a machine under load may add to any call
TIMEOUT = 0.5  # seconds
PATIENT = 3.0  # seconds, where calls succeed in the end, and for a file: who has less time waits less
SHORTEST = 1.0  # seconds that a call has which itself has less time
CPU = 0.2  # seconds of the processor that a call may take

FAULTS = {
    "postgres": ("refuses", "hangs", "hangs at first", "silent", "cut", "full"),
    "mariadb": ("refuses", "hangs", "hangs at first", "silent", "cut", "full"),
    "sqlite": ("locked", "locked at first"),
}
GRANTS = ("silent", "cut")  # under which every call succeeds
CALLS = {
    "acquire": (0, 1, 10, None),
    "release": (None,), "renew": (None,), "locked": (None,), "held": (None,), "check": (None,),
}  # fmt: skip
READS = ("locked", "held")  # whose way to SQLite no writer bars


def cases():
    every = [
        pytest.param(store, fault, call, wait, way, id=f"{store}-{fault}-{call}-{wait}-{way}")
        for store, faults in FAULTS.items()
        for fault, call, way in product(faults, CALLS, WAYS)
        for wait in CALLS[call]
        if not (fault.endswith("at first") and call in ("release", "renew"))  # who holds a lock is connected
        and not (fault == "locked" and call in READS)
    ]
    return [case for case in every if EVERYTHING or zlib.crc32(case.id.encode()) % SAMPLE == 0]


def timeout_of(store, fault):
    return PATIENT if store == "sqlite" or fault in GRANTS else TIMEOUT


def longest(store, fault, call, wait):
    """Seconds that the call is given."""
    whole = 2 * timeout_of(store, fault)
    if call == "acquire":
        return min(inf if wait is None else max(wait, SHORTEST), whole)
    return (2 if call == "held" else 1) * whole


class Stage:
    """A database behind a proxy, or in a file, and what goes wrong there."""

    def __init__(self, store, server, settings, folder, timeout):
        self._store = store
        self._stack, self._faults = ExitStack(), ExitStack()
        self.proxy = None
        if store == "sqlite":
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "shop.sqlite3")}
        else:
            socket = server.folder / ".s.PGSQL.5432" if store == "postgres" else server.socket
            self.proxy = Proxy(socket, folder)
            self.proxy.socket = folder / socket.name
            self._stack.enter_context(self.proxy)
            host = str(folder if store == "postgres" else self.proxy.socket)
            database = {**server.settings(), "HOST": host, "CONN_MAX_AGE": None}
            if store == "postgres":
                self._direct("DROP ROLE IF EXISTS limited", "CREATE ROLE limited LOGIN IN ROLE pg_write_all_data")
                self._direct("GRANT pg_read_all_data TO limited")
                database["USER"] = "limited"
        self._stack.enter_context(known(database))
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": DATABASE, "LOCATION": "broken", "OPTIONS": {"timeout": timeout}}
        }

    def _direct(self, *statements):
        with connections[ALIAS].cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def break_(self, fault):
        match fault.removesuffix(" at first"):
            case "refuses":
                self.proxy.refuse()
            case "hangs":
                self.proxy.hang = True
            case "silent":
                self.proxy.silence()
            case "cut":
                self.proxy.refuse()
                self.proxy.accept()
            case "full":
                self.proxy.refuse()
                self._fill()
                self.proxy.accept()
            case "locked":
                self._lock(exclusive=fault != "locked")

    def _fill(self):
        """No connection more."""
        if self._store == "postgres":
            self._direct("ALTER ROLE limited CONNECTION LIMIT 0")
            return
        self._direct("SET GLOBAL max_connections = 10")
        self._faults.callback(self._direct, "SET GLOBAL max_connections = 100")
        failures = 0
        while failures < 10:  # the server may not have noticed yet which connections were ended
            one = connections[ALIAS].copy()
            self._faults.callback(one.close)
            try:
                one.ensure_connection()
            except Error:
                failures += 1
                time.sleep(0.02)

    def _lock(self, *, exclusive):
        """Another one writes, or makes the file just now, which even who reads waits for."""
        pool = locks["default"].pool
        writer = self._faults.enter_context(pool.connection(PATIENCE))
        if exclusive:
            writer.connection.execute("PRAGMA journal_mode = DELETE")
        writer.connection.execute("BEGIN EXCLUSIVE")
        self._faults.callback(writer.connection.rollback)

    def end(self):
        """All is well again."""
        self._faults.close()
        if self.proxy:
            self.proxy.hang = False
            self.proxy.accept()
        if self._store == "postgres":
            self._direct("ALTER ROLE limited CONNECTION LIMIT -1")

    def close(self):
        self.end()
        backend = locks["default"]
        eventually(lambda: not renewer_of(backend).is_cleaning, 6 * PATIENCE)
        locks.close()
        self._stack.close()
        if self._store == "postgres":
            self._direct("DROP ROLE limited")

    @property
    def cpu(self):
        """Seconds that the proxy took, which is a part of this process."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.proxy._thread.ident)) if self.proxy else 0.0


@contextmanager
def known(database):
    """As ``known_database()``, but without a table of its own on a server."""
    if database["ENGINE"].endswith("sqlite3"):
        with known_database(database, "broken"):
            yield
        return
    connections.settings["broken"] = connections.configure_settings({"default": {}, "broken": database})["broken"]
    try:
        yield
    finally:
        del connections.settings["broken"]


@pytest.fixture
def on(request, store, fault, settings, tmp_path_factory, django_db_blocker):
    """A stage with that database."""
    server = None
    if store != "sqlite":
        server = request.getfixturevalue(store)
        request.getfixturevalue(f"{store}_database")
    with django_db_blocker.unblock():
        stage = Stage(store, server, settings, tmp_path_factory.mktemp("p"), timeout_of(store, fault))
        yield stage
        stage.close()
    gc.collect()  # now, while it is expected: PyMySQL leaves the socket of an attempt that failed to it


@pytest.mark.filterwarnings("ignore:.*socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("store", "fault", "call", "wait", "way"), cases())
def test_a_call_ends_within_its_time(on, store, fault, call, wait, way):
    at_first = fault.endswith("at first")
    if at_first:
        on.break_(fault)
    with calling(way) as calls:
        held, lease = lock("held", ttl=60), None
        if not at_first:
            lease = insist(held.__enter__)
            insist(calls(lock("name")).locked)  # its connection stands, too
            on.break_(fault)
        handle = lock("name", wait=wait if call == "acquire" else 0, ttl=60)
        result = timed(call, calls, held, lease, handle, lambda: on.cpu)
        on.end()
        if result.outcome is True:
            calls(handle).release()
        if lease and call != "release":
            with suppress(LockBackendError):  # which is made up for
                held.release()
    assert result.took < longest(store, fault, call, wait) + 1 + SLOW_MACHINE
    assert result.cpu < CPU + 0.02 * result.took  # of one core, while it tries again
    if fault in GRANTS and call == "acquire" and wait in (0, 1) and not EVERYTHING:
        return  # a busy machine may not connect anew in the half second that is left to them
    if call == "check":
        assert any(finding.is_error for finding in result.outcome) is (fault not in GRANTS)
        return
    assert isinstance(result.outcome, LockBackendError) is (fault not in GRANTS)
    if fault not in GRANTS:
        assert not result.outcome.is_final
        assert not is_final(result.outcome.__cause__)
