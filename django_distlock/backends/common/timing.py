"""Every length of time in a backend and above it that is no setting."""

from __future__ import annotations


class Timing:
    """Seconds, unless it says otherwise. Each backend has one, ``backend.timing``, and hands it to its parts.

    A test shortens what it would have to wait for: on one backend, or here for all.
    """

    # Waiting (core)
    look_interval = 1.0  # after which a waiter asks the store again, should nobody have woken it
    unresponsive_after = 3.0  # after which a leader that does nothing is passed over: its event loop is stuck or gone
