"""A Cluster: primaries that share the slots, and their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cluster_bus import SLOTS, View
from .cluster_commands import ClusterCommands
from .resp import ServerError

if TYPE_CHECKING:
    from ..engine.network import Address, Network
    from .redis_server import Watch


class Node(ClusterCommands):
    """One server of a Cluster."""

    @property
    def is_primary(self) -> bool:
        """As it sees itself."""
        return self.me.primary is None


class Cluster:
    """``addresses``: of the primaries, then of a replica of each of them, as far as there are more.

    ``owners``: how many of the primaries have slots; all, unless it is said.
    """

    def __init__(
        self,
        network: Network,
        addresses: Sequence[Address],
        watch: Watch | None = None,
        *,
        primaries: int = 3,
        owners: int = 0,
        node_timeout: float = 2.0,
        full_coverage: bool = False,
    ) -> None:
        self.scheduler = network.scheduler
        self.nodes = [Node(network, address, watch, node_timeout) for address in addresses]
        owners = owners or primaries
        share = SLOTS // owners + 1
        for node in self.nodes:
            node.full_coverage = full_coverage
            for number, other in enumerate(self.nodes):
                if other is not node:
                    node.nodes[other.id] = View(other.id, other.address)
                view = node.nodes[other.id]
                view.heard_at = self.scheduler.now
                if number < primaries:
                    view.config_epoch = number + 1
                    if number < owners:
                        node.give(range(number * share, min(SLOTS, (number + 1) * share)), view)
                else:
                    view.primary = self.nodes[number % primaries].id
            node.current_epoch = len(self.nodes)
        for number, node in enumerate(self.nodes[primaries:]):
            node.follow(self.nodes[number % primaries].address)

    def owner(self, slot: int) -> Node | None:
        """The one that runs, takes itself for the owner, and has the largest epoch."""
        owners = [node for node in self.nodes if node.is_up and node.is_primary and slot in node.me.slots]
        return max(owners, key=lambda node: node.me.config_epoch, default=None)

    def begin_move(self, slot: int, to: Node) -> bool:
        """As tools do it that reshard. False: this is no moment for it."""
        source = self.owner(slot)
        if source is None or source is to or not to.is_primary or not to.is_up or slot in source.migrating:
            return False
        to.importing[slot], source.migrating[slot] = source.id, to.id
        return True

    def move_key(self, slot: int) -> bool:
        """The next key of a slot that moves. False: there is none, or it cannot go now."""
        source = self.owner(slot)
        if source is None or slot not in source.migrating or not (keys := source.keys_in(slot)):
            return False
        to = source.nodes[source.migrating[slot]]
        try:
            source.migrate(to.address, keys[:1])
        except ServerError:
            return False
        return True

    def end_move(self, slot: int) -> bool:
        """All keys have gone: the slot belongs to its new owner, who tells the others. False: not yet."""
        source = self.owner(slot)
        if source is None or slot not in source.migrating or source.keys_in(slot):
            return False
        to = next(node for node in self.nodes if node.id == source.migrating[slot])
        if not to.is_up or not to.is_primary or slot not in to.importing:
            return False
        for node in (to, source):
            node.settle_slot(slot, node.nodes[to.id])
        return True

    def move_at_once(self, slot: int, to: Node) -> bool:
        """All keys in one step. False: this is no moment for it."""
        if not self.begin_move(slot, to):
            return False
        while self.move_key(slot):
            pass
        return self.end_move(slot)
