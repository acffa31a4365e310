"""The number at the beginning of each stored value, which tells how the rest is written.

A version of the package leaves a value with a larger number than it knows as it is, and raises an error.
"""

from __future__ import annotations

NUMBER, LARGEST = 1, 9
FORMAT = f"{NUMBER} "
NEWER = "was written by a newer version of django-distlock; bring all processes to that version"


def is_newer(value: str | bytes) -> bool:
    """Whether a later version of the package wrote it."""
    head = value[:2] if isinstance(value, str) else value[:2].decode("latin-1")
    return head[1:] == " " and FORMAT < head <= f"{LARGEST} "


def is_newer_number(number: object) -> bool:
    """The same of a number that stands by itself."""
    return isinstance(number, int) and NUMBER < number <= LARGEST
