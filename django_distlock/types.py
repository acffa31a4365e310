"""The values that locks and stores exchange: requests, grants, holders, results of checks."""

# Annotations are no texts here: Python would compile the text of each field of a named tuple, which takes long.
import asyncio
import enum
import hashlib
import json
import os
import socket
import sys
import threading
from asyncio import _get_running_loop  # documented, for loops; get_running_loop() raises if none runs
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from .utils import fork
from .utils.clock import clock, wall_clock
from .utils.text import bounded, printable
from .utils.wakeup import WakeEvent

TOKEN_BYTES = 13
TOKEN_LENGTH = 2 * TOKEN_BYTES
NOT_WAITING = 0.0  # the deadline of a caller that does not wait for a lock: it adopts, releases, renews or looks


def new_token() -> str:
    """Returns 104 random bits from the system as hexadecimal digits. So tokens never repeat, not even after a fork."""
    return os.urandom(TOKEN_BYTES).hex()


def digest(token: str) -> str:
    """Returns an id of the lease for places where the token itself must stay secret: pages, logs, URLs."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def current_execution() -> object:
    """Returns the running task, or else the thread: the owner of the locks that it acquires."""
    # Without a running loop, current_task() raises, which takes ten times as long.
    loop = _get_running_loop()
    return (asyncio.current_task(loop) if loop else None) or threading.current_thread()


def execution_kind() -> str:
    return "thread" if isinstance(current_execution(), threading.Thread) else "task"


@lru_cache(maxsize=1)
def program() -> str:
    """Returns how this process was started, without arguments that may be secret: "manage.py migrate"."""
    name = PurePath(sys.argv[0]).name if sys.argv else ""
    if name == "__main__.py":
        name = PurePath(sys.argv[0]).parent.name
    return f"{name} {sys.argv[1]}" if name in ("manage.py", "django-admin") and len(sys.argv) > 1 else name


_hostname = socket.gethostname()
# json.loads() and json.dumps() call these; direct calls are faster, for lists of very many holders and for each task.
_decode, _encode = json.JSONDecoder().raw_decode, json.JSONEncoder().encode
new_tuple = tuple.__new__  # it makes a named tuple in a third of the time


LONGEST_LABEL = 200  # characters
LARGEST_PID = 2**32
LATEST = 32_503_680_000.0  # seconds of Unix time: the year 3000, which every calendar can show in every time zone


def shown(text: str) -> str:
    """Returns the text as labels show it: printable, with at most 200 characters."""
    return bounded(printable(text), LONGEST_LABEL)


@lru_cache(maxsize=256)
def _here(pid: int, thread: str, label: str) -> tuple[str, int, str, str]:
    return _hostname, pid, shown(thread), shown(label or program())


@lru_cache(maxsize=256)
def _around_time(host: str, pid: int, thread: str, label: str, message: str, slots: int) -> tuple[str, str]:
    before = f"[{_encode(host)},{pid},{_encode(thread)},{_encode(label)}"
    behind = f",{_encode(message)},{slots}]" if slots > 1 else f",{_encode(message)}]" if message else "]"
    return before, behind


MOST_SLOTS = 1000  # the largest number of slots of one lock


def _are_more(message: object, slots: object = 1, *others: object) -> bool:
    """Returns whether these values may follow the first five in the text of a holder."""
    are_slots = isinstance(slots, int) and 1 <= slots <= MOST_SLOTS
    return isinstance(message, str) and are_slots and not others


class _HolderFields(NamedTuple):
    host: str
    pid: int
    thread: str
    label: str
    since: float
    message: str = ""
    slots: int = 1


class Holder(_HolderFields):
    """Who has a lock: host, process, thread or task, what it is doing, and since when (seconds of Unix time).

    Its texts are printable and have at most 200 characters each, because clients, and others who write to the store,
    may have chosen them.

    ``message``: the id of the Celery message for which the task runs, which copies of the message share; never shown;
    "" without one. ``slots``: how many holders the lock may have at once, as this one asked for it.
    """

    __slots__ = ()

    def __new__(
        cls, host: str, pid: int, thread: str, label: str, since: float, message: str = "", slots: int = 1
    ) -> Self:
        texts = f"{host}{thread}{label}"
        if len(texts) > LONGEST_LABEL or not texts.isprintable():  # rare; this test is fast, as lists read very many
            host, thread, label = shown(host), shown(thread), shown(label)
        return new_tuple(cls, (host, pid, thread, label, since, message, slots))

    @classmethod
    def here(cls, label: str = "", execution: object = None, message: str = "", slots: int = 1) -> Self:
        execution = execution or current_execution()
        thread = execution.get_name() if isinstance(execution, asyncio.Task) else execution.name  # type: ignore[attr-defined]
        host, pid, thread, label = _here(fork.pid(), thread, label)
        return new_tuple(cls, (host, pid, thread, label, int(wall_clock() * 1000) / 1000, message, slots))

    def from_now(self) -> Self:
        host, pid, thread, label, _, *more = self
        return new_tuple(type(self), (host, pid, thread, label, int(wall_clock() * 1000) / 1000, *more))

    def to_text(self) -> str:
        """Returns the text that stores keep."""
        host, pid, thread, label, since, message, slots = self
        before, behind = _around_time(host, pid, thread, label, message, slots)
        return f"{before},{since:.3f}{behind}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises ValueError for a text that ``to_text`` cannot have written."""
        try:
            found, end = _decode(text)
            if end < len(text):
                found = None
        except RecursionError:
            found = None
        match found:
            case [str() as host, int() as pid, str() as thread, str() as label, int() | float() as since, *more] if (
                0 <= pid <= LARGEST_PID
                and 0 <= since < LATEST  # not true of NaN
                and (not more or _are_more(*more))
            ):
                return cls(host, int(pid), thread, label, round(float(since), 3), *more)
        raise ValueError(f"not a holder: {text[:80]!r}")

    @property
    def process(self) -> str:
        return f"pid {self.pid} on {self.host}, {self.thread}"

    def __str__(self) -> str:
        return f"{self.label} ({self.process})"


