"""What a call comes to, and what it costs, where something is the matter with the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django_distlock import LockBackendError, locks


@dataclass(frozen=True)
class Timed:
    """``took``: seconds; ``cpu``: those of a processor. ``outcome``: what it returned, or the error of the backend."""

    outcome: Any
    took: float
    cpu: float


def timed(
    call: str, calls: Callable[[Any], Any], held: Any, lease: Any, handle: Any, cpu: Callable[[], float]
) -> Timed:
    """Make the call of that name by the methods that ``calls`` gives. ``cpu()``: seconds that do not count."""
    made: Callable[[], Any] = {
        "acquire": lambda: calls(handle).acquire(),
        "release": lambda: calls(held).release(),
        "renew": lambda: calls(lease).renew(),
        "locked": lambda: calls(handle).locked(),
        "held": lambda: calls(locks["default"]).held(),
        "check": lambda: calls(locks["default"]).check(),
    }[call]
    began, mine, theirs = time.monotonic(), time.process_time(), cpu()
    try:
        outcome = made()
    except LockBackendError as error:
        outcome = error
    return Timed(outcome, time.monotonic() - began, time.process_time() - mine - cpu() + theirs)
