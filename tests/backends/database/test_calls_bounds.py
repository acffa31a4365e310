"""Every call of the database backend ends within its time and a second, whatever the server does meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf

import pytest
from django.db import connections

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.common.attempts import InDoubt
from django_distlock.types import Level
from tests.support.databases import known_database, open_connections
from tests.support.postgres import PLACES_OF_BOUNCER, Bouncer
from tests.support.proxy import Proxy
from tests.support.requirements import missing
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, eventually, renewer_of

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(3)]

WAITS = (0, 1, 10, None)
GRACE = 1.0  # seconds


class Metronome:
    """For how long threads of this process did not get to run: that is not the fault of a call."""

    def __enter__(self):
        self.late, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self):
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(0.02)
            self.late += max(0.0, time.monotonic() - began - 0.025)

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


class Called:
    """What a call came to, and how long it took beyond its time. What it has taken is given back afterwards."""

    def __init__(self, allowed, call, undo=None):
        self._allowed, self._call, self._undo = allowed, call, undo

    def run(self):
        began = time.monotonic()
        try:
            self.answer = self._call()
        except LockBackendError as error:
            self.answer = error
        self.beyond = time.monotonic() - began - self._allowed
        if self._undo and self.answer is True:
            self._undo()

    async def arun(self):
        began = time.monotonic()
        try:
            self.answer = await self._call()
        except LockBackendError as error:
            self.answer = error
        self.beyond = time.monotonic() - began - self._allowed
        if self._undo and self.answer is True:
            await self._undo()


def attempts(store):
    """Of callers that wait so long: what each may take where nothing answers, and its lock."""
    return {
        f"acquire {wait}": (store if wait is None else min(store, max(1.0, wait)), lock(f"free {wait}", wait=wait))
        for wait in WAITS
    }


def sync_calls(leases):
    backend = locks["default"]
    store = 2 * backend.pool.timeout  # an answer may be asked for twice
    taking = attempts(store)
    return {name: Called(within, handle.acquire, handle.release) for name, (within, handle) in taking.items()} | {
        "release": Called(store, leases[0].release),
        "renew": Called(store, leases[1].renew),
        "locked": Called(store, lock("another").locked),
        "held": Called(store, lambda: list(backend.held())),
        "check": Called(store, backend.check),
    }


def async_calls(leases):
    backend = locks["default"]

    async def listed():
        return [info async for info in backend.aheld()]

    store = 2 * backend.pool.timeout
    taking = attempts(store)
    return {name: Called(within, handle.aacquire, handle.arelease) for name, (within, handle) in taking.items()} | {
        "release": Called(store, leases[0].arelease),
        "renew": Called(store, leases[1].arenew),
        "locked": Called(store, lock("another").alocked),
        "held": Called(store, listed),
        "check": Called(store, backend.acheck),
    }


def all_at_once(way, leases):
    """The calls by their names, when each has ended."""
    if way == "async":

        async def main():
            calls = async_calls(leases)
            await asyncio.wait_for(asyncio.gather(*(call.arun() for call in calls.values())), 6 * PATIENCE)
            return calls

        return asyncio.run(main())
    calls = sync_calls(leases)
    threads = [threading.Thread(target=call.run, daemon=True) for call in calls.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return calls


class Stopped:
    """The server and all that it has started, by SIGSTOP."""

    def __init__(self, process):
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
        )
        self._pids = [process.pid, *map(int, children.stdout.split())]

    def __enter__(self):
        self._send(signal.SIGSTOP)

    def __exit__(self, *_):
        self._send(signal.SIGCONT)

    def _send(self, number):
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def behind_a_proxy(server, kind, folder, settings, timeout):
    """``locks["default"]``, with two leases, and the proxy."""
    socket = server.folder / ".s.PGSQL.5432" if kind == "postgres" else server.socket
    proxy = Proxy(socket, folder)
    proxy.socket = folder / socket.name
    host = folder if kind == "postgres" else proxy.socket
    database = {**server.settings(), "HOST": str(host), "CONN_MAX_AGE": None}
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": DATABASE, "LOCATION": "proxied", "OPTIONS": {"timeout": timeout}}
    }
    with proxy, known_database(database, "proxied"):
        connections["proxied"].close()
        backend = locks["default"]
        handles = [lock(name, ttl=600) for name in ("released", "renewed")]
        leases = [handle.__enter__() for handle in handles]
        yield proxy, leases
        proxy.hang = False
        proxy.accept()
        eventually(lambda: not renewer_of(backend).is_cleaning, 6 * PATIENCE)
        for lease in leases[1:]:
            lease.release()
        locks.close()


@pytest.fixture(params=["postgres", "mariadb"])
def kind(request):
    return request.param


@pytest.fixture
def server(request, kind):
    request.getfixturevalue(f"{kind}_database")
    return request.getfixturevalue(kind)


# PyMySQL leaves the socket of an attempt that failed to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["sync", "async"])
class TestBounds:
    @pytest.fixture(autouse=True)
    def _prepared(self, server, kind, settings, tmp_path_factory, way, request):
        self.server, self.way = server, way
        timeout = 4.0 if request.function.__name__ == "test_half_open" else 1.0
        folder = tmp_path_factory.mktemp("p")
        with behind_a_proxy(server, kind, folder, settings, timeout) as (self.proxy, self.leases):
            yield
        gc.collect()  # now, while it is expected

    def call(self):
        with Metronome() as metronome:
            calls = all_at_once(self.way, self.leases)
        allowed = GRACE + 2 * metronome.late
        assert {name: call.beyond for name, call in calls.items() if call.beyond > allowed} == {}
        return {name: call.answer for name, call in calls.items()}

    def all_fail(self):
        answers = self.call()
        [finding] = answers.pop("check")
        assert (finding.level, finding.about) == (Level.ERROR, "reachable")
        assert {name: answer for name, answer in answers.items() if not isinstance(answer, LockBackendError)} == {}

    def test_refused(self):
        self.proxy.refuse()
        self.all_fail()

    def test_stopped_with_connections(self):
        with Stopped(self.server.process):
            self.all_fail()

    def test_stopped_without(self):
        locks["default"].pool.close_idle()
        with Stopped(self.server.process):
            self.all_fail()

    def test_half_open(self):
        """Nothing comes back on the connections that are there; others are served."""
        backend = locks["default"]
        with ExitStack() as stack:  # an idle one for each call
            for _ in range(8):
                stack.enter_context(backend.pool.connection(4))
        assert len(open_connections(backend)) == 8
        self.proxy.silence()
        answers = self.call()
        for name in ("acquire 0", "acquire 1"):
            answers.pop(name)  # a busy machine may not connect anew in the half second that is left to them
        assert {name: answer for name, answer in answers.items() if isinstance(answer, Exception)} == {}


def test_a_pooler_that_is_there_while_its_server_is_not(postgres, postgres_database, settings):
    """It takes the connection and lets the first statement wait."""
    if (program := shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)) is None:
        missing("pgbouncer", "install the package pgbouncer")
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "pooled", "OPTIONS": {"timeout": 1.0}}}
    with Bouncer(program, postgres) as bouncer, known_database(bouncer.settings(), "pooled"):
        connections["pooled"].close()
        call = Called(2.0, locks["default"].check)
        with Stopped(postgres.process), Metronome() as metronome:
            thread = threading.Thread(target=call.run, daemon=True)
            thread.start()
            thread.join(6 * PATIENCE)
            assert not thread.is_alive()
        assert call.beyond < GRACE + 2 * metronome.late
        assert [finding.about for finding in call.answer] == ["reachable"]
        locks.close()


@pytest.mark.parametrize(
    ("within", "call"),
    [
        (1.0, lambda name: lock(name, wait=1).aacquire()),
        (2.0, lambda name: lock(name, wait=None).aacquire()),
        (2.0, lambda name: lock(name).alocked()),
    ],
    ids=["wait 1", "wait None", "locked"],
)
def test_more_tasks_than_threads(postgres, postgres_database, settings, tmp_path_factory, within, call):
    """Each ends in its own time, however many others ask a server that does not answer."""
    folder = tmp_path_factory.mktemp("p")

    async def main():
        calls = [Called(within, partial(call, f"name {number}")) for number in range(128)]
        with Stopped(postgres.process):
            await asyncio.wait_for(asyncio.gather(*(call.arun() for call in calls)), 6 * PATIENCE)
        return calls

    with behind_a_proxy(postgres, "postgres", folder, settings, 1.0) as (_, leases), Metronome() as metronome:
        leases[0].release()
        calls = asyncio.run(main())
        assert {type(call.answer) for call in calls} <= {LockBackendError, InDoubt}
        assert max(call.beyond for call in calls) < 1.0 + GRACE + 2 * metronome.late


def test_who_has_no_limit_waits_for_a_thread_while_the_database_answers(sqlite_database, settings):
    """For longer than others would."""
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "locks", "OPTIONS": {"timeout": 0.5}}}
    calls = locks["default"].calls
    assert not lock("name").locked()  # the file is there

    def slow(connection):
        time.sleep(0.2)
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            return cursor.fetchone()

    async def main():
        asked = [calls.in_thread(calls.run, slow, thread_timeout=inf) for _ in range(128)]
        return await asyncio.wait_for(asyncio.gather(*asked), 6 * PATIENCE)

    assert asyncio.run(main()) == [(1,)] * 128
    locks.close()


def test_what_is_given_up_leaves_no_thread_behind(postgres, postgres_database, settings):
    """Also not while the server is still away."""
    if (program := shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)) is None:
        missing("pgbouncer", "install the package pgbouncer")
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "pooled", "OPTIONS": {"timeout": 0.5}}}
    with Bouncer(program, postgres) as bouncer, known_database(bouncer.settings(), "pooled"):
        connections["pooled"].close()
        with Stopped(postgres.process):
            for _ in range(3):
                with pytest.raises(LockBackendError):
                    lock("name", wait=0).acquire()
            eventually(lambda: not [one for one in threading.enumerate() if "-connecting-" in one.name])
        locks.close()
