"""Which node of a Cluster owns which slot, as far as is known."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import AskError

from ....utils.clock import clock
from ....utils.text import printable

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
