"""What commands print of locks, as rows for people and as JSON for programs. Tokens are in neither."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from math import isinf
from typing import Any

from ..utils.text import printable
from .inventory import Inventory, Key, Seen, format_duration, held_for, holding_nodes, long_held

HEADING = ("NAME", "BACKEND", "LABEL", "HOLDER", "HELD", "LEFT", "WAITING")
FLEXIBLE = (0, 2, 3)  # columns that are cut where there is no room
SPARE = (6, 1, 4, 2)  # that are left out, in this order, where there is less


def state(seen: Seen) -> str:
    if seen.info.holder is None:
        return "handed over"
    return "resting" if seen.info.resting else "held"


def rows(found: Sequence[tuple[Seen, int | None]]) -> list[tuple[str, ...]]:
    """With a heading, and with a column of nodes if any of the locks is on a quorum."""
    lines = [HEADING, *(_row(*lock) for lock in found)]
    if all(seen.info.nodes is None for seen, _ in found):
        return lines
    nodes = ["NODES", *(holding_nodes(seen.info) or "-" for seen, _ in found)]
    return [(*line, cell) for line, cell in zip(lines, nodes, strict=True)]


def _row(seen: Seen, waiting: int | None) -> tuple[str, ...]:
    info, held = seen.info, held_for(seen.info)
    process = f"{info.holder.pid}@{info.holder.host}" if info.holder else ""
    return (
        info.name,
        info.using,
        info.holder.label if info.holder else "",
        process if state(seen) == "held" else f"{process} ({state(seen)})".lstrip(),
        "-" if held is None else format_duration(held) + (" (long)" if long_held(info) else ""),
        "-" if isinf(seen.remaining) else format_duration(seen.remaining),
        "-" if waiting is None else str(waiting),
    )


def as_json(seen: Seen, waiting: int | None) -> dict[str, Any]:
    """``lease`` names the lease without its token. Seconds are floats, or null where they are not known."""
    info, holder = seen.info, seen.info.holder
    held = held_for(info)
    return {
        "name": info.name,
        "using": info.using,
        "lease": info.digest,
        "state": state(seen),
        "holder": holder and {"host": holder.host, "pid": holder.pid, "thread": holder.thread, "label": holder.label},
        "granted_at": info.granted_at and info.granted_at.isoformat(),
        "held_for": held and round(held, 3),
        "held_long": long_held(info) is not None,
        "remaining": None if isinf(seen.remaining) else round(seen.remaining, 3),
        "fence": info.fence,
        "waiting": waiting,
        "nodes": info.nodes,
    }


def looked_at(inventory: Inventory, keys: Iterable[Key]) -> list[tuple[Seen, int | None]]:
    """Those that are still held, and how many wait for each."""
    seen = inventory.look(keys)
    waiting = inventory.count_waiters(list(seen))
    return [(lock, waiting[key]) for key, lock in seen.items()]


GAP = "  "
NARROWEST = 8  # columns to which a column of a table may shrink


def width(text: str) -> int:
    """Columns of a terminal: those of East Asia take two, marks that combine take none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def table(
    rows: Sequence[Sequence[str]], most: int | None = None, flexible: Sequence[int] = (), spare: Sequence[int] = ()
) -> list[str]:
    """Lines of at most ``most`` columns of the terminal; None: as wide as it gets.

    Of the flexible columns of the table the widest is cut first. Where that does not do, spare ones are left out.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = dict(enumerate(max(map(width, column)) for column in zip(*cells, strict=True)))
    if most is not None:
        _leave_out(spare, widths, most, flexible)
        _cut(widths, most, flexible)
    return [GAP.join(padded(cut(row[column], size), size) for column, size in widths.items()).rstrip() for row in cells]


def _leave_out(spare: Sequence[int], widths: dict[int, int], most: int, flexible: Sequence[int]) -> None:
    for column in spare:
        narrowest = [min(size, NARROWEST) if column in flexible else size for column, size in widths.items()]
        if _total(narrowest) > most:
            del widths[column]


def _cut(widths: dict[int, int], most: int, flexible: Sequence[int]) -> None:
    to_cut = [column for column in flexible if column in widths]
    widths.update({column: min(widths[column], most) for column in to_cut})
    while _total(list(widths.values())) > most and to_cut:
        widest = max(to_cut, key=widths.__getitem__)
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def padded(text: str, size: int) -> str:
    return text + " " * (size - width(text))


def cut(text: str, size: int) -> str:
    if width(text) <= size:
        return text
    used, kept = 0, []
    for character in text:
        used += width(character)
        if used > size - 1:
            break
        kept.append(character)
    return f"{''.join(kept)}…"
