"""Sentinels: servers that tell where the primary of a service is, and give its place to a replica when it is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from .replication import ReplicatedServer
from .sentinel_commands import SentinelCommands
from .watching import ASK_PERIOD, HELLO_PERIOD, INFO_PERIOD, PING_PERIOD, Known, Other, Report, Service

if TYPE_CHECKING:
    from ..engine.network import Address, Network

LOOK = 0.1  # seconds between two looks at what is to be done
DESYNC = 1.0  # seconds by which sentinels put off what else they would all do at once
ELECTION = 10.0
SETTLED = 4 * HELLO_PERIOD  # seconds for which a server must have been what it is before it is made something else


class Sentinel(SentinelCommands):
    """``down_after``, ``failover_timeout``: in seconds. ``quorum``: how many must see the primary down.

    ``service``: None where it watches nothing.
    """

    def __init__(
        self,
        network: Network,
        address: Address,
        name: str,
        primary: Address,
        replicas: Sequence[Address],
        *,
        quorum: int,
        down_after: float = 5.0,
        failover_timeout: float = 60.0,
    ) -> None:
        super().__init__(network, address)
        self.id = f"{self.scheduler.random.getrandbits(160):040x}"
        self.down_after, self.failover_timeout = down_after, failover_timeout
        self.current_epoch = 0
        self.others: dict[str, Other] = {}
        self.service: Service | None = self.new_service(name, primary, quorum, replicas)
        self.scheduler.at(self.scheduler.random.uniform(0.0, LOOK), self._look)

    def new_service(self, name: str, primary: Address, quorum: int, replicas: Sequence[Address] = ()) -> Service:
        known = {address: self.known(address, "slave") for address in replicas}
        return Service(name, self.known(primary, "master"), quorum, known)

    def meet(self, others: Sequence[Sentinel]) -> None:
        """Know those that watch the same service."""
        now = self.scheduler.now
        for other in others:
            if other is not self:
                self.others[other.id] = Other(other.address, now, "sentinel", now, sentinel=other, hello_at=now)

    def start(self, **how: Any) -> None:
        """It has kept who is the primary, and its epochs; it does not know who is down.

        Its file names a replica that it has promoted, even if the others do not all follow that yet.
        """
        super().start()
        if self.service and self.service.current_primary != self.service.primary.address:
            self._switch(self.service, self.service.current_primary)
        now = self._looked_at = self.scheduler.now
        for known in [*(self.service.servers if self.service else ()), *self.others.values()]:
            known.seen_at, known.pinged_at, known.down_since, known.is_connected = now, None, None, True
            known.last_ping_at = known.asked_info_at = -inf
        if self.service:
            self._abort(self.service)
            self.service.objectively_down_since = None

    # What it does by itself

    def _look(self) -> None:
        self.scheduler.at(LOOK * self.scheduler.random.uniform(0.8, 1.2), self._look)
        if not self.is_up or self.is_hanging:
            return
        self._look_at_clock()
        if (service := self.service) is None:
            return
        self._ask_all(service)
        if self.is_in_tilt:
            return
        for known in [*service.servers, *self.others.values()]:
            self._judge(known)
        self._judge_objectively(service)
        if self._should_begin_failover(service):
            self._begin_failover(service)
            self._ask_others(service, is_forced=True)
        self._go_on_with_failover(service)
        self._ask_others(service, is_forced=False)

    def _judge_objectively(self, service: Service) -> None:
        now = self.scheduler.now
        agreeing = sum(now - other.says_down_at <= 5 * ASK_PERIOD for other in self.others.values())
        if service.primary.is_down and 1 + agreeing >= service.quorum:
            if service.objectively_down_since is None:
                service.objectively_down_since = now
        else:
            service.objectively_down_since = None

    def _ask_others(self, service: Service, *, is_forced: bool) -> None:
        """Whether they see the primary down, too; and for their vote, once a failover has begun."""
        now, epoch, primary = self.scheduler.now, self.current_epoch, service.primary
        if not primary.is_down:
            return
        candidate = self.id if service.failover_state else "*"
        for other in self.others.values():
            sentinel = other.sentinel
            if sentinel is None or (now - other.asked_at < ASK_PERIOD and not is_forced):
                continue
            other.asked_at = now
            self.tell(sentinel, self._question(sentinel, primary.address, epoch, candidate))

    def _question(self, sentinel: Sentinel, address: Address, epoch: int, candidate: str) -> Callable[[], None]:
        return lambda: sentinel.answer_sentinel(self, address, epoch, candidate)

    def answer_sentinel(self, asker: Sentinel, address: Address, epoch: int, candidate: str) -> None:
        service = self.service
        is_same = service is not None and service.primary.address == address
        is_down = is_same and not self.is_in_tilt and service is not None and service.primary.is_down
        leader, leader_epoch = "*", 0
        if service is not None and is_same and candidate != "*":
            leader, leader_epoch = self._vote(service, epoch, candidate)
        self.tell(asker, lambda: asker._note_answer(self.id, is_down, leader, leader_epoch))

    def _note_answer(self, other_id: str, is_down: bool, leader: str, leader_epoch: int) -> None:
        if (other := self.others.get(other_id)) is None:
            return
        other.says_down_at = self.scheduler.now if is_down else -inf
        if leader != "*":
            other.vote, other.vote_epoch = leader, leader_epoch

    def _vote(self, service: Service, epoch: int, candidate: str) -> tuple[str, int]:
        """The first who asks in an epoch gets it."""
        self.current_epoch = max(self.current_epoch, epoch)
        if service.leader_epoch < epoch and self.current_epoch <= epoch:
            service.leader, service.leader_epoch = candidate, self.current_epoch
            if candidate != self.id:
                service.failover_began_at = self.scheduler.now + self.scheduler.random.uniform(0.0, DESYNC)
        return service.leader, service.leader_epoch

    # Failover

    def _should_begin_failover(self, service: Service) -> bool:
        if service.objectively_down_since is None or service.failover_state:
            return False
        return self.scheduler.now - service.failover_began_at >= 2 * self.failover_timeout

    def _begin_failover(self, service: Service) -> None:
        self._enter(service, "wait_start")
        self.current_epoch += 1
        service.failover_epoch = self.current_epoch
        service.failover_began_at = self.scheduler.now + self.scheduler.random.uniform(0.0, DESYNC)

    def force_failover(self, service: Service) -> None:
        """By command: without asking the others."""
        self._begin_failover(service)
        service.is_forced = True

    def _enter(self, service: Service, state: str) -> None:
        service.failover_state, service.failover_changed_at = state, self.scheduler.now

    def _abort(self, service: Service) -> None:
        service.failover_state, service.promoted, service.is_forced = "", None, False
        for replica in service.replicas.values():
            replica.reconfigured = ""

    def _go_on_with_failover(self, service: Service) -> None:
        if service.failover_state:
            getattr(self, f"_in_{service.failover_state}")(service)

    def _in_wait_start(self, service: Service) -> None:
        if service.is_forced or self._elected(service) == self.id:
            self._enter(service, "select_slave")
        elif self.scheduler.now - service.failover_began_at > min(ELECTION, self.failover_timeout):
            self._abort(service)

    def _elected(self, service: Service) -> str | None:
        epoch = service.failover_epoch
        votes = Counter(other.vote for other in self.others.values() if other.vote_epoch == self.current_epoch)
        winner = votes.most_common(1)[0][0] if votes else None
        own, own_epoch = self._vote(service, epoch, winner or self.id)
        if own_epoch == epoch:
            votes[own] += 1
        needed = max((len(self.others) + 1) // 2 + 1, service.quorum)
        return next((voted for voted, number in votes.most_common(1) if number >= needed), None)

    def _in_select_slave(self, service: Service) -> None:
        if (replica := self.best_replica(service)) is None:
            self._abort(service)
        else:
            service.promoted = replica
            self._enter(service, "send_slaveof_noone")

    def best_replica(self, service: Service) -> Known | None:
        now = self.scheduler.now
        primary = service.primary
        fresh = 5 * PING_PERIOD if primary.is_down else 3 * INFO_PERIOD
        longest = 10 * self.down_after + (now - primary.down_since if primary.down_since is not None else 0.0)
        fit = [
            known
            for known in service.replicas.values()
            if not known.is_down
            and known.is_connected
            and now - known.seen_at <= 5 * PING_PERIOD
            and now - known.info_at <= fresh
            and (known.unlinked_since is None or now - known.unlinked_since <= longest)
        ]
        return max(fit, key=lambda known: known.report.offset if known.report else 0, default=None)

    def _in_send_slaveof_noone(self, service: Service) -> None:
        promoted = service.promoted
        if promoted is None or not promoted.is_connected:
            if self.scheduler.now - service.failover_changed_at > self.failover_timeout:
                self._abort(service)
            return
        self.reconfigure(promoted, None)
        self._enter(service, "wait_promotion")

    def _in_wait_promotion(self, service: Service) -> None:
        if self.scheduler.now - service.failover_changed_at > self.failover_timeout:
            self._abort(service)

    def _in_reconf_slaves(self, service: Service) -> None:
        left = [
            replica
            for replica in service.replicas.values()
            if replica is not service.promoted and replica.reconfigured != "done" and not replica.is_down
        ]
        is_late = self.scheduler.now - service.failover_changed_at > self.failover_timeout
        promoted = service.promoted
        if promoted and left:
            under_way = [replica for replica in left if replica.reconfigured == "sent"]
            for replica in left if is_late else left[:1] if not under_way else []:
                replica.reconfigured = "sent"
                self.reconfigure(replica, promoted.address)
        if not left or is_late:
            self._enter(service, "update_config")

    def _in_update_config(self, service: Service) -> None:
        if service.promoted:
            self._switch(service, service.promoted.address)

    def _switch(self, service: Service, primary: Address) -> None:
        """It is the primary now; the last one becomes a replica, as soon as it is there."""
        old = service.primary.address
        addresses = {known.address for known in service.servers} - {primary}
        service.primary = self.known(primary, "master")
        service.replicas = {address: self.known(address, "slave") for address in sorted(addresses)}
        service.objectively_down_since, service.failover_began_at = None, -inf
        self._abort(service)
        for other in self.others.values():
            other.says_down_at = -inf
        words = (service.name, *old, *primary)
        self.publish("P", "+switch-master", " ".join(map(str, words)))
        self.say_hello()

    def _hello_for(self, other: Sentinel, service: Service) -> Callable[[], None]:
        primary, epoch, config_epoch = service.current_primary, self.current_epoch, service.config_epoch
        return lambda: other.heard_hello(self, primary, epoch, config_epoch)

    def heard_hello(self, sender: Sentinel, primary: Address, epoch: int, config_epoch: int) -> None:
        self.current_epoch = max(self.current_epoch, epoch)
        if sender.id not in self.others:
            self.meet([sender])
        self.others[sender.id].hello_at = self.scheduler.now
        service = self.service
        if service is None or config_epoch <= service.config_epoch:
            return
        service.config_epoch = config_epoch
        if primary != service.primary.address:
            self._switch(service, primary)

    def _learned(self, service: Service, known: Known, report: Report) -> None:
        if known is service.primary:
            return
        if known is service.promoted and service.failover_state == "wait_promotion":
            if report.role == "master":
                service.config_epoch = service.failover_epoch
                self._enter(service, "reconf_slaves")
                self.say_hello()
        elif known.reconfigured == "sent" and service.promoted:
            if report.primary == service.promoted.address and report.is_linked:
                known.reconfigured = "done"
        elif not service.failover_state and self._looks_sane(service.primary):
            now = self.scheduler.now
            wait = SETTLED if report.role == "master" else self.failover_timeout
            since = known.role_since if report.role == "master" else known.told_at
            is_wrong = report.role == "master" or report.primary != service.primary.address
            if is_wrong and not known.is_down and now - since > wait:
                self.reconfigure(known, service.primary.address)

    def _looks_sane(self, primary: Known) -> bool:
        is_fresh = self.scheduler.now - primary.info_at < 2 * INFO_PERIOD
        return primary.role == "master" and not primary.is_down and is_fresh


def watched(
    network: Network,
    name: str,
    servers: Sequence[ReplicatedServer],
    addresses: Sequence[Address],
    **options: Any,
) -> list[Sentinel]:
    """Sentinels at these addresses that watch the servers, of which the first is the primary."""
    primary, *replicas = [server.address for server in servers]
    options = {"quorum": len(addresses) // 2 + 1, **options}
    sentinels = [Sentinel(network, address, name, primary, replicas, **options) for address in addresses]
    for sentinel in sentinels:
        sentinel.meet(sentinels)
    return sentinels
