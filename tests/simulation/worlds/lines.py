"""Two worlds of one Redis, with what may happen between any two lines of the package."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..engine.lines import STAGES, Lines
from ..plan import IMPATIENT
from .redis import RedisWorld

if TYPE_CHECKING:
    from ..simulation import Simulation

LINE = ("LocalQueue.", "LockRequest.inherit")  # in which the threads of a process stand
LINES_TO_ENTER = 250  # that run until a free lock is held


class ThreadsWorld(RedisWorld):
    """Others go first."""

    name = "threads"
    own_profiles = (IMPATIENT,)
    share, share_in_line = 0.003, 0.03

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.lines = Lines(self.scheduler, self._share_of, 4 * simulation.distance)
        # What stands on a connection then is not known, as after a cancellation.
        self.lines.strikes = lambda process: simulation.judges.pace.cancels(process)
        self.lines.pauses = lambda process, seconds: simulation.judges.pace.pauses(process, seconds)
        self.scheduler.trace = self.lines.trace

    def _share_of(self, code: CodeType) -> float:
        is_often = self.profile is IMPATIENT and code.co_qualname.startswith(LINE)
        return self.share_in_line if is_often else self.share


class InterruptsWorld(ThreadsWorld):
    """Calls are struck by exceptions."""

    name = "interrupts"
    own_profiles = ()
    share = 0.0

    def of_call(self, chance: random.Random, about: Mapping[str, Any]) -> Mapping[str, Any]:
        """Kept handles are dropped by nobody, so that each lease of theirs has to be left."""
        if chance.random() < 0.2:
            return {}
        stage = chance.choice(STAGES)
        if stage == "ends" or chance.random() < 0.3:
            after = int(10 ** chance.uniform(0.0, 2.5))
        else:
            after = chance.randrange(LINES_TO_ENTER)
        again = {"reentrant": True, "inside": about["name"]} if stage == "enters again" and "ttl" in about else {}
        return {"struck_at": stage, "struck_after": after, "keeps_handle": chance.random() < 0.8, **again}
