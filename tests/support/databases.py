"""Databases that tests add to DATABASES while they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from django_distlock.models import ROWS_OF_DATABASE_BACKEND

ALIAS = "locks"


@contextmanager
def known_database(settings: dict[str, Any], alias: str = ALIAS) -> Iterator[None]:
    """The alias leads there; on a server the tables of the locks are there, and empty."""
    known = connections.configure_settings({"default": {}, alias: dict(settings)})[alias]
    connections.settings[alias] = known
    try:
        connection = connections[alias]
        if connection.vendor != "sqlite":
            make_tables(connection)
        yield
    finally:
        raw = connections[alias].connection
        connections[alias].close()
        if raw is not None and connections[alias].vendor == "sqlite":
            raw.close()  # Django keeps a database in memory open
        del connections[alias]
        del connections.settings[alias]


def make_tables(connection: Any) -> None:
    there = connection.introspection.table_names()
    with connection.schema_editor() as editor:
        for model in ROWS_OF_DATABASE_BACKEND:
            if model._meta.db_table in there:
                editor.execute(f"DELETE FROM {model._meta.db_table}")
            else:
                editor.create_model(model)
