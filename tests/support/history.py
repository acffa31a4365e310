"""What processes saw of their locks, written to files as it happens, and a judge of such histories.

Each process keeps a ``Journal``. ``faults(events)`` proves from all of them together, name by name, that no two
holders believed at once, or no more than each of them allowed (S1), that fencing numbers grew (S12) and that nobody
overtook a waiter (S10); ``left_behind(keys)`` that the store is clean at the end (S4).
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from heapq import nlargest
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from django_distlock import signals
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.redis import RedisBackend, RedisClusterBackend
from django_distlock.core.handed_lease import HandedLease
from django_distlock.core.lease import Lease
from django_distlock.exceptions import LockBackendError, LockError, LockTimeout
from django_distlock.types import Grant, LockInfo, LockRequest
from django_distlock.utils.clock import clock

GRANT = 2.0  # seconds that a waiter has to take what it was handed
SETTLING = 4.0  # seconds a disturbed waiter needs to be back at its place: a grant it did not take, a look, some slack
EVERYBODY = 0


@dataclass(frozen=True)
class Event:
    """Something that a process did or learned, at a moment of ``clock()``, which all processes share.

    ``kind``: ``place`` (a waiter learned its place in the store's queue), ``grant`` (``sent``: before the first request
    that the store may have granted), ``renewal``, ``release`` (before the request is sent), ``loss``, ``failure`` (the
    store refused, or a wait was over: see ``text``), or ``disturbed`` (the process, or EVERYBODY, was killed, stopped,
    continued or cut off). ``slot`` of ``slots``: of a grant, in a lock that several may hold.
    """

    kind: str
    at: float
    pid: int = EVERYBODY
    name: str = ""
    fence: int = 0
    place: str = ""
    sent: float = 0.0
    deadline: float = 0.0
    text: str = ""
    slot: int = 1
    slots: int = 1


class Journal:
    """Appends events to the file of this process; one write each, so that a kill tears at most the last line."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, str] = {}  # by token
        self._asked: dict[str, float] = {}  # by token, since when the store may have granted it
        self._file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, kind: str, *, pid: int | None = None, **about: Any) -> None:
        event = Event(kind, about.pop("at", None) or clock(), os.getpid() if pid is None else pid, **about)
        os.write(self._file, json.dumps(asdict(event)).encode() + b"\n")

    def attach(self) -> None:
        """From now on tell of every lease of this process, and of places where the backend is a recording one."""
        signals.lock_acquired.connect(self.granted, weak=False)
        signals.lock_lost.connect(self.lost, weak=False)
        Recording.journal = RecordedLease.journal = self

    def granted(self, lease: Lease, **_: Any) -> None:
        lease.__class__ = recorded_kind(lease)
        assert isinstance(lease, RecordedLease)
        if not lease.is_held:
            return  # its task was cancelled before this ran in a thread, and never learns of it
        lasts = GRANT if isinstance(lease, HandedLease) else lease.ttl  # it was granted a moment ago
        place, sent = self._places.pop(lease.token, ""), lease.deadline - lasts * 0.99 + 0.002
        sent = min(sent, self._asked.pop(lease.token, sent))  # which may have been repeated, for want of an answer
        slots = {"slot": lease.slot, "slots": lease.holder.slots}
        self.write(
            "grant", name=lease.name, fence=lease.fence, place=place, sent=sent, deadline=lease.deadline, **slots
        )

    def asks(self, request: LockRequest) -> None:
        self._asked.setdefault(request.token, clock())

    def answered(self, request: LockRequest, answer: Grant | LockInfo) -> None:
        """By the store, which may have given it another place."""
        if isinstance(answer, LockInfo):
            self._asked.pop(request.token, None)
        if request.place != self._places.get(request.token, ""):
            self._places[request.token] = request.place
            if request.place:
                self.write("place", name=request.name, place=request.place)

    def lost(self, lease: Lease, **_: Any) -> None:
        assert isinstance(lease, RecordedLease)
        lease.tell_deadline()
        self.write("loss", name=lease.name, fence=lease.fence)

    def failed(self, error: LockError) -> None:
        if isinstance(error, LockBackendError | LockTimeout):
            self.write("failure", text=f"{type(error).__name__}: {error}")


