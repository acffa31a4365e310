"""The SQL of each database. A change is one statement, in autocommit; several locks at once are one transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...formats import LARGEST, NEWER, NUMBER, is_newer_number
from ...journal import QueuedWaiter
from ...models import DatabaseLock
from ...types import digest
from ...utils.events import about_event
from ..common.state import (
    CLAIMED,
    FREE,
    HELD,
    RECORD_LENGTH,
    RESTING,
    Row,
    StoredLease,
    Waiter,
    leases_from_text,
    leases_to_text,
    retired_from_text,
    retired_to_text,
    waiters_from_text,
    waiters_to_text,
)
from ..common.timing import Timing
from .errors import final, is_lost
from .statement import Statement


class Page(NamedTuple):
    """``end``: the last key of the page; None: there are no more rows."""

    deleted: int
    end: bytes | None


class Pruning:
    """Deletes the old rows of one table, in pages by its key ``name``.

    ``is_old``: a condition with as many placeholders for the age in microseconds as ``parameters`` says.
    """

    def __init__(self, table: str, is_old: str, parameters: int) -> None:
        self._parameters = parameters
        self._find_end = f"SELECT name FROM {table} WHERE name > %s ORDER BY name LIMIT 1 OFFSET %s"
        self._delete = f"DELETE FROM {table} WHERE name > %s AND name <= %s AND {is_old}"
        self._delete_rest = f"DELETE FROM {table} WHERE name > %s AND {is_old}"

    def page(self, connection: Any, after: bytes, age: int, size: int) -> Page:
        """Delete what is old among the ``size`` rows after the key ``after``."""
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


logger = logging.getLogger("django_distlock")

TABLE = DatabaseLock._meta.db_table
STATES = (HELD, CLAIMED, RESTING, FREE)
CHANNEL = "distlock_"  # followed by the inbox of the waiter
COLUMNS = "name, format, version, token, state, fence, expires, holder, others, waiters, retired, careful_until"

# Microseconds of Unix time at this moment. now() of PostgreSQL would be the begin of the transaction, and MySQL's local
# time repeats an hour each autumn. The connection gives SQLite the function.
CLOCKS = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS bigint)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": "distlock_now()",
}

# How a transaction begins. If nothing happens in it for a second, because its process was stopped or cut off, the
# server ends the session, which would keep its rows from all others. MySQL has no such limit, and reads a comment.
BEGIN = {
    "postgresql": ("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 1000",),
    "mysql": ("SET autocommit = 1 /*M!100300 , SESSION idle_write_transaction_timeout = 1 */", "BEGIN"),
    "sqlite": ("BEGIN IMMEDIATE",),
}


class QueuePosition(NamedTuple):
    """Where a waiter stands.

    ``is_turn``: an attempt may succeed, or is needed because the place was lost. ``fence``: of the grant in the way.
    ``waiters_before``: how many stand before it.
    """

    is_turn: bool
    fence: int = 0
    waiters_before: int = 0


class Statements:
    """The statements that work on every database, on a connection of Django."""

    def __init__(self, vendor: str, timing: Timing, *, has_returning: bool) -> None:
        self._timing = timing
        now = CLOCKS[vendor]
        greatest = "MAX" if vendor == "sqlite" else "GREATEST"
        self._has_returning = has_returning
        self._notifies = vendor == "postgresql"
        self._read = Statement(
            f"SELECT {now}, format, version, token, state, fence, expires, holder, others, waiters, retired,"
            f" careful_until FROM (SELECT 1 AS one) AS always LEFT JOIN {TABLE} ON name = %s"
        )
        self._begin = BEGIN[vendor]
        self._insert = insert_unless_there(vendor, TABLE, COLUMNS, placeholders(COLUMNS.split(", ")))
        self._replace = (
            f"UPDATE {TABLE} SET format = {NUMBER}, version = %s, token = %s, state = %s, fence = %s, expires = %s,"
            " holder = %s, others = %s, waiters = %s, retired = %s, careful_until = %s WHERE name = %s AND version = %s"
        )
        self._renew = (
            f"UPDATE {TABLE} SET version = version + 1, expires = {greatest}(expires, {now} + %s)"
            f" WHERE name IN ({{many}}) AND token IN ({{many}}) AND state = '{HELD}' AND expires > {now}"
            f" AND format = {NUMBER}"
        )
        self._still_held = (
            f"SELECT token FROM {TABLE} WHERE name IN ({{many}}) AND token IN ({{many}}) AND state = '{HELD}'"
            f" AND expires > {now} AND format = {NUMBER}"
        )
        self._newer = (
            f"SELECT name FROM {TABLE} WHERE name IN ({{many}}) AND format BETWEEN {NUMBER + 1} AND {LARGEST}"
            f" AND (expires > {now} OR careful_until > {now})"
        )
        found = f"{'strpos' if vendor == 'postgresql' else 'instr'}(waiters, %s)"
        self._position = Statement(
            f"SELECT token, others, expires <= {now} OR format <> {NUMBER}, fence, {found}, {now} FROM {TABLE}"
            " WHERE name = %s"
        )
        is_locked = f"((expires > {now} AND state <> '{FREE}') OR (others <> '' AND careful_until > {now}))"
        self._slots = (
            f"SELECT name, {now}, expires, state, others FROM {TABLE}"
            f" WHERE name >= %s AND name > %s AND name < %s AND {is_locked} ORDER BY name LIMIT %s"
        )
        self._look = (
            f"SELECT name, format, {now}, token, state, fence, expires, holder, others FROM {TABLE}"
            f" WHERE name IN ({{many}}) AND {is_locked}"
        )
        self._waiters = (
            f"SELECT name, format, waiters, {now} FROM {TABLE} WHERE name IN ({{many}}) AND waiters <> ''"
            f" AND careful_until > {now}"
        )
        self._waited_for = (
            f"SELECT name FROM {TABLE} WHERE name >= %s AND name > %s AND name < %s AND waiters <> ''"
            f" AND careful_until > {now} ORDER BY name LIMIT %s"
        )
        is_old = f"expires <= {now} - %s AND fence < {now} - %s AND careful_until <= {now} - %s"
        self.pruning = Pruning(TABLE, is_old, 3)

    # One lock

    def read(self, connection: Any, name: bytes) -> Row:
        found = self._read.fetch_one(connection, [name])
        assert found
        now, written_in, version, token, state, fence, expires, holder, others, waiters, retired, careful_until = found
        if version is None:
            return Row(int(now), timing=self._timing)
        # SQLite accepts any value in any column
        are_numbers = {*map(type, (version, fence, expires, careful_until))} == {int}
        if are_numbers and is_newer_number(written_in):
            if max(expires, careful_until) > now:
                raise final(newer_row(name))
            return Row(int(now), version, fence=fence, timing=self._timing)  # nothing else in the row counts any more
        try:
            if not are_numbers or written_in != NUMBER:
                raise ValueError("not numbers")
            leases = leases_of(token, state, fence, expires, holder, others)
            queue, retired_tokens = waiters_from_text(waiters), retired_from_text(retired)
        except (TypeError, ValueError) as error:
            raise final(unreadable_row(name)) from error
        return Row(int(now), version, fence, leases, expires, queue, retired_tokens, self._timing)

    def write(self, connection: Any, name: bytes, row: Row, notify: Sequence[Waiter] = ()) -> bool:
        """False if the row has changed since it was read. ``notify``: the waiters that are notified of the change."""
        binary = connection.Database.Binary(name)
        version = max(row.version + 1, row.now)
        changed = [*_columns_of_leases(row)]
        changed += [waiters_to_text(row.waiters), retired_to_text(row.retired), row.careful_until]
        with connection.cursor() as cursor:
            if not row.version:
                cursor.execute(self._insert, [binary, NUMBER, version, *changed])
            elif notify and self._notifies:
                # In one statement, so that a change that is not made notifies nobody.
                told = [text for waiter in notify for text in (CHANNEL + waiter.inbox, waiter.token)]
                calls = ", ".join(["pg_notify(%s, %s)"] * len(notify))
                cursor.execute(
                    f"WITH changed AS ({self._replace} RETURNING 1) SELECT {calls} FROM changed",
                    [version, *changed, binary, row.version, *told],
                )
            else:
                cursor.execute(self._replace, [version, *changed, binary, row.version])
            return bool(cursor.rowcount == 1)

    @contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        """Writes everything inside, or nothing if an error is raised or the process stops in the middle."""
        with connection.cursor() as cursor:
            for statement in self._begin:
                cursor.execute(statement)
            try:
                yield
                cursor.execute("COMMIT")
            except Exception as error:
                has_ended = is_lost(error)  # with its connection; asked again, some drivers would say less about it
                if connection.vendor == "sqlite":
                    has_ended = not connection.connection.in_transaction  # for example if the disk is full
                if not has_ended:
                    cursor.execute("ROLLBACK")  # if this fails as well, its error closes the connection
                raise

    def position(self, connection: Any, name: bytes, token: str, slots: int) -> QueuePosition:
        """``slots``: as many as the waiter wants."""
        found = self._position.fetch_one(connection, [token, name])
        if found is None:
            return QueuePosition(True)
        holding, others, is_free, fence, place, now = found
        if holding == token or token in others or (is_free and not others) or not place:
            return QueuePosition(True)
        try:
            position = QueuePosition(False, int(fence), place // RECORD_LENGTH)
            if others:
                taken = (not is_free) + sum(lease.expires > now for lease in leases_from_text(others))
                # One that stands behind the first may not pass it.
                return position._replace(is_turn=taken < (1 if position.waiters_before else slots))
            return position
        except (TypeError, ValueError) as error:
            raise final(unreadable_row(name)) from error

    # Many

    def renew(self, connection: Any, leases: Sequence[tuple[bytes, str]], ttl: int) -> set[str]:
        """The tokens that still hold their locks, which now last ``ttl`` microseconds at least."""
        leases = sorted(leases)  # one order for all processes
        parameters = [connection.Database.Binary(name) for name, _ in leases] + [token for _, token in leases]
        many = placeholders(leases)
        with connection.cursor() as cursor:
            if self._has_returning:
                cursor.execute(f"{self._renew.format(many=many)} RETURNING token", [ttl, *parameters])
            else:
                cursor.execute(self._renew.format(many=many), [ttl, *parameters])
                cursor.execute(self._still_held.format(many=many), parameters)
            return {token for (token,) in cursor.fetchall()}

    def newer(self, connection: Any, names: Sequence[bytes]) -> set[bytes]:
        """The keys of rows in the format of a newer version that are locked or have waiters."""
        with connection.cursor() as cursor:
            cursor.execute(
                self._newer.format(many=placeholders(names)), [connection.Database.Binary(name) for name in names]
            )
            return {bytes(name) for (name,) in cursor.fetchall()}

    def slots(self, connection: Any, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, list[int]]]:
        """The taken slots of locks whose keys begin with ``prefix``, in order, after the key ``after``."""
        bounds = map(connection.Database.Binary, (prefix, after, end_of(prefix)))
        with connection.cursor() as cursor:
            cursor.execute(self._slots, [*bounds, limit])
            return [(bytes(name), _taken(bytes(name), *about)) for name, *about in cursor.fetchall()]

    def look(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, Row]:
        """The leases of each locked row; none, and an error in the log, if a row cannot be read."""
        with connection.cursor() as cursor:
            cursor.execute(
                self._look.format(many=placeholders(names)), [connection.Database.Binary(name) for name in names]
            )
            return {bytes(name): _row_of_leases(bytes(name), *about) for name, *about in cursor.fetchall()}

    def count_waiters(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, int | None]:
        """How many wait for each lock; None if the row cannot be read."""
        found = self._queues(connection, names)
        return {name: None if queue is None else len(queue) for name, queue in found.items()}

    def waiters(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, list[QueuedWaiter] | None]:
        """The waiters for each lock, in order; None if the row cannot be read."""
        found = self._queues(connection, names)
        return {name: None if queue is None else list(map(_queued, queue)) for name, queue in found.items()}

    def _queues(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, list[Waiter] | None]:
        with connection.cursor() as cursor:
            cursor.execute(
                self._waiters.format(many=placeholders(names)), [connection.Database.Binary(name) for name in names]
            )
            return {bytes(name): self._queue(bytes(name), *about) for name, *about in cursor.fetchall()}

    def _queue(self, name: bytes, written_in: int, text: str, now: int) -> list[Waiter] | None:
        if written_in != NUMBER:
            logger.error("%s", misread(name, written_in), extra=about_event("unreadable"))
            return None
        try:
            return Row(now, waiters=waiters_from_text(text), timing=self._timing).live_waiters
        except (TypeError, ValueError):
            logger.error("%s", unreadable_row(name), extra=about_event("unreadable"))
            return None

    def waited_for(self, connection: Any, prefix: bytes, after: bytes, limit: int) -> list[bytes]:
        """The keys of rows with a queue that begin with ``prefix``, in order, after the key ``after``."""
        bounds = map(connection.Database.Binary, (prefix, after, end_of(prefix)))
        with connection.cursor() as cursor:
            cursor.execute(self._waited_for, [*bounds, limit])
            return [bytes(name) for (name,) in cursor.fetchall()]


def _queued(waiter: Waiter) -> QueuedWaiter:
    return QueuedWaiter(digest(waiter.token), waiter.place / 1e6)


def leases_of(token: str, state: str, fence: int, expires: int, holder: str, others: str) -> list[StoredLease]:
    """The leases from the columns of a row. The lease in the first slot has columns of its own.

    Its number is the one of the last grant, unless ``others`` has another one. Raises ValueError.
    """
    leases = leases_from_text(others)
    first = next((lease for lease in leases if lease.slot == 1), None)
    if state == FREE:
        return [lease for lease in leases if lease is not first]
    number = first.fence if first else fence
    lease = StoredLease(1, str(token), state, number, expires, str(holder))
    return [lease, *(lease for lease in leases if lease is not first)]


def _columns_of_leases(row: Row) -> Iterator[Any]:
    """Token, state, number, end and holder of the lease in the first slot, and the other leases."""
    first = next((lease for lease in row.leases if lease.slot == 1), None)
    others = [lease for lease in row.leases if lease is not first]
    if first and first.fence != row.fence:
        others.insert(0, StoredLease(1, "", first.state, first.fence, 0))
    yield from (first.token, first.state) if first else ("", FREE)
    yield row.fence
    yield from (first.expires, first.holder) if first else (row.ended, "")
    yield leases_to_text(others)


def _row_of_leases(name: bytes, written_in: object, now: int, *columns: Any) -> Row:
    token, state, fence, expires, holder, others = columns
    row = Row(int(now))
    try:
        if written_in != NUMBER or state not in STATES or {type(fence), type(expires)} != {int}:
            raise ValueError("no lock")
        row.leases = leases_of(token, state, fence, expires, holder, others)
    except (TypeError, ValueError):
        logger.error("%s", misread(name, written_in), extra=about_event("unreadable"))
    return row


def _taken(name: bytes, now: int, expires: int, state: str, others: str) -> list[int]:
    """The numbers of the taken slots."""
    try:
        taken = [lease.slot for lease in leases_from_text(others) if lease.slot > 1 and lease.expires > now]
        return [1, *taken] if state != FREE and expires > now else taken
    except (TypeError, ValueError):
        logger.error("%s", unreadable_row(name), extra=about_event("unreadable"))
        return [1]


def unreadable_row(name: bytes) -> str:
    """The message about a row that something else has written."""
    shown = name.decode(errors="backslashreplace")
    return f"The row {shown!r} of {TABLE} holds something that is no lock. Delete it."


def newer_row(name: bytes) -> str:
    return f"The row {name.decode(errors='backslashreplace')!r} of {TABLE} {NEWER}."


def misread(name: bytes, written_in: object) -> str:
    """The message about a row of another format."""
    return newer_row(name) if is_newer_number(written_in) else unreadable_row(name)


def insert_unless_there(vendor: str, table: str, columns: str, values: str) -> str:
    into = f"INTO {table} ({columns}) VALUES ({values})"
    return f"INSERT IGNORE {into}" if vendor == "mysql" else f"INSERT {into} ON CONFLICT (name) DO NOTHING"


def placeholders(items: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(items))


def end_of(prefix: bytes) -> bytes:
    """The first key after all that begin with the prefix. Its last byte is not 0xFF, because it is UTF-8."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
