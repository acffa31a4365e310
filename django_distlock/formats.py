"""The number at the beginning of each stored value. It says in which format the rest is written.

For a value with a larger number than it knows, the package raises an error and does not change the value.
"""

from __future__ import annotations

NUMBER, LARGEST = 1, 9
FORMAT = f"{NUMBER} "
NEWER = "was written by a newer version of django-distlock; bring all processes to that version"


def is_newer(value: str | bytes) -> bool:
    """Returns whether a later version of the package wrote the value."""
    head = value[:2] if isinstance(value, str) else value[:2].decode("latin-1")
    return head[1:] == " " and FORMAT < head <= f"{LARGEST} "


def is_newer_number(number: object) -> bool:
    """The same for a number that is stored by itself."""
    return isinstance(number, int) and NUMBER < number <= LARGEST
