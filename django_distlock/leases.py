"""What a lock is made of: tickets, grants, leases, who holds them, and until when."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, Protocol, Self

from . import signals
from .exceptions import LockLost, LockNotHeld

if TYPE_CHECKING:
    from django.dispatch import Signal

    from .backends.base import BaseLockBackend

logger = logging.getLogger("django_distlock")

if hasattr(time, "CLOCK_BOOTTIME"):

    def clock() -> float:
        """Seconds that also pass while the machine sleeps, as they do for the store."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    clock = time.monotonic


def safe_deadline(sent_at: float, ttl: float) -> float:
    """Until when a lease asked for at ``sent_at`` certainly holds.

    The store's count began later than ours; its clock may run faster. The allowance for that drift,
    1 % of the TTL and 2 ms, is the one of the Redlock algorithm.
    """
    return sent_at + ttl * 0.99 - 0.002


TOKEN_LENGTH = 26


def new_token() -> str:
    """104 random bits from the system, so that tokens never repeat, across fork neither."""
    return secrets.token_hex(TOKEN_LENGTH // 2)


def digest(token: str) -> str:
    """Names a lease where the token itself must stay secret: pages, logs, URLs."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def current_execution() -> object:
    """The task that runs, else the thread: the owner of what it acquires."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()


def _program() -> str:
    """What this process was started as, without arguments that may be secret: "manage.py migrate"."""
    name = PurePath(sys.argv[0]).name if sys.argv else ""
    if name == "__main__.py":
        name = PurePath(sys.argv[0]).parent.name
    return f"{name} {sys.argv[1]}" if name in ("manage.py", "django-admin") and len(sys.argv) > 1 else name


_hostname = socket.gethostname()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lock: host, process, thread or task, what it is doing, and since when (seconds of Unix time)."""

    host: str
    pid: int
    thread: str
    label: str
    since: float

    @classmethod
    def here(cls, label: str = "") -> Self:
        execution = current_execution()
        name = execution.get_name() if isinstance(execution, asyncio.Task) else execution.name  # type: ignore[attr-defined]
        return cls(_hostname, os.getpid(), name, label or _program(), time.time())

    def to_text(self) -> str:
        return json.dumps([self.host, self.pid, self.thread, self.label, round(self.since, 3)], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises ValueError for a text that ``to_text`` did not write."""
        match json.loads(text):
            case [str(host), int(pid), str(thread), str(label), int() | float() as since]:
                return cls(host, pid, thread, label, since)
        raise ValueError(f"not a holder: {text!r:.80}")

    def __str__(self) -> str:
        return f"{self.label} (pid {self.pid} on {self.host}, {self.thread})"


@dataclass(slots=True)
class Ticket:
    """One caller's request for one name; the same token goes with every attempt.

    ``unanswered``: a command with this token got no reply and may still arrive at the store.
    """

    name: str
    ttl: float
    holder: Holder
    token: str = field(default_factory=new_token, repr=False)
    unanswered: bool = False

    def anew(self) -> Ticket:
        """The same request with another token, after this one was given back."""
        return replace(self, token=new_token(), unanswered=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """The store's yes. ``sent_at``: when the answered attempt was sent, on ``clock()``."""

    fence: int
    sent_at: float


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock as the store shows it now.

    ``remaining``: seconds the lease has left. ``resting``: released already, kept for its ``min_hold``.
    """

    name: str
    using: str
    holder: Holder | None
    fence: int
    remaining: float
    resting: bool = False
    token: str = field(default="", repr=False)

    @property
    def digest(self) -> str:
        return digest(self.token)

    @property
    def granted_at(self) -> datetime | None:
        return datetime.fromtimestamp(self.holder.since, UTC) if self.holder else None


SHORTEST_TTL = 0.01
LONGEST_TTL = 10 * 366 * 86_400.0


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST_TTL


def check_ttl(ttl: object) -> float:
    """Return the TTL in seconds, or raise ValueError that says what one looks like."""
    if not _is_seconds(ttl) or ttl < SHORTEST_TTL:  # type: ignore[operator]
        raise ValueError(
            f"ttl is {ttl!r}. It is the number of seconds that the store keeps a lease nobody renews,"
            f" from {SHORTEST_TTL} to ten years; work that takes longer is covered by renew=True."
        )
    return float(ttl)  # type: ignore[arg-type]


def check_wait(wait: object) -> float | None:
    """Return the wait in seconds or None, or raise ValueError."""
    if wait is not None and not _is_seconds(wait):
        raise ValueError(
            f"wait is {wait!r}. It is the number of seconds to wait for a busy lock: 0 does not wait,"
            " None waits as long as it takes."
        )
    return wait  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of one lock, in seconds where they are times; what they mean is told by ``lock()``."""

    ttl: float = 30.0
    wait: float | None = 10.0
    renew: bool = True
    max_hold: float | None = 3600.0
    min_hold: float = 0.0
    reentrant: bool = False
    on_lost: Literal["raise", "log"] = "raise"
    label: str = ""

    def __post_init__(self) -> None:
        check_ttl(self.ttl)
        check_wait(self.wait)
        if self.max_hold is not None and not (_is_seconds(self.max_hold) and self.max_hold > 0):
            raise ValueError(
                f"max_hold is {self.max_hold!r}. It is the number of seconds after which a lease is renewed no more;"
                " None renews for as long as the process lives, even if the holder hangs."
            )
        if not _is_seconds(self.min_hold):
            raise ValueError(
                f"min_hold is {self.min_hold!r}. It is the number of seconds for which a lock stays taken after it"
                " was granted, however soon it is released; 0 frees it at once."
            )
        if self.on_lost not in ("raise", "log"):
            raise ValueError(f"on_lost is {self.on_lost!r}; choose 'raise' or 'log'.")
        for flag in ("renew", "reentrant"):
            if not isinstance(getattr(self, flag), bool):
                raise ValueError(f"{flag} is {getattr(self, flag)!r}; choose True or False.")
        if not isinstance(self.label, str):
            raise ValueError(f"label is {self.label!r}; it is a text for people that says what holds the lock.")


class Keeper(Protocol):
    """Who keeps leases alive and cleans up behind callers that cannot (see renewal.py)."""

    def drop(self, lease: Lease) -> bool: ...
    def abandon(self, ticket: Ticket) -> None: ...


class State(enum.StrEnum):
    """What the holder may believe of its lease."""

    HELD = "held"
    UNKNOWN = "unknown"  # the store does not answer; the lease stands until its deadline
    LOST = "lost"
    RELEASED = "released"


class Lease:
    """One acquisition of one lock. Ends by ``release()``, or when its TTL runs out unrenewed.

    ``fence`` grows with every grant of the name: a resource that remembers the largest number it was
    shown can refuse a holder that was overtaken.
    """

    def __init__(self, backend: BaseLockBackend, ticket: Ticket, grant: Grant, terms: Terms, keeper: Keeper) -> None:
        self.backend = backend
        self.ticket = ticket
        self.terms = terms
        self.fence = grant.fence
        self.owner = current_execution()
        self.pid = os.getpid()
        self.entries = 1  # how often a reentrant lock was entered by its owner
        self.renews = terms.renew
        self._keeper = keeper
        self._granted_clock = clock()
        self._state = State.HELD
        self.deadline = 0.0
        self.extend(grant.sent_at, ticket.ttl)

    @property
    def name(self) -> str:
        return self.ticket.name

    @property
    def using(self) -> str:
        return self.backend.alias

    @property
    def token(self) -> str:
        return self.ticket.token

    @property
    def holder(self) -> Holder:
        return self.ticket.holder

    @property
    def granted_at(self) -> datetime:
        return datetime.fromtimestamp(self.holder.since, UTC)

    @property
    def ttl(self) -> float:
        return self.ticket.ttl

    @property
    def remaining(self) -> float:
        """Seconds until the holder must stop unless the lease is renewed before; 0.0 once it ended."""
        return max(0.0, self.deadline - clock()) if self._is_live() else 0.0

    @property
    def state(self) -> State:
        """Told from what this process knows, without asking the store. In a forked child: lost."""
        if self._state in (State.HELD, State.UNKNOWN) and not self._is_live():
            return State.LOST
        return self._state

    def _is_live(self) -> bool:
        return self._state in (State.HELD, State.UNKNOWN) and clock() < self.deadline and self.pid == os.getpid()

    def ensure_held(self) -> None:
        """Return if the lease certainly holds at this moment, by the local clock; no I/O.

        Raises LockLost, or LockNotHeld after a release.
        """
        if self._is_live():
            return
        if self._state is State.RELEASED:
            raise LockNotHeld(f"The lock {self.name!r} was released already.")
        raise self._lost_error()

    def renew(self, ttl: float | None = None) -> None:
        """Let the lease last ``ttl`` seconds (default: its TTL) from now; it is never shortened.

        Raises LockLost when the store says that it ended, LockBackendError when it does not answer.
        """
        ttl = self._renewable(ttl)
        sent_at = clock()
        [renewed] = self.backend.renew([(self.ticket, ttl)])
        self._was_renewed(renewed, sent_at, ttl)

    async def arenew(self, ttl: float | None = None) -> None:
        ttl = self._renewable(ttl)
        sent_at = clock()
        [renewed] = await self.backend.arenew([(self.ticket, ttl)])
        self._was_renewed(renewed, sent_at, ttl)

    def _renewable(self, ttl: float | None) -> float:
        self.ensure_held()
        return self.ttl if ttl is None else check_ttl(ttl)

    def _was_renewed(self, renewed: bool, sent_at: float, ttl: float) -> None:
        if renewed:
            self.extend(sent_at, ttl)
        elif self._keeper.drop(self):
            self._lose("the store no longer knows it: its data was lost, or somebody freed the lock")
        if not self._is_live():
            raise self._lost_error()

    # For the keeper

    def extend(self, sent_at: float, ttl: float) -> None:
        """The store promised ``ttl`` seconds, asked at ``sent_at``."""
        self.deadline = max(self.deadline, safe_deadline(sent_at, ttl))
        self.due = sent_at + self.ttl / 3 if self.renews else self.deadline
        self._state = State.HELD

    def doubt(self, retry_at: float) -> None:
        """The store did not answer."""
        self.due = min(retry_at, self.deadline)
        self._state = State.UNKNOWN

    def renewal_ttl(self, now: float) -> float:
        """What to ask the store for. The last renewal before ``max_hold`` is a shorter one."""
        if self.terms.max_hold is None:
            return self.ttl
        return max(SHORTEST_TTL, min(self.ttl, self._granted_clock + self.terms.max_hold - now))

    def forsake(self) -> None:
        """Nobody is left to release it: let it run out."""
        self.renews = False
        self.due = self.deadline

    def lose(self, reason: str) -> None:
        """The lease is over without a release: called once, by whoever dropped it from its keeper."""
        self._state = State.LOST
        logger.error("Lock %r (%s) was lost: %s. Held by %s.", self.name, self.using, reason, self.holder)

    def announce_loss(self, reason: str) -> None:
        signals.announce(self._news(signals.lock_lost, reason=reason))

    def end(self) -> float:
        """It is being released by whoever dropped it. Returns the seconds that the lock rests."""
        self._state = State.RELEASED
        return max(0.0, self._granted_clock + self.terms.min_hold - clock())

    def release(self) -> None:
        """Give the lock up, for others at once or after ``min_hold``.

        Raises LockLost when the lease had ended before, LockNotHeld when it was released already or
        belongs to the parent of a forked process, LockBackendError when the store does not answer;
        the release is then tried again in the background until the TTL has passed.
        """
        rest = self._begin_release()
        try:
            released = self.backend.release(self.ticket, rest)
        except BaseException:
            self._keeper.abandon(self.ticket)
            raise
        self._end_release(released)
        signals.announce(self._news(signals.lock_released))

    async def arelease(self) -> None:
        rest = self._begin_release()
        try:
            released = await self.backend.arelease(self.ticket, rest)
        except BaseException:
            self._keeper.abandon(self.ticket)
            raise
        self._end_release(released)
        await signals.aannounce(self._news(signals.lock_released))

    def _begin_release(self) -> float:
        if self.pid != os.getpid():
            raise LockNotHeld(
                f"The lock {self.name!r} is held by process {self.pid}, which forked this one; only that one releases it."
            )
        state = self.state
        dropped = self._keeper.drop(self)
        if state is State.LOST:
            if dropped:
                self._lose("its TTL ran out")
                self._keeper.abandon(self.ticket)
            raise self._lost_error()
        if not dropped:
            raise LockNotHeld(f"The lock {self.name!r} was released already.")
        return self.end()

    def _end_release(self, released: bool) -> None:
        if not released:
            self._lose(
                "the store no longer knew it when it was released: its data was lost, or somebody freed the lock"
            )
            raise self._lost_error()

    def _lose(self, reason: str) -> None:
        self.lose(reason)
        self.announce_loss(reason)

    def _news(self, signal: Signal, **about: object) -> signals.News:
        return signals.News(
            signal, type(self.backend), {"name": self.name, "using": self.using, "lease": self, **about}
        )

    def _lost_error(self) -> LockLost:
        return LockLost(
            f"The lock {self.name!r} ({self.using}) was lost while {self.holder} held it: somebody else may have"
            " held it since. Undo or check what was done, or compare fencing numbers where it is stored."
        )

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} using {self.using!r} fence={self.fence} {self.state}>"
