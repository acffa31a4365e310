"""Django's system checks of an entry that keeps locks in a database. They ask no database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, router

from ...models import ROWS_OF_DATABASE_BACKEND

if TYPE_CHECKING:
    from .backend import DatabaseBackend


def settings_checks(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    where = backend.setting("LOCATION")
    if backend.pool.file is None:
        if not all(router.allow_migrate_model(backend.location, model) for model in ROWS_OF_DATABASE_BACKEND):
            yield Warning(
                f"{where}: the routers keep a table of the locks from the database {backend.location!r}.",
                hint="Let allow_migrate() say yes to the app 'distlock' there, or name another alias.",
                id="distlock.W020",
            )
        return
    for alias, settings in connections.settings.items():
        if _is_file(settings, backend.pool.file):
            yield Error(
                f"{where}: the locks are kept in {backend.pool.file}, which is also the database {alias!r}. Code that"
                " asks for a lock inside a transaction that writes there would wait for itself.",
                hint=f"Give DATABASES[{alias!r}] another file: locks in SQLite have one of their own.",
                id="distlock.E020",
            )


def _is_file(settings: dict[str, object], file: str) -> bool:
    is_sqlite = str(settings["ENGINE"]).rpartition(".")[2].startswith(("sqlite", "spatialite"))
    return is_sqlite and Path(str(settings["NAME"])).absolute() == Path(file).absolute()
