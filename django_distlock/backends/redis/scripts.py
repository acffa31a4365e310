"""Commands as they go to a server, and the scripts among them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, NamedTuple


def pack(*parts: str | bytes | int) -> bytes:
    """A command in the Redis protocol."""
    return b"*%d\r\n%b" % (len(parts), pack_parts(*parts))


def pack_parts(*parts: str | bytes | int) -> bytes:
    """Parts of a command."""
    each = []
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        each.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(each)


def milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


class PackedKeys(NamedTuple):
    """Of one lock or run. ``first``: by which a Cluster finds the node."""

    first: str
    packed: bytes

    @classmethod
    def of(cls, *keys: str) -> PackedKeys:
        if keys[0].isascii():  # then the others are
            return cls(keys[0], "".join([f"${len(key)}\r\n{key}\r\n" for key in keys]).encode())
        return cls(keys[0], pack_parts(*keys))


class Command:
    """In a Cluster it goes to ``node``, an address, or to the node that owns the slot of ``key``."""

    __slots__ = ("key", "node", "packed", "script")

    def __init__(self, packed: bytes, script: Script | None = None, key: str = "", node: Any = None) -> None:
        self.packed, self.script, self.key, self.node = packed, script, key, node


class Script:
    """A Lua script of a backend, called by its digest."""

    def __init__(self, name: str, backend: str = "redis", *, keys: int, arguments: int) -> None:
        self.text = files("django_distlock.backends").joinpath(backend, "scripts", f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()
        self.head = b"*%d\r\n%b" % (3 + keys + arguments, pack_parts("EVALSHA", self.sha, keys))

    def call(self, keys: PackedKeys, *arguments: str | bytes | int) -> Command:
        return Command(self.head + keys.packed + pack_parts(*arguments), self, keys.first)

    def calls(self, wanted: Iterable[tuple[str, str, bytes]]) -> list[Command]:
        """For many locks at once, each with a key, an argument and options."""
        calls = []
        for key, argument, options in wanted:
            name, value = key.encode(), argument.encode()
            parts = self.head, len(name), name, len(value), value, options
            calls.append(Command(b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % parts, self, key))
        return calls
