"""What is told of a lock's past, and of who stands in its queue now."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import NamedTuple, Self

from .formats import FORMAT
from .types import LATEST, Holder


class Event(enum.StrEnum):
    """What happened to a lease, or to who wants one."""

    WAITS = "waits"  # it is busy, and somebody begins to wait
    GRANTED = "granted"
    ADOPTED = "adopted"  # another process goes on with the lease
    KEPT = "kept"  # its holder has left it, and something keeps it: a transaction, or a response
    BOUND_REACHED = "bound reached"  # it is renewed no more
    RELEASED = "released"
    DETACHED = "detached"  # for another process to adopt
    LOST = "lost"
    FREED = "freed"  # by force, by somebody else
    TIMED_OUT = "timed out"  # who waited goes without it
    WAIT_ENDED = "wait ended"  # in another way: cancelled, by an error, or with a lease that it had


# On the way of each lock, where an attribute of an enumeration takes longer than the rest
GRANTED, RELEASED = Event.GRANTED, Event.RELEASED

RESPONSE, TRANSACTION = "response", "transaction"  # what keeps a lease that its holder has left

NOT_RENEWED = "not renewed"  # what is told of a grant, or of an adoption, with renew=False

BEGINS = frozenset({Event.GRANTED, Event.ADOPTED})  # with a process
ENDS = frozenset({Event.RELEASED, Event.LOST, Event.FREED})  # of a lease
RENEWED_NO_MORE = frozenset({Event.DETACHED, Event.BOUND_REACHED})  # by this process: the lease ends with its TTL


class JournalEntry(NamedTuple):
    """One event, as the process tells that it happened to.

    ``at``: seconds of Unix time, by that process's clock. ``lease``: the digest of its token. ``prefix``: what a
    callable KEY_PREFIX answered. ``holder``: who holds the lease, or wants it. ``ttl``: of the lease, in seconds.
    ``seconds``: for how long it was waited for (GRANTED, TIMED_OUT, WAIT_ENDED), is to be waited for at most (WAITS;
    None: no bound), or was held (the others). ``text``: NOT_RENEWED, why it was lost, by whom it was freed, what keeps
    it, who was in the way, why a wait or its renewal ended, or which leases the thread or task has that WAITS: their
    digests, for names do not tell whether it is the same.
    """

    at: float
    event: Event
    name: str
    lease: str
    holder: Holder | None
    fence: int = 0
    ttl: float = 0.0
    seconds: float | None = None
    text: str = ""
    prefix: str = ""

    def to_text(self) -> str:
        """As stores keep it."""
        holder = self.holder.to_text() if self.holder else ""
        fields = [
            round(self.at, 6), self.event, self.name, self.lease, holder, self.fence, self.ttl,
            self.seconds if self.seconds is None else round(self.seconds, 3), self.text, self.prefix,
        ]  # fmt: skip
        return FORMAT + json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """None for a text of a newer version, or of something else."""
        try:
            found = json.loads(text.removeprefix(FORMAT)) if text.startswith(FORMAT) else None
            match found:
                case [
                    int() | float() as at, str(event), str(name), str(lease), str(holder), int() as fence,
                    int() | float() as ttl, int() | float() | None as seconds, str(reason), str(prefix),
                ] if 0 <= at < LATEST:  # fmt: skip
                    read = Holder.from_text(holder) if holder else None
                    return cls(at, Event(event), name, lease, read, fence, ttl, seconds, reason, prefix)
        except (ValueError, RecursionError):
            pass
        return None


class QueuedWaiter(NamedTuple):
    """A place in the queue of a lock.

    ``lease``: the digest of its token. ``since``: seconds of Unix time, by the store's clock. ``holder``: who waits, as
    far as the store knows it: the process alone, whose thread and label are "", or nothing at all (None).
    """

    lease: str
    since: float
    holder: Holder | None = None


def entries_in(texts: Iterable[str]) -> list[JournalEntry]:
    """What can be read of a journal, the oldest first."""
    return sorted(filter(None, map(JournalEntry.from_text, dict.fromkeys(texts))), key=lambda entry: entry.at)
