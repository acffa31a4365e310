"""Servers and processes that reach each other, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.network import Address
from ..plan import PROCESSES, Draw, Fault, lasts

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from ..servers.redis_server import Server
    from ..simulation import Simulation

SHARE = 0.3  # of all that are on an island


class Island(NamedTuple):
    """``is_of_servers``: processes reach all servers still."""

    names: frozenset[str]
    until: float
    is_of_servers: bool = False


class Islands:
    """``servers``: by the names that plans have for them. ``among``: those that may be on an island."""

    def __init__(
        self, simulation: Simulation, servers: Mapping[str, Server], among: Collection[str] | None = None
    ) -> None:
        self._network, self._scheduler = simulation.network, simulation.scheduler
        self._among = [*(servers if among is None else among), *PROCESSES]
        self._names = {server.address: name for name, server in servers.items()}
        self._islands: list[Island] = []
        self._last_for_processes = -inf
        self._hidden_until: dict[str, float] = {}  # servers, from processes
        self._network.passes = self._passes

    def fault(self, on: Sequence[str]) -> Fault:
        return Fault(self._separate, on, self._draw)

    def fault_of_servers(self, on: Sequence[str], draw: Draw = lasts) -> Fault:
        """One, with ``others`` that are drawn, hears no other server, and is not heard by them."""
        return Fault(self.separate_from_servers, on, draw)

    @property
    def last_for_processes(self) -> float:
        """Until when one was, or will be, that some processes do not reach."""
        return self._last_for_processes

    def _draw(self, chance: random.Random) -> Mapping[str, Any]:
        others = [name for name in self._among if chance.random() < SHARE]
        return {**lasts(chance), "others": "+".join(others)}

    def _separate(self, who: str, seconds: float, others: str) -> None:
        self._last_for_processes = max(self._last_for_processes, self._scheduler.now + seconds)
        self._islands.append(Island(frozenset([who, *others.split("+")]), self._scheduler.now + seconds))

    def separate_from_servers(self, who: str, seconds: float, others: str = "", *, is_hidden: bool = False) -> None:
        """``is_hidden``: processes do not reach it either, while they reach the others."""
        if is_hidden:
            self._hidden_until[who] = self._scheduler.now + seconds
        names = frozenset([who, *others.split("+")])
        self._islands.append(Island(names, self._scheduler.now + seconds, is_of_servers=True))

    def _separated_until(self, one: str, other: str, *, are_servers: bool = False) -> float:
        self._islands = [island for island in self._islands if island.until >= self._scheduler.now]
        return max(
            (
                island.until
                for island in self._islands
                if (one in island.names) != (other in island.names) and (are_servers or not island.is_of_servers)
            ),
            default=0.0,
        )

    def _passes(self, one: Address, other: Address) -> float | None:
        if self._separated_until(self._names.get(one, ""), self._names.get(other, ""), are_servers=True):
            return None
        return self._network.usual_delay()

    def delayed_until(self, process: Process, address: Address) -> float:
        """The moment until which bytes between them do not get through."""
        return max(
            self._separated_until(process.name.partition(".")[0], self._names.get(address, "")),
            self.hidden_until(address),
        )

    def hidden_until(self, address: Address) -> float:
        """The moment until which no process reaches it. What they sent arrives then."""
        return self._hidden_until.get(self._names.get(address, ""), 0.0)
