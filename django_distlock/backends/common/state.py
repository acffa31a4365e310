"""The algorithm of a lock as pure functions on its row, without a store.

A lock may have several leases at once, each in a slot. A caller says how many slots it allows. It counts all leases,
whatever numbers their holders named, and takes the lowest free slot if there are fewer leases.

Each function changes the row that it is given, and returns the decision. A database then writes the change only if the
row is still the one that was read (compare-and-swap). So the database holds no lock between two statements, and a
command that arrives late changes nothing. Local memory changes its rows one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import count
from math import ceil
from operator import attrgetter
from typing import Self

from ...types import TOKEN_LENGTH, Holder, LockInfo, LockRequest
from .timing import Timing

HELD, CLAIMED, RESTING, FREE = "h", "c", "r", "f"

# The record of a waiter. It always has the same length, so SQL finds its parts by their position.
DIGITS = 16  # microseconds of Unix time, for another two hundred years
INBOX_LENGTH = 12
SLOTS_LENGTH = 4
THREAD_LENGTH = 16  # 64 bits in hexadecimal
SLOTS_AT = DIGITS + DIGITS + TOKEN_LENGTH + INBOX_LENGTH
RECORD_LENGTH = SLOTS_AT + SLOTS_LENGTH + THREAD_LENGTH
_RECORD = (
    f"([0-9]{{{DIGITS}}})([0-9]{{{DIGITS}}})(.{{{TOKEN_LENGTH}}})(.{{{INBOX_LENGTH}}})([0-9]{{{SLOTS_LENGTH}}})"
    f"(.{{{THREAD_LENGTH}}})"
)
RECORD, RECORDS = re.compile(_RECORD, re.DOTALL), re.compile(f"(?:{_RECORD})*", re.DOTALL)


def microseconds(seconds: float) -> int:
    return ceil(seconds * 1_000_000)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A place in the queue.

    ``seen``: when the waiter last showed that it is alive. ``slots``: how many slots it allows. ``thread``: the thread
    or task that waits, not used yet.
    """

    place: int
    token: str
    inbox: str
    seen: int
    slots: int = 1
    thread: str = ""


@dataclass(frozen=True, slots=True)
class StoredLease:
    """A lease in the store. ``expires``: a moment. ``holder``: if the state is CLAIMED, the inbox of the waiter."""

    slot: int
    token: str
    state: str
    fence: int
    expires: int
    holder: str = ""

    def info(self, name: str, alias: str, remaining: float, prefix: str = "") -> LockInfo:
        """``remaining``: microseconds."""
        holder = None if self.state == CLAIMED else _holder(self.holder)
        return LockInfo(
            name, alias, holder, self.fence, max(0.0, remaining / 1e6),
            resting=self.state == RESTING, token=self.token, prefix=prefix, slot=self.slot,
        )  # fmt: skip


def _holder(text: str) -> Holder | None:
    """None if something else wrote it."""
    try:
        return Holder.from_text(text) if text else None
    except ValueError:
        return None


