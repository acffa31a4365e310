"""Locks in the memory of one process: for development and unit tests."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time as wall_clock
from time import time_ns
from typing import Any

from ..exceptions import ClockIsAhead
from ..types import Grant, Holder, LastRun, LockInfo, LockRequest
from ..utils.clock import clock
from .base import BaseLockBackend, RunsBackend

GRANT_TTL = 2.0  # seconds a waiter has to notice that the lock was handed to it


@dataclass(slots=True)
class _Held:
    """One name: who has it until when, and who comes next (by token)."""

    token: str
    holder: Holder
    fence: int
    expires: float
    resting: bool = False
    waiters: OrderedDict[str, LockRequest] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Run:
    """When an entry of beat ran, until when that is kept, and when it may be claimed again."""

    stamp: LastRun
    expires: float
    settled: float


class LocMemBackend(BaseLockBackend, RunsBackend):
    """Excludes the threads and tasks of one process, in the order they came; other processes not at all."""

    supports_processes = False
    supports_hosts = False
    supports_queue = True

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        self._guard = threading.RLock()  # held for dictionary work only, never while waiting
        self._is_inside = False
        self._put_off: deque[tuple[LockRequest, float, bool]] = (
            deque()
        )  # releases that came in the midst of something else
        self._held: dict[str, _Held] = {}
        self._last_fence = 0
        self._runs: dict[str, _Run] = {}
        self._sweep_at = 1000  # so many names, before those that nobody asked for again are forgotten

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nothing else is in the midst of a change.

        The garbage collector and handlers of signals run at any point of a thread, also where it is inside. Let them
        change nothing there, and not wait for what goes on only when they have returned.
        """
        if self._is_inside and self._guard._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - what Condition asks
            yield False
            return
        with self._guard:
            try:
                self._is_inside = True
                yield True
            finally:
                self._is_inside = False
        while self._put_off:
            request, cooldown, force = self._put_off.popleft()
            self.release(request, cooldown, force=force)

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        with self._alone() as is_alone:
            if not is_alone:
                return LockInfo(request.name, self.alias, None, 0, 0.0)
            now = clock()
            held = self._current(request.name, now)
            if held is None:
                held = self._give(request, now + request.lasts, OrderedDict())
            if held.token == request.token and not held.resting:
                held.holder = request.holder
                held.expires = max(held.expires, now + request.lasts)
                return Grant(held.fence, now)
            if not queue:
                held.waiters.pop(request.token, None)
            elif request.token not in held.waiters:
                held.waiters[request.token] = request
            return self._info(request.name, held, now)

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        return self.acquire(request, queue=queue)

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        with self._alone() as is_alone:
            if not is_alone:
                self._put_off.append((request, cooldown, force))
                return True
            now = clock()
            held = self._current(request.name, now)
            if held is None:
                return False
            if held.token != request.token or (held.resting and not force):
                held.waiters.pop(request.token, None)
                return False
            if cooldown:
                held.resting = True
                held.expires = now + cooldown
                if first := next(iter(held.waiters.values()), None):
                    first.event.set()  # to look when it ends
            else:
                self._hand_on(request.name, held, now)
            return True

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return self.release(request, cooldown, force=force)

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool]:
        with self._alone() as is_alone:
            return [self._renew(request, ttl, clock(), is_alone) for request, ttl in wanted]

    async def arenew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool]:
        return self.renew(wanted)

    def _renew(self, request: LockRequest, ttl: float, now: float, is_alone: bool) -> bool:
        held = self._current(request.name, now, is_alone)
        if held is None or held.token != request.token or held.resting:
            return False
        held.expires = max(held.expires, now + ttl)
        return True

    def names(self, prefix: str = "") -> Iterator[str]:
        with self._guard:
            now = clock()
            names = [name for name, held in self._held.items() if name.startswith(prefix) and held.expires > now]
        return iter(names)

    async def anames(self, prefix: str = "") -> AsyncIterator[str]:
        for name in self.names(prefix):
            yield name

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        with self._alone() as is_alone:
            now = clock()
            found = [(name, self._current(name, now, is_alone)) for name in names]
            return [self._info(name, held, now) if held else None for name, held in found]

    async def alook(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self.look(names)

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        if (ahead := now.at - wall_clock()) > self.runs_ahead:
            raise ClockIsAhead(ahead, self.runs_ahead)
        with self._guard:
            standing = self._run(name)
            if standing is None:
                self._runs[name] = _Run(seen, clock() + ttl, clock() + self.grace)
                return seen
            if standing.stamp.at > seen.at and standing.stamp.token != now.token:
                return standing.stamp
            if now.at > seen.at and clock() < standing.settled:
                return standing.stamp
            if now.at > standing.stamp.at:
                standing.stamp, standing.expires = now, clock() + ttl
            return None

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        with self._guard:
            found = [self._run(name) for name in names]
        return [run.stamp if run else None for run in found]

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        with self._guard:
            found = [(name, self._run(name)) for name in list(self._runs)]
        return ((name, run.stamp) for name, run in found if run)

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        with self._guard:
            return [len(held.waiters) if (held := self._held.get(name)) else 0 for name in names]

    async def acount_waiters(self, names: Sequence[str]) -> list[int | None]:
        return self.count_waiters(names)

    # What follows is called with the guard held.

    def _run(self, name: str) -> _Run | None:
        run = self._runs.get(name)
        if run and run.expires <= clock():
            del self._runs[name]
            return None
        return run

    def _current(self, name: str, now: float, is_alone: bool = True) -> _Held | None:
        held = self._held.get(name)
        if held is not None and held.expires <= now:
            return self._hand_on(name, held, now) if is_alone else None
        return held

    def _hand_on(self, name: str, held: _Held, now: float) -> _Held | None:
        """To the first in line, who is woken and has GRANT_TTL seconds to take the full lease."""
        if not held.waiters:
            del self._held[name]
            return None
        _, first = held.waiters.popitem(last=False)
        first.event.set()
        return self._give(first, now + min(first.ttl, GRANT_TTL), held.waiters)

    def _give(self, request: LockRequest, expires: float, waiters: OrderedDict[str, LockRequest]) -> _Held:
        self._last_fence = max(self._last_fence + 1, time_ns() // 1000)
        held = _Held(request.token, request.holder, self._last_fence, expires, waiters=waiters)
        self._held[request.name] = held
        if len(self._held) > self._sweep_at:
            now = clock()
            self._held = {name: held for name, held in self._held.items() if held.expires > now or held.waiters}
            self._sweep_at = max(1000, 2 * len(self._held))
        return held

    def _info(self, name: str, held: _Held, now: float) -> LockInfo:
        return LockInfo(
            name, self.alias, held.holder, held.fence, held.expires - now, resting=held.resting, token=held.token
        )
