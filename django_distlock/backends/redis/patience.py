"""How long a command may wait: for a connection, for an answer, for another server."""

from __future__ import annotations

from math import inf

from ...tickets import clock
from .location import Location

SHORTEST_PATIENCE = 0.5  # seconds that even an attempt without a wait gives the server


def clipped(patience: float, until: float | None) -> float:
    """Seconds for one more attempt of somebody who waits until then; None: for ever, 0.0: it is no wait."""
    return min(patience, max(SHORTEST_PATIENCE, until - clock())) if until else patience


def may_wait_on(location: Location, began: float, until: float | None) -> bool:
    """For a connection that is free: those who hold them wait for another server."""
    return clock() < min(began + location.patience, inf if until is None else until)


def exhausted(most: int) -> str:
    return f"all {most} connections are busy; OPTIONS['max_connections'] allows more"
