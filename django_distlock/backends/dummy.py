"""For tests that must not lock: every request is granted at once, and nothing is remembered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..types import Grant, LockInfo, LockRequest, Slot
from ..utils.clock import clock
from .optional import ExchangeBackend
from .twins import ThreadedBackend

T = TypeVar("T")


class DummyBackend(ThreadedBackend, ExchangeBackend):
    """Grants every lock to everybody. Fencing numbers still grow."""

    supports_processes = False
    supports_hosts = False
    supports_exclusion = False
    supports_wakeup = False
    takes_callable_prefix = True

    _fences = itertools.count(1)

    async def _in_thread(self, call: Callable[[], T], waiter: LockRequest | None = None) -> T:
        return call()  # it does not wait

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant:
        return Grant(next(self._fences), clock())

    def exchange(self, old: LockRequest, request: LockRequest) -> Grant:
        return self.acquire(request, queue=False)

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return True

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None) -> list[bool]:
        return [True] * len(wanted)

    def slots(self, prefix: str = "") -> Iterator[Slot]:
        return iter(())

    def look(self, names: Sequence[str]) -> list[list[LockInfo]]:
        return [[] for _ in names]
