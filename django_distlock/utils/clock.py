"""The clock of deadlines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial


def _clock() -> Callable[[], float]:
    """Counts seconds that also pass while the machine sleeps, as they do for the store."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # where time.monotonic() is another clock, which stops meanwhile
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    return time.monotonic  # of Windows counts them


clock = _clock()


def safe_deadline(sent_at: float, ttl: float) -> float:
    """Until when a lease asked for at ``sent_at`` certainly holds.

    The store's count began later than ours; its clock may run faster. The allowance for that drift,
    1 % of the TTL and 2 ms, is the one of the Redlock algorithm.
    """
    return sent_at + ttl * 0.99 - 0.002
