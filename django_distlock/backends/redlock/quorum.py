"""The votes of the nodes, and the fencing number that follows from them.

The algorithm is Redlock as S. Sanfilippo describes it (redis.io, "Distributed Locks with Redis"): a lock is
held by the client that has it on a majority of independent nodes, for the TTL minus what the asking took minus drift.
The fencing number is our addition, because Redlock has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from ...exceptions import LockBackendError
from ...formats import is_newer
from ...types import LockInfo
from ...utils.clock import wall_clock_us
from ..redis.codec import read_lease
from ..redis.errors import is_transient, is_wrong_type
from .messages import Exchange


class AlreadyReleased(ResponseError):
    """The request was released on this node before it arrived there. Another token may have the lock."""


def is_final(failure: Exception) -> bool:
    """Whether the node fails for as long as nobody corrects a setting, a right, or what is on it."""
    return not isinstance(failure, AlreadyReleased) and not is_transient(failure)


class NoMajority(LockBackendError):
    """So many nodes failed that no majority answered."""


def majority_of(nodes: int) -> int:
    return nodes // 2 + 1


class FenceClock:
    """Proposes fencing numbers: the time in microseconds, or one more than the largest number seen.

    What makes the numbers of a name grow strictly. Let m be the majority of the n nodes, and let every node
    keep F, the largest number it knows; F never shrinks. A request carries a proposal p. A node on which the
    lock is free answers a = max(F + 1, p), and sets F to a.

    1. The number of a grant is f, the m-th smallest of the answers (``fence_of``): the largest of that majority
       which answered least.
    2. The lock is granted only once F >= f on m nodes (``is_known``). Where m nodes answered f or more, that is
       so already: always if all n answered, n being odd, and always if m nodes answered exactly p, which is
       the usual case. Otherwise f is told to the nodes that have the lease in a second round; they count when
       they confirm, and they do so only while they hold it for this very token.

    Let f be granted, and f' later, while f is believed no more. By 2, a majority had F >= f when f was granted.
    Among any m of the answers for f' one is from such a node. It was given after the node had stored f: the
    node held the first token then, and had to lose it before it could take the second one. So that answer is
    above f, any m answers have a maximum above f, and by 1 so is f'.

    A node that lost its data has lost its F. It counts again only after the longest TTL (the rule of delayed
    restarts, which Redlock needs anyway). The proposals of others come from clocks that have passed that time
    since, so the numbers grow still, as long as no clock of a client is behind another by more than a TTL.
    """

    def __init__(self) -> None:
        self._last = 0

    # Without a lock: two threads that propose the same are told apart by the nodes.

    def propose(self) -> int:
        self._last = max(self._last + 1, wall_clock_us())
        return self._last

    def observe(self, number: int) -> None:
        self._last = max(self._last, number)


def fence_of(numbers: Sequence[int], majority: int) -> int:
    return sorted(numbers)[min(majority, len(numbers)) - 1]


def is_known(fence: int, numbers: Sequence[int], majority: int) -> bool:
    return sum(number >= fence for number in numbers) >= majority


@dataclass
class Votes:
    """What the nodes answered to a request for a lock. "Taken" and "failed" never count for each other."""

    size: int
    granted: dict[int, int] = field(default_factory=dict)  # node -> number
    taken: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # node -> ms left, lease
    failed: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def of(cls, exchanges: Sequence[Exchange]) -> Votes:
        votes = cls(len(exchanges))
        for node, exchange in enumerate(exchanges):
            if exchange.is_answered:
                votes.count(node, exchange.replies[0])
            elif exchange.failure:
                votes.failed[node] = exchange.failure
        return votes

    def count(self, node: int, reply: Any) -> None:
        match reply:
            case int(number) if number > 0:
                self.granted[node] = number
            case [left, lease]:
                self.taken[node] = left, lease
            case Exception():
                self.failed[node] = reply
            case _:
                self.failed[node] = AlreadyReleased("the request was given back before it was answered")

    @property
    def majority(self) -> int:
        return majority_of(self.size)

    @property
    def is_granted(self) -> bool:
        return len(self.granted) >= self.majority

    @property
    def is_down(self) -> bool:
        return len(self.failed) > self.size - self.majority

    @property
    def is_decided(self) -> bool:
        """Whether the answers still to come cannot change the outcome."""
        pending = self.size - len(self.granted) - len(self.taken) - len(self.failed)
        if pending == 0 or self.is_granted or self.is_down:
            return True
        hopeless = len(self.granted) + pending < self.majority
        return hopeless and len(self.failed) + pending <= self.size - self.majority


def is_decided(exchanges: Sequence[Exchange]) -> bool:
    settled = sum([exchange.is_settled for exchange in exchanges])
    return settled >= majority_of(len(exchanges)) and Votes.of(exchanges).is_decided


@dataclass
class Observation:
    """One lock as the nodes show it: the value of each of them under its name."""

    size: int
    copies: list[LockInfo] = field(default_factory=list)
    free: int = 0
    failed: int = 0
    foreign: bool = False  # a node has something under the name that no lock wrote, or a newer version did
    is_newer: bool = False  # the latter

    def add(self, alias: str, name: str, value: Any, left: Any) -> None:
        if isinstance(value, Exception) or isinstance(left, Exception):
            self.failed += 1
            self.foreign = self.foreign or is_wrong_type(value)
        elif value is None or left == -2:
            self.free += 1
        elif info := read_lease(alias, name, value, left):
            self.copies.append(info)
        else:
            self.failed += 1
            self.foreign = True
            self.is_newer = self.is_newer or is_newer(value)

    def best(self) -> LockInfo | None:
        """The lease with the most copies, once, with their number."""
        if not self.copies:
            return None
        by_token: dict[str, list[LockInfo]] = defaultdict(list)
        for copy in self.copies:
            by_token[copy.token].append(copy)
        copies = max(by_token.values(), key=len)
        majority = majority_of(self.size)
        # Free for others when so many copies ran out that a majority is free.
        needed = majority - self.free
        left = sorted(copy.remaining for copy in copies)
        return copies[0]._replace(
            fence=fence_of([copy.fence for copy in copies], majority),
            remaining=left[max(0, min(needed, len(left)) - 1)],
            resting=any(copy.resting for copy in copies),
            nodes=len(copies),
            failed_nodes=self.failed,
        )

    @property
    def held(self) -> LockInfo | None:
        """The lease that a majority has, or may have where nodes cannot be asked."""
        best = self.best()
        return best if best and (best.nodes or 0) + self.failed >= majority_of(self.size) else None
