"""The journal in a table: the last entries of each KEY_PREFIX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...models import DatabaseEntry

TABLE = DatabaseEntry._meta.db_table


class Journal:
    """The statements, on a connection of Django. ``length``: how many entries are kept."""

    def __init__(self, prefix: bytes, length: int) -> None:
        self._prefix, self._length = prefix, length

    def write(self, connection: Any, entries: Sequence[str]) -> None:
        key = connection.Database.Binary(self._prefix)
        values = [value for entry in entries for value in (key, entry)]
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {TABLE} (journal, entry) VALUES {', '.join(['(%s, %s)'] * len(entries))}", values
            )
            cursor.execute(
                f"SELECT id FROM {TABLE} WHERE journal = %s ORDER BY id DESC LIMIT 1 OFFSET %s", [key, self._length]
            )
            if last := cursor.fetchone():
                cursor.execute(f"DELETE FROM {TABLE} WHERE journal = %s AND id <= %s", [key, last[0]])

    def read(self, connection: Any) -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT entry FROM {TABLE} WHERE journal = %s ORDER BY id", [connection.Database.Binary(self._prefix)]
            )
            return [entry for (entry,) in cursor.fetchall()]
