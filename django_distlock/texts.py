"""Text from outside, such as names, labels and hosts, made fit for people, logs and terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """Line breaks, control characters, and marks that turn the direction of writing as escapes.

    Text that is printable already comes back as it is.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def bounded(text: str, most: int) -> str:
    """At most so many characters: of a longer text its beginning and its end."""
    if len(text) <= most:
        return text
    kept = (most - 1) // 2
    return f"{text[: most - 1 - kept]}…{text[len(text) - kept :]}"
