"""The explanation of a lock, as the command prints it and as the admin shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..journal import Event, JournalEntry
from ..types import Holder
from .causes import causes, moment, who
from .inventory import format_duration
from .situation import HeldLease, Situation, Waiting

LATELY = 20  # events that are shown
NO_JOURNAL = "JOURNAL is not set for {using!r}, so what happened lately is not known, and who waits only in part."
NO_CAUSE = "Nothing is seen to be wrong."


def is_empty(situation: Situation) -> bool:
    return not (situation.held or situation.waiting or situation.history)


def holders(situation: Situation) -> list[str]:
    if not situation.is_holder_known:
        return [_not_known(situation)]
    return [_held(lease, situation) for lease in situation.held] or ["Nobody holds it."]


def _not_known(situation: Situation) -> str:
    if not situation.entries:
        return "Who held it then is not known: no journal tells."
    begin = moment(situation.entries[0].at, situation.at)
    return f"Who held it then is not known: the journal begins at {begin}."


def waiters(situation: Situation) -> list[str]:
    """In their order."""
    if situation.waiting is None:
        return ["Who waits is not known: its store has no queue, and no journal tells."]
    return [_waiting(one, situation) for one in situation.waiting] or ["Nobody waits."]


def lately(situation: Situation) -> list[tuple[str, str, str]]:
    """When, what, and to whom, of the last events."""
    return [(moment(entry.at, situation.at), entry.event, _told(entry)) for entry in situation.history[-LATELY:]]


def why(situation: Situation) -> list[str]:
    found = [cause.sentence for cause in causes(situation)]
    if situation.unread:
        found.append(f"The journal cannot be read: {situation.unread}")
    elif situation.entries is None:
        found.append(NO_JOURNAL.format(using=situation.using))
    return found or [NO_CAUSE]


def as_data(situation: Situation) -> dict[str, Any]:
    """For programs."""
    return {
        "name": situation.name,
        "using": situation.using,
        "at": round(situation.at, 3),
        "holders": None if not situation.is_holder_known else [
            {
                **_of(lease.holder),
                "lease": lease.lease,
                "since": round(lease.since, 3),
                "fence": lease.fence,
                "remaining": lease.remaining,
                "kept": lease.kept,
                "resting": lease.resting,
            }
            for lease in situation.held
        ],
        "waiting": None if situation.waiting is None else [
            {**_of(one.holder), "since": round(one.since, 3), "behind": len(one.behind)} for one in situation.waiting
        ],
        "lately": None if situation.entries is None else [
            {
                "at": round(entry.at, 3), "event": entry.event, **_of(entry.holder), "lease": entry.lease,
                "fence": entry.fence, "seconds": entry.seconds, "text": entry.text,
            }
            for entry in situation.history[-LATELY:]
        ],
        "causes": [cause._asdict() for cause in causes(situation)],
    }  # fmt: skip


def _of(holder: Holder | None) -> dict[str, Any]:
    if holder is None:
        return {"host": None, "pid": None, "thread": None, "label": None}
    return {"host": holder.host, "pid": holder.pid, "thread": holder.thread or None, "label": holder.label or None}


def _held(lease: HeldLease, situation: Situation) -> str:
    at = situation.at
    if lease.holder is None:
        return "It is being handed over to a waiter that has not taken it yet."
    if lease.resting:
        left = "" if lease.remaining is None else f" {format_duration(lease.remaining)} left."
        return f"It rests for the min_hold of {who(lease.holder)}, which took it at {moment(lease.since, at)}.{left}"
    renewed = "unless renewed" if lease.until is None else "and not renewed"
    left = "" if lease.remaining is None else f", {format_duration(lease.remaining)} left {renewed}"
    kept = f", kept for its {lease.kept}" if lease.kept else ""
    held = format_duration(max(0.0, at - lease.since))
    return f"{who(lease.holder)} since {moment(lease.since, at)}, for {held}{kept}{left}. Fencing number {lease.fence}."


def _waiting(waiting: Waiting, situation: Situation) -> str:
    behind = f", and {len(waiting.behind)} more of its process behind it" if waiting.behind else ""
    seconds = format_duration(max(0.0, situation.at - waiting.since))
    return f"{who(waiting.holder)} since {moment(waiting.since, situation.at)}, for {seconds}{behind}"


def _told(entry: JournalEntry) -> str:
    seconds = None if entry.seconds is None else format_duration(max(0.0, entry.seconds))
    match entry.event:
        case Event.WAITS:
            more = "for as long as it takes" if seconds is None else f"for {seconds} at most"
        case Event.GRANTED:
            more = f"after {seconds}, fencing number {entry.fence}"
        case Event.TIMED_OUT:
            more = f"after {seconds}" + (f"; {entry.text} held it" if entry.text else "")
        case Event.FREED:
            more = f"by {entry.text}"
        case Event.KEPT:
            more = f"for its {entry.text}, after {seconds}"
        case _:
            more = f"after {seconds}" + (f": {entry.text}" if entry.text else "")
    return f"{who(entry.holder)}, {more}"


def lines(situation: Situation) -> Iterator[tuple[str, list[str]]]:
    """Heading and lines of each part."""
    yield "Held by", holders(situation)
    yield "Waiting", waiters(situation)
    if situation.entries is not None:
        events = lately(situation)
        width = max((len(event) for _, event, _ in events), default=0)
        history = [f"{at}  {event:<{width}}  {told}" for at, event, told in events]
        yield "Lately", history or ["Nothing is in the journal."]
    yield "Why", why(situation)
