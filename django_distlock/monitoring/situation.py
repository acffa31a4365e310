"""What is known about the locks of one alias at a moment: from their store, from the journal, or from both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple

from ..backends.base import STEP, BaseLockBackend
from ..backends.optional import JournalBackend
from ..core.registry import locks
from ..exceptions import LockBackendError
from ..journal import BEGINS, ENDS, NOT_RENEWED, RENEWED_NO_MORE, Event, JournalEntry, QueuedWaiter, entries_in
from ..types import Holder, LockInfo, digest
from ..utils.clock import wall_clock

MOST_QUEUES = 5000  # queues that are read to find out for what a holder waits
OF_WAITS = frozenset({Event.WAITS, Event.GRANTED, Event.TIMED_OUT, Event.WAIT_ENDED})  # beginnings and ends of waits
UNTOLD = 1.0  # seconds that may pass until an event in a process is in the journal

Execution = tuple[str, int, str]  # host, process, and the name of a thread or task


class HeldLease(NamedTuple):
    """A lease, as far as it is known.

    ``since``: when it was granted, in seconds of Unix time. ``remaining``: seconds that it has left; None: unknown.
    ``ttl``: seconds; None: unknown, or the lease is not renewed. ``until``: when a lease that is not renewed ends, in
    seconds of Unix time, unless somebody calls ``renew()``, which the journal does not record. ``kept``,
    ``kept_since``: what keeps the lease, and since when its holder has left it; "" if it has not, as far as is known.
    ``resting``: it was released, and the lock stays taken for the rest of its ``min_hold``.
    """

    lease: str
    holder: Holder | None
    since: float
    fence: int = 0
    remaining: float | None = None
    ttl: float | None = None
    kept: str = ""
    kept_since: float = 0.0
    until: float | None = None
    resting: bool = False


class Waiting(NamedTuple):
    """A waiter, as far as it is known. If its Holder has no thread, only the process is known.

    ``behind``: other waiters of the same process. ``has``: the leases of that thread or task, by their digests; None:
    unknown.
    """

    holder: Holder | None
    since: float
    behind: tuple[Waiting, ...] = ()
    has: tuple[str, ...] | None = None

    @classmethod
    def told(cls, entry: JournalEntry) -> Waiting:
        """Returns the waiter that an entry of the journal describes."""
        return cls(entry.holder, entry.at, has=tuple(entry.text.split()))

    @property
    def everybody(self) -> tuple[Waiting, ...]:
        return self, *self.behind


@dataclass
class Situation:
    """What is known about the locks of an alias at a moment.

    ``at``: the moment, in seconds of Unix time. ``leases``, ``queues``: by the name of the lock; a queue that is None
    is unknown. ``entries``: the entries of the journal, the oldest first, also those after ``at``; None: there is no
    journal, or it could not be read, for the reason in ``unread``. ``long_held``: LONG_HELD of the alias.
    """

    name: str
    using: str
    at: float
    leases: Mapping[str, Sequence[HeldLease]] = field(default_factory=dict)
    queues: Mapping[str, Sequence[Waiting] | None] = field(default_factory=dict)
    entries: Sequence[JournalEntry] | None = None
    long_held: float | None = None
    unread: str = ""

    @property
    def held(self) -> Sequence[HeldLease]:
        return self.leases.get(self.name, ())

    def in_use(self, name: str) -> list[HeldLease]:
        """Returns the leases of a lock that their holders have not released."""
        return [lease for lease in self.leases.get(name, ()) if not lease.resting]

    @property
    def is_holder_known(self) -> bool:
        """Whether the store, or the journal of that time, says who has the lock, or that nobody has it."""
        return self.name in self.leases or any(entry.event in BEGINS | ENDS for entry in self.history)

    @property
    def told_until(self) -> float:
        """Until when the journal is complete, in seconds of Unix time: later events may not be written yet."""
        return max(self.at, self.entries[-1].at if self.entries else 0.0) - UNTOLD

    @property
    def waiting(self) -> Sequence[Waiting] | None:
        return self.queues.get(self.name, ())

    @property
    def history(self) -> list[JournalEntry]:
        """The events of this lock up to the moment."""
        return [entry for entry in self.entries or () if entry.name == self.name and entry.at <= self.at]


def execution(holder: Holder) -> Execution:
    return holder.host, holder.pid, holder.thread


def process(holder: Holder) -> tuple[str, int]:
    return holder.host, holder.pid


def gather(backend: BaseLockBackend, name: str, at: float | None = None, *, others: bool = True) -> Situation:
    """Returns the situation of a lock. ``at``: a moment of the past, in seconds of Unix time; None: now.

    ``others``: whether to ask the store also for all other locks that have waiters, because the holder may be one of
    the waiters. Without it, only the journal says something about them. Raises LockBackendError.
    """
    entries, unread = None, ""
    try:
        entries = read_entries(backend)
    except LockBackendError as error:
        if at is not None or not error.is_final:
            raise
        unread = str(error)  # for example of permissions; the store still shows the rest
    if at is not None:
        return from_journal(entries, name, backend.alias, at, backend.long_held)
    waited_for = islice(backend.waited_for(), MOST_QUEUES) if others else ()
    names = list(dict.fromkeys([name, *waited_for]))
    infos: list[list[LockInfo]] = []
    queues: list[list[QueuedWaiter] | None] = []
    for start in range(0, len(names), STEP):
        infos += backend.look(names[start : start + STEP])
        queues += _waiters(backend, names[start : start + STEP])
    now, entries_known = wall_clock(), entries or ()
    told_leases = {lease.lease: lease for leases in _leases_in(entries_known).values() for lease in leases}
    waits = waits_in(entries_known, now)
    told = from_journal(None if others else entries, name, backend.alias, now, backend.long_held)
    return Situation(
        name,
        backend.alias,
        now,
        leases={
            **told.leases,
            **{
                each: [_held(info, told_leases.get(info.digest), now) for info in found]
                for each, found in zip(names, infos, strict=True)
            },
        },
        queues={
            **told.queues,
            **{each: _queue(queue, waits[each]) for each, queue in zip(names, queues, strict=True)},
        },
        entries=entries,
        unread=unread,
        long_held=backend.long_held,
    )


def read_entries(backend: BaseLockBackend) -> list[JournalEntry] | None:
    """Returns the entries of the caller's locks, the oldest first; None: there is no journal."""
    if not isinstance(backend, JournalBackend) or not backend.journal_length:
        return None
    prefix = backend.prefix_now()
    return [entry for entry in entries_in(backend.read_journal()) if entry.prefix == prefix]


