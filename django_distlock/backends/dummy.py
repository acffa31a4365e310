"""For tests that must not lock: everything is granted at once, and nothing is remembered."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence

from ..types import Grant, LockInfo, LockRequest
from ..utils.clock import clock
from .base import BaseLockBackend


class DummyBackend(BaseLockBackend):
    """Grants every lock to everybody. Fencing numbers grow all the same."""

    supports_processes = False
    supports_hosts = False
    supports_exclusion = False
    supports_wakeup = False

    _fences = itertools.count(1)

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant:
        return Grant(next(self._fences), clock())

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant:
        return self.acquire(request, queue=queue)

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return True

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return True

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool]:
        return [True] * len(wanted)

    async def arenew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool]:
        return [True] * len(wanted)

    def names(self, prefix: str = "") -> Iterator[str]:
        return iter(())

    async def anames(self, prefix: str = "") -> AsyncIterator[str]:
        for name in self.names(prefix):
            yield name

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        return [None] * len(names)

    async def alook(self, names: Sequence[str]) -> list[LockInfo | None]:
        return [None] * len(names)
