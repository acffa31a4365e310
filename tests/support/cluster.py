"""A Cluster of three primaries with a replica each, to be killed, stopped, failed over and resharded."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from django_distlock.backends.redis.keys import slot_of
from django_distlock.testing.tools import eventually
from example_project.valkey import ONCE, binary
from tests.support.ports import free_ports

PRIMARIES = 3
SLOTS = 16384
NODE_TIMEOUT = 1000  # ms after which the others take a node for failed
PATIENT_NODE_TIMEOUT = 5000  # where nobody harms a node; one on a busy machine may not answer for seconds
BROKEN = (redis.RedisError, OSError)


class Node:
    """A server that may be a member of a Cluster, with a client of its own and one for raw replies."""

    def __init__(self, folder: Path, program: Path | str, *arguments: str) -> None:
        self._folder, self._program, self._arguments = folder, program, arguments
        self.is_stopped = False
        eventually(self._starts_at_a_port)

    def _starts_at_a_port(self) -> bool:
        """False if somebody else has taken the port since it was free."""
        [self.port] = free_ports(1, with_bus=True)
        self.client, self._raw = self._new_client(), self._new_client()
        self._raw.response_callbacks.clear()
        return self._starts()

    def _new_client(self) -> Any:
        return redis.Redis(port=self.port, socket_timeout=5, retry=ONCE, decode_responses=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Again, at the same port, which a connection of others may have just then."""
        eventually(self._starts)

    def _starts(self) -> bool:
        self.process = subprocess.Popen(
            [
                self._program, "--port", str(self.port), "--bind", "127.0.0.1",
                "--dir", self._folder, "--save", "", "--appendonly", "no", "--cluster-enabled", "yes",
                "--cluster-node-timeout", str(NODE_TIMEOUT), "--cluster-require-full-coverage", "no",
                "--repl-diskless-sync-delay", "0", *self._arguments,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(lambda: self.answers() or self.process.poll() is not None)
        return self.process.poll() is None

    def answers(self) -> bool:
        try:
            return int(self.client.info("server")["process_id"]) == self.process.pid
        except BROKEN:
            return False

    @property
    def id(self) -> str:
        return self.cluster("MYID")

    @property
    def follows(self) -> str:
        """The id of its primary, or "-"."""
        own = next(line for line in self.cluster("NODES").splitlines() if "myself" in line)
        return str(own.split()[3])

    @property
    def is_primary(self) -> bool:
        return bool(self.client.info("replication")["role"] == "master")

    def cluster(self, *words: str | int) -> Any:
        """The raw reply to a CLUSTER command."""
        return self._raw.execute_command("CLUSTER", *words)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        self.is_stopped = True

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)
        self.is_stopped = False

    def end(self) -> None:
        self.client.close()
        self._raw.close()
        self.kill()


class Cluster:
    """``with Cluster() as cluster: cluster.urls``."""

    def __init__(self, program: Path | str | None = None, replicas: int = PRIMARIES) -> None:
        self._program, self._replicas = program or binary(), replicas

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-")))
            self.nodes: list[Node] = []
            for number in range(PRIMARIES + self._replicas):
                folder = self._folder / str(number)
                folder.mkdir()
                self.nodes.append(Node(folder, self._program))
                stack.callback(self.nodes[-1].end)
            self._form()
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _form(self) -> None:
        first, *others = self.nodes
        for epoch, node in enumerate(self.nodes, 1):
            node.cluster("SET-CONFIG-EPOCH", epoch)
        share = SLOTS // PRIMARIES + 1
        for number, node in enumerate(self.nodes[:PRIMARIES]):
            node.cluster("ADDSLOTS", *range(number * share, min(SLOTS, (number + 1) * share)))
        for node in others:
            first.cluster("MEET", "127.0.0.1", node.port)
        eventually(lambda: all(self._knows_all(node) for node in self.nodes))
        for primary, replica in zip(self.nodes, self.nodes[PRIMARIES:], strict=False):
            replica.cluster("REPLICATE", primary.id)
        self.wait_until_whole()

    def _knows_all(self, node: Node) -> bool:
        lines = node.cluster("NODES").splitlines()
        return len(lines) == len(self.nodes) and not any("handshake" in line for line in lines)

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    @property
    def primaries(self) -> list[Node]:
        """As they see it themselves."""
        return [node for node in self.nodes if node.process.poll() is None and not node.is_stopped and node.is_primary]

    def owner(self, slot: int) -> Node:
        """As the first node that answers sees it."""
        for first, last, port in self._owned():
            if first <= slot <= last:
                return self.at(port)
        raise LookupError(f"nobody owns slot {slot}")

    def has_known_owners(self) -> bool:
        """Whether the first node that answers knows of the last failover."""
        return {port for _, _, port in self._owned()} == {node.port for node in self.primaries}

    def _owned(self) -> list[tuple[int, int, int]]:
        """The first and the last slot of each range, and the port of its primary."""
        asked = next(node for node in self.nodes if node.process.poll() is None and not node.is_stopped)
        return [(first, last, primary[1]) for first, last, primary, *_ in asked.cluster("SLOTS")]

    def at(self, port: int) -> Node:
        return next(node for node in self.nodes if node.port == port)

    def replica_of(self, primary: Node) -> Node:
        followed = primary.id

        def found() -> Node | None:
            running = (node for node in self.nodes if node is not primary and node.answers())
            return next((node for node in running if node.follows == followed), None)

        replica: Node = eventually(found)  # on a busy machine one may be late with its answer
        return replica

    def fail_over(self, primary: Node) -> Node:
        """By command, without a loss; returns the new primary."""
        replica = self.replica_of(primary)
        eventually(lambda: replica.client.info("replication").get("master_link_status") == "up")
        replica.cluster("FAILOVER")
        eventually(lambda: replica.is_primary)
        return replica

    def be_patient(self) -> None:
        """From now on no replica takes the place of a primary that does not answer."""
        self._configure(PATIENT_NODE_TIMEOUT, "yes")

    @contextmanager
    def failing_over(self) -> Iterator[None]:
        """Inside, one does that soon. All nodes must be there at the end."""
        self._configure(NODE_TIMEOUT, "no")
        yield
        self.be_patient()
        self.wait_until_whole()  # one may have done so until then

    def _configure(self, node_timeout: int, stay: str) -> None:
        for node in self.nodes:
            node.client.config_set("cluster-node-timeout", node_timeout)
            node.client.config_set("cluster-replica-no-failover", stay)

    def move(self, slot: int, to: Node, pause: float = 0.0) -> None:
        """Key by key, as the tools do that reshard a Cluster, with that pause after each step."""
        source = self.owner(slot)
        to.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", to.id)
        try:
            time.sleep(pause)
            while keys := source.cluster("GETKEYSINSLOT", slot, 1):
                to.cluster("SETSLOT", slot, "IMPORTING", source.id)  # seen on a busy machine: it had forgotten
                source.client.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)
                time.sleep(pause)
        except BaseException:  # other tests have the same Cluster
            for node in (source, to):
                node.cluster("SETSLOT", slot, "STABLE")
            raise
        to.cluster("SETSLOT", slot, "NODE", to.id)
        to.cluster("BUMPEPOCH")  # which it does not do by itself where it has forgotten that it imports
        for node in (source, *(node for node in self.primaries if node not in (to, source))):
            node.cluster("SETSLOT", slot, "NODE", to.id)
        eventually(lambda: all(self._sees(node, slot, to) for node in self.nodes))

    def move_at_once(self, slot: int, to: Node) -> None:
        """As Valkey 9 does it: the source hands over all keys in one step."""
        self.owner(slot).cluster("MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", to.id)
        eventually(lambda: all(self._sees(node, slot, to) for node in self.nodes))

    @staticmethod
    def _sees(node: Node, slot: int, owner: Node) -> bool:
        shards = node.cluster("SLOTS")
        return any(first <= slot <= last and primary[1] == owner.port for first, last, primary, *_ in shards)

    def heal(self) -> None:
        """All nodes run again; the former roles do not come back."""
        for node in self.nodes:
            if node.is_stopped:
                node.go_on()
            if node.process.poll() is not None:
                node.start()
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        eventually(self._is_whole)
        self._share_replicas()
        eventually(self._is_whole)

    def _share_replicas(self) -> None:
        """Each primary has one: a node that came back may have followed another than before."""
        replicas_of: dict[str, list[Node]] = {primary.id: [] for primary in self.primaries}
        for node in self.nodes:
            if not node.is_primary:
                replicas_of[node.follows].append(node)
        spare = [node for replicas in replicas_of.values() for node in replicas[1:]]
        alone = [primary for primary, replicas in replicas_of.items() if not replicas]
        for replica, primary in zip(spare, alone, strict=False):
            replica.cluster("REPLICATE", primary)

    def _is_whole(self) -> bool:
        return all(self._is_well(node) for node in self.nodes) and len(self.primaries) == PRIMARIES

    def _is_well(self, node: Node) -> bool:
        try:
            state = node.cluster("INFO")
            slots = node.cluster("SLOTS")
            replication = node.client.info("replication")
        except BROKEN:
            return False
        linked = replication["role"] == "master" or replication["master_link_status"] == "up"
        shards = {tuple(sorted(one[1] for one in shard)) for _, _, *shard in slots}
        return (
            "cluster_state:ok" in state
            and "cluster_slots_assigned:16384" in state
            and linked
            and sum(map(len, shards)) == len(self.nodes)
        )

    def flush(self) -> None:
        for node in self.primaries:
            node.client.flushall()

    def all_keys(self) -> list[str]:
        """Of all primaries, without counters of fencing numbers."""
        return sorted(key for node in self.primaries for key in node.client.scan_iter(count=1000) if "|f:" not in key)


def names_on(cluster, backend, each=1):
    """Names of locks, so many on each primary."""
    eventually(cluster.has_known_owners)
    found = {node.port: [] for node in cluster.primaries}
    number = 0
    while any(len(names) < each for names in found.values()):
        name = f"n{number}"
        of_node = found[cluster.owner(slot_of(backend.keys.lease(name))).port]
        if len(of_node) < each:
            of_node.append(name)
        number += 1
    return found


def subscribed(cluster):
    """By the port of the primary, how many connections hear channels there."""
    counts = {node.port: len(node.client.client_list(_type="pubsub")) for node in cluster.primaries}
    return {port: count for port, count in counts.items() if count}
