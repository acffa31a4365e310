"""What a sentinel knows of servers and of other sentinels, and how it learns that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from .redis_server import Server
from .replication import ReplicatedServer

if TYPE_CHECKING:
    from ..engine.network import Address, Network
    from .sentinels import Sentinel

PING_PERIOD = 1.0  # seconds, as are all here
INFO_PERIOD = 10.0
HELLO_PERIOD = 2.0
ASK_AGAIN = 0.5  # where INFO was not answered
ASK_PERIOD = 1.0
TILT_AFTER = 2.0  # without a look at the clock
TILT_PERIOD = 30.0


class Report(NamedTuple):
    """What INFO of a server says."""

    role: str
    primary: Address | None
    is_linked: bool
    offset: int
    replicas: list[Address]


@dataclass(eq=False)
class Known:
    """A server or a sentinel, as a sentinel sees it."""

    address: Address
    seen_at: float  # when it last answered as it should
    role: str
    role_since: float
    pinged_at: float | None = None  # the first time since the last answer
    last_ping_at: float = -inf
    is_connected: bool = True
    down_since: float | None = None
    info_at: float = -inf
    asked_info_at: float = -inf
    report: Report | None = None
    unlinked_since: float | None = None
    told_at: float = -inf  # whom to follow
    reconfigured: str = ""  # in a failover: "sent", "done"

    @property
    def is_down(self) -> bool:
        return self.down_since is not None


@dataclass(eq=False)
class Other(Known):
    """Another sentinel."""

    sentinel: Sentinel | None = None
    asked_at: float = -inf
    says_down_at: float = -inf
    hello_at: float = 0.0
    vote: str = ""  # for whom, and in which epoch
    vote_epoch: int = 0


@dataclass(eq=False)
class Service:
    """What a sentinel has of the service that it watches."""

    name: str
    primary: Known
    quorum: int
    replicas: dict[Address, Known] = field(default_factory=dict)
    config_epoch: int = 0
    leader: str = ""  # for whom it voted
    leader_epoch: int = 0
    objectively_down_since: float | None = None
    failover_state: str = ""
    failover_epoch: int = 0
    failover_began_at: float = -inf
    failover_changed_at: float = 0.0
    is_forced: bool = False
    promoted: Known | None = None

    @property
    def servers(self) -> list[Known]:
        return [self.primary, *self.replicas.values()]

    @property
    def current_primary(self) -> Address:
        """Where clients are sent: to the promoted replica as soon as it says that it is a primary."""
        is_promoted = self.failover_state in ("reconf_slaves", "update_config") and self.promoted
        return self.promoted.address if is_promoted and self.promoted else self.primary.address


class Watching(Server):
    """Asks servers and other sentinels how they are."""

    service: Service | None
    down_after: float
    others: dict[str, Other]  # by their ids
    current_epoch: int

    def __init__(self, network: Network, address: Address) -> None:
        super().__init__(network, address)
        self.tilt_until = -inf
        self._looked_at = self.scheduler.now
        self._hello_at = -inf

    def known(self, address: Address, role: str) -> Known:
        now = self.scheduler.now
        return Known(address, seen_at=now, role=role, role_since=now)

    @property
    def is_in_tilt(self) -> bool:
        return self.scheduler.now < self.tilt_until

    def _look_at_clock(self) -> None:
        now = self.scheduler.now
        if now - self._looked_at > TILT_AFTER:
            self.tilt_until = now + TILT_PERIOD
        self._looked_at = now

    # Pings

    def _ask_all(self, service: Service) -> None:
        for known in [*service.servers, *self.others.values()]:
            if self.scheduler.now - known.last_ping_at >= min(PING_PERIOD, self.down_after):
                self._ping(known)
        for known in service.servers:
            is_due = self.scheduler.now - known.info_at >= self._info_period(service, known)
            if is_due and self.scheduler.now - known.asked_info_at >= ASK_AGAIN:
                self._ask_info(service, known)
        if self.scheduler.now - self._hello_at >= HELLO_PERIOD:
            self.say_hello()

    def _ping(self, known: Known) -> None:
        known.last_ping_at = now = self.scheduler.now
        known.pinged_at = now if known.pinged_at is None else known.pinged_at
        server = self._server_at(known.address)
        if server is None:
            return
        if not server.is_up and server.has_power and self.network.passes(self.address, server.address) is not None:
            known.is_connected = False
            return

        def answered() -> None:
            known.seen_at, known.pinged_at, known.is_connected = self.scheduler.now, None, True

        def ping() -> None:
            if not server.states & {"BUSY", "MISCONF"}:  # LOADING and MASTERDOWN count as answers
                server.tell(self, answered)

        self.tell(server, ping)

    def _server_at(self, address: Address) -> Server | None:
        server = self.network.servers.get(address)
        return server if isinstance(server, Server) else None

    def _judge(self, known: Known) -> None:
        """Whether it is down, as far as this sentinel can see."""
        now = self.scheduler.now
        silent_since = known.seen_at if not known.is_connected else known.pinged_at
        is_down = silent_since is not None and now - silent_since > self.down_after
        if self.service and known is self.service.primary and known.role == "slave":
            is_down = is_down or now - known.role_since > self.down_after + 2 * INFO_PERIOD
        if is_down and not known.is_down:
            known.down_since = now
        elif not is_down:
            known.down_since = None

    # INFO

    def _info_period(self, service: Service, known: Known) -> float:
        is_failing = service.objectively_down_since is not None or service.failover_state
        is_watched_closely = known is not service.primary and (is_failing or known.unlinked_since is not None)
        return 1.0 if is_watched_closely else INFO_PERIOD

    def _ask_info(self, service: Service, known: Known) -> None:
        known.asked_info_at = self.scheduler.now
        server = self._server_at(known.address)
        if not isinstance(server, ReplicatedServer):
            return

        def ask() -> None:
            report = _report_of(server)
            server.tell(self, lambda: self._note(service, known, report))

        self.tell(server, ask)

    def _note(self, service: Service, known: Known, report: Report) -> None:
        now = self.scheduler.now
        if self.service is not service or known not in service.servers:
            return
        known.info_at, known.report = now, report
        if report.role != known.role:
            known.role, known.role_since = report.role, now
            known.told_at = now if report.role == "slave" else known.told_at
        is_unlinked = report.role == "slave" and not report.is_linked
        known.unlinked_since = (known.unlinked_since or now) if is_unlinked else None
        if known is service.primary:
            for address in report.replicas:
                if address not in service.replicas:
                    service.replicas[address] = self.known(address, "slave")
        if not self.is_in_tilt:
            self._learned(service, known, report)

    def _learned(self, service: Service, known: Known, report: Report) -> None:
        """What follows from a report."""
        raise NotImplementedError

    def reconfigure(self, known: Known, primary: Address | None) -> None:
        """Tell a server whom to follow; its clients are sent away, as they may have to look for another server."""
        known.told_at = self.scheduler.now
        server = self._server_at(known.address)
        if not isinstance(server, ReplicatedServer):
            return

        def follow() -> None:
            if primary is None:
                server.promote()
            else:
                server.follow(primary)
            server.end_clients("normal")
            server.end_clients("pubsub")

        self.tell(server, follow)

    # Hello: who is the primary, and since which epoch

    def say_hello(self) -> None:
        """To the other sentinels, directly and through each server that both reach."""
        self._hello_at = self.scheduler.now
        if self.service is None:
            return
        for other in self._other_sentinels():
            hello = self._hello_for(other, self.service)
            self.tell(other, hello)
            for known in self.service.servers:
                if (server := self._server_at(known.address)) is not None:
                    self.tell(server, self._passed_on(server, other, hello))

    @staticmethod
    def _passed_on(server: Server, other: Server, hello: Callable[[], None]) -> Callable[[], None]:
        def pass_on() -> None:
            server.tell(other, hello)

        return pass_on

    def _hello_for(self, other: Sentinel, service: Service) -> Callable[[], None]:
        raise NotImplementedError

    def _other_sentinels(self) -> Iterator[Sentinel]:
        for other in self.others.values():
            if other.sentinel is not None:
                yield other.sentinel


def _report_of(server: ReplicatedServer) -> Report:
    role = "master" if server.primary is None else "slave"
    replicas = [link.replica.address for link in server.links]
    return Report(role, server.primary, server.link is not None, server.offset, replicas)
