"""Errors of databases: what may pass by itself is waited for, what somebody has to correct is told at once."""

from __future__ import annotations

import errno
import gc
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, InterfaceError, OperationalError, ProgrammingError, connections

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.common.attempts import InDoubt
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database import errors
from django_distlock.models import DatabaseLock
from django_distlock.testing.tools import WAYS, calling
from tests.support.databases import ALIAS, is_run, known_wrong, through, write
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, eventually, lock_request, renewer_of

pytestmark = pytest.mark.once

TABLE = DatabaseLock._meta.db_table

POSTGRES = {
    "08006": False, "22001": True, "25006": False, "26000": False, "28000": True, "28P01": True, "3D000": True,
    "3F000": True, "40001": False, "40P01": False, "42501": True, "42703": True, "42883": True, "42P01": True,
    "42P05": False, "53100": False, "53200": False, "53300": False, "55P03": False, "57014": False, "57P01": False,
    "57P03": False, "58030": False,
}  # fmt: skip
MYSQL = {
    1020: False, 1040: False, 1044: True, 1045: True, 1049: True, 1054: True, 1130: True, 1142: True, 1146: True,
    1203: False, 1205: False, 1213: False, 1226: False, 1290: False, 1406: True, 1836: False, 1927: False, 2002: False,
    2003: False, 2006: False, 2013: False, 2059: True,
}  # fmt: skip
SQLITE = {
    sqlite3.SQLITE_BUSY: False, sqlite3.SQLITE_LOCKED: False, sqlite3.SQLITE_FULL: False, sqlite3.SQLITE_IOERR: False,
    sqlite3.SQLITE_BUSY_SNAPSHOT: False, sqlite3.SQLITE_CANTOPEN: False, sqlite3.SQLITE_READONLY: True,
    sqlite3.SQLITE_READONLY_DIRECTORY: True, sqlite3.SQLITE_READONLY_DBMOVED: False, sqlite3.SQLITE_NOTADB: True,
    sqlite3.SQLITE_CORRUPT: True, sqlite3.SQLITE_ERROR: True,
}  # fmt: skip
ON_DISK = {
    errno.EACCES: True, errno.ENOENT: True, errno.EROFS: True, errno.EMFILE: False, errno.ENOSPC: False,
    errno.EIO: False,
}  # fmt: skip
SAID = {
    'connection failed: FATAL:  password authentication failed for user "shop"': True,
    'connection failed: FATAL:  role "shop" is not permitted to log in': True,
    'connection failed: FATAL:  permission denied for database "shop"': True,
    "connection failed: FATAL:  no pg_hba.conf entry for host": True,
    "connection failed: FATAL:  sorry, too many clients already": False,
    "connection failed: FATAL:  remaining connection slots are reserved": False,
    "connection failed: FATAL:  the database system is starting up": False,
    'connection to server on socket "/s" failed: No such file or directory': False,
    'connection to server at "certificate.example" failed: Connection refused': False,
    "failed to resolve host 'db': [Errno -2] Name or service not known": False,
    "server closed the connection unexpectedly": False,
    "no connection within 2.0 s": False,
}


def raised(error, cause):
    error.__cause__ = cause
    return error


class TestKinds:
    @pytest.mark.parametrize("state", POSTGRES)
    def test_of_postgres(self, state):
        cause = psycopg.errors.lookup(state)("text")
        assert errors.is_final(raised(OperationalError("text"), cause)) is POSTGRES[state]
        assert errors.is_final(raised(ProgrammingError("text"), cause)) is POSTGRES[state]

    @pytest.mark.parametrize("number", MYSQL)
    def test_of_mysql(self, number):
        assert errors.is_final(OperationalError(number, "text")) is MYSQL[number]
        assert errors.is_final(ProgrammingError(number, "text")) is MYSQL[number]

    @pytest.mark.parametrize("code", SQLITE)
    def test_of_sqlite(self, code):
        cause = sqlite3.OperationalError("text")
        cause.sqlite_errorcode = code
        assert errors.is_final(raised(OperationalError("text"), cause)) is SQLITE[code]

    @pytest.mark.parametrize("number", ON_DISK)
    def test_of_the_system(self, number):
        assert errors.is_final(OSError(number, "text")) is ON_DISK[number]

    @pytest.mark.parametrize("text", SAID)
    def test_of_who_may_not_connect(self, text):
        assert errors.is_final(raised(OperationalError(text), psycopg.OperationalError(text))) is SAID[text]

    def test_of_settings_and_values(self):
        assert all(
            errors.is_final(kind("text")) for kind in (ImproperlyConfigured, TypeError, ProgrammingError, DataError)
        )
        assert not errors.is_final(InterfaceError("text"))


def run(sql):
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(sql)


@contextmanager
def without_its_table(backend):
    run(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
    try:
        yield
    finally:
        run(f"ALTER TABLE elsewhere RENAME TO {TABLE}")


@contextmanager
def without_its_rights(backend):
    """All of whoever logs in by that role."""
    run("ALTER ROLE shop NOSUPERUSER")
    try:
        yield
    finally:
        run("ALTER ROLE shop SUPERUSER")


@contextmanager
def unreadable_row(backend):
    write(backend, "name", "waiters", "x" * 70)
    try:
        yield
    finally:
        eventually(lambda: is_run(backend, f"DELETE FROM {TABLE}"))


@pytest.fixture
def role_of_its_own(postgres_database, settings):
    """``locks["default"]`` logs in by a role that has all rights yet."""
    run("DROP ROLE IF EXISTS shop")
    run("CREATE ROLE shop SUPERUSER LOGIN")
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "shop"}}
    with known_wrong({**postgres_database, "USER": "shop"}, "shop"):
        yield locks["default"]
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
        locks.close()
    run("DROP ROLE shop")


