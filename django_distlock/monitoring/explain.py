"""Explains the situation of a lock, for the command and for the admin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.utils.translation import gettext, gettext_noop, ngettext, override, pgettext, pgettext_lazy

from ..journal import RESPONSE, TRANSACTION, Event, JournalEntry
from ..types import Holder
from .causes import causes, who
from .formatting import padded, width
from .situation import HeldLease, Situation, Waiting
from .times import format_duration, moment

LATELY = 20  # how many events are shown
NO_JOURNAL = gettext_noop(
    "JOURNAL is not set for %(using)r, so what happened lately is not known, and who waits only in part."
)
EVENTS = {
    Event.WAITS: pgettext_lazy("event of a lock", "waits"),
    Event.GRANTED: pgettext_lazy("event of a lock", "granted"),
    Event.ADOPTED: pgettext_lazy("event of a lock", "adopted"),
    Event.KEPT: pgettext_lazy("event of a lock", "kept"),
    Event.BOUND_REACHED: pgettext_lazy("event of a lock", "bound reached"),
    Event.RELEASED: pgettext_lazy("event of a lock", "released"),
    Event.DETACHED: pgettext_lazy("event of a lock", "detached"),
    Event.LOST: pgettext_lazy("event of a lock", "lost"),
    Event.FREED: pgettext_lazy("event of a lock", "freed"),
    Event.TIMED_OUT: pgettext_lazy("event of a lock", "timed out"),
    Event.WAIT_ENDED: pgettext_lazy("event of a lock", "wait ended"),
}


def is_empty(situation: Situation) -> bool:
    return not (situation.held or situation.waiting or situation.history)


def holders(situation: Situation) -> list[str]:
    if not situation.is_holder_known:
        return [_not_known(situation)]
    return [_held(lease, situation) for lease in situation.held] or [gettext("Nobody holds it.")]


def _not_known(situation: Situation) -> str:
    if not situation.entries:
        return gettext("Who held it then is not known: no journal tells.")
    text = gettext("Who held it then is not known: the journal begins at %(at)s.")
    return text % {"at": moment(situation.entries[0].at, situation.at)}


def waiters(situation: Situation) -> list[str]:
    """Returns a line for each waiter, in their order."""
    if situation.waiting is None:
        return [gettext("Who waits is not known: its store has no queue, and no journal tells.")]
    return [_waiting(one, situation) for one in situation.waiting] or [gettext("Nobody waits.")]


def lately(situation: Situation) -> list[tuple[str, str, str]]:
    """Returns the last events: when each happened, what it was, and details."""
    last = situation.history[-LATELY:]
    return [(moment(entry.at, situation.at), str(EVENTS[entry.event]), _told(entry)) for entry in last]


def why(situation: Situation) -> list[str]:
    found = [cause.sentence for cause in causes(situation)]
    if situation.unread:
        found.append(gettext("The journal cannot be read: %(error)s") % {"error": situation.unread})
    elif situation.entries is None:
        found.append(gettext(NO_JOURNAL) % {"using": situation.using})
    return found or [gettext("Nothing is seen to be wrong.")]


def as_data(situation: Situation) -> dict[str, Any]:
    """Returns the explanation for programs, in English."""
    with override(None):
        found = causes(situation)
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
        "causes": [cause._asdict() for cause in found],
    }  # fmt: skip


def _of(holder: Holder | None) -> dict[str, Any]:
    if holder is None:
        return {"host": None, "pid": None, "thread": None, "label": None}
    return {"host": holder.host, "pid": holder.pid, "thread": holder.thread or None, "label": holder.label or None}


def _held(lease: HeldLease, situation: Situation) -> str:
    if lease.holder is None:
        return gettext("It is being handed over to a waiter that has not taken it yet.")
    about = {
        "who": who(lease.holder),
        "at": moment(lease.since, situation.at),
        "time": format_duration(max(0.0, situation.at - lease.since)),
        "left": "" if lease.remaining is None else format_duration(lease.remaining),
        "fence": lease.fence,
    }
    if lease.resting:
        if about["left"]:
            text = gettext("It rests for the min_hold of %(who)s, which took it at %(at)s. %(left)s left.")
        else:
            text = gettext("It rests for the min_hold of %(who)s, which took it at %(at)s.")
        return text % about
    parts = [pgettext("holder", "%(who)s since %(at)s, for %(time)s")]
    if lease.kept == RESPONSE:
        parts.append(gettext(", kept for its response"))
    elif lease.kept == TRANSACTION:
        parts.append(gettext(", kept for its transaction"))
    if about["left"] and lease.until is None:
        parts.append(gettext(", %(left)s left unless renewed"))
    elif about["left"]:
        parts.append(gettext(", %(left)s left and not renewed"))
    parts.append(gettext(". Fencing number %(fence)d."))
    return "".join(parts) % about


def _waiting(waiting: Waiting, situation: Situation) -> str:
    text, behind = pgettext("waiter", "%(who)s since %(at)s, for %(time)s"), len(waiting.behind)
    if behind:
        text += ngettext(
            ", and %(count)d more of its process behind it", ", and %(count)d more of its process behind it", behind
        )
    return text % {
        "who": who(waiting.holder),
        "at": moment(waiting.since, situation.at),
        "time": format_duration(max(0.0, situation.at - waiting.since)),
        "count": behind,
    }


def _told(entry: JournalEntry) -> str:
    match entry.event:
        case Event.WAITS if entry.seconds is None:
            text = gettext("%(who)s, for as long as it takes")
        case Event.WAITS:
            text = gettext("%(who)s, for %(time)s at most")
        case Event.GRANTED:
            text = gettext("%(who)s, after %(time)s, fencing number %(fence)d")
        case Event.TIMED_OUT if entry.text:
            text = gettext("%(who)s, after %(time)s; %(text)s held it")
        case Event.FREED:
            text = gettext("%(who)s, by %(text)s")
        case Event.KEPT if entry.text == RESPONSE:
            text = gettext("%(who)s, for its response, after %(time)s")
        case Event.KEPT:
            text = gettext("%(who)s, for its transaction, after %(time)s")
        case _ if entry.text:
            text = gettext("%(who)s, after %(time)s: %(text)s")
        case _:
            text = gettext("%(who)s, after %(time)s")
    return text % {
        "who": who(entry.holder),
        "time": format_duration(max(0.0, entry.seconds or 0.0)),
        "fence": entry.fence,
        "text": entry.text,
    }


def lines(situation: Situation) -> Iterator[tuple[str, list[str]]]:
    """Yields the heading and the lines of each part."""
    yield pgettext("heading", "Held by"), holders(situation)
    yield pgettext("heading", "Waiting"), waiters(situation)
    if situation.entries is not None:
        events = lately(situation)
        size = max((width(event) for _, event, _ in events), default=0)
        history = [f"{at}  {padded(event, size)}  {told}" for at, event, told in events]
        yield pgettext("heading", "Lately"), history or [gettext("Nothing is in the journal.")]
    yield pgettext("heading", "Why"), why(situation)
