"""Commands as they go to a server, and the scripts among them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any


def pack(*parts: str | bytes | int) -> bytes:
    """A command in the Redis protocol."""
    return b"*%d\r\n%b" % (len(parts), _packed(parts))


def _packed(parts: Sequence[str | bytes | int]) -> bytes:
    packed = []
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(packed)


def milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


@lru_cache(maxsize=1024)
def _head(sha: str, keys: tuple[str, ...], arguments: int) -> bytes:
    """The beginning of each call of a script for one lock."""
    return b"*%d\r\n%b" % (3 + len(keys) + arguments, _packed(("EVALSHA", sha, len(keys), *keys)))


@lru_cache(maxsize=1024)
def _tail(arguments: tuple[str | int, ...]) -> bytes:
    """The end of calls that have these options."""
    return _packed(arguments)


class Command:  # which is made sooner than a tuple with names
    """In a Cluster it goes to ``node``, an address, or to the node that owns the slot of ``key``."""

    __slots__ = ("key", "node", "packed", "script")

    def __init__(self, packed: bytes, script: Script | None = None, key: str = "", node: Any = None) -> None:
        self.packed = packed
        self.script = script
        self.key = key
        self.node = node


class Script:
    """A Lua script of a backend, called by its digest."""

    def __init__(self, name: str, backend: str = "redis") -> None:
        self.text = files("django_distlock.backends").joinpath(backend, "scripts", f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()

    def call(self, keys: tuple[str, ...], *arguments: str, options: tuple[str | int, ...] = ()) -> Command:
        """``options``: further arguments, which are the same in many calls."""
        parts = [_head(self.sha, keys, len(arguments) + len(options))]
        for argument in arguments:
            data = argument.encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        parts.append(_tail(options))
        return Command(b"".join(parts), self, keys[0])

    def calls(self, wanted: Iterable[tuple[str, str, int]]) -> list[Command]:
        """Calls for many locks at once, each of a key, an argument and an option.

        What ``call()`` remembers by key would be forgotten before the next time.
        """
        begin = f"*6\r\n{_packed(('EVALSHA', self.sha, 1)).decode()}"
        ends: dict[int, str] = {}
        calls = []
        for key, argument, option in wanted:
            if (end := ends.get(option)) is None:
                end = ends[option] = _packed((option,)).decode()
            length = len(key) if key.isascii() else len(key.encode())
            packed = f"{begin}${length}\r\n{key}\r\n${len(argument)}\r\n{argument}\r\n{end}".encode()
            calls.append(Command(packed, self, key))
        return calls
