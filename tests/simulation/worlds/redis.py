"""One Redis."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from django_distlock import LockBackendError
from django_distlock.backends.common.timing import Timing
from tests.support.inside import client_of, permits_of

from ..judges.stores import StoreJudge, holders_in, leases_in
from ..plan import MANY_NAMES, OF_ONE_SERVER, Fault, lasts
from ..servers.redis_server import Server
from ..servers.sessions import Session
from .base import World
from .server_faults import STATES, ServerFaults

if TYPE_CHECKING:
    from ..engine.network import Address, Socket
    from ..engine.scheduler import Process
    from ..simulation import Simulation

WAYS_OF_OTHERS = 4  # that bytes go for each call before: to acquire a lock, and to release it
FAILOVER_TIMEOUT = 30.0  # seconds, as docs/settings.md has it
FINAL = ("MISCONF", "out of memory")
FORGOTTEN = "No matching script."
BACKEND = "django_distlock.backends.redis.RedisBackend"


class ServersWorld(World):
    """``servers``: by the names that plans have for them."""

    servers: dict[str, Server]
    survived = ("cut", "forgotten")

    def executed(self, session: Session, command: list[str], reply: Any) -> None:
        """For ``Server.watch``."""
        words = " ".join(word[:30] for word in command if len(word) < 200)
        self.simulation.judges.pace.asks(session.socket, session.server.address, command)
        self.simulation.judges.breakers.answers(session.socket)
        self.simulation.tell(f"{session.socket.process} to {session.server.address[0]}: {words} -> {str(reply)[:100]}")

    def faults(self) -> dict[str, Fault]:
        return {"forgotten": Fault(self._forget_idle, (), aftermath=Timing.idle_kept)}

    def _forget_idle(self, who: str) -> None:
        """By a firewall between it and the servers: what comes over connections that stood idle is dropped."""
        for socket in self.simulation.network.sockets:
            if socket.process.name == who and socket.idle_for > Timing.idle_trusted:
                socket.drop_all()

    def keeps_connections(self, address: Address) -> bool:
        return True

    def may_be_final(self, error: LockBackendError) -> bool:
        """Of what befalls servers, disks and memory that are full do not pass by themselves.

        A server without a script to which it was just loaded is taken for one that keeps none.
        """
        if FORGOTTEN in str(error):
            now = self.simulation.scheduler.now
            return any(now - server.forgot_at[0] < self.longest_attempt for server in self.servers.values())
        return any(reason in str(error) for reason in FINAL)

    def cut(self, socket: Socket) -> None:
        for server in self.servers.values():
            for session in server.sessions:
                if session.socket is socket:
                    session.end()
                    return


def left_in(server: Server) -> Collection[str]:
    """The keys that stay, but for the counter of grants. That a text was adopted is remembered for as long as the text
    could be shown again."""
    store = server.store
    kept = {key for key in store.keys() if key.startswith("lock|f")}  # noqa: SIM118 - it is no dict
    return {key for key in store.keys() - kept if "django_distlock.handover:" not in key or store.remaining(key) == inf}


class RedisWorld(ServersWorld):
    name = "redis"
    turns_away = True
    own_profiles = OF_ONE_SERVER
    longest_attempt = 4.0

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.server = Server(simulation.network, ("10.0.0.1", 6379), self.executed)
        self.servers = {"redis": self.server}
        self.server.hint_delay = self._hint_delay
        self.judge = StoreJudge(simulation, self.server)
        self.server.watch_before = self.judge.begins
        self._hints_late: dict[str, float | None] = {}  # by process: seconds, or None where they are lost
        self._lost_at = -1.0
        self._went_back = False

    def setting(self) -> dict[str, Any]:
        most = self.profile.max_connections
        options = {"max_connections": most} if most else {}
        return {"BACKEND": BACKEND, "LOCATION": "redis://10.0.0.1:6379/0", "OPTIONS": options}

    def executed(self, session: Session, command: list[str], reply: Any) -> None:
        super().executed(session, command, reply)
        self.judge.executed(session, command, reply)

    def watch(self) -> None:
        self.judge.watch()

    def holders(self) -> Mapping[str, Collection[str]]:
        return {name: holders_in(self.server.store, self.judge.keys, name) for name in MANY_NAMES}

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        return self.judge.was_taken_since(name, moment, slots)

    def most_places(self, name: str, moment: float) -> float:
        return self.judge.most_places(name, moment)

    def promised(self, name: str, token: str, about: Mapping[str, Any]) -> None:
        self.judge.promised(name, token, about)

    def leases(self, name: str) -> int:
        return len(leases_in(self.server.store, self.judge.keys, name))

    def left(self) -> Collection[str]:
        return left_in(self.server)

    def lacks(self, backend: Any) -> Collection[str]:
        missing = backend.option["max_connections"] - permits_of(client_of(backend)).qsize()
        return [f"{missing} permits of {backend.alias} for connections"] if missing else []

    @property
    def queueing_time(self) -> float:
        """Behind all other calls, where they share few connections."""
        if not self.profile.max_connections:
            return 0.0
        return WAYS_OF_OTHERS * self.simulation.longest_distance * self.profile.calls[1]

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """Whoever waits for the lock waits as long for a connection, while the server answers others."""
        return inf if "connections are busy" in str(error) else 0.0

    def has_lost_data_since(self, moment: float) -> bool:
        return self._lost_at >= moment

    @property
    def may_repeat_numbers(self) -> bool:
        return self._went_back and self._lost_at >= 0.0

    def faults(self) -> dict[str, Fault]:
        return {
            **super().faults(),
            **ServerFaults(self.servers, (*STATES, "READONLY")).all(),
            "late_hints": Fault(self._let_hints_be_late, (), _lateness),
            "cut_listener": Fault(self._cut_listener, ()),
            "wipe": Fault(self._wipe, ["redis"]),
            "server_clock": Fault(
                self._set_clock, ["redis"], lambda chance: {"by": round(chance.uniform(-10.0, 10.0), 3)}
            ),
        }

    def _let_hints_be_late(self, who: str, seconds: float, by: float | None) -> None:
        """Nothing else of the process is: a connection of its own stalls by itself."""
        self._hints_late[who] = by
        self.scheduler.at(seconds, lambda: self._hints_late.pop(who, None))

    def _cut_listener(self, who: str) -> None:
        for session in list(self.server.sessions):
            if session.channels and session.socket.process.name == who:
                session.end()

    def _hint_delay(self, process: Process) -> float | None:
        return self._hints_late.get(process.name, 0.0)

    def _wipe(self, who: str) -> None:
        self.server.store.restore({})
        self.judge.lost_data()
        self._lost_at = self.scheduler.now

    def _set_clock(self, who: str, by: float) -> None:
        self.server.store.clock_error += by
        self._went_back = self._went_back or by < 0.0


def _lateness(chance: random.Random) -> dict[str, Any]:
    return {**lasts(chance), "by": chance.choice([None, *[round(chance.uniform(0.5, 5.0), 3)] * 2])}
