"""Messages that this process has sent with a countdown. They wait in a worker, unacknowledged."""

from __future__ import annotations

import heapq
from typing import Any

from celery.signals import worker_init, worker_process_init  # type: ignore[import-untyped]

from ..utils.clock import clock
from ..utils.guards import new_guard

LONGEST_PAUSE = 5.0  # seconds


class Countdowns:
    """The countdowns that may still run.

    ``most``: how many there may be at a time: as many as this process runs tasks at a time.
    """

    def __init__(self) -> None:
        self.most = 1
        self._ends: list[float] = []
        self._guard = new_guard()

    def take(self, length: float) -> bool:
        """Returns whether a countdown of ``length`` seconds may begin. If so, it is counted."""
        with self._guard:
            return self._take(clock(), length)

    def _take(self, now: float, length: float) -> bool:
        while self._ends and self._ends[0] <= now:
            heapq.heappop(self._ends)
        if len(self._ends) >= self.most:
            return False
        heapq.heappush(self._ends, now + length)
        return True


countdowns = Countdowns()


@worker_init.connect  # type: ignore[untyped-decorator]
def _count_threads(sender: Any, **_: Any) -> None:
    """All tasks run in this process, unless the pool has processes."""
    countdowns.most = sender.concurrency if isinstance(sender.concurrency, int) else 1  # "auto" is for processes


@worker_process_init.connect  # type: ignore[untyped-decorator]
def _count_one(**_: Any) -> None:
    """A child may follow another one that had a countdown under way, as with max_tasks_per_child."""
    countdowns.most = 1
    countdowns.take(LONGEST_PAUSE)
