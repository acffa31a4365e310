"""Every length of time, in a backend and above it, that is not a setting."""

from __future__ import annotations


class Timing:
    """Seconds, unless a comment says otherwise. Each backend has one, ``backend.timing``, and passes it to its parts.

    Tests shorten the times that they would have to wait for: on one backend, or here for all.
    """

    # Waiting (core)
    # After which a waiter asks the store again if nobody woke it; less than waiter_expires_after. In Redis, acquire.lua
    # assumes a second, release.lua the longest interval.
    look_interval = 1.0
    # If a process waits for more names than it can look at in a second, it looks at each of them less often.
    looks_per_second = 1250  # of all names
    look_interval_longest = 1.0
    # In Redis, of a waiter that cannot be notified: for itself and each waiter before it, up to look_interval
    poll_interval_by_place = 0.1
    unresponsive_after = 3.0  # after which a leader that does nothing is skipped: its event loop is stuck or gone

    # Calls of stores
    shortest_call = 0.5  # that a call may last at least, also for a caller that does not wait
    call_grace = 0.45  # that a call may last beyond its deadline, for the last reply
    reply_reserve = 0.1  # the part of a timeout that is kept for a reply if the connection took the rest
    call_retry_pause_shortest, call_retry_pause_longest = 0.2, 0.5  # between attempts
    idle_trusted = 1.0  # for which an idle connection is used again without checking its socket
    idle_kept = 60.0  # after which it is closed, before something between here and the server forgets it

    # Circuit breakers
    probe_pause_shortest, probe_pause_longest = 0.2, 0.8  # before a server that answers nobody is asked again
    probe_idle = 20.0  # after which a server is not asked any more if no caller wanted it meanwhile
    probe_slack = 1.0  # by which a probe may be late; after that, callers ask the server themselves

    # The queue of a lock
    grant_ttl = 2.0  # for a waiter to take what it was handed: two looks, because a hint can be lost
    message_trusted = 0.5  # after its question, in which a waiter takes the lease by the message that hands it over
    confirmed_after = 0.1  # after which the renewer has the store confirm such a lease
    queue_ttl = 24.0  # for which Redis keeps a queue in which nobody looks: three of the longest intervals

    # Cluster
    slot_pause_shortest, slot_pause_longest = 0.02, 0.2  # between attempts while a slot is between two nodes
    last_attempt = 0.25  # that an attempt gets even if the time is nearly over
    slots_answer = 0.5  # for a node to answer CLUSTER SLOTS
    slots_kept = 0.2  # for which an attempt uses a slot map that another one updated

    # Sentinels
    sentinel_interval = 1.0  # between questions to the sentinels while connections are in use
    sentinel_idle = 20.0  # without a command after which they are not asked any more
    search_kept = 0.1  # for which the result of a search counts for others; less than the pause before another attempt

    # Nodes of a quorum
    reconnect_pause = 0.5  # before another connection is tried to a node that failed
    reconnect_pause_without_majority = 0.1
    node_unresponsive_after = 2.0  # after which a connection without a reply is closed
    connect_grace = 0.01  # for which a node that is being connected is awaited after the majority has answered
    handshake = 0.35  # that a caller waits for a connection beyond the time for opening it

    # Renewal and release in the background (core)
    renewal_batch = 1000  # leases in one round trip; after it, leases that came due meanwhile are added
    prompt_failure = 0.1  # a store that fails sooner is there; one that takes longer is not asked again in this round
    retry_delay = 1.0  # after which a failed renewal or release is tried again, or sooner for a short TTL

    # Listeners, which wake waiters
    listener_idle = 20.0  # without a waiter, after which a subscription ends
    listener_nap = 0.2  # of silence after which a listener checks whether it must end or subscribe anew
    resubscribe_after = 0.2  # before the next subscription, whatever ended the last one
    echo_interval = 0.1  # after an echo that the store has sent to a listener, in which looks send no other one
    echo_timeout = 2.0  # in which a listener must hear an echo; else its connection counts as dead
    # For which notifications are not tried again that did not arrive, or whose receivers scripts do not learn
    deaf_for = 60.0

    # ZooKeeper
    watch_after = 0.1  # after which a node that has a lock is watched; most are deleted before
    watch_trusted = 10.0  # for which a waiter assumes, without news, that the node which it watches is there

    # Databases
    database_idle_kept = 20.0  # after which an unused connection is closed
    waiter_expires_after = 2.5  # after its last look; then others no longer wait for it
    retry_pause_shortest = 0.001  # at most, before the first repetition of a call that collided with others
    retry_pause_longest = 0.1
    reconnect_pause_shortest = 0.02  # at most, before the second attempt to connect
    reconnect_pause_longest = 0.25
    poll_interval_shortest = 0.002  # between two looks of a waiter that no notification reaches
    poll_interval_shortest_of_file = 0.0003  # if a look asks no server
    poll_interval_longest = 0.25
