"""Finds causes of trouble with a lock, as far as they can be seen: why it is held for long, or why it was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from django.utils.translation import gettext, ngettext

from ..journal import BEGINS, ENDS, NOT_RENEWED, RENEWED_NO_MORE, RESPONSE, TRANSACTION, Event, JournalEntry
from ..types import Holder
from .situation import HeldLease, Situation, Waiting, execution, process
from .times import format_duration, moment

BEFORE, AFTER = 600.0, 60.0  # seconds of the journal around a moment that are read for it
KEPT_LONG = 2.0  # seconds; a lease that is kept longer than this after its holder has left it is worth a sentence
SHORT_WAIT = 1.0  # seconds; a shorter wait is no trouble, and its thread may not be in the journal yet
TOGETHER = 5.0  # seconds within which a loss of the store's data is noticed for most of its locks
FORGOTTEN = "the store no longer kn"  # the reason of a loss begins like this if the store no longer knows the lease


class Cause(NamedTuple):
    """A cause of trouble. ``kind``: a fixed text, for programs. ``sentence``: for people, in their language."""

    kind: str
    sentence: str


class Node(NamedTuple):
    """A lease of a lock, among those whose holders may wait for each other."""

    name: str
    lease: str


class Edge(NamedTuple):
    """A holder, and the lock for which it waits itself. ``waiter``: who waits, as far as is known.

    ``is_certain``: the waiting thread or task is certainly that of the holder.
    """

    held: str
    holder: Holder
    wanted: str
    waiter: Holder
    is_certain: bool


def causes(situation: Situation) -> list[Cause]:
    """Returns the causes, the most important first; empty if nothing wrong can be seen."""
    found = [*dict.fromkeys(_circles(situation))]
    for lease in situation.in_use(situation.name):
        found += _of_lease(situation, lease)
    return [*found, *_ran_out(situation), *_lost_data(situation)]


def who(holder: Holder | None) -> str:
    """Returns a text for the holder, as far as it is known."""
    if holder is None:
        return gettext("somebody")
    return str(holder) if holder.thread else f"pid {holder.pid} on {holder.host}"


# Circles


def _circles(situation: Situation) -> Iterator[Cause]:
    for lease in situation.in_use(situation.name):
        if chain := _chain(situation, Node(situation.name, lease.lease)):
            is_closed = chain[-1].wanted in {edge.held for edge in chain}
            yield _circle(chain) if is_closed else _waits_itself(situation, chain[0])


def _chain(situation: Situation, start: Node) -> list[Edge]:
    """Returns the steps from a lease to the lock for which its holder waits, and so on to a circle.

    If there is a certain circle, they lead to that. Without any circle, only the first step is returned.
    """
    edges = _edges_from(situation, start)
    certain = {node: [edge for edge in found if edge.is_certain] for node, found in edges.items()}
    for known in (certain, edges):
        ways = _ways_of_stuck(situation, known)
        if start in ways:
            return _way_round(situation, start, ways)
    return edges[start][:1]


def _edges_from(situation: Situation, start: Node) -> dict[Node, list[Edge]]:
    """Returns the edges of the lease, and of all leases that can be reached by them."""
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
    """Returns the leases whose holders wait for ever, each with an edge to a lock on which it is stuck.

    A holder is stuck on a lock if all leases of that lock have stuck holders. A lock with several slots does not block
    for ever as long as the holder of one slot continues.
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
    """Returns the edges to the locks for which the holder of this lease waits, the certain ones first."""
    found: dict[str, Edge] = {}
    for name, queue in situation.queues.items():
        for waiting in (one for first in queue or () for one in first.everybody):
            if situation.at - waiting.since < SHORT_WAIT:
                continue
            if waiting.holder and lease.holder and (is_certain := _is_of(waiting, lease)) is not False:
                edge = Edge(held, lease.holder, name, waiting.holder, bool(is_certain))
                if edge.is_certain:
                    found[name] = edge
                elif name != held:  # other threads or tasks of its process may wait for the lock that it holds
                    found.setdefault(name, edge)
    return sorted(found.values(), key=lambda edge: not edge.is_certain)


