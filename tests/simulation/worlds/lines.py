"""Two worlds of one Redis, with what may happen between any two lines of the package."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..engine.lines import Lines
from .redis import RedisWorld

if TYPE_CHECKING:
    from ..simulation import Simulation


class ThreadsWorld(RedisWorld):
    """Others go first."""

    name = "threads"
    share = 0.003

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.lines = Lines(self.scheduler, self.share, 4 * simulation.distance)
        self.scheduler.trace = self.lines.trace


class InterruptsWorld(ThreadsWorld):
    """Calls are struck by exceptions."""

    name = "interrupts"
    share = 0.0

    def of_call(self, chance: random.Random) -> Mapping[str, Any]:
        return {"struck_after": int(10 ** chance.uniform(0.0, 3.0))} if chance.random() < 0.5 else {}
