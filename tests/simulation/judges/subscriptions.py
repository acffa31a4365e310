"""That the subscriptions of a process in a Cluster stand for as long as they are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from django_distlock.backends.common.timing import Timing

from ..plan import AFTERMATH
from .leases import DRIFT

if TYPE_CHECKING:
    from ..engine.network import Address, Socket
    from ..engine.scheduler import Process
    from ..simulation import Simulation

COMPLETE = 0.5  # seconds in which all channels of a connection have been asked for
Key = tuple["Process", "Address"]


class Ended(NamedTuple):
    """A connection that its process gave up, with the channels that it heard."""

    at: float
    channels: frozenset[str]


@dataclass
class Begun:
    """A connection that follows on another one, and what it asks for."""

    socket: Socket
    at: float
    before: Ended
    channels: set[str] = field(default_factory=set)


class SubscriptionJudge:
    """S11: nobody ends a subscription to begin the same again, because a slot of other waiters has moved."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ended: dict[Key, Ended] = {}
        self._begun: dict[Key, Begun] = {}

    def subscribes(self, socket: Socket, channel: str) -> None:
        key, now = (socket.process, socket.address), self._simulation.scheduler.now
        begun = self._begun.get(key)
        if begun is None or begun.socket is not socket:
            if (before := self._ended.pop(key, None)) is None:
                return
            begun = self._begun[key] = Begun(socket, now, before)
        begun.channels.add(channel)

    def closes(self, socket: Socket) -> None:
        """One that nobody used for long ends, too."""
        now, channels = self._simulation.scheduler.now, getattr(socket.session, "channels", ())
        if channels and now - socket.connected_at < Timing.listener_idle * (1 - DRIFT):
            self._ended[socket.process, socket.address] = Ended(now, frozenset(name for _, name in channels))

    def watch(self) -> None:
        now = self._simulation.scheduler.now
        for key, begun in [*self._begun.items()]:
            if now - begun.at < COMPLETE:
                continue
            del self._begun[key]
            is_same = begun.channels <= begun.before.channels
            if is_same and self._simulation.last_fault_of_connections() < begun.before.at - AFTERMATH:
                process, address = key
                self._simulation.judges.fail(
                    f"S11: {process} gave up a subscription at {address[0]} at {begun.before.at:.3f} s to make it again"
                )
