"""Commands as they go to a server, and the scripts among them."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple


def pack(*parts: str | bytes | int) -> bytes:
    """A command in the Redis protocol."""
    packed = [b"*%d\r\n" % len(parts)]
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(packed)


def milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


@lru_cache(maxsize=1024)
def _head(sha: str, keys: tuple[str, ...], arguments: int) -> bytes:
    """The beginning of each call of a script for one lock."""
    command = pack("EVALSHA", sha, len(keys), *keys)
    return b"*%d%b" % (3 + len(keys) + arguments, command[command.index(b"\r\n") :])


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

    def call(self, keys: tuple[str, ...], *arguments: str | int) -> Command:
        parts: list[bytes | int] = [_head(self.sha, keys, len(arguments))]
        for argument in arguments:
            data = str(argument).encode()
            parts += (len(data), data)
        return Command((b"%b" + b"$%d\r\n%b\r\n" * len(arguments)) % tuple(parts), self, keys[0])
