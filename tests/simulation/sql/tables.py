"""The rows of a database, committed and not, and the locks on them."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from django_distlock.models import ROWS_OF_DATABASE_BACKEND

from .statements import Part

Key = tuple[str, bytes]  # of a row: its table and name
TYPES = {
    "BinaryField": "BLOB PRIMARY KEY",
    "KeyField": "BLOB PRIMARY KEY",
    "BigIntegerField": "INTEGER",
    "SmallIntegerField": "INTEGER",
}


class Rows(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]


class Transaction:
    """``rows``: that it has written; None: deleted. ``number``: of its session.

    ``moment``: at which its clock stands; None: it goes on. ``is_asynchronous``: its commit does not wait for the disk.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: dict[Key, tuple[Any, ...] | None] = {}
        self.notifications: list[tuple[str, str]] = []
        self.is_over = False
        self.moment: int | None = None
        self.is_asynchronous = False
        self.log_position = 0  # up to which its commit writes the log


class Tables:
    """``clock``: microseconds of Unix time. ``watch``: called with each row that was committed.

    ``reverted``: with each that a crash brought back.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.watch: Callable[[Mapping[str, Any]], object] = lambda row: None
        self.reverted: Callable[[Mapping[str, Any]], object] = lambda row: None
        self._sqlite = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._clock = clock
        self._sqlite.create_function("now_us", 0, self._now)
        self._sqlite.create_function("pg_notify", 2, self._notify)
        self._sqlite.create_function("set_config", 3, self._set_config)
        self._writing: Transaction | None = None
        self._columns = {
            one._meta.db_table: [column.column for column in one._meta.fields] for one in ROWS_OF_DATABASE_BACKEND
        }
        for model in ROWS_OF_DATABASE_BACKEND:
            fields = [f"{one.column} {TYPES.get(one.get_internal_type(), 'TEXT')}" for one in model._meta.fields]
            self._sqlite.execute(f"CREATE TABLE {model._meta.db_table} ({', '.join(fields)})")

    def _now(self) -> int:
        assert self._writing
        return self._clock() if self._writing.moment is None else self._writing.moment

    def _notify(self, channel: str, text: str) -> str:
        assert self._writing
        if (channel, text) not in self._writing.notifications:
            self._writing.notifications.append((channel, text))
        return ""

    def _set_config(self, name: str, value: str, is_local: int) -> str:
        assert self._writing
        assert (name, value, is_local) == ("synchronous_commit", "off", 1)
        self._writing.is_asynchronous = True
        return value

    @contextmanager
    def _as_seen_by(self, transaction: Transaction) -> Iterator[None]:
        """What it has written is there; nothing that is done meanwhile stays."""
        self._sqlite.execute("SAVEPOINT seen")
        self._writing = transaction
        try:
            for key, row in transaction.rows.items():
                self._put(key, row)
            yield
        finally:
            self._sqlite.execute("ROLLBACK TO seen")
            self._sqlite.execute("RELEASE seen")

    def _put(self, key: Key, row: tuple[Any, ...] | None) -> None:
        table, name = key
        if row is None:
            self._sqlite.execute(f"DELETE FROM {table} WHERE name = ?", [name])
        else:
            values = ", ".join("?" * len(row))
            self._sqlite.execute(f"INSERT OR REPLACE INTO {table} VALUES ({values})", row)

    def _execute(self, text: str, parameters: Sequence[Any], known: Mapping[str, Rows]) -> Rows:
        """``known``: the rows of the parts before, by their names."""
        tables, values = [], []
        for name, (columns, rows) in known.items():
            quoted = ", ".join(f'"{column}"' for column in columns)
            named = f"{name} ({quoted})"
            if rows:
                row = f"({', '.join('?' * len(columns))})"
                tables.append(f"{named} AS (VALUES {', '.join([row] * len(rows))})")
                values += [value for one in rows for value in one]
            else:
                tables.append(f"{named} AS (SELECT {', '.join(['NULL'] * len(columns))} WHERE 0)")
        cursor = self._sqlite.execute(f"WITH {', '.join(tables)} {text}" if tables else text, [*values, *parameters])
        found = cursor.fetchall()
        return Rows([column[0] for column in cursor.description or ()], found)

    def select(self, transaction: Transaction, part: Part, known: Mapping[str, Rows]) -> Rows:
        with self._as_seen_by(transaction):
            return self._execute(part.text, part.parameters, known)

    def found(self, transaction: Transaction, part: Part, known: Mapping[str, Rows]) -> list[Key]:
        """The rows that the part would change as things are."""
        with self._as_seen_by(transaction):
            rows = self._execute(f"{part.body} RETURNING name", part.parameters, known).rows
        return [(part.table, name) for (name,) in rows]

    def is_there(self, transaction: Transaction, key: Key) -> bool:
        with self._as_seen_by(transaction):
            return bool(self._sqlite.execute(f"SELECT 1 FROM {key[0]} WHERE name = ?", [key[1]]).fetchall())

    def change(self, transaction: Transaction, part: Part, known: Mapping[str, Rows], key: Key) -> Rows:
        """Change the row, which the transaction has locked. Returns what RETURNING says; no rows: it did not match."""
        restricting = [] if part.verb == "INSERT" else [key[1]]
        with self._as_seen_by(transaction):
            returned = self._execute(part.of_row(), [*part.parameters, *restricting], known)
            row = self._row(key)
        if returned.rows:
            transaction.rows[key] = row
        return returned

    def commit(self, transaction: Transaction) -> dict[Key, tuple[Any, ...] | None]:
        """Returns the rows that it changed, as they were."""
        before = {key: self._row(key) for key in transaction.rows}
        for key, row in transaction.rows.items():
            self._put(key, row)
            if row is not None:
                self.watch(self._named(key, row))
        return before

    def put_back(self, before: Mapping[Key, tuple[Any, ...] | None]) -> None:
        for key, row in before.items():
            self._put(key, row)
            if row is not None:
                self.reverted(self._named(key, row))

    def _row(self, key: Key) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._sqlite.execute(
            f"SELECT * FROM {key[0]} WHERE name = ?", [key[1]]
        ).fetchone()
        return row

    def _named(self, key: Key, row: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._columns[key[0]], row, strict=True))

    def all(self, table: str) -> list[dict[str, Any]]:
        """Committed rows."""
        cursor = self._sqlite.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def rewrite(self, table: str, name: bytes) -> None:
        """Somebody changes nothing but the version of the row."""
        self._sqlite.execute(f"UPDATE {table} SET version = version + 1 WHERE name = ?", [name])

    def wipe(self, table: str) -> None:
        self._sqlite.execute(f"DELETE FROM {table}")


class Locks:
    """Each row is locked by one transaction at a time; others wait in order."""

    def __init__(self) -> None:
        self._owners: dict[Key, Transaction] = {}
        self._queues: defaultdict[Key, list[tuple[Transaction, Callable[[], object]]]] = defaultdict(list)

    def owner(self, key: Key) -> Transaction | None:
        return self._owners.get(key)

    def take(self, key: Key, transaction: Transaction) -> bool:
        return self._owners.setdefault(key, transaction) is transaction

    def wait(self, key: Key, transaction: Transaction, take: Callable[[], object]) -> None:
        self._queues[key].append((transaction, take))

    def give_up(self, key: Key, transaction: Transaction) -> None:
        self._queues[key] = [waiting for waiting in self._queues[key] if waiting[0] is not transaction]

    def cycle(self, transaction: Transaction) -> list[Transaction]:
        """Those that wait for each other, beginning with this one; empty: it is no deadlock."""
        waits_for = {waiting: self._owners[key] for key, queue in self._queues.items() for waiting, _ in queue if queue}
        found, one = [transaction], waits_for.get(transaction)
        while one is not None and one is not transaction and one not in found:
            found.append(one)
            one = waits_for.get(one)
        return found if one is transaction else []

    def end(self, transaction: Transaction) -> None:
        """It was committed or rolled back."""
        transaction.is_over = True
        for key in list(self._queues):
            self.give_up(key, transaction)
        for key in [key for key, owner in self._owners.items() if owner is transaction]:
            del self._owners[key]
            if self._queues[key]:
                self._owners[key], take = self._queues[key].pop(0)
                take()
