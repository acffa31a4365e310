"""The tree of nodes, and how the names of locks are written there.

    ROOT/locks/00 … ff/KEY~TOKEN-0000000042   a holder or a waiter, ephemeral: the smallest number of a key has the lock
    ROOT/locks/00 … ff/KEY~rest               persistent, while a lock stays taken for its min_hold
    ROOT/runs/KEY~run                         persistent, the last run of an entry of beat

The places of all locks of a shard are in one folder. So nothing is left of a lock that nobody has, and 256 requests
with answers of bounded size list all locks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Self
from urllib.parse import unquote
from zlib import crc32

from ...types import TOKEN_LENGTH

SHARDS = 256
REST, RUN = "~rest", "~run"

# ZooKeeper refuses control characters, surrogates (in Java also those for characters above U+FFFF), the private use
# area, and the end of the Basic Multilingual Plane. The other characters have a meaning in a path or here.
_REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff/%~]")
_PLACE = re.compile(rf"(.+)~([0-9a-f]{{{TOKEN_LENGTH}}})-(-?\d+)", re.DOTALL)
_WRAP = 2**32  # the counter of a node is a signed number of 32 bits, and continues with the smallest one


def encode(key: str) -> str:
    """A text as part of the name of a node. Readable, except for characters that ZooKeeper refuses."""
    return _REFUSED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), key)


def decode(encoded: str) -> str:
    return unquote(encoded, errors="strict")


def shard_of(key: str) -> int:
    return crc32(key.encode()) % SHARDS


class Place(NamedTuple):
    """One place in the line for a lock, read from the name of its node."""

    node: str
    encoded_key: str
    token: str
    number: int

    @classmethod
    def of(cls, node: str) -> Self | None:
        """None for a node that is not a place."""
        if found := _PLACE.fullmatch(node):
            key, token, number = found.groups()
            return cls(node, key, token, int(number))
        return None


def in_order(places: Iterable[Place]) -> list[Place]:
    """Sorted by age, also if the counter of their parent wrapped around while they were there."""
    found = sorted(places, key=lambda place: place.number)
    # Those beyond the largest gap are older, because places of the same time are far less than 2³¹ apart.
    for index in range(1, len(found)):
        if found[index].number - found[index - 1].number > _WRAP // 2:
            return found[index:] + found[:index]
    return found


class Line(NamedTuple):
    """The places in line for one lock; the first one has the lock."""

    places: list[Place]
    rests: bool  # whether there is a rest; it may be over

    @classmethod
    def of(cls, key: str, nodes: Iterable[str]) -> Self:
        """``nodes``: all nodes of its shard."""
        encoded = encode(key)
        start = f"{encoded}~"
        own = [node for node in nodes if node.startswith(start)]
        places = [place for node in own if (place := Place.of(node))]
        return cls(in_order(places), encoded + REST in own)

    @property
    def first(self) -> Place | None:
        return self.places[0] if self.places else None

    def of_token(self, token: str) -> list[Place]:
        """More than one if a request was repeated because its answer was lost."""
        return [place for place in self.places if place.token == token]

    def before(self, place: Place) -> Place:
        """The one right before a place that is not the first."""
        return self.places[self.places.index(place) - 1]


class Tree:
    """The paths of nodes below the root, which is the chroot of ``LOCATION``."""

    def __init__(self, root: str) -> None:
        self.root = root or "/"
        self._locks, self._runs = f"{root}/locks", f"{root}/runs"

    @property
    def shards(self) -> list[str]:
        return [f"{self._locks}/{number:02x}" for number in range(SHARDS)]

    @property
    def runs(self) -> str:
        return self._runs

    def shard(self, key: str) -> str:
        return f"{self._locks}/{shard_of(key):02x}"

    def new_place(self, key: str, token: str) -> str:
        """ZooKeeper adds the number."""
        return f"{self.shard(key)}/{encode(key)}~{token}-"

    def place(self, key: str, node: str) -> str:
        return f"{self.shard(key)}/{node}"

    def rest(self, key: str) -> str:
        return f"{self.shard(key)}/{encode(key)}{REST}"

    def run(self, key: str) -> str:
        return f"{self._runs}/{encode(key)}{RUN}"
