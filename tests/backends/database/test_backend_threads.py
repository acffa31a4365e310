"""The threads of the database backend: the one that listens, and the one that ends calls that take too long."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from django.db import connections

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database import notify
from django_distlock.backends.database.watchdog import Watchdog
from tests.support.databases import Waiter, known_database, through
from tests.support.inside import calls_watched_of, listener_of
from tests.support.postgres import PLACES_OF_BOUNCER, Bouncer
from tests.support.programs import in_a_fork
from tests.support.requirements import missing
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.seconds(2)]

PROLOGUE = f"""
import atexit, json, sys, threading, time
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_distlock"],
    DATABASES={{"default": {{**json.loads(sys.argv[1]), "CONN_MAX_AGE": None}}}},
    DISTRIBUTED_LOCKS={{
        "default": {{"BACKEND": {DATABASE!r}, "LOCATION": "default", "OPTIONS": {{"timeout": {PATIENCE}}}}}
    }},
)
import django; django.setup()
"""


@pytest.fixture
def program(postgres_database):
    """Runs Python programs whose locks are in PostgreSQL, to their end. What they say on stdout and stderr."""

    def run(before, code):
        """``before``: what is done before anything is imported."""
        done = subprocess.run(
            [sys.executable, "-c", before + PROLOGUE + code, json.dumps(postgres_database)],
            capture_output=True,
            text=True,
            check=True,
            timeout=6 * PATIENCE,
        )
        return done.stdout, done.stderr

    return run


@contextmanager
def bouncer(postgres, settings, mode, **more):
    """``locks["default"]`` leads through pgbouncer."""
    if (program := shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)) is None:
        missing("pgbouncer", "install the package pgbouncer")
    with Bouncer(program, postgres, mode, **more) as bouncer, known_database(bouncer.settings(), "pooled"):
        connections["pooled"].close()
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "pooled"}}
        yield bouncer
        locks.close()


def channels_of_sessions(count):
    """What each session of the server listens to, of so many that the pooler has at most."""
    found = []
    wrappers = [connections["pooled"].copy() for _ in range(count)]
    for wrapper in wrappers:
        wrapper.inc_thread_sharing()
        wrapper.set_autocommit(False)  # keeps the session
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT pg_listening_channels()")
            found += cursor.fetchall()
    for wrapper in wrappers:
        wrapper.rollback()
        wrapper.close()
    return found


class TestListener:
    def test_in_a_process_with_very_many_open_files(self, postgres_locks):
        """As servers have that keep a connection to each client."""
        resource = pytest.importorskip("resource")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
        files = [os.open(os.devnull, os.O_RDONLY)]
        try:
            while files[-1] < 1100:
                files.append(os.dup(files[0]))
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: listener_of(postgres_locks).is_ready)
            waiter.end()
        finally:
            for file in files:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_whatever_goes_wrong_in_it_is_logged_and_it_listens_again(self, postgres_locks, monkeypatch, caplog):
        failures, read = [ValueError("something new")], listener_of(postgres_locks).read

        def failing(*arguments):
            if failures:
                raise failures.pop()
            read(*arguments)

        monkeypatch.setattr(listener_of(postgres_locks), "read", failing)
        with lock("name", ttl=60):
            waiter = Waiter()
            eventually(lambda: listener_of(postgres_locks).is_ready)
        waiter.end()
        assert "The work of distlock-listener-default failed, and it tries again" in caplog.text
        assert "something new" in caplog.text

    def test_one_that_was_ended_listens_for_the_next_waiter(self, postgres_locks, monkeypatch, caplog):
        class Ended(BaseException):
            pass

        def end(*_):
            raise Ended

        with monkeypatch.context() as patched:
            patched.setattr(listener_of(postgres_locks), "connect", end)
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: "The work of distlock-listener-default failed" in caplog.text)
            waiter.end()
        with lock("name", ttl=60):
            waiter = Waiter()
            eventually(lambda: listener_of(postgres_locks).is_ready)
        waiter.end()

    def test_a_process_that_has_waited_exits_without_a_word(self, program):
        """Its listener is there until the very end."""
        slowly = f"import atexit, time; atexit.register(time.sleep, {Timing.listener_nap + 0.5})\n"
        code = (
            "from django_distlock import lock, locks\n"
            "from django_distlock.testing.tools import lock_request\n"
            "locks['default'].acquire(lock_request('name', ttl=1), queue=False)\n"
            "with lock('name', wait=60): pass\n"
            "from django.db import connection\n"
            "def listens():\n"
            "    with connection.cursor() as cursor:\n"
            "        cursor.execute('SELECT 1 FROM pg_stat_activity WHERE query LIKE %s', ['LISTEN%'])\n"
            "        return cursor.fetchone()\n"
            "while not listens(): time.sleep(0.01)\n"
            "connection.close()\n"
        )
        assert program(slowly, code) == ("", "")

    def test_nothing_listens_in_the_sessions_of_a_pooler_in_transaction_mode(
        self, postgres, postgres_database, settings, caplog
    ):
        """Others have these sessions afterwards, and each notification would wake them."""
        with bouncer(postgres, settings, "transaction"):
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: "LOCATION that leads directly to the server" in caplog.text)
            waiter.end()
            assert channels_of_sessions(3) == []

    def test_a_pooler_that_gives_its_sessions_in_turn_is_noticed_before_one_listens(
        self, postgres, postgres_database, settings, caplog
    ):
        """Every second statement is in the same one of two sessions."""
        with bouncer(postgres, settings, "transaction", sessions=2, in_turn=True):
            assert channels_of_sessions(2) == []  # both are there
            listener_of(locks["default"]).touch()  # without a waiter, who would use the sessions, too
            eventually(lambda: "LOCATION that leads directly to the server" in caplog.text)
            assert channels_of_sessions(2) == []

    def test_a_pooler_that_keeps_sessions_may_be_slow(self, postgres, postgres_database, settings, monkeypatch):
        """Each check of it has two seconds, however many there are."""
        session_of = notify.session_of
        monkeypatch.setattr(notify, "session_of", lambda cursor: time.sleep(0.25) or session_of(cursor))
        with bouncer(postgres, settings, "session"):
            listener = listener_of(locks["default"])
            listener.touch()
            eventually(lambda: listener.is_ready)

    def test_behind_a_pooler_in_session_mode_they_are_woken(self, postgres, postgres_database, settings):
        with bouncer(postgres, settings, "session"):
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: listener_of(locks["default"]).is_ready)
            waiter.end()

    def test_a_pooler_is_told_of_once(self, postgres, postgres_database, settings, monkeypatch, caplog):
        tried, connect = [], notify.PostgresListener.connect

        def noted(listener):
            tried.append(listener)
            return connect(listener)

        monkeypatch.setattr(Timing, "deaf_for", 0.0)
        monkeypatch.setattr(notify.PostgresListener, "connect", noted)
        with bouncer(postgres, settings, "transaction"):
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: len(tried) > 3)
            waiter.end()
        assert caplog.text.count("LOCATION that leads directly to the server") == 1


@pytest.fixture
def no_watchdog_once(monkeypatch):
    """The next thread that would watch cannot be started, as at the limit of a container."""
    start, failures = threading.Thread.start, []

    def may_fail(thread):
        if thread.name.startswith("distlock-watchdog") and not failures:
            failures.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_fail)
    return failures


class TestWatchdog:
    def test_one_that_could_once_not_be_started_is_by_the_next_call(
        self, no_watchdog_once, postgres, postgres_database, settings, tmp_path_factory
    ):
        answers = []

        def ask():
            try:
                locks["default"].look(["name"])
            except LockBackendError as error:
                answers.append(error)

        with through(postgres, tmp_path_factory.mktemp("p"), settings) as proxy:
            assert locks["default"].look(["name"]) == [[]]
            assert len(no_watchdog_once) == 1
            assert calls_watched_of(locks["default"].pool) == {}
            assert locks["default"].look(["name"]) == [[]]
            proxy.hang = True
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(6 * PATIENCE)
            assert not asking.is_alive()
        assert len(answers) == 1

    def test_at_exit_a_lock_is_freed_though_no_thread_can_be_started(self, program, postgres_locks):
        """Some releases of Python 3.12 start none when the interpreter exits."""
        code = (
            "from django_distlock import lock\n"
            "from django_distlock.utils.threads import Worker\n"
            "Worker.idle_timeout = 0.1\n"
            "handle = lock('name', ttl=60); handle.acquire()\n"
            "while any('watchdog' in thread.name for thread in threading.enumerate()): time.sleep(0.01)\n"
            'def start(thread): raise RuntimeError("can\'t create new thread at interpreter shutdown")\n'
            "atexit.register(lambda: setattr(threading.Thread, 'start', start))\n"
        )
        assert program("", code) == ("", "")
        assert postgres_locks.look(["name"]) == [[]]


def test_statements_are_not_kept_for_debugging(postgres_locks, settings):
    """Django forgets those of its own connections with each request."""
    settings.DEBUG = True
    with lock("name"):
        pass
    with postgres_locks.pool.connection(PATIENCE) as wrapper:
        pass
    assert wrapper.queries_logged
    assert len(wrapper.queries_log) == 0


def test_under_gevent_leases_are_renewed_while_another_greenlet_runs_an_event_loop(program, postgres_locks):
    """Which asyncio then tells of all greenlets of that thread."""
    pytest.importorskip("gevent")
    code = (
        "import asyncio, gevent, logging\n"
        "from django_distlock import lock, locks\n"
        "logging.getLogger('django_distlock').setLevel(logging.ERROR)  # a busy machine renews slowly\n"
        "async def main():\n"
        "    async with lock('of a task'):\n"
        "        await asyncio.sleep(0.1)\n"
        "    await asyncio.sleep(5)\n"
        "with lock('name', ttl=4) as lease:\n"
        "    loop = gevent.spawn(asyncio.run, main())\n"
        "    while not loop.dead:\n"
        "        gevent.sleep(0.05)\n"
        "    print(lease.state, loop.exception, flush=True)\n"
    )
    assert program("from gevent import monkey; monkey.patch_all()\n", code) == ("held None\n", "")


def test_a_call_is_ended_where_no_descriptor_is_left():
    def work():
        ours, _theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        watchdog, taken = Watchdog("test"), []
        with watchdog.watching(ours.fileno, 60):
            pass  # its thread runs
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with watchdog.watching(ours.fileno, 0.1):
            return ours.recv(1)

    assert in_a_fork(work) == "b''"
