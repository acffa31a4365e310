"""What is locked now in all backends, for one page or command, also when some of them are down."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import islice, repeat
from operator import attrgetter
from typing import NamedTuple, TypeVar, overload
from urllib.parse import quote, unquote

from django.core.exceptions import ImproperlyConfigured

from ..backends.base import BaseLockBackend
from ..celery.schedule_store import RunInfo, recorded_runs
from ..core.registry import SETTING, locks
from ..exceptions import LockBackendError
from ..names import OWN
from ..types import Holder, LockInfo, Outage
from ..utils.clock import clock, wall_clock
from ..utils.parallel import ask_in_parallel

logger = logging.getLogger("django_distlock")

BATCH_SIZE = 500  # locks asked for in one round trip

R = TypeVar("R")


class Key(NamedTuple):
    """A lock, or an entry of beat: the alias of its backend, and its name."""

    using: str
    name: str

    def __str__(self) -> str:
        """A text for URLs and forms, which change line breaks and refuse other control characters."""
        name = re.sub(r"[\x00-\x1f\x7f%]", lambda found: f"%{ord(found[0]):02X}", self.name)
        return f"{quote(self.using, safe='')}/{name}"


new_key: Callable[[tuple[str, str]], Key] = partial(tuple.__new__, Key)  # in a third of the time


class KeyList(Sequence[Key]):
    """Keys by name, each made when it is asked for: a million of them would take longer than all the rest of a page.

    ``names``: in order, by alias.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self.names = {alias: names[alias] for alias in sorted(names) if names[alias]}

    def __len__(self) -> int:
        return sum(map(len, self.names.values()))

    def __iter__(self) -> Iterator[Key]:
        of_each = [map(new_key, zip(repeat(alias), names)) for alias, names in self.names.items()]
        return of_each[0] if len(of_each) == 1 else merge(*of_each, key=attrgetter("name"))

    @overload
    def __getitem__(self, index: int) -> Key: ...

    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...

    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        if isinstance(index, int):
            return self[index : index + 1 or None][0]
        if len(self.names) == 1:
            [(alias, names)] = self.names.items()
            return list(KeyList({alias: names[index]}))
        return list(islice(self, *index.indices(len(self))))

    def only(self, using: str | None, prefix: str) -> KeyList:
        """Those whose names begin so; ``using``: of one alias."""
        found = self.names if using is None else {using: self.names.get(using, ())}
        return KeyList({alias: names[_beginning(prefix, names)] for alias, names in found.items()})


def _beginning(prefix: str, names: Sequence[str]) -> slice:
    """Where the names stand that begin so, of those in order."""
    begin = bisect_left(names, prefix)
    return slice(begin, bisect_left(names, True, begin, key=lambda name: not name.startswith(prefix)))


class LeaseKey(NamedTuple):
    """A lease of a lock, by the digest of its token."""

    lock: Key
    digest: str

    def __str__(self) -> str:
        return f"{self.lock}@{self.digest}"

    @classmethod
    def read(cls, text: str) -> LeaseKey | None:
        """None for a text that names no lease."""
        if found := re.fullmatch(r"(?P<using>[^/]*)/(?P<name>.+)@(?P<digest>[0-9a-f]{16})", text, re.DOTALL):
            return cls(Key(unquote(found["using"]), unquote(found["name"])), found["digest"])
        return None


class SeenLock(NamedTuple):
    """A lock as a backend showed it at a moment on ``clock()``."""

    info: LockInfo
    seen_at: float

    @property
    def free_at(self) -> float:
        return self.seen_at + self.info.remaining

    @property
    def remaining(self) -> float:
        return max(0.0, self.free_at - clock())

    @property
    def lease(self) -> LeaseKey:
        return LeaseKey(Key(self.info.using, self.info.name), self.info.digest)


