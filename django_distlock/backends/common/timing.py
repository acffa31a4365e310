"""Every length of time in a backend and above it that is no setting."""

from __future__ import annotations


class Timing:
    """Seconds, unless it says otherwise. Each backend has one, ``backend.timing``, and hands it to its parts.

    A test shortens what it would have to wait for: on one backend, or here for all.
    """

    # Waiting (core)
    look_interval = 1.0  # after which a waiter asks the store again, should nobody have woken it
    unresponsive_after = 3.0  # after which a leader that does nothing is passed over: its event loop is stuck or gone

    # Calls of stores
    shortest_call = 0.5  # that even a caller who does not wait gives the server
    idle_trusted = 1.0  # for which an idle connection is used again without a look at its socket

    # Nodes of a quorum
    reconnect_pause = 0.5  # before another connection is tried to a node that failed
    reconnect_pause_without_majority = 0.1
    node_unresponsive_after = 2.0  # after which a connection without a reply is closed
    connect_grace = 0.01  # that a node which is being connected may come later than the majority
    handshake = 0.35  # that a caller waits for a connection beyond the time in which it is opened
