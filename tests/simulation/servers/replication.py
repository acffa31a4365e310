"""Servers that follow another one. A replica gets what the primary has executed later, or never.

What a primary sends is what keys are after a command, not the command: the same for whoever reads a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .redis_server import Server, Watch
from .resp import OK, ServerError, Status
from .store import Entry

if TYPE_CHECKING:
    from ..engine.network import Address, Network
    from .sessions import Session

TICK = 1.0  # seconds between looks at what is to be done
LINK_TIMEOUT = 60.0  # seconds of silence after which the ends of a link take it for dead
ACK_TIMEOUT = 10.0  # seconds without an acknowledgement after which a replica does not count for min-replicas-to-write
AGAIN = 0.2  # seconds after which bytes are sent again that were lost
BACKLOG = 1_000  # writes that a primary keeps for replicas that come back

Publication = tuple[str, str, str]  # kind, channel, text


class Write(NamedTuple):
    offset: int
    changes: Mapping[str, Entry | None]
    publications: list[Publication]


class Link:
    """From a primary to a replica. ``offset``: what was sent."""

    def __init__(self, primary: ReplicatedServer, replica: ReplicatedServer, offset: int) -> None:
        self.primary, self.replica, self.offset = primary, replica, offset
        self.is_online = False  # else the replica still loads what was there when it came
        self.is_busy = False
        self.acknowledged_at = self.heard_at = primary.scheduler.now

    @property
    def is_known(self) -> bool:
        """To the primary."""
        return self in self.primary.links

    @property
    def is_good(self) -> bool:
        silent_for = self.primary.scheduler.now - self.acknowledged_at
        return self.is_online and silent_for <= self.primary.ack_timeout


class ReplicatedServer(Server):
    """A primary, until it follows another one.

    ``lag``: seconds that it takes as a replica until it has what came. ``sync_seconds``: that a copy of all data takes
    on its way, ``load_seconds``: for which it refuses then, because it loads. ``serves_stale``: also without a link.
    ``on_drop``: told of the keys whose values a full copy has overwritten with others. ``on_promote``: told of a
    replica before it becomes a primary.
    """

    def __init__(self, network: Network, address: Address, watch: Watch | None = None) -> None:
        super().__init__(network, address, watch)
        self.primary: Address | None = None
        self.links: list[Link] = []  # to its replicas
        self.link: Link | None = None  # from its primary
        self.history, self.offset = self._new_history(), 0
        self.former_history, self.former_offset = "0" * 40, -1  # until where it shares the history of its last primary
        self.lag = 0.0
        self.sync_seconds, self.load_seconds = 0.5, 0.1
        self.serves_stale = True
        self.ack_timeout = ACK_TIMEOUT
        self.is_syncing = False
        self.on_drop: Callable[[ReplicatedServer, dict[str, Entry | None]], None] | None = None
        self.on_promote: Callable[[ReplicatedServer], None] | None = None
        self._backlog: list[Write] = []
        self._publications: list[Publication] = []
        self._connecting_until = 0.0
        self._heard_at = self.scheduler.now
        self.scheduler.at(self.scheduler.random.uniform(0.0, TICK), self._tick)

    def _new_history(self) -> str:
        return f"{self.scheduler.random.getrandbits(160):040x}"

    # Becoming one or the other

    def follow(self, primary: Address) -> None:
        """REPLICAOF: what it has, and the primary has not, goes when it gets the copy."""
        if self.primary == primary:
            return
        self.primary = primary
        self._heard_at = self.scheduler.now
        self._unlink()
        self.resume()
        self._connecting_until = 0.0
        self._show_role()
        self._connect()

    def promote(self) -> None:
        """REPLICAOF NO ONE: it goes on with what it has."""
        if self.primary is None:
            return
        if self.on_promote:
            self.on_promote(self)
        self.primary = None
        self.former_history, self.former_offset = self.history, self.offset
        self.history = self._new_history()
        self._unlink()
        self._show_role()

    def _show_role(self) -> None:
        is_linked = self.link is not None
        for state, is_so in (
            ("READONLY", self.primary is not None),
            ("MASTERDOWN", self.primary is not None and not is_linked and not self.serves_stale),
        ):
            (self.states.add if is_so else self.states.discard)(state)

    def _unlink(self) -> None:
        """Hang up to its primary and to its replicas."""
        if self.link is not None:
            self._hang_up(self.link, self.link.primary)
            self.link, self.is_syncing = None, False
        for link in self.links:
            self._hang_up(link, link.replica)
        self.links.clear()

    def _hang_up(self, link: Link, other: ReplicatedServer) -> None:
        self.tell(other, lambda: other.lose_link(link))

    def lose_link(self, link: Link) -> None:
        """The other end has hung up, or does not know of the link."""
        if link in self.links:
            self.links.remove(link)
        if self.link is link:
            self._heard_at = link.heard_at
            self.link, self.is_syncing = None, False
            self._show_role()

    def stop(self) -> None:
        self._unlink()
        super().stop()

    def start(self, *, keeps_data: bool = False, snapshot: dict[str, Entry] | None = None) -> None:
        super().start(keeps_data=keeps_data, snapshot=snapshot)
        self.store.take_changes()
        self.history, self.offset = self._new_history(), 0
        self.former_history, self.former_offset = "0" * 40, -1
        self._backlog.clear()
        self._publications.clear()
        self.links.clear()
        self.link, self.is_syncing, self._connecting_until = None, False, 0.0
        self._show_role()

    # As a primary

    @property
    def good_replicas(self) -> int:
        return sum(link.is_good for link in self.links)

    def publish(self, kind: str, channel: str, text: str) -> int:
        if self.primary is None:
            self._publications.append((kind, channel, text))
        return super().publish(kind, channel, text)

    def settle(self) -> None:
        changes, publications = self.store.take_changes(), self._publications
        self._publications = []
        if self.primary is None and (changes or publications):
            self._append(Write(self.offset + 1, changes, publications))
            for link in self.links:
                self._feed(link)

    def _append(self, write: Write) -> None:
        self.offset = write.offset
        self._backlog.append(write)
        del self._backlog[:-BACKLOG]

    def _feed(self, link: Link) -> None:
        """Send what the replica does not have yet."""
        if link.is_busy or not link.is_known or not link.is_online or link.offset == self.offset:
            return
        writes, replica = [write for write in self._backlog if write.offset > link.offset], link.replica
        link.is_busy = True
        if self.tell(replica, lambda: replica.take_writes(link, writes), extra=replica.lag):
            link.offset = self.offset
        else:
            self.scheduler.at(AGAIN, lambda: self._feed_again(link))

    def _feed_again(self, link: Link) -> None:
        link.is_busy = False
        self._feed(link)

    def _accept(self, replica: ReplicatedServer, history: str, offset: int) -> None:
        """A replica wants to go on from there."""
        if self.primary is not None or "LOADING" in self.states:
            return
        for link in [link for link in self.links if link.replica is replica]:
            self.links.remove(link)
        since = self._backlog[0].offset - 1 if self._backlog else self.offset
        shared = self.offset if history == self.history else self.former_offset
        is_shared = history in (self.history, self.former_history) and since <= offset <= shared
        link = Link(self, replica, offset if is_shared else self.offset)
        self.links.append(link)
        if is_shared:
            self.tell(replica, lambda: replica._go_on_from(link, self.history))
        else:
            snapshot, here = self.store.snapshot(), (self.history, self.offset)
            self.tell(replica, lambda: replica._begin_copy(link))
            self.tell(replica, lambda: replica._load_copy(link, snapshot, *here), extra=replica.sync_seconds)

    def _linked(self, link: Link) -> None:
        """The replica has what was there when it came."""
        if link.is_known:
            link.is_online, link.acknowledged_at = True, self.scheduler.now
            self._feed(link)

    def _take_acknowledgement(self, link: Link) -> None:
        if link.is_known:
            link.acknowledged_at = self.scheduler.now
        else:
            self._hang_up(link, link.replica)

    # As a replica

    @property
    def heard_from_primary_at(self) -> float:
        return self.link.heard_at if self.link else self._heard_at

    def _connect(self) -> None:
        """Ask the primary for what it has, once in a while."""
        if self.primary is None or self.link is not None or self.scheduler.now < self._connecting_until:
            return
        other = self.network.servers.get(self.primary)
        if isinstance(other, ReplicatedServer) and other.is_up and other is not self:
            self._connecting_until = self.scheduler.now + TICK
            self.tell(other, lambda: other._accept(self, self.history, self.offset))

    def _is_mine(self, link: Link) -> bool:
        return self.primary == link.primary.address and self.link in (None, link)

    def _go_on_from(self, link: Link, history: str) -> None:
        if self._is_mine(link):
            self.link, self.history = link, history
            self._mark_linked(link)

    def _begin_copy(self, link: Link) -> None:
        if self._is_mine(link):
            self.is_syncing, self._connecting_until = True, self.scheduler.now + LINK_TIMEOUT

    def _load_copy(self, link: Link, snapshot: dict[str, Entry], history: str, offset: int) -> None:
        if not self._is_mine(link) or not link.is_known:
            self.is_syncing, self._connecting_until = False, 0.0
            return
        self.load(self.load_seconds)
        if self.on_drop:
            old = self.store.snapshot()
            dropped = {key: snapshot.get(key) for key, entry in old.items() if snapshot.get(key) != entry}
            self.on_drop(self, dropped)
        self.store.restore(snapshot)
        self.link, self.history, self.offset, self.is_syncing = link, history, offset, False
        self._backlog.clear()
        self.scheduler.at(self.load_seconds, lambda: self._mark_linked(link))

    def _mark_linked(self, link: Link) -> None:
        if self.link is link:
            link.heard_at = self.scheduler.now
            self._connecting_until = 0.0
            self._show_role()
            self.tell(link.primary, lambda: link.primary._linked(link))

    def take_writes(self, link: Link, writes: list[Write]) -> None:
        link.is_busy = False
        if self.link is not link:
            return
        link.heard_at = self.scheduler.now
        for write in writes:
            self.store.apply(write.changes)
            self._append(write)
            for publication in write.publications:
                super().publish(*publication)
        self.store.take_changes()
        link.primary._feed(link)

    # Both

    def _tick(self) -> None:
        self.scheduler.at(TICK, self._tick)
        if not self.is_up or self.is_hanging:
            return
        now = self.scheduler.now
        for link in [link for link in self.links if now - link.acknowledged_at > LINK_TIMEOUT]:
            self.links.remove(link)
        for link in self.links:
            self._ping(link)
        if (own := self.link) is not None:
            if now - own.heard_at > LINK_TIMEOUT:
                self.lose_link(own)
            else:
                self.tell(own.primary, lambda: own.primary._take_acknowledgement(own))
        self._connect()

    def _ping(self, link: Link) -> None:
        def hear() -> None:
            link.heard_at = self.scheduler.now

        self.tell(link.replica, hear)

    # Commands

    def configure(self, name: str, value: str) -> bool:
        match name:
            case "replica-serve-stale-data":
                self.serves_stale = value == "yes"
                self._show_role()
            case "min-replicas-max-lag":
                self.ack_timeout = float(value)
            case _:
                return super().configure(name, value)
        return True

    @property
    def role_in_hello(self) -> str:
        return "master" if self.primary is None else "replica"

    def _do_replicaof(self, session: Session, host: str, port: str) -> Any:
        if self.mode == "cluster":
            raise ServerError("ERR REPLICAOF not allowed in cluster mode.")
        if (host.upper(), port.upper()) == ("NO", "ONE"):
            self.promote()
        elif not port.isdecimal():
            raise ServerError("ERR Invalid master port")
        elif self.primary == (host, int(port)):
            return Status("OK Already connected to specified master")
        else:
            self.follow((host, int(port)))
        return OK

    def _do_role(self, session: Session) -> Any:
        if self.primary is None:
            online = [link for link in self.links if link.is_online]
            return ["master", self.offset, [_place(link) for link in online]]
        state = "connected" if self.link else "sync" if self.is_syncing else "connect"
        return ["slave", *self.primary, state, self.offset if self.link else -1]

    def about_replication(self) -> dict[str, object]:
        lines: dict[str, object] = {"role": "master" if self.primary is None else "slave"}
        if self.primary is not None:
            link = self.link
            lines |= {
                "master_host": self.primary[0],
                "master_port": self.primary[1],
                "master_link_status": "up" if link else "down",
                "master_last_io_seconds_ago": int(self.scheduler.now - link.heard_at) if link else -1,
                "master_sync_in_progress": int(self.is_syncing),
                "slave_repl_offset": self.offset,
                "slave_priority": 100,
                "slave_read_only": 1,
            }
        lines["connected_slaves"] = len(self.links)
        if self.min_replicas:
            lines["min_slaves_good_slaves"] = self.good_replicas
        for number, link in enumerate(self.links):
            host, port, offset = _place(link)
            state = "online" if link.is_online else "wait_bgsave"
            lag = int(self.scheduler.now - link.acknowledged_at)
            lines[f"slave{number}"] = f"ip={host},port={port},state={state},offset={offset},lag={lag},type=replica"
        return {**lines, "master_replid": self.history, "master_repl_offset": self.offset}


def _place(link: Link) -> list[str]:
    host, port = link.replica.address
    return [host, str(port), str(link.offset)]