class Inventory:
    """A snapshot of the locks and runs of all backends. A backend is asked each question once, and none after an error.

    ``aliases``: of the backends; default: all of the setting. ``prefix``: the beginning of the names.
    ``errors``: by alias, why its locks or runs are missing, or some of them. ``misconfigured``: the aliases among them
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
        self._seen: dict[Key, SeenLock | None] = {}
        self._runs: dict[Key, RunInfo] | None = None
        self._pinned: dict[str, BaseLockBackend] = {}

    @property
    def has_quorums(self) -> bool:
        """Whether any backend keeps its locks on several nodes."""
        return any(self._ask(alias, lambda backend: backend.node_count) for alias in self.aliases)

    @property
    def local_aliases(self) -> list[str]:
        """Those whose locks are in the memory of each process, which shows its own."""

        def is_local(backend: BaseLockBackend) -> bool:
            return backend.supports_exclusion and not backend.supports_processes

        return [alias for alias in self.aliases if self._ask(alias, is_local)]

    def outages(self) -> dict[str, Sequence[Outage]]:
        """By alias, the servers that this process does not ask; not of backends with wrong settings."""
        usable = [alias for alias in self.aliases if alias not in self.misconfigured]
        return {alias: found for alias in usable if (found := locks[alias].outages())}

    def keys(self) -> KeyList:
        """What is locked, by name; without the package's own locks, unless the prefix asks for them."""
        if self._keys is None:
            self._keys = KeyList(self._names())
        return self._keys

    def _names(self) -> dict[str, list[str]]:
        """In order, by alias."""
        names: dict[str, list[str]] = {alias: [] for alias in self.aliases}  # also those before an error
        self._pin(names)
        self.ask_each(
            {alias: lambda backend: names[backend.alias].extend(backend.names(self.prefix)) for alias in names}
        )
        for found in names.values():
            found.sort()
            if not self.prefix.startswith(OWN):
                del found[_beginning(OWN, found)]
        return names

    def look(self, keys: Iterable[Key]) -> dict[Key, SeenLock]:
        """As ``look_once()``, and what was seen is kept: a page asks for the same locks several times."""
        keys = list(keys)
        new = [key for key in keys if key not in self._seen]
        self._seen |= dict.fromkeys(new) | self.look_once(new)
        return {key: seen for key in keys if (seen := self._seen[key])}

    def look_once(self, keys: Iterable[Key]) -> dict[Key, SeenLock]:
        """The locks that are still held, in the order of ``keys``."""
        found: dict[Key, SeenLock] = {}

        def ask(backend: BaseLockBackend, keys: Sequence[Key]) -> None:
            at = clock()
            infos = backend.look([key.name for key in keys])
            found.update({key: SeenLock(info, at) for key, info in zip(keys, infos, strict=True) if info})

        keys = list(keys)
        self._ask_in_batches(keys, ask)
        return {key: found[key] for key in keys if key in found}

    def map_holders(self, keys: Iterable[Key], function: Callable[[Key, Holder | None], R]) -> dict[Key, R]:
        """The result of the function for each lock. Holders are not kept: there may be very many."""
        results: dict[Key, R] = {}

        def ask(backend: BaseLockBackend, keys: Sequence[Key]) -> None:
            holders = backend.holders([key.name for key in keys])
            results.update(zip(keys, map(function, keys, holders), strict=True))

        self._ask_in_batches(keys, ask)
        return results

    def free_at(self, keys: Iterable[Key]) -> dict[Key, float]:
        """When each lock expires, on ``clock()``; without those that are free by now."""
        found: dict[Key, float] = {}

        def ask(backend: BaseLockBackend, keys: Sequence[Key]) -> None:
            at = clock()
            remaining = backend.remaining([key.name for key in keys])
            found.update({key: at + rest for key, rest in zip(keys, remaining, strict=True) if rest is not None})

        self._ask_in_batches(keys, ask)
        return found

    def count_waiters(self, keys: Sequence[Key]) -> dict[Key, int | None]:
        """How many wait for each; None if that is not known."""
        counted: dict[Key, int | None] = dict.fromkeys(keys)

        def ask(backend: BaseLockBackend, keys: Sequence[Key]) -> None:
            in_store = backend.count_waiters([key.name for key in keys])
            for key, count in zip(keys, in_store, strict=True):
                counted[key] = count
                if count is not None and not backend.supports_processes:
                    # Only the leader has a place in the store; the others wait in this very process.
                    [lock] = backend.keyed([key.name])[1]
                    counted[key] = max(count, locks.service(backend.alias).queue.length(lock))

        self._ask_in_batches(keys, ask)
        return counted

    def _ask_in_batches(self, keys: Iterable[Key], ask: Callable[[BaseLockBackend, Sequence[Key]], None]) -> None:
        """Ask each backend for its own keys."""
        by_alias: dict[str, list[Key]] = {alias: [] for alias in self.aliases}
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
        """Ask KEY_PREFIX, once for all of the snapshot, and here: not in the threads that ask the stores."""
        for alias in aliases:
            if alias not in self._pinned and (pinned := self._ask(alias, BaseLockBackend.pinned)):
                self._pinned[alias] = pinned

    def runs(self) -> dict[Key, RunInfo]:
        """The entries of beat, by name, whatever ``prefix`` is, which is for locks."""
        if self._runs is None:
            found: list[RunInfo] = []
            self.ask_each(dict.fromkeys(self.aliases, lambda backend: found.extend(recorded_runs(backend.alias))))
            self._runs = {
                Key(run.using, run.entry): run for run in sorted(found, key=lambda run: (run.entry, run.using))
            }
        return self._runs

    def ask_each(self, questions: Mapping[str, Callable[[BaseLockBackend], R]]) -> dict[str, R | None]:
        """Ask each alias its question, all at once. None for one that failed, now or before: see ``errors``."""
        calls = {alias: partial(self._ask, alias, questions[alias]) for alias in questions if alias not in self.errors}
        return {**dict.fromkeys(questions), **ask_in_parallel(calls)}

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


def held_for(info: LockInfo) -> float | None:
    """Seconds since the grant, by the clocks of this machine and the holder's."""
    return max(0.0, wall_clock() - info.holder.since) if info.holder else None


def long_held(info: LockInfo) -> float | None:
    """The LONG_HELD of its alias if somebody holds the lock for longer than that, else None."""
    bound = locks[info.using].long_held
    return bound if bound is not None and not info.resting and (held_for(info) or 0.0) > bound else None


def holding_nodes(info: LockInfo) -> str:
    """On how many nodes of its quorum the lock is, for people; "" if the store is no quorum."""
    return "" if info.nodes is None else f"{info.nodes} / {locks[info.using].node_count}"


def format_duration(seconds: float) -> str:
    """A duration for people. The admin's script writes it in the same way."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"
