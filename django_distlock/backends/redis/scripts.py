"""Commands as they go to a server, and the scripts among them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple


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


class Command(NamedTuple):
    """In a Cluster it goes to ``node``, an address, or to the node that owns the slot of ``key``."""

    packed: bytes
    script: Script | None = None
    key: str = ""
    node: Any = None


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