class RecordedLease(Lease):
    """Tells the journal how long its holder may believe in it."""

    __slots__ = ()
    journal: Journal

    @property
    def deadline(self) -> float:
        return self._deadline

    def _extend(self, sent_at: float, ttl: float) -> None:
        super()._extend(sent_at, ttl)
        self.journal.write("renewal", deadline=self.deadline, name=self.name, fence=self.fence)

    def _mark_released(self) -> float:
        self.tell_deadline()
        self.journal.write("release", name=self.name, fence=self.fence)
        return super()._mark_released()

    def tell_deadline(self) -> None:
        """What the renewals do not tell, as of now."""


class RecordedHandedLease(RecordedLease, HandedLease):
    __slots__ = ()


def recorded_kind(lease: Lease) -> type[Lease]:
    if type(lease) is Lease:
        return RecordedLease
    if type(lease) is HandedLease:
        return RecordedHandedLease
    from tests.support.history_in_zookeeper import RecordedSessionLease

    return RecordedSessionLease


class Recording(BaseLockBackend):
    """Tells the journal each place that a waiter is given."""

    journal: Journal | None = None

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        if Recording.journal:
            Recording.journal.asks(request)
        answer = super().acquire(request, queue=queue)
        if Recording.journal:
            Recording.journal.answered(request, answer)
        return answer

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        if Recording.journal:
            Recording.journal.asks(request)
        answer = await super().aacquire(request, queue=queue)
        if Recording.journal:
            Recording.journal.answered(request, answer)
        return answer


class RecordingBackend(Recording, RedisBackend):
    """On one server, or on a master."""


class RecordingClusterBackend(Recording, RedisClusterBackend):
    """On a Cluster."""


def read(folder: Path) -> list[Event]:
    """The events of all journals in the order in which they happened."""
    return sorted(_read(folder), key=lambda event: event.at)


def grants_in(folder: Path) -> list[int]:
    """The process of each grant."""
    return [event.pid for event in _read(folder) if event.kind == "grant"]


def _read(folder: Path) -> Iterator[Event]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield Event(**json.loads(line))


@dataclass(frozen=True)
class Belief:
    """One grant and the time for which its holder may have believed in it."""

    grant: Event
    until: float

    @property
    def is_empty(self) -> bool:
        """The process was stopped until it was over."""
        return self.until <= self.grant.at

    @property
    def numbered_after(self) -> float:
        """A moment before its number was minted, of which its process learned later."""
        return self.grant.sent - (GRANT if self.grant.place else 0.0)

    def __str__(self) -> str:
        grant = self.grant
        slot = f" in slot {grant.slot} of {grant.slots}" if (grant.slot, grant.slots) != (1, 1) else ""
        return f"{grant.fence} of process {grant.pid}{slot} from {grant.at:.6f} to {self.until:.6f}"


def faults(events: Iterable[Event]) -> list[str]:
    """What is wrong with the history, one sentence each. Nothing is, when the list is empty."""
    events = sorted(events, key=lambda event: event.at)
    disturbed = [event for event in events if event.kind == "disturbed"]
    found = []
    for name, of_name in _by_name(events).items():
        beliefs = beliefs_of(of_name)
        crowds = [_in_words(crowd) for crowd in _crowds(beliefs)]
        for problem in (*crowds, *numbers_that_went_back(beliefs), *_overtakings(of_name, beliefs, disturbed)):
            found.append(f"{name}: {problem}")
    return found


def overlaps(events: Iterable[Event]) -> list[float]:
    """Seconds for which too many holders of a name believed at once, for each of them that was one too many."""
    found = []
    for of_name in _by_name(sorted(events, key=lambda event: event.at)).values():
        for crowd in _crowds(beliefs_of(of_name)):
            found.append(min(one.until for one in crowd) - max(one.grant.at for one in crowd))
    return found


def most_at_once(events: Iterable[Event]) -> int:
    """How many holders of one name believed at the same moment, at most."""
    most = 0
    for of_name in _by_name(sorted(events, key=lambda event: event.at)).values():
        beliefs = [belief for belief in beliefs_of(of_name) if not belief.is_empty]
        changes = sorted([(one.until, -1) for one in beliefs] + [(one.grant.at, 1) for one in beliefs])
        most = max(most, *accumulate(change for _, change in changes), 0)
    return most


def _by_name(events: Iterable[Event]) -> dict[str, list[Event]]:
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind not in ("disturbed", "call", "failure"):
            by_name[event.name].append(event)
    return by_name


