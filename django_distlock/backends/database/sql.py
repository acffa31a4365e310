"""The SQL of each database. Every change is one statement, in autocommit: nothing is held between two of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...models import DatabaseLock
from ...types import TOKEN_LENGTH
from ..common.state import (
    ALIVE,
    CLAIMED,
    DIGITS,
    FREE,
    GRANT_TTL,
    HELD,
    INBOX_LENGTH,
    RECORD_LENGTH,
    Attempt,
    Row,
    Waiter,
    retired_from_text,
    retired_to_text,
    waiters_from_text,
    waiters_to_text,
)
from .errors import final


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


logger = logging.getLogger("django_distlock")

TABLE = DatabaseLock._meta.db_table
CHANNEL = "distlock_"  # and the inbox of the waiter
COLUMNS = "name, version, token, state, fence, expires, holder, waiters, retired, careful_until"

# Microseconds of Unix time at this moment; now() of PostgreSQL would be when the transaction began, and MySQL's
# local time repeats an hour each autumn. SQLite gets the function from the connection.
CLOCKS = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS bigint)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": "distlock_now()",
}


class Turn(NamedTuple):
    """What a waiter sees that looks for itself.

    ``has_come``: an attempt may succeed, or is needed because its place was lost. ``fence``: of the grant before it;
    ``ahead``: how many wait before it.
    """

    has_come: bool
    fence: int = 0
    ahead: int = 0


class Statements:
    """Runs them on a connection of Django."""

    def __init__(self, vendor: str, *, has_returning: bool) -> None:
        now = CLOCKS[vendor]
        greatest = "MAX" if vendor == "sqlite" else "GREATEST"
        self._has_returning = has_returning
        self._notifies = vendor == "postgresql"
        self._read = (
            f"SELECT {now}, version, token, state, fence, expires, holder, waiters, retired"
            f" FROM (SELECT 1 AS one) AS always LEFT JOIN {TABLE} ON name = %s"
        )
        self._insert = insert_unless_there(vendor, TABLE, COLUMNS, placeholders(COLUMNS.split(", ")))
        self._replace = (
            f"UPDATE {TABLE} SET version = %s, token = %s, state = %s, fence = %s, expires = %s, holder = %s,"
            " waiters = %s, retired = %s, careful_until = %s WHERE name = %s AND version = %s"
        )
        self._renew = (
            f"UPDATE {TABLE} SET version = version + 1, expires = {greatest}(expires, {now} + %s)"
            f" WHERE name IN ({{many}}) AND token IN ({{many}}) AND state = '{HELD}' AND expires > {now}"
        )
        self._still_held = (
            f"SELECT token FROM {TABLE} WHERE name IN ({{many}}) AND token IN ({{many}}) AND state = '{HELD}'"
            f" AND expires > {now}"
        )
        self._turn = f"SELECT token, expires <= {now}, fence, waiters FROM {TABLE} WHERE name = %s"
        self._names = (
            f"SELECT name FROM {TABLE} WHERE name >= %s AND name > %s AND name < %s AND expires > {now}"
            f" AND state <> '{FREE}' ORDER BY name LIMIT %s"
        )
        self._look = (
            f"SELECT name, token, state, fence, expires - {now}, holder FROM {TABLE} WHERE name IN ({{many}})"
            f" AND expires > {now} AND state <> '{FREE}'"
        )
        self._waiters = f"SELECT name, waiters, {now} FROM {TABLE} WHERE name IN ({{many}}) AND waiters <> ''"
        is_old = f"expires <= {now} - %s AND fence < {now} - %s AND careful_until <= {now} - %s"
        self.pruning = Pruning(TABLE, is_old, 3)

    # One lock

    def read(self, connection: Any, name: bytes) -> Row:
        with connection.cursor() as cursor:
            cursor.execute(self._read, [connection.Database.Binary(name)])
            now, version, token, state, fence, expires, holder, waiters, retired = cursor.fetchone()
        if version is None:
            return Row(int(now))
        try:
            waiting, given_up = waiters_from_text(waiters), retired_from_text(retired)
            if not {type(version), type(fence), type(expires)} == {int}:  # SQLite keeps anything in any column
                raise ValueError("not numbers")
        except (TypeError, ValueError) as error:
            raise final(unreadable(name)) from error
        return Row(int(now), version, token, state, fence, expires, holder, waiting, given_up)

    def write(self, connection: Any, name: bytes, row: Row, told: Waiter | None = None) -> bool:
        """False if the row is no more the one that was read. ``told``: who is told, with the change."""
        binary = connection.Database.Binary(name)
        version = max(row.version + 1, row.now)
        changed = [row.token, row.state, row.fence, row.expires, row.holder]
        changed += [waiters_to_text(row.waiters), retired_to_text(row.retired), row.careful_until]
        with connection.cursor() as cursor:
            if not row.version:
                cursor.execute(self._insert, [binary, version, *changed])
            elif told and self._notifies:
                # In one statement: told is what was changed, and only that.
                cursor.execute(
                    f"WITH changed AS ({self._replace} RETURNING 1) SELECT pg_notify(%s, %s) FROM changed",
                    [version, *changed, binary, row.version, CHANNEL + told.inbox, told.token],
                )
            else:
                cursor.execute(self._replace, [version, *changed, binary, row.version])
            return bool(cursor.rowcount == 1)

    def turn(self, connection: Any, name: bytes, token: str) -> Turn:
        with connection.cursor() as cursor:
            cursor.execute(self._turn, [connection.Database.Binary(name)])
            found = cursor.fetchone()
        if found is None or found[0] == token or found[1]:
            return Turn(True)
        try:
            line = [waiter.token for waiter in waiters_from_text(found[3])]
            return Turn(token not in line, int(found[2]), line.index(token) if token in line else 0)
        except (TypeError, ValueError) as error:
            raise final(unreadable(name)) from error

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

    def names(self, connection: Any, prefix: bytes, after: bytes, limit: int) -> list[bytes]:
        """Names that are locked now and begin with ``prefix``, in order, beyond ``after``."""
        bounds = map(connection.Database.Binary, (prefix, after, end_of(prefix)))
        with connection.cursor() as cursor:
            cursor.execute(self._names, [*bounds, limit])
            return [bytes(name) for (name,) in cursor.fetchall()]

    def look(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, tuple[str, str, int, int, str]]:
        """Token, state, fencing number, microseconds left and holder of each that is locked."""
        with connection.cursor() as cursor:
            cursor.execute(
                self._look.format(many=placeholders(names)), [connection.Database.Binary(name) for name in names]
            )
            return {bytes(name): tuple(about) for name, *about in cursor.fetchall()}

    def waiters(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, int | None]:
        """How many wait for each; None where that cannot be read."""
        with connection.cursor() as cursor:
            cursor.execute(
                self._waiters.format(many=placeholders(names)), [connection.Database.Binary(name) for name in names]
            )
            return {bytes(name): _count(bytes(name), text, now) for name, text, now in cursor.fetchall()}


def _count(name: bytes, text: str, now: int) -> int | None:
    try:
        return sum(waiter.seen + ALIVE > now for waiter in waiters_from_text(text))
    except (TypeError, ValueError):
        logger.error("%s", unreadable(name))
        return None


def unreadable(name: bytes) -> str:
    """What to say of a row that somebody else has written."""
    shown = name.decode(errors="backslashreplace")
    return f"The row {shown!r} of {TABLE} holds something that is no lock. Delete it."


def insert_unless_there(vendor: str, table: str, columns: str, values: str) -> str:
    into = f"INTO {table} ({columns}) VALUES ({values})"
    return f"INSERT IGNORE {into}" if vendor == "mysql" else f"INSERT {into} ON CONFLICT (name) DO NOTHING"


def placeholders(items: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(items))


def end_of(prefix: bytes) -> bytes:
    """The first text beyond all that begin with the prefix, whose last byte is no 0xFF because it is UTF-8."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


