"""The runs of beat in a table: one row per entry, changed by single statements, on the clock of the database."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...exceptions import ClockIsAhead, LockBackendError, NewerRun, UnreadableRun
from ...formats import LARGEST, NUMBER, is_newer
from ...models import DatabaseRun
from ...runs import DAY, LastRun
from ...utils.clock import clock
from ...utils.events import about_event
from ..common.backoff import Backoff, retry
from ..common.timing import Timing
from .errors import RowChanged, is_row_changed
from .sql import CLOCKS, Pruning, end_of, insert_unless_there, placeholders

TABLE = DatabaseRun._meta.db_table
COLUMNS = "name, ran_at, token, stamp, settled_at, expires"

logger = logging.getLogger("django_distlock")


class Runs:
    """The statements, on a connection of Django. Lengths of time are microseconds.

    ``timeout``: seconds until the deadline of a claim whose row comes and goes.
    """

    def __init__(self, vendor: str, timeout: float, timing: Timing) -> None:
        self._timeout, self._timing = timeout, timing
        now = CLOCKS[vendor]
        is_kept = f"name = %s AND expires > {now}"
        is_newer = f"substr(stamp, 1, 1) BETWEEN '{NUMBER + 1}' AND '{LARGEST}'"
        may_move = f"(ran_at <= %s OR token = %s) AND (settled_at <= {now} OR %s <= %s) AND NOT ({is_newer})"
        # ran_at comes last, because MySQL compares with values that were already assigned.
        self._move = (
            f"UPDATE {TABLE} SET token = CASE WHEN ran_at < %s THEN %s ELSE token END,"
            " stamp = CASE WHEN ran_at < %s THEN %s ELSE stamp END,"
            f" expires = CASE WHEN ran_at < %s THEN {now} + %s ELSE expires END,"
            " ran_at = CASE WHEN ran_at < %s THEN %s ELSE ran_at END"
            f" WHERE {is_kept} AND {may_move} AND %s <= {now} + %s"
        )
        self._refusing = (
            f"SELECT stamp, ran_at > {now} + {DAY:.0f}000000 FROM {TABLE} WHERE {is_kept} AND NOT ({may_move})"
        )
        self._clock = f"SELECT {now}"
        # Not deleted and inserted: two such calls at the same moment may be a deadlock in MySQL.
        self._replace_expired = (
            f"UPDATE {TABLE} SET ran_at = %s, token = %s, stamp = %s, settled_at = {now} + %s, expires = {now} + %s"
            f" WHERE name = %s AND expires <= {now}"
        )
        self._insert = insert_unless_there(vendor, TABLE, COLUMNS, f"%s, %s, %s, %s, {now} + %s, {now} + %s")
        self._find = f"SELECT name, stamp FROM {TABLE} WHERE name IN ({{many}}) AND expires > {now}"
        self._list = (
            f"SELECT name, stamp FROM {TABLE} WHERE name >= %s AND name > %s AND name < %s AND expires > {now}"
            " ORDER BY name LIMIT %s"
        )
        self.pruning = Pruning(TABLE, f"expires <= {now} - %s", 1)

    def claim(
        self,
        connection: Any,
        name: bytes,
        seen: LastRun,
        now: LastRun,
        *,
        ttl: int,
        grace: int,
        max_ahead: int,
    ) -> LastRun | None:
        """See ``claim_run``. Repeatable.

        A returned stamp really refuses the claim. If the row appeared or settled between two statements, all of them
        are tried again.
        """

        def attempt() -> LastRun | None:
            if self._move_row(connection, name, seen, now, ttl, max_ahead):
                return None
            if standing := self._read_refusing(connection, name, seen, now):
                return standing
            self._check_clock(connection, now, max_ahead)
            if self._keep_seen(connection, name, seen, ttl, grace):
                return seen
            raise RowChanged

        timing = self._timing
        backoff = Backoff(clock() + self._timeout, timing.retry_pause_shortest, timing.retry_pause_longest)
        try:
            return retry(attempt, is_row_changed, backoff)
        except RowChanged:
            raise LockBackendError(
                f"The row {name.decode()!r} of {TABLE} comes and goes; is its table emptied?"
            ) from None

    def _move_row(self, connection: Any, name: bytes, seen: LastRun, now: LastRun, ttl: int, max_ahead: int) -> bool:
        """Write ``now`` into the row, if the row may be moved. Returns whether it was."""
        at = _moment(now)
        moved = [at, now.token, at, now.to_text(), at, ttl, at, at]
        with connection.cursor() as cursor:
            cursor.execute(self._move, [*moved, *_condition(connection, name, seen, now), at, max_ahead])
            return bool(cursor.rowcount)

    def _read_refusing(self, connection: Any, name: bytes, seen: LastRun, now: LastRun) -> LastRun | None:
        with connection.cursor() as cursor:
            cursor.execute(self._refusing, _condition(connection, name, seen, now))
            found = cursor.fetchone()
        if found is None:
            return None
        text, is_of_the_future = found
        return _stamp(name, "" if is_of_the_future else text)

    def _check_clock(self, connection: Any, now: LastRun, max_ahead: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(self._clock)
            ahead = _moment(now) - cursor.fetchone()[0]
        if ahead > max_ahead:
            raise ClockIsAhead(ahead / 1_000_000, max_ahead / 1_000_000)

    def _keep_seen(self, connection: Any, name: bytes, seen: LastRun, ttl: int, grace: int) -> bool:
        """Store ``seen`` if there is no row, or if the row has expired. Returns whether it did."""
        binary, values = connection.Database.Binary(name), [_moment(seen), seen.token, seen.to_text(), grace, ttl]
        with connection.cursor() as cursor:
            cursor.execute(self._replace_expired, [*values, binary])
            if not cursor.rowcount:
                cursor.execute(self._insert, [binary, *values])
            return bool(cursor.rowcount)

    def forget(self, connection: Any, name: bytes) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {TABLE} WHERE name = %s", [connection.Database.Binary(name)])
            return bool(cursor.rowcount)

    def find(self, connection: Any, names: Sequence[bytes]) -> dict[bytes, LastRun]:
        """The stamps that can be read."""
        with connection.cursor() as cursor:
            cursor.execute(
                self._find.format(many=placeholders(names)), [connection.Database.Binary(name) for name in names]
            )
            read = [(bytes(name), _stamp_or_error(bytes(name), text)) for name, text in cursor.fetchall()]
        return {name: stamp for name, stamp in read if isinstance(stamp, LastRun)}

    def page(self, connection: Any, prefix: bytes, after: bytes, limit: int) -> dict[bytes, LastRun | None]:
        """Stamps of names that begin with ``prefix``, in order, after the name ``after``.

        None, and an error in the log, for a stamp that cannot be read.
        """
        bounds = map(connection.Database.Binary, (prefix, after, end_of(prefix)))
        with connection.cursor() as cursor:
            cursor.execute(self._list, [*bounds, limit])
            read = [(bytes(name), _stamp_or_error(bytes(name), text)) for name, text in cursor.fetchall()]
        for _, stamp in read:
            if isinstance(stamp, UnreadableRun):
                logger.error("%s", stamp, extra=about_event("unreadable"))
        return {name: stamp if isinstance(stamp, LastRun) else None for name, stamp in read}


def _condition(connection: Any, name: bytes, seen: LastRun, now: LastRun) -> list[Any]:
    """The parameters of the condition that a row has not expired, and may (or may not) be moved."""
    return [connection.Database.Binary(name), _moment(seen), now.token, _moment(now), _moment(seen)]


def _stamp_or_error(name: bytes, text: str) -> LastRun | UnreadableRun:
    try:
        return _stamp(name, text)
    except UnreadableRun as error:
        return error


def _stamp(name: bytes, text: str) -> LastRun:
    try:
        return LastRun.from_text(text)
    except ValueError:
        if is_newer(text):
            raise NewerRun(f"The row {name.decode()!r} of {TABLE}") from None
        raise UnreadableRun(f"The row {name.decode()!r} of {TABLE}") from None


def _moment(stamp: LastRun) -> int:
    return round(stamp.at * 1_000_000)
