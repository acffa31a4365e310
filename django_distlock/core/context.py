"""Which leases a context has acquired: a thread or a task, and what it lends its context to."""

from __future__ import annotations

from contextvars import ContextVar
from weakref import ReferenceType, ref

from .lease import Lease

# Child tasks inherit the context and sync_to_async lends one thread to many, so an execution owns a
# lease only when the thread or task is the same *and* the context remembers having acquired it.
_acquired: ContextVar[tuple[ReferenceType[Lease], ...]] = ContextVar("django_distlock_acquired", default=())


def remember(lease: Lease) -> None:
    known = _acquired.get()
    count = len(known)
    if count >= 8 and count & (count - 1) == 0:  # now and then, because every lease is looked at
        known = tuple(known_lease for known_lease in known if (held := known_lease()) and held._is_live)
    _acquired.set((*known, ref(lease)))


def remembers(lease: Lease) -> bool:
    return ref(lease) in _acquired.get()


def acquired_here() -> list[Lease]:
    """What this context has acquired and still remembers: that of its thread or task, and of the one it came from."""
    return [lease for known in _acquired.get() if (lease := known())]
