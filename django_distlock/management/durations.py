"""Lengths of time on a command line: ``90``, ``0.5``, ``90s``, ``5m``, ``1h30m``, ``30d``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from math import isfinite, nan

METAVAR = "TIME"

_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PARTS = re.compile("(?=.)" + "".join(rf"(?:([\d.]+){unit})?" for unit in _UNITS))


class Duration:
    """The type of an argument that is a length of time; its value is in seconds.

    ``least``, ``most``: its limits, as texts like those on the command line. ``or_forever``: 'forever' is allowed, too,
    and becomes None.
    """

    def __init__(self, least: str = "0s", most: str = "", *, or_forever: bool = False) -> None:
        self.least = least
        self.most = most
        self.or_forever = or_forever

    def __call__(self, text: str) -> float | None:
        if self.or_forever and text == "forever":
            return None
        seconds = _seconds(text)
        if isfinite(seconds) and _seconds(self.least) <= seconds <= _seconds(self.most or "inf"):
            return seconds
        bounds = f" from {self.least} to {self.most}" if self.most else ""
        forever = ", or 'forever'" if self.or_forever else ""
        raise ArgumentTypeError(
            f"{text!r} is no length of time{bounds}: write seconds, or a number before each of d, h, m and s, such as"
            f" 90, 0.5, 90s, 5m or 1h30m{forever}."
        )


def _seconds(text: str) -> float:
    match = _PARTS.fullmatch(text)
    try:
        if match is None:
            return float(text)
        return sum(float(number) * size for size, number in zip(_UNITS.values(), match.groups(), strict=True) if number)
    except ValueError:
        return nan
