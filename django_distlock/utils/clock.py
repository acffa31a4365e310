"""The clocks, and sleep: the one place from which the package has them, so that a simulated world can replace them."""

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
wall_clock = time.time  # seconds since 1970, for people and for what is stored. It may be set: no deadline goes by it
monotonic = time.monotonic  # by which Django says when a connection is to be closed


def wall_clock_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def safe_deadline(sent_at: float, ttl: float) -> float:
    """Until when a lease asked for at ``sent_at`` certainly holds, though the store's clock may run faster.

    The allowance for that drift, 1 % of the TTL and 2 ms, is the one of the Redlock algorithm.
    """
    return sent_at + ttl * 0.99 - 0.002


def sleep(seconds: float) -> None:
    time.sleep(seconds)  # looked up now: gevent replaces it
