"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Column(NamedTuple):
    key: str
    heading: str
    format: str | None = None  # None: text

    def text(self, row: Mapping[str, Any]) -> str:
        return str(row[self.key]) if self.format is None else format(row[self.key], self.format)


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        cells = [[column.text(row) for column in self.columns] for row in self.rows]
        lines = [[column.heading for column in self.columns], *cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([self.title, *(self._line(line, widths) for line in lines)])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        aligned = [
            cell.ljust(width) if column.format is None else cell.rjust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        ]
        return "  " + "  ".join(aligned).rstrip()
