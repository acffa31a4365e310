"""Formats locks as commands print them: a table for people, JSON for programs. Neither has tokens."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from math import isinf
from typing import Any

from django.utils.translation import gettext, ngettext, pgettext, pgettext_lazy

from ..models import title_of
from ..utils.text import printable
from .inventory import Inventory, SeenLock, SlotKey, held_for, holding_nodes, long_held
from .times import format_duration

HEADING = (
    pgettext_lazy("heading of a column", "NAME"),
    pgettext_lazy("heading of a column", "BACKEND"),
    pgettext_lazy("heading of a column", "LABEL"),
    pgettext_lazy("heading of a column", "HOLDER"),
    pgettext_lazy("heading of a column", "HELD"),
    pgettext_lazy("heading of a column", "LEFT"),
    pgettext_lazy("heading of a column", "WAITING"),
)
STATES = {
    "held": pgettext_lazy("state of a lock", "held"),
    "handed over": pgettext_lazy("state of a lock", "handed over"),
    "resting": pgettext_lazy("state of a lock", "resting"),
}
FLEXIBLE = (0, 2, 3)  # columns to truncate if the terminal is narrow
OPTIONAL = (6, 1, 4, 2)  # columns to drop, in this order, if it is even narrower

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
DELETE = "\x7f"  # the only control character that JSON does not escape
NOT_ASCII = re.compile(r"[^ -~]")


def state(seen: SeenLock) -> str:
    """Returns the state for programs; STATES has the texts for people."""
    if seen.info.holder is None:
        return "handed over"
    return "resting" if seen.info.resting else "held"


def rows(found: Sequence[tuple[SeenLock, int | None]]) -> list[tuple[str, ...]]:
    """Returns a heading and a row for each lease, with a column of nodes if any lease is on a quorum."""
    lines = [tuple(map(str, HEADING)), *(_row(*lock) for lock in found)]
    if all(seen.info.nodes is None for seen, _ in found):
        return lines
    nodes = [pgettext("heading of a column", "NODES"), *(holding_nodes(seen.info) or "-" for seen, _ in found)]
    return [(*line, cell) for line, cell in zip(lines, nodes, strict=True)]


def _row(seen: SeenLock, waiting: int | None) -> tuple[str, ...]:
    info, held = seen.info, held_for(seen.info)
    process = f"{info.holder.pid}@{info.holder.host}" if info.holder else ""
    time = "-" if held is None else format_duration(held)
    return (
        title_of(info),
        info.using,
        info.holder.label if info.holder else "",
        process if state(seen) == "held" else f"{process} ({STATES[state(seen)]})".lstrip(),
        gettext("%(time)s (long)") % {"time": time} if long_held(info, held) else time,
        "-" if isinf(seen.remaining) else format_duration(seen.remaining),
        "-" if waiting is None else str(waiting),
    )


def facts(seen: SeenLock, waiting: int | None) -> list[tuple[str, str]]:
    """Returns what is known about one lease: pairs of the name of a fact, and the fact."""
    info, held = seen.info, held_for(seen.info)
    long = long_held(info, held)
    time = "-" if held is None else format_duration(held)
    if long:
        time = gettext("%(time)s, longer than LONG_HELD (%(bound)s)") % {"time": time, "bound": format_duration(long)}
    nodes = holding_nodes(info)
    return [
        (gettext("backend"), info.using),
        (gettext("state"), str(STATES[state(seen)])),
        (gettext("holder"), str(info.holder or "-")),
        (gettext("granted at"), info.granted_at.isoformat(" ", "seconds") if info.granted_at else "-"),
        (gettext("held for"), time),
        (gettext("time left"), "-" if isinf(seen.remaining) else format_duration(seen.remaining)),
        (gettext("waiting"), "-" if waiting is None else str(waiting)),
        (gettext("fencing number"), str(info.fence)),
        (gettext("lease"), info.digest),
        *([(gettext("nodes"), nodes)] if nodes else []),
    ]


def counts(shown: int, hidden: int, prefix: str) -> Iterator[str]:
    """Yields sentences with the numbers of locks. ``prefix``: the beginning of names, if none are found."""
    count = shown + hidden
    if prefix:
        text = ngettext(
            "%(count)d held whose names begin with %(prefix)r",
            "%(count)d held whose names begin with %(prefix)r",
            count,
        )
    else:
        text = ngettext("%(count)d held", "%(count)d held", count)
    yield text % {"count": count, "prefix": prefix}
    if hidden:
        yield ngettext("%(count)d of them not shown", "%(count)d of them not shown", hidden) % {"count": hidden}


def deleted(rows: int, age: float) -> str:
    text = ngettext(
        "%(count)d row deleted, of locks that nobody has held for %(time)s, and of runs of beat and journals as old.",
        "%(count)d rows deleted, of locks that nobody has held for %(time)s, and of runs of beat and journals as old.",
        rows,
    )
    return text % {"count": rows, "time": format_duration(age)}


def as_json(seen: SeenLock, waiting: int | None) -> dict[str, Any]:
    """Returns the dict for JSON. ``lease`` is an id of the lease, not its token. Seconds are floats; null if unknown.

    ``slots``: how many may hold the lock at once, as its holder says; null if unknown.
    """
    info, holder, granted_at = seen.info, seen.info.holder, seen.info.granted_at
    held, remaining = held_for(info), seen.remaining
    return {
        "name": info.name,
        "using": info.using,
        "slot": info.slot,
        "slots": info.slots,
        "lease": info.digest,
        "state": state(seen),
        "holder": holder and {"host": holder.host, "pid": holder.pid, "thread": holder.thread, "label": holder.label},
        "granted_at": granted_at and granted_at.isoformat(),
        "held_for": held and round(held, 3),
        "held_long": long_held(info, held) is not None,
        "remaining": None if isinf(remaining) else round(remaining, 3),
        "fence": info.fence,
        "waiting": waiting,
        "nodes": info.nodes,
    }


def look_with_waiters(inventory: Inventory, keys: Iterable[SlotKey]) -> list[tuple[SeenLock, int | None]]:
    """Returns the leases that still exist, and how many callers wait for the lock of each."""
    return with_waiters(inventory, inventory.look_once(keys).values())


def with_waiters(inventory: Inventory, leases: Iterable[SeenLock]) -> list[tuple[SeenLock, int | None]]:
    seen = list(leases)
    locks = [lease.lock for lease in seen]
    waiting = inventory.count_waiters_once(locks)
    return [*zip(seen, map(waiting.__getitem__, locks), strict=True)]


PORTION = 250  # locks: the more objects live together, the more often Python's garbage collector visits them


def in_portions(inventory: Inventory) -> Iterator[list[tuple[SeenLock, int | None]]]:
    """Yields the same for all locks, perhaps millions of them: one portion after the other, without keeping any."""
    locks = inventory.keys().locks()
    while portion := list(islice(locks, PORTION)):
        yield with_waiters(inventory, chain.from_iterable(inventory.leases_once(portion).values()))


GAP = "  "
MIN_WIDTH = 8  # the smallest width of a truncated column, in columns of the terminal


def width(text: str) -> int:
    """Returns how many columns of a terminal the text takes: East Asian characters two, combining marks none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def table(
    rows: Sequence[Sequence[str]],
    max_width: int | None = None,
    flexible: Sequence[int] = (),
    optional: Sequence[int] = (),
) -> list[str]:
    """Returns the lines of a table of at most ``max_width`` columns of the terminal; None: as wide as its content.

    The widest of the flexible columns is truncated first. If that is not enough, optional ones are dropped.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = dict(enumerate(max(map(width, column)) for column in zip(*cells, strict=True)))
    if max_width is not None:
        _drop(optional, widths, max_width, flexible)
        _shrink(widths, max_width, flexible)
    return [
        GAP.join(padded(truncated(row[column], size), size) for column, size in widths.items()).rstrip()
        for row in cells
    ]


def _drop(optional: Sequence[int], widths: dict[int, int], max_width: int, flexible: Sequence[int]) -> None:
    for column in optional:
        narrowest = [min(size, MIN_WIDTH) if column in flexible else size for column, size in widths.items()]
        if _total(narrowest) > max_width:
            del widths[column]


def _shrink(widths: dict[int, int], max_width: int, flexible: Sequence[int]) -> None:
    flexible = [column for column in flexible if column in widths]
    widths.update({column: min(widths[column], max_width) for column in flexible})
    while _total(list(widths.values())) > max_width and flexible:
        widest = max(flexible, key=widths.__getitem__)
        if widths[widest] <= MIN_WIDTH:
            break
        widths[widest] -= 1


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def padded(text: str, size: int) -> str:
    return text + " " * (size - width(text))


def truncated(text: str, size: int) -> str:
    if width(text) <= size:
        return text
    used, kept = 0, []
    for character in text:
        used += width(character)
        if used > size - 1:
            break
        kept.append(character)
    return f"{''.join(kept)}…"


def json_text(data: Any) -> str:
    """Returns one line of JSON. Characters that control a terminal are escaped, so that programs read the same text."""
    text = _encode(data)
    if text.isascii() and DELETE not in text:
        return text
    return NOT_ASCII.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)
