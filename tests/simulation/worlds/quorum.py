"""Five servers of Redis, a majority of which holds each lock."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from django_distlock import LockBackendError
from django_distlock.backends.redis.errors import BreakerOpen
from django_distlock.backends.redis.keys import Keys

from ..judges.copies import Copy, CopyJudge, Node
from ..judges.holders import is_about_connections
from ..judges.leases import OWN_NAMES
from ..judges.stores import holders_in
from ..plan import ANYTHING, CROWD, MANY_NAMES, STALE, Fault, Profile, lasts
from ..servers.redis_server import Server
from .islands import Islands
from .redis import ServersWorld, left_in
from .server_faults import ServerFaults

if TYPE_CHECKING:
    from ..engine.network import Address
    from ..engine.scheduler import Process
    from ..servers.sessions import Session
    from ..simulation import Simulation

KEYS = Keys("lock")
NODES = 5
NODE_TIMEOUTS = (None, None, 0.2, 1.0)  # seconds
MAX_CONNECTIONS = (50, 1)
CONNECT_TIMEOUT = 2.0  # seconds, as docs/redlock.md has it
LONGEST_TTL = 20.0  # seconds, of all in a plan
MOST_REFUSED = 6  # connections in a second to a node that refuses the password: three of threads, three of tasks
LEARNS = 0.5  # seconds after which a process knows that a node refuses it
AWAY = 1.02 * LONGEST_TTL  # for which a node stays away that has lost its data (docs/redlock.md, "Run the nodes")


def holder_in(server: Server, name: str) -> str:
    """The token of the lease of that lock, if it is held."""
    return next(iter(holders_in(server.store, KEYS, name)), "")


class QuorumWorld(ServersWorld):
    name = "quorum"
    has_slots = has_max_waiters = has_exchange = False
    profiles = (
        ANYTHING,
        # Many want the same lock at the same time.
        (2, Profile(processes=(2, 4), names=("a",), calls=(8, 40), within=(2.0,), works=(0.01, 0.5), wait_share=0.8)),
        # Few nodes fail, all in the same time.
        (
            3,
            Profile(
                names=("a", "abc"), calls=(8, 30), within=(2.0, 8.0), ttls=((2.0, 5.0), (5.0, 20.0)),
                works=(0.01, 0.5, 3.0), rest_share=0.05, detach_share=0.05, most_faults=6,
                faults=("crash", "power_loss", "hang", "several", "slow_server", "password", "forget", "cut"),
            ),
        ),
        # What was given up arrives after all.
        (
            1,
            Profile(
                processes=(2, 4), names=("a",), calls=(10, 30), within=(6.0, 12.0), ttls=((5.0, 20.0),),
                works=(0.0, 0.01, 0.1), wait_share=0.1, cancel_share=0.5, faults=("stall", "hang"), most_faults=20,
            ),
        ),
        (2, CROWD),
        (2, STALE),
    )  # fmt: skip
    own_profiles = (
        # Replies of few nodes come one by one, and late, while a thread asks them again.
        Profile(
            processes=(1, 1), names=("abc",), calls=(50, 60), within=(8.0,), anytime_share=0.0, ttls=((5.0,), (2.0,)),
            works=(0.0,), task_share=0.0, wait_share=0.0, detach_share=0.0, faults=("slow_server",), least_kinds=1,
            most_faults=8, max_connections=50,
        ),
    )  # fmt: skip
    has_minorities = True
    drift = 0.0099  # the lease ends 1 % earlier for its holder than on the nodes

    def __init__(self, simulation: Simulation) -> None:
        self._node_timeout = simulation.chance.choice(NODE_TIMEOUTS)
        self._usual_max_connections = simulation.chance.choice(MAX_CONNECTIONS)
        super().__init__(simulation)
        addresses = {f"n{number}": (f"10.0.0.{number}", 6379) for number in range(1, NODES + 1)}
        self.servers = {name: Server(simulation.network, address, self.executed) for name, address in addresses.items()}
        # What befalls less than half of them, nobody notices (docs/redlock.md).
        frail = simulation.chance.sample([*self.servers], simulation.chance.choice([NODES // 2, NODES]))
        self._frail = {name: self.servers[name] for name in sorted(frail)}
        self._islands = Islands(simulation, self.servers, self._frail)
        self._node_faults = ServerFaults(self._frail).all()
        self._away: dict[str, float] = {}  # until when each node is that is not there from the beginning
        if len(self._frail) < NODES and simulation.chance.random() < 0.6:
            what = simulation.chance.choice(["crash", "power_loss", "hang"])
            for name in self._frail:
                self._away[name] = seconds = simulation.chance.uniform(1.0, AWAY)
                self._node_faults[what].happen(name, seconds=seconds)
        self.copies = CopyJudge(simulation)
        self._refused_since: dict[tuple[Process, Address, float], float] = {}  # by when the node was started
        self._tries: defaultdict[tuple[Process, Address], deque[float]] = defaultdict(deque)
        self._has_lost_data = False
        self._clocks_differed = 0.0  # seconds, at most

    def setting(self) -> dict[str, Any]:
        locations = [f"redis://10.0.0.{number}:6379/0" for number in range(1, NODES + 1)]
        return {
            "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
            "LOCATION": locations,
            "OPTIONS": {"node_timeout": self._node_timeout, "max_connections": self._max_connections},
        }

    @property
    def _max_connections(self) -> int:
        return self.profile.max_connections or self._usual_max_connections

    def holders(self) -> Mapping[str, Collection[str]]:
        """What a majority has; what is on nodes that are away counts."""
        found = {}
        for name in MANY_NAMES:
            tokens = Counter(holder_in(server, name) for server in self.servers.values())
            [(token, copies)] = tokens.most_common(1)
            if token and copies > NODES // 2:
                found[name] = {token}
        return found

    def leases(self, name: str) -> int:
        """One, also where several have it on some nodes each, and try again."""
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
        self.copies.watch(self._copies())

    def _copies(self) -> dict[Copy, Node]:
        found = {}
        for node, server in self.servers.items():
            for key in server.store.keys() if server.is_up else ():
                name = key.removeprefix("lock:")
                if name != key and not name.startswith(OWN_NAMES) and (token := holder_in(server, name)):
                    failed_at = max(self.simulation.last_fault_of(node), self._away.get(node, -inf))
                    found[Copy(node, name, token)] = Node(failed_at, server.started_at)
        return found

    def last_fault(self, moments: Mapping[str, float]) -> float:
        """Of a majority."""
        return sorted(max(moments.get(name, -inf), self._away.get(name, -inf)) for name in self.servers)[NODES // 2]

    def executed(self, session: Session, command: list[str], reply: Any) -> None:
        super().executed(session, command, reply)
        if "NOAUTH" in str(reply):
            about = session.socket.process, session.server.address, session.server.started_at
            self._refused_since.setdefault(about, self.scheduler.now)

    def connects(self, process: Process, address: Address) -> None:
        """S16: what somebody has to correct first is not tried again and again."""
        now, server = self.scheduler.now, next(one for one in self.servers.values() if one.address == address)
        since = self._refused_since.get((process, address, server.started_at), inf)
        if now < max(since, self.simulation.last_fault_of_process(process)) + LEARNS:
            return
        tries = self._tries[process, address]
        tries.append(now)
        while tries[0] < now - 1.0:
            tries.popleft()
        if len(tries) > MOST_REFUSED:
            self.simulation.judges.fail(
                f"S16: {process} opened {len(tries)} connections within a second to {address[0]}, which refuses it"
            )

    def delayed_until(self, process: Process, address: Address) -> float:
        return self._islands.delayed_until(process, address)

    def may_be_final(self, error: LockBackendError) -> bool:
        """Somebody has to correct a password that a majority refuses."""
        return super().may_be_final(error) or str(error).count("refused the user or password") > NODES // 2

    @property
    def queueing_time(self) -> float:
        """One after the other asks, and some wait for nodes that hang."""
        return CONNECT_TIMEOUT if self._max_connections == 1 else 0.0

    def asking_time(self, ttl: float) -> float:
        """Up to three times for the nodes (docs/settings.md, "How long a call lasts")."""
        return 3 * (self._node_timeout or max(0.05, min(ttl / 20, 1.0)))

    def longest_call(self, operation: str, ttl: float) -> float:
        return inf if self._max_connections == 1 else self.asking_time(ttl)

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """Nodes that refuse are asked again (docs/redlock.md, "What costs time"), until their breakers open."""
        if is_about_connections(error):
            return inf
        failures = error.__cause__.exceptions if isinstance(error.__cause__, ExceptionGroup) else [error]
        refused = [one for one in failures if "Connection refused" in str(one) and not isinstance(one, BreakerOpen)]
        return CONNECT_TIMEOUT if len(refused) == len(failures) else 0.0

    # Faults

    def faults(self) -> dict[str, Fault]:
        return {
            **super().faults(),
            **self._node_faults,
            "slow_server": replace(self._node_faults["slow_server"], draw=self._draw_slow),
            "password": Fault(self._set_password, [*self._frail], lasts),
            "island": self._islands.fault([*self._frail]),
            "several": Fault(self._befall, [*self._frail], self._draw_several),
            "lose_data": Fault(self._lose_data, [*self._frail], lambda chance: {"seconds": AWAY}),
        }

    def _draw_several(self, chance: random.Random) -> Mapping[str, Any]:
        others = chance.sample([*self._frail], chance.randint(1, len(self._frail) - 1))
        return {**lasts(chance), "others": "+".join(others), "what": chance.choice(["crash", "power_loss", "hang"])}

    def _draw_slow(self, chance: random.Random) -> Mapping[str, Any]:
        """Some answer so late that a caller who waited for what is on its way there would notice."""
        about = self._node_faults["slow_server"].draw(chance)
        often = random.Random(about["seconds"])  # of its own, so that the rest of a plan is what it is
        return {**about, "latency": often.choice([about["latency"], 0.9])}

    def _befall(self, who: str, seconds: float, others: str, what: str) -> None:
        """At the same moment."""
        for name in sorted({who, *others.split("+")}):
            self._node_faults[what].happen(name, seconds=seconds)

    def _set_password(self, who: str, seconds: float) -> None:
        """By its operator, who starts it anew, and takes that back later."""
        server = self.servers[who]

        def start(password: str) -> None:
            server.password, server.started_at = password, self.scheduler.now
            for session in list(server.sessions):
                session.end()

        start("other")
        self.scheduler.at(seconds, partial(start, ""))

    def _lose_data(self, who: str, seconds: float) -> None:
        """It comes back empty, when all leases that it knew are over."""
        server = self.servers[who]
        if server.is_up:
            self._has_lost_data = True
            server.stop()
            self.scheduler.at(seconds, server.start)
