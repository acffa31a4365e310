"""The regular cases of rows.py as one statement each, so that nobody's change comes between a look and a write.

What is not regular changes nothing here: a waiter to be passed over or put back to its place, a rest, a retired token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...types import TOKEN_LENGTH
from .rows import ALIVE, CLAIMED, DIGITS, FREE, GRANT_TTL, HELD, INBOX_LENGTH, RECORD_LENGTH, Request, waiters_from_text
from .statements import CHANNEL, CLOCKS, COLUMNS, TABLE

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

    def acquire(self, connection: Any, name: bytes, request: Request) -> Answer | None:
        """Grant the lock to the request, or let it wait. Repeatable. None: nothing was done."""
        key, token = connection.Database.Binary(name), request.token
        if request.queue and request.place:
            found = _first(connection, self._confirm, [request.ttl, request.holder, key, token])
            found = found or _first(connection, self._stay, [token, token, key, token])
        else:
            inbox = [f"{request.inbox:<{INBOX_LENGTH}}"] if request.queue else []
            sql = self._join if request.queue else self._take
            found = _first(connection, sql, [key, token, request.ttl, request.holder, *inbox])
        if found is None:
            return None
        fence, holding, state, left, holder, waiters = found
        if holding == token:
            return Answer(True, fence, holding, state, left, holder)
        try:
            line = waiters_from_text(waiters)
            place = next(waiter.place for waiter in line if waiter.token == token)
        except (StopIteration, ValueError):
            return None  # what others have written: rows.py says so
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