def from_journal(
    entries: Sequence[JournalEntry] | None, name: str, using: str, at: float, long_held: float | None
) -> Situation:
    """Returns the situation at that moment according to the journal."""
    known = [entry for entry in entries or () if entry.at <= at]
    queues = {each: [*map(Waiting.told, waits)] for each, waits in waits_in(known, at).items()}
    proven = {entry.lease for entry in entries or () if entry.at > at and entry.event is not Event.LOST}
    leases = {
        each: [lease for lease in found if lease.until is None or at < lease.until or lease.lease in proven]
        for each, found in _leases_in(known).items()
    }
    return Situation(name, using, at, leases, queues, entries, long_held)


def _waiters(backend: BaseLockBackend, names: Sequence[str]) -> list[list[QueuedWaiter] | None]:
    if backend.supports_processes:
        return backend.waiters(names)
    # A store in this process knows only the leaders; the local queue knows all waiters.
    queue = locks.service(backend.alias).queue
    lines = [queue.line(key) for key in backend.keyed(names)[1]]
    return [[QueuedWaiter(digest(one.token), one.holder.since, one.holder) for one in line] for line in lines]


def _held(info: LockInfo, told: HeldLease | None, now: float) -> HeldLease:
    """Returns the lease as the store shows it. ``told``: the same lease according to the journal."""
    told = told or HeldLease(info.digest, info.holder, info.holder.since if info.holder else now)
    return told._replace(
        holder=info.holder,
        fence=info.fence,
        remaining=None if info.remaining == inf else info.remaining,
        ttl=None if info.resting else told.ttl,
        kept="" if info.resting else told.kept,
        resting=info.resting,
    )


