"""Makes text from outside, such as names, labels and hosts, safe for people, logs and terminals."""

from __future__ import annotations

import re

ELIDED: dict[type, str] = {str: "'…'", bytes: "b'…'", list: "[…]", tuple: "(…)", dict: "{…}"}


def printable(text: str) -> str:
    """Returns the text with line breaks, control characters, and marks that change the writing direction as escapes.

    Text that is already printable is returned unchanged.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def quoted(value: object) -> str:
    """Returns how messages quote a setting that may contain a password: a URL with a mistake, or in the wrong place.

    Numbers, words and addresses are quoted unchanged. Of a URL, only the beginning is quoted; of any other value, only
    its type.
    """
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, tuple(ELIDED)) and not value):
        return repr(value)
    if isinstance(value, str):
        if re.fullmatch(r"(cache:)?[\w.-]{1,60}(:\d{1,5})?", value):
            return repr(value)
        url = re.match(r"\s*(cache:)?[\w+.-]{1,60}:/+", value)
        return repr(f"{url[0] if url else ''}…")
    return ELIDED.get(type(value)) or f"<{type(value).__name__}>"


def bounded(text: str, most: int) -> str:
    """Returns at most ``most`` characters: the beginning and the end of a longer text."""
    if len(text) <= most:
        return text
    kept = (most - 1) // 2
    return f"{text[: most - 1 - kept]}…{text[len(text) - kept :]}"
