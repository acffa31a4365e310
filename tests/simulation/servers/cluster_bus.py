"""What the nodes of a Cluster know of each other: who owns which slots, who is down, and who takes whose place."""

from __future__ import annotations

from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from .replication import ReplicatedServer
from .resp import Push

if TYPE_CHECKING:
    from ..engine.network import Address, Network
    from .redis_server import Watch

SLOTS = 16384
CRON = 0.1  # seconds, as are all here
FIRST_DELAY = 0.5  # before a replica asks for votes
WRITABLE_AFTER = 2.0  # of a primary that was started
OLDEST_DATA = 10  # times the node timeout
MANUAL_FAILOVER = 5.0  # after which a primary goes on that stood still for it


def slot_of(key: str) -> int:
    """By the specification of Cluster: of what stands between the first braces, if there is something."""
    start = key.find("{")
    end = key.find("}", start + 1)
    tag = key[start + 1 : end] if 0 <= start < end - 1 else key
    return crc_hqx(tag.encode("latin-1"), 0) % SLOTS


@dataclass(eq=False)
class View:
    """What a node knows of a node."""

    id: str
    address: Address
    primary: str | None = None  # the id of the one that it follows
    slots: frozenset[int] = frozenset()
    config_epoch: int = 0
    offset: int = 0
    heard_at: float = 0.0
    pinged_at: float | None = None  # the first time since it was heard
    is_connected: bool = True
    is_suspected: bool = False
    failed_since: float | None = None
    reports: dict[str, float] = field(default_factory=dict)  # when others said that it is down
    voted_at: float = -inf  # for a replica of it

    @property
    def is_failed(self) -> bool:
        return self.failed_since is not None

    @property
    def votes(self) -> bool:
        return self.primary is None and bool(self.slots)


class Header(NamedTuple):
    """What a node says of itself in each message, and whom it takes for dead."""

    id: str
    primary: str | None
    slots: frozenset[int]
    config_epoch: int
    current_epoch: int
    offset: int
    suspects: frozenset[str]


