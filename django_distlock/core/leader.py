"""``leader()``: one of all processes leads, for as long as it lives, and the others stand by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, TypedDict, Unpack

from ..exceptions import LockLost, LockNotHeld
from ..names import fixed_name, parse, render
from ..options import Options, settled
from .acquire import Acquisition
from .lock import Lock, refuse_in_event_loop
from .registry import DEFAULT_ALIAS

# Options that bound neither the wait nor the term, whatever the alias says.
UNBOUNDED: dict[str, Any] = {
    "wait": None, "max_waiters": None, "renew": True, "max_hold": None, "min_hold": 0.0, "on_unavailable": "raise",
}  # fmt: skip
OUTAGE_PAUSES = 1.0, 5.0  # seconds after which it asks a store again that failed: first, and at most


class LeaderOptions(TypedDict, total=False):
    """Keywords of ``leader()``, as type checkers need them."""

    ttl: float | timedelta
    on_lost: Literal["raise", "log"] | Callable[[LockLost], object]
    label: str


def leader(name: str, /, *values: object, using: str = DEFAULT_ALIAS, **options: Unpack[LeaderOptions]) -> Leadership:
    """A handle on the leadership of that name, for loops that run on every host and work on one.

    It is the lock of that name, without bounds: ``with`` waits as long as it takes to become the leader, also while the
    store is down, and the term lasts until its block ends, ``step_down()``, or the loss of the lease. The alias's
    ``wait``, ``max_waiters``, ``renew``, ``max_hold``, ``min_hold`` and ``on_unavailable`` do not count.

    ``values`` and ``using``: as of ``lock()``, and so are these options:

    - ``ttl``: seconds after which another process leads if this one is killed or cut off, two more at most.
    - ``on_lost`` ("raise"): leaving ``with`` after the loss of the lease raises LockLost; "log" only logs it.
    - ``label``: what people read as the purpose of the holder.

    Raises InvalidLockName, TypeError for another option, ValueError for a value out of range.
    """
    if unknown := options.keys() - LeaderOptions.__annotations__.keys():
        raise TypeError(
            f"leader() has no option {min(unknown)!r}: it waits and leads without a bound. Its options are"
            f" {', '.join(LeaderOptions.__annotations__)}, using."
        )
    frame = sys._getframe(1)
    caller = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
    filled, template = (render(name, values), parse(name).normalized) if values else (fixed_name(name), "")
    return Leadership(filled, using, unbounded(**options), "", "", caller, template)


def unbounded(**options: Any) -> Options:
    """The options of a leader's lock. Raises ValueError for a value out of range."""
    return settled(**UNBOUNDED, **options)


class Leadership(Lock):
    """The lock of ``leader()``: ``with`` and ``async with`` give the lease of a term, and it may be entered again.

    They raise LockBackendError only if somebody has to correct something (``is_final``), or if the store takes longer
    than the TTL to grant the lock; and LockReentry in a thread or task that already leads.
    """

    def step_down(self) -> bool:
        """Release the lease to the next leader, from any thread: the block of ``with`` then ends without an error.

        This wakes those who wait in ``lease.wait_lost()``. The block itself is not interrupted, so call this when no
        work is running in it. Returns False if this handle does not lead. Raises LockBackendError if the store does not
        answer; the release is then tried again in the background.
        """
        refuse_in_event_loop()
        with suppress(LockLost, LockNotHeld):  # the end of the block reports a loss
            if lease := self.lease:
                lease.release()
                return True
        return False

    async def astep_down(self) -> bool:
        """``step_down()`` for tasks."""
        with suppress(LockLost, LockNotHeld):
            if lease := self.lease:
                await lease.arelease()
                return True
        return False

    def _acquisition(
        self, execution: object, by_with: bool, blocking: bool = True, timeout: float | timedelta = -1
    ) -> Acquisition:
        acquisition = super()._acquisition(execution, by_with, blocking, timeout)
        acquisition.outage_pauses = OUTAGE_PAUSES
        return acquisition