def _is_of(waiting: Waiting, lease: HeldLease) -> bool | None:
    """Returns whether the waiter is the holder of the lease. None: perhaps; names are not enough to know it."""
    waiter, holder = waiting.holder, lease.holder
    if not waiter or not holder or process(waiter) != process(holder):
        return False
    if waiting.has is None:
        return None if waiter.thread in ("", holder.thread) else False
    if lease.lease in waiting.has:
        return True if lease.kept != RESPONSE else None  # kept by an open response: its thread or task has left it
    return False


def _circle(chain: Sequence[Edge]) -> Cause:
    begin = next(index for index, edge in enumerate(chain) if edge.held == chain[-1].wanted)
    circle = chain[begin:]
    is_certain = all(edge.is_certain for edge in circle)
    each = "; ".join(
        gettext("%(who)s holds %(held)r and waits for %(wanted)r")
        % {
            "who": who(edge.holder if edge.waiter.thread else edge.waiter),
            "held": edge.held,
            "wanted": edge.wanted,
        }
        for edge in circle
    )
    if is_certain:
        text = gettext(
            "Deadlock: %(circle)s. Take locks in one order everywhere, so that nobody waits for one while others wait"
            " for it."
        )
        return Cause("deadlock", text % {"circle": each})
    text = gettext(
        "Possible deadlock: %(circle)s. Whether it is the same thread or task that holds and waits is not known. Take"
        " locks in one order everywhere, so that nobody waits for one while others wait for it."
    )
    return Cause("possible deadlock", text % {"circle": each})


def _waits_itself(situation: Situation, edge: Edge) -> Cause:
    leases = situation.in_use(edge.wanted)
    if leases and edge.is_certain:
        text = gettext("Its holder waits itself, for %(wanted)r, which %(who)s holds. Explain that lock.")
    elif leases:
        text = gettext("Its holder may wait itself, for %(wanted)r, which %(who)s holds. Explain that lock.")
    elif edge.is_certain:
        text = gettext("Its holder waits itself, for %(wanted)r. Explain that lock.")
    else:
        text = gettext("Its holder may wait itself, for %(wanted)r. Explain that lock.")
    return Cause("waits itself", text % {"wanted": edge.wanted, "who": who(leases[0].holder if leases else None)})


# What is wrong with a lease


def _of_lease(situation: Situation, lease: HeldLease) -> Iterator[Cause]:
    holder, at = who(lease.holder), situation.at
    if lease.ttl and lease.remaining is not None and lease.remaining < lease.ttl / 2:
        text = gettext(
            "%(who)s has not renewed its lease for %(time)s: its process is stopped or killed, or does not reach the"
            " store. The lock is free in %(left)s unless it does."
        )
        silent, left = format_duration(lease.ttl - lease.remaining), format_duration(lease.remaining)
        yield Cause("holder stopped", text % {"who": holder, "time": silent, "left": left})
    if lease.kept and (at - lease.kept_since >= KEPT_LONG or situation.waiting):
        about = {"who": holder, "time": format_duration(at - lease.kept_since)}
        if lease.kept == RESPONSE:
            text = gettext(
                "The view of %(who)s has returned, but its response is not finished: the lock has been kept for it for"
                " %(time)s. Who reads it is slow, or away; RESPONSE_MAX_HOLD bounds that."
            )
            yield Cause("open response", text % about)
        elif lease.kept == TRANSACTION:
            text = gettext(
                "%(who)s has left the lock, which has been kept for %(time)s until its transaction ends. Move what"
                " takes long out of the transaction."
            )
            yield Cause("open transaction", text % about)
    if copy := _copy_of(situation, lease):
        text = gettext(
            "%(who)s waits for the task that holds the lock, and is a copy of it: the broker has delivered the message"
            " again while it runs. Give the broker a visibility timeout that is longer than the task."
        )
        yield Cause("task delivered again", text % {"who": who(copy)})
    yield from _long_hold(situation, lease)


