"""Processes that fork while they have connections of locks: what SQLite knows of its files does not survive that."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from django_distlock import lock, locks
from django_distlock.backends.database.connections import Pool
from django_distlock.backends.database.sqlite import TemporaryFile
from tests.support.databases import open_connections
from tests.support.programs import FORKS, in_a_fork
from tests.support.tools import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Child:
    """A forked process that does the steps of a generator, one each time that it is told to."""

    def __init__(self, steps):
        told, self._tell = os.pipe()
        hear, answer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._tell)
            os.close(hear)
            try:
                for said in steps():
                    os.write(answer, f"{said}\n".encode())
                    os.read(told, 1)
            finally:
                os._exit(0)
        os.close(told)
        os.close(answer)
        self._lines = os.fdopen(hear)

    def hear(self):
        return self._lines.readline().strip()

    def go_on(self):
        os.write(self._tell, b".")

    def end(self):
        os.close(self._tell)
        self._lines.close()
        os.waitpid(self.pid, 0)


def open_files():
    return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]


async def forked_in_a_coroutine(steps):
    async with lock("used by the loop before the fork"):
        pass
    return Child(steps)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_child_and_others_exclude_each_other_after_its_parent_has_closed_the_file(sqlite_locks, way):
    """The last process to close the file deletes its log. That must not be one that the child still writes to."""
    with lock("used before the fork"):
        pass

    def steps():
        yield locks["default"].look(["name"])
        yield lock("name", ttl=60).acquire()

    with ExitStack() as stack:
        child = asyncio.run(forked_in_a_coroutine(steps)) if way == "async" else Child(steps)
        stack.callback(child.end)
        assert child.hear() == "[[]]"
        locks.close()
        with lock("another"):
            pass
        locks.close()
        child.go_on()
        assert child.hear() == "True"
        assert lock("name", wait=0).acquire() is False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_threads_that_lock_meanwhile_leave_nothing_open_in_the_child(sqlite_locks):
    done = threading.Event()

    def churn(name):
        while not done.is_set():
            with lock(name):
                pass

    def work():
        inherited = [file for file in open_files() if file.startswith(sqlite_locks.pool.file)]
        return inherited, lock(f"of {os.getpid()}", wait=0).acquire()

    threads = [threading.Thread(target=churn, args=(f"{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_a_fork(work) == "([], True)"
    finally:
        done.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_child_that_was_forked_inside_a_call_says_that_it_cannot_lock(sqlite_locks, monkeypatch):
    """By a handler of a signal, say. The parent goes on."""
    with sqlite_locks.pool.connection(PATIENCE), monkeypatch.context() as patched:
        for pool in [one for one in gc.get_objects() if type(one) is Pool]:  # a fork waits for the slowest of them
            patched.setattr(pool, "timeout", 0.1)
        answer = in_a_fork(lambda: lock("name").acquire())
    assert "LockBackendError" in answer
    assert "was forked while a lock" in answer
    with lock("name", wait=0):
        assert in_a_fork(lambda: lock("another", wait=0).acquire()) == "True"


@pytest.mark.parametrize("kind", FORKS)
def test_a_child_removes_no_file_of_its_parent(kind):
    """The locks of a database in memory are in a file of the process. What removes it is called at the exit, too."""
    file = TemporaryFile()
    folder = Path(file.name).parent
    assert in_a_fork(file.remove, FORKS[kind]) == "None"
    assert folder.exists()
    file.remove()
    assert not folder.exists()


@pytest.mark.parametrize("kind", FORKS)
@pytest.mark.parametrize("close", ["close_idle", "close_old"])
def test_a_child_closes_no_connection_of_its_parent(postgres_locks, close, kind):
    """As the first request that it serves would."""
    pool = postgres_locks.pool
    pool.timing.database_idle_kept = 0.0  # it is idle for too long

    def session():
        with pool.connection(10) as wrapper:
            with wrapper.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                return cursor.fetchone()

    before = session()
    assert in_a_fork(getattr(pool, close), FORKS[kind]) == "None"
    pool.timing.database_idle_kept = 60.0  # now it may be used
    assert session() == before


def test_a_child_begins_anew_though_its_parents_connection_was_closed_by_its_driver(postgres_locks, monkeypatch):
    """Which then has no descriptor, and says so with an error."""
    failures = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: failures.append(repr(failure.exc_value)))
    postgres_locks.look(["name"])
    for wrapper in open_connections(postgres_locks):
        wrapper.connection.close()
    assert in_a_fork(lambda: (failures, postgres_locks.look(["name"]))) == "([], [[]])"
