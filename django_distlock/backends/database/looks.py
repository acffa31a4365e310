"""When a waiter looks that nobody can wake."""

from __future__ import annotations

import random

from ...utils.clock import clock
from .statements import Turn

SHORTEST, LONGEST = 0.002, 0.25  # seconds between two looks
GROWTH = 1.5


class Looks:
    """The looks of one waiter, through all its waits for a turn.

    The pause grows while the lock stays with the same holder, and begins anew when it went to another. Those
    further behind look less often. It is random by a third, so that processes do not look at the same moment.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._pause = SHORTEST
        self._seen = Turn(False)
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Another wait."""
        self._until = clock() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._until - clock())

    def go_on(self) -> bool:
        return self.left > 0

    def pause(self) -> float:
        """Seconds until the next look."""
        longest = LONGEST * random.uniform(0.7, 1)
        return min(self.left, longest, self._pause * (1 + self._seen.ahead) * random.uniform(0.7, 1.3))

    def see(self, turn: Turn) -> bool:
        """Whether it has come."""
        self._pause = SHORTEST if turn.fence != self._seen.fence else self._pause * GROWTH
        self._seen = turn
        return turn.has_come
