"""Five servers of Redis, a majority of which holds each lock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..plan import NAMES, Fault, lasts
from ..servers.redis_server import Server
from .islands import Islands
from .redis import ServersWorld, holder_in, left_in
from .server_faults import ServerFaults

if TYPE_CHECKING:
    from ..engine.network import Address
    from ..engine.scheduler import Process
    from ..simulation import Simulation

NODES = 5
NODE_TIMEOUTS = (None, None, 0.2, 1.0)  # seconds
LONGEST_TTL = 20.0  # seconds, of all in a plan
AWAY = 1.02 * LONGEST_TTL  # for which a node stays away that has lost its data (docs/redlock.md, "Run the nodes")


class QuorumWorld(ServersWorld):
    name = "quorum"
    drift = 0.0099  # the lease ends 1 % earlier for its holder than on the nodes

    def __init__(self, simulation: Simulation) -> None:
        self._node_timeout = simulation.chance.choice(NODE_TIMEOUTS)
        super().__init__(simulation)
        addresses = {f"n{number}": (f"10.0.0.{number}", 6379) for number in range(1, NODES + 1)}
        self.servers = {name: Server(simulation.network, address, self.executed) for name, address in addresses.items()}
        self._islands = Islands(simulation, self.servers)
        self._node_faults = ServerFaults(self.servers).all()
        self._has_lost_data = False
        self._clocks_differed = 0.0  # seconds, at most

    def setting(self) -> dict[str, Any]:
        locations = [f"redis://10.0.0.{number}:6379/0" for number in range(1, NODES + 1)]
        return {
            "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
            "LOCATION": locations,
            "OPTIONS": {"node_timeout": self._node_timeout},
        }

    def holders(self) -> Mapping[str, str]:
        """What a majority has; what is on nodes that are away counts."""
        found = {}
        for name in NAMES:
            tokens = Counter(holder_in(server, f"lock:{name}") for server in self.servers.values())
            [(token, copies)] = tokens.most_common(1)
            if token and copies > NODES // 2:
                found[name] = token
        return found

    def is_locked(self, name: str) -> bool:
        """Also where several have it on some nodes each, and try again."""
        return sum(server.store.peek(f"lock:{name}") is not None for server in self.servers.values()) > NODES // 2

    def left(self) -> Collection[str]:
        return [f"{key} at {name}" for name, server in self.servers.items() for key in left_in(server)]

    @property
    def may_repeat_numbers(self) -> bool:
        """What a node has forgotten, only the clocks of processes know (docs/redlock.md, "Do you need it?")."""
        return self._has_lost_data and self._clocks_differed > LONGEST_TTL

    def watch(self) -> None:
        errors = [process.host.wall_clock() - process.host.clock() for process in self.simulation.processes.values()]
        self._clocks_differed = max(self._clocks_differed, max(errors, default=0.0) - min(errors, default=0.0))

    def delayed_until(self, process: Process, address: Address) -> float:
        return self._islands.delayed_until(process, address)

    def asking_time(self, ttl: float) -> float:
        """The nodes are asked up to three times (docs/settings.md, "How long a call lasts")."""
        return 3 * (self._node_timeout or max(0.05, min(ttl / 20, 1.0)))

    # Faults

    def faults(self) -> dict[str, Fault]:
        return {
            **self._node_faults,
            "island": self._islands.fault([*self.servers]),
            "several": Fault(self._befall, [*self.servers], self._draw_several),
            "lose_data": Fault(self._lose_data, [*self.servers], lambda chance: {"seconds": AWAY}),
        }

    def _draw_several(self, chance: random.Random) -> Mapping[str, Any]:
        others = chance.sample([*self.servers], chance.randint(1, NODES - 1))
        return {**lasts(chance), "others": "+".join(others), "what": chance.choice(["crash", "power_loss", "hang"])}

    def _befall(self, who: str, seconds: float, others: str, what: str) -> None:
        """At the same moment."""
        for name in sorted({who, *others.split("+")}):
            self._node_faults[what].happen(name, seconds=seconds)

    def _lose_data(self, who: str, seconds: float) -> None:
        """It comes back empty, when all leases that it knew are over."""
        server = self.servers[who]
        if server.is_up:
            self._has_lost_data = True
            server.stop()
            self.scheduler.at(seconds, server.start)
