"""Which node of a Cluster owns which slot, and how commands find their nodes. No I/O here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, inf
from typing import Any, NamedTuple

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MaxConnectionsError,
    MovedError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from ....types import NOT_WAITING
from ....utils.chance import chance
from ....utils.clock import clock
from ....utils.drive import Call, Steps
from ....utils.text import printable
from ...common.attempts import Attempts, InDoubt
from ...common.backoff import Backoff
from ...common.timing import Timing
from ..errors import BreakerOpen, NoCredentials, is_answer, is_transient
from ..keys import slot_of
from ..replies import Reply
from ..scripts import Command, pack

NAMELESS = "?"  # a node with a preferred hostname that is not known yet
UNKNOWN_HOSTS = {"", NAMELESS}  # "": a node that does not know its own address, or must not show it

Remap = Callable[[tuple[str, int]], tuple[str, int]]


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return printable(f"{self.host}:{self.port}")


class SlotMap:
    """The nodes that own slots, for all connections of a backend. If it is out of date, a node answers MOVED.

    ``owners`` is replaced, never changed, so its identity shows whether there was an update.
    """

    def __init__(
        self, wanted: Iterable[int], seeds: Sequence[Address], timing: Timing, remap: Remap | None = None
    ) -> None:
        """``remap``: from the address that a node announces to the address at which this process reaches it."""
        self.timing = timing
        self._remap = remap
        self._wanted = sorted(wanted)
        self._seeds = seeds
        self._nodes: tuple[Address, ...] = ()
        self._named_at: dict[Address, float] = {}  # when a redirection last named a node
        self.unresponsive: set[Address] = set()  # did not answer when last asked, so other nodes are asked first
        self.owners: Mapping[int, Address] = {}
        self.updated_at = 0.0
        self.refresh_began_at = self.refresh_ended_at = 0.0

    @property
    def primaries(self) -> list[Address]:
        """The nodes that own slots in which keys of ours can be."""
        return sorted(set(self.owners.values()))

    @property
    def unowned(self) -> int:
        """The number of slots without an owner, among those in which keys of ours can be."""
        return len(self._wanted) - len(self.owners)

    @property
    def is_being_refreshed(self) -> bool:
        return self.refresh_began_at > self.refresh_ended_at

    def moved(self, slot: int, owner: Address) -> None:
        self.owners = {**self.owners, slot: owner}

    def nodes_to_ask(self) -> list[Address]:
        """Nodes to ask for the slots of all nodes; in random order, because one may be cut off from the others."""
        nodes = [*dict.fromkeys((*self._nodes, *self._named()))]
        known = chance.sample(nodes, len(nodes))
        known += [seed for seed in self._seeds if seed not in nodes]
        return sorted(known, key=self.unresponsive.__contains__)

    def update(self, reply: Sequence[Any], asked: Address) -> bool:
        """Update from the reply to CLUSTER SLOTS. False if it has no slots: that node is in no Cluster."""
        owners: dict[int, Address] = {}
        nodes: dict[Address, None] = {}
        for first, last, *replicated in reply:
            shard = [self._address(_host(node), node[1], asked) for node in replicated]
            nodes |= dict.fromkeys(shard)
            for slot in self._wanted[bisect_left(self._wanted, first) : bisect_right(self._wanted, last)]:
                owners[slot] = shard[0]
        if nodes:
            self._nodes, self.updated_at = tuple(nodes), clock()
            self.unresponsive.intersection_update({*nodes, *self._seeds})  # the others have left the Cluster
            if owners != self.owners:
                self.owners = owners
        return bool(nodes)

    def follow(self, to: AskError, asked: Address) -> Address | None:
        """The node that a redirection names; it is known from now on. None: only CLUSTER SLOTS can name it."""
        if to.host == NAMELESS:
            return None
        node = self._address(to.host, to.port, asked)
        self._named_at[node] = clock()
        return node

    def _address(self, host: bytes | str | None, port: int, asked: Address) -> Address:
        """The address that a node announces. If it has no host: with the host of the node that was asked."""
        name = host.decode() if isinstance(host, bytes) else host or ""
        address = Address(asked.host if name in UNKNOWN_HOSTS else name, port)
        return Address(*self._remap((address.host, address.port))) if self._remap else address

    def knows(self, address: Address) -> bool:
        """False: the node has left the Cluster. CLUSTER SLOTS does not name a node before it has its first slot."""
        return address in self._nodes or address in self._seeds or address in self._named()

    def _named(self) -> Sequence[Address]:
        """Nodes that redirections named lately."""
        for node, named_at in self._named_at.copy().items():
            if clock() - named_at >= self.timing.idle_kept:
                self._named_at.pop(node, None)
        return list(self._named_at)


def _host(node: Sequence[Any]) -> bytes | None:
    """The host of a node. If its preferred hostname is not known yet, the metadata has the IP address."""
    metadata = node[3] if len(node) > 3 else ()
    about = metadata if isinstance(metadata, Mapping) else dict(zip(metadata[::2], metadata[1::2], strict=False))
    host: bytes | None = about.get(b"ip") if node[0] == NAMELESS.encode() and b"ip" in about else node[0]
    return host


ASKING = Command(pack("ASKING"))
CLUSTER_SLOTS = Command(pack("CLUSTER", "SLOTS"))

LEAST_ASKED = 3  # nodes that are asked for slots, even if the first ones hang and the time passes

# Errors of connections that say nothing about the node
REFUSED = (AuthenticationError, MaxConnectionsError, NoCredentials)

NodeResult = Reply | Exception


class NodeBatch(NamedTuple):
    """The commands for one node, which are sent together. ``numbers``: their numbers among all commands.

    ``timeout``: seconds for their replies; ``queue_deadline``: see ``ServerAttempts``.
    """

    node: Address
    numbers: list[int]
    commands: list[Command]
    timeout: float
    queue_deadline: float = NOT_WAITING
    despite_outage: bool = False  # also if the breaker of the node is open

    @property
    def limits(self) -> dict[str, Any]:
        """For the client of the node."""
        queue_for = self.queue_deadline - clock()
        return {"timeout": self.timeout, "queue_for": queue_for, "despite_outage": self.despite_outage}

    def values(self, reply: Reply) -> list[Any]:
        """The replies, without those to ASKING."""
        pairs = zip(self.commands, reply.values, strict=True)
        return [value for command, value in pairs if command is not ASKING]


slot_of_key = lru_cache(maxsize=1024)(slot_of)


class RoutedRequest:
    """Sends commands to the nodes that own their keys, until each is answered or the time is over.

    A node that redirects a command did not execute it. A node that did not answer may have executed it; then the answer
    is in doubt, or InDoubt is raised, as by a ``Client``. If several nodes were asked and only some of them failed,
    their errors are among the replies.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        slots: SlotMap,
        attempts: Attempts,
        queue_deadline: float = NOT_WAITING,
        *,
        despite_outage: bool = False,
    ) -> None:
        """``queue_deadline``: until then it waits for a connection to a node that answers others, in extra time."""
        self._commands = commands
        self._slots, self._timing = slots, slots.timing
        self._attempts, self._queue_deadline, self._despite_outage = attempts, queue_deadline, despite_outage
        self._is_answered = False  # by any node, so far
        self._is_misled = False  # redirected to a node without a name
        self._replies: list[Any] = [None] * len(commands)
        self._sent_at = [0.0] * len(commands)
        self._asking: dict[int, Address] = {}  # where the next attempt of a command goes with ASKING
        self._is_by_next_owner = False  # of the last attempt

    def steps(self) -> Steps[Reply]:
        """Yields calls of ``send_batches`` and ``pause`` of a client."""
        timing, pending, is_first = self._timing, list(range(len(self._commands))), True
        shortest, longest = 2 * timing.slot_pause_shortest, timing.slot_pause_longest
        backoff = Backoff(inf, shortest, longest, is_random=False)
        if self._slots.unresponsive and self._goes_to_an_unresponsive_node():
            yield from self._refresh(clock() - timing.slots_kept)
        while True:
            began, known = clock(), self._slots.owners
            if batches := self._batches(pending):
                for batch, result in zip(batches, (yield Call("send_batches", (batches,))), strict=True):
                    self._take(batch, result)
            pending = [number for number in pending if self._is_to_repeat(number)]
            # Whoever has no map yet asks for it once, however late: else the Cluster would seem to be down.
            if not pending or (clock() >= self._attempts.deadline and (known or not is_first)):
                return self._answer()
            if self._is_map_wrong(pending):
                since = began if is_first else min(began, clock() - timing.slots_kept)
                failure = yield from self._refresh(since)
                if failure and not known:
                    self._replies = [failure] * len(self._commands)
                if failure and not (is_transient(failure, in_cluster=True) and clock() < self._attempts.deadline):
                    return self._answer()
            if not is_first or (self._slots.owners is known and not self._asking):
                yield Call("pause", (min(backoff.pause() or 0.0, max(0.0, self._attempts.deadline - clock())),))
            is_first = False

    def _refresh(self, since: float) -> Steps[Exception | None]:
        """Refresh the slot map, unless it was updated since then. One caller asks; the others wait for the result."""
        pause = self._timing.slot_pause_shortest
        # Counted, not by a clock: a busy event loop would leave no time for the other tasks.
        for _ in range(ceil(_share(self._next_timeout(), self._timing) / pause)):
            if not self._slots.is_being_refreshed:
                break
            yield Call("pause", (pause,))
        if self._slots.updated_at >= since:
            return None
        timeout, queue_deadline = self._next_timeout(), self._queue_deadline
        return (yield from refresh(self._slots, timeout, queue_deadline, despite_outage=self._despite_outage))

    def _goes_to_an_unresponsive_node(self) -> bool:
        """Such a node may have a successor. After an attempt at a node that hangs, no time is left to find it."""
        owners = (self._slots.owners.get(slot_of_key(command.key)) for command in self._commands)
        return any(owner in self._slots.unresponsive for owner in owners)

    def _next_timeout(self) -> float:
        return min(self._attempts.step, max(self._timing.last_attempt, self._attempts.deadline - clock()))

    def _batches(self, pending: Sequence[int]) -> list[NodeBatch]:
        batches: dict[Address, NodeBatch] = {}
        self._is_by_next_owner = bool(self._asking)
        for number in pending:
            command = self._commands[number]
            asking = self._asking.pop(number, None)
            node = command.node or asking or self._slots.owners.get(slot := slot_of_key(command.key))
            if node is None:
                self._replies[number] = self._replies[number] or ClusterDownError(f"no primary serves slot {slot}")
                continue
            batch = batches.get(node)
            if batch is None:
                limits = self._next_timeout(), self._queue_deadline, self._despite_outage
                batch = batches[node] = NodeBatch(node, [], [], *limits)
            batch.numbers.append(number)
            batch.commands.extend((ASKING, command) if asking else (command,))
        return list(batches.values())

    def _take(self, batch: NodeBatch, result: NodeResult) -> None:
        if isinstance(result, Reply):
            self._slots.unresponsive.discard(batch.node)
            self._attempts.in_doubt = self._attempts.in_doubt or result.in_doubt
            if not self._is_answered:
                self._is_answered = True
                self._attempts.extend_for_queueing(result.sent_at - result.queued_for, result.sent_at)
            for number, reply in zip(batch.numbers, batch.values(result), strict=True):
                self._replies[number], self._sent_at[number] = reply, result.sent_at
                if isinstance(reply, AskError):
                    self._redirect(number, reply, batch.node)
            return
        self._attempts.in_doubt = self._attempts.in_doubt or isinstance(result, InDoubt)
        failure = _failure_of(batch.node, result)
        if isinstance(failure, ConnectionError) and not isinstance(failure, REFUSED):
            self._slots.unresponsive.add(batch.node)
        for number in batch.numbers:
            self._replies[number] = failure

    def _redirect(self, number: int, reply: AskError, asked: Address) -> None:
        if (node := self._slots.follow(reply, asked)) is None:
            self._is_misled = True
        elif isinstance(reply, MovedError):
            self._slots.moved(reply.slot_id, node)
        else:
            self._asking[number] = node

    def _is_to_repeat(self, number: int) -> bool:
        reply = self._replies[number]
        if isinstance(reply, BreakerOpen):
            return False  # known before, so other nodes were asked for its successor first
        is_open = isinstance(reply, Exception) and is_transient(reply, in_cluster=True)
        return is_open and self._commands[number].node is None

    def _is_map_wrong(self, pending: Sequence[int]) -> bool:
        misled, self._is_misled = self._is_misled, False
        right = AskError | TryAgainError | MaxConnectionsError | NoCredentials
        return misled or any(not isinstance(self._replies[number], right) for number in pending)

    def _answer(self) -> Reply:
        if all(isinstance(reply, ConnectionError | TimeoutError) for reply in self._replies):
            if self._attempts.in_doubt:
                raise InDoubt.because_of(self._replies[0])
            raise self._replies[0]
        reply = Reply(self._replies, min(self._sent_at))
        reply.in_doubt, reply.is_by_next_owner = self._attempts.in_doubt, self._is_by_next_owner
        return reply


