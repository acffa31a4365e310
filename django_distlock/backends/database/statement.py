"""A statement in the form that each driver takes, sent by the shortest way that the driver has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import sha256
from typing import Any


class Statement:
    """One whose answer is one row at most. ``sql`` has its parameters as ``%s``; keys are ``bytes``."""

    def __init__(self, sql: str) -> None:
        self.sql = sql
        self.sql_of_sqlite = sql.replace("%s", "?")
        first, *others = sql.split("%s")
        self.sql_of_libpq = "".join([first, *(f"${n}{text}" for n, text in enumerate(others, 1))]).encode()
        # By its content: where a pooler mixes up sessions, none may have another statement under this name.
        self.name = f"distlock_{sha256(self.sql_of_libpq).hexdigest()[:16]}".encode()
        self.readers: list[Callable[[bytes], Any]] | None = None  # of its columns, once libpq has told their types

    def fetch_one(self, connection: Any, parameters: Sequence[Any]) -> Sequence[Any] | None:
        """Its row, on a connection of Django. Not by Django's cursor, which takes about as long as the statement."""
        with connection.wrap_database_errors:
            if connection.libpq:
                return connection.libpq.fetch_one(self, parameters)  # type: ignore[no-any-return]
            binary = connection.Database.Binary
            parameters = [binary(one) if type(one) is bytes else one for one in parameters]
            # SQLite keeps a file open for as long as there is a cursor, also one that only the traceback of an error
            # refers to.
            with closing(connection.connection.cursor()) as cursor:
                cursor.execute(self.sql_of_sqlite if connection.vendor == "sqlite" else self.sql, parameters)
                return cursor.fetchone()  # type: ignore[no-any-return]
