"""The protocol of Redis: replies to bytes, bytes to commands."""

from __future__ import annotations

from typing import Any


class ServerError(Exception):
    """What a server refuses with, by its own words: ``ServerError("ERR syntax error")``."""


class Status(str):
    """A reply such as OK."""

    __slots__ = ()


class Push(list[Any]):
    """A message that nobody asked for. In version 2 of the protocol an array."""


class Replies(list[Any]):
    """Several replies to one command."""


class NoArray:
    """The reply that there is no array."""


OK = Status("OK")


def encoded(value: Any, version: int = 2) -> bytes:
    """A reply as bytes. Texts have one character per byte, as in the store."""
    match value:
        case ServerError():
            return f"-{value}\r\n".encode()
        case Status():
            return f"+{value}\r\n".encode()
        case None:
            return b"$-1\r\n" if version == 2 else b"_\r\n"
        case NoArray():
            return b"*-1\r\n" if version == 2 else b"_\r\n"
        case bool() | int():
            return b":%d\r\n" % value
        case float():
            text = f"{value:.17g}"
            return encoded(text) if version == 2 else f",{text}\r\n".encode()
        case str():
            return encoded(value.encode("latin-1"))
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
        case dict():
            pairs = [part for pair in value.items() for part in pair]
            if version == 2:
                return encoded(pairs)
            return b"%%%d\r\n" % len(value) + b"".join(encoded(part, version) for part in pairs)
        case list() | tuple():
            mark = b">" if isinstance(value, Push) and version == 3 else b"*"
            return mark + b"%d\r\n" % len(value) + b"".join(encoded(part, version) for part in value)
    raise TypeError(value)


def next_command(buffer: bytes) -> tuple[list[str], bytes] | None:
    """The first command in the buffer, and what comes after it. None: it is not complete yet."""
    head, found, rest = buffer.partition(b"\r\n")
    if not found:
        return None
    parts = []
    for _ in range(int(head[1:])):
        size, found, rest = rest.partition(b"\r\n")
        length = int(size[1:] or b"0")
        if not found or len(rest) < length + 2:
            return None
        parts.append(rest[:length].decode("latin-1"))
        rest = rest[length + 2 :]
    return parts, rest