def lock_key(prefix: str, name: str) -> str:
    """Returns the key by which a backend knows a lock. ``prefix``: the result of a callable KEY_PREFIX, or ""."""
    return f"{prefix}:{name}" if prefix else name


def place_of(using: str, prefix: str) -> str:
    """Returns, for people, where the locks with this alias and prefix are."""
    return f"{using}, {prefix}" if prefix else using


class LockRequest:
    """One caller's request for one name; the same token goes with every attempt.

    ``prefix``: what a callable KEY_PREFIX answered to its caller; "" where it is a text. ``key``: which lock it is,
    as ``lock_key()`` has it: equal names under two prefixes are two locks.
    ``template``: of the name, as ``Template.normalized`` has it; "" for a name that no values fill.
    ``in_doubt``: a command with this token got no reply and may still arrive at the store.
    ``held_fence``: the number with which its token has the lock already, and is only to be shown with another holder.
    An attempt that fails gives nothing back. 0: it is not held.
    ``ahead``: how many stand before it in the store's queue, where it has to poll.
    ``inbox``: where the store tells this waiter that the lock was handed to it; "" before it queued.
    ``place``: its place in the store's queue, to which it comes back when it was dropped.
    ``deadline``: until when its caller waits, on ``clock()``; NOT_WAITING: a call takes the time of the backend.
    ``ttl``: seconds that the store keeps what it grants, unless it is renewed.
    ``slots``: how many leases the lock may have at once, with this one. ``slot``: the one that was granted last.
    ``longest_ttl``: of a renewal, or of one whose token it has inherited, if that is longer.
    ``takes_by_message``: its caller goes on by the message that hands it the lock, and lets the store confirm it then.
    ``placed_at``: when, on ``clock()``, it asked for the place that it has, if it has not looked since; else -inf.
    ``handed``: the slot and the fencing number of which a message has told. ``is_unconfirmed``: it goes on by that, and
    the store has not confirmed it yet.
    ``is_release_in_doubt``: its release got no reply, and may have been done.
    ``renewal``: the command that renews it, behind what that depends on, because each tick sends the same.
    ``min_hold``: seconds from the grant on for which a store keeps the lock taken that would free it when its holder is
    killed. Where a lease lasts for its TTL in any case, ``ttl`` is at least as long.
    ``max_waiters``: its caller does not wait where so many do already; 0: it waits behind any number.
    ``waits``: it is one of those that wait, and is not turned away by their number any more.
    ``is_inherited``: another waiter of this process goes on with the token and the place.
    ``is_offer``: the store has handed the lock to this token, which nobody here knows any more. Its release hands
    back what is still being handed over, and never ends a lease that somebody has taken since.
    """

    name: str
    key: str
    ttl: float
    holder: Holder
    token: str
    in_doubt: bool
    inbox: str
    place: str
    slots: int
    is_offer: bool
    # Most requests are granted at once, and have nothing of their own but these.
    prefix: str = ""
    template: str = ""
    slot: int = 1
    max_waiters: int = 0
    waits: bool = False
    ahead: int = 0
    held_fence: int = 0
    deadline: float = inf
    longest_ttl: float = 0.0
    min_hold: float = 0.0
    asking: bool = False  # from an attempt until it waits again; it never inherits then
    is_inherited: bool = False
    takes_by_message: bool = False
    placed_at: float = -inf
    handed: tuple[int, int] | None = None
    is_unconfirmed: bool = False
    is_release_in_doubt: bool = False
    renewal: tuple[Any, ...] | None = None
    last_active_at: float = 0.0  # when its caller last did something, in a queue

    def __init__(self, name: str, ttl: float, holder: Holder, token: str = "", **more: Any) -> None:
        self.name = self.key = name
        self.ttl = ttl
        self.holder = holder
        self.token = token or new_token()
        self.in_doubt, self.inbox, self.place, self.slots, self.is_offer = False, "", "", 1, False
        if more:
            if unknown := more.keys() - LockRequest.__annotations__:
                raise TypeError(f"A request has no {', '.join(sorted(unknown))}.")
            self.__dict__.update(more)
            self.key = lock_key(self.prefix, name)

    @property
    def event(self) -> WakeEvent:
        """Wakes its caller. Made when somebody first needs it, in one step: two threads may do so at once."""
        known = self.__dict__
        event: WakeEvent = known.get("_event") or known.setdefault("_event", WakeEvent())
        return event

    def __repr__(self) -> str:
        return f"<LockRequest {self.name!r} of {self.holder}>"

    @property
    def time_left(self) -> float:
        """Seconds for which its caller waits; inf: it says no limit."""
        return inf if self.deadline == NOT_WAITING else self.deadline - clock()

    @property
    def most_places(self) -> int:
        """It takes no place in the store's queue where so many are taken by others; 0: it takes one in any case."""
        return 0 if self.waits else self.max_waiters

    @property
    def retires_for(self) -> float:
        """Seconds for which its token is retired when it leaves: a command that carries it may arrive until then.

        By then, the store has freed what it had for it.
        """
        return max(self.ttl, self.longest_ttl)

    def replace_token(self) -> None:
        """Go on with another token, after this one was given back."""
        self.token, self.in_doubt, self.inbox, self.place = new_token(), False, "", ""
        self.handed, self.placed_at, self.is_release_in_doubt = None, -inf, False

    def copy(self, **changes: Any) -> "LockRequest":
        """A request that is the same but for these, and is woken by itself."""
        attributes = {**self.__dict__, **changes}
        attributes.pop("_event", None)
        attributes.pop("renewal", None)
        attributes.pop("key")
        return LockRequest(**attributes)

    def with_new_token(self) -> "LockRequest":
        """A copy of the request with another token, for a caller that gives this one back. The same event wakes it."""
        new = self.copy(
            token=new_token(), slot=1, in_doubt=False, inbox="", place="", handed=None, placed_at=-inf,
            is_unconfirmed=False, is_release_in_doubt=False, longest_ttl=0.0, asking=False,
        )  # fmt: skip
        vars(new)["_event"] = self.event
        return new

    def inherit(self, other: "LockRequest") -> None:
        """Take over the place in the store of one that stood before."""
        self.longest_ttl = max(self.longest_ttl, other.retires_for)
        # No calls: an exception that a handler of a signal raises must not come in between.
        self.token, self.in_doubt = other.token, other.in_doubt
        self.inbox, self.place, self.placed_at = other.inbox, other.place, -inf
        other.is_inherited = True