def _leases_in(entries: Iterable[JournalEntry]) -> dict[str, list[HeldLease]]:
    """Returns the leases that were granted and have not ended, as far as the entries say.

    A lock has at most as many leases at a time as slots. So each grant shows that older leases beyond that have ended.
    """
    standing: defaultdict[str, dict[str, HeldLease]] = defaultdict(dict)
    for entry in entries:
        leases, known = standing[entry.name], standing[entry.name].get(entry.lease)
        if entry.event in BEGINS:
            since = entry.at if entry.event is Event.GRANTED else entry.at - (entry.seconds or 0.0)
            lease = HeldLease(entry.lease, entry.holder, known.since if known else since, entry.fence, ttl=entry.ttl)
            leases[entry.lease] = _not_renewed(lease, entry) if entry.text == NOT_RENEWED else lease
            for oldest in [*leases][: -(entry.holder.slots if entry.holder else 1)]:
                del leases[oldest]
        elif known and entry.event in ENDS:
            del leases[entry.lease]
        elif known and entry.event is Event.KEPT:
            leases[entry.lease] = known._replace(kept=entry.text, kept_since=entry.at)
        elif known and entry.event in RENEWED_NO_MORE:
            leases[entry.lease] = _not_renewed(known, entry)
    return {name: [*leases.values()] for name, leases in standing.items() if leases}


def _not_renewed(lease: HeldLease, since: JournalEntry) -> HeldLease:
    return lease._replace(ttl=None, until=since.at + since.ttl)


def waits_in(entries: Iterable[JournalEntry], at: float) -> dict[str, list[JournalEntry]]:
    """Returns who waits at that moment, by the name of the lock, in the order in which they began.

    A thread or task waits for one lock at a time, so its next event ends the wait. The lease does not identify a
    waiter, because a waiter may continue with the token of one that stood before it.
    """
    latest: dict[Execution, JournalEntry] = {}
    for entry in entries:
        if entry.holder and entry.event in OF_WAITS:
            latest[execution(entry.holder)] = entry
    found: dict[str, list[JournalEntry]] = defaultdict(list)
    for entry in sorted(latest.values(), key=lambda one: one.at):
        may_wait = entry.seconds is None or at <= entry.at + entry.seconds + UNTOLD
        if entry.event is Event.WAITS and may_wait:
            found[entry.name].append(entry)
    return found


def _queue(queue: Sequence[QueuedWaiter] | None, waits: Sequence[JournalEntry]) -> list[Waiting] | None:
    """Returns the queue. The store knows the places, and perhaps the processes. The journal knows threads, and who
    stands behind."""
    if queue is None:
        return [*map(Waiting.told, waits)] or None
    by_lease = {one.lease: one for one in waits}
    left, found = list(waits), []
    for place in queue:
        told = by_lease.get(place.lease)
        if told is None and place.holder:
            told = next((one for one in left if one.holder and _may_be(place.holder, one.holder)), None)
        if told in left:
            left.remove(told)
        found.append(Waiting.told(told) if told else Waiting(place.holder, place.since))
    return [_with_those_behind(one, left) for one in found]


def _may_be(known: Holder, told: Holder) -> bool:
    """Returns whether both may be the same waiter. ``known``: the waiter as far as the store knows it."""
    return process(told) == process(known) and known.thread in ("", told.thread)


def _with_those_behind(first: Waiting, left: list[JournalEntry]) -> Waiting:
    """Returns the waiter with the others of its process behind it, and removes them from ``left``."""
    if first.holder is None:
        return first
    behind = [one for one in left if one.holder and process(one.holder) == process(first.holder)]
    left[:] = [one for one in left if one not in behind]
    return first._replace(behind=tuple(map(Waiting.told, behind)))
