"""The meaning of a database's errors: whether to try again, whether they are final, and what to do about them."""

from __future__ import annotations

import errno
import sqlite3

from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, Error, NotSupportedError, ProgrammingError

from ...exceptions import LockBackendError
from ...models import ROWS_OF_DATABASE_BACKEND
from ..base import BaseLockBackend
from .sqlite import databases_in

TABLES = [model._meta.db_table for model in ROWS_OF_DATABASE_BACKEND]


class ConnectionBroken(Exception):
    """The connection broke while a statement was on its way."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RowChanged(Exception):
    """Another process changed the row between two statements."""


def is_row_changed(error: Exception) -> bool:
    return isinstance(error, RowChanged)


# Final errors: somebody has to correct a right, a password, a table, a setting or a stored value.

_FINAL_STATES = ("22", "28", "3D", "3F", "42")  # classes of SQLSTATE
_PREPARED_ELSEWHERE = ("26000", "42P05")

_FINAL_NUMBERS = {
    1044, 1045, 1698, 1227, 1370, 1142, 1143, 1130, 1129, 1820, 1862, 3118, 4151, 3159,  # the user has no access
    1251, 2054, 2059, 2061,  # client and server have no common method to log in
    1046, 1049, 1054, 1064, 1146, 1305,  # no such database, column, statement, table, function
    1264, 1292, 1366, 1406,  # values
}  # fmt: skip

_FINAL_CODES = {
    sqlite3.SQLITE_ERROR,  # for example a missing column
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH,
}  # fmt: skip
_TRANSIENT_CODES = {sqlite3.SQLITE_READONLY_RECOVERY, sqlite3.SQLITE_READONLY_DBMOVED}

_FINAL_ON_DISK = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}

# If a connection is refused, PostgreSQL and libpq give a text and no code.
_REFUSED_CONNECTION = (
    "authentication failed", "does not exist", "pg_hba.conf", "no password supplied", "permission denied for database",
    "is not permitted to log in", "does not support SSL", "certificate verify failed", "certificate file",
    "invalid connection option", "invalid port number", "no such database", "no such user",
)  # fmt: skip

_FINAL_CLASSES = (ProgrammingError, DataError, NotSupportedError, ImproperlyConfigured, TypeError, ValueError)

_LOST = {2006, 2013, 2055, 1927, 4031}  # the connection is gone, killed, or was idle for too long
_ROLLED_BACK = {1213, 1020}  # a deadlock; a row that another one has changed, if innodb_snapshot_isolation is on


def is_final(error: BaseException) -> bool:
    """Whether neither another connection nor time (a restart, a failover, less load) helps.

    The SQLSTATE of PostgreSQL, the number of MySQL or the code of SQLite decides.
    """
    if state := _sqlstate(error):
        return state.startswith(_FINAL_STATES) and state not in _PREPARED_ELSEWHERE
    if number := _number(error):
        return number in _FINAL_NUMBERS
    if (code := _sqlite_code(error)) is not None:
        if "no such table" in str(error):
            return False  # the next connection makes it
        return code & 0xFF in _FINAL_CODES and code not in _TRANSIENT_CODES
    if isinstance(error, OSError):
        return error.errno in _FINAL_ON_DISK
    if isinstance(error, _FINAL_CLASSES):
        return True
    return isinstance(error, Error) and any(text in str(error) for text in _REFUSED_CONNECTION)


def is_rolled_back(error: Exception) -> bool:
    """Whether the database rolled the statement back in favour of others.

    Reasons: a deadlock, an isolation above READ COMMITTED, another process that writes to the file of SQLite.
    """
    if (code := _sqlite_code(error)) is not None:
        return code & 0xFF == sqlite3.SQLITE_BUSY
    return _sqlstate(error) in ("40001", "40P01") or _number(error) in _ROLLED_BACK


def is_of_another_session(error: Exception) -> bool:
    """Whether the statement was prepared in another session of PostgreSQL, because of an unrecognised pooler."""
    return _sqlstate(error) in _PREPARED_ELSEWHERE


def lacks_migrations(error: BaseException | None) -> bool:
    """Whether a table or column is missing, because ``migrate`` has not run, or not with this version."""
    return error is not None and (_sqlstate(error) in ("42P01", "42703") or _number(error) in (1146, 1054))


def is_lost(error: Exception) -> bool:
    """Whether MySQL or its client reports that the connection is gone."""
    return _number(error) in _LOST


def _sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of PostgreSQL, from psycopg 3 or 2."""
    return getattr(error.__cause__, "sqlstate", None) or getattr(error.__cause__, "pgcode", None)


def _number(error: BaseException) -> int | None:
    """The error number of MySQL, MariaDB and their clients."""
    number = error.args[0] if isinstance(error, Error) and error.args else None
    return number if isinstance(number, int) else None


def _sqlite_code(error: BaseException) -> int | None:
    return getattr(error.__cause__, "sqlite_errorcode", None)


def final(text: str) -> LockBackendError:
    """A final error: neither another connection nor time helps."""
    error = LockBackendError(text)
    error.is_final = True
    return error


def explain(
    error: Exception, backend: BaseLockBackend, location: str, file: str | None, kind: type[LockBackendError]
) -> LockBackendError:
    """An error of the class ``kind`` that says what to do.

    ``location``: the alias in ``DATABASES``; ``file``: where SQLite keeps the locks.
    """
    explained = kind(_advice(error, backend, location, file))
    explained.is_final = is_final(error)
    return explained


def _advice(error: Exception, backend: BaseLockBackend, location: str, file: str | None) -> str:
    text = str(error).strip().replace("\n", " ")
    where = f"The database {location!r} of the locks {backend.alias!r}"
    table = next((table for table in TABLES if table in text), None)
    if table and any(sign in text for sign in ("does not exist", "doesn't exist", "no such table")):
        return (
            f"{where} has no table {table}. Run manage.py migrate --database={location}; if a router keeps"
            f" the app 'distlock' from it, name another alias in {backend.setting('LOCATION')}."
        )
    if "readonly" in text and file:
        return (
            f"{where} keeps them in the file {file}, to which this user cannot write. Give it the owner"
            f" and the mode of the database, and let this user write to its folder: {text}"
        )
    if "read-only" in text or "readonly" in text:
        return f"{where} can only be read. Name an alias in {backend.setting('LOCATION')} that writes: {text}"
    if "permission denied" in text or "command denied" in text:
        return (
            f"{where} lets this user not do what locks need: SELECT, INSERT, UPDATE and DELETE on"
            f" {' and '.join(TABLES)}: {text}"
        )
    if "database is locked" in text and (others := list(databases_in(file))):
        return (
            f"{where} is in the file {file}, which is also the database {others[0]!r}: code that asks for"
            " a lock inside a transaction that writes there would wait for itself."
            f" Give DATABASES[{others[0]!r}] another file: {text}"
        )
    if "database is locked" in text:
        return (
            f"{where} is in the file {file}, to which others wrote for longer than"
            f" {backend.setting('OPTIONS')}['timeout']: {text}"
        )
    if "could not serialize" in text:
        return (
            f"{where} is reached through a pooler with sessions at REPEATABLE READ or SERIALIZABLE, where the steps"
            " of many that want the same lock fail. Name an alias whose user has the"
            f" default_transaction_isolation 'read committed' in {backend.setting('LOCATION')}: {text}"
        )
    return f"{where} did not do what it was asked for: {type(error).__name__}: {text}"
