"""The waiters of one process: for each lock one of them, the leader, asks the store; the others stand behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import random

from ..backends.common.timing import Timing
from ..types import LockRequest
from ..utils.clock import clock


class LocalQueue:
    """By lock, as the ``key`` of its requests says, in the order of arrival, threads and tasks alike.

    A leader that leaves without the lock hands its place in the store's queue to the next one, so that a process
    keeps its turn while anybody in it waits.
    """

    def __init__(self, timing: Timing, succeed: Callable[[LockRequest], None]) -> None:
        """``succeed`` gets each request that goes on with the place of another one in the store."""
        self._timing, self._succeed = timing, succeed
        self._guard = threading.RLock()  # the garbage collector may end a wait while this very thread is inside
        self._lines: dict[str, list[LockRequest]] = {}  # a new one is put in by anybody; else by who has the guard

    def join(self, request: LockRequest, now: float) -> bool:
        """Stand in the line of its lock, and take a turn as ``take_turn()`` says."""
        request.asking, request.last_active_at = True, now  # first: it inherits nothing then
        alone = [request]
        if self._lines.setdefault(request.key, alone) is alone:  # most locks are wanted by one
            return True
        with self._guard:
            line = self._lines.setdefault(request.key, alone)
            if line is not alone:
                line.append(request)
            return self.take_turn(request, now)

    def take_turn(self, request: LockRequest, now: float) -> bool:
        """Mark it as asking the store if it is the leader or has a place there. Whether it is the leader."""
        request.last_active_at = now
        with self._guard:
            line = self._lines.setdefault(request.key, [request])
            is_leader = line[0] is request or self._first_responsive(line) is request
            request.asking = is_leader or bool(request.inbox)
            return is_leader

    def admit(self, request: LockRequest) -> bool:
        """Let it wait behind others. False: as many wait before it as its ``max_waiters`` says, so it has left."""
        if not request.max_waiters:
            request.waits = True
            return True
        with self._guard:
            line = self._lines[request.key]
            is_first = line[0] is request  # by now, and so it asks the store, which knows of other processes
            # The leader may be asking for the first time. Then it does not wait yet.
            request.waits = not is_first and request in line[: request.max_waiters + (not line[0].waits)]
            is_admitted = is_first or request.waits
        if not is_admitted:
            self.give_up(request)
        return is_admitted

    def begin_to_wait(self, request: LockRequest) -> None:
        """The leader was told that the lock is busy, and has a place in the store."""
        with self._guard:
            request.waits = True
            self._count_anew(self._lines[request.key])

    def _count_anew(self, line: list[LockRequest]) -> None:
        """The first question of a leader was answered: who came meanwhile is counted by that."""
        for one in line:
            if one.max_waiters and not (one.asking or one.inbox):
                one.waits = False
                one.event.set()

    def mark_asking(self, request: LockRequest) -> None:
        """From now on, until it waits again, it inherits nothing: its attempt goes on with the token that it has."""
        with self._guard:
            request.asking = True

    def schedule_look(self, request: LockRequest, latest: float) -> float:
        """Seconds until it asks the store again, ``latest`` at most. It does not count as unresponsive meanwhile.

        Random, so that those who came together do not stay together.
        """
        timing = self._timing
        interval = min(len(self._lines) / timing.looks_per_second, timing.look_interval_longest)
        pause = min(latest, max(interval, timing.look_interval) * (0.9 + 0.1 * random()))
        if pause > timing.look_interval:
            request.last_active_at = clock() + pause - timing.look_interval
        return pause

    def length(self, key: str) -> int:
        with self._guard:
            return len(self._lines.get(key, ()))

    def line(self, key: str) -> list[LockRequest]:
        """Those that wait for one lock, the leader first."""
        with self._guard:
            return list(self._lines.get(key, ()))

    def queued(self) -> list[LockRequest]:
        """Those that have a place in the store."""
        with self._guard:
            lines = [list(line) for line in self._lines.values()]
        return [request for line in lines for request in line if request.inbox]

    def wake(self, key: str) -> None:
        """Let all look whether they may go on."""
        with self._guard:
            line = list(self._lines.get(key, ()))
        for request in line:
            request.event.set()

    def wake_first(self, key: str) -> None:
        """Let the leader look whether it may go on."""
        if key not in self._lines:  # most locks are wanted by one
            return
        with self._guard:
            line = self._lines.get(key)
            first = self._first_responsive(line) if line else None
        if first:
            first.event.set()

    def has_successor(self, request: LockRequest) -> bool:
        """Whether the next one may go on with its place in the store, where its number of slots stands."""
        with self._guard:
            following = next((one for one in self._lines[request.key] if one is not request), None)
            return following is not None and following.slots == request.slots

    def leave(self, request: LockRequest) -> None:
        """It was granted the lock. The end of its lease wakes the next leader, unless that may have another slot."""
        with self._guard:
            line = self._lines[request.key]
            line.remove(request)
            first = self._first_responsive(line) if line else None
            if not line:
                del self._lines[request.key]
            elif not request.waits:
                self._count_anew(line)
        if first and first.slots > 1:
            first.event.set()

    def give_up(self, request: LockRequest, *, again: bool = False) -> None:
        """It leaves without the lock: wake the next leader, which goes on with its place in the store.

        ``again``: it was interrupted and has done an unknown part of this, or of ``leave()``.
        """
        successor = None
        with self._guard:
            line = self._lines.get(request.key, [])
            was_first = again or bool(line and line[0] is request)
            if request in line:
                line.remove(request)
            if not line:
                self._lines.pop(request.key, None)
                return
            if not request.waits:
                self._count_anew(line)
            first = self._first_responsive(line)
            # A process has one place, so not if the next one has its own; and not to one that is about to leave.
            if request.inbox and not (request.is_inherited or first.inbox or first.in_doubt):
                follower = next((one for one in line if not (one.asking or one.inbox or one.in_doubt)), None)
                if follower and follower.slots == request.slots:  # nor past one that wants another number
                    follower.inherit(request)
            if request.is_inherited:
                successor = self._heir_of(request)
        while successor:  # outside, because it may start a thread, in which the garbage collector may end a wait
            self._succeed(successor)
            successor.event.set()
            informed, successor = successor, self._heir_of(request)
            if successor is informed:  # else it has left meanwhile, and the next one may have been told before it was
                break
        if was_first:
            first.event.set()

    def _heir_of(self, request: LockRequest) -> LockRequest | None:
        """Who stands in the line with its token."""
        with self._guard:
            line = self._lines.get(request.key, ())
            return next((one for one in line if one is not request and one.token == request.token), None)

    def _first_responsive(self, line: list[LockRequest]) -> LockRequest:
        """Puts unresponsive ones behind; they keep their own places in the store."""
        now = clock()
        for _ in range(len(line)):
            if now - line[0].last_active_at <= self._timing.unresponsive_after:
                break
            line[:] = line[1:] + line[:1]  # in one step, which no interrupt splits
        return line[0]
