"""How often a process asks its servers and connects to them: after a pause, and no more than it has to."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from django_distlock.backends.common.timing import Timing

from ..plan import AFTERMATH
from .leases import DRIFT

if TYPE_CHECKING:
    from ..engine.network import Address, Socket
    from ..engine.scheduler import Process
    from ..simulation import Simulation

MOST_REPEATS = 60  # of one request to one server, in a second; the shortest leases are renewed 30 times
MOST_CONNECTIONS = 12  # that each call under way, and what is cleaned up, begins to one server, in a second
FAR = 0.01  # seconds to a server, from which on the time of the shortest calls is over before it answers


class PaceJudge:
    """S16: no request, and no connection, is tried again and again without a pause."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._times: defaultdict[Hashable, deque[float]] = defaultdict(deque)
        self._closed_at: dict[tuple[Process, Address], float] = {}
        self._used_at: WeakKeyDictionary[Socket, float] = WeakKeyDictionary()  # when a command of it was executed
        self._probes: WeakSet[Socket] = WeakSet()  # a connection for one question, whether the server answers again
        self._cancelled_at: defaultdict[Process, float] = defaultdict(lambda: -inf)
        self._paused_at: defaultdict[Process, float] = defaultdict(lambda: -inf)

    def cancels(self, process: Process) -> None:
        """A call. What stands on its connection then is not known, so that it is closed."""
        self._cancelled_at[process] = self._simulation.scheduler.now

    def was_cancelled_since(self, process: Process, moment: float) -> bool:
        """Whether a call of that process was."""
        return self._cancelled_at[process] >= moment

    def pauses(self, process: Process, seconds: float) -> None:
        """One of its threads, between two lines. The time of its call may be over before it sees the answer."""
        if seconds > FAR:
            self._paused_at[process] = self._simulation.scheduler.now

    def closes(self, socket: Socket) -> None:
        """One that works. Subscriptions end with those who wait."""
        now, process, world = self._simulation.scheduler.now, socket.process, self._simulation.world
        world.closes(socket)
        is_explained = (
            getattr(socket.session, "channels", True)
            or socket in self._probes
            or not world.keeps_connections(socket.address)
            or self._may_fail()
            or self._simulation.longest_distance_since(now - 1.0) > FAR
            or now - self._cancelled_at[process] < 1.0
            or now - self._paused_at[process] < 1.0
            or now - self._used_at.get(socket, -inf) > 1.0
        )
        if not is_explained:
            self._closed_at[process, socket.address] = now

    def connects(self, process: Process, address: Address) -> None:
        now = self._simulation.scheduler.now
        self._simulation.world.connects(process, address)
        if now - self._closed_at.get((process, address), -inf) < 1.0 and not self._may_fail():
            self._fail(f"{process} connects to {address[0]}, to which it closed a connection just before that worked")
        # Where a server refuses for now, each attempt at a renewal has a connection of its own.
        most = MOST_REPEATS + MOST_CONNECTIONS * (1 + self._simulation.judges.calls_of(process))
        if (number := self._counted((process, address))) > most:
            self._fail(f"{process} opened {number} connections to {address[0]} within a second")

    def asks(self, socket: Socket, address: Address, command: list[str]) -> None:
        """A command without its arguments, or a script with the token of its request."""
        process, now = socket.process, self._simulation.scheduler.now
        if (idle := now - self._used_at.get(socket, now)) > (1 + DRIFT) * Timing.idle_kept + FAR:
            self._fail(f"{process} uses a connection to {address[0]} that stood idle for {idle:.1f} s")
        self._used_at[socket] = now
        words = command[:2]
        if command[0].upper() == "PING":
            self._probes.add(socket)
        if command[0].upper() in ("EVALSHA", "EVAL"):
            keys = int(command[2])
            words = [*command[:2], *command[3 : 4 + keys]]
            most = MOST_REPEATS
        else:
            most = MOST_REPEATS * (2 + self._simulation.judges.calls_of(process))
        if (number := self._counted((process, address, *words))) > most:
            self._fail(f"{process} sent {' '.join(words)[:80]} to {address[0]} {number} times within a second")

    def _may_fail(self) -> bool:
        """Also at one server of many."""
        return self._simulation.last_fault_of_connections() > self._simulation.scheduler.now - AFTERMATH

    def _counted(self, key: Hashable) -> int:
        """How often that happened in the last second."""
        now, times = self._simulation.scheduler.now, self._times[key]
        times.append(now)
        while times[0] < now - 1.0:
            times.popleft()
        return len(times)

    def _fail(self, text: str) -> None:
        self._simulation.judges.fail(f"S16: {text}")
