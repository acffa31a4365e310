"""How one lock is asked for and given back: in one statement where the case is regular, else by compare-and-swap."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...exceptions import LockBackendError
from ...utils.clock import clock
from ..common import state
from ..common.state import Attempt, Decision, Row
from .sql import Answer, Quick, Statements

LONGEST_BACK_OFF = 0.1  # seconds between two attempts to change a row that others change as well


class Steps:
    """``give_up_after``: seconds."""

    def __init__(self, vendor: str, sql: Statements, give_up_after: float) -> None:
        self._sql = sql
        self._quick = Quick(vendor) if has_returning(vendor) else None
        self._give_up_after = give_up_after

    def acquire(self, connection: Any, name: bytes, attempt: Attempt) -> tuple[Answer, float]:
        """And when what was answered was sent, on ``clock()``."""
        sent_at = clock()
        is_short = attempt.ttl < state.LOOK  # others may have to be told when it ends
        if self._quick and not is_short and (answer := self._quick.acquire(connection, name, attempt)):
            return answer, sent_at
        row, decision, sent_at = self._changed(
            connection, name, lambda row: state.acquire(row, attempt), is_patient=True
        )
        if decision.is_retired:
            raise LockBackendError(f"The request for {name.decode()!r} was given back before it was answered.")
        left = row.expires - row.now
        place, is_first = decision.place, decision.is_first
        return Answer(decision.granted, row.fence, row.token, row.state, left, row.holder, place, is_first), sent_at

    def release(
        self, connection: Any, name: bytes, token: str, cooldown: int = 0, retire: int = 0, force: bool = False
    ) -> bool:
        """Whether the token held the lock. As ``state.release``."""
        if self._quick and not (cooldown or retire or force) and self._quick.release(connection, name, token):
            return True
        _, decision, _ = self._changed(connection, name, lambda row: state.release(row, token, cooldown, retire, force))
        return decision.granted

    def _changed(
        self, connection: Any, name: bytes, decide: Callable[[Row], Decision], *, is_patient: bool = False
    ) -> tuple[Row, Decision, float]:
        """Read the row, decide, and write unless somebody else wrote meanwhile; then once more.

        ``is_patient``: those who only come to wait stand back from those who hand the lock on.
        """
        sql, give_up, tries = self._sql, clock() + self._give_up_after, 0
        while True:
            sent_at = clock()
            row = sql.read(connection, name)
            before = replace(row)
            decision = decide(row)
            if row == before or sql.write(connection, name, row, decision.told):
                return row, decision, sent_at
            if clock() > give_up:
                raise LockBackendError(
                    f"Others changed the row of the lock {name.decode()!r} {tries} times in {self._give_up_after:g} s,"
                    " each time before this process could. Let fewer processes wait for it."
                )
            tries += 1
            if is_patient:
                time.sleep(random.uniform(0, min(LONGEST_BACK_OFF, 0.001 * 2**tries)))


def has_returning(vendor: str) -> bool:
    return vendor == "postgresql" or (vendor == "sqlite" and sqlite3.sqlite_version_info >= (3, 35))