RETURNED = ("fence", "token", "state", "expires", "holder", "waiters")


class Answer(NamedTuple):
    """What an attempt came to, and the lock as it is now. ``left``: microseconds; ``place``: 0 for none."""

    granted: bool
    fence: int
    token: str
    state: str
    left: int
    holder: str
    place: int = 0
    is_first: bool = False


class Quick:
    """Runs them on a connection of Django, to a database that returns what a statement changed (RETURNING)."""

    def __init__(self, vendor: str) -> None:
        self._now, self._greatest, self._position = CLOCKS[vendor], "GREATEST", "strpos"
        self._notifies = vendor == "postgresql"
        self._has_one_writer = vendor == "sqlite"
        if vendor == "sqlite":
            self._greatest, self._position = "MAX", "instr"
        self._take, self._join = self._taking(may_wait=False), self._taking(may_wait=True)
        self._confirm, self._stay, self._release = self._confirming(), self._staying(), self._releasing()

    def _taking(self, *, may_wait: bool) -> str:
        """Where the lock is free, or was granted to this token already. Else its waiter comes last, if it may wait."""
        # excluded is the attempt, and excluded.version its moment. While it waits for another one's change, time
        # passes; that makes it think the later of expiry, never the sooner.
        now, greatest = "excluded.version", self._greatest
        is_over = f"(own.state = '{FREE}' OR own.expires <= {now})"
        is_mine = f"own.token = excluded.token AND own.state IN ('{HELD}', '{CLAIMED}') AND own.expires > {now}"
        is_anothers = f"(NOT {is_over} AND own.token <> excluded.token)"
        nobody_waits = f"(own.waiters = '' OR own.careful_until <= {now})"
        living = f"CASE WHEN own.careful_until <= {now} THEN '' ELSE own.waiters END"
        version = f"{greatest}(own.version + 1, {now})"
        waiter = f"CAST({version} AS text) || CAST({now} AS text) || excluded.token || %s"
        cases = [is_mine, f"{is_over} AND {nobody_waits}"]
        changes = {
            "version": version,
            "token": "excluded.token",
            "state": "excluded.state",
            "fence": f"CASE WHEN {is_over} THEN {greatest}(own.fence + 1, {now}) ELSE own.fence END",
            "expires": f"CASE WHEN {is_over} THEN excluded.expires ELSE {greatest}(own.expires, excluded.expires) END",
            "holder": "excluded.holder",
            "waiters": living,
        }
        if may_wait:
            cases.append(f"{is_anothers} AND {self._position}(own.waiters, excluded.token) = 0")
            changes = {
                column: f"CASE WHEN {is_anothers} THEN own.{column} ELSE {value} END"
                for column, value in changes.items()
            } | {
                "version": version,
                "waiters": f"{living} || CASE WHEN {is_anothers} THEN {waiter} ELSE '' END",
                "careful_until": f"CASE WHEN {is_anothers} THEN {greatest}(own.careful_until, {now} + {ALIVE})"
                " ELSE own.careful_until END",
            }
        condition = f"({' OR '.join(cases)}) AND {self._position}(own.retired, excluded.token) = 0"
        return self._updating_or_inserting(_assigned(changes), condition)

    def _updating_or_inserting(self, assigned: str, condition: str) -> str:
        found = f"fence, token, state, expires - {self._now}, holder, waiters"
        if self._has_one_writer:
            return (
                f"INSERT INTO {TABLE} AS own ({COLUMNS})"
                f" VALUES (%s, {self._now}, %s, '{HELD}', {self._now}, {self._now} + %s, %s, '', '', 0)"
                f" ON CONFLICT (name) DO UPDATE SET {assigned} WHERE {condition} RETURNING {found}"
            )
        # ON CONFLICT of PostgreSQL begins anew each time that another one changed the row before, and may do so for
        # seconds where many want it. UPDATE stands in line.
        changed = ", ".join(f"own.{column}" for column in RETURNED)
        return (
            "WITH excluded AS (SELECT CAST(%s AS bytea) AS name, moment AS version, CAST(%s AS text) AS token,"
            f" '{HELD}' AS state, moment + CAST(%s AS bigint) AS expires, CAST(%s AS text) AS holder"
            f" FROM (SELECT {self._now} AS moment) AS clock),"
            f" changed AS (UPDATE {TABLE} AS own SET {assigned} FROM excluded"
            f" WHERE own.name = excluded.name AND {condition} RETURNING {changed}),"
            f" made AS (INSERT INTO {TABLE} ({COLUMNS})"
            " SELECT name, version, token, state, version, expires, holder, '', '', 0 FROM excluded"
            f" WHERE NOT EXISTS (SELECT FROM {TABLE} AS own WHERE own.name = excluded.name)"
            f" ON CONFLICT (name) DO NOTHING RETURNING {', '.join(RETURNED)})"
            f" SELECT {found} FROM (SELECT * FROM changed UNION ALL SELECT * FROM made) AS row"
        )

    def _confirming(self) -> str:
        """Of a waiter that was handed the lock."""
        changes = {
            "version": f"{self._greatest}(version + 1, {self._now})",
            "state": f"'{HELD}'",
            "expires": f"{self._greatest}(expires, {self._now} + %s)",
            "holder": "%s",
        }
        return (
            f"UPDATE {TABLE} SET {_assigned(changes)} WHERE name = %s AND token = %s"
            f" AND state IN ('{HELD}', '{CLAIMED}') AND expires > {self._now}"
            f" RETURNING fence, token, state, expires - {self._now}, holder, waiters"
        )

    def _staying(self) -> str:
        """Of a waiter that looks, and so shows that it is alive."""
        found = f"{self._position}(waiters, %s)"
        changes = {
            "version": f"{self._greatest}(version + 1, {self._now})",
            "waiters": f"substr(waiters, 1, {found} - {DIGITS + 1}) || CAST({self._now} AS text)"
            f" || substr(waiters, {found})",
            "careful_until": f"{self._greatest}(careful_until, {self._now} + {ALIVE})",
        }
        return (
            f"UPDATE {TABLE} SET {_assigned(changes)} WHERE name = %s AND {found} > 0"
            f" AND state <> '{FREE}' AND expires > {self._now}"
            f" RETURNING fence, token, state, expires - {self._now}, holder, waiters"
        )

    def _releasing(self) -> str:
        """Free the lock, or hand it to the first in the queue, who is told."""
        now, greatest = self._now, self._greatest
        token_at = 2 * DIGITS + 1
        token = f"substr(waiters, {token_at}, {TOKEN_LENGTH})"
        inbox = f"substr(waiters, {token_at + TOKEN_LENGTH}, {INBOX_LENGTH})"
        seen = f"substr(waiters, {DIGITS + 1}, {DIGITS})"
        changes = {
            "version": f"{greatest}(version + 1, {now})",
            "token": token,
            "state": f"CASE WHEN waiters = '' THEN '{FREE}' ELSE '{CLAIMED}' END",
            "fence": f"CASE WHEN waiters = '' THEN fence ELSE {greatest}(fence + 1, {now}) END",
            "expires": f"CASE WHEN waiters = '' THEN {now} ELSE {now} + {GRANT_TTL} END",
            "holder": inbox,
            "waiters": f"substr(waiters, {RECORD_LENGTH + 1})",
        }
        released = (
            f"UPDATE {TABLE} SET {_assigned(changes)}"
            f" WHERE name = %s AND token = %s AND state = '{HELD}' AND expires > {now}"
            f" AND (waiters = '' OR {seen} > CAST({now} - {ALIVE} AS text))"
        )
        if not self._notifies:
            return released
        # In one statement: told is what was changed, and only that.
        return (
            f"WITH released AS ({released} RETURNING token, holder)"
            f" SELECT CASE WHEN token <> '' THEN pg_notify('{CHANNEL}' || holder, token) END FROM released"
        )

    def acquire(self, connection: Any, name: bytes, attempt: Attempt) -> Answer | None:
        """Grant the lock to the request, or let it wait. Repeatable. None: nothing was done."""
        key, token = connection.Database.Binary(name), attempt.token
        if attempt.queue and attempt.place:
            found = _first(connection, self._confirm, [attempt.ttl, attempt.holder, key, token])
            found = found or _first(connection, self._stay, [token, token, key, token])
        else:
            inbox = [f"{attempt.inbox:<{INBOX_LENGTH}}"] if attempt.queue else []
            sql = self._join if attempt.queue else self._take
            found = _first(connection, sql, [key, token, attempt.ttl, attempt.holder, *inbox])
        if found is None:
            return None
        fence, holding, state, left, holder, waiters = found
        if holding == token:
            return Answer(True, fence, holding, state, left, holder)
        try:
            line = waiters_from_text(waiters)
            place = next(waiter.place for waiter in line if waiter.token == token)
        except (StopIteration, ValueError):
            return None  # what others have written: the general way says so
        return Answer(False, fence, holding, state, left, holder, place, line[0].token == token)

    def release(self, connection: Any, name: bytes, token: str) -> bool:
        """False: nothing was done."""
        with connection.cursor() as cursor:
            cursor.execute(self._release, [connection.Database.Binary(name), token])
            return bool(cursor.rowcount)


def _first(connection: Any, sql: str, parameters: Sequence[Any]) -> tuple[Any, ...] | None:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        found: tuple[Any, ...] | None = cursor.fetchone()
        return found


def _assigned(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{column} = {value}" for column, value in changes.items())
