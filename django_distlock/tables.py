"""Text for terminals: tables that fit, and names that cannot steer the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

GAP = "  "
NARROWEST = 8  # columns to which a column of a table may shrink


def printable(text: str) -> str:
    """Line breaks and control characters as escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def width(text: str) -> int:
    """Columns of a terminal: those of East Asia take two, marks that combine take none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def table(rows: Sequence[Sequence[str]], most: int | None = None, flexible: Sequence[int] = ()) -> list[str]:
    """Lines of at most ``most`` columns; None: as wide as it gets. Of the flexible columns the widest is cut first."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    if most is not None:
        room = most - len(GAP) * (len(widths) - 1)
        while sum(widths) > room and flexible:
            widest = max(flexible, key=lambda column: widths[column])
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
    return [
        GAP.join(padded(cut(cell, size), size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def padded(text: str, size: int) -> str:
    return text + " " * (size - width(text))


def cut(text: str, size: int) -> str:
    if width(text) <= size:
        return text
    while width(text) > size - 1:
        text = text[:-1]
    return f"{text}…"
