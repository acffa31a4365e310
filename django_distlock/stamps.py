"""When an entry of beat's schedule last ran, as all its beats know it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class RunStamp:
    """Times are seconds of Unix time, exact to the microsecond.

    ``at``: when the entry last ran. ``host``: where the beat was that sent this run; "" where the entry did not
    run yet, and ``at`` is the time from which its schedule counts. ``next_at``: when it is due again, as that
    beat expected, or None. ``token``: the claim that made this stamp.
    """

    at: float
    host: str = ""
    next_at: float | None = None
    token: str = ""

    def to_text(self) -> str:
        return json.dumps([self.at, self.token, self.next_at, self.host], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Raises ValueError for a text that ``to_text`` did not write."""
        match json.loads(text):
            case [int() | float() as at, str(token), int() | float() | None as next_at, str(host)]:
                return cls(at, host, next_at, token)
        raise ValueError(f"not a stamp: {text!r:.80}")