def _copy_of(situation: Situation, lease: HeldLease) -> Holder | None:
    """Returns a waiter for the same Celery message as the holder's; None if there is none."""
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
    if is_long:
        text = gettext("%(who)s has held it for %(time)s, longer than LONG_HELD (%(bound)s).")
    else:
        text = gettext("%(who)s has held it for %(time)s.")
    bound = format_duration(situation.long_held or 0.0)
    sentences = [text % {"who": who(lease.holder), "time": format_duration(held), "bound": bound}]
    if gave_up:
        last = gave_up[-1]
        text = ngettext(
            "Meanwhile %(count)d gave up waiting, the last one at %(at)s after %(time)s: %(who)s. Hold it for less, or"
            " let others wait for longer.",
            "Meanwhile %(count)d gave up waiting, the last one at %(at)s after %(time)s: %(who)s. Hold it for less, or"
            " let others wait for longer.",
            len(gave_up),
        )
        about = {"at": moment(last.at, situation.at), "time": format_duration(last.seconds or 0.0)}
        sentences.append(text % {"count": len(gave_up), "who": who(last.holder), **about})
    yield Cause("long hold", " ".join(sentences))


def _since(situation: Situation, since: float, event: Event) -> list[JournalEntry]:
    return [entry for entry in situation.history if entry.event is event and entry.at >= since]


# What went wrong before


def _told(situation: Situation) -> Iterator[JournalEntry]:
    """Yields the journal's entries around the moment, of all locks.

    The last second is left out: the journal may have events of one process, but not yet earlier ones of another.
    """
    last = min(situation.at + AFTER, situation.told_until)
    for entry in situation.entries or ():
        if situation.at - BEFORE <= entry.at <= last:
            yield entry


def _ran_out(situation: Situation) -> Iterator[Cause]:
    """Yields a cause for each renewed lease of this lock that has no recorded end before another lease was granted."""
    held = {lease.lease for lease in situation.held}
    standing: dict[str, JournalEntry] = {}
    for entry in _told(situation):
        if entry.name != situation.name:
            continue
        if entry.event in BEGINS:
            if not entry.holder or entry.holder.slots == 1:  # otherwise others may hold the lock at the same time
                for lease in standing.keys() - {entry.lease, *held}:
                    yield from _without_an_end(situation, standing[lease], entry)
                standing.clear()
            if entry.text != NOT_RENEWED:
                standing[entry.lease] = entry
        elif entry.event in ENDS | RENEWED_NO_MORE:
            standing.pop(entry.lease, None)


def _without_an_end(situation: Situation, grant: JournalEntry, following: JournalEntry) -> Iterator[Cause]:
    """Yields the cause if the lease has no recorded end before the next lease was granted."""
    later = [entry for entry in situation.entries or () if entry.at >= following.at]
    ends = [entry for entry in later if entry.lease == grant.lease and entry.event in ENDS]
    if ends and ends[0].event is not Event.LOST:
        return  # its clock differs from the clock of the next holder
    if ends:
        learned = gettext("It went on at %(at)s, and learned then that the lease was over.")
        learned %= {"at": moment(ends[0].at, situation.at)}
    elif any(entry.holder and grant.holder and process(entry.holder) == process(grant.holder) for entry in later):
        return  # the process is at work, and had more events than it could write, so the end is missing
    else:
        learned = gettext("Nothing was heard of it since.")
    text = gettext(
        "The lease of %(who)s was not released: it had run out when %(next)s got the lock at %(at)s. The process was"
        " stopped or killed, or did not reach the store."
    )
    text %= {"who": who(grant.holder), "next": who(following.holder), "at": moment(following.at, situation.at)}
    yield Cause("lease ran out", f"{text} {learned}")


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
    about = {"at": moment(first.at, situation.at), "who": who(first.holder), "time": format_duration(TOGETHER)}
    if len(names) > 1:
        text = ngettext(
            "The store had lost its data by %(at)s, as after a failover or a restart without persistence: %(count)d"
            " locks that it no longer knew were lost within %(time)s, this one while %(who)s held it.",
            "The store had lost its data by %(at)s, as after a failover or a restart without persistence: %(count)d"
            " locks that it no longer knew were lost within %(time)s, this one while %(who)s held it.",
            len(names),
        )
        yield Cause("store lost data", text % {"count": len(names), **about})
    else:
        text = gettext(
            "At %(at)s the store no longer knew the lease of %(who)s: it had lost that, as after a failover, or"
            " somebody deleted the key."
        )
        yield Cause("store lost data", text % about)
