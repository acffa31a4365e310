"""Names as the nodes tell them, page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Listing:
    """What was told until now. Locked is what a majority has, or may have because the others do not answer.

    ``cursors``: where each node goes on; None: it is through. ``failures``: by node; such a one is through, too.
    """

    def __init__(self, size: int, majority: int) -> None:
        self.cursors: list[bytes | None] = [b"0"] * size
        self.failures: dict[int, Exception] = {}
        self._majority = majority
        self._found: list[set[str]] = [set() for _ in range(size)]  # SCAN may tell a key twice

    @property
    def is_open(self) -> bool:
        return any(cursor is not None for cursor in self.cursors)

    def turn(self, cursors: list[bytes | None], names: Sequence[Sequence[str]], failures: dict[int, Exception]) -> None:
        self.cursors, self.failures = cursors, failures
        for found, told in zip(self._found, names, strict=True):
            found.update(told)

    @property
    def locked(self) -> list[str]:
        votes = Counter(name for node, found in enumerate(self._found) if node not in self.failures for name in found)
        return [name for name, count in votes.items() if count + len(self.failures) >= self._majority]
