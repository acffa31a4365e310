"""How old rows are deleted, page by page, so that no statement takes long and nobody waits for one."""

from __future__ import annotations

from typing import Any, NamedTuple


class Page(NamedTuple):
    """``end``: the last key that was looked at; None: there are no more."""

    deleted: int
    end: bytes | None


class Pruning:
    """Of one table, by its key ``name``. ``is_old``: a condition with ``parameters`` ages in microseconds."""

    def __init__(self, table: str, is_old: str, parameters: int) -> None:
        self._parameters = parameters
        self._find_end = f"SELECT name FROM {table} WHERE name > %s ORDER BY name LIMIT 1 OFFSET %s"
        self._delete = f"DELETE FROM {table} WHERE name > %s AND name <= %s AND {is_old}"
        self._delete_rest = f"DELETE FROM {table} WHERE name > %s AND {is_old}"

    def page(self, connection: Any, after: bytes, age: int, size: int) -> Page:
        """Delete what is old among the ``size`` rows beyond ``after``."""
        binary, ages = connection.Database.Binary, [age] * self._parameters
        with connection.cursor() as cursor:
            cursor.execute(self._find_end, [binary(after), size - 1])
            if found := cursor.fetchone():
                end = bytes(found[0])
                cursor.execute(self._delete, [binary(after), binary(end), *ages])
            else:
                end = None
                cursor.execute(self._delete_rest, [binary(after), *ages])
            return Page(cursor.rowcount, end)
