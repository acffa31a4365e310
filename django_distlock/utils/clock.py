"""The clocks, and sleep. The package takes them only from here, so that a simulated world can replace them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial


def _clock() -> Callable[[], float]:
    """Returns a clock that also counts the seconds while the machine sleeps, because they pass for the store, too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # here time.monotonic() is another clock, which stops meanwhile
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    return time.monotonic  # on Windows it counts them


clock = _clock()
wall_clock = time.time  # seconds of Unix time, for people and for stored data. It may be set, so no deadline uses it
monotonic = time.monotonic  # Django uses this clock for the time at which it closes a connection


def wall_clock_us() -> int:
    """Returns microseconds of Unix time."""
    return time.time_ns() // 1000


def safe_deadline(sent_at: float, ttl: float) -> float:
    """Returns until when a lease that was requested at ``sent_at`` is certainly valid, even if the store's clock is
    faster.

    ``ttl``: seconds. The allowance for the drift, 1 % of the TTL and 2 ms, comes from the Redlock algorithm.
    """
    return sent_at + ttl * 0.99 - 0.002


def sleep(seconds: float) -> None:
    time.sleep(seconds)  # looked up at each call, because gevent replaces it
