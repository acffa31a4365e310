"""Databases that tests add to DATABASES while they run, and what tests do to those with locks in them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from django.conf import settings
from django.core.management.commands import flush
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test.utils import setup_databases

from django_distlock import LockError, lock, locks
from django_distlock.backends.database.fast_path import FastPath, has_returning
from django_distlock.backends.database.operations import Operations
from django_distlock.backends.database.sql import Statements
from django_distlock.models import ROWS_OF_DATABASE_BACKEND, DatabaseLock
from tests.support.proxy import Proxy
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, eventually, renewer_of

ALIAS = "locks"
TABLE = DatabaseLock._meta.db_table


_kept: dict[str, BaseDatabaseWrapper] = {}  # connections that wait for the next test, by the host of their server


@contextmanager
def known_database(settings: dict[str, Any], alias: str = ALIAS, *, keeps: bool = False) -> Iterator[None]:
    """The alias leads there; on a server the tables of the locks are there, and empty.

    ``keeps``: the connection is kept for the next test. A new one costs PostgreSQL 13 ms of a processor.
    """
    known = connections.configure_settings({"default": {}, alias: dict(settings)})[alias]
    connections.settings[alias] = known
    as_given = deepcopy(known)
    if keeps and (kept := _kept.pop(known["HOST"], None)) and _is_as_new(kept):
        kept.settings_dict, kept.close_at = known, None
        connections[alias] = kept
    try:
        connection = connections[alias]
        if connection.vendor != "sqlite":
            make_tables(connection)
        yield
    finally:
        connection = connections[alias]
        if keeps and connection.connection and connection.autocommit and known == as_given:
            _kept[known["HOST"]] = connection
        else:
            raw = connection.connection
            connection.close()
            if raw is not None and connection.vendor == "sqlite":
                raw.close()  # Django keeps a database in memory open
        del connections[alias]
        del connections.settings[alias]


def _is_as_new(kept: BaseDatabaseWrapper) -> bool:
    """Ends what the test before left open. Returns False, and closes it, if that test ended the session."""
    try:
        with kept.cursor() as cursor:
            cursor.execute("ROLLBACK")
    except DatabaseError:
        kept.close()
        return False
    return True


def make_tables(connection: Any) -> None:
    there = connection.introspection.table_names()
    with connection.schema_editor() as editor:
        for model in ROWS_OF_DATABASE_BACKEND:
            if model._meta.db_table in there:
                editor.execute(f"DELETE FROM {model._meta.db_table}")
            else:
                editor.create_model(model)


@cache
def make_databases(blocker: Any) -> dict[str, dict[str, list[Any]]]:
    """Make the databases of the settings in memory, once: processes that are forked later have them.

    Returns all rows as they were then, by alias and table. pytest-django would make them in each process, for a quarter
    of a second each.
    """
    with blocker.unblock():
        setup_databases(verbosity=0, interactive=False, aliases=settings.DATABASES, serialized_aliases=())
        for alias in settings.DATABASES:  # checks of Django want to know it, also in tests without this database
            assert connections[alias].features.supports_json_field
        return {alias: _rows(connections[alias]) for alias in settings.DATABASES}


@contextmanager
def quick_flushes(kept: dict[str, dict[str, list[Any]]]) -> Iterator[None]:
    """A test that commits ends with a flush, which makes content types and permissions anew: here they are put back."""
    from django.contrib.contenttypes.models import ContentType  # the programs of some tests have no such app

    def put_back(verbosity: int, interactive: bool, db: str, **_: object) -> None:
        with transaction.atomic(db), connections[db].cursor() as cursor:  # whatever refers to what
            for table, rows in kept[db].items():
                cursor.executemany(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(rows[0]))})", rows)
        ContentType.objects.clear_cache()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush, "emit_post_migrate_signal", put_back)
        yield


def _rows(connection: Any) -> dict[str, list[Any]]:
    """By table that has some."""
    found = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.django_table_names(only_existing=True, include_views=False):
            cursor.execute(f"SELECT * FROM {table}")
            if rows := cursor.fetchall():
                found[table] = rows
    return found


@contextmanager
def through(postgres, folder, settings, timeout=0.5):
    """``locks["default"]`` reaches PostgreSQL through a proxy."""
    proxy = Proxy(postgres.folder / ".s.PGSQL.5432", folder)
    proxy.socket = folder / ".s.PGSQL.5432"
    database = {**postgres.settings(), "HOST": str(folder)}
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": DATABASE, "LOCATION": "proxied", "OPTIONS": {"timeout": timeout}},
        "direct": {"BACKEND": DATABASE, "LOCATION": ALIAS},
    }
    with proxy, known_database(database, "proxied"):
        connections["proxied"].close()
        yield proxy
        proxy.hang = False
        proxy.accept()
        renewer = renewer_of(locks["default"])
        eventually(lambda: not renewer.is_cleaning)
        locks.close()


@contextmanager
def known_wrong(database, alias="wrong"):
    """The alias leads nowhere, or to somebody who may not make the table."""
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: database})[alias]
    yield
    del connections.settings[alias]


OF_OTHERS = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"


def sessions(application=""):
    """The processes of the server of PostgreSQL, but for the one that tells it. ``application``: of that name alone."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"SELECT pid {OF_OTHERS} AND application_name LIKE %s", [application or "%"])
        return [pid for (pid,) in cursor.fetchall()]


