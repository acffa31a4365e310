"""The journal in a table: the last entries of each KEY_PREFIX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...journal import JournalEntry
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

    def left(self, connection: Any, before: float) -> list[tuple[bytes, int]]:
        """The journals of any KEY_PREFIX whose last entry is older, with its ``id``. Nobody writes them now.

        ``before``: seconds of Unix time.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT journal, id, entry FROM {TABLE} WHERE id IN (SELECT MAX(id) FROM {TABLE} GROUP BY journal)"
            )
            last = [
                (bytes(journal), number, JournalEntry.from_text(text)) for journal, number, text in cursor.fetchall()
            ]
        return [(journal, number) for journal, number, entry in last if entry and entry.at < before]

    def delete(self, connection: Any, journal: bytes, last: int, most: int) -> int:
        """Delete the oldest entries of a journal, up to ``last`` and at most so many. Returns how many."""
        key = connection.Database.Binary(journal)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT id FROM {TABLE} WHERE journal = %s AND id <= %s ORDER BY id LIMIT %s", [key, last, most]
            )
            if not (found := cursor.fetchall()):
                return 0
            cursor.execute(f"DELETE FROM {TABLE} WHERE journal = %s AND id <= %s", [key, found[-1][0]])
            return len(found)
