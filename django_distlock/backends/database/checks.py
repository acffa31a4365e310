"""Django's system checks of an entry that keeps locks in a database. They ask no database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, router

from ...models import ROWS_OF_DATABASE_BACKEND
from .files import databases_in

if TYPE_CHECKING:
    from .backend import DatabaseBackend


def settings_checks(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    where = backend.setting("LOCATION")
    if not backend.settings.get("LOCATION") and settings.DATABASE_ROUTERS and len(connections.settings) > 1:
        yield Warning(
            f"{where} is not set, and DATABASE_ROUTERS choose among several databases. Each process keeps its locks"
            f" where they send its first request for one: {backend.location!r} here. If they follow a tenant or a"
            " request, processes do not exclude each other.",
            hint=f"Name the alias of DATABASES that keeps the locks: 'LOCATION': {backend.location!r}.",
            id="distlock.W021",
        )
    if backend.pool.file is None:
        if not all(router.allow_migrate_model(backend.location, model) for model in ROWS_OF_DATABASE_BACKEND):
            yield Warning(
                f"{where}: the routers keep a table of the locks from the database {backend.location!r}.",
                hint="Let allow_migrate() say yes to the app 'distlock' there, or name another alias.",
                id="distlock.W020",
            )
        return
    for alias in databases_in(backend.pool.file):
        yield Error(
            f"{where}: the locks are kept in {backend.pool.file}, which is also the database {alias!r}. Code that"
            " asks for a lock inside a transaction that writes there would wait for itself.",
            hint=f"Give DATABASES[{alias!r}] another file: locks in SQLite have one of their own.",
            id="distlock.E020",
        )