class Grant(NamedTuple):
    """The store's yes. ``sent_at``: when the answered attempt was sent, on ``clock()``."""

    fence: int
    sent_at: float
    slot: int = 1


class State(enum.StrEnum):
    """What the holder knows about its lease."""

    HELD = "held"
    UNKNOWN = "unknown"  # the store does not answer; the lease is valid until its deadline
    LOST = "lost"
    RELEASED = "released"
    UNAVAILABLE = "unavailable"  # the store could not be asked; the code runs without the lock, by on_unavailable="run"


class Slot(NamedTuple):
    """One of the leases that a lock may have at once: the name of the lock, and a number that starts at 1."""

    name: str
    number: int = 1


class LockInfo(NamedTuple):
    """A lease of a lock as the store shows it now.

    ``remaining``: seconds that the lease has left. ``resting``: already released, but kept for its ``min_hold``.
    ``nodes``: on how many nodes of a quorum it is; None if the store is no quorum. ``failed_nodes``: how many of
    the other nodes failed. ``prefix``: what a callable ``KEY_PREFIX`` returned for this look; "" if the setting is a
    text. ``slot``: the number of its slot. ``template``: the template of its name if this process holds it, else
    "".
    """

    name: str
    using: str
    holder: Holder | None
    fence: int
    remaining: float
    resting: bool = False
    token: str = ""
    nodes: int | None = None
    failed_nodes: int = 0
    prefix: str = ""
    slot: int = 1
    template: str = ""

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "token")
        return f"LockInfo({', '.join(shown)})"

    @property
    def digest(self) -> str:
        return digest(self.token)

    @property
    def slots(self) -> int | None:
        """How many holders the lock may have at once, as its holder says; None: nobody has taken it yet."""
        return self.holder.slots if self.holder else None

    @property
    def slot_text(self) -> str:
        """The text after the name of a lock with several slots, for people: ", slot 2 of 3"."""
        if self.slots is None:
            return f", slot {self.slot}" if self.slot > 1 else ""
        return f", slot {self.slot} of {self.slots}" if self.slots > 1 else ""

    @property
    def granted_at(self) -> datetime | None:
        return datetime.fromtimestamp(self.holder.since, UTC) if self.holder else None


