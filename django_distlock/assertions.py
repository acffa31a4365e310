"""``assert_locked()``: for code that is only right while its caller holds a lock."""

from __future__ import annotations

from .attempts import acquired_here
from .exceptions import LockNotHeld
from .handlers import DEFAULT_ALIAS
from .leases import State
from .names import render

assumed = 0  # how many tests that run now assume that every lock is held; see testing.assume_locked()


def assert_locked(name: str, /, *values: object, using: str = DEFAULT_ALIAS) -> None:
    """Return if the caller holds the lock of that name; local, no I/O.

    The caller holds what was acquired or adopted in this thread or task, or in the one that called it or
    started it: as context variables do, a lock reaches into ``sync_to_async`` and ``async_to_sync``, and into child
    tasks, but not into new threads. ``values`` fill the fields of the name as those of ``lock()`` do.

    Raises LockLost when the caller held the lock and lost it, LockNotHeld when it does not hold it, InvalidLockName.
    """
    if assumed:
        return
    name = render(name, values)
    mine = [lease for lease in acquired_here() if lease.name == name and lease.using == using]
    if any(lease.is_live for lease in mine):
        return
    if mine and mine[-1].state is State.LOST and mine[-1].entries:
        mine[-1].ensure_held()
    raise LockNotHeld(
        f"This code must run under the lock {name!r} ({using}), which its caller does not hold. Call it inside"
        " 'with lock(...)' or below @distributed_lock; in a unit test, inside testing.assume_locked()."
    )
