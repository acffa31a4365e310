"""The keys of a backend: the kind stands before the name, so that none collide."""

from __future__ import annotations

import re
from binascii import crc32, crc_hqx
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from ...exceptions import InvalidLockBackend
from ...utils.drive import Call, Steps
from ..base import BaseLockBackend
from .replies import Reply
from .scripts import Command, pack


def read_prefix(backend: BaseLockBackend, *, takes_braces: bool = False) -> str:
    """``takes_braces``: the whole prefix may stand in braces, which puts all keys into one slot."""
    if backend.ask_prefix:
        return backend.shared_prefix
    prefix = backend.settings.get("KEY_PREFIX", "lock")
    is_braced = takes_braces and isinstance(prefix, str) and prefix.startswith("{") and prefix.endswith("}")
    within = prefix[1:-1] if is_braced else prefix
    if not isinstance(prefix, str) or not within or set(within) & set("{}|"):
        more = ", or all of it in one pair of braces" if takes_braces else ""
        raise InvalidLockBackend(
            f"{backend.setting('KEY_PREFIX')} is {prefix!r}. It is the text that keys of locks begin with,"
            f" without '{{', '}}' and '|'{more}."
        )
    return prefix


LEASES, OTHERS, QUEUES, RUNS = "", "|l", "|q", "|r"  # kinds of keys that can be listed
MOST_ROUNDS = 5  # a listing asks all nodes so often while slots move
SLOTS = 16384  # of every Cluster


