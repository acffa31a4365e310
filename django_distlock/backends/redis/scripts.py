"""Commands in the form in which they are sent, and the scripts among them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from functools import partial
from importlib.resources import files
from typing import Any

INCLUDE = re.compile(r"^-- include (\w+\.lua)\n", re.MULTILINE)
EACH = re.compile(r"^-- for each lock\n(.*?)^-- end of each lock\n", re.MULTILINE | re.DOTALL)
KEYS, ARGUMENTS = 5, 3  # of each lock


def pack(*parts: str | bytes | int) -> bytes:
    """A command in the Redis protocol."""
    return f"*{len(parts)}\r\n{pack_parts(*parts)}".encode()


def pack_parts(*parts: str | bytes | int) -> str:
    """Parts of a command, as a text that is sent in UTF-8."""
    each = []
    for part in parts:
        text = part if type(part) is str else part.decode() if isinstance(part, bytes) else str(part)
        length = len(text) if text.isascii() else len(text.encode())
        each.append(f"${length}\r\n{text}\r\n")
    return "".join(each)


def for_each(verb: str, keys: Iterable[str]) -> list[Command]:
    """The command for each key. Lists of very many locks need these."""
    head = f"*2\r\n{pack_parts(verb)}".encode()
    return [Command(b"%b$%d\r\n%b\r\n" % (head, len(data := key.encode()), data), None, key) for key in keys]


def for_all(verb: str, keys: Iterable[str]) -> Command:
    """One command for all these keys, because a reply of its own costs more than a value."""
    first, *others = keys
    return Command(pack(verb, first, *others), key=first)


def milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def packed_keys(*keys: str) -> tuple[str, str]:
    """Keys of one lock or run: the first one, by which a Cluster finds the node, and all of them packed."""
    return keys[0], pack_parts(*keys)


class Command:
    """In a Cluster it goes to the address ``node``, or to the node that owns the slot of ``key``."""

    __slots__ = ("key", "node", "packed", "script")

    def __init__(self, packed: bytes, script: Script | None = None, key: str = "", node: Any = None) -> None:
        self.packed, self.script, self.key, self.node = packed, script, key, node


def _for_locks(section: str, locks: int) -> str:
    """Repeats the section for each lock, with the keys and arguments of that lock."""

    def numbered(found: re.Match[str], lock: int) -> str:
        of_one = KEYS if found[1] == "KEYS" else ARGUMENTS
        return f"{found[1]}[{int(found[2]) + lock * of_one}]"

    return "".join(re.sub(r"(KEYS|ARGV)\[(\d)\]", partial(numbered, lock=lock), section) for lock in range(locks))


class Script:
    """A Lua script of a backend, called by its digest. A line "-- include x.lua" stands for that file.

    ``locks``: how many locks one call is for. The text has the part for each lock once.
    """

    def __init__(self, name: str, backend: str = "redis", *, keys: int, locks: int = 1) -> None:
        folder = files("django_distlock.backends").joinpath(backend, "scripts")
        text = folder.joinpath(f"{name}.lua").read_text()
        text = INCLUDE.sub(lambda found: folder.joinpath(found[1]).read_text(), text)
        self.text = EACH.sub(lambda found: _for_locks(found[1], locks), text).encode()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()
        self.keys = keys

    def head(self, arguments: int) -> str:
        """The part before the keys of a call with so many arguments."""
        return f"*{3 + self.keys + arguments}\r\n{pack_parts('EVALSHA', self.sha, self.keys)}"

    def call(self, keys: tuple[str, str], *arguments: str | bytes | int) -> Command:
        first, packed = keys
        return Command(f"{self.head(len(arguments))}{packed}{pack_parts(*arguments)}".encode(), self, first)
