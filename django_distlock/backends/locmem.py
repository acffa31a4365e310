"""Locks in the memory of one process: for development and unit tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..exceptions import ClockIsAhead
from ..journal import QueuedWaiter
from ..runs import LastRun
from ..types import Crowded, Grant, LockInfo, LockRequest, Slot, digest, lock_key
from ..utils.clock import clock, wall_clock, wall_clock_us
from ..utils.guards import new_guard
from .common import state
from .common.state import Attempt, Decision, microseconds
from .optional import ExchangeBackend, JournalBackend, RunsBackend
from .twins import ThreadedBackend

T = TypeVar("T")

FIRST_SWEEP = 1000  # rows; with more, rows without information are removed


@dataclass(slots=True)
class _Row(state.Row):
    """A row whose moments are those of ``clock()``. A waiter is alive while something refers to its request."""

    live_tokens: Container[str] = ()

    def is_alive(self, waiter: state.Waiter) -> bool:
        return waiter.token in self.live_tokens

    def next_fence(self) -> int:
        return max(self.fence + 1, wall_clock_us())


@dataclass(slots=True)
class _Run:
    """The last run of an entry of beat; moments on ``clock()``."""

    stamp: LastRun
    expires: float
    settled: float  # from then on it may be claimed again


class LocMemBackend(ThreadedBackend, RunsBackend, JournalBackend, ExchangeBackend):
    """Locks between the threads and tasks of one process, in the order in which they came."""

    supports_processes = False
    supports_hosts = False
    supports_queue = True
    takes_callable_prefix = True
    supports_slots = True
    supports_max_waiters = True

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        self._guard = new_guard()  # held for dictionary work only, never while waiting
        self._is_changing = False
        self._deferred: deque[tuple[LockRequest, float, bool]] = deque()  # releases that came during another change
        self._rows: dict[str, _Row] = {}
        self._requests: WeakValueDictionary[str, LockRequest] = WeakValueDictionary()
        self._last_fence = 0
        self._runs: dict[str, _Run] = {}
        self._sweep_at = FIRST_SWEEP
        self._journal: deque[str] = deque(maxlen=self.journal_length)

    async def _in_thread(self, call: Callable[[], T], waiter: LockRequest | None = None) -> T:
        return call()  # it does not wait

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """The guard; False if this thread is in the middle of a change.

        The garbage collector and signal handlers run at any point of a thread, also inside a change, which continues
        only when they return. So they must neither change anything nor wait for the end of the change.
        """
        if self._is_changing and self._guard._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - what Condition asks
            yield False
            return
        with self._guard:
            try:
                self._is_changing = True
                yield True
            finally:
                self._is_changing = False
        while self._deferred:
            try:
                request, cooldown, force = self._deferred.popleft()
            except IndexError:  # another thread was sooner
                return
            self.release(request, cooldown, force=force)

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        with self._exclusive() as is_exclusive:
            if not is_exclusive:
                return LockInfo(request.name, self.alias, None, 0, 0.0, prefix=request.prefix)
            if queue:
                self._requests[request.token] = request
            return self._acquire(request, queue)

    def exchange(self, old: LockRequest, request: LockRequest) -> Grant | LockInfo:
        with self._exclusive() as is_exclusive:
            if not is_exclusive:
                return LockInfo(request.name, self.alias, None, 0, 0.0, prefix=request.prefix)
            return self._acquire(request, queue=False, old=old.token)

    def acquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        with self._exclusive() as is_exclusive:
            if not is_exclusive:
                return None
            if not all(map(self._is_free_for, requests)):
                return None
            answers = [self._acquire(request, queue=False) for request in requests]
        return [answer for answer in answers if isinstance(answer, Grant)]

    def _is_free_for(self, request: LockRequest) -> bool:
        return state.is_free_for(self._row(request.key), Attempt.of(request))

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        with self._exclusive() as is_exclusive:
            if not is_exclusive:
                self._deferred.append((request, cooldown, force))
                return True
            row = self._row(request.key)
            decision = state.release(row, request.token, microseconds(cooldown), force=force)
            return self._apply(request.key, row, decision)

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None) -> list[bool]:
        with self._guard:
            return [self._row(request.key).renew(request.token, microseconds(ttl)) for request, ttl in wanted]

    def slots(self, prefix: str = "") -> Iterator[Slot]:
        own = self.prefix_now()
        start = lock_key(own, prefix)
        keys = [key for key in list(self._rows) if key.startswith(start)]
        with self._guard:
            rows = [(key[len(start) - len(prefix) :], self._row(key)) for key in keys]
            return iter([Slot(name, lease.slot) for name, row in rows for lease in row.live_leases])

    def look(self, names: Sequence[str]) -> list[list[LockInfo]]:
        prefix, keys = self.keyed(names)
        with self._guard:
            rows = [(name, self._row(key)) for name, key in zip(names, keys, strict=True)]
            return [row.infos(name, self.alias, prefix) for name, row in rows]

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        _, keys = self.keyed(names)
        with self._guard:
            return [len(self._row(key).live_waiters) for key in keys]

    def waiters(self, names: Sequence[str]) -> list[list[QueuedWaiter] | None]:
        """The leader of each line; the others stand in the local queue of this process."""
        _, keys = self.keyed(names)
        with self._guard:
            queues = [[(one, self._requests.get(one.token)) for one in self._row(key).live_waiters] for key in keys]
        return [
            [QueuedWaiter(digest(one.token), request.holder.since, request.holder) for one, request in queue if request]
            for queue in queues
        ]

    def waited_for(self, prefix: str = "") -> Iterator[str]:
        start = lock_key(self.prefix_now(), prefix)
        with self._guard:
            keys = self._keys_waited_for(start)
        return iter([key[len(start) - len(prefix) :] for key in keys])

    def _keys_waited_for(self, start: str) -> list[str]:
        return [key for key in list(self._rows) if key.startswith(start) and self._row(key).live_waiters]

    def write_journal(self, entries: Sequence[str]) -> None:
        self._journal.extend(entries)

    def read_journal(self) -> list[str]:
        return list(self._journal)

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

    def forget_run(self, name: str) -> bool:
        with self._guard:
            was_there = self._run(name) is not None
            self._runs.pop(name, None)
        return was_there

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        with self._guard:
            found = [(name, self._run(name)) for name in list(self._runs)]
        return ((name, run.stamp) for name, run in found if run)

    # Called with the guard held

    def _acquire(self, request: LockRequest, queue: bool, old: str = "") -> Grant | LockInfo:
        """``old``: the token whose lease it takes over."""
        sent_at, row, attempt = clock(), self._row(request.key), Attempt.of(request, queue)
        decision = state.exchange(row, old, attempt) if old else state.acquire(row, attempt)
        lease, granted = decision.lease, self._apply(request.key, row, decision)
        if lease is None:  # its rest is not over
            lease = row.lease_of(request.token) or row.first_to_end
        if granted:
            request.slot = lease.slot
            return Grant(lease.fence, sent_at, lease.slot)
        info = lease.info(request.name, self.alias, lease.expires - row.now, request.prefix)
        return Crowded(*info) if decision.is_crowded else info

    def _row(self, key: str) -> _Row:
        """The current row. A decision stores it."""
        row = self._rows.get(key) or _Row(0, fence=self._last_fence, timing=self.timing, live_tokens=self._requests)
        row.now = microseconds(clock())
        return row

    def _apply(self, key: str, row: _Row, decision: Decision) -> bool:
        """Store the row if it has information, and wake the waiters that must look. Whether the lock was granted."""
        self._last_fence = max(self._last_fence, row.fence)
        if row.live_leases or row.waiters:
            self._rows[key] = row
        else:
            self._rows.pop(key, None)
        for told in decision.notify:
            if waiter := self._requests.get(told.token):
                waiter.event.set()
        if len(self._rows) > self._sweep_at:
            for each in [each for each in list(self._rows) if not self._says_something(self._row(each))]:
                del self._rows[each]
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._rows))
        return decision.granted

    @staticmethod
    def _says_something(row: _Row) -> bool:
        return bool(row.live_leases or row.live_waiters)

    def _run(self, name: str) -> _Run | None:
        run = self._runs.get(name)
        if run and run.expires <= clock():
            del self._runs[name]
            return None
        return run
