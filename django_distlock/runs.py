"""The runs of beat, as stores keep them and beats exchange them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Self

from .formats import FORMAT
from .types import new_token
from .utils.clock import wall_clock
from .utils.text import printable

DAY = 86_400.0
YEAR_9999 = 253_370_764_800.0  # seconds of Unix time: the beginning of the last year that datetime has
MICROSECOND = 1e-6
LARGEST_CHANGE = 2**31


class UnsentRun(NamedTuple):
    """A run that a beat has claimed, until its message is known to be sent.

    ``scheduled_at``: when it was due, in seconds of Unix time. ``token``: the token of the claim, or of the beat that
    took the run over.
    """

    scheduled_at: float
    token: str


class LastRun(NamedTuple):
    """The stamp of the last run of an entry. Times are seconds of Unix time, exact to the microsecond.

    ``at``: the moment by which stores compare stamps: when the entry last ran, plus a microsecond for each change
    since. ``host``: the host of the beat that claimed this run; "" if the entry did not run yet, and then ``at`` is the
    time from which its schedule counts. ``next_at``: when it is due again, as that beat expected, or None. ``token``:
    the token of the beat that made this stamp. ``changes``: how often the stamp was changed since the run. ``unsent``:
    for an entry whose runs are sent at least once, the runs whose messages may not have been sent.
    """

    at: float
    host: str = ""
    next_at: float | None = None
    token: str = ""
    changes: int = 0
    unsent: tuple[UnsentRun, ...] = ()

    @property
    def ran_at(self) -> float:
        """When the entry last ran."""
        return round(self.at - self.changes * MICROSECOND, 6) if self.changes else self.at

    def changed(self, unsent: tuple[UnsentRun, ...]) -> Self:
        """Returns the stamp of the same run with other unsent runs. Like a new run, it is later than this stamp."""
        at = round(self.at + MICROSECOND, 6)
        return self._replace(at=at, token=new_token(), changes=self.changes + 1, unsent=unsent)

    def to_text(self) -> str:
        more = [self.changes, self.unsent] if self.changes or self.unsent else []
        return FORMAT + json.dumps([self.at, self.token, self.next_at, self.host, *more], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Raises ValueError for a text that ``to_text`` did not write, and for a run more than a day after now."""
        text = text if isinstance(text, str) else text.decode()
        try:
            found = json.loads(text.removeprefix(FORMAT)) if text.startswith(FORMAT) else None
        except RecursionError:
            found = None
        match found:
            case [int() | float() as at, str(token), int() | float() | None as next_at, str(host), *more] if (
                0 <= at <= wall_clock() + DAY and (changes := _changes_of(more))
            ):
                is_moment = next_at is not None and 0 <= next_at <= YEAR_9999
                return cls(at, printable(host), next_at if is_moment else None, token, *changes)
        raise ValueError(f"not a stamp: {text!r:.80}")


def _changes_of(found: list[Any]) -> tuple[int, tuple[UnsentRun, ...]] | None:
    """Returns ``changes`` and ``unsent`` of a stamp from the rest of its text; None if that text cannot be a stamp."""
    match found:
        case []:
            return 0, ()
        case [int(changes), [*unsent]] if 0 <= changes <= LARGEST_CHANGE and all(map(_is_unsent_run, unsent)):
            return changes, tuple(UnsentRun(*run) for run in unsent)
    return None


def _is_unsent_run(found: object) -> bool:
    match found:
        case [int() | float() as at, str()]:
            return 0 <= at <= YEAR_9999
    return False
