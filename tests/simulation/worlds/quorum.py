"""Five servers of Redis, a majority of which holds each lock."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..plan import Fault
from ..redis_server import Server
from .redis import ServersWorld, left_in
from .server_faults import ServerFaults

if TYPE_CHECKING:
    from ..simulation import Simulation

NODES = 5


class QuorumWorld(ServersWorld):
    name = "quorum"

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        addresses = {f"n{number}": (f"10.0.0.{number}", 6379) for number in range(1, NODES + 1)}
        self.servers = {name: Server(simulation.network, address, self.executed) for name, address in addresses.items()}

    def setting(self) -> dict[str, Any]:
        locations = [f"redis://10.0.0.{number}:6379/0" for number in range(1, NODES + 1)]
        return {"BACKEND": "django_distlock.backends.redlock.RedlockBackend", "LOCATION": locations}

    def is_locked(self, name: str) -> bool:
        """Also where several have it on some nodes each, and try again."""
        return sum(server.store.peek(f"lock:{name}") is not None for server in self.servers.values()) > NODES // 2

    def left(self) -> Collection[str]:
        return [f"{key} at {name}" for name, server in self.servers.items() for key in left_in(server)]

    def faults(self) -> dict[str, Fault]:
        return ServerFaults(self.servers).all()
