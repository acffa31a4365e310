"""What went wrong at the database, in words that say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...exceptions import LockBackendError
from ...models import ROWS_OF_DATABASE_BACKEND
from .files import databases_in

if TYPE_CHECKING:
    from .backend import DatabaseBackend

TABLES = [model._meta.db_table for model in ROWS_OF_DATABASE_BACKEND]


class NoReply(LockBackendError):
    """The statement may have been executed."""


class Broken(Exception):
    """The connection broke while a statement was on its way."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def explain(backend: DatabaseBackend, error: Exception, kind: type[LockBackendError]) -> LockBackendError:
    text = str(error).strip().replace("\n", " ")
    where = f"The database {backend.location!r} of the locks {backend.alias!r}"
    table = next((table for table in TABLES if table in text), None)
    if table and any(sign in text for sign in ("does not exist", "doesn't exist", "no such table")):
        return kind(
            f"{where} has no table {table}. Run manage.py migrate --database={backend.location}; if a router keeps"
            f" the app 'distlock' from it, name another alias in {backend.setting('LOCATION')}."
        )
    if "readonly" in text and backend.pool.file:
        return kind(
            f"{where} keeps them in the file {backend.pool.file}, to which this user cannot write. Give it the owner"
            f" and the mode of the database, and let this user write to its folder: {text}"
        )
    if "read-only" in text or "readonly" in text:
        return kind(f"{where} can only be read. Name an alias in {backend.setting('LOCATION')} that writes: {text}")
    if "permission denied" in text or "command denied" in text:
        return kind(
            f"{where} lets this user not do what locks need: SELECT, INSERT, UPDATE and DELETE on"
            f" {' and '.join(TABLES)}: {text}"
        )
    if "database is locked" in text and (others := list(databases_in(backend.pool.file))):
        return kind(
            f"{where} is in the file {backend.pool.file}, which is also the database {others[0]!r}: code that asks for"
            " a lock inside a transaction that writes there would wait for itself."
            f" Give DATABASES[{others[0]!r}] another file: {text}"
        )
    if "database is locked" in text:
        return kind(
            f"{where} is in the file {backend.pool.file}, to which another process wrote for longer than"
            f" {backend.setting('OPTIONS')}['timeout']: {text}"
        )
    if "could not serialize" in text:
        return kind(
            f"{where} is reached through a pooler with sessions at REPEATABLE READ or SERIALIZABLE, where the steps"
            " of many that want the same lock fail. Name an alias whose user has the"
            f" default_transaction_isolation 'read committed' in {backend.setting('LOCATION')}: {text}"
        )
    return kind(f"{where} did not do what it was asked for: {type(error).__name__}: {text}")
