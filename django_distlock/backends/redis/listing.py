"""What is locked now, by SCAN, wherever keys can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .commands import Command, pack
from .keys import Keys

SCAN_STEP = 1000  # keys the server visits per SCAN: well below a millisecond


class Listing:
    """The names in one kind of keys, each once, as far as they begin with ``start``."""

    def __init__(self, keys: Keys, kind: str, start: str) -> None:
        self._keys, self._kind, self._start = keys, kind, start
        self._pattern = keys.pattern(kind, start)
        self._seen: set[str] = set()  # SCAN may tell a key twice
        self._cursor = b"0"

    def commands(self, part: Any) -> Iterator[Command]:
        """Each to be sent when ``new_names`` was given the reply to the one before."""
        while True:
            yield Command(pack("SCAN", self._cursor, "MATCH", self._pattern, "COUNT", SCAN_STEP), at=part)
            if self._cursor == b"0":
                return

    def new_names(self, reply: Sequence[Any]) -> Iterator[str]:
        self._cursor, keys = reply
        for key in keys:
            try:
                name = self._keys.name_in(self._kind, self._start, key.decode())
            except UnicodeDecodeError:
                continue  # no lock has such a key
            if name is not None and name not in self._seen:
                self._seen.add(name)
                yield name