def beliefs_of(events: list[Event]) -> list[Belief]:
    """In the order of the grants."""
    deadlines: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        lease = event.pid, event.fence
        if event.kind in ("grant", "adoption", "renewal"):
            deadlines[lease] = max(event.deadline, deadlines.get(lease, 0.0))
        elif event.kind in ("release", "loss"):
            ends.setdefault(lease, event.at)
    grants = [(event, (event.pid, event.fence)) for event in events if event.kind in ("grant", "adoption")]
    return [Belief(grant, min(deadlines[lease], ends.get(lease, inf))) for grant, lease in grants]


def _crowds(beliefs: list[Belief]) -> Iterator[list[Belief]]:
    """Holders at once where the last one allows fewer beside itself, or has a slot that another one has."""
    standing = _in_order([belief for belief in beliefs if not belief.is_empty])
    next_at = [*accumulate((belief.grant.at for belief in reversed(standing)), min)][::-1]  # from each one on
    before: list[Belief] = []
    for belief, at in zip(standing, next_at, strict=True):
        before = [other for other in before if other.until > at]
        beside = [other for other in before if other.grant.at < belief.until and belief.grant.at < other.until]
        in_its_slot = [other for other in beside if other.grant.slot == belief.grant.slot]
        most = 1 if in_its_slot else belief.grant.slots
        if len(beside) >= most:
            yield [*nlargest(most, in_its_slot or beside, key=lambda other: other.until), belief]
        before.append(belief)


def _in_words(crowd: list[Belief]) -> str:
    number = "two" if len(crowd) == 2 else len(crowd)
    return f"{number} holders at once: {', and '.join(map(str, crowd))}"


def numbers_that_went_back(beliefs: list[Belief]) -> Iterator[str]:
    beliefs = [belief for belief in beliefs if belief.grant.kind == "grant"]
    for fence, times in Counter(belief.grant.fence for belief in beliefs).items():
        if times > 1:
            yield f"the number {fence} was granted {times} times"
    standing = [belief for belief in beliefs if not belief.is_empty]
    moments = [belief.grant.at for belief in standing]
    have_slots = _have_slots(standing)
    largest = [*accumulate((belief.grant.fence for belief in standing), max)]
    for later in standing:
        before = bisect_left(moments, later.numbered_after if have_slots else later.grant.at)
        if before and later.grant.fence < largest[before - 1]:
            yield f"the number {later.grant.fence} was granted after {largest[before - 1]}"


def _have_slots(beliefs: list[Belief]) -> bool:
    return any(belief.grant.slots > 1 for belief in beliefs)


def _in_order(beliefs: list[Belief]) -> list[Belief]:
    """Of their grants. Two that have slots at once may learn of it in another order, so there the numbers tell."""
    if not _have_slots(beliefs):
        return beliefs
    return sorted(beliefs, key=lambda belief: (belief.grant.fence, belief.grant.at))


def _overtakings(events: list[Event], beliefs: list[Belief], disturbed: list[Event]) -> Iterator[str]:
    """A waiter that was granted must not have stood before the holder of an earlier grant, known to the store.

    Unless something happened to the waiter that may have thrown it out of the queue until its next look.
    """
    known: dict[tuple[int, str], float] = {}
    beliefs = _in_order(beliefs)
    for event in events:
        if event.kind == "place":
            known.setdefault((event.pid, event.place), event.at)
    for index, later in enumerate(beliefs):
        mine = later.grant
        since = known.get((mine.pid, mine.place)) if mine.place else None
        if since is None:
            continue
        for earlier in beliefs[:index]:
            other = earlier.grant
            overtook = since < other.sent and (not other.place or int(other.place) > int(mine.place))
            if overtook and not any(
                event.pid in (mine.pid, EVERYBODY) and since - SETTLING <= event.at <= other.at for event in disturbed
            ):
                where = f"with the place {other.place}" if other.place else "without a place"
                yield (
                    f"process {other.pid} got in {where} at {other.at:.6f} before process {mine.pid}, which had the"
                    f" place {mine.place} since {since:.6f} and got in at {mine.at:.6f}"
                )


def overruns(events: Iterable[Event]) -> list[float]:
    """Seconds that calls took beyond the time they had."""
    return [event.at - event.deadline for event in events if event.kind == "call" and event.at > event.deadline]


def left_behind(keys: Iterable[str], prefix: str = "lock") -> list[str]:
    """What locks left in the store, where nothing may remain but the last fencing number."""
    return sorted(key for key in keys if key.startswith((f"{prefix}:", f"{prefix}|")) and key != f"{prefix}|f")
