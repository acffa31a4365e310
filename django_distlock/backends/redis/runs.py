"""The runs of beat: a string for each entry, moved by a script."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ...exceptions import UnreadableRun
from ...runs import LastRun
from ...utils.events import about_event
from .keys import SCAN_STEP
from .operations import Operations
from .replies import Reply

logger = logging.getLogger("django_distlock")


class Runs:
    """``send``: sends commands, and returns their replies or raises LockBackendError."""

    def __init__(self, alias: str, operations: Operations, send: Callable[..., Reply]) -> None:
        self._alias, self._operations, self._send = alias, operations, send

    def claim(
        self, name: str, seen: LastRun, now: LastRun, ttl: float, grace: float, most_ahead: float
    ) -> LastRun | None:
        """See ``claim_run``. Repeatable."""
        command = self._operations.claim_run(name, seen, now, ttl, grace, most_ahead)
        return self._operations.claimed_run(name, self._send(command), most_ahead)

    def find(self, names: Sequence[str]) -> list[LastRun | None]:
        return [run if isinstance(run, LastRun) else None for run in self._read(names)]

    def forget(self, name: str) -> bool:
        return bool(self._operations.only(self._send(self._operations.forget_run(name))))

    def page(self, names: Iterator[str]) -> Iterator[tuple[str, LastRun]]:
        """The runs of these names that can be read. An error is logged for each of the others."""
        while batch := list(islice(names, SCAN_STEP)):
            for name, run in zip(batch, self._read(batch), strict=True):
                if isinstance(run, LastRun):
                    yield name, run
                elif run:
                    logger.error("%s", run, extra=about_event("unreadable", alias=self._alias, entry=name))

    def _read(self, names: Sequence[str]) -> list[LastRun | UnreadableRun | None]:
        return self._operations.found_runs(names, self._send(*self._operations.find_runs(names)))
