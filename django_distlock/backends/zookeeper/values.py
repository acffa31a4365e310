"""The data of nodes: of a holder, and of a rest."""

from __future__ import annotations

import json
from typing import NamedTuple, Self

from ...exceptions import LockBackendError
from ...formats import FORMAT, NEWER, is_newer
from ...types import Holder


class Unreadable(LockBackendError):
    """A node has other data than it should, or data that a newer version of the package wrote."""

    is_final = True


class Held(NamedTuple):
    """The data of a place. While the place waits, it says who waits. ``holder``: None if it cannot be read."""

    ttl: float
    holder: Holder | None

    def to_bytes(self) -> bytes:
        assert self.holder
        return f"{FORMAT}{self.ttl:g} {self.holder.to_text()}".encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Self:
        """Raises Unreadable for data that a newer version wrote."""
        text = _decoded(data, path)
        try:
            ttl, _, holder = text.removeprefix(FORMAT).partition(" ")
            return cls(float(ttl), Holder.from_text(holder))
        except ValueError:
            return cls(0.0, None)


class Rest(NamedTuple):
    """The lock stays taken for ``length`` seconds after this was written, by the clock of the servers."""

    token: str
    fence: int
    length: float
    holder: Holder | None

    def to_bytes(self) -> bytes:
        assert self.holder
        return f"{FORMAT}{json.dumps([self.token, self.fence, self.length])} {self.holder.to_text()}".encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Self:
        """Raises Unreadable for data that is not a rest, or that a newer version wrote."""
        text = _decoded(data, path)
        try:
            head, _, holder = text.removeprefix(FORMAT).partition("] ")
            match json.loads(f"{head}]"):
                case [str(token), int(fence), int() | float() as length]:
                    return cls(token, fence, float(length), Holder.from_text(holder))
        except (ValueError, RecursionError):
            pass
        raise Unreadable(f"The node {path} is no rest of a lock. Delete it, if nobody needs it.")


def _decoded(data: bytes, path: str) -> str:
    if is_newer(data):
        raise Unreadable(f"The node {path} {NEWER}.")
    return data.decode(errors="replace")
