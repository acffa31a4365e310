"""For code that runs under a lock of its caller: whether the lock is held, and by which lease."""

from __future__ import annotations

from ..exceptions import LockNotHeld
from ..names import render
from ..types import State
from .holds import acquired_here
from .lease import Lease
from .registry import DEFAULT_ALIAS

assumed_depth = 0  # how many tests that run now assume that every lock is held; see testing.assume_locked()


def assert_locked(name: str, /, *values: object, using: str = DEFAULT_ALIAS) -> None:
    """Return if the caller holds the lock of that name; local, no I/O.

    The caller holds what was acquired or adopted in this thread or task, or in the one that called it or
    started it: as context variables do, a lock reaches into ``sync_to_async`` and ``async_to_sync``, and into child
    tasks, but not into new threads. ``values`` fill the fields of the name as those of ``lock()`` do.

    Raises LockLost if the caller held the lock and lost it, LockNotHeld if it does not hold it, also if it runs
    without it (``on_unavailable="run"``), InvalidLockName.
    """
    if assumed_depth:
        return None
    name = render(name, values)
    if lease := _latest_here(name, using):
        return lease.ensure_held()
    raise LockNotHeld(
        f"This code must run under the lock {name!r} ({using}), which its caller does not hold. Call it inside"
        " 'with lock(...)' or below @distributed_lock; in a unit test, inside testing.assume_locked()."
    )


def current_lease(name: str | None = None, /, *values: object, using: str = DEFAULT_ALIAS) -> Lease:
    """The lease under which the caller runs, of the innermost ``with lock(...)`` or ``@distributed_lock``.

    With a ``name``, whose fields the ``values`` fill: the lease of the lock of this name. Local, no I/O.
    ``assert_locked()`` explains who counts as the caller. A lease that was lost, or not granted
    (``on_unavailable="run"``), is returned, too, until its holder leaves it; ``is_held`` is False then.

    Raises LockNotHeld if there is none, InvalidLockName.
    """
    wanted = None if name is None else render(name, values)
    if lease := _latest_here(wanted, using):
        return lease
    what = "no lock" if wanted is None else f"not the lock {wanted!r} ({using})"
    raise LockNotHeld(
        f"This code holds {what}. Call it inside 'with lock(...)' or below @distributed_lock. A new thread holds what"
        " it acquires itself, unless it runs in a copy of its caller's context."
    )


def _latest_here(name: str | None, using: str) -> Lease | None:
    """The latest lease that this context has acquired of it and not left; it stands, or was lost meanwhile."""
    for lease in acquired_here():
        if name is not None and (lease.name, lease.using) != (name, using):
            continue
        if lease._is_over and not (lease.state is State.LOST and lease._hold_count):
            continue
        if name is None or lease.prefix == lease._backend.prefix_now():
            return lease
    return None
