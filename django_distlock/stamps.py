"""When an entry of beat's schedule last ran, as all its beats know it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from .exceptions import LockBackendError
from .texts import printable

DAY = 86_400.0
YEAR_9999 = 253_370_764_800.0  # as below


class RunRefused(LockBackendError):
    """The store answers, but gives this run to nobody here. Other runs may be given."""


class UnreadableStamp(RunRefused):
    """What the store keeps of one entry is no stamp."""

    def __init__(self, place: str, remedy: str = "") -> None:
        """``place``: where it is; ``remedy``: what else may be done than to delete it."""
        super().__init__(
            f"{place} holds something that is no run of beat, or a run of more than a day after now"
            f" ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC by the clock of this host). Correct that clock if it is wrong."
            f" Only if it is right, delete what is there{remedy}."
        )


class ClockIsAhead(RunRefused):
    """By so many seconds, which are more than is allowed."""

    def __init__(self, seconds: float, most: float) -> None:
        super().__init__(
            f"The clock of this host is {seconds:.1f} s ahead of the clock of the store; beats may be {most:g} s ahead."
            " Set the clocks by NTP."
        )


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
        """Raises ValueError for a text that ``to_text`` did not write, and for a run more than a day from now."""
        try:
            found = json.loads(text)
        except RecursionError:
            found = None
        match found:
            case [int() | float() as at, str(token), int() | float() | None as next_at, str(host)] if (
                0 <= at <= time.time() + DAY
            ):
                is_moment = next_at is not None and 0 <= next_at <= YEAR_9999
                return cls(at, printable(host), next_at if is_moment else None, token)
        raise ValueError(f"not a stamp: {text!r:.80}")
