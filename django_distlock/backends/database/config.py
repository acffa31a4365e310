"""Reads and checks the database of an entry of ``DISTRIBUTED_LOCKS``."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, router

from ...exceptions import InvalidLockBackend
from ...models import ROWS_OF_DATABASE_BACKEND, DatabaseLock
from ...utils.text import quoted
from ..base import BaseLockBackend
from .engines import vendor_of
from .sql import CLOCKS
from .sqlite import databases_in


def read_timeout(backend: BaseLockBackend) -> float:
    timeout = backend.option["timeout"]
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < inf:
        raise InvalidLockBackend(
            f"{backend.setting('OPTIONS')}['timeout'] is {timeout!r}; it is a number of seconds above 0."
        )
    return float(timeout)


def read_location(backend: BaseLockBackend) -> tuple[str, str]:
    """The alias in ``DATABASES``, and the kind of that database."""
    location = backend.settings.get("LOCATION") or router.db_for_write(DatabaseLock)
    if location not in connections.settings:
        known = ", ".join(map(repr, connections.settings))
        raise InvalidLockBackend(
            f"{backend.setting('LOCATION')} is {quoted(location)}. It is an alias of DATABASES, which has {known}."
        )
    vendor = vendor_of(location)
    if vendor not in CLOCKS:
        raise InvalidLockBackend(
            f"{backend.setting('LOCATION')} is {location!r}, a database of the kind {vendor!r}. Locks know"
            f" {', '.join(CLOCKS)}."
        )
    return str(location), vendor


def settings_checks(backend: BaseLockBackend, location: str, file: str | None) -> Iterator[CheckMessage]:
    where = backend.setting("LOCATION")
    if not backend.settings.get("LOCATION") and settings.DATABASE_ROUTERS and len(connections.settings) > 1:
        yield Warning(
            f"{where} is not set, and DATABASE_ROUTERS choose among several databases. Each process keeps its locks"
            f" where they send its first request for one: {location!r} here. If they follow a tenant or a"
            " request, processes do not exclude each other.",
            hint=f"Name the alias of DATABASES that keeps the locks: 'LOCATION': {location!r}.",
            id="distlock.W021",
        )
    if file is None:
        if not all(router.allow_migrate_model(location, model) for model in ROWS_OF_DATABASE_BACKEND):
            yield Warning(
                f"{where}: the routers keep a table of the locks from the database {location!r}.",
                hint="Let allow_migrate() say yes to the app 'distlock' there, or name another alias.",
                id="distlock.W020",
            )
        return
    for alias in databases_in(file):
        yield Error(
            f"{where}: the locks are kept in {file}, which is also the database {alias!r}. Code that"
            " asks for a lock inside a transaction that writes there would wait for itself.",
            hint=f"Give DATABASES[{alias!r}] another file: locks in SQLite have one of their own.",
            id="distlock.E020",
        )
