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