def end_sessions():
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"SELECT pg_terminate_backend(pid) {OF_OTHERS}")


def waiting(backend, name="name"):
    """How many processes (here: backends) have a place in the queue."""
    return backend.count_waiters([name])[0]


def run_in(backend, work):
    """Work on a connection of the backend."""
    return backend.calls.run(work)


def row_key(backend, name):
    return f"{backend.prefix}:{name}".encode()


def statements_for(backend):
    return Statements(backend.vendor, backend.timing, has_returning=has_returning(backend.vendor))


def operations_for(backend):
    return Operations(backend.vendor, statements_for(backend), PATIENCE, backend.timing)


def fast_path_for(backend):
    return FastPath(backend.vendor, backend.timing) if has_returning(backend.vendor) else None


def open_connections(backend, but=()):
    """Those of the locks that are open, in use or idle. ``but``: of earlier tests, and not closed yet."""
    known = set(map(id, but))
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), BaseDatabaseWrapper)]
    ours = [one for one in wrappers if one.alias == backend.location and hasattr(one, "watched") and one.connection]
    return [one for one in ours if id(one) not in known]


class Waiter:
    """A thread that waits for a lock and keeps it until told."""

    def __init__(self, name="name", wait=PATIENCE, using="default"):
        self.got_in = threading.Event()
        self.leave = threading.Event()
        self.at = 0.0
        self._error = None  # kept, because raised in the thread that a failed test leaves it would fail the next test
        self._thread = threading.Thread(target=self._run, args=(name, wait, using))
        self._thread.start()

    def _run(self, name, wait, using):
        try:
            with lock(name, wait=wait, ttl=60, using=using):
                self.at = time.monotonic()
                self.got_in.set()
                self.leave.wait(PATIENCE)
        except LockError as error:
            self._error = error

    def end(self):
        self.leave.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error


def write(backend, name, column, text):
    statement = f"UPDATE {TABLE} SET {column} = %s, careful_until = {2**62} WHERE name = %s"
    eventually(lambda: is_run(backend, statement, text, row_key(backend, name)))


def is_run(backend, statement, *arguments):
    """False: who waits had a file locked."""
    try:
        with backend.pool.connection(PATIENCE) as connection, connection.cursor() as cursor:
            binary = connection.Database.Binary
            cursor.execute(statement, [binary(each) if isinstance(each, bytes) else each for each in arguments])
    except OperationalError as error:
        if "locked" not in str(error):
            raise
        return False
    return True
