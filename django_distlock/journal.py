"""Records of a lock's past, and of the waiters in its queue now."""

# Annotations are no texts here, as in types.py.
import enum
import json
from collections.abc import Iterable
from typing import NamedTuple, Self

from .formats import FORMAT
from .types import LATEST, Holder


class Event(enum.StrEnum):
    """What happened to a lease, or to a caller that wants one."""

    WAITS = "waits"  # the lock is busy, and a caller begins to wait
    GRANTED = "granted"
    ADOPTED = "adopted"  # another process continues the lease
    KEPT = "kept"  # its holder has left it, and something keeps it: a transaction, or a response
    BOUND_REACHED = "bound reached"  # it is no longer renewed
    RELEASED = "released"
    DETACHED = "detached"  # for another process to adopt
    LOST = "lost"
    FREED = "freed"  # by force, by somebody else
    TIMED_OUT = "timed out"  # the caller waited and did not get the lock
    WAIT_ENDED = "wait ended"  # in another way: cancelled, by an error, or because the caller already had a lease


# Every acquisition uses these, and to read an attribute of an enumeration would take longer than the rest.
GRANTED, RELEASED = Event.GRANTED, Event.RELEASED

RESPONSE, TRANSACTION = "response", "transaction"  # the text of KEPT: what keeps a lease that its holder has left

NOT_RENEWED = "not renewed"  # the text of GRANTED or ADOPTED with renew=False

BEGINS = frozenset({Event.GRANTED, Event.ADOPTED})  # the lease begins in a process
ENDS = frozenset({Event.RELEASED, Event.LOST, Event.FREED})  # the lease ends
RENEWED_NO_MORE = frozenset({Event.DETACHED, Event.BOUND_REACHED})  # by this process: the lease ends with its TTL


class JournalEntry(NamedTuple):
    """One event, as recorded by the process in which it happened.

    ``at``: seconds of Unix time, by the clock of that process. ``lease``: the digest of its token. ``prefix``: the
    result of a callable KEY_PREFIX. ``holder``: who holds the lease, or wants it. ``ttl``: the TTL of the lease in
    seconds. ``seconds``: how long the caller waited (GRANTED, TIMED_OUT, WAIT_ENDED), waits at most (WAITS; None: no
    limit), or held the lease (the other events). ``text``: NOT_RENEWED, why the lease was lost, who freed it, what
    keeps it, who was in the way, why a wait or the renewal ended; for WAITS the leases that the waiting thread or task
    has, as digests, because a name does not show whether it is the same lease.
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
        """Returns the text that stores keep."""
        holder = self.holder.to_text() if self.holder else ""
        fields = [
            round(self.at, 6), self.event, self.name, self.lease, holder, self.fence, self.ttl,
            self.seconds if self.seconds is None else round(self.seconds, 3), self.text, self.prefix,
        ]  # fmt: skip
        return FORMAT + json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Returns the entry; None for a text of a newer version, or of something else."""
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
    far as the store knows: only the process, with "" as thread and label, or nothing (None).
    """

    lease: str
    since: float
    holder: Holder | None = None


def entries_in(texts: Iterable[str]) -> list[JournalEntry]:
    """Returns the entries of a journal that can be read, the oldest first."""
    return sorted(filter(None, map(JournalEntry.from_text, dict.fromkeys(texts))), key=lambda entry: entry.at)
