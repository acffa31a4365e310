"""What becomes of a lock's row: the whole algorithm, without a store.

Each function changes the row it is given and says what to answer. A database then writes the change only if the row
is still the one that was read (compare-and-swap), so that none of its locks is held while a process thinks, and
a command that arrives late changes nothing. Local memory changes its rows one at a time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from ...types import TOKEN_LENGTH

GRANT_TTL = 2_000_000  # microseconds a waiter has to take what it was handed: two looks, because a hint can be lost
LOOK = 1_000_000  # microseconds after which each waiter looks by itself
ALIVE = 2_500_000  # microseconds after its last look for which a waiter is taken for living: it looks each second

HELD, CLAIMED, RESTING, FREE = "h", "c", "r", "f"

# Of a waiter's record, which has always the same length, so that SQL finds its parts by their position.
DIGITS = 16  # microseconds of Unix time, for another two hundred years
INBOX_LENGTH = 12
RECORD_LENGTH = DIGITS + DIGITS + TOKEN_LENGTH + INBOX_LENGTH
RECORD = re.compile(f"([0-9]{{{DIGITS}}})([0-9]{{{DIGITS}}})(.{{{TOKEN_LENGTH}}})(.{{{INBOX_LENGTH}}})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A place in the queue. ``seen``: when it looked last."""

    place: int
    token: str
    inbox: str
    seen: int


@dataclass(slots=True)
class Row:
    """One lock. Moments are microseconds by the clock of the store, ``now`` is when the row was read."""

    now: int
    version: int = 0  # 0: there is no such row yet
    token: str = ""
    state: str = FREE
    fence: int = 0
    expires: int = 0
    holder: str = ""  # of a claim: the inbox of the waiter that was told
    waiters: list[Waiter] = field(default_factory=list)  # in the order of their places
    retired: dict[str, int] = field(default_factory=dict)  # token -> until when

    @property
    def is_taken(self) -> bool:
        return self.state != FREE and self.expires > self.now

    @property
    def careful_until(self) -> int:
        """Until then more counts than token and expiry, and requests go by this module."""
        return max(
            [0, *(waiter.seen + ALIVE for waiter in self.waiters), *self.retired.values()],
        )

    def is_held_by(self, token: str) -> bool:
        return self.is_taken and self.token == token

    def is_alive(self, waiter: Waiter) -> bool:
        return waiter.seen + ALIVE > self.now

    @property
    def alive(self) -> list[Waiter]:
        return [waiter for waiter in self.waiters if self.is_alive(waiter)]

    def forget_the_dead(self) -> None:
        """A waiter that does not look any more loses its place, until it looks again."""
        self.waiters = self.alive
        self.retired = {token: until for token, until in self.retired.items() if until > self.now}

    def enqueue(self, waiter: Waiter) -> None:
        self.leave(waiter.token)
        self.waiters = sorted([*self.waiters, waiter], key=lambda one: one.place)

    def leave(self, token: str) -> None:
        self.waiters = [waiter for waiter in self.waiters if waiter.token != token]

    def next_place(self) -> int:
        return max(self.now, self.version + 1, self.fence + 1, *(waiter.place + 1 for waiter in self.waiters))

    def next_fence(self) -> int:
        return max(self.fence + 1, self.now)

    def in_time(self) -> Waiter | None:
        """The first in the queue, who looks at the end of the lease, if that comes before its next look."""
        return self.waiters[0] if self.waiters and self.expires - self.now < LOOK else None

    def renew(self, token: str, ttl: int) -> bool:
        """Whether the token holds the lock, which then lasts that many microseconds, never less than it had."""
        if not self.is_held_by(token) or self.state != HELD:
            return False
        self.expires = max(self.expires, self.now + ttl)
        return True

    def give(self, token: str, state: str, ttl: int, holder: str = "") -> None:
        """``ttl``: microseconds."""
        self.leave(token)
        self.token, self.state, self.holder = token, state, holder
        self.fence = self.next_fence()
        self.expires = self.now + ttl

    def hand_on(self) -> Waiter | None:
        """To the first in the queue, who is to be told; without a queue the lock is free."""
        if self.waiters:
            first = self.waiters[0]
            self.give(first.token, CLAIMED, GRANT_TTL, first.inbox)
            return first
        self.token, self.state, self.holder = "", FREE, ""
        self.expires = min(self.expires, self.now)
        return None


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to acquire. ``queue``: wait if busy; ``place``: the one it had, 0 for none; ``ttl``: microseconds."""

    token: str
    ttl: int
    holder: str
    queue: bool
    place: int = 0
    inbox: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request comes to. ``told``: a waiter that is to look now; ``place``: the one it has now."""

    granted: bool
    told: Waiter | None = None
    place: int = 0
    is_first: bool = False
    is_retired: bool = False