@dataclass(slots=True)
class Row:
    """One lock. Moments are microseconds on the clock of the store; ``now`` is when the row was read.

    ``fence``: of the last grant. ``ended``: if there is no lease in the first slot, when the last one there ended.
    """

    now: int
    version: int = 0  # 0: there is no such row yet
    fence: int = 0
    leases: list[StoredLease] = field(default_factory=list)  # in the order of their slots
    ended: int = 0
    waiters: list[Waiter] = field(default_factory=list)  # in the order of their places
    retired: dict[str, int] = field(default_factory=dict)  # token -> moment at which it is forgotten
    timing: Timing = field(default_factory=Timing, repr=False)

    @property
    def careful_until(self) -> int:
        """Until when the last waiter, retired token, or lease in another slot than the first counts.

        Until then the fast path does not take a free lock that has waiters.
        """
        others = [lease.expires for lease in self.leases if lease.slot > 1]
        return max([0, *map(self._expiry_of, self.waiters), *self.retired.values(), *others])

    @property
    def live_leases(self) -> list[StoredLease]:
        return [lease for lease in self.leases if lease.expires > self.now]

    def infos(self, name: str, alias: str, prefix: str = "") -> list[LockInfo]:
        return [lease.info(name, alias, lease.expires - self.now, prefix) for lease in self.live_leases]

    @property
    def first_to_end(self) -> StoredLease:
        """The lease that ends first. There must be one."""
        return min(self.leases, key=attrgetter("expires"))

    def lease_of(self, token: str) -> StoredLease | None:
        return next((lease for lease in self.leases if lease.token == token), None)

    def _expiry_of(self, waiter: Waiter) -> int:
        return waiter.seen + microseconds(self.timing.waiter_expires_after)

    def is_alive(self, waiter: Waiter) -> bool:
        return self._expiry_of(waiter) > self.now

    @property
    def live_waiters(self) -> list[Waiter]:
        return [waiter for waiter in self.waiters if self.is_alive(waiter)]

    def drop_expired(self) -> None:
        """A waiter that no longer looks loses its place until it looks again."""
        for lease in [lease for lease in self.leases if lease.expires <= self.now]:
            self.end(lease)
        self.waiters = self.live_waiters
        self.retired = {token: expires for token, expires in self.retired.items() if expires > self.now}

    def enqueue(self, waiter: Waiter) -> None:
        self.dequeue(waiter.token)
        self.waiters = sorted([*self.waiters, waiter], key=lambda one: one.place)

    def dequeue(self, token: str) -> None:
        self.waiters = [waiter for waiter in self.waiters if waiter.token != token]

    def next_place(self) -> int:
        return max(self.now, self.version + 1, self.fence + 1, *(waiter.place + 1 for waiter in self.waiters))

    def next_fence(self) -> int:
        return max(self.fence + 1, self.now)

    def waiters_for_expiry(self) -> list[Waiter]:
        """The first in the queue, if a lease ends before its next look: it must learn this, to look at that moment."""
        soon = self.now + microseconds(self.timing.look_interval)
        return self.waiters[:1] if self.leases and self.first_to_end.expires < soon else []

    def renew(self, token: str, ttl: int) -> bool:
        """Let the lease last ``ttl`` microseconds from now, or longer if it did. False: the token does not hold it."""
        lease = self.lease_of(token)
        if lease is None or lease.state != HELD or lease.expires <= self.now:
            return False
        self.put(replace(lease, expires=max(lease.expires, self.now + ttl)))
        return True

    def put(self, lease: StoredLease) -> None:
        """Put the lease into its slot, in the place of the one there."""
        others = (one for one in self.leases if one.slot != lease.slot)
        self.leases = sorted([*others, lease], key=attrgetter("slot"))

    def grant(self, token: str, state: str, ttl: int, holder: str = "") -> StoredLease:
        """Grant the lowest free slot. ``ttl``: microseconds."""
        self.dequeue(token)
        self.fence = self.next_fence()
        taken = {lease.slot for lease in self.leases}
        slot = next(slot for slot in count(1) if slot not in taken)
        lease = StoredLease(slot, token, state, self.fence, self.now + ttl, holder)
        self.put(lease)
        return lease

    def end(self, lease: StoredLease) -> None:
        self.leases = [one for one in self.leases if one is not lease]
        if lease.slot == 1:
            self.ended = min(lease.expires, self.now)

    def hand_over(self, *, until: str = "") -> list[Waiter]:
        """Grant free slots to the waiters, in their order. Returns these waiters, to be notified.

        It stops at the first waiter for which too many slots are taken, by its own number, and at the waiter of the
        token ``until``: that one and all behind it wait on.
        """
        handed = []
        while self.waiters and len(self.leases) < self.waiters[0].slots and self.waiters[0].token != until:
            first = self.waiters[0]
            self.grant(first.token, CLAIMED, microseconds(self.timing.grant_ttl), first.inbox)
            handed.append(first)
        return handed


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to acquire.

    ``ttl``: microseconds. ``queue``: wait if the lock is busy. ``place``: the one that the waiter had, or 0. ``slots``:
    how many leases the lock may have, with this one. ``most_places``: how many other places there may be if it takes
    one; 0: any number.
    """

    token: str
    ttl: int
    holder: str
    queue: bool
    place: int = 0
    inbox: str = ""
    slots: int = 1
    most_places: int = 0

    @classmethod
    def of(cls, request: LockRequest, queue: bool = False) -> Self:
        return cls(
            request.token, microseconds(request.ttl), request.holder.to_text(), queue, int(request.place or 0),
            request.inbox, request.slots, request.most_places,
        )  # fmt: skip

    def waiter(self, place: int, now: int) -> Waiter:
        return Waiter(place, self.token, self.inbox, now, self.slots)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a request. ``notify``: the waiters that must look now. ``place``: the one that the waiter has now.

    ``lease``: the granted lease; or, of the leases in the way, the one that ends first. None: the token is retired, and
    is granted nothing. ``is_crowded``: it got no place, because others have as many as may wait.
    """

    granted: bool
    notify: Sequence[Waiter] = ()
    lease: StoredLease | None = None
    place: int = 0
    is_first: bool = False
    is_crowded: bool = False


