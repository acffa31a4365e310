"""When a waiter looks that no notification reaches."""

from __future__ import annotations

from ...utils.chance import chance
from ...utils.clock import clock
from ..common.timing import Timing
from .sql import QueuePosition

GROWTH = 1.3


class PollBackoff:
    """The pauses between the looks of one waiter, through all its waits for a turn.

    They grow while the same holder has the lock, begin anew with another holder, and are longer for waiters further
    behind. A third of each is random, so that processes do not look at the same moment.
    """

    def __init__(self, timing: Timing, *, is_file: bool) -> None:
        self._timing = timing
        self._shortest = timing.poll_interval_shortest_of_file if is_file else timing.poll_interval_shortest
        self._pause = self._shortest
        self._seen = QueuePosition(False)
        self._deadline = 0.0

    def begin(self, timeout: float) -> None:
        """Begin another wait, of ``timeout`` seconds."""
        self._deadline = clock() + timeout

    @property
    def remaining(self) -> float:
        """Seconds until the end of this wait."""
        return max(0.0, self._deadline - clock())

    def next_pause(self) -> float:
        """Seconds until the next look."""
        longest = self._timing.poll_interval_longest * chance.uniform(0.7, 1)
        pause = self._pause * (1 + self._seen.waiters_before) * chance.uniform(0.7, 1.3)
        return min(self.remaining, longest, pause)

    def update(self, position: QueuePosition) -> None:
        """Note the result of the last look."""
        is_same_holder = position.fence == self._seen.fence
        self._pause = self._pause * GROWTH if is_same_holder else self._shortest
        self._seen = position
