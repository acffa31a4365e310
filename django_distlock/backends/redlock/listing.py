"""Names as the nodes tell them, page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .asking import Verdict


class Page(NamedTuple):
    """Of a listing: where each node goes on (None: it is through), and the names it told."""

    cursors: list[bytes | None]
    names: list[list[str]]


class NodesFailed(Verdict):
    """``page``: what the others told."""

    def __init__(self, failures: list[Exception | None], page: Page) -> None:
        super().__init__()
        self.failures = failures
        self.page = page


class Listing:
    """What was told until now. Locked is what a majority has, or may have because the others do not answer."""

    def __init__(self, size: int, majority: int) -> None:
        self.cursors: list[bytes | None] = [b"0"] * size
        self.failures: dict[int, Exception] = {}
        self._majority = majority
        self._found: list[set[str]] = [set() for _ in range(size)]  # SCAN may tell a key twice

    @property
    def is_open(self) -> bool:
        return any(cursor is not None for cursor in self.cursors)

    def turn(self, page: Page) -> None:
        self.cursors = page.cursors
        for found, names in zip(self._found, page.names, strict=True):
            found.update(names)

    def fail(self, failures: Sequence[Exception | None]) -> None:
        self.failures.update({node: failure for node, failure in enumerate(failures) if failure})

    @property
    def locked(self) -> list[str]:
        votes = Counter(name for node, found in enumerate(self._found) if node not in self.failures for name in found)
        return [name for name, count in votes.items() if count + len(self.failures) >= self._majority]
