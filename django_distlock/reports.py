"""What commands print of locks, as rows for people and as JSON for programs. Tokens are in neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isinf
from typing import Any

from .inventory import Inventory, Key, Seen, held_for, holding_nodes, in_words, long_held

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
        "-" if held is None else in_words(held) + (" (long)" if long_held(info) else ""),
        "-" if isinf(seen.remaining) else in_words(seen.remaining),
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
