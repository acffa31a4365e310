"""The fast path: to acquire and release a lock in one statement, where the database has RETURNING.

A statement does nothing where more counts than the token, the expiry and the queue of the row: then the algorithm of
``common.state`` decides, by compare-and-swap.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...types import TOKEN_LENGTH
from ..common.state import (
    CLAIMED,
    DIGITS,
    FREE,
    HELD,
    INBOX_LENGTH,
    RECORD_LENGTH,
    RECORDS,
    Attempt,
    microseconds,
)
from ..common.timing import Timing
from .sql import CHANNEL, CLOCKS, COLUMNS, TABLE
from .statement import Statement

RETURNED = ("fence", "token", "state", "expires", "holder", "waiters")

# In a statement whose loss in a crash takes a lease from nobody: PostgreSQL answers it before it is on the disk. What
# makes a lease, or lets it last, is never one. See "Commits that are not waited for" in docs/internals/protocol.md.
ASYNCHRONOUS = "set_config('synchronous_commit', 'off', true)"


class AcquireResult(NamedTuple):
    """The lock after an attempt. ``remaining``: microseconds; ``place``: 0 for none."""

    granted: bool
    fence: int
    token: str
    state: str
    remaining: int
    holder: str
    place: int = 0
    is_first: bool = False


def has_returning(vendor: str) -> bool:
    return vendor == "postgresql" or (vendor == "sqlite" and sqlite3.sqlite_version_info >= (3, 35))


class FastPath:
    """The statements for PostgreSQL and SQLite, on a connection of Django."""

    def __init__(self, vendor: str, timing: Timing) -> None:
        self._timing = timing
        self._now, self._greatest, self._strpos = CLOCKS[vendor], "GREATEST", "strpos"
        self._notifies = vendor == "postgresql"
        self._has_one_writer = vendor == "sqlite"
        if vendor == "sqlite":
            self._greatest, self._strpos = "MAX", "instr"
        self._take, self._join = Statement(self._taking(may_wait=False)), Statement(self._taking(may_wait=True))
        self._confirm, self._refresh = Statement(self._confirming()), Statement(self._refreshing())
        self._release = Statement(self._releasing())

    def _taking(self, *, may_wait: bool) -> str:
        """Take a lock that is free or was granted to this token already; else join the queue, if it may wait."""
        # ``excluded`` is the attempt as a row, with the moment at which the statement began, "now", as its version.
        # A statement that waits for another one may take a lease for held that has just expired, never the other way.
        now, greatest = "excluded.version", self._greatest
        is_over = f"(own.state = '{FREE}' OR own.expires <= {now})"
        is_mine = f"own.token = excluded.token AND own.state IN ('{HELD}', '{CLAIMED}') AND own.expires > {now}"
        is_others = f"(NOT {is_over} AND own.token <> excluded.token)"
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
            "expires": f"CASE WHEN {is_over} OR own.state = '{CLAIMED}' THEN excluded.expires"
            f" ELSE {greatest}(own.expires, excluded.expires) END",
            "holder": "excluded.holder",
            "waiters": living,
        }
        if may_wait:
            cases.append(f"{is_others} AND {self._strpos}(own.waiters, excluded.token) = 0")
            changes = {
                column: f"CASE WHEN {is_others} THEN own.{column} ELSE {value} END" for column, value in changes.items()
            } | {
                "version": version,
                "waiters": f"{living} || CASE WHEN {is_others} THEN {waiter} ELSE '' END",
                "careful_until": f"CASE WHEN {is_others} THEN {greatest}(own.careful_until, {now} + %s)"
                " ELSE own.careful_until END",
            }
        condition = f"({' OR '.join(cases)}) AND {self._strpos}(own.retired, excluded.token) = 0"
        return self._updating_or_inserting(_assigned(changes), condition)

    def _updating_or_inserting(self, assigned: str, condition: str) -> str:
        found = f"fence, token, state, expires - {self._now}, holder, waiters"
        if self._has_one_writer:
            return (
                f"INSERT INTO {TABLE} AS own ({COLUMNS})"
                f" VALUES (%s, {self._now}, %s, '{HELD}', {self._now}, {self._now} + %s, %s, '', '', 0)"
                f" ON CONFLICT (name) DO UPDATE SET {assigned} WHERE {condition} RETURNING {found}"
            )
        # ON CONFLICT of PostgreSQL begins anew whenever another statement has changed the row before, for seconds
        # where many want it. UPDATE waits for its turn.
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
            f" SELECT {found}, CASE WHEN token <> (SELECT token FROM excluded) THEN {ASYNCHRONOUS} END"
            " FROM (SELECT * FROM changed UNION ALL SELECT * FROM made) AS row"
        )

    def _confirming(self) -> str:
        """Of a waiter that was handed the lock. Until then it was kept for as long as others wait for it."""
        held_until = f"CASE WHEN state = '{HELD}' THEN expires ELSE 0 END"
        changes = {
            "version": f"{self._greatest}(version + 1, {self._now})",
            "state": f"'{HELD}'",
            "expires": f"{self._greatest}({held_until}, {self._now} + %s)",
            "holder": "%s",
        }
        return (
            f"UPDATE {TABLE} SET {_assigned(changes)} WHERE name = %s AND token = %s"
            f" AND state IN ('{HELD}', '{CLAIMED}') AND expires > {self._now}"
            f" RETURNING fence, token, state, expires - {self._now}, holder, waiters"
        )

    def _refreshing(self) -> str:
        """Of a waiter that looks, and so shows that it is alive."""
        found = f"{self._strpos}(waiters, %s)"
        changes = {
            "version": f"{self._greatest}(version + 1, {self._now})",
            "waiters": f"substr(waiters, 1, {found} - {DIGITS + 1}) || CAST({self._now} AS text)"
            f" || substr(waiters, {found})",
            "careful_until": f"{self._greatest}(careful_until, {self._now} + %s)",
        }
        return (
            f"UPDATE {TABLE} SET {_assigned(changes)} WHERE name = %s AND {found} > 0"
            f" AND state <> '{FREE}' AND expires > {self._now}"
            f" RETURNING fence, token, state, expires - {self._now}, holder, waiters"
            f"{'' if self._has_one_writer else f', {ASYNCHRONOUS}'}"
        )

    def _releasing(self) -> str:
        """Free the lock, or hand it over to the first in the queue, and notify that one."""
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
            "expires": f"CASE WHEN waiters = '' THEN {now} ELSE {now} + %s END",
            "holder": inbox,
            "waiters": f"substr(waiters, {RECORD_LENGTH + 1})",
        }
        released = (
            f"UPDATE {TABLE} SET {_assigned(changes)}"
            f" WHERE name = %s AND token = %s AND state = '{HELD}' AND expires > {now}"
            f" AND (waiters = '' OR {seen} > CAST({now} - %s AS text))"
        )
        if not self._notifies:
            return f"{released} RETURNING 1"
        # In one statement: a change that is not made notifies nobody.
        notify = f"CASE WHEN token <> '' THEN pg_notify('{CHANNEL}' || holder, token) END"
        return f"{released} RETURNING {notify}, {ASYNCHRONOUS}"

    def acquire(self, connection: Any, name: bytes, attempt: Attempt) -> AcquireResult | None:
        """Grant the lock to the attempt, or let it wait. Repeatable. None: nothing was done."""
        token = attempt.token
        if attempt.queue and attempt.place:
            found = self._confirm.fetch_one(connection, [attempt.ttl, attempt.holder, name, token])
            found = found or self._refresh.fetch_one(connection, [token, token, self._waiter_ttl, name, token])
        else:
            waiter = [f"{attempt.inbox:<{INBOX_LENGTH}}", self._waiter_ttl] if attempt.queue else []
            taking = self._join if attempt.queue else self._take
            found = taking.fetch_one(connection, [name, token, attempt.ttl, attempt.holder, *waiter])
        if found is None:
            return None
        fence, holding, state, remaining, holder, waiters, *_ = found
        if holding == token:
            return AcquireResult(True, fence, holding, state, remaining, holder)
        token_at = waiters.find(token)
        if token_at < 2 * DIGITS or not RECORDS.fullmatch(waiters):
            return None  # something else wrote this: what reads the row says so
        place = int(waiters[token_at - 2 * DIGITS : token_at - DIGITS])
        return AcquireResult(False, fence, holding, state, remaining, holder, place, token_at == 2 * DIGITS)

    @property
    def _waiter_ttl(self) -> int:
        return microseconds(self._timing.waiter_expires_after)

    def release(self, connection: Any, name: bytes, token: str) -> bool:
        """Free the lock or hand it over. False: nothing was done."""
        grant_ttl = microseconds(self._timing.grant_ttl)
        return self._release.fetch_one(connection, [grant_ttl, name, token, self._waiter_ttl]) is not None


def _assigned(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{column} = {value}" for column, value in changes.items())
