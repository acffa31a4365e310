"""What was found out about a store by asking it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Level(enum.StrEnum):
    OK = "ok"
    INFO = "info"  # good to know
    WARNING = "warning"  # may go wrong
    ERROR = "error"  # does go wrong, or certainly will


@dataclass(frozen=True, slots=True)
class Finding:
    """``about``: a word or two, the same for every backend that looks at this. ``hint``: what to do.

    ``data``: the same for programs, where the message is not enough.
    """

    level: Level
    about: str
    message: str
    hint: str = ""
    data: Mapping[str, bool] = field(default_factory=dict)

    @property
    def is_error(self) -> bool:
        return self.level is Level.ERROR
