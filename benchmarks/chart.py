"""The chart for the documentation: bars in an SVG that follows the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from .contenders import FLOOR, OURS
from .report import Table

WIDTH = 760
LABELS = 230  # the width for the names, left of the bars
FIGURES = 80  # the width for the numbers, right of them
BAR, GAP, HEADING = 16, 8, 44

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 }
  .ours { fill: #0b6e4f } .floor { fill: #8c959f } .other { fill: #b9c6d2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #d0d7de }
    .ours { fill: #2ea37a } .floor { fill: #6e7781 } .other { fill: #46525e }
  }"""


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[tuple[str, float]]

    @property
    def height(self) -> int:
        return HEADING + len(self.bars) * (BAR + GAP)

    def drawn(self, top: int) -> Iterator[str]:
        yield f'<text class="title" x="0" y="{top + 26}">{escape(self.title)}</text>'
        scale = (WIDTH - LABELS - FIGURES) / max(value for _, value in self.bars)
        for number, (name, value) in enumerate(self.bars):
            y = top + HEADING + number * (BAR + GAP)
            length = max(1.0, value * scale)
            yield f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
            yield f'<rect class="{_kind(name)}" x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>'
            yield f'<text x="{LABELS + length + 6:.1f}" y="{y + 13}">{value:,.0f}</text>'


def _kind(name: str) -> str:
    return "ours" if name.startswith(OURS) else "floor" if name == FLOOR else "other"


def panels(tables: Sequence[Table]) -> list[Panel]:
    """Returns the panels for the measured tables that are worth a picture."""
    found = []
    for table in tables:
        if table.name == "uncontended":
            found.append(_panel("Acquire and release, microseconds (less is better)", table.rows, "microseconds"))
        if table.name in ("processes", "threads"):
            size = max(row["size"] for row in table.rows)
            rows = [row for row in table.rows if row["size"] == size]
            title = f"{size} {table.name} want one lock, hand-offs per second (more is better)"
            found.append(_panel(title, rows, "rate"))
    return found


def _panel(title: str, rows: Sequence[Mapping[str, Any]], figure: str) -> Panel:
    return Panel(title, [(row["lock"], row[figure]) for row in rows])


def draw(tables: Sequence[Table]) -> str:
    shapes, top = [], 0
    for panel in panels(tables):
        shapes += panel.drawn(top)
        top += panel.height + GAP
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    name = "Locks compared: time to acquire and release, and hand-offs per second"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">',
            f"<style>{STYLE}\n</style>",
            *shapes,
            "</svg>\n",
        ]
    )
