"""The waiters of one process. For each lock, one of them, the leader, asks the store; the others stand behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..types import LockRequest
from ..utils.chance import chance
from ..utils.clock import clock
from ..utils.guards import new_guard

if TYPE_CHECKING:
    from ..backends.common.timing import Timing


class LocalQueue:
    """Waiters by lock (the ``key`` of requests), in the order of arrival, threads and tasks alike.

    A leader that leaves without the lock hands its place in the store's queue to the next one, so that a process
    keeps its turn while anybody in it waits.
    """

    def __init__(self, timing: Timing, succeed: Callable[[LockRequest], None]) -> None:
        """``succeed`` gets each request that continues with the place of another one in the store."""
        self._timing, self._succeed = timing, succeed
        self._guard = new_guard()  # the garbage collector may end a wait while this very thread is inside
        self._lines: dict[str, list[LockRequest]] = {}  # anybody may put in a new line; else only with the guard

    def join(self, request: LockRequest, now: float) -> bool:
        """Stand in the line of its lock, and take a turn as ``take_turn()`` says."""
        request.asking, request.last_active_at = True, now  # first: so it inherits nothing
        alone = [request]
        if self._lines.setdefault(request.key, alone) is alone:  # most locks have one caller
            return True
        with self._guard:
            line = self._lines.setdefault(request.key, alone)
            if line is not alone:
                line.append(request)
            return self.take_turn(request, now)

    def take_turn(self, request: LockRequest, now: float) -> bool:
        """Mark it as asking the store if it is the leader or has a place there. Returns whether it is the leader."""
        request.last_active_at = now
        with self._guard:
            line = self._lines.setdefault(request.key, [request])
            is_leader = line[0] is request or self._first_responsive(line) is request
            request.asking = is_leader or bool(request.inbox)
            return is_leader

    def admit(self, request: LockRequest) -> bool:
        """Let it wait behind others. False: as many as its ``max_waiters`` wait already, so it has left."""
        if not request.max_waiters:
            request.waits = True
            return True
        with self._guard:
            line = self._lines[request.key]
            is_first = line[0] is request  # by now: then it asks the store, which knows other processes
            # The leader may be asking for the first time. Then it does not wait yet.
            request.waits = not is_first and request in line[: request.max_waiters + (not line[0].waits)]
            is_admitted = is_first or request.waits
        if not is_admitted:
            self.give_up(request)
        return is_admitted

    def begin_to_wait(self, request: LockRequest) -> None:
        """The store answered the leader that the lock is busy, and gave it a place."""
        with self._guard:
            request.waits = True
            self._count_anew(self._lines[request.key])

    def _count_anew(self, line: list[LockRequest]) -> None:
        """The leader's first question was answered: let the requests that came meanwhile be counted again."""
        for one in line:
            if one.max_waiters and not (one.asking or one.inbox):
                one.waits = False
                one.event.set()

    def mark_asking(self, request: LockRequest) -> None:
        """It inherits nothing from now on, until it waits again: its attempt keeps the token that it has."""
        with self._guard:
            request.asking = True

    def schedule_look(self, request: LockRequest, latest: float) -> float:
        """Seconds until it asks the store again, at most ``latest``. Until then it does not count as unresponsive.

        Random, so that requests that came together do not stay together.
        """
        timing = self._timing
        interval = min(len(self._lines) / timing.looks_per_second, timing.look_interval_longest)
        pause = min(latest, max(interval, timing.look_interval) * (0.9 + 0.1 * chance.random()))
        if pause > timing.look_interval:
            request.last_active_at = clock() + pause - timing.look_interval
        return pause

    def length(self, key: str) -> int:
        with self._guard:
            return len(self._lines.get(key, ()))

    def line(self, key: str) -> list[LockRequest]:
        """The requests that wait for one lock, the leader first."""
        with self._guard:
            return list(self._lines.get(key, ()))

    def queued(self) -> list[LockRequest]:
        """The requests that have a place in the store."""
        with self._guard:
            lines = [list(line) for line in list(self._lines.values())]
        return [request for line in lines for request in line if request.inbox]

    def wake(self, key: str) -> None:
        """Let all waiters look whether they may continue."""
        with self._guard:
            line = list(self._lines.get(key, ()))
        for request in line:
            request.event.set()

    def wake_first(self, key: str) -> None:
        """Let the leader look whether it may continue."""
        if key not in self._lines:  # most locks have one caller
            return
        with self._guard:
            line = self._lines.get(key)
            first = self._first_responsive(line) if line else None
        if first:
            first.event.set()

    def has_successor(self, request: LockRequest) -> bool:
        """Whether the next one may continue with its place in the store, which is for its number of slots."""
        with self._guard:
            following = next((one for one in self._lines[request.key] if one is not request), None)
            return following is not None and following.slots == request.slots

    def leave(self, request: LockRequest) -> None:
        """It was granted the lock. The end of its lease wakes the next leader, unless another slot may be free."""
        with self._guard:
            line = self._lines[request.key]
            line.remove(request)
            if not line:
                self._drop(request.key, line)
                return
            first = self._first_responsive(line)
            if not request.waits:
                self._count_anew(line)
        if first and first.slots > 1:
            first.event.set()

    def give_up(self, request: LockRequest, *, again: bool = False) -> None:
        """It leaves without the lock: wake the next leader, which continues with its place in the store.

        ``again``: it was interrupted and has done an unknown part of this, or of ``leave()``.
        """
        successor = None
        with self._guard:
            line = self._lines.get(request.key)
            if line is None:  # it left before
                return
            was_first = again or line[:1] == [request]
            if request in line:
                line.remove(request)
            if not line:
                self._drop(request.key, line)
                return
            if not request.waits:
                self._count_anew(line)
            first = self._first_responsive(line)
            if first is None:
                return
            # A process has one place: so not if the next one has its own place, or is about to leave.
            if request.inbox and not (request.is_inherited or first.inbox or first.in_doubt):
                follower = next((one for one in line if not (one.asking or one.inbox or one.in_doubt)), None)
                if follower and follower.slots == request.slots:  # nor if it wants another number
                    follower.inherit(request)
            if request.is_inherited:
                successor = self._heir_of(request)
        while successor:  # without the guard: it may start a thread, in which the garbage collector may end a wait
            self._succeed(successor)
            successor.event.set()
            informed, successor = successor, self._heir_of(request)
            if successor is informed:  # else it has left, and its own successor may have been informed too early
                break
        if was_first:
            first.event.set()

    def _drop(self, key: str, line: list[LockRequest]) -> None:
        """An empty line; unless a finalizer that ran meanwhile did so, and somebody has put in a new one."""
        if self._lines.get(key) is line:
            del self._lines[key]

    def _heir_of(self, request: LockRequest) -> LockRequest | None:
        """The request in the line that has its token."""
        with self._guard:
            line = self._lines.get(request.key, ())
            return next((one for one in line if one is not request and one.token == request.token), None)

    def _first_responsive(self, line: list[LockRequest]) -> LockRequest | None:
        """Moves unresponsive requests to the end; they keep their places in the store.

        None: a finalizer has ended the last one meanwhile.
        """
        now = clock()
        for _ in range(len(line)):
            if not line or now - line[0].last_active_at <= self._timing.unresponsive_after:
                break
            line[:] = line[1:] + line[:1]  # in one step, which no interrupt splits
        return line[0] if line else None
