"""Messages and errors about a lock that is not granted."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf
from typing import Literal

from ..exceptions import LockBackendError, LockNotAcquired, LockReentry, LockTimeout
from ..types import Crowded, LockInfo, LockRequest
from ..utils import fork
from .lease import Lease

RUNS_WITHOUT = "%s runs without the lock %s: %s"
WAITS_ON = "The store of lock %r failed; its waiter continues to wait: %s"
OWN_IN_THE_WAY = "a lease of its own is in the way"
CROWD = "as many wait for it already as max_waiters allows"
# As with threading.Lock, acquire() may wait for a lock of its own thread: another thread may release it.
WAITS_FOR_ITSELF = (  # acquire() of the lock, which may wait, by a thread or a task
    "The lock %s is held by this very %s, which now waits for it in acquire(). Unless another one releases it"
    " meanwhile, this acquire() ends without it."
)


def reentry_error(lock: str, execution: str, slots: int, lease: Lease) -> LockReentry:
    """For a caller that would wait for itself. ``lease``: the one whose end it would wait for."""
    if not lease._hold_count:
        return LockReentry(
            f"The lock {lock} is kept by the open transaction of this very {execution}, which would wait for itself: it"
            f" was granted with slots={lease.holder.slots}, and slots={slots} does not enter it again. Give the same"
            " number to both; or ask for the lock outside of the transaction."
        )
    if slots > 1:
        return LockReentry(
            f"All {slots} slots of the lock {lock} are held by this very {execution} already, which would wait for"
            " itself. Call the inner code without the lock."
        )
    also = ", as to the one that is held" if lease._terms.reentrant else ""
    return LockReentry(
        f"The lock {lock} is held by this very {execution} already, which would wait for itself. Call the inner"
        f" code without the lock; or give reentrant=True to the lock that is entered again{also}."
    )


def not_acquired(lock: str, busy: LockInfo, slots: int, waited: float | None) -> LockNotAcquired:
    """``waited``: seconds; None: the caller did not want to wait."""
    kind, state, why = LockNotAcquired, "is busy", described(busy, slots)
    if isinstance(busy, Crowded):
        state = f"is busy, and crowded: {CROWD}"
        why = why if busy.token else "callers of this process do"
    elif waited is not None:
        kind, state = LockTimeout, f"stayed busy for {waited:.1f} s"
    message = f"The lock {lock} {state}: {why}"
    retry_after = busy.remaining if busy.remaining < inf else None
    return kind(
        message,
        retry_after=retry_after,
        holder=busy.holder,
        resting=busy.resting,
        reason=reason_of(busy),
        name=busy.name,
        using=busy.using,
    )


def reason_of(busy: LockInfo | None) -> Literal["busy", "crowded"]:
    return "crowded" if isinstance(busy, Crowded) else "busy"


def described(busy: LockInfo, slots: int = 1) -> str:
    """``slots``: how many holders the lock may have at once."""
    lease = _described(busy)
    return lease if slots == 1 else f"none of its {slots} slots is free. The first one to be, slot {busy.slot}: {lease}"


def _described(busy: LockInfo) -> str:
    if not busy.holder:
        return "it is being handed over"
    since = f"{datetime.fromtimestamp(busy.holder.since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    left = f"{busy.remaining:.1f} s left"
    if busy.resting:
        return f"it rests for the min_hold of {busy.holder}{_on_nodes(busy)}, which took it at {since}; {left}"
    ends = f", {left} unless renewed" if busy.remaining < inf else ""
    return f"held by {busy.holder}{_on_nodes(busy)} since {since}{ends}"


def _on_nodes(busy: LockInfo) -> str:
    if busy.nodes is None:
        return ""
    failed = f" while {busy.failed_nodes} failed" if busy.failed_nodes else ""
    return f" on {busy.nodes} node{'' if busy.nodes == 1 else 's'}{failed}"


def crowded_here(request: LockRequest, using: str) -> Crowded:
    """As many callers of this process wait already as may. The store is not asked who holds the lock."""
    return Crowded(request.name, using, None, 0, inf, prefix=request.prefix)


def slow_error(request: LockRequest) -> LockBackendError:
    return LockBackendError(
        f"The store grants the lock {request.name!r} so slowly that its TTL of {request.ttl:g} s has passed when the"
        " answer comes. Give it a longer ttl."
    )


def copied_error(request: LockRequest) -> LockBackendError:
    """In a forked child, for the copy of a caller that asks for the lock in the parent."""
    return LockBackendError(
        f"Process {request.holder.pid} was forked while it asked for the lock {request.name!r}. It goes on to ask; in"
        f" its child, process {fork.pid()}, nobody does. Ask anew there if it needs the lock."
    )
