"""What may befall a server of Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..plan import AFTERMATH, RETRIED, Draw, Fault, lasts
from ..servers.redis_server import Server

STATES = ("LOADING", "NOREPLICAS", "MASTERDOWN", "MISCONF", "OOM", "BUSY")


class ServerFaults:
    """``servers``: by the names that plans have for them. Each is up or down, and comes back with its data."""

    def __init__(self, servers: Mapping[str, Server], states: Sequence[str] = STATES) -> None:
        self._servers, self._states = servers, states

    def all(self) -> dict[str, Fault]:
        def fault(happen: Callable[..., object], draw: Draw = lasts, aftermath: float = AFTERMATH) -> Fault:
            return Fault(happen, [*self._servers], draw, aftermath)

        return {
            "crash": fault(self._crash),
            "power_loss": fault(self._lose_power),
            "hang": fault(self._hang),
            "refuse": fault(
                self._refuse, lambda chance: {**lasts(chance), "state": chance.choice(self._states)}, RETRIED
            ),
            "forget": fault(lambda who: self._servers[who].forget_scripts(), lambda chance: {}),
            "slow_server": fault(self._slow, lambda chance: {**lasts(chance), "latency": chance.choice([0.01, 0.3])}),
        }

    def _later(self, seconds: float, server: Server, happen: Callable[[], object]) -> None:
        server.scheduler.at(seconds, happen)

    def _crash(self, who: str, seconds: float) -> None:
        server = self._servers[who]
        if server.is_up:
            server.stop()
            self._later(seconds, server, lambda: server.start(keeps_data=True))

    def _lose_power(self, who: str, seconds: float) -> None:
        server = self._servers[who]
        if server.is_up:
            server.lose_power()
            self._later(seconds, server, lambda: server.start(keeps_data=True))

    def _hang(self, who: str, seconds: float) -> None:
        server = self._servers[who]
        server.hang()
        self._later(seconds, server, server.go_on)

    def _refuse(self, who: str, seconds: float, state: str) -> None:
        server = self._servers[who]
        server.states.add(state)
        self._later(seconds, server, lambda: server.states.discard(state))

    def _slow(self, who: str, seconds: float, latency: float) -> None:
        server = self._servers[who]
        server.latency = latency
        self._later(seconds, server, lambda: setattr(server, "latency", 0.0))
