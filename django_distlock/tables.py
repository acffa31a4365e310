"""Tables that fit a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from .utils.text import printable

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
