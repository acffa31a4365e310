"""What is wrong with a lock, where that can be told: why it is held for so long, or was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django.utils import timezone

from ..journal import BEGINS, ENDS, NOT_RENEWED, RENEWED_NO_MORE, RESPONSE, TRANSACTION, Event, JournalEntry
from ..types import Holder
from .inventory import format_duration
from .situation import HeldLease, Situation, Waiting, execution, process

BEFORE, AFTER = 600.0, 60.0  # seconds of the journal that tell of a moment
KEPT_LONG = 2.0  # seconds for which a lease is kept after its holder has left it that are worth a word
SHORT_WAIT = 1.0  # seconds: who waits for less is in no trouble, and its thread may not be in the journal yet
TOGETHER = 5.0  # seconds within which a store that lost its data is found out for most of its locks
FORGOTTEN = "the store no longer kn"  # the reason of a loss begins so: the store knows the lease no more


class Cause(NamedTuple):
    """``kind``: a fixed word, for programs. ``sentence``: for people."""

    kind: str
    sentence: str


class Node(NamedTuple):
    """A lease of a lock, among those whose holders may wait for each other."""

    name: str
    lease: str


class Edge(NamedTuple):
    """A holder, and the lock for which it waits itself. ``waiter``: who waits, as far as is known.

    ``is_certain``: it is the thread or task of the holder which waits.
    """

    held: str
    holder: Holder
    wanted: str
    waiter: Holder
    is_certain: bool


def causes(situation: Situation) -> list[Cause]:
    """The most telling one first; empty where nothing is wrong that can be seen."""
    found = [*dict.fromkeys(_circles(situation))]
    for lease in situation.in_use(situation.name):
        found += _of_lease(situation, lease)
    return [*found, *_ran_out(situation), *_lost_data(situation)]


def who(holder: Holder | None) -> str:
    """As far as it is known."""
    if holder is None:
        return "somebody"
    return str(holder) if holder.thread else f"pid {holder.pid} on {holder.host}"


def moment(at: float, now: float) -> str:
    """In the time zone of Django; with the day, where that is another one."""
    zone = timezone.get_current_timezone()
    when, today = (datetime.fromtimestamp(one, UTC).astimezone(zone) for one in (at, now))
    return f"{when:%H:%M:%S}" if when.date() == today.date() else f"{when:%Y-%m-%d %H:%M:%S}"


# Circles


def _circles(situation: Situation) -> Iterator[Cause]:
    for lease in situation.in_use(situation.name):
        if chain := _chain(situation, Node(situation.name, lease.lease)):
            is_closed = chain[-1].wanted in {edge.held for edge in chain}
            yield _circle(chain) if is_closed else _waits_itself(situation, chain[0])


def _chain(situation: Situation, start: Node) -> list[Edge]:
    """From a lease to the lock that its holder waits for, and on, to a circle: to a certain one, if there is any.

    Without a circle: the first step alone.
    """
    edges = _edges_from(situation, start)
    certain = {node: [edge for edge in found if edge.is_certain] for node, found in edges.items()}
    for known in (certain, edges):
        ways = _ways_of_stuck(situation, known)
        if start in ways:
            return _way_round(situation, start, ways)
    return edges[start][:1]


def _edges_from(situation: Situation, start: Node) -> dict[Node, list[Edge]]:
    """Those of the lease, and of all that can be reached by them."""
    found: dict[Node, list[Edge]] = {}
    ahead = [start]
    while ahead:
        node = ahead.pop()
        if node not in found:
            lease = next(lease for lease in situation.in_use(node.name) if lease.lease == node.lease)
            found[node] = _edges_of(situation, node.name, lease)
            ahead += [one for edge in found[node] for one in _nodes(situation, edge.wanted)]
    return found


def _ways_of_stuck(situation: Situation, edges: Mapping[Node, Sequence[Edge]]) -> dict[Node, Edge]:
    """The leases whose holders wait for ever, and for what: for a lock all of whose leases are such.

    A lock with several slots has others, as long as the holder of one of them goes on.
    """
    stuck = {node for node, found in edges.items() if found}

    def is_blocked(edge: Edge) -> bool:
        leases = situation.leases.get(edge.wanted, ())
        return bool(leases) and all(not one.resting and Node(edge.wanted, one.lease) in stuck for one in leases)

    while goes_on := {node for node in stuck if not any(map(is_blocked, edges[node]))}:
        stuck -= goes_on
    return {node: next(filter(is_blocked, edges[node])) for node in stuck}


def _way_round(situation: Situation, start: Node, ways: Mapping[Node, Edge]) -> list[Edge]:
    chain = [ways[start]]
    while chain[-1].wanted not in {edge.held for edge in chain}:
        chain.append(ways[_nodes(situation, chain[-1].wanted)[0]])
    return chain


def _nodes(situation: Situation, name: str) -> list[Node]:
    return [Node(name, lease.lease) for lease in situation.in_use(name)]


def _edges_of(situation: Situation, held: str, lease: HeldLease) -> list[Edge]:
    """To the locks for which the holder of one waits; the certain ones first."""
    found: dict[str, Edge] = {}
    for name, queue in situation.queues.items():
        for waiting in (one for first in queue or () for one in first.everybody):
            if situation.at - waiting.since < SHORT_WAIT:
                continue
            if waiting.holder and lease.holder and (is_certain := _is_of(waiting, lease)) is not False:
                edge = Edge(held, lease.holder, name, waiting.holder, bool(is_certain))
                if edge.is_certain:
                    found[name] = edge
                elif name != held:  # others of its process may wait for what it holds
                    found.setdefault(name, edge)
    return sorted(found.values(), key=lambda edge: not edge.is_certain)


def _is_of(waiting: Waiting, lease: HeldLease) -> bool | None:
    """Whether it is the holder of a lease who waits. None: it may be, because names are not enough to know it."""
    waiter, holder = waiting.holder, lease.holder
    if not waiter or not holder or process(waiter) != process(holder):
        return False
    if waiting.has is None:
        return None if waiter.thread in ("", holder.thread) else False
    if lease.lease in waiting.has:
        return True if lease.kept != RESPONSE else None  # its thread or task has left what an open response keeps
    return False


def _circle(chain: Sequence[Edge]) -> Cause:
    begin = next(index for index, edge in enumerate(chain) if edge.held == chain[-1].wanted)
    circle = chain[begin:]
    is_certain = all(edge.is_certain for edge in circle)
    each = "; ".join(
        f"{who(edge.holder if edge.waiter.thread else edge.waiter)} holds {edge.held!r} and waits for {edge.wanted!r}"
        for edge in circle
    )
    advice = "Take locks in one order everywhere, so that nobody waits for one while others wait for it."
    if is_certain:
        return Cause("deadlock", f"Deadlock: {each}. {advice}")
    return Cause(
        "possible deadlock",
        f"Possible deadlock: {each}. Whether it is the same thread or task that holds and waits is not known. {advice}",
    )


def _waits_itself(situation: Situation, edge: Edge) -> Cause:
    leases = situation.in_use(edge.wanted)
    by = f", which {who(leases[0].holder)} holds" if leases else ""
    may = "waits" if edge.is_certain else "may wait"
    return Cause("waits itself", f"Its holder {may} itself, for {edge.wanted!r}{by}. Explain that lock.")


# What is wrong with a lease


def _of_lease(situation: Situation, lease: HeldLease) -> Iterator[Cause]:
    holder, at = who(lease.holder), situation.at
    if lease.ttl and lease.remaining is not None and lease.remaining < lease.ttl / 2:
        yield Cause(
            "holder stopped",
            f"{holder} has not renewed its lease for {format_duration(lease.ttl - lease.remaining)}: its process is"
            f" stopped or killed, or does not reach the store. The lock is free in {format_duration(lease.remaining)}"
            " unless it does.",
        )
    if lease.kept and (at - lease.kept_since >= KEPT_LONG or situation.waiting):
        since = format_duration(at - lease.kept_since)
        if lease.kept == RESPONSE:
            yield Cause(
                "open response",
                f"The view of {holder} has returned, but its response is not finished: the lock has been kept for it"
                f" for {since}. Who reads it is slow, or away; RESPONSE_MAX_HOLD bounds that.",
            )
        elif lease.kept == TRANSACTION:
            yield Cause(
                "open transaction",
                f"{holder} has left the lock, which has been kept for {since} until its transaction ends. Move what"
                " takes long out of the transaction.",
            )
    if copy := _copy_of(situation, lease):
        yield Cause(
            "task delivered again",
            f"{who(copy)} waits for the task that holds the lock, and is a copy of it: the broker has delivered the"
            " message again while it runs. Give the broker a visibility timeout that is longer than the task.",
        )
    yield from _long_hold(situation, lease)


def _copy_of(situation: Situation, lease: HeldLease) -> Holder | None:
    """Who waits with the same message of Celery as the holder has."""
    if not lease.holder or not lease.holder.message:
        return None
    waiting = [one.holder for first in situation.waiting or () for one in first.everybody]
    waiting += [entry.holder for entry in _since(situation, lease.since, Event.TIMED_OUT)]
    mine = execution(lease.holder)
    copies = (one for one in waiting if one and one.message == lease.holder.message and execution(one) != mine)
    return next(copies, None)


def _long_hold(situation: Situation, lease: HeldLease) -> Iterator[Cause]:
    held = situation.at - lease.since
    timed_out = _since(situation, lease.since, Event.TIMED_OUT)
    gave_up = [entry for entry in timed_out if entry.at - (entry.seconds or 0.0) >= lease.since]  # all for this lease
    is_long = situation.long_held is not None and held > situation.long_held
    if not is_long and not gave_up:
        return
    bound = f", longer than LONG_HELD ({format_duration(situation.long_held or 0.0)})" if is_long else ""
    text = f"{who(lease.holder)} has held it for {format_duration(held)}{bound}."
    if gave_up:
        last = gave_up[-1]
        text += (
            f" Meanwhile {len(gave_up)} gave up waiting, the last one at {moment(last.at, situation.at)} after"
            f" {format_duration(last.seconds or 0.0)}: {who(last.holder)}. Hold it for"
            " less, or let others wait for longer."
        )
    yield Cause("long hold", text)


def _since(situation: Situation, since: float, event: Event) -> list[JournalEntry]:
    return [entry for entry in situation.history if entry.event is event and entry.at >= since]


# What went wrong before


def _told(situation: Situation) -> Iterator[JournalEntry]:
    """What the journal tells of the time around the moment, of all locks.

    But not of the last second: what one process did then may be there, and what another one did before not yet.
    """
    last = min(situation.at + AFTER, situation.told_until)
    for entry in situation.entries or ():
        if situation.at - BEFORE <= entry.at <= last:
            yield entry


def _ran_out(situation: Situation) -> Iterator[Cause]:
    """Leases of this lock that were renewed, and after which others were granted though nothing tells of an end."""
    held = {lease.lease for lease in situation.held}
    standing: dict[str, JournalEntry] = {}
    for entry in _told(situation):
        if entry.name != situation.name:
            continue
        if entry.event in BEGINS:
            if not entry.holder or entry.holder.slots == 1:  # else others may go on beside it
                for lease in standing.keys() - {entry.lease, *held}:
                    yield from _without_an_end(situation, standing[lease], entry)
                standing.clear()
            if entry.text != NOT_RENEWED:
                standing[entry.lease] = entry
        elif entry.event in ENDS | RENEWED_NO_MORE:
            standing.pop(entry.lease, None)


def _without_an_end(situation: Situation, grant: JournalEntry, following: JournalEntry) -> Iterator[Cause]:
    """Nothing tells of an end of the lease before the next one was granted."""
    later = [entry for entry in situation.entries or () if entry.at >= following.at]
    ends = [entry for entry in later if entry.lease == grant.lease and entry.event in ENDS]
    if ends and ends[0].event is not Event.LOST:
        return  # its clock differs from that of the next holder
    if ends:
        learned = f"It went on at {moment(ends[0].at, situation.at)}, and learned then that the lease was over."
    elif any(entry.holder and grant.holder and process(entry.holder) == process(grant.holder) for entry in later):
        return  # it is at work, and what it noted of the end was more than it could write
    else:
        learned = "Nothing was heard of it since."
    yield Cause(
        "lease ran out",
        f"The lease of {who(grant.holder)} was not released: it had run out when {who(following.holder)} got the lock"
        f" at {moment(following.at, situation.at)}. The process was stopped or killed, or did not reach the store."
        f" {learned}",
    )


def _lost_data(situation: Situation) -> Iterator[Cause]:
    forced = {entry.lease for entry in situation.entries or () if entry.event is Event.FREED}
    lost = [
        entry
        for entry in _told(situation)
        if entry.event is Event.LOST and entry.text.startswith(FORGOTTEN) and entry.lease not in forced
    ]
    own = [entry for entry in lost if entry.name == situation.name]
    if not own:
        return
    first = own[-1]
    names = {entry.name for entry in lost if abs(entry.at - first.at) <= TOGETHER}
    when = moment(first.at, situation.at)
    if len(names) > 1:
        yield Cause(
            "store lost data",
            f"The store had lost its data by {when}, as after a failover or a restart without persistence: {len(names)}"
            f" locks that it no longer knew were lost within {format_duration(TOGETHER)}, this one while"
            f" {who(first.holder)} held it.",
        )
    else:
        yield Cause(
            "store lost data",
            f"At {when} the store no longer knew the lease of {who(first.holder)}: it had lost that, as after a"
            " failover, or somebody deleted the key.",
        )