class ClusterBus(ReplicatedServer):
    """``node_timeout``: as cluster-node-timeout. ``full_coverage``: nothing is served while a slot is not."""

    mode = "cluster"

    def __init__(self, network: Network, address: Address, watch: Watch | None, node_timeout: float) -> None:
        super().__init__(network, address, watch)
        self.id = f"{self.scheduler.random.getrandbits(160):040x}"
        self.node_timeout = node_timeout
        self.full_coverage = False
        self.current_epoch = 0
        self.me = View(self.id, address)
        self.nodes: dict[str, View] = {self.id: self.me}
        self.owners: dict[int, str] = {}
        self.migrating: dict[int, str] = {}
        self.importing: dict[int, str] = {}
        self.is_well = True
        self._alone_since = -inf  # when it last saw less than a majority
        self._voted_epoch = 0
        self._asked_at = -inf  # when it asks, or asked, for votes
        self._has_asked = False
        self._election_epoch = 0
        self._votes: set[str] = set()
        self._is_forced = False
        self._processed: dict[str, tuple[frozenset[int], int, int]] = {}
        self.changes = 0  # of owners
        self.scheduler.at(self.scheduler.random.uniform(0.0, CRON), self._cron)

    @property
    def others(self) -> list[View]:
        return [view for view in self.nodes.values() if view is not self.me]

    @property
    def voters(self) -> list[View]:
        return [view for view in self.nodes.values() if view.votes]

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    def node_at(self, view: View) -> ClusterBus | None:
        node = self.network.servers.get(view.address)
        return node if isinstance(node, ClusterBus) else None

    def header(self) -> Header:
        suspects = frozenset(view.id for view in self.others if view.is_suspected or view.is_failed)
        me = self.me
        epoch = me.config_epoch if me.primary is None else self.nodes[me.primary].config_epoch
        return Header(self.id, me.primary, me.slots, epoch, self.current_epoch, self.offset, suspects)

    def start(self, **how: object) -> None:
        """It has kept its view of the Cluster."""
        super().start(**how)  # type: ignore[arg-type]
        now = self.scheduler.now
        for view in self.others:
            view.pinged_at, view.heard_at, view.is_suspected = None, now - self.node_timeout, False
        self.is_well, self._alone_since = False, now + WRITABLE_AFTER - self._rejoin_delay

    # Heartbeats

    def _cron(self) -> None:
        self.scheduler.at(CRON, self._cron)
        if not self.is_up or self.is_hanging:
            return
        now = self.scheduler.now
        for view in self.others:
            if view.pinged_at is None and now - view.heard_at > self.node_timeout / 2:
                self._ping_node(view)
            elif view.pinged_at is not None:
                if not view.is_suspected and now - view.pinged_at > self.node_timeout:
                    view.is_suspected = True
                self._ping_node(view)
            self._judge(view)
        self._update_state()
        self._consider_failover()

    def _ping_node(self, view: View) -> None:
        view.pinged_at = self.scheduler.now if view.pinged_at is None else view.pinged_at
        if (node := self.node_at(view)) is not None:
            passes = self.tell(node, self._message(node, self.header(), needs_answer=True))
            view.is_connected = view.is_connected and not (passes and node.has_power and not node.is_up)

    def _message(self, node: ClusterBus, header: Header, *, needs_answer: bool = False) -> Callable[[], None]:
        return lambda: node.heard(self, header, needs_answer=needs_answer)

    def say(self, to: Iterable[View] | None = None) -> None:
        """At once, to all."""
        for view in self.others if to is None else to:
            if (node := self.node_at(view)) is not None:
                self.tell(node, self._message(node, self.header()))

    def heard(self, sender: ClusterBus, header: Header, *, needs_answer: bool) -> None:
        if (view := self.nodes.get(header.id)) is None:
            return
        self.current_epoch = max(self.current_epoch, header.current_epoch)
        if needs_answer:
            self.tell(sender, self._message(sender, self.header()))
        else:
            view.pinged_at = None
            view.is_suspected = False
        view.heard_at, view.offset, view.is_connected = self.scheduler.now, header.offset, True
        self._forgive(view)
        self._read_role(view, header)
        self._read_suspects(view, header)
        if header.primary is None:
            self._read_slots(view, header, sender)

    def _read_role(self, view: View, header: Header) -> None:
        if header.primary is not None and view.primary is None:
            view.slots = frozenset()
        view.primary = header.primary
        if header.primary is None:
            view.config_epoch = max(view.config_epoch, header.config_epoch)
            if header.config_epoch == self.me.config_epoch and self.me.primary is None and self.id < header.id:
                self.bump_epoch()  # two primaries must not have the same
        above = self.nodes.get(header.primary or "")
        if self.me.primary == view.id and above is not None and above is not self.me:
            self._follow_node(above)  # its primary has become a replica itself

    # Slots

    def _read_slots(self, view: View, header: Header, sender: ClusterBus) -> None:
        """Who has the larger epoch owns a slot."""
        state = header.slots, header.config_epoch, self.changes
        if self._processed.get(view.id) == state:
            return
        newer: View | None = None
        own = self.me if self.me.primary is None else self.nodes[self.me.primary]
        taken = set()
        for slot in header.slots:
            owner = self.nodes.get(self.owners.get(slot, ""))
            if owner is view or slot in self.importing:
                continue
            if owner is None or owner.config_epoch < header.config_epoch:
                taken.add(slot)
            elif owner.config_epoch > header.config_epoch:
                newer = owner
        has_lost = bool(taken & own.slots)
        self.give(taken, view)
        if newer is not None:
            self._correct(sender, newer)
        if has_lost and not own.slots:
            self._follow_node(view)
        elif has_lost and own is self.me:
            self._delete_keys_of_others()
        self._processed[view.id] = header.slots, header.config_epoch, self.changes

    def _correct(self, sender: ClusterBus, newer: View) -> None:
        """Tell a node that others know better of slots that it takes for its own."""
        slots, epoch, node_id = newer.slots, newer.config_epoch, newer.id

        def update() -> None:
            view = sender.nodes.get(node_id)
            if view is not None and view.config_epoch < epoch:
                header = Header(node_id, None, slots, epoch, epoch, view.offset, frozenset())
                view.config_epoch, view.primary = epoch, None
                sender._read_slots(view, header, self)

        self.tell(sender, update)

    def give(self, slots: Iterable[int], view: View) -> None:
        """The slots have another owner now, in the view of this node."""
        by_owner: dict[str, set[int]] = defaultdict(set)
        for slot in slots:
            if (old_id := self.owners.get(slot, "")) != view.id:
                by_owner[old_id].add(slot)
        for old_id, moved in by_owner.items():
            if (old := self.nodes.get(old_id)) is not None:
                old.slots -= moved
                if self.id == old.id or self.me.primary == old.id:
                    self._end_listeners(moved)
                if old is self.me:
                    self.migrating = {slot: to for slot, to in self.migrating.items() if slot not in moved}
            view.slots |= moved
            self.owners.update(dict.fromkeys(moved, view.id))
            self.changes += 1

    def _end_listeners(self, slots: set[int]) -> None:
        for session in list(self.sessions):
            for kind, channel in list(session.channels):
                if kind == "S" and slot_of(channel) in slots:
                    del session.channels[kind, channel]
                    session.tell(Push(["sunsubscribe", channel, session.listens_to("S")]))

    def _delete_keys_of_others(self) -> None:
        for key in sorted(self.store.keys()):
            if self.owners.get(slot_of(key)) != self.id:
                self.store.execute("del", key)
        self.settle()

    def bump_epoch(self) -> None:
        self.current_epoch = max(self.current_epoch, *(view.config_epoch for view in self.nodes.values())) + 1
        self.me.config_epoch = self.current_epoch

    def _follow_node(self, view: View) -> None:
        self.me.primary = view.id
        self._asked_at, self._has_asked = -inf, False
        self.migrating.clear()
        self.importing.clear()
        self.follow(view.address)
        self.say()

    # Failures

    def _read_suspects(self, view: View, header: Header) -> None:
        if not view.votes:
            return
        for other in self.others:
            if other.id in header.suspects:
                other.reports[view.id] = self.scheduler.now
            else:
                other.reports.pop(view.id, None)

    def _judge(self, view: View) -> None:
        """Dead is who is silent for a majority of the primaries."""
        if not view.is_suspected or view.is_failed:
            return
        now = self.scheduler.now
        reporters = sum(now - at <= 2 * self.node_timeout for at in view.reports.values())
        if reporters + self.me.votes >= self.majority:
            view.failed_since = now
            if self.me.votes:
                for other in self.others:
                    if (node := self.node_at(other)) is not None:
                        self.tell(node, self._notice_of(node, view.id))

    @staticmethod
    def _notice_of(node: ClusterBus, failed: str) -> Callable[[], None]:
        def notice() -> None:
            view = node.nodes.get(failed)
            if view is not None and view is not node.me and not view.is_failed:
                view.failed_since = node.scheduler.now

        return notice

    def _forgive(self, view: View) -> None:
        """It is heard again. One that still owns slots stays failed for a while, so that a replica may take over."""
        if view.failed_since is None or view.is_suspected:
            return
        if not view.votes or self.scheduler.now - view.failed_since > 2 * self.node_timeout:
            view.failed_since = None

    @property
    def _rejoin_delay(self) -> float:
        return min(5.0, max(0.5, self.node_timeout))

    def _update_state(self) -> None:
        now = self.scheduler.now
        reachable = sum(not view.is_suspected and not view.is_failed for view in self.voters)
        has_majority = reachable >= self.majority
        if not has_majority:
            self._alone_since = now
        is_covered = len(self.owners) == SLOTS and not any(view.is_failed for view in self.voters)
        is_well = has_majority and (is_covered or not self.full_coverage)
        is_too_early = self.me.primary is None and now - self._alone_since < self._rejoin_delay
        if not is_well or not is_too_early:
            self.is_well = is_well

    # Failover

    def _consider_failover(self) -> None:
        primary = self.nodes.get(self.me.primary or "")
        if primary is None or not primary.slots or not (primary.is_failed or self._is_forced) or self._is_data_too_old:
            return
        now, timeout = self.scheduler.now, max(2.0, 2 * self.node_timeout)
        if now - self._asked_at > 2 * timeout:
            rank = sum(view.offset > self.offset for view in self._siblings(primary))
            wait = 0.0 if self._is_forced else FIRST_DELAY + self.scheduler.random.uniform(0.0, 0.5) + rank
            self._asked_at, self._has_asked = now + wait, False
        elif self._asked_at <= now <= self._asked_at + timeout:
            if not self._has_asked:
                self._ask_for_votes(primary)
            elif len(self._votes) >= self.majority:
                self._replace(primary)

    @property
    def _is_data_too_old(self) -> bool:
        unlinked_for = self.scheduler.now - self.heard_from_primary_at - self.node_timeout
        return unlinked_for > 10.0 + OLDEST_DATA * self.node_timeout

    def _siblings(self, primary: View) -> Iterator[View]:
        return (view for view in self.others if view.primary == primary.id)

    def _ask_for_votes(self, primary: View) -> None:
        self.current_epoch += 1
        self._election_epoch, self._has_asked, self._votes = self.current_epoch, True, set()
        slots, config_epoch, is_forced = primary.slots, primary.config_epoch, self._is_forced
        for view in self.others:
            if (node := self.node_at(view)) is not None:
                self.tell(node, self._request_to(node, primary.id, slots, config_epoch, is_forced=is_forced))

    def _request_to(
        self, node: ClusterBus, primary: str, slots: frozenset[int], config_epoch: int, *, is_forced: bool
    ) -> Callable[[], None]:
        epoch = self._election_epoch
        return lambda: node.asked_for_vote(self, epoch, primary, slots, config_epoch, is_forced=is_forced)

    def asked_for_vote(
        self, by: ClusterBus, epoch: int, primary: str, slots: frozenset[int], config_epoch: int, *, is_forced: bool
    ) -> None:
        self.current_epoch = max(self.current_epoch, epoch)
        view, now = self.nodes.get(primary), self.scheduler.now
        if view is None or not self.me.votes or epoch < self.current_epoch or self._voted_epoch == self.current_epoch:
            return
        if not (view.is_failed or is_forced) or now - view.voted_at < 2 * self.node_timeout:
            return
        owners = {self.owners[slot] for slot in slots if slot in self.owners}
        if any(self.nodes[owner].config_epoch > config_epoch for owner in owners):
            return
        self._voted_epoch, view.voted_at = self.current_epoch, now
        self.tell(by, lambda: by.got_vote(self.id, epoch))

    def got_vote(self, by: str, epoch: int) -> None:
        if epoch == self._election_epoch and self._has_asked and self.nodes[by].votes:
            self._votes.add(by)

    def _replace(self, primary: View) -> None:
        self.me.config_epoch = self._election_epoch
        self.give(primary.slots, self.me)  # while it is its replica: those who listen here have to learn of it
        self.me.primary, self._is_forced, self._asked_at = None, False, -inf
        self.promote()
        self._update_state()
        self.say()

    def take_over(self) -> None:
        """CLUSTER FAILOVER TAKEOVER: without asking anybody."""
        if (primary := self.nodes.get(self.me.primary or "")) is not None:
            self.bump_epoch()
            self._election_epoch = self.current_epoch
            self._replace(primary)

    def force_failover(self) -> None:
        """CLUSTER FAILOVER FORCE: with votes, though its primary is not dead."""
        self._is_forced, self._asked_at = True, -inf
        self._consider_failover()

    def fail_over(self) -> None:
        """CLUSTER FAILOVER: the primary stands still, until its replica has everything and takes over."""
        view = self.nodes.get(self.me.primary or "")
        if view is None or (primary := self.node_at(view)) is None:
            return

        def wait_for(offset: int) -> None:
            if self.me.primary == view.id and self.offset >= offset:
                self.force_failover()
            elif self.me.primary == view.id and primary.is_paused:
                self.scheduler.at(CRON, lambda: wait_for(offset))

        def pause() -> None:
            primary.pause(MANUAL_FAILOVER)
            offset = primary.offset
            primary.tell(self, lambda: wait_for(offset))

        self.tell(primary, pause)
