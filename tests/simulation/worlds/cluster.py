"""A Cluster of three or four primaries with a replica each, whose slots move."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from django_distlock import LockBackendError
from django_distlock.backends.redis.keys import ClusterKeys

from ..judges.stores import holders_in, leases_in
from ..judges.subscriptions import SubscriptionJudge
from ..plan import ENDS, HORIZON, MANY_NAMES, MOST_FAULT, NAMES, PROFILES, Fault, Profile, lasts
from ..servers.cluster_bus import slot_of
from ..servers.misleading import mislead_some
from ..servers.redis_cluster import Cluster, Node
from .islands import Islands
from .redis import FAILOVER_TIMEOUT, ServersWorld, left_in
from .server_faults import ServerFaults

if TYPE_CHECKING:
    from ..engine.network import Address, Socket
    from ..engine.scheduler import Process
    from ..servers.replication import ReplicatedServer
    from ..servers.sessions import Session
    from ..simulation import Simulation

PRIMARIES = 3  # with slots; a further one may have joined, to which slots can move
STEP = 0.05  # seconds between two looks at the nodes, and between two keys that move
HEALS = 40.0  # seconds after the last fault in which all nodes agree again
LATELY = 15.0  # seconds for which a number may be on its way that a former primary has granted


# Slots move here and there while few ask for the locks in them, and nothing fails.
MOVES = Profile(
    names=("a", "abc", "abc", "abcdefgh"), calls=(15, 40), within=(HORIZON,), ttls=((2.0, 5.0), (5.0, 20.0)),
    works=(0.01, 0.1, 0.5), wait_share=0.8, faults=("move",), most_faults=30,
)  # fmt: skip


class Succession:
    """A replica has taken the place of its primary, which may not know of it yet."""

    def __init__(self, former: ReplicatedServer, successor: ReplicatedServer) -> None:
        self.former = former
        self._history, self._offset = former.history, former.offset
        self.is_lossy = former.store.snapshot() != successor.store.snapshot()

    @property
    def has_lost_more(self) -> bool:
        """What the former one has executed since goes when it follows its successor."""
        return self.former.offset > (self._offset if self.former.history == self._history else 0)

    @property
    def is_over(self) -> bool:
        return self.former.link is not None


class ClusterWorld(ServersWorld):
    name = "cluster"
    profiles = (*PROFILES, (2, ENDS), (4, MOVES))
    own_profiles = (
        # A node gets its first slot while all nodes are asked, so often that a connection which is closed is missed.
        Profile(
            processes=(2, 2), names=("abcabcdefgh",), calls=(70, 90), within=(2.0,), anytime_share=0.0, ttls=((5.0,),),
            works=(0.0,), wait_share=0.0, rest_share=0.0, cancel_share=0.0, detach_share=0.0, adopters=0,
            faults=("move",), least_kinds=1, most_faults=6, distance=0.005,
        ),
    )  # fmt: skip
    keeping_connections = ("move",)
    ways_to_connect = 40  # three nodes are asked for their slot maps, over new connections, and then the owner

    def __init__(self, simulation: Simulation) -> None:
        chance = random.Random(f"cluster {simulation.seed}")
        self._primaries = PRIMARIES + chance.choice([0, 1, 1])
        self._seeds = chance.choice([1, 1, 2 * self._primaries])  # nodes that LOCATION names
        super().__init__(simulation)
        addresses = [(f"10.0.0.{number}", 6379) for number in range(1, 2 * self._primaries + 1)]
        self.cluster = Cluster(
            simulation.network, addresses, self.executed, primaries=self._primaries, owners=PRIMARIES, node_timeout=2.0
        )
        self.nodes = {f"n{number}": node for number, node in enumerate(self.cluster.nodes, 1)}
        self.servers = {**self.nodes}
        self._islands = Islands(simulation, self.servers)
        self.keys = ClusterKeys("lock", 64)
        self._slots = {name: slot_of(self.keys.lease(name)) for name in MANY_NAMES}
        self._moving: set[int] = set()
        self._successions: list[Succession] = []
        self._has_begun = False  # all replicas follow their primaries
        self._lost_at = -LATELY  # when a grant may have been lost last
        for node in self.cluster.nodes:
            node.on_promote = self._promoted
        self._subscriptions = SubscriptionJudge(simulation)
        self._is_misled = mislead_some(self.cluster.nodes, random.Random(f"told {simulation.seed}"))
        self.scheduler.at(STEP, self._look)

    def setting(self) -> dict[str, Any]:
        locations = [f"redis://10.0.0.{number}:6379/0" for number in range(1, self._seeds + 1)]
        return {"BACKEND": "django_distlock.backends.redis.RedisClusterBackend", "LOCATION": locations}

    def executed(self, session: Session, command: list[str], reply: Any) -> None:
        super().executed(session, command, reply)
        if command[0] == "SSUBSCRIBE":
            self._subscriptions.subscribes(session.socket, command[1])

    def told(self, error: LockBackendError) -> None:
        """S16: all nodes know an owner of each slot, whether it serves or not."""
        if "no primary" in str(error):
            self.simulation.judges.fail(f"S16: told that slots have no owner, which no node says: {error!r}")

    def closes(self, socket: Socket) -> None:
        self._subscriptions.closes(socket)

    def watch(self) -> None:
        if not self._is_misled:  # else a subscription that seems not to be heard is made again
            self._subscriptions.watch()

    def holders(self) -> Mapping[str, Collection[str]] | None:
        """None while a slot has no owner, or is on its way."""
        if self._successions or not self._is_settled:
            return None
        owners = {name: self.cluster.owner(slot) for name, slot in self._slots.items()}
        return {name: holders_in(owner.store, self.keys, name) for name, owner in owners.items() if owner}

    def leases(self, name: str) -> int:
        return max((len(leases_in(node.store, self.keys, name)) for node in self._present_primaries()), default=0)

    def left(self) -> Collection[str]:
        return [f"{key} at {node.address[0]}" for node in self._present_primaries() for key in left_in(node)]

    def _present_primaries(self) -> Iterator[Node]:
        return (node for node in self.cluster.nodes if node.is_primary)

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """Another server may take over (docs/settings.md, "How long a call lasts")."""
        return 0.0 if "grants the lock" in str(error) else FAILOVER_TIMEOUT

    def delayed_until(self, process: Process, address: Address) -> float:
        return self._islands.delayed_until(process, address)

    # What failovers lose

    def has_lost_data_since(self, moment: float) -> bool:
        """Replication is asynchronous (docs/topologies/cluster.md, "Lost writes", "A primary that was cut off")."""
        return self._lost_at + STEP >= moment

    @property
    def may_repeat_numbers(self) -> bool:
        return self.has_lost_data_since(self.scheduler.now - LATELY)

    def _promoted(self, node: ReplicatedServer) -> None:
        former = self.simulation.network.servers.get(node.primary or ("", 0))
        if isinstance(former, Node):
            succession = Succession(former, node)
            self._successions.append(succession)
            self.simulation.tell(f"{node.address[0]} succeeds {former.address[0]}, loses: {succession.is_lossy}")
            if succession.is_lossy:
                self._lost_at = self.scheduler.now

    def _look(self) -> None:
        self.scheduler.at(STEP, self._look)
        now = self.scheduler.now
        if any(succession.has_lost_more for succession in self._successions):
            self._lost_at = now
        self._successions = [succession for succession in self._successions if not succession.is_over]
        self._has_begun = self._has_begun or self._is_well
        if not self._is_settled:
            self.simulation.disturb("", now, of_connections=self._has_begun and not self._is_well)
            if now > HORIZON + MOST_FAULT + HEALS:
                self.simulation.judges.fail("the Cluster does not heal")

    @property
    def _is_settled(self) -> bool:
        """A failover, and a slot on its way, are faults, too."""
        nodes = self.cluster.nodes
        return (
            not self._moving
            and self._is_well
            and all(len({node.owners.get(slot) for node in nodes}) == 1 for slot in self._slots.values())
        )

    @property
    def _is_well(self) -> bool:
        nodes = self.cluster.nodes
        return all(node.is_up and node.is_well and (node.is_primary or node.link) for node in nodes)

    # Faults

    def faults(self) -> dict[str, Fault]:
        nodes = [*self.nodes]
        return {
            **super().faults(),
            **ServerFaults(self.servers, ("LOADING", "NOREPLICAS", "MISCONF", "OOM", "BUSY")).all(),
            "move": Fault(self._move, NAMES, self._draw_move),
            "failover": Fault(self._fail_over, nodes, lambda chance: {"how": chance.choice(["", "FORCE", "TAKEOVER"])}),
            "lag": Fault(self._lag, nodes, lasts),
            "island": self._islands.fault(nodes),
            "deaf": self._islands.fault_of_servers(nodes),  # its view of the Cluster becomes old, and its data, too
        }

    def _primary_of(self, shard: int) -> Node | None:
        """Of the two nodes of a shard the one that has the slots."""
        shard_nodes = self.cluster.nodes[shard :: self._primaries]
        primaries = [node for node in shard_nodes if node.is_up and node.is_primary]
        return max(primaries, key=lambda node: node.me.config_epoch, default=None)

    def _move(self, who: str, seconds: float, to: int) -> None:
        """Key by key; in no time: all at once."""
        if (slot := self._slots[who]) in self._moving:
            return
        self._moving.add(slot)
        if not seconds and (target := self._primary_of(to)):
            self.cluster.move_at_once(slot, target)
        self._go_on_moving(slot, to, self.scheduler.now + seconds)

    def _go_on_moving(self, slot: int, to: int, until: float) -> None:
        """As an operator does: begin again where a node failed meanwhile, until the slot has arrived."""
        source, target = self.cluster.owner(slot), self._primary_of(to)
        if source and source is target:
            for node in self.cluster.nodes:
                node.migrating.pop(slot, None)
                node.importing.pop(slot, None)
            self._moving.discard(slot)
            return
        if source and target:
            if source.migrating.get(slot, target.id) != target.id:
                del source.migrating[slot]
            self.cluster.begin_move(slot, target)
            is_moved = self.cluster.move_key(slot)
            if self.scheduler.now >= until and not is_moved:
                self.cluster.end_move(slot)
        self.scheduler.at(STEP, lambda: self._go_on_moving(slot, to, until))

    def _fail_over(self, who: str, how: str) -> None:
        """By hand, also of a primary that works: the other node of the shard takes over."""
        number = self.cluster.nodes.index(self.nodes[who])
        shard_nodes = self.cluster.nodes[number % self._primaries :: self._primaries]
        node = next((one for one in shard_nodes if not one.is_primary), None)
        if node is None or not node.is_up:
            return
        if how == "FORCE":
            node.force_failover()
        elif how == "TAKEOVER":
            node.take_over()
        else:
            node.fail_over()

    def _lag(self, who: str, seconds: float) -> None:
        self.nodes[who].lag = 0.5
        self.scheduler.at(seconds, lambda: setattr(self.nodes[who], "lag", 0.0))

    def _draw_move(self, chance: random.Random) -> Mapping[str, Any]:
        about = lasts(chance) if chance.random() < 0.7 else {"seconds": 0.0}
        return {**about, "to": chance.randrange(self._primaries)}
