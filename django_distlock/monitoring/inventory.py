"""Which locks are held now in all backends, for one page or command, even if some backends are down."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice, repeat
from operator import attrgetter, eq, itemgetter
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
        return new_lock((self.using, self.name))


new_lock: Callable[[tuple[str, str]], Key] = partial(tuple.__new__, Key)  # in a third of Key()'s time
new_key: Callable[[tuple[str, str, int]], SlotKey] = partial(tuple.__new__, SlotKey)


class SlotList:
    """Slots by name and number. As there may be a million, the number 1, which most of them have, is not stored.

    ``names``: the names of their locks, in order, each as often as it has slots here.
    """

    def __init__(self, names: list[str] | None = None, numbers: Mapping[str, Sequence[int]] | None = None) -> None:
        self.names = names or []
        self._numbers = dict(numbers or {})  # only for locks that do not have just the first slot

    def extend(self, slots: Iterable[Slot]) -> None:
        """Add slots in any order, one of them perhaps twice. They must be sorted afterwards, once."""
        for number, together in groupby(slots, key=itemgetter(1)):
            if number == 1:  # without a step of Python for each
                self.names.extend(map(itemgetter(0), together))
            else:
                for name, _ in together:
                    self._numbers[name] = [*self._numbers.get(name, ()), number]

    def sort(self) -> None:
        self.names.sort()
        if any(map(eq, self.names, islice(self.names, 1, None))):  # hardly ever
            self.names = list(map(itemgetter(0), groupby(self.names)))
        more: list[str] = []
        for name, numbers in self._numbers.items():
            has_first = name in self.names[(at := bisect_left(self.names, name)) : at + 1]
            self._numbers[name] = sorted({*numbers, 1} if has_first else {*numbers})
            more += repeat(name, len(self._numbers[name]) - has_first)
        if more:
            self.names = sorted(self.names + more)

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
        return SlotList(self.names[_beginning(prefix, self.names)], self._numbers) if prefix else self

    def remove(self, prefix: str) -> None:
        """Take out the slots of the locks whose names begin with ``prefix``."""
        del self.names[_beginning(prefix, self.names)]


class KeyList(Sequence[SlotKey]):
    """Keys by name and slot. Each is made when it is used: to make a million takes longer than the rest of a page."""

    def __init__(self, slots: Mapping[str, SlotList]) -> None:
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

    def locks(self) -> Iterator[Key]:
        """Yields the locks of the keys, each once."""
        return map(itemgetter(0), groupby(map(new_lock, map(itemgetter(0, 1), self))))

    def count_by_prefix(self) -> Counter[str]:
        """Returns how many keys there are by ``prefix_of()`` their names."""
        counted: Counter[str] = Counter()
        for slots in self._slots.values():
            begin, names = 0, slots.names
            while begin < len(names):
                prefix = prefix_of(names[begin])
                end = _end(prefix, names, begin) if prefix else begin + 1
                counted[prefix] += end - begin
                begin = end
        return counted

    def only(self, using: str | None, prefix: str) -> KeyList:
        """Returns the keys of the locks whose names begin with ``prefix``. ``using``: an alias; None: all aliases."""
        return KeyList({alias: slots.only(prefix) for alias, slots in self._slots.items() if using in (None, alias)})


def prefix_of(name: str) -> str:
    """Returns the part of the name up to its first colon; "" if it has none."""
    return name[: name.find(":") + 1]


def _beginning(prefix: str, names: Sequence[str]) -> slice:
    """Returns the slice of the sorted names that begin with ``prefix``."""
    begin = bisect_left(names, prefix)
    return slice(begin, _end(prefix, names, begin))


def _end(prefix: str, names: Sequence[str], begin: int) -> int:
    """Returns the end of the slice that starts at ``begin``. It is quick for a short one, and for a long one."""
    step = 1
    while begin + step < len(names) and names[begin + step].startswith(prefix):
        step *= 2
    return bisect_left(names, True, begin, min(begin + step, len(names)), key=lambda name: not name.startswith(prefix))


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
        return new_key((self.info.using, self.info.name, self.info.slot))

    @property
    def lock(self) -> Key:
        return new_lock((self.info.using, self.info.name))

    @property
    def lease(self) -> LeaseKey:
        return LeaseKey(self.lock, self.info.digest)


new_seen: Callable[[tuple[LockInfo, float]], SeenLock] = partial(tuple.__new__, SeenLock)


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
        self.ask_each(dict.fromkeys(slots, lambda backend: slots[backend.alias].extend(backend.slots(self.prefix))))
        for found in slots.values():
            found.sort()
            if not self.prefix.startswith(OWN):
                found.remove(OWN)
        return slots

    def holders(self) -> dict[SlotKey, Holder | None] | None:
        """Returns the holders of all leases; None if there are more than MOST_HOLDERS leases."""
        if self._holders is None and len(self.keys()) <= MOST_HOLDERS:
            self._holders = self.map_holders(self.keys(), lambda key, holder: holder)
        return self._holders

    def leases(self, locks: Iterable[Key]) -> list[SeenLock]:
        """Returns the leases of these locks, lock by lock. Keeps them: a page needs the same locks several times."""
        wanted = list(dict.fromkeys(locks))
        self._seen |= self.leases_once(lock for lock in wanted if lock not in self._seen)
        return [seen for lock in wanted for seen in self._seen[lock]]

    def leases_once(self, locks: Iterable[Key]) -> dict[Key, list[SeenLock]]:
        """Returns the leases of each lock. Keeps nothing."""
        found: dict[Key, list[SeenLock]] = {lock: [] for lock in locks}

        def ask(backend: BaseLockBackend, locks: Sequence[Key]) -> None:
            at = clock()
            infos = backend.look([lock.name for lock in locks])
            found.update(zip(locks, ([new_seen((info, at)) for info in leases] for leases in infos), strict=True))

        self._ask_in_batches(found, ask)
        return found

    def look(self, keys: Iterable[SlotKey]) -> dict[SlotKey, SeenLock]:
        """Returns the leases that still exist, in the order of ``keys``. It keeps them, like ``leases()``."""
        keys = list(keys)
        return _in_order(keys, self.leases(key.lock for key in keys))

    def look_once(self, keys: Iterable[SlotKey]) -> dict[SlotKey, SeenLock]:
        """The same as ``look()``, but keeps nothing."""
        keys = list(keys)
        found = self.leases_once(key.lock for key in keys)
        return _in_order(keys, chain.from_iterable(found.values()))

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

    def count_waiters(self, locks: Iterable[Key]) -> dict[Key, int | None]:
        """Returns how many callers wait for each of the locks; None if that is unknown. Keeps the counts."""
        wanted = list(dict.fromkeys(locks))
        self._waiting |= self.count_waiters_once(lock for lock in wanted if lock not in self._waiting)
        return {lock: self._waiting[lock] for lock in wanted}

    def count_waiters_once(self, keys: Iterable[Key]) -> dict[Key, int | None]:
        """The same as ``count_waiters()``, but keeps nothing."""
        counted: dict[Key, int | None] = dict.fromkeys(keys)

        def ask(backend: BaseLockBackend, keys: Sequence[Key]) -> None:
            names = [key.name for key in keys]
            counts = zip(keys, backend.count_waiters(names), backend.keyed(names)[1], strict=True)
            # In local memory only the leader has a place in the store; the other waiters are in the local queue.
            queue = None if backend.supports_processes else locks.service(backend.alias).queue
            for key, count, lock in counts:
                counted[key] = max(count, queue.length(lock)) if queue and count is not None else count

        self._ask_in_batches(counted, ask)
        return counted

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


def long_held(info: LockInfo, held: float | None) -> float | None:
    """Returns the LONG_HELD of the alias if the lock, held for ``held`` by now, is held for longer; else None."""
    bound = locks[info.using].long_held
    return bound if bound is not None and not info.resting and (held or 0.0) > bound else None


def holding_nodes(info: LockInfo) -> str:
    """Returns, for people, on how many nodes of its quorum the lock is; "" if the store is not a quorum."""
    return "" if info.nodes is None else f"{info.nodes} / {locks[info.using].node_count}"
