"""Which locks are held now in all backends, for one page or command, even if some backends are down."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice, repeat
from operator import attrgetter
from typing import NamedTuple, TypeVar, overload
from urllib.parse import quote, unquote

from django.core.exceptions import ImproperlyConfigured

from ..backends.base import BaseLockBackend
from ..celery.schedule_store import RunInfo, recorded_runs
from ..core.registry import SETTING, locks
from ..exceptions import LockBackendError
from ..names import OWN
from ..types import Holder, LockInfo, Outage, Slot
from ..utils.clock import clock, wall_clock
from ..utils.parallel import ask_in_parallel

logger = logging.getLogger("django_distlock")

BATCH_SIZE = 500  # locks that are asked for in one round trip
MOST_HOLDERS = 5000  # the most leases for which a page asks who holds each

R = TypeVar("R")


class Key(NamedTuple):
    """A lock, or an entry of beat: the alias of its backend, and its name."""

    using: str
    name: str

    def __str__(self) -> str:
        """Returns a text for URLs and forms, because these change line breaks and refuse other control characters."""
        name = re.sub(r"[\x00-\x1f\x7f%]", lambda found: f"%{ord(found[0]):02X}", self.name)
        return f"{quote(self.using, safe='')}/{name}"


class SlotKey(NamedTuple):
    """The place of a lease: the alias of its backend, the name of its lock, and the number of its slot."""

    using: str
    name: str
    slot: int = 1

    @property
    def lock(self) -> Key:
        return Key(self.using, self.name)


new_key: Callable[[tuple[str, str, int]], SlotKey] = partial(tuple.__new__, SlotKey)  # in a third of the time


class SlotList:
    """Slots by name and number. As there may be a million, the number 1, which most of them have, is not stored.

    ``names``: the names of their locks, in order, each as often as it has slots here.
    """

    def __init__(self, names: Sequence[str] = (), numbers: Mapping[str, Sequence[int]] | None = None) -> None:
        self.names: list[str] = list(names)
        self._numbers = dict(numbers or {})  # only for locks that do not have just the first slot

    def extend(self, slots: Iterable[Slot]) -> None:
        """Add slots in any order. They must be sorted afterwards."""
        for name, number in slots:
            self.names.append(name)
            if number > 1:
                self._numbers[name] = [*self._numbers.get(name, ()), number]

    def sort(self) -> None:
        self.names.sort()
        for name, numbers in self._numbers.items():
            has_first = self._count(name) > len(numbers)
            self._numbers[name] = [1, *sorted(numbers)] if has_first else sorted(numbers)

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self) -> Iterator[int]:
        """Yields a slot number for each of the names."""
        if not self._numbers:
            return repeat(1, len(self.names))
        return chain.from_iterable(self._numbers.get(name, (1,)) for name, _ in groupby(self.names))

    def number(self, index: int) -> int:
        name = self.names[index]
        numbers = self._numbers.get(name)
        return numbers[index - bisect_left(self.names, name)] if numbers else 1

    def only(self, prefix: str) -> SlotList:
        """Returns the slots of the locks whose names begin with ``prefix``."""
        return SlotList(self.names[_beginning(prefix, self.names)], self._numbers)

    def without(self, prefix: str) -> SlotList:
        others = self.names.copy()
        del others[_beginning(prefix, others)]
        return SlotList(others, self._numbers)

    def _count(self, name: str) -> int:
        return bisect_right(self.names, name) - bisect_left(self.names, name)


class KeyList(Sequence[SlotKey]):
    """Keys by name and slot. Each is made when it is used: to make a million takes longer than the rest of a page."""

    def __init__(self, slots: Mapping[str, SlotList]) -> None:
        """``slots``: the slots by alias."""
        self._slots = {alias: slots[alias] for alias in sorted(slots) if len(slots[alias])}

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def __iter__(self) -> Iterator[SlotKey]:
        of_each = [
            map(new_key, zip(repeat(alias), slots.names, slots.numbers(), strict=False))
            for alias, slots in self._slots.items()
        ]
        return of_each[0] if len(of_each) == 1 else merge(*of_each, key=attrgetter("name"))

    @overload
    def __getitem__(self, index: int) -> SlotKey: ...

    @overload
    def __getitem__(self, index: slice) -> list[SlotKey]: ...

    def __getitem__(self, index: int | slice) -> SlotKey | list[SlotKey]:
        if isinstance(index, int):
            return self[index : index + 1 or None][0]
        if len(self._slots) == 1:
            [(alias, slots)] = self._slots.items()
            return [new_key((alias, slots.names[at], slots.number(at))) for at in range(*index.indices(len(slots)))]
        return list(islice(self, *index.indices(len(self))))

    def names(self) -> Iterator[str]:
        """Yields the names of the locks, alias by alias."""
        return chain.from_iterable(slots.names for slots in self._slots.values())

    def only(self, using: str | None, prefix: str) -> KeyList:
        """Returns the keys of the locks whose names begin with ``prefix``. ``using``: an alias; None: all aliases."""
        return KeyList({alias: slots.only(prefix) for alias, slots in self._slots.items() if using in (None, alias)})


def _beginning(prefix: str, names: Sequence[str]) -> slice:
    """Returns the slice of the sorted names that begin with ``prefix``."""
    begin = bisect_left(names, prefix)
    return slice(begin, bisect_left(names, True, begin, key=lambda name: not name.startswith(prefix)))


K = TypeVar("K", Key, SlotKey)


class LeaseKey(NamedTuple):
    """A lease of a lock, by the digest of its token."""

    lock: Key
    digest: str

    def __str__(self) -> str:
        return f"{self.lock}@{self.digest}"

    @classmethod
    def read(cls, text: str) -> LeaseKey | None:
        """Returns the key of a text; None if the text names no lease."""
        if found := re.fullmatch(r"(?P<using>[^/]*)/(?P<name>.+)@(?P<digest>[0-9a-f]{16})", text, re.DOTALL):
            return cls(Key(unquote(found["using"]), unquote(found["name"])), found["digest"])
        return None


class SeenLock(NamedTuple):
    """A lease as a backend showed it at a moment on ``clock()``."""

    info: LockInfo
    seen_at: float

    @property
    def free_at(self) -> float:
        return self.seen_at + self.info.remaining

    @property
    def remaining(self) -> float:
        return max(0.0, self.free_at - clock())

    @property
    def key(self) -> SlotKey:
        return SlotKey(self.info.using, self.info.name, self.info.slot)

    @property
    def lease(self) -> LeaseKey:
        return LeaseKey(self.key.lock, self.info.digest)


class Inventory:
    """A snapshot of the locks and runs of all backends. Asks a backend each question once, and nothing after an error.

    ``aliases``: the aliases of the backends; default: all in the setting. ``prefix``: the beginning of the names.
    ``errors``: by alias, why all or some of its locks or runs are missing. ``misconfigured``: the aliases in ``errors``
    whose settings are wrong.
    """

    def __init__(self, aliases: Iterable[str] | None = None, prefix: str = "") -> None:
        self.errors: dict[str, str] = {}
        self.misconfigured: set[str] = set()
        self.prefix = prefix
        try:
            self.aliases = list(locks if aliases is None else aliases)
        except ImproperlyConfigured as error:
            self.aliases = []
            self._fail(SETTING, error)
        self._keys: KeyList | None = None
        self._seen: dict[Key, list[SeenLock]] = {}
        self._holders: dict[SlotKey, Holder | None] | None = None
        self._waiting: dict[Key, int | None] = {}
        self._runs: dict[Key, RunInfo] | None = None
        self._pinned: dict[str, BaseLockBackend] = {}

    @property
    def has_quorums(self) -> bool:
        """Whether any backend keeps its locks on several nodes."""
        return any(self._ask(alias, lambda backend: backend.node_count) for alias in self.aliases)

    @property
    def local_aliases(self) -> list[str]:
        """Returns the aliases whose locks are in the memory of each process, where a process shows only its own."""

        def is_local(backend: BaseLockBackend) -> bool:
            return backend.supports_exclusion and not backend.supports_processes

        return [alias for alias in self.aliases if self._ask(alias, is_local)]

    def outages(self) -> dict[str, Sequence[Outage]]:
        """Returns, by alias, the servers that this process does not ask. Leaves out backends with wrong settings."""
        usable = [alias for alias in self.aliases if alias not in self.misconfigured]
        return {alias: found for alias in usable if (found := locks[alias].outages())}

    def keys(self) -> KeyList:
        """Returns the keys of all leases, by name, without the package's own locks unless the prefix asks for them."""
        if self._keys is None:
            self._keys = KeyList(self._slots())
        return self._keys

    def _slots(self) -> dict[str, SlotList]:
        """Returns the slots by alias."""
        slots = {alias: SlotList() for alias in self.aliases}  # an alias keeps the slots that came before an error
        self._pin(slots)
        self.ask_each(
            {alias: lambda backend: slots[backend.alias].extend(backend.slots(self.prefix)) for alias in slots}
        )
        for found in slots.values():
            found.sort()
        if self.prefix.startswith(OWN):
            return slots
        return {alias: found.without(OWN) for alias, found in slots.items()}

    def holders(self) -> dict[SlotKey, Holder | None] | None:
        """Returns the holders of all leases; None if there are more than MOST_HOLDERS leases."""
        if self._holders is None and len(self.keys()) <= MOST_HOLDERS:
            self._holders = self.map_holders(self.keys(), lambda key, holder: holder)
        return self._holders

    def leases(self, locks: Iterable[Key]) -> list[SeenLock]:
        """Returns the leases of these locks, lock by lock. Keeps them: a page needs the same locks several times."""
        wanted = list(dict.fromkeys(locks))
        new = [lock for lock in wanted if lock not in self._seen]
        self._seen |= {lock: [] for lock in new} | self._look_once(new)
        return [seen for lock in wanted for seen in self._seen[lock]]

    def look(self, keys: Iterable[SlotKey]) -> dict[SlotKey, SeenLock]:
        """Returns the leases that still exist, in the order of ``keys``. It keeps them, like ``leases()``."""
        keys = list(keys)
        return _in_order(keys, self.leases(key.lock for key in keys))

    def look_once(self, keys: Iterable[SlotKey]) -> dict[SlotKey, SeenLock]:
        """The same as ``look()``, but keeps nothing."""
        keys = list(keys)
        found = self._look_once(dict.fromkeys(key.lock for key in keys))
        return _in_order(keys, chain.from_iterable(found.values()))

    def _look_once(self, locks: Iterable[Key]) -> dict[Key, list[SeenLock]]:
        found: dict[Key, list[SeenLock]] = {}

        def ask(backend: BaseLockBackend, locks: Sequence[Key]) -> None:
            at = clock()
            infos = backend.look([lock.name for lock in locks])
            found.update(
                {lock: [SeenLock(info, at) for info in leases] for lock, leases in zip(locks, infos, strict=True)}
            )

        self._ask_in_batches(locks, ask)
        return found

    def map_holders(self, keys: Iterable[SlotKey], function: Callable[[SlotKey, Holder | None], R]) -> dict[SlotKey, R]:
        """Returns the result of the function for each lease. Does not keep holders; only ``holders()`` does."""
        keys, known = list(keys), self._holders or {}
        results = {key: function(key, known[key]) for key in keys if key in known}

        def ask(backend: BaseLockBackend, keys: Sequence[SlotKey]) -> None:
            holders = backend.holders([Slot(key.name, key.slot) for key in keys])
            results.update(zip(keys, map(function, keys, holders), strict=True))

        self._ask_in_batches([key for key in keys if key not in known], ask)
        return results

    def free_at(self, keys: Iterable[SlotKey]) -> dict[SlotKey, float]:
        """Returns when each lease expires, on ``clock()``, without leases that are over by now."""
        found: dict[SlotKey, float] = {}

        def ask(backend: BaseLockBackend, keys: Sequence[SlotKey]) -> None:
            at = clock()
            remaining = backend.remaining([Slot(key.name, key.slot) for key in keys])
            found.update({key: at + rest for key, rest in zip(keys, remaining, strict=True) if rest is not None})

        self._ask_in_batches(keys, ask)
        return found

    def count_waiters(self, keys: Iterable[SlotKey]) -> dict[Key, int | None]:
        """Returns how many callers wait for each of the locks; None if that is unknown. Keeps the counts."""
        wanted = list(dict.fromkeys(key.lock for key in keys))
        counted = self._waiting

        def ask(backend: BaseLockBackend, keys: Sequence[Key]) -> None:
            in_store = backend.count_waiters([key.name for key in keys])
            for key, count in zip(keys, in_store, strict=True):
                counted[key] = count
                if count is not None and not backend.supports_processes:
                    # Only the leader has a place in the store; the other waiters are in the local queue.
                    [lock] = backend.keyed([key.name])[1]
                    counted[key] = max(count, locks.service(backend.alias).queue.length(lock))

        self._ask_in_batches([key for key in wanted if key not in counted], ask)
        return {key: counted.get(key) for key in wanted}

    def _ask_in_batches(self, keys: Iterable[K], ask: Callable[[BaseLockBackend, Sequence[K]], None]) -> None:
        """Ask each backend for its own keys."""
        by_alias: dict[str, list[K]] = {alias: [] for alias in self.aliases}
        for key in keys:
            if key.using in by_alias:
                by_alias[key.using].append(key)

        def ask_all(backend: BaseLockBackend) -> None:
            own = by_alias[backend.alias]
            for start in range(0, len(own), BATCH_SIZE):
                ask(backend, own[start : start + BATCH_SIZE])

        self._pin(alias for alias, keys in by_alias.items() if keys)
        self.ask_each({alias: ask_all for alias, keys in by_alias.items() if keys})

    def _pin(self, aliases: Iterable[str]) -> None:
        """Call KEY_PREFIX once for the whole snapshot, in this thread and not in the threads that ask the stores."""
        for alias in aliases:
            if alias not in self._pinned and (pinned := self._ask(alias, BaseLockBackend.pinned)):
                self._pinned[alias] = pinned

    def runs(self) -> dict[Key, RunInfo]:
        """Returns the entries of beat, by name. ``prefix`` is only for locks, and is ignored here."""
        if self._runs is None:
            found: list[RunInfo] = []
            self.ask_each(dict.fromkeys(self.aliases, lambda backend: found.extend(recorded_runs(backend.alias))))
            self._runs = {
                Key(run.using, run.entry): run for run in sorted(found, key=lambda run: (run.entry, run.using))
            }
        return self._runs

    def ask_each(self, questions: Mapping[str, Callable[[BaseLockBackend], R]]) -> dict[str, R | None]:
        """Ask each alias its question, all at the same time. None for an alias that fails or failed: see ``errors``."""
        calls = {alias: partial(self._ask, alias, questions[alias]) for alias in questions if alias not in self.errors}
        return {**dict.fromkeys(questions), **ask_in_parallel(calls)}

    def ask_pinned(self, question: Callable[[BaseLockBackend], R]) -> dict[str, R | None]:
        """Ask all aliases a question that depends on KEY_PREFIX."""
        self._pin(self.aliases)
        return self.ask_each(dict.fromkeys(self.aliases, question))

    def _ask(self, alias: str, question: Callable[[BaseLockBackend], R]) -> R | None:
        try:
            return question(self._pinned.get(alias) or locks[alias])
        except (LockBackendError, ImproperlyConfigured) as error:
            self._fail(alias, error)
            return None

    def _fail(self, alias: str, error: Exception) -> None:
        self.errors[alias] = str(error)
        if isinstance(error, ImproperlyConfigured):
            self.misconfigured.add(alias)


def _in_order(keys: Sequence[SlotKey], found: Iterable[SeenLock]) -> dict[SlotKey, SeenLock]:
    known = {seen.key: seen for seen in found}
    return {key: known[key] for key in keys if key in known}


def held_for(info: LockInfo) -> float | None:
    """Returns the seconds since the grant, by the clocks of this host and the holder's host."""
    return max(0.0, wall_clock() - info.holder.since) if info.holder else None


def long_held(info: LockInfo) -> float | None:
    """Returns the LONG_HELD of the alias if the lock is held for longer than that, else None."""
    bound = locks[info.using].long_held
    return bound if bound is not None and not info.resting and (held_for(info) or 0.0) > bound else None


def holding_nodes(info: LockInfo) -> str:
    """Returns, for people, on how many nodes of its quorum the lock is; "" if the store is not a quorum."""
    return "" if info.nodes is None else f"{info.nodes} / {locks[info.using].node_count}"
