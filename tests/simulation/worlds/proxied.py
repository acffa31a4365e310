"""One Redis behind a proxy, as some services have it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ..servers.misleading import mislead
from .redis import RedisWorld

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from ..simulation import Simulation


class ProxiedWorld(RedisWorld):
    """Scripts are not told who receives a message, and messages may get lost."""

    name = "proxied"
    own_profiles = ()

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._loses_all = mislead([self.server], random.Random(f"proxied {simulation.seed}"))

    def _hint_delay(self, process: Process) -> float | None:
        return None if self._loses_all else super()._hint_delay(process)
