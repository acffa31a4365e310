"""Renewal: of leases in first slots together; of others, and of what is unconfirmed, row by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from ...exceptions import LockBackendError
from ...types import LockRequest
from ...utils.events import about_event
from ..common.state import Attempt, microseconds
from .calls import Calls
from .errors import final
from .operations import Operations
from .sql import Statements, newer_row

logger = logging.getLogger("django_distlock")


class Renewal:
    """``row_of``: the key of the row of a request. ``batches``: parts of items, as large as a statement takes."""

    def __init__(
        self,
        alias: str,
        calls: Calls,
        sql: Statements,
        operations: Operations,
        row_of: Callable[[LockRequest], bytes],
        batches: Callable[[Sequence[Any]], Iterator[Sequence[Any]]],
    ) -> None:
        self._alias, self._calls, self._sql, self._operations = alias, calls, sql, operations
        self._row_of, self._batches = row_of, batches

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], timeout: float | None) -> list[bool | None]:
        """As the method of a backend."""
        confirmed: list[tuple[LockRequest, float]] = []
        unconfirmed: list[tuple[LockRequest, float]] = []
        for one in wanted:  # as they are now: their callers may renew them meanwhile
            (unconfirmed if one[0].is_unconfirmed else confirmed).append(one)
        held, newer = self._renew_in_first_slots([one for one in confirmed if one[0].slot == 1], timeout)
        by_row: dict[bytes, list[tuple[str, int]]] = {}
        for request, ttl in confirmed:
            if request.slot > 1:
                by_row.setdefault(self._row_of(request), []).append((request.token, microseconds(ttl)))
        for keys in self._batches(list(by_row)):
            newer |= self._calls.run(partial(self._sql.newer, names=keys), timeout)
        refused = {key: final(newer_row(key)) for key in sorted(newer)}
        row_by_row = [
            (key, partial(self._operations.renew, name=key, leases=by_row[key]))
            for key in sorted(by_row.keys() - newer)
        ]
        for request, ttl in unconfirmed:
            key, attempt = self._row_of(request), replace(Attempt.of(request), ttl=microseconds(ttl))
            row_by_row.append((key, partial(self._operations.confirm, name=key, attempt=attempt)))
        for key, renew in row_by_row:
            try:
                held |= self._calls.run(renew, timeout)
            except LockBackendError as error:  # of a row that cannot be read; the other leases must not end with it
                if not error.is_final:
                    raise
                refused[key] = error
        renewed = [self._is_renewed(request, held, refused) for request, _ in wanted]
        if refused and all(still_held is None for still_held in renewed):
            raise next(iter(refused.values()))
        for refusal in refused.values():
            about = about_event("renewal-refused", alias=self._alias)
            logger.warning("Some leases are not renewed now: %s", refusal, extra=about)
        return renewed

    def _renew_in_first_slots(
        self, wanted: Sequence[tuple[LockRequest, float]], timeout: float | None
    ) -> tuple[set[str], set[bytes]]:
        """The tokens that still hold their locks, and the keys of rows that a newer version wrote."""
        held: set[str] = set()
        newer: set[bytes] = set()
        for ttl, leases in groupby(sorted(wanted, key=itemgetter(1)), key=itemgetter(1)):
            for batch in self._batches([(self._row_of(request), request.token) for request, _ in leases]):
                held |= self._calls.run(partial(self._sql.renew, leases=batch, ttl=microseconds(ttl)), timeout)
                if others := [key for key, token in batch if token not in held]:
                    newer |= self._calls.run(partial(self._sql.newer, names=others), timeout)
        return held, newer

    def _is_renewed(self, request: LockRequest, held: set[str], refused: Container[bytes]) -> bool | None:
        if request.token in held:
            return True
        return None if self._row_of(request) in refused else False