@pytest.fixture
def backend(request):
    return request.getfixturevalue({"role": "role_of_its_own"}.get(request.param, f"{request.param}_locks"))


def told(way, wait):
    """Of who waits for the lock: what it is told, in the end."""
    errors = []

    def acquire():
        with calling(way) as calls:
            handle = calls(lock("name", wait=wait))
            try:
                handle.acquire()
                handle.release()
            except LockBackendError as error:
                errors.append(error)

    thread = threading.Thread(target=acquire, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("postgres", without_its_table), ("mariadb", without_its_table), ("role", without_its_rights),
        ("postgres", unreadable_row), ("mariadb", unreadable_row), ("sqlite", unreadable_row),
    ],
    indirect=["backend"],
)  # fmt: skip
def test_who_waits_is_told_at_once_of_what_somebody_has_to_correct(backend, fault, way):
    holder = lock_request(ttl=600)
    backend.acquire(holder, queue=False)
    thread, errors = told(way, wait=None)
    eventually(lambda: backend.count_waiters(["name"]) == [1])
    with fault(backend):
        thread.join(6 * PATIENCE)
        assert not thread.is_alive()
        with pytest.raises(LockBackendError) as caught:
            lock("name", wait=6 * PATIENCE).acquire()
    assert [error.is_final for error in [*errors, caught.value]] == [True, True]


@pytest.mark.parametrize(
    "wrong",
    [{"NAME": "nowhere"}, {"USER": "nobody"}, {"USER": "locked_out"}, {"OPTIONS": {"nonsense": 1}}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_of_postgres_that_are_wrong(postgres_database, settings, wrong):
    run("DROP ROLE IF EXISTS locked_out")
    run("CREATE ROLE locked_out NOLOGIN")
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "wrong"}}
    with known_wrong({**postgres_database, **wrong}), pytest.raises(LockBackendError) as caught:
        locks["default"].look(["name"])
    assert caught.value.is_final
    locks.close()


def test_settings_of_mariadb_that_are_wrong(mariadb_database, settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "wrong"}}
    with known_wrong({**mariadb_database, "NAME": "nowhere"}), pytest.raises(LockBackendError) as caught:
        locks["default"].look(["name"])
    assert caught.value.is_final
    locks.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("elsewhere"), "is a symbolic link"),
        (lambda path: path.write_text("x" * 4096), "file is not a database"),
        (lambda path: path.mkdir(), "unable to open"),
    ],
    ids=["link", "text", "folder"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Django leaves a connection unclosed
def test_something_else_in_the_place_of_the_file_of_locks(sqlite_locks, make, says):
    make(Path(sqlite_locks.pool.file))
    with pytest.raises(LockBackendError, match=says) as caught:
        locks["default"].look(["name"])
    assert caught.value.is_final is (says != "unable to open")  # as it also is where no descriptor is left
    del caught
    gc.collect()  # what Django has left, here


def test_who_waits_outlasts_a_server_that_is_away(postgres, postgres_database, settings, tmp_path_factory, caplog):
    with through(postgres, tmp_path_factory.mktemp("p"), settings) as proxy:
        holder = lock_request(ttl=600)
        locks["direct"].acquire(holder, queue=False)
        thread, errors = told("sync", wait=None)
        eventually(lambda: locks["direct"].count_waiters(["name"]) == [1])
        proxy.refuse()
        eventually(lambda: "continues to wait" in caplog.text, 6 * PATIENCE)
        proxy.accept()
        locks["direct"].release(holder)
        thread.join(6 * PATIENCE)
        assert not thread.is_alive()
    assert errors == []


def test_an_answer_that_was_lost_hides_no_final_error(proxy_to_postgres):
    """The connection breaks, and the next one is refused for good."""
    proxy, backend = proxy_to_postgres
    backend.look(["name"])
    proxy.cut_reply("distlock_lock")
    with without_its_table(backend), pytest.raises(LockBackendError) as caught:
        backend.look(["name"])
    assert isinstance(caught.value, InDoubt)
    assert caught.value.is_final


@pytest.fixture
def proxy_to_postgres(postgres, postgres_database, settings, tmp_path_factory):
    with through(postgres, tmp_path_factory.mktemp("p"), settings, 6 * PATIENCE) as proxy:
        yield proxy, locks["default"]


def test_a_file_that_another_process_writes_to_may_become_free(sqlite_database, settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": ALIAS, "OPTIONS": {"timeout": 0.2}}}
    pool = locks["default"].pool
    with pool.connection(1) as writer:
        writer.connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(LockBackendError) as caught:
            lock("name", wait=Timing.look_interval).acquire()
        writer.connection.execute("ROLLBACK")
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    locks.close()
    assert not caught.value.is_final


def test_what_a_handler_of_a_signal_raises_while_a_connection_is_opened_is_no_error_of_the_database(
    sqlite_locks, monkeypatch
):
    class TimeLimit(Exception):
        pass

    def interrupted(*_):
        raise TimeLimit

    sqlite_locks.pool.close_idle()
    monkeypatch.setattr("django_distlock.backends.database.connections.make_file", interrupted)
    with pytest.raises(TimeLimit):
        locks["default"].look(["name"])
