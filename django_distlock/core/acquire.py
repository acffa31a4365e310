"""How a lock is acquired: one algorithm without I/O, which threads and tasks drive."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn

from .. import signals
from ..exceptions import LockBackendError, LockNotAcquired, LockReentry, LockTimeout
from ..options import Terms
from ..types import Grant, LockInfo, LockRequest, current_execution
from ..utils.clock import clock, safe_deadline
from ..utils.drive import Call, Steps
from . import transactions
from .holds import Hold, Holds, remember, remembers
from .lease import Lease
from .registry import Service

if TYPE_CHECKING:
    from django.dispatch import Signal

logger = logging.getLogger("django_distlock")

MOST_LATE_GRANTS = 3  # after so many grants that came too late to be of use, it is no accident any more
SHORTEST_RETRY = 0.2  # seconds after which a waiter asks again a store that failed; then twice as many, up to a look
AFTER_EXPIRY = 0.002  # seconds to let pass after a lease runs out, so that one look finds it gone
SHORTEST_LOOK_AROUND = 1.0  # seconds for an answer that a thread has at once, unless it is busy

Answer = Grant | LockInfo


class Acquisition:
    """One request for a lock, from the first attempt to its lease or its failure.

    Whatever ends it, nothing of it stays in the store but what was granted. What cannot be taken back at once is left
    to the renewer, because whoever was interrupted must not wait for the store.

    ``timeout``: seconds to wait; None: as long as it takes. ``required``: ``with`` and the decorator, which must have
    the lock and so do not wait for themselves.
    """

    lease: Lease | None = None
    busy: LockInfo | None = None  # who has the lock, where it was not granted
    around: transactions.Around | None = None  # None: those of this very thread are looked up
    _grant: Grant | None = None
    _hold: Hold | None = None
    _pending: LockRequest | None = None  # of the call that is being made for it
    _was_asked = False  # whether the store was told of the request
    _has_queued = False  # by the last attempt
    _is_in_line = False
    _is_busy = False  # the lock, as the store said
    has_waited = False  # had a place in the store, or stood behind others: its deadline alone fails it then

    def __init__(
        self,
        service: Service,
        request: LockRequest,
        timeout: float | None,
        terms: Terms,
        holds: Holds,
        execution: object,
        *,
        required: bool = False,
    ) -> None:
        self.request = request
        self.backend = service.backend  # which makes the calls of ``steps()``
        self._service = service
        self._timeout = timeout
        self._terms = terms
        self._holds = holds
        self._execution = execution
        self._required = required
        self._began = clock()
        self._deadline = inf
        if timeout is not None:
            self._deadline = request.deadline = self._began + timeout

    # For the caller

    def steps(self) -> Steps[Answer]:
        """Ask and wait until the lock is granted, or not worth waiting for. Raises LockBackendError."""
        try:
            if self._terms.in_atomic == "refuse" and (opened := self._open_transactions()):
                transactions.refuse(f"The lock {self._lock}", opened)
            for _ in range(MOST_LATE_GRANTS):
                answer = yield from self._in_line()
                if isinstance(answer, LockInfo):
                    if self._is_left_behind:
                        self._pending = self.request
                        yield Call("release", (self.request,))
                        self._pending = None
                    return answer
                if clock() < safe_deadline(answer.sent_at, self.request.ttl):
                    self._grant = answer
                    return answer
                # This process was stopped in between: others may have the lock by now. The request is finished before
                # it is given back, because that may be executed at any time, and nobody may go on with its token then.
                self._pending = late = self.request
                self.request = late.afresh()
                self._was_asked = self._has_queued = False
                yield Call("release", (late,))
                self._pending = None
                if clock() >= self._deadline:
                    break
            raise LockBackendError(
                f"The store grants the lock {self.request.name!r} so slowly that its TTL of {self.request.ttl:g} s"
                " has passed when the answer comes. Give it a longer ttl."
            )
        except BaseException as error:
            self._interrupted(error)
            if isinstance(error, LockBackendError):
                self._check_process()
            raise

    def conclude(self, answer: Answer) -> Signal | None:
        """Make the lease of a grant, or enter the caller's own one that is in the way.

        Returns the signal to send with ``about()``; None where nothing is to be told or nobody listens.
        """
        if is_new := isinstance(answer, Grant):
            lease: Lease | None = Lease(
                self.backend, self.request, answer, self._terms, self._service.renewer, self._execution
            )
        else:
            self.busy = answer
            lease = self._enterable(answer)
        if lease is None:
            return signals.lock_busy if signals.lock_busy.receivers else None
        self.lease = lease
        if is_new:
            self._service.renewer.register(lease)
        else:
            lease._pass_to(self._execution)
        remember(lease)
        self._hold = Hold(self._execution, self._required, self._terms.reentrant)
        self._holds.enter(self._hold, lease, again=not is_new)
        return signals.lock_acquired if is_new and signals.lock_acquired.receivers else None

    def about(self) -> dict[str, Any]:
        """What the signal that ``conclude()`` returned carries."""
        about: dict[str, Any] = {"name": self.request.name, "using": self._using}
        if self.lease:
            return {**about, "lease": self.lease}
        return {**about, "holder": self.busy and self.busy.holder, "waited": clock() - self._began}

    def undo(self) -> None:
        """The caller is interrupted before it learns of its lease."""
        left = None
        if self._hold:
            with suppress(LookupError):
                left = self._holds.leave(self._hold, by_with=True)
        if not self._grant:
            if left and left._is_free:
                left._release_in_background()
        elif self.lease:
            self.lease._release_after_interrupt()
        else:
            self._service.renewer.release_in_background(self.request)

    def fail(self) -> NoReturn:
        """Raise what a busy lock means for a caller who must have it."""
        busy = self.busy
        assert busy
        if self._own(busy):
            raise LockReentry(
                f"The lock {self._lock} is held by this very {kind()} already, which would wait for itself."
                " Use reentrant=True if it may enter again."
            )
        message = f"The lock {self._lock} is busy: {_described(busy)}"
        retry_after = busy.remaining if busy.remaining < inf else None
        if self._timeout == 0:
            raise LockNotAcquired(message, retry_after=retry_after, holder=busy.holder)
        waited = f"{clock() - self._began:.1f} s of waiting"
        raise LockTimeout(f"{message}, after {waited}", retry_after=retry_after, holder=busy.holder)

    async def look_around(self) -> None:
        """Find out what is open around the task, where the lock may depend on it; not for longer than it waits."""
        self.around = transactions.Around()
        last = self._service.renewer.latest(self.request.name)
        refuses = self._terms.in_atomic == "refuse"
        if not refuses and not (last and last._retainers):
            return
        within = None if self._timeout is None else max(self._timeout, SHORTEST_LOOK_AROUND)
        if not await self.around.is_known(within) and refuses:
            raise LockTimeout(
                f"Whether the lock {self._lock} is asked for inside a transaction, which in_atomic='refuse' forbids, is"
                " not known: the thread that waits for this task in async_to_sync was busy with something else. Wait"
                " longer, or keep it free of slow work."
            )

    # The algorithm

    def _in_line(self) -> Steps[Answer]:
        """Behind those of this process who came before. Whoever has no time to wait asks at once."""
        queue, request = self._service.queue, self.request
        answer, retry = None, 0.0
        is_last = clock() >= self._deadline
        self._is_in_line = not is_last
        try:
            if not is_last:
                queue.join(request)
            while True:
                try:
                    answer = yield from self._turn(is_last=is_last)
                    retry = 0.0
                except LockBackendError as error:
                    self._check_process()
                    if is_last or error.is_final or not self.has_waited:
                        raise
                    if not retry:
                        logger.warning("Lock %r is waited for on, though its store failed: %s", request.name, error)
                    self._pending = None
                    retry = min(max(SHORTEST_RETRY, 2 * retry), self.backend.timing.look_interval)
                if answer:
                    return answer
                if retry:
                    yield from self._rest("pause", retry)
                is_last = clock() >= self._deadline
        finally:
            if self._is_in_line:
                queue.leave(request, hand_place_on=not isinstance(answer, Grant), succeed=self.backend.succeed)
                self._is_in_line = False

    def _turn(self, *, is_last: bool) -> Steps[Answer | None]:
        """Ask the store when it is this one's turn to speak, and wait for the next. None: go on."""
        queue, request = self._service.queue, self.request
        pause, is_leader = self.backend.timing.look_interval, False
        if is_last:
            # Whoever stands behind goes on with the place in the store; without a successor it is given up.
            queue.mark_asking(request)
            place = bool(request.inbox) and queue.has_successor(request)
        else:
            last = self._service.renewer.latest(request.name)
            may_be_own = last is not None and (self._is_own(last) or self._is_deferred(last))
            is_leader = queue.take_turn(request, anyway=may_be_own)
            # Most locks are free, so the first attempt takes no place where that would cost a subscription.
            place = bool(request.inbox) or (
                is_leader and (self._is_busy or (not may_be_own and self.backend.is_listening(request.name)))
            )
        if request.asking:
            self._has_queued, self._was_asked = self._has_queued or place, True  # it has its place until it is told
            self._pending = request
            answer: Answer = yield Call("acquire", (request,), {"queue": place})
            self._pending, self._has_queued = None, place
            self._check_process()
            if (
                isinstance(answer, Grant)
                or is_last
                or clock() >= self._deadline
                or self._enterable(answer)
                or (self._required and self._own(answer))  # it would wait for itself
            ):
                return answer
            self._is_busy = True
            if is_leader and not place:
                return None
            pause = min(pause, answer.remaining + AFTER_EXPIRY)
        self.has_waited = True
        yield from self._rest("wait_for_turn", pause)
        self._check_process()
        request.holder = request.holder.from_now()
        return None

    def _rest(self, how: str, seconds: float) -> Steps[None]:
        self.request.asking = False
        yield Call(how, (self.request,), {"timeout": max(0.0, min(seconds, self._deadline - clock()))})

    def _check_process(self) -> None:
        """A fork copies greenlets, too. What the parent asked for is the parent's, also if the copy hears of it."""
        if self.request.holder.pid != os.getpid():
            raise LockBackendError(
                f"Process {self.request.holder.pid} was forked while it asked for the lock {self.request.name!r}."
                f" It goes on to ask; in its child, process {os.getpid()}, nobody does. Ask anew there if it needs the"
                " lock."
            )

    # How it ends

    @property
    def _is_left_behind(self) -> bool:
        """Whether the store may keep something of a request that was not granted."""
        left = self._has_queued or bool(self.request.inbox) or self.request.in_doubt
        return left and not self.request.is_inherited

    def _interrupted(self, error: BaseException) -> None:
        """By an error, an exception of a signal handler, or because the task is cancelled."""
        if self._is_in_line:
            self._service.queue.leave(self.request, hand_place_on=True, succeed=self.backend.succeed, again=True)
        pending, renewer = self._pending, self._service.renewer
        if pending and pending is not self.request:
            renewer.release_in_background(pending)  # a grant that came too late
        has_failed = pending is self.request and isinstance(error, LockBackendError)
        was_asked = self._was_asked and not has_failed and not self.request.is_inherited
        if self._is_left_behind or was_asked:
            renewer.release_in_background(self.request)

    # Whose the lock is that is in the way

    def _enterable(self, busy: LockInfo) -> Lease | None:
        """The lease that is in the way and that may be entered again."""
        lease = self._service.renewer.get(busy.token)
        if lease and (self._is_deferred(lease) or (self._terms.reentrant and self._is_own(lease))):
            return lease
        return None

    def _own(self, busy: LockInfo) -> Lease | None:
        """The lease of this very thread or task which is in the way, as the store says.

        Not one that it has left, and that an open response holds.
        """
        lease = self._service.renewer.get(busy.token)
        return lease if lease and lease._hold_count and self._is_own(lease) else None

    def _is_own(self, lease: Lease) -> bool:
        return lease._is_live and lease._belongs_to(self._execution) and remembers(lease)

    def _is_deferred(self, lease: Lease) -> bool:
        """Whether it was left already, and is held for a transaction that is open here."""
        if lease._hold_count or not lease._retainers or not lease._is_live:
            return False
        return any(transaction in lease._retainers for transaction in self._open_transactions())

    def _open_transactions(self) -> Sequence[transactions.Transaction]:
        return transactions.open_here() if self.around is None else self.around.known()

    @property
    def _using(self) -> str:
        return self.backend.alias

    @property
    def _lock(self) -> str:
        return f"{self.request.name!r} ({self._using})"


