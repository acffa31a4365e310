"""The runs of beat on Redis: one key per entry."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from ...exceptions import UnreadableRun
from ...types import LastRun
from ...utils.drive import drive
from ...utils.events import about_event
from ..base import RunsBackend
from .keys import RUNS, SCAN_STEP, Keys
from .operations import Operations

logger = logging.getLogger("django_distlock")


class RedisRuns(RunsBackend):
    """A part of RedisBackend, which has the rest of what it needs."""

    alias: str
    keys: Keys
    shared_prefix: str
    _operations: Operations
    _client: Any
    _sent: Any
    _listed: Any
    _translated: Any

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        command = self._operations.claim_run(name, seen, now, ttl, self.grace, self.runs_ahead)
        return self._operations.claimed_run(name, self._sent(command), self.runs_ahead)

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        return [run if isinstance(run, LastRun) else None for run in self._find_runs(names)]

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        names = chain.from_iterable(
            drive(page, self._client, self._translated).get(RUNS, ())
            for page in self._listed(self.keys.at(self.shared_prefix), [RUNS], "")
        )
        while batch := list(islice(names, SCAN_STEP)):
            for name, run in zip(batch, self._find_runs(batch), strict=True):
                if isinstance(run, LastRun):
                    yield name, run
                elif run:
                    logger.error("%s", run, extra=about_event("unreadable", alias=self.alias, entry=name))

    def _find_runs(self, names: Sequence[str]) -> list[LastRun | UnreadableRun | None]:
        return self._operations.found_runs(names, self._sent(*self._operations.find_runs(names)))
