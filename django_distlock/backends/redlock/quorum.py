"""The votes of the nodes, and the fencing number that follows from them.

The algorithm is Redlock as S. Sanfilippo describes it (redis.io, "Distributed Locks with Redis"): a lock is
held by the client that has it on a majority of independent nodes, for the TTL minus the time of asking minus drift.
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
    """Whether the node fails until somebody corrects a setting, a right, or its data."""
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

    1. The number of a grant is f, the m-th smallest of the answers (``fence_of``): the largest number of the
       majority with the smallest answers.
    2. The lock is granted only if F >= f on m nodes (``is_known``). If m nodes answered f or more, this is true
       already: always if all n answered and n is odd, and always if m nodes answered exactly p, which is the usual
       case. Otherwise a second round sends f to the nodes that have the lease. A node counts when it confirms, and it
       does so only while it holds the lease for this token.

    Let f be granted, and f' later, when nobody believes in f any more. By 2, a majority had F >= f when f was granted.
    Any m of the answers for f' include one from such a node. The node gave it after it had stored f: at that time it
    held the first token, and it had to lose that before it could take the second one. So this answer is above f, the
    maximum of any m answers is above f, and by 1 so is f'.

    A node that lost its data has lost its F. It counts again only after the longest TTL (the rule of delayed
    restarts, which Redlock needs anyway). The proposals of other clients come from clocks that have passed that time
    since. So the numbers still grow, as long as no clock of a client is behind another by more than a TTL.
    """

    def __init__(self) -> None:
        self._last = 0

    # Without a guard: if two threads propose the same number, the nodes tell them apart.

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
    """The answers of the nodes to a request for a lock. "Taken" and "failed" never count for each other."""

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
    """One lock as the nodes show it: the value of each node under its name."""

    size: int
    copies: list[LockInfo] = field(default_factory=list)
    free: int = 0
    failed: int = 0
    foreign: bool = False  # a node has a value under the name that no lock, or a newer version, wrote
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
        # It is free for others when so many copies have ended that a majority is free.
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
        """The lease that a majority has, or may have if nodes cannot be asked."""
        best = self.best()
        return best if best and (best.nodes or 0) + self.failed >= majority_of(self.size) else None