def _described(busy: LockInfo) -> str:
    if not busy.holder:
        return "it is being handed over"
    state = "resting after" if busy.resting else "held by"
    left = f", {busy.remaining:.1f} s left unless renewed" if busy.remaining < inf else ""
    since = datetime.fromtimestamp(busy.holder.since, UTC)
    return f"{state} {busy.holder}{_on_nodes(busy)} since {since:%Y-%m-%d %H:%M:%S} UTC{left}"


def _on_nodes(busy: LockInfo) -> str:
    if busy.nodes is None:
        return ""
    failed = f" while {busy.failed_nodes} failed" if busy.failed_nodes else ""
    return f" on {busy.nodes} node{'' if busy.nodes == 1 else 's'}{failed}"


def kind() -> str:
    return "thread" if isinstance(current_execution(), threading.Thread) else "task"


def seconds_to_wait(blocking: bool, timeout: float) -> float:
    """threading.Lock's rules for the arguments of acquire(), where they are given."""
    if not blocking:
        if timeout != -1:
            raise ValueError("A lock that does not block takes no timeout.")
        return 0.0
    if not timeout >= 0:  # not a number neither
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds to wait, or -1 for the lock's own wait.")
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError(f"timeout is {timeout!r}, longer than threading.TIMEOUT_MAX.")
    return timeout
