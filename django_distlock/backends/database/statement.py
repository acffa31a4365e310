"""A statement in the form that each driver takes, sent by the fastest method of the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import sha256
from typing import Any


class Statement:
    """A statement that returns at most one row. ``sql`` has its parameters as ``%s``; keys are ``bytes``."""

    def __init__(self, sql: str) -> None:
        self.sql = sql
        self.sql_of_sqlite = sql.replace("%s", "?")
        first, *others = sql.split("%s")
        self.sql_of_libpq = "".join([first, *(f"${n}{text}" for n, text in enumerate(others, 1))]).encode()
        # Named by its content: if a pooler mixes up sessions, none has another statement under this name.
        self.name = f"distlock_{sha256(self.sql_of_libpq).hexdigest()[:16]}".encode()
        self.readers: list[Callable[[bytes], Any]] | None = None  # of its columns, once libpq has their types

    def fetch_one(self, connection: Any, parameters: Sequence[Any]) -> Sequence[Any] | None:
        """Its row, on a connection of Django, without Django's cursor, which takes about as long as the statement."""
        with connection.wrap_database_errors:
            if connection.libpq:
                return connection.libpq.fetch_one(self, parameters)  # type: ignore[no-any-return]
            binary = connection.Database.Binary
            parameters = [binary(one) if type(one) is bytes else one for one in parameters]
            # SQLite keeps a file open as long as a cursor exists, also if only the traceback of an error refers to it.
            with closing(connection.connection.cursor()) as cursor:
                cursor.execute(self.sql_of_sqlite if connection.vendor == "sqlite" else self.sql, parameters)
                return cursor.fetchone()  # type: ignore[no-any-return]
