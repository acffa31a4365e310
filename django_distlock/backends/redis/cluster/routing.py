"""Which node of a Cluster owns which slot, as far as is known."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple, TypeVar

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

from ....utils.clock import clock
from ....utils.text import printable
from ..client import Answer
from ..errors import InDoubt, is_answer, is_transient
from ..keys import slot_of
from ..scripts import Command, pack

NAMELESS = "?"  # a node that is to be told by its hostname, which is not known yet
UNKNOWN_HOSTS = {"", NAMELESS}  # also one that does not know its own address, or must not tell it

Remap = Callable[[tuple[str, int]], tuple[str, int]]


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return printable(f"{self.host}:{self.port}")


class SlotMap:
    """Shared by all connections of a backend. What it says may be out of date: then a node answers MOVED.

    ``owners`` is replaced, never changed, so that its identity tells whether something new was learned.
    """

    def __init__(self, wanted: Iterable[int], seeds: Sequence[Address], remap: Remap | None = None) -> None:
        """``remap``: from the address that a node tells to the one at which it is reached from here."""
        self._remap = remap
        self._wanted = sorted(wanted)
        self._seeds = seeds
        self._nodes: tuple[Address, ...] = ()
        self.silent: set[Address] = set()  # did not answer when last asked: the others are asked before them
        self.owners: Mapping[int, Address] = {}
        self.learned_at = 0.0
        self.asked_at = self.told_at = 0.0  # when somebody last began and ended to ask who owns what

    @property
    def primaries(self) -> list[Address]:
        """Those that own slots in which keys of ours can be."""
        return sorted(set(self.owners.values()))

    @property
    def unowned(self) -> int:
        """How many of the slots in which keys of ours can be have no owner."""
        return len(self._wanted) - len(self.owners)

    @property
    def is_being_told(self) -> bool:
        return self.asked_at > self.told_at

    def moved(self, slot: int, owner: Address) -> None:
        self.owners = {**self.owners, slot: owner}
        if owner not in self._nodes:
            self._nodes += (owner,)

    def to_ask(self) -> list[Address]:
        """Nodes that can tell who owns what: in no order, because one of them may be cut off from the others."""
        known = random.sample(self._nodes, len(self._nodes))
        known += [seed for seed in self._seeds if seed not in self._nodes]
        return sorted(known, key=self.silent.__contains__)

    def learn(self, reply: Sequence[Any], asked: Address) -> bool:
        """From the reply to CLUSTER SLOTS. False if it tells of no slot: that node is in no Cluster."""
        owners: dict[int, Address] = {}
        nodes: dict[Address, None] = {}
        for first, last, *replicated in reply:
            shard = [self._address(_host(node), node[1], asked) for node in replicated]
            nodes |= dict.fromkeys(shard)
            for slot in self._wanted[bisect_left(self._wanted, first) : bisect_right(self._wanted, last)]:
                owners[slot] = shard[0]
        if nodes:
            self._nodes, self.learned_at = tuple(nodes), clock()
            self.silent.intersection_update({*nodes, *self._seeds})  # others have left
            if owners != self.owners:
                self.owners = owners
        return bool(nodes)

    def redirected(self, to: AskError, asked: Address) -> Address | None:
        """Where to a node redirects; None: it cannot tell. CLUSTER SLOTS does."""
        return None if to.host == NAMELESS else self._address(to.host, to.port, asked)

    def _address(self, host: bytes | str | None, port: int, asked: Address) -> Address:
        """As a node told it; a host that is not told is the one that was asked."""
        name = host.decode() if isinstance(host, bytes) else host or ""
        address = Address(asked.host if name in UNKNOWN_HOSTS else name, port)
        return Address(*self._remap((address.host, address.port))) if self._remap else address

    def knows(self, address: Address) -> bool:
        return address in self._nodes or address in self._seeds


def _host(node: Sequence[Any]) -> bytes | None:
    """Of one whose hostname is preferred and not known yet, its metadata has the IP address."""
    told = node[3] if len(node) > 3 else ()
    about = told if isinstance(told, Mapping) else dict(zip(told[::2], told[1::2], strict=False))
    host: bytes | None = about.get(b"ip") if node[0] == NAMELESS.encode() and b"ip" in about else node[0]
    return host


ASKING = Command(pack("ASKING"))
CLUSTER_SLOTS = Command(pack("CLUSTER", "SLOTS"))

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.2  # seconds between attempts while a slot is between two nodes
LAST_TRY = 0.25  # seconds that an attempt has even when the time is nearly over
TO_TELL = 0.5  # seconds that a node has to tell who owns what
LEAST_ASKED = 3  # nodes that are asked, even if the time goes by with the first, which hang
FRESH = 0.2  # seconds for which who tries again takes what others have learned

REFUSED = (AuthenticationError, MaxConnectionsError)  # errors of connections that tell nothing of the node

Outcome = Answer | Exception


class NodeBatch(NamedTuple):
    """What goes to one node at once, ``numbers`` telling which of the commands; within so many seconds.

    ``queues_until``: see ``Call``.
    """

    to: Address
    numbers: list[int]
    commands: list[Command]
    within: float
    queues_until: float = 0.0

    def replies(self, answer: Answer) -> list[Any]:
        """Without those to ASKING."""
        pairs = zip(self.commands, answer.replies, strict=True)
        return [reply for command, reply in pairs if command is not ASKING]


class Pause(NamedTuple):
    seconds: float


Result = TypeVar("Result")
Steps = Generator[list[NodeBatch] | Pause, list[Outcome], Result]  # a pause is answered by nothing: []

slot_of_key = lru_cache(maxsize=1024)(slot_of)


class RoutedRequest:
    """Commands on their way, until each is answered or the time is over.

    A node that redirects a command did not execute it. One that did not answer may have: that is told, as a
    ``Client`` does, by InDoubt or by ``repeated``. Where several nodes were asked and only some of them failed,
    their errors stand among the replies.
    """

    def __init__(
        self, commands: Sequence[Command], slots: SlotMap, patience: float, time: float, queues_until: float = 0.0
    ) -> None:
        """``patience``: seconds for one attempt; ``time``: seconds after which none begins any more.

        For a connection to a node that answers others it waits until ``queues_until``, and that time does not count.
        """
        self._commands = commands
        self._slots = slots
        self._patience = patience
        self._time_for_all, self._queues_until = time, queues_until
        self._give_up = clock() + time
        self._is_answered = False
        self._is_misled = False  # redirected, but not told where to
        self._replies: list[Any] = [None] * len(commands)
        self._sent_at = [0.0] * len(commands)
        self._ask: dict[int, Address] = {}  # where the next attempt of a command goes with ASKING
        self._repeated = False

    def steps(self) -> Steps[Answer]:
        left, rounds = list(range(len(self._commands))), 0
        if self._slots.silent and self._goes_to_a_silent_node():
            yield from self._learn(clock() - FRESH)
        while True:
            began, known = clock(), self._slots.owners
            if trips := self._trips(left):
                for trip, outcome in zip(trips, (yield trips), strict=True):
                    self._take(trip, outcome)
            rounds += 1
            left = [number for number in left if self._is_to_repeat(number)]
            if not left or clock() >= self._give_up:
                return self._answer()
            if self._is_map_wrong(left):
                failure = yield from self._learn(began if rounds == 1 else min(began, clock() - FRESH))
                if failure and not known:
                    self._replies = [failure] * len(self._commands)
                if failure and not (is_transient(failure, in_cluster=True) and clock() < self._give_up):
                    return self._answer()
            if rounds > 1 or (self._slots.owners is known and not self._ask):
                longest = min(LONGEST_PAUSE, max(0.0, self._give_up - clock()))
                yield Pause(min(longest, FIRST_PAUSE * 2 ** min(rounds, 4)))

    def _learn(self, since: float) -> Steps[Exception | None]:
        """Who owns what, unless that was learned since then. One asks, and many who wait for the same are told."""
        for _ in range(ceil(_share(self._time()) / FIRST_PAUSE)):  # by a clock, a busy event loop would tell nobody
            if not self._slots.is_being_told:
                break
            yield Pause(FIRST_PAUSE)
        if self._slots.learned_at >= since:
            return None
        return (yield from refresh(self._slots, self._time(), self._queues_until))

    def _goes_to_a_silent_node(self) -> bool:
        """It may have a successor. Who fails because a node hangs has no time left to learn of it."""
        owners = (self._slots.owners.get(slot_of_key(command.key)) for command in self._commands)
        return any(owner in self._slots.silent for owner in owners)

    def _time(self) -> float:
        return min(self._patience, max(LAST_TRY, self._give_up - clock()))

    def _trips(self, left: Sequence[int]) -> list[NodeBatch]:
        trips: dict[Address, NodeBatch] = {}
        for number in left:
            command = self._commands[number]
            ask = self._ask.pop(number, None)
            to = command.at or ask or self._slots.owners.get(slot := slot_of_key(command.key))
            if to is None:
                self._replies[number] = self._replies[number] or ClusterDownError(f"no primary serves slot {slot}")
                continue
            trip = trips.get(to)
            if trip is None:
                trip = trips[to] = NodeBatch(to, [], [], self._time(), self._queues_until)
            trip.numbers.append(number)
            trip.commands.extend((ASKING, command) if ask else (command,))
        return list(trips.values())

    def _take(self, trip: NodeBatch, outcome: Outcome) -> None:
        if isinstance(outcome, Answer):
            self._slots.silent.discard(trip.to)
            self._repeated = self._repeated or outcome.repeated
            if not self._is_answered:
                self._is_answered = True
                self._give_up = max(self._give_up, outcome.sent_at + self._time_for_all)
            for number, reply in zip(trip.numbers, trip.replies(outcome), strict=True):
                self._replies[number], self._sent_at[number] = reply, outcome.sent_at
                if isinstance(reply, AskError):
                    self._redirect(number, reply, trip.to)
            return
        self._repeated = self._repeated or isinstance(outcome, InDoubt)
        failure = _of_node(trip.to, outcome)
        if isinstance(failure, ConnectionError) and not isinstance(failure, REFUSED):
            self._slots.silent.add(trip.to)
        for number in trip.numbers:
            self._replies[number] = failure

    def _redirect(self, number: int, reply: AskError, asked: Address) -> None:
        if (to := self._slots.redirected(reply, asked)) is None:
            self._is_misled = True
        elif isinstance(reply, MovedError):
            self._slots.moved(reply.slot_id, to)
        else:
            self._ask[number] = to

    def _is_to_repeat(self, number: int) -> bool:
        reply = self._replies[number]
        is_open = isinstance(reply, Exception) and is_transient(reply, in_cluster=True)
        return is_open and self._commands[number].at is None

    def _is_map_wrong(self, left: Sequence[int]) -> bool:
        misled, self._is_misled = self._is_misled, False
        right = AskError | TryAgainError | MaxConnectionsError
        return misled or any(not isinstance(self._replies[number], right) for number in left)

    def _answer(self) -> Answer:
        if all(isinstance(reply, ConnectionError | TimeoutError) for reply in self._replies):
            if self._repeated:
                raise InDoubt(self._replies[0]) from self._replies[0]
            raise self._replies[0]
        return Answer(self._replies, min(self._sent_at), self._repeated)


def refresh(slots: SlotMap, within: float, queues_until: float = 0.0) -> Steps[Exception | None]:
    """Learn the owners of slots anew, from the first node that tells. Returns an error if none does."""
    slots.asked_at = clock()
    try:
        return (yield from _ask_in_turn(slots, within, queues_until))
    finally:
        slots.told_at = clock()


def _ask_in_turn(slots: SlotMap, within: float, queues_until: float) -> Steps[Exception | None]:
    give_up, failure = clock() + within, None
    for asked, address in enumerate(slots.to_ask()):
        if asked >= LEAST_ASKED and clock() >= give_up:
            break
        [outcome] = yield [NodeBatch(address, [0], [CLUSTER_SLOTS], _share(within), queues_until)]
        if isinstance(outcome, Answer):
            reply = outcome.replies[0]
            slots.silent.discard(address)
        else:
            reply = _of_node(address, outcome)
            if not isinstance(outcome, REFUSED):
                slots.silent.add(address)
        if isinstance(reply, Exception):
            failure = reply
        elif slots.learn(reply, address):
            return None
        else:
            failure = ClusterDownError(f"{address} is a member of no Cluster")
    return failure or TimeoutError(f"no node told within {within:.1f} s who owns what")


def _share(within: float) -> float:
    """Of the time to learn who owns what: for one node."""
    return min(TO_TELL, within / LEAST_ASKED)


def _of_node(address: Address, outcome: Exception) -> Exception:
    """Errors of connections do not always tell of which."""
    error = outcome.cause if isinstance(outcome, InDoubt) else outcome
    if is_answer(error) or isinstance(error, REFUSED):
        return error
    if isinstance(error, RedisError | OSError):
        named = ConnectionError(f"{address}: {error}")
        named.__cause__ = error
        return named
    raise error
