"""Every length of time in a backend and above it that is no setting."""

from __future__ import annotations


class Timing:
    """Seconds, unless it says otherwise. Each backend has one, ``backend.timing``, and hands it to its parts.

    A test shortens what it would have to wait for: on one backend, or here for all.
    """

    # Waiting (core)
    # After which a waiter asks the store again if nobody woke it; less than waiter_expires_after. In Redis, acquire.lua
    # reckons with a second, release.lua with the longest interval.
    look_interval = 1.0
    # In a process that waits for more names at once than it can look at in a second, each has its look as much later.
    looks_per_second = 1250  # of all names
    look_interval_longest = 1.0
    # In Redis, of a waiter that cannot be told of its turn: for itself and each one before it, up to look_interval
    poll_interval_by_place = 0.1
    unresponsive_after = 3.0  # after which a leader that does nothing is passed over: its event loop is stuck or gone

    # Calls of stores
    shortest_call = 0.5  # that a call lasts at least, also of a caller without a wait
    call_grace = 0.45  # that a call may last beyond its deadline, for the last reply
    reply_reserve = 0.1  # of it that is kept for a reply when the connection took the rest
    call_retry_pause_shortest, call_retry_pause_longest = 0.2, 0.5  # between attempts
    idle_trusted = 1.0  # for which an idle connection is used again without a look at its socket
    idle_kept = 60.0  # after which it is closed, before something between here and the server forgets it

    # Circuit breakers
    probe_pause_shortest, probe_pause_longest = 0.2, 0.8  # before a server that answers nobody is asked again
    probe_idle = 20.0  # after which a server is asked no more if nobody wanted anything of it meanwhile
    probe_slack = 1.0  # by which that may come later than it should; then callers find out by themselves

    # The queue of a lock
    grant_ttl = 2.0  # a waiter has to take what it was handed: two looks, because a hint can be lost
    queue_ttl = 24.0  # a queue in Redis is kept in which nobody looks any more: three of the longest intervals

    # Cluster
    slot_pause_shortest, slot_pause_longest = 0.02, 0.2  # between attempts while a slot is between two nodes
    last_attempt = 0.25  # that an attempt has even when the time is nearly over
    slots_answer = 0.5  # that a node has to answer CLUSTER SLOTS
    slots_kept = 0.2  # for which another attempt uses a slot map that others updated

    # Sentinels
    sentinel_interval = 1.0  # between questions to the sentinels while connections are in use
    sentinel_idle = 20.0  # without a command after which they are not asked any more
    search_kept = 0.1  # for which a search counts for others, too; less than the pause before another attempt

    # Nodes of a quorum
    reconnect_pause = 0.5  # before another connection is tried to a node that failed
    reconnect_pause_without_majority = 0.1
    node_unresponsive_after = 2.0  # after which a connection without a reply is closed
    connect_grace = 0.01  # that a node which is being connected may come later than the majority
    handshake = 0.35  # that a caller waits for a connection beyond the time in which it is opened

    # Renewal and release in the background (core)
    renewal_batch = 1000  # leases that are renewed in one round trip, before what came due meanwhile
    prompt_failure = 0.1  # a store that refuses sooner is there; one that takes longer is not asked for more just then
    retry_delay = 1.0  # after which what the store did not do is asked for again, or sooner for a short TTL

    # Listeners, which wake waiters
    listener_idle = 20.0  # without a waiter after which a subscription is ended
    listener_nap = 0.2  # after which a listener looks whether it is to end or to subscribe anew, if it hears nothing
    resubscribe_after = 0.2  # before another subscription, whatever ended the last one
    echo_timeout = 2.0  # in which a listener must hear what was said to it; else its connection is taken for dead
    # For which what passes on no notifications, or tells scripts not who hears them, is not tried again
    deaf_for = 60.0

    # ZooKeeper
    watch_after = 0.1  # after which a node that has a lock is watched: most are deleted before
    watch_trusted = 10.0  # for which a waiter believes that the node which it watches is there, if it hears nothing

    # Databases
    database_idle_kept = 20.0  # after which a connection is closed that nobody used
    waiter_expires_after = 2.5  # after its last look: then others do not wait for it any more
    retry_pause_shortest = 0.001  # at most, before the first repetition of what collided with others
    retry_pause_longest = 0.1
    reconnect_pause_shortest = 0.02  # at most, before the second attempt to connect
    reconnect_pause_longest = 0.25
    poll_interval_shortest = 0.002  # between two looks of a waiter whom no notification reaches
    poll_interval_shortest_of_file = 0.0003  # where a look asks no server
    poll_interval_longest = 0.25
