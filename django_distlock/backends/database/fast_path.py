"""The fast path: acquire and release a lock in one statement, if the database has RETURNING.

A statement does nothing if more counts than the token, the expiry and the queue of the row, for example if the lock has
leases in other slots than the first, or if a newer version wrote the row. Then the algorithm of ``common.state``
decides, by compare-and-swap.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...formats import NUMBER
from ...types import TOKEN_LENGTH
from ..common.state import (
    CLAIMED,
    DIGITS,
    FREE,
    HELD,
    INBOX_LENGTH,
    RECORD_LENGTH,
    RECORDS,
    SLOTS_AT,
    SLOTS_LENGTH,
    Attempt,
    end_of_record,
    microseconds,
)
from ..common.timing import Timing
from .sql import CHANNEL, CLOCKS, COLUMNS, TABLE
from .statement import Statement

# In a statement whose loss in a crash takes a lease from nobody: PostgreSQL answers it before it is on the disk. A
# statement that makes or extends a lease never has it. See "Commits that are not waited for" in
# docs/internals/protocol.md.
ASYNCHRONOUS = "set_config('synchronous_commit', 'off', true)"


class AcquireResult(NamedTuple):
    """The lease that was granted, or is in the way. ``remaining``: microseconds; ``place``: 0 for none."""

    granted: bool
    fence: int
    token: str
    state: str
    remaining: int
    holder: str
    place: int = 0
    is_first: bool = False
    slot: int = 1
    is_crowded: bool = False


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
        self._join_few = Statement(self._taking(may_wait=True, has_limit=True))
        self._confirm, self._refresh = Statement(self._confirming()), Statement(self._refreshing())
        self._release = Statement(self._releasing())
        self._release_by_message = Statement(self._releasing(by_message=True))

    def _taking(self, *, may_wait: bool, has_limit: bool = False) -> str:
        """Take a free lock; else join the queue, if it may wait. ``has_limit``: only if the queue is not too long."""
        # ``excluded`` is the attempt as a row; its version is the moment at which the statement began, "now".
        # A statement that waits for another one may treat a lease as held that has just expired, never the reverse.
        now, greatest = "excluded.version", self._greatest
        is_free = f"(own.state = '{FREE}' OR own.expires <= {now})"
        living = f"CASE WHEN own.careful_until <= {now} THEN '' ELSE own.waiters END"
        version = f"{greatest}(own.version + 1, {now})"
        changes = {
            "token": "excluded.token",
            "state": "excluded.state",
            "fence": f"{greatest}(own.fence + 1, {now})",
            "expires": "excluded.expires",
            "holder": "excluded.holder",
            "waiters": "''",
        }
        condition = f"{is_free} AND {living} = ''"
        if may_wait:
            waiter = f"CAST({version} AS text) || CAST({now} AS text) || excluded.token || %s"
            joined = {
                "waiters": f"{living} || {waiter}",
                "careful_until": f"{greatest}(own.careful_until, {now} + %s)",
            }
            changes["careful_until"] = "own.careful_until"
            changes = {
                column: f"CASE WHEN {is_free} THEN {value} ELSE {joined.get(column, f'own.{column}')} END"
                for column, value in changes.items()
            }
            is_new = f"own.token <> excluded.token AND {self._strpos}(own.waiters, excluded.token) = 0"
            may_join = f"{is_new} AND {_wants_one('own.waiters', 0)}"
            if has_limit:
                may_join += " AND length(own.waiters) < %s"  # else compare-and-swap counts the dead ones or drops them
            condition = f"CASE WHEN {is_free} THEN {living} = '' ELSE {may_join} END"
        condition += f" AND {self._strpos}(own.retired, excluded.token) = 0 AND own.others = ''"
        condition += f" AND own.format = {NUMBER}"
        return self._updating(_assigned({"version": version, **changes}), condition)

    def _updating(self, assigned: str, condition: str) -> str:
        found = f"own.fence, own.token, own.state, own.expires - {self._now}, own.holder, own.waiters"
        if self._has_one_writer:
            return (
                f"INSERT INTO {TABLE} AS own ({COLUMNS})"
                f" VALUES (%s, {NUMBER}, {self._now}, %s, '{HELD}', {self._now}, {self._now} + %s, %s, '', '', '', 0)"
                f" ON CONFLICT (name) DO UPDATE SET {assigned} WHERE {condition}"
                f" RETURNING {found.replace('own.', '')}"
            )
        # In PostgreSQL, ON CONFLICT begins anew whenever another statement has changed the row first. If many want the
        # row, this takes seconds. UPDATE waits for its turn.
        return (
            f"UPDATE {TABLE} AS own SET {assigned}"
            " FROM (SELECT CAST(%s AS bytea) AS name, moment AS version, CAST(%s AS text) AS token,"
            f" '{HELD}' AS state, moment + CAST(%s AS bigint) AS expires, CAST(%s AS text) AS holder"
            f" FROM (SELECT {self._now} AS moment) AS clock) AS excluded"
            f" WHERE own.name = excluded.name AND {condition}"
            f" RETURNING {found}, CASE WHEN own.waiters <> '' THEN {ASYNCHRONOUS} END"
        )

    def _confirming(self) -> str:
        """For a waiter that was handed the lock. Before it confirms, the lease lasts only for the time to take it."""
        held_until = f"CASE WHEN state = '{HELD}' THEN expires ELSE 0 END"
        changes = {
            "version": f"{self._greatest}(version + 1, {self._now})",
            "state": f"'{HELD}'",
            "expires": f"{self._greatest}({held_until}, {self._now} + %s)",
            "holder": "%s",
        }
        return (
            f"UPDATE {TABLE} SET {_assigned(changes)} WHERE name = %s AND token = %s"
            f" AND state IN ('{HELD}', '{CLAIMED}') AND expires > {self._now} AND others = '' AND format = {NUMBER}"
            f" RETURNING fence, token, state, expires - {self._now}, holder, waiters"
        )

    def _refreshing(self) -> str:
        """For a waiter that looks, and so shows that it is alive."""
        found = f"{self._strpos}(waiters, %s)"
        changes = {
            "version": f"{self._greatest}(version + 1, {self._now})",
            "waiters": f"substr(waiters, 1, {found} - {DIGITS + 1}) || CAST({self._now} AS text)"
            f" || substr(waiters, {found})",
            "careful_until": f"{self._greatest}(careful_until, {self._now} + %s)",
        }
        return (
            f"UPDATE {TABLE} SET {_assigned(changes)} WHERE name = %s AND {found} > 0"
            f" AND state <> '{FREE}' AND expires > {self._now} AND {_wants_one('waiters', 0)} AND others = ''"
            f" AND format = {NUMBER}"
            f" RETURNING fence, token, state, expires - {self._now}, holder, waiters"
            f"{'' if self._has_one_writer else f', {ASYNCHRONOUS}'}"
        )

    def _releasing(self, *, by_message: bool = False) -> str:
        """Free the lock, or hand it over to the first in the queue and notify that waiter.

        ``by_message``: the waiter may go on by the message, before it has confirmed its lease. Only if a crash that
        brings the lease back brings it back for longer than the waiter believes in its own, and the number that the
        message tells is a moment that has passed, so that the next one is larger. Else the statement does nothing.
        """
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
        outlasts = f" AND (waiters = '' OR (expires > {now} + %s AND fence < {now}))"
        released = (
            f"UPDATE {TABLE} SET {_assigned(changes)}"
            f" WHERE name = %s AND token = %s AND state = '{HELD}' AND expires > {now}"
            f" AND (waiters = '' OR {seen} > CAST({now} - %s AS text)) AND {_wants_one('waiters', 1)} AND others = ''"
            f" AND format = {NUMBER}"
            f"{outlasts if by_message else ''}"
        )
        if not self._notifies:
            return f"{released} RETURNING 1"
        # In one statement, so that a change that is not made notifies nobody.
        text = "token || ' ' || CAST(fence AS text)" if by_message else "token"
        notify = f"CASE WHEN token <> '' THEN pg_notify('{CHANNEL}' || holder, {text}) END"
        return f"{released} RETURNING {notify}, {ASYNCHRONOUS}"

    def acquire(self, connection: Any, name: bytes, attempt: Attempt) -> AcquireResult | None:
        """Grant the lock to the attempt, or let it wait. Repeatable. None: the statement did nothing."""
        token, may_wait = attempt.token, attempt.queue and attempt.slots == 1  # if the first slot is taken
        if attempt.queue and attempt.place:
            statement, parameters = self.confirmation(name, attempt)
            found = statement.fetch_one(connection, parameters)
            if may_wait:
                found = found or self._refresh.fetch_one(connection, [token, token, self._waiter_ttl, name, token])
        else:
            row: list[Any] = [name, token, attempt.ttl, attempt.holder]
            waiter = [end_of_record(attempt.inbox), self._waiter_ttl] if may_wait else []
            taking = self._join if may_wait else self._take
            # In the order in which they stand there
            parameters = [*row, *waiter] if self._has_one_writer else [*waiter, *row]
            if may_wait and attempt.most_places:
                taking = self._join_few
                parameters.append(attempt.most_places * RECORD_LENGTH)
            found = taking.fetch_one(connection, parameters)
        if found is None:
            return None
        fence, holding, state, remaining, holder, waiters, *_ = found
        if holding == token:
            return AcquireResult(True, fence, holding, state, remaining, holder)
        token_at = waiters.find(token)
        if token_at < 2 * DIGITS or not RECORDS.fullmatch(waiters):
            return None  # something else wrote this; reading the row raises the error
        begin = token_at - 2 * DIGITS
        place, now = int(waiters[begin : begin + DIGITS]), int(waiters[begin + DIGITS : token_at])
        # The first that is alive: nobody tells it of those before it that are not.
        ends = now - self._waiter_ttl
        is_first = all(int(waiters[at + DIGITS : at + 2 * DIGITS]) <= ends for at in range(0, begin, RECORD_LENGTH))
        return AcquireResult(False, fence, holding, state, remaining, holder, place, is_first)

    @property
    def _waiter_ttl(self) -> int:
        return microseconds(self._timing.waiter_expires_after)

    def confirmation(self, name: bytes, attempt: Attempt) -> tuple[Statement, list[Any]]:
        """The statement that makes a lease of what was handed to the attempt, and its parameters. Repeatable."""
        return self._confirm, [attempt.ttl, attempt.holder, name, attempt.token]

    def release(self, connection: Any, name: bytes, token: str, *, by_message: bool) -> bool:
        """Free the lock or hand it over. False: the statement did nothing."""
        grant_ttl = microseconds(self._timing.grant_ttl)
        parameters = [grant_ttl, name, token, self._waiter_ttl]
        if by_message and self._notifies:
            return self._release_by_message.fetch_one(connection, [*parameters, grant_ttl]) is not None
        return self._release.fetch_one(connection, parameters) is not None


def _wants_one(waiters: str, index: int) -> str:
    """Whether the waiter at that index of the queue, if there is one, wants the lock alone.

    A waiter that wants more slots, and stands behind a dead one, takes its slot at its next look.
    """
    slots_at = index * RECORD_LENGTH + SLOTS_AT + 1
    return f"substr({waiters}, {slots_at}, {SLOTS_LENGTH}) IN ('', '{1:0{SLOTS_LENGTH}}')"


def _assigned(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{column} = {value}" for column, value in changes.items())
