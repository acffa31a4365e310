"""The algorithm of a lock as pure functions on its row, without a store.

Each function changes the row it is given and returns the decision. A database then writes the change only if the row
is still the one that was read (compare-and-swap), so that it holds no lock of its own between two statements, and a
command that arrives late changes nothing. Local memory changes its rows one at a time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import ceil

from ...types import TOKEN_LENGTH
from .timing import Timing

HELD, CLAIMED, RESTING, FREE = "h", "c", "r", "f"

# Of a waiter's record, which has always the same length, so that SQL finds its parts by their position.
DIGITS = 16  # microseconds of Unix time, for another two hundred years
INBOX_LENGTH = 12
SLOTS_LENGTH = 4
THREAD_LENGTH = 16  # 64 bits in hexadecimal
RECORD_LENGTH = DIGITS + DIGITS + TOKEN_LENGTH + INBOX_LENGTH + SLOTS_LENGTH + THREAD_LENGTH
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

    ``seen``: when the waiter last showed that it is alive. ``slots``: how many it wants; ``thread``: the thread or task
    that waits, unknown yet.
    """

    place: int
    token: str
    inbox: str
    seen: int
    slots: int = 1
    thread: str = ""


@dataclass(slots=True)
class Row:
    """One lock. Moments are microseconds on the clock of the store; ``now`` is when the row was read."""

    now: int
    version: int = 0  # 0: there is no such row yet
    token: str = ""
    state: str = FREE
    fence: int = 0
    expires: int = 0
    holder: str = ""  # of a claim: the inbox of the waiter
    waiters: list[Waiter] = field(default_factory=list)  # in the order of their places
    retired: dict[str, int] = field(default_factory=dict)  # token -> moment at which it is forgotten
    timing: Timing = field(default_factory=Timing, repr=False)

    @property
    def is_taken(self) -> bool:
        return self.state != FREE and self.expires > self.now

    @property
    def careful_until(self) -> int:
        """When the last waiter or retired token counts no more.

        Until then the fast path takes no free lock that has waiters.
        """
        return max([0, *map(self._expiry_of, self.waiters), *self.retired.values()])

    def is_held_by(self, token: str) -> bool:
        return self.is_taken and self.token == token

    def _expiry_of(self, waiter: Waiter) -> int:
        return waiter.seen + microseconds(self.timing.waiter_expires_after)

    def is_alive(self, waiter: Waiter) -> bool:
        return self._expiry_of(waiter) > self.now

    @property
    def live_waiters(self) -> list[Waiter]:
        return [waiter for waiter in self.waiters if self.is_alive(waiter)]

    def drop_expired(self) -> None:
        """A waiter that does not look any more loses its place, until it looks again."""
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

    def waiter_for_expiry(self) -> Waiter | None:
        """The first in the queue if the lease ends before its next look: it must know, to look at that moment."""
        is_soon = self.expires - self.now < microseconds(self.timing.look_interval)
        return self.waiters[0] if self.waiters and is_soon else None

    def renew(self, token: str, ttl: int) -> bool:
        """Let it last ``ttl`` microseconds from now, never less than it had. False: the token does not hold it."""
        if not self.is_held_by(token) or self.state != HELD:
            return False
        self.expires = max(self.expires, self.now + ttl)
        return True

    def grant(self, token: str, state: str, ttl: int, holder: str = "") -> None:
        """``ttl``: microseconds."""
        self.dequeue(token)
        self.token, self.state, self.holder = token, state, holder
        self.fence = self.next_fence()
        self.expires = self.now + ttl

    def hand_over(self) -> Waiter | None:
        """Grant the lock to the first in the queue, and return it, to be notified; without a queue free the lock."""
        if self.waiters:
            first = self.waiters[0]
            self.grant(first.token, CLAIMED, microseconds(self.timing.grant_ttl), first.inbox)
            return first
        self.token, self.state, self.holder = "", FREE, ""
        self.expires = min(self.expires, self.now)
        return None


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to acquire.

    ``ttl``: microseconds. ``queue``: wait if the lock is busy. ``place``: the one that the waiter had, or 0.
    """

    token: str
    ttl: int
    holder: str
    queue: bool
    place: int = 0
    inbox: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a request. ``notify``: the waiter that is to look now. ``place``: the one that the request has now.

    ``is_retired``: the token gets nothing more.
    """

    granted: bool
    notify: Waiter | None = None
    place: int = 0
    is_first: bool = False
    is_retired: bool = False


def acquire(row: Row, attempt: Attempt) -> Decision:
    row.drop_expired()
    token = attempt.token
    if token in row.retired or (row.is_held_by(token) and row.state == RESTING):
        return Decision(False, is_retired=True)
    if row.is_held_by(token):
        if row.state == CLAIMED:
            row.expires = row.now + attempt.ttl  # also where it was kept for longer until it was taken
        row.state, row.holder = HELD, attempt.holder
        row.renew(token, attempt.ttl)
        row.dequeue(token)
        return Decision(True, row.waiter_for_expiry())
    notify = None
    if not row.is_taken:
        if attempt.place:
            row.enqueue(Waiter(attempt.place, token, attempt.inbox, row.now))
        if not row.waiters or row.waiters[0].token == token:
            row.grant(token, HELD, attempt.ttl, attempt.holder)
            return Decision(True, row.waiter_for_expiry())
        notify = row.hand_over()
    if not attempt.queue:
        row.dequeue(token)
        return Decision(False, notify or row.waiter_for_expiry())
    mine = next((waiter.place for waiter in row.waiters if waiter.token == token), 0)
    place = attempt.place or mine or row.next_place()
    row.enqueue(Waiter(place, token, attempt.inbox, row.now))
    return Decision(False, notify, place, is_first=row.waiters[0].token == token)


def release(row: Row, token: str, cooldown: int = 0, retire: int = 0, force: bool = False) -> Decision:
    """End a lease, give a grant back or leave the queue. The decision is ``granted`` if the token held the lock.

    ``cooldown``: microseconds for which the lock stays taken. ``retire``: microseconds for which the token gets
    nothing, because a command that carries it may still arrive. ``force``: free the lock even in its cooldown.
    """
    row.drop_expired()
    row.dequeue(token)
    if retire:
        row.retired[token] = row.now + retire
    if not row.is_held_by(token):
        return Decision(False, row.waiter_for_expiry())
    if row.state == RESTING and not force:
        return Decision(True)
    if cooldown and row.state == HELD:
        row.state, row.expires = RESTING, row.now + cooldown
        return Decision(True, row.waiter_for_expiry())
    return Decision(True, row.hand_over())


def waiters_to_text(waiters: list[Waiter]) -> str:
    """Place, seen, token, inbox, slots and thread of each, in the order of their places."""
    return "".join(
        f"{one.place:0{DIGITS}}{one.seen:0{DIGITS}}{one.token:<{TOKEN_LENGTH}}"
        + end_of_record(one.inbox, one.slots, one.thread)
        for one in waiters
    )


def end_of_record(inbox: str, slots: int = 1, thread: str = "") -> str:
    """What comes after the token."""
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
