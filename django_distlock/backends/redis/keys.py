"""The keys of a backend: the kind stands before the name, so that none collide."""

from __future__ import annotations

import re

from ...exceptions import InvalidLockBackend
from ..base import BaseLockBackend


def read_prefix(backend: BaseLockBackend) -> str:
    prefix = backend.settings.get("KEY_PREFIX", "lock")
    if not isinstance(prefix, str) or not prefix or set(prefix) & set("{}|"):
        raise InvalidLockBackend(
            f"{backend.setting('KEY_PREFIX')} is {prefix!r}. It is the text that keys of locks begin with,"
            " without '{', '}' and '|'."
        )
    return prefix


class Keys:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def of_lock(self, name: str) -> tuple[str, str, str, str]:
        """Lease, queue, retired tokens, last fencing number."""
        return self.lease(name), self.queue(name), f"{self.prefix}|x:{name}", f"{self.prefix}|f"

    def lease(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def queue(self, name: str) -> str:
        return f"{self.prefix}|q:{name}"

    def of_run(self, name: str) -> tuple[str, str]:
        """Stamp of the last run; what is there while that is so new that nobody is given the next."""
        return self.run(name), f"{self.prefix}|n:{name}"

    def run(self, name: str) -> str:
        return f"{self.prefix}|r:{name}"

    def inbox(self, process: str) -> str:
        """The channel on which a process hears that it was handed a lock."""
        return f"{self.prefix}|in:{process}"

    def locked_by(self, lease: str) -> str:
        """The name of the lock whose lease has this key."""
        return lease.removeprefix(f"{self.prefix}:")


def pattern(start: str) -> str:
    """Of SCAN, for keys that begin so."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", start) + "*"