class Crowded(LockInfo):
    """The lease that a request found when it could not queue: as many wait already as its ``max_waiters`` allows.
    It has no token and no holder if they wait in this very process, because then the store was not asked."""

    __slots__ = ()


class Level(enum.StrEnum):
    OK = "ok"
    INFO = "info"  # good to know
    WARNING = "warning"  # may go wrong
    ERROR = "error"  # does go wrong, or certainly will


class Outage(NamedTuple):
    """A server that answers nobody in this process, so callers no longer ask it.

    ``since``: seconds of Unix time. ``reason``: the error of the last attempt.
    """

    server: str
    since: float
    reason: str


class CheckResult(NamedTuple):
    """The result of one check. ``about``: a word or two, the same in every backend that checks this.

    ``hint``: what to do. ``data``: the same for programs, if they need more than the message.
    """

    level: Level
    about: str
    message: str
    hint: str = ""
    data: Mapping[str, bool] = MappingProxyType({})

    @property
    def is_error(self) -> bool:
        return self.level is Level.ERROR


class Usage(NamedTuple):
    """The use of a lock now. ``slots``: how many holders it may have at once. ``leases``: the leases, slot by slot."""

    slots: int
    leases: tuple[LockInfo, ...]

    @property
    def held(self) -> int:
        """How many hold it. More than ``slots`` if other callers allow a larger number."""
        return len(self.leases)

    @property
    def is_full(self) -> bool:
        return len(self.leases) >= self.slots