def acquire(row: Row, attempt: Attempt) -> Decision:
    row.forget_the_dead()
    token = attempt.token
    if token in row.retired or (row.is_held_by(token) and row.state == RESTING):
        return Decision(False, is_retired=True)
    if row.is_held_by(token):
        row.state, row.holder = HELD, attempt.holder
        row.renew(token, attempt.ttl)
        row.leave(token)
        return Decision(True, row.in_time())
    told = None
    if not row.is_taken:
        if attempt.place:
            row.enqueue(Waiter(attempt.place, token, attempt.inbox, row.now))
        if not row.waiters or row.waiters[0].token == token:
            row.give(token, HELD, attempt.ttl, attempt.holder)
            return Decision(True, row.in_time())
        told = row.hand_on()
    if not attempt.queue:
        row.leave(token)
        return Decision(False, told or row.in_time())
    mine = next((waiter.place for waiter in row.waiters if waiter.token == token), 0)
    place = attempt.place or mine or row.next_place()
    row.enqueue(Waiter(place, token, attempt.inbox, row.now))
    return Decision(False, told, place, is_first=row.waiters[0].token == token)


def release(row: Row, token: str, cooldown: int = 0, retire: int = 0, force: bool = False) -> Decision:
    """Give up a lease, hand a grant back or leave the queue. ``granted``: the token held the lock.

    ``cooldown``: microseconds for which the lock stays taken. ``retire``: microseconds for which the token gets
    nothing, because a command that carries it may still arrive. ``force``: the lock is freed even in its cooldown.
    """
    row.forget_the_dead()
    row.leave(token)
    if retire:
        row.retired[token] = row.now + retire
    if not row.is_held_by(token):
        return Decision(False, row.in_time())
    if row.state == RESTING and not force:
        return Decision(True)
    if cooldown and row.state == HELD:
        row.state, row.expires = RESTING, row.now + cooldown
        return Decision(True, row.in_time())
    return Decision(True, row.hand_on())


def waiters_to_text(waiters: list[Waiter]) -> str:
    """Place, seen, token and inbox of each, in the order of their places."""
    return "".join(
        f"{one.place:0{DIGITS}}{one.seen:0{DIGITS}}{one.token:<{TOKEN_LENGTH}}{one.inbox:<{INBOX_LENGTH}}"
        for one in waiters
    )


def waiters_from_text(text: str) -> list[Waiter]:
    """Raises ValueError for a text that ``waiters_to_text`` did not write."""
    if len(text) % RECORD_LENGTH:
        raise ValueError(f"not waiters: {text[:80]!r}")
    return [_waiter(text[start : start + RECORD_LENGTH]) for start in range(0, len(text), RECORD_LENGTH)]


def _waiter(record: str) -> Waiter:
    if not (found := RECORD.fullmatch(record)):
        raise ValueError(f"not a waiter: {record!r}")
    place, seen, token, inbox = found.groups()
    return Waiter(int(place), token.rstrip(), inbox.rstrip(), int(seen))


def retired_to_text(retired: dict[str, int]) -> str:
    return json.dumps(retired, separators=(",", ":")) if retired else ""


def retired_from_text(text: str) -> dict[str, int]:
    """Raises ValueError for a text that ``retired_to_text`` did not write."""
    try:
        found = json.loads(text) if text else {}
    except RecursionError:
        found = None
    if isinstance(found, dict) and all(type(until) is int and 0 <= until < 2**63 for until in found.values()):
        return found
    raise ValueError(f"not retired tokens: {text[:80]!r}")
