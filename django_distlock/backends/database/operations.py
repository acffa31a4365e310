"""Acquire and release: in one statement if the case is common, else by compare-and-swap of the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from ...exceptions import LockBackendError
from ...types import LockRequest
from ...utils.clock import clock
from ..common import state
from ..common.backoff import Backoff, retry
from ..common.state import Attempt, Decision, Row, StoredLease, microseconds
from ..common.timing import Timing
from .errors import RowChanged, is_row_changed
from .fast_path import AcquireResult, FastPath, has_returning
from .sql import Statements
from .statement import Statement


class Operations:
    """``timeout``: seconds until the deadline of a compare-and-swap that collides with others."""

    def __init__(self, vendor: str, sql: Statements, timeout: float, timing: Timing) -> None:
        self._sql = sql
        self._fast_path = FastPath(vendor, timing) if has_returning(vendor) else None
        self._timeout = timeout
        self._timing = timing

    def acquire(self, connection: Any, name: bytes, attempt: Attempt) -> tuple[AcquireResult, float]:
        """The result, and when its statement was sent, on ``clock()``."""
        sent_at = clock()
        is_short = attempt.ttl < microseconds(self._timing.look_interval)  # a waiter may have to learn when it ends
        if self._fast_path and not is_short and (result := self._fast_path.acquire(connection, name, attempt)):
            return result, sent_at
        # A process that only wants to wait gives way to those that hand the lock over.
        pause = self._timing.retry_pause_longest
        return self._decided(connection, name, lambda row: state.acquire(row, attempt), pause)

    def exchange(self, connection: Any, name: bytes, old: LockRequest, attempt: Attempt) -> tuple[AcquireResult, float]:
        """As ``acquire()``, by ``state.exchange``."""
        retire = microseconds(old.retires_for) if old.in_doubt else 0
        return self._decided(connection, name, lambda row: state.exchange(row, old.token, attempt, retire), 0.0)

    def _decided(
        self, connection: Any, name: bytes, decide: Callable[[Row], Decision], longest_pause: float
    ) -> tuple[AcquireResult, float]:
        row, decision, sent_at = self._compare_and_swap(connection, name, decide, longest_pause)
        lease = decision.lease
        if lease is None:
            raise LockBackendError(f"The request for {name.decode()!r} was given back before it was answered.")
        remaining, place = lease.expires - row.now, (decision.place, decision.is_first)
        result = AcquireResult(
            decision.granted, lease.fence, lease.token, lease.state, remaining, lease.holder, *place, lease.slot,
            decision.is_crowded,
        )  # fmt: skip
        return result, sent_at

    def acquire_all(
        self, connection: Any, attempts: Sequence[tuple[bytes, Attempt]]
    ) -> tuple[list[StoredLease], float] | None:
        """The leases, granted in one transaction, and when the first row was read, on ``clock()``.

        None: a lock is not free, or others wait for it, or another process is changing its row.
        """
        sent_at = clock()
        rows = [(name, self._sql.read(connection, name)) for name, _ in attempts]
        if not all(state.is_free_for(row, attempt) for (_, row), (_, attempt) in zip(rows, attempts, strict=True)):
            return None
        leases = [state.grant(row, attempt) for (_, row), (_, attempt) in zip(rows, attempts, strict=True)]
        try:
            with self._sql.transaction(connection):
                self._write_all(connection, rows)
        except RowChanged:
            return None
        return leases, sent_at

    def _write_all(self, connection: Any, rows: Sequence[tuple[bytes, Row]]) -> None:
        """Raises RowChanged."""
        for name, row in sorted(rows, key=itemgetter(0)):  # one order for all processes
            if not self._sql.write(connection, name, row):
                raise RowChanged

    def release(
        self,
        connection: Any,
        name: bytes,
        token: str,
        cooldown: int = 0,
        retire: int = 0,
        force: bool = False,
        by_message: bool = False,
    ) -> bool:
        """Whether the token held the lock. As ``state.release``.

        ``by_message``: the first waiter may take the lock by the message that hands it over.
        """
        is_plain = not (cooldown or retire or force)
        if self._fast_path and is_plain and self._fast_path.release(connection, name, token, by_message=by_message):
            return True
        _, decision, _ = self._compare_and_swap(
            connection, name, lambda row: state.release(row, token, cooldown, retire, force), 0.0
        )
        return decision.granted

    def confirmation(self, name: bytes, attempt: Attempt) -> tuple[Statement, list[Any]]:
        """The statement that confirms a lease, to be posted, and its parameters."""
        assert self._fast_path
        return self._fast_path.confirmation(name, attempt)

    def confirm(self, connection: Any, name: bytes, attempt: Attempt) -> set[str]:
        """As ``state.confirm``. Returns the token if it has the lock."""
        if self._fast_path:
            statement, parameters = self._fast_path.confirmation(name, attempt)
            if statement.fetch_one(connection, parameters):
                return {attempt.token}
        _, decision, _ = self._compare_and_swap(connection, name, lambda row: state.confirm(row, attempt), 0.0)
        return {attempt.token} if decision.granted else set()

    def renew(self, connection: Any, name: bytes, leases: Sequence[tuple[str, int]]) -> set[str]:
        """Renew leases in any slots: by token, the microseconds that each must last. Returns the tokens that hold."""
        renewed: set[str] = set()

        def decide(row: Row) -> Decision:
            renewed.clear()
            renewed.update(token for token, ttl in leases if row.renew(token, ttl))
            return Decision(bool(renewed))

        self._compare_and_swap(connection, name, decide, 0.0)
        return renewed

    def _compare_and_swap(
        self, connection: Any, name: bytes, decide: Callable[[Row], Decision], longest_pause: float
    ) -> tuple[Row, Decision, float]:
        """Read the row, decide, and write it if it has not changed since; otherwise repeat."""

        def attempt() -> tuple[Row, Decision, float]:
            sent_at = clock()
            row = self._sql.read(connection, name)
            before = replace(row)
            decision = decide(row)
            if row != before and not self._sql.write(connection, name, row, decision.notify):
                raise RowChanged
            return row, decision, sent_at

        backoff = Backoff(clock() + self._timeout, self._timing.retry_pause_shortest, longest_pause)
        try:
            return retry(attempt, is_row_changed, backoff)
        except RowChanged:
            raise LockBackendError(
                f"Others changed the row of the lock {name.decode()!r} {backoff.attempts} times in {self._timeout:g} s,"
                " each time before this process could. Let fewer processes wait for it."
            ) from None