def acquire(row: Row, attempt: Attempt) -> Decision:
    row.drop_expired()
    token = attempt.token
    mine = row.lease_of(token)
    if token in row.retired or (mine and mine.state == RESTING):
        return Decision(False)
    if mine:
        mine = grant(row, attempt)
        return Decision(True, row.waiters_for_expiry(), mine)
    if attempt.place:
        row.enqueue(attempt.waiter(attempt.place, row.now))
    notify = row.hand_over(until=token)  # first, free slots go to the waiters before it
    is_turn = not row.waiters or row.waiters[0].token == token
    if is_turn and len(row.leases) < attempt.slots:
        mine = grant(row, attempt)
        notify += row.hand_over()
        return Decision(True, notify + row.waiters_for_expiry(), mine)
    place = attempt.place or next((waiter.place for waiter in row.waiters if waiter.token == token), 0)
    is_crowded = attempt.queue and not place and 0 < attempt.most_places <= len(row.waiters)
    queues = attempt.queue and not is_crowded
    place = (place or row.next_place()) if queues else 0
    if queues:
        row.enqueue(attempt.waiter(place, row.now))
    else:
        row.dequeue(token)
        notify += row.hand_over()
    is_first = bool(row.waiters) and row.waiters[0].token == token
    if not is_first and (notify or not queues):  # the first one knows already, unless it has just become the first
        notify += row.waiters_for_expiry()
    return Decision(False, notify, row.first_to_end, place, is_first, is_crowded)


def grant(row: Row, attempt: Attempt) -> StoredLease:
    """Grant a free slot, or again the lease that the token has."""
    if mine := row.lease_of(attempt.token):
        kept_until = mine.expires if mine.state == HELD else 0  # a claim is kept for its waiter, and not for its TTL
        expires = max(kept_until, row.now + attempt.ttl)
        row.put(mine := replace(mine, state=HELD, holder=attempt.holder, expires=expires))
        row.dequeue(attempt.token)
        return mine
    return row.grant(attempt.token, HELD, attempt.ttl, attempt.holder)


def confirm(row: Row, attempt: Attempt) -> Decision:
    """Grant again the lease that the token has, or was handed; nothing if it has none."""
    row.drop_expired()
    mine = row.lease_of(attempt.token)
    if mine is None or mine.state == RESTING:
        return Decision(False)
    return Decision(True, lease=grant(row, attempt))


def exchange(row: Row, old: str, attempt: Attempt, retire: int = 0) -> Decision:
    """As ``acquire()``; but if the token ``old`` holds a lease, the attempt gets its slot, also if others wait.

    ``retire``: microseconds for which ``old`` is granted nothing, because a command that carries it may still arrive.
    """
    token = attempt.token
    row.drop_expired()
    if retire:
        row.retired[old] = row.now + retire
    theirs = row.lease_of(old)
    if theirs is None or theirs.state != HELD or token in row.retired or row.lease_of(token):
        return acquire(row, attempt)
    row.fence = row.next_fence()
    mine = StoredLease(theirs.slot, token, HELD, row.fence, row.now + attempt.ttl, attempt.holder)
    row.put(mine)
    return Decision(True, row.waiters_for_expiry(), mine)