class Keys:
    """The keys of locks. A lock is identified by its name, the ``key`` of its requests."""

    are_in_slots = False  # of a Cluster

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def at(self, prefix: str) -> Keys:
        """The keys under another prefix; "": these keys."""
        return Keys(prefix) if prefix else self

    def of_lock(self, name: str) -> tuple[str, str, str, str, str]:
        """Lease in the first slot, queue, retired tokens, last fencing number, leases in the other slots."""
        return self.lease(name), self.queue(name), f"{self.prefix}|x:{name}", f"{self.prefix}|f", self.others(name)

    def lease(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def others(self, name: str) -> str:
        """The leases in other slots than the first."""
        return f"{self.prefix}{OTHERS}:{name}"

    def queue(self, name: str) -> str:
        return f"{self.prefix}|q:{name}"

    def of_run(self, name: str) -> tuple[str, str]:
        """Stamp of the last run; a key that is there while the stamp is so new that nobody is given the next run."""
        return self.run(name), f"{self.prefix}|n:{name}"

    def run(self, name: str) -> str:
        return f"{self.prefix}|r:{name}"

    @property
    def journal(self) -> str:
        return f"{self.prefix}|j"

    def inbox(self, process: str) -> str:
        """The channel on which a process hears that it was handed a lock."""
        return f"{self.prefix}|in:{process}"

    def locked_by(self, lease: str) -> tuple[str, str]:
        """The prefix (if KEY_PREFIX is a callable, else "") and the name of the lock whose lease has this key."""
        return "", self.name_in(lease)

    def name_in(self, lease: str) -> str:
        return lease.removeprefix(f"{self.prefix}:")

    def grouped(self, names: Sequence[str]) -> list[Sequence[str]]:
        """The names in groups; one command may name the leases of a group."""
        return [names] if names else []

    def grouped_safely(self, names: Sequence[str]) -> list[Sequence[str]]:
        """The same for commands that must not fail while slots move, as one on several keys of a moving slot does."""
        return [[name] for name in names] if self.are_in_slots else self.grouped(names)

    def are_together(self, names: Sequence[str]) -> bool:
        """Whether one script may name the keys of all these locks."""
        return not self.are_in_slots or len({slot_of(self.lease(name)) for name in names}) == 1

    def pattern(self, kinds: Sequence[str], start: str) -> str:
        """For SCAN: keys of these kinds whose names begin so. ``names_in`` leaves out other keys that it finds."""
        return literally(self.prefix) + any_of(kinds) + literally(start) + "*"

    def names_in(self, kind: str, start: str, keys: Iterable[bytes]) -> list[str]:
        prefix = f"{self.prefix}{kind}:".encode()
        beginning, length = prefix + start.encode(), len(prefix)
        return decoded([key[length:] for key in keys if key.startswith(beginning)])


class ClusterKeys(Keys):
    """All keys of a name are in one slot of a Cluster, the slot of its shard, which stands in braces in each key.

    The shard is computed from the name, so processes that disagree about the number of shards exclude nobody.
    """

    are_in_slots = True

    def __init__(self, prefix: str, shards: int) -> None:
        super().__init__(prefix)
        self.shards = shards
        self.agreed = f"{prefix}|s:{{shards}}"  # the key that keeps the number of shards, to compare it

    @property
    def journal(self) -> str:
        return f"{self.prefix}|j:{{shards}}"  # in the slot of ``agreed``

    def at(self, prefix: str) -> ClusterKeys:
        return ClusterKeys(prefix, self.shards) if prefix else self

    def shard_of(self, name: str) -> int:
        return crc32(name.encode()) % self.shards

    def of_lock(self, name: str) -> tuple[str, str, str, str, str]:
        prefix, shard = self.prefix, self.shard_of(name)
        return (
            f"{prefix}:{{{shard}}}:{name}", f"{prefix}|q:{{{shard}}}:{name}",
            f"{prefix}|x:{{{shard}}}:{name}", f"{prefix}|f:{{{shard}}}", f"{prefix}{OTHERS}:{{{shard}}}:{name}",
        )  # fmt: skip

    def lease(self, name: str) -> str:
        return self._of_kind(LEASES, name)

    def others(self, name: str) -> str:
        return self._of_kind(OTHERS, name)

    def queue(self, name: str) -> str:
        return self._of_kind("|q", name)

    def of_run(self, name: str) -> tuple[str, str]:
        return self.run(name), self._of_kind("|n", name)

    def run(self, name: str) -> str:
        return self._of_kind(RUNS, name)

    def _of_kind(self, kind: str, name: str) -> str:
        return f"{self.prefix}{kind}:{{{self.shard_of(name)}}}:{name}"

    def shard_inbox(self, process: str, shard: int) -> str:
        """With sharded pub/sub, channels are in slots as keys are, so a process has an inbox per shard."""
        return f"{self.prefix}|in:{{{shard}}}:{process}"

    def name_in(self, lease: str) -> str:
        return lease.partition("}:")[2]

    def grouped(self, names: Sequence[str]) -> list[Sequence[str]]:
        groups: dict[int, list[str]] = defaultdict(list)
        for name in names:
            groups[self.shard_of(name)].append(name)
        return list(groups.values())

    def pattern(self, kinds: Sequence[str], start: str) -> str:
        return f"{literally(self.prefix)}{any_of(kinds)}{{*}}:{literally(start)}*"

    def names_in(self, kind: str, start: str, keys: Iterable[bytes]) -> list[str]:
        """Without keys that were made with another number of shards."""
        names = [(key, self.name_in(key)) for key in decoded(keys)]
        return [name for key, name in names if name.startswith(start) and key == self._of_kind(kind, name)]

    def slot_of_shard(self, shard: int) -> int:
        return slot_of(f"{{{shard}}}")

    def slots(self) -> Iterable[int]:
        """All slots in which keys of ours can be."""
        return {*map(self.slot_of_shard, range(self.shards)), slot_of(self.agreed)}


class TenantKeys(Keys):
    """For a callable KEY_PREFIX: a lock is identified by a prefix, a colon and its name (``types.lock_key()``).

    A prefix has no colon in it. ``shared``: the keys that belong to no tenant.
    """

    def __init__(self, shared: Keys) -> None:
        super().__init__(shared.prefix)
        self._shared = shared
        self.are_in_slots = shared.are_in_slots

    def of_run(self, name: str) -> tuple[str, str]:
        return self._shared.of_run(name)

    def run(self, name: str) -> str:
        return self._shared.run(name)

    @property
    def journal(self) -> str:
        return self._shared.journal

    def at(self, prefix: str) -> Keys:
        return self._shared.at(prefix)

    def of_lock(self, key: str) -> tuple[str, str, str, str, str]:
        keys, name = self._found(key)
        return keys.of_lock(name)

    def lease(self, key: str) -> str:
        keys, name = self._found(key)
        return keys.lease(name)

    def others(self, key: str) -> str:
        keys, name = self._found(key)
        return keys.others(name)

    def queue(self, key: str) -> str:
        keys, name = self._found(key)
        return keys.queue(name)

    def _found(self, key: str) -> tuple[Keys, str]:
        prefix, _, name = key.partition(":")
        return self.at(prefix), name

    def locked_by(self, lease: str) -> tuple[str, str]:
        prefix = lease.partition(":")[0]
        return prefix, self.at(prefix).name_in(lease)

    def grouped(self, keys: Sequence[str]) -> list[Sequence[str]]:
        groups: list[Sequence[str]] = []
        for prefix, together in groupby(keys, key=lambda key: key.partition(":")[0]):
            names = [key.removeprefix(f"{prefix}:") for key in together]
            groups += [[f"{prefix}:{name}" for name in group] for group in self.at(prefix).grouped(names)]
        return groups


def slot_of(key: str) -> int:
    """CRC16 of the text between the first braces, as the Cluster specification defines it."""
    data = key.encode()
    start = data.find(b"{") + 1
    end = data.find(b"}", start)
    return crc_hqx(data[start:end] if start and end > start else data, 0) % SLOTS


def any_of(kinds: Sequence[str]) -> str:
    """A pattern for the text between the prefix and the name. If there are several kinds, one must be the leases."""
    return "[:|]*" if len(kinds) > 1 else literally(f"{kinds[0]}:")


def literally(text: str) -> str:
    """A pattern that matches only this text."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def decoded(keys: Iterable[bytes]) -> list[str]:
    """Keys as texts, or what is left of them, without those that no lock has."""
    try:
        return [key.decode() for key in keys]
    except UnicodeDecodeError:
        return [text for key in keys if (text := key.decode(errors="replace")).encode() == key]


SCAN_STEP = 1000  # keys the server visits per SCAN: well below a millisecond


class Listing:
    """The names in some kinds of keys that begin with ``start``.

    SCAN may return a key twice if the server has moved it to another table meanwhile, and so does a Cluster if its slot
    has moved to another node. Finding that is left to callers, some of which have all names at hand.
    """

    def __init__(self, keys: Keys, kinds: Sequence[str], start: str) -> None:
        self._keys, self._start = keys, start
        self._kinds, self._pattern = kinds, keys.pattern(kinds, start)
        self._cursor = b"0"
        self._nodes: Sequence[Any] = ()  # still to be asked
        self._known: object = None  # see ``Client.nodes``

    def pages(self, read: Callable[[Reply], Any]) -> Iterator[Steps[dict[str, list[str]]]]:
        """Names by kind. ``read``: gets the answer of a server from a reply."""
        for _ in range(MOST_ROUNDS):
            yield self._next_nodes()
            if not self._nodes:
                return
            for node in self._nodes:
                for command in self.commands(node):
                    yield self._page(command, read)

    def _next_nodes(self) -> Steps[dict[str, list[str]]]:
        self._known, self._nodes = yield Call("nodes", (self._known,))
        return {}

    def _page(self, command: Command, read: Callable[[Reply], Any]) -> Steps[dict[str, list[str]]]:
        return self.names(read((yield Call("send", ([command],)))))

    def commands(self, node: Any) -> Iterator[Command]:
        """Send each one after ``names`` was given the reply to the one before."""
        while True:
            yield Command(pack("SCAN", self._cursor, "MATCH", self._pattern, "COUNT", SCAN_STEP), node=node)
            if self._cursor == b"0":
                return

    def names(self, reply: Sequence[Any]) -> dict[str, list[str]]:
        """By kind."""
        self._cursor, keys = reply
        return {kind: self._keys.names_in(kind, self._start, keys) for kind in self._kinds}
