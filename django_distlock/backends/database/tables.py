"""Makes the tables of the locks by the app's migrations, for a lock that is needed before ``migrate`` has run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error, OperationalError, connections, router, transaction
from django.db.migrations.executor import MigrationExecutor

from ...exceptions import LockBackendError
from ...models import ROWS_OF_DATABASE_BACKEND, DatabaseLock
from .errors import final, lacks_migrations

TIMEOUT = 60  # seconds for another process to make them
ADVISORY_KEY = 0x646973746C6F636B  # of PostgreSQL, within one database: "distlock"


def make_missing_tables(location: str, error: LockBackendError) -> bool:
    """Make the tables that this version needs. Returns whether the call that failed so may be repeated.

    The migrations are recorded, so a later ``migrate`` finds them applied. Of several processes, one makes the tables
    and the others wait. Raises LockBackendError if this fails.

    ``location``: the alias in ``DATABASES``.
    """
    if not lacks_migrations(error.__cause__):
        return False
    if not all(router.allow_migrate_model(location, model) for model in ROWS_OF_DATABASE_BACKEND):
        return False  # the migrations would be recorded, but the tables not made
    connection = connections[location]
    was_open = connection.connection is not None
    try:
        with _EXCLUSIONS[connection.vendor](connection):
            executor = MigrationExecutor(connection)  # reads what others have applied so far
            executor.migrate(executor.loader.graph.leaf_nodes(DatabaseLock._meta.app_label))
    except Error as problem:
        raise final(f"The tables of the locks cannot be made in the database {location!r}: {problem}") from problem
    finally:
        if not was_open:
            connection.close()
    return True


@contextmanager
def _postgresql(connection: Any) -> Iterator[None]:
    """Lasts until COMMIT: so the session is the same behind a pooler, and all tables are made or none."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        # Whatever the role has set: after the wait, we must see what others have committed.
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET LOCAL lock_timeout = '{TIMEOUT}s'")
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [ADVISORY_KEY])
        yield


@contextmanager
def _mysql(connection: Any) -> Iterator[None]:
    """Lasts until it is released, because each statement that makes a table commits."""
    name = mysql_lock_name(connection.settings_dict["NAME"])
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK(%s, %s)", [name, TIMEOUT])
        if cursor.fetchone() != (1,):
            raise OperationalError(f"another process has made them for longer than {TIMEOUT} s")
        try:
            yield
        finally:
            cursor.execute("SELECT RELEASE_LOCK(%s)", [name])
            cursor.fetchone()


def mysql_lock_name(database: str) -> str:
    """At most 64 characters. It names the database, because such locks are shared by a whole server."""
    return f"distlock:{hashlib.sha256(database.encode()).hexdigest()[:32]}"


_EXCLUSIONS = {"postgresql": _postgresql, "mysql": _mysql}  # the process that opens the file of SQLite makes its tables