def refresh(
    slots: SlotMap, timeout: float, queue_deadline: float = NOT_WAITING, *, despite_outage: bool = False
) -> Steps[Exception | None]:
    """Update the slot map from the first node that answers. Returns an error if none does."""
    slots.refresh_began_at = clock()
    try:
        return (yield from _ask_in_turn(slots, timeout, queue_deadline, despite_outage))
    finally:
        slots.refresh_ended_at = clock()


def _ask_in_turn(
    slots: SlotMap, timeout: float, queue_deadline: float, despite_outage: bool
) -> Steps[Exception | None]:
    deadline, failure = clock() + timeout, None
    for asked, node in enumerate(slots.nodes_to_ask()):
        if asked >= LEAST_ASKED and clock() >= deadline:
            break
        share = _share(timeout, slots.timing)
        batch = NodeBatch(node, [0], [CLUSTER_SLOTS], share, queue_deadline, despite_outage)
        [result] = yield Call("send_batches", ([batch],))
        if isinstance(result, Reply):
            reply = result.values[0]
            slots.unresponsive.discard(node)
        else:
            reply = _failure_of(node, result)
            if not isinstance(result, REFUSED):
                slots.unresponsive.add(node)
        if isinstance(reply, Exception):
            failure = reply
        elif slots.update(reply, node):
            return None
        else:
            failure = ClusterDownError(f"{node} is a member of no Cluster")
    return failure or TimeoutError(f"no node told within {timeout:.1f} s who owns what")


def _share(timeout: float, timing: Timing) -> float:
    """The share of one node in the time for a refresh, in seconds."""
    return min(timing.slots_answer, timeout / LEAST_ASKED)


def _failure_of(node: Address, result: Exception) -> Exception:
    """Errors of connections do not always name the node."""
    cause = result.__cause__ if isinstance(result, InDoubt) else result
    error = cause if isinstance(cause, Exception) else result
    if is_answer(error) or isinstance(error, REFUSED):
        return error
    if isinstance(error, RedisError | OSError):
        is_open = isinstance(error, BreakerOpen)
        named = (BreakerOpen if is_open else ConnectionError)(f"{node}: {error}")
        named.__cause__ = error.__cause__ if is_open else error
        return named
    raise error
