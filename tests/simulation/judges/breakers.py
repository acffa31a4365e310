"""What circuit breakers promise of one server, seen from its network: S16."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from django_distlock.backends.common.timing import Timing

if TYPE_CHECKING:
    from ..engine.network import Address, Socket
    from ..engine.scheduler import Process, Turns
    from ..simulation import Simulation

LEARNS = 0.05  # seconds after which a process knows that it was refused
KEPT = 2.0  # seconds for which that counts; the server is asked again before
PROBE, LISTENER = "distlock-probe-", "distlock-listener-"  # how the names of such threads begin


class BreakerJudge:
    """S16: callers do not ask a server that refuses connections. A thread of their process does, after a pause."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._refused_at: dict[tuple[Process, Address], float] = {}
        self._answered_at: dict[tuple[Process, Address], float] = {}
        self._probed_at: WeakKeyDictionary[Turns, dict[Address, float]] = WeakKeyDictionary()

    def refuses(self, socket: Socket) -> None:
        process = socket.process
        answered_at = self._answered_at.get((process, socket.address), -1.0)
        # What began before others had an answer says nothing, and what listeners meet is not counted.
        is_news = socket.connected_at > answered_at + 2 * self._simulation.longest_distance
        if is_news and not socket.connected_by.startswith(LISTENER):
            self._refused_at[process, socket.address] = self._simulation.scheduler.now

    def answers(self, socket: Socket) -> None:
        """To any command."""
        self._answered_at[socket.process, socket.address] = self._simulation.scheduler.now
        self._refused_at.pop((socket.process, socket.address), None)

    def forked(self) -> None:
        """A child knows nothing of what its parent met."""
        self._refused_at.clear()

    def connects(self, process: Process, address: Address) -> None:
        thread, now = self._simulation.scheduler.current, self._simulation.scheduler.now
        if thread.name.startswith(PROBE):
            self._judge_pace(thread, address, now)
        elif self._simulation.world.turns_away and self._simulation.world.lines is None:
            self._judge_caller(process, address, now)

    def _judge_pace(self, thread: Turns, address: Address, now: float) -> None:
        least = (1.0 - self._simulation.world.drift) * Timing.probe_pause_shortest
        probed_at = self._probed_at.setdefault(thread, {})  # where it is found by sentinels, it asks these, too
        if (pause := now - probed_at.get(address, -least)) < least:
            self._simulation.judges.fail(f"S16: {thread.process} asks {address[0]} again after {pause:.3f} s")
        probed_at[address] = now

    def _judge_caller(self, process: Process, address: Address, now: float) -> None:
        refused_at = self._refused_at.get((process, address), -KEPT)
        knows_at = refused_at + LEARNS + self._simulation.longest_distance
        call = self._simulation.judges.call_of_this_thread()
        if call and knows_at < call.asked_at and now < refused_at + KEPT and process.stopped_for == 0.0:
            self._simulation.judges.fail(
                f"S16: {call}: asks {address[0]}, which refused {process} at {refused_at:.3f} s"
            )
