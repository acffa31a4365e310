"""What was found out about a store by asking it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "ok"
    INFO = "info"  # good to know
    WARNING = "warning"  # may go wrong
    ERROR = "error"  # does go wrong, or certainly will


@dataclass(frozen=True, slots=True)
class Finding:
    """``about``: a word or two, the same for every backend that looks at this. ``hint``: what to do."""

    level: Level
    about: str
    message: str
    hint: str = ""

    @property
    def is_error(self) -> bool:
        return self.level is Level.ERROR
