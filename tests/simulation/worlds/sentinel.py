"""Redis with two replicas that three sentinels watch."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from logging import LogRecord
from typing import TYPE_CHECKING, Any

from django_distlock import LockBackendError
from django_distlock.backends.redis.keys import Keys
from django_distlock.backends.redis.sentinel.discovery import Master

from ..judges.stores import leases_in
from ..plan import ENDS, HORIZON, PROFILES, Fault, Profile, lasts
from ..servers.misleading import mislead_some
from ..servers.replication import ReplicatedServer
from ..servers.sentinels import Sentinel, watched
from .islands import Islands
from .redis import BACKEND, FAILOVER_TIMEOUT, ServersWorld, left_in
from .server_faults import ServerFaults

if TYPE_CHECKING:
    from ..engine.network import Address
    from ..engine.scheduler import Process
    from ..servers.sessions import Session
    from ..simulation import Simulation

KEYS = Keys("lock")
SERVICE = "mymaster"
LEAVES = 6.0  # seconds in which each sentinel is asked, one a second, and connections are made
SEARCH = 1.0  # seconds in which one sentinel is asked who the primary is, at most
LATELY = 15.0  # seconds after a change of roles in which the former primary may have granted what the new one has not
SENTINELS = ("s1", "s2", "s3")
CUT_OFF_SHARE = 0.15  # of runs, in which the primary is cut off early on; in as many others it is so later
ASKED = 5.0  # seconds in which processes have asked all sentinels
# A primary is cut off from its replicas, often together with a sentinel that names it on, which processes reach.
CUT_OFF = Profile(
    names=("a", "abc"), calls=(20, 40), within=(HORIZON,), ttls=((2.0, 5.0), (5.0, 20.0)), works=(0.1, 1.0, 6.0),
    wait_share=0.7, faults=("deaf",), most_faults=4,
)  # fmt: skip
# No sentinel answers while processes begin.
AWAY = Profile(
    names=("a", "abc"), calls=(8, 20), within=(1.0, 4.0), ttls=((2.0, 5.0),), works=(0.01, 0.5), wait_share=0.8,
    faults=("sentinel_crash", "sentinel_hang", "sentinel_power_loss"), most_faults=12,
)  # fmt: skip


def _draw_deafness(chance: random.Random) -> Mapping[str, Any]:
    """Long, and often with a sentinel on the same side."""
    about: dict[str, Any] = {"seconds": round(chance.uniform(3.0, 15.0), 3)}
    if chance.random() < 0.7:
        about |= {"others": chance.choice(SENTINELS), "is_hidden": chance.random() < 0.5}
    return about


class SentinelWorld(ServersWorld):
    name = "sentinel"
    profiles = (*PROFILES, (2, ENDS), (4, CUT_OFF), (2, AWAY))
    ways_to_connect = 45  # a sentinel is asked, and then the primary: for commands, and again for messages

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        network = simulation.network
        self.data = {
            f"r{number}": ReplicatedServer(network, (f"10.0.0.{number}", 6379), self.executed) for number in (1, 2, 3)
        }
        primary, *replicas = self.data.values()
        min_replicas = simulation.chance.choice([0, 1])  # 0: a former primary that is cut off goes on
        for server in self.data.values():
            server.sync_seconds = 0.1
            server.min_replicas = min_replicas
        for replica in replicas:
            replica.follow(primary.address)
        addresses = [(f"10.0.1.{number}", 26379) for number in (1, 2, 3)]
        self.sentinels = watched(
            network, SERVICE, [*self.data.values()], addresses, down_after=0.6, failover_timeout=2.0
        )
        for sentinel in self.sentinels:
            sentinel.watch = self.executed
        self.servers = {**self.data, **{f"s{number}": one for number, one in enumerate(self.sentinels, 1)}}
        self._islands = Islands(simulation, self.servers)
        self._roles = self._present_roles()
        self._changed_at = -LATELY
        self._promoted_at: defaultdict[Address, float] = defaultdict(float)
        self._sought_since: dict[tuple[Process, Address], float] = {}  # a former primary, to which a process connects
        self._named: tuple[object, float] = (None, 0.0)  # whom most sentinels name as the primary, and since when
        self._ends_connections = False  # of processes to the primary that is cut off, when it has a successor
        self._draw_cut_off(random.Random(f"sentinel {simulation.seed}"))
        mislead_some(self.data.values(), random.Random(f"told {simulation.seed}"))
        self.scheduler.at(0.0, self._look)  # replicas do not follow yet

    def setting(self) -> dict[str, Any]:
        sentinels = [(f"10.0.1.{number}", 26379) for number in (1, 2, 3)]
        return {"BACKEND": BACKEND, "OPTIONS": {"sentinels": sentinels, "service_name": SERVICE}}

    def _present_roles(self) -> list[bool]:
        return [server.primary is None for server in self.data.values()]

    def _look(self) -> None:
        """A change of roles is a fault, too."""
        roles = self._present_roles()
        if roles != self._roles:
            for server, is_primary, was_primary in zip(self.data.values(), roles, self._roles, strict=True):
                if is_primary and not was_primary:
                    self._promoted_at[server.address] = self.scheduler.now
            self._roles, self._changed_at = roles, self.scheduler.now
            self.simulation.tell(f"primaries: {[server.address[0] for server in self._primaries()]}")
        if sum(roles) != 1 or any(server.link is None and server.primary is not None for server in self.data.values()):
            self.simulation.disturb("", self.scheduler.now)
        named = self._named_by_most()
        if named != self._named[0]:
            self._named = named, self.scheduler.now
            self._sought_since.clear()
            if self._ends_connections:
                for session in list(self.data["r1"].sessions):
                    session.end()
        self._judge_searches()
        self.scheduler.at(0.05, self._look)

    def _named_by_most(self) -> Address | None:
        """And that is one. Whoever asks one sentinel a second meets two of them soon, whatever the third one says."""
        services = [one.service for one in self.sentinels if one.is_up and not one.is_hanging]
        named = Counter(service.primary.address for service in services if service and not service.primary.is_down)
        primaries = (server.address for server in self._primaries())
        return next((one for one in primaries if 2 * named[one] > len(self.sentinels)), None)

    def executed(self, session: Session, command: list[str], reply: Any) -> None:
        super().executed(session, command, reply)
        if command[0] == "EVALSHA":
            asked = session.server.address
            self._judge_primary(session.socket.process, asked, self._islands.hidden_until(asked))

    def connects(self, process: Process, address: Address) -> None:
        """In vain: whoever finds that the server which a sentinel names is of no use asks another sentinel."""
        if self.keeps_connections(address):
            self._judge_primary(process, address, self._sought_since.setdefault((process, address), self.scheduler.now))

    def _judge_primary(self, process: Process, asked: Address, began: float) -> None:
        """Who asks a former primary leaves it when the sentinels have another one (docs/topologies/sentinel.md)."""
        named, since = self._named
        moment = max(since, began, self.simulation.last_fault_of_process(process), self._islands.last_for_processes)
        is_former = named is not None and self._promoted_at[asked] < self._promoted_at[named]
        if named and is_former and self.scheduler.now - moment > LEAVES:
            since = f"since {moment:.3f} s most sentinels name {named[0]}"
            self.simulation.judges.fail(f"{process} asks {asked[0]} still; {since}")

    def _judge_searches(self) -> None:
        """S11: a search leaves no connection. One to each sentinel is kept, to ask it again and again.

        A call that goes on in a forked child has the backend of the parent, which keeps its own.
        """
        now, addresses = self.scheduler.now, {sentinel.address for sentinel in self.sentinels}
        kept = Counter(
            (socket.process, socket.address)
            for socket in self.simulation.network.sockets
            if socket.address in addresses and now - socket.connected_at > SEARCH + self.simulation.distance
        )
        for (process, address), number in kept.items():
            has_run = (
                not (process.is_stopped or process.has_forked)
                and now - self.simulation.last_fault_of_process(process) > SEARCH
            )
            if number > 1 + process.is_child and has_run:
                self.simulation.judges.fail(f"S11: {process} keeps {number} connections to {address[0]}")

    def logged(self, record: LogRecord) -> None:
        """Nobody goes back from a primary to a former one."""
        if "The master of" in record.msg and isinstance(record.args, tuple):
            _, now, before = record.args
            if isinstance(now, Master) and isinstance(before, Master) and now.epoch < before.epoch and not now.is_reset:
                self.simulation.judges.fail(f"a process left {before} for {now}, which was the master before it")

    def _primaries(self) -> list[ReplicatedServer]:
        return [server for server in self.data.values() if server.primary is None]

    def leases(self, name: str) -> int:
        return max((len(leases_in(server.store, KEYS, name)) for server in self._primaries()), default=0)

    def left(self) -> Collection[str]:
        return [key for server in self._primaries() for key in left_in(server)]

    def has_lost_data_since(self, moment: float) -> bool:
        """Replication is asynchronous (docs/guarantees.md)."""
        return self._changed_at + LATELY >= moment

    @property
    def may_repeat_numbers(self) -> bool:
        return self.has_lost_data_since(self.scheduler.now)

    # Faults

    def faults(self) -> dict[str, Fault]:
        sentinels = {name: server for name, server in self.servers.items() if name.startswith("s")}
        of_sentinels = ServerFaults(sentinels).all()
        return {
            **super().faults(),
            **ServerFaults(self.data, ("LOADING", "MISCONF", "OOM", "BUSY")).all(),
            **{f"sentinel_{name}": of_sentinels[name] for name in ("crash", "power_loss", "hang")},
            "forgetful": Fault(self._forget, [*sentinels], lasts),
            "lag": Fault(self._lag, [*self.data], lasts),
            "failover": Fault(self._fail_over, [*sentinels]),
            "island": self._islands.fault([*self.data]),
            # Succeeded, and does not know it. The first one has something to lose.
            "deaf": self._islands.fault_of_servers(["r1", *self.data], _draw_deafness),
        }

    def _draw_cut_off(self, chance: random.Random) -> None:
        """Of the primary: together with the sentinel that processes ask first when they begin, or with any one."""
        share, at, seconds = chance.random(), chance.uniform(0.0, 2.0), chance.uniform(10.0, 18.0)
        if share < CUT_OFF_SHARE:
            self.scheduler.at(at, lambda: self._cut_off(seconds, "s1", is_hidden=True))
        elif share < 2 * CUT_OFF_SHARE:
            sentinel, self._ends_connections = chance.choice(SENTINELS), chance.random() < 0.5
            self.scheduler.at(ASKED + at, lambda: self._cut_off(seconds, sentinel, is_hidden=False))

    def _cut_off(self, seconds: float, sentinel: str, *, is_hidden: bool) -> None:
        self.simulation.tell(f"r1 is cut off with {sentinel}")
        self.simulation.disturb("", self.scheduler.now + seconds)
        self._islands.separate_from_servers("r1", seconds, sentinel, is_hidden=is_hidden)

    def _forget(self, who: str, seconds: float) -> None:
        """A sentinel that was set up anew knows no service for a while."""
        sentinel: Any = self.servers[who]
        if sentinel.service is None:
            return
        service, sentinel.service = sentinel.service, None
        self.scheduler.at(seconds, lambda: setattr(sentinel, "service", service))

    def _lag(self, who: str, seconds: float) -> None:
        self.data[who].lag = 0.5
        self.scheduler.at(seconds, lambda: setattr(self.data[who], "lag", 0.0))

    def _fail_over(self, who: str) -> None:
        sentinel: Any = self.servers[who]
        if isinstance(sentinel, Sentinel) and sentinel.service and sentinel.is_up:
            sentinel.force_failover(sentinel.service)

    def keeps_connections(self, address: Address) -> bool:
        """A sentinel that is asked who the master is, is asked over a connection of its own."""
        return any(server.address == address for server in self.data.values())

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """Another server may take over (docs/settings.md, "How long a call lasts")."""
        return 0.0 if "grants the lock" in str(error) else FAILOVER_TIMEOUT

    def delayed_until(self, process: Process, address: Address) -> float:
        return self._islands.delayed_until(process, address)