def is_free_for(row: Row, attempt: Attempt) -> bool:
    """Whether ``acquire()`` would grant it without overtaking a waiter."""
    row.drop_expired()
    mine = row.lease_of(attempt.token)
    if attempt.token in row.retired or (mine and mine.state == RESTING):
        return False
    return mine is not None or (not row.waiters and len(row.leases) < attempt.slots)


def release(row: Row, token: str, cooldown: int = 0, retire: int = 0, force: bool = False) -> Decision:
    """End a lease, give a grant back or leave the queue. The decision is ``granted`` if the token held the lock.

    ``cooldown``: microseconds for which the slot stays taken. ``retire``: microseconds for which the token is granted
    nothing, because a command that carries it may still arrive. ``force``: free the slot even in its cooldown.
    """
    row.drop_expired()
    row.dequeue(token)
    if retire:
        row.retired[token] = row.now + retire
    mine = row.lease_of(token)
    if mine and cooldown and mine.state == HELD:
        row.put(replace(mine, state=RESTING, expires=row.now + cooldown))
    elif mine and (mine.state != RESTING or force):
        row.end(mine)
    notify = row.hand_over()
    return Decision(mine is not None, notify + row.waiters_for_expiry())


def waiters_to_text(waiters: list[Waiter]) -> str:
    """Place, seen, token, inbox, slots and thread of each, in the order of their places."""
    return "".join(
        f"{one.place:0{DIGITS}}{one.seen:0{DIGITS}}{one.token:<{TOKEN_LENGTH}}"
        + end_of_record(one.inbox, one.slots, one.thread)
        for one in waiters
    )


def end_of_record(inbox: str, slots: int = 1, thread: str = "") -> str:
    """The part of a record after the token."""
    return f"{inbox:<{INBOX_LENGTH}}{slots:0{SLOTS_LENGTH}}{thread:<{THREAD_LENGTH}}"


def waiters_from_text(text: str) -> list[Waiter]:
    """Raises ValueError for a text that ``waiters_to_text`` did not write."""
    if len(text) % RECORD_LENGTH:
        raise ValueError(f"not waiters: {text[:80]!r}")
    return [_waiter(text[start : start + RECORD_LENGTH]) for start in range(0, len(text), RECORD_LENGTH)]


def _waiter(record: str) -> Waiter:
    if not (found := RECORD.fullmatch(record)):
        raise ValueError(f"not a waiter: {record!r}")
    place, seen, token, inbox, slots, thread = found.groups()
    return Waiter(int(place), token.rstrip(), inbox.rstrip(), int(seen), int(slots), thread.rstrip())


def leases_to_text(leases: Sequence[StoredLease]) -> str:
    return json.dumps([astuple(lease) for lease in leases], separators=(",", ":")) if leases else ""


def leases_from_text(text: str) -> list[StoredLease]:
    """Raises ValueError for a text that ``leases_to_text`` did not write."""
    try:
        leases = [StoredLease(*fields) for fields in (json.loads(text) if text else [])]
    except (RecursionError, TypeError):
        raise ValueError(f"not leases: {text[:80]!r}") from None
    for lease in leases:
        are_numbers = all(type(one) is int and 0 <= one < 2**63 for one in (lease.slot, lease.fence, lease.expires))
        are_texts = all(isinstance(one, str) for one in (lease.token, lease.holder))
        if not (are_numbers and are_texts and lease.slot and lease.state in (HELD, CLAIMED, RESTING)):
            raise ValueError(f"not leases: {text[:80]!r}")
    return leases


def retired_to_text(retired: dict[str, int]) -> str:
    return json.dumps(retired, separators=(",", ":")) if retired else ""


def retired_from_text(text: str) -> dict[str, int]:
    """Raises ValueError for a text that ``retired_to_text`` did not write."""
    try:
        found = json.loads(text) if text else {}
    except RecursionError:
        found = None
    if isinstance(found, dict) and all(type(expires) is int and 0 <= expires < 2**63 for expires in found.values()):
        return found
    raise ValueError(f"not retired tokens: {text[:80]!r}")
