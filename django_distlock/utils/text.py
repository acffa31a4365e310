"""Text from outside, such as names, labels and hosts, made fit for people, logs and terminals."""

from __future__ import annotations

import re

ELIDED: dict[type, str] = {str: "'…'", bytes: "b'…'", list: "[…]", tuple: "(…)", dict: "{…}"}


def printable(text: str) -> str:
    """Line breaks, control characters, and marks that turn the direction of writing as escapes.

    Text that is printable already comes back as it is.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def quoted(value: object) -> str:
    """How messages quote a setting in which a password may stand: a URL that is mistyped, or is where it should not be.

    Numbers, words and addresses as they are; of a URL its beginning; of anything else its kind.
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
    """At most so many characters: of a longer text its beginning and its end."""
    if len(text) <= most:
        return text
    kept = (most - 1) // 2
    return f"{text[: most - 1 - kept]}…{text[len(text) - kept :]}"
