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
from ..backends.base import BaseLockBackend
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

LOOK_INTERVAL = 1.0  # seconds after which a waiter asks the store again, should nobody have woken it
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
        self._service = service
        self._timeout = timeout
        self._terms = terms
        self._holds = holds
        self._execution = execution
        self._required = required
        self._began = clock()
        self._deadline = request.give_up = None if timeout is None else self._began + timeout

    # For the caller

    @property
    def backend(self) -> BaseLockBackend:
        """Which makes the calls of ``steps()``."""
        return self._service.backend

    def steps(self) -> Steps[Answer]:
        """Ask and wait until the lock is granted, or not worth waiting for. Raises LockBackendError."""
        try:
            if self._terms.in_atomic == "refuse" and (opened := self._open_transactions()):
                transactions.refuse(f"The lock {self._lock}", opened)
            return (yield from self._granted_in_time())
        except BaseException as error:
            self._interrupted(error)
            if isinstance(error, LockBackendError):
                self._check_process()
            raise

    def conclude(self, answer: Answer) -> Signal | None:
        """Make the lease of a grant, or enter the caller's own one that is in the way.

        Returns the signal to send with ``about()``; None where nothing is to be told or nobody listens.
        """
        if isinstance(answer, Grant):
            service = self._service
            lease = self.lease = Lease(
                service.backend, self.request, answer, self._terms, service.renewer, self._execution
            )
            service.renewer.register(lease)
            remember(lease)
            self._enter(lease)
            return signals.lock_acquired if signals.lock_acquired.receivers else None
        self.busy = answer
        if own := self._enterable(answer):
            self.lease = own
            own._pass_to(self._execution)
            remember(own)
            self._enter(own, again=True)
            return None
        return signals.lock_busy if signals.lock_busy.receivers else None

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

    def _granted_in_time(self) -> Steps[Answer]:
        for _ in range(MOST_LATE_GRANTS):
            answer = yield from (self._attempt(queue=False) if self._time_left() <= 0 else self._wait())
            if isinstance(answer, LockInfo):
                if self._is_left_behind:
                    yield from self._call("release", self.request)
                return answer
            if clock() < safe_deadline(answer.sent_at, self.request.ttl):
                self._grant = answer
                return answer
            # This process was stopped in between: others may have the lock by now. The request is finished before it
            # is given back, because that may be executed at any time, and nobody may go on with its token then.
            self._pending = late = self.request
            self.request = late.afresh()
            self._was_asked = self._has_queued = False
            yield from self._call("release", late)
            if self._time_left() <= 0:
                break
        raise LockBackendError(
            f"The store grants the lock {self.request.name!r} so slowly that its TTL of {self.request.ttl:g} s"
            " has passed when the answer comes. Give it a longer ttl."
        )

    def _wait(self) -> Steps[Answer]:
        is_granted = False
        self._is_in_line = True
        try:
            self._service.queue.join(self.request)
            answer = yield from self._in_line()
            is_granted = isinstance(answer, Grant)
            return answer
        finally:
            self._leave_line(hand_place_on=not is_granted)
            self._is_in_line = False

    def _leave_line(self, *, hand_place_on: bool, again: bool = False) -> None:
        self._service.queue.leave(
            self.request, hand_place_on=hand_place_on, succeed=self._service.backend.succeed, again=again
        )

    def _in_line(self) -> Steps[Answer]:
        retry = 0.0
        while self._time_left() > 0:
            answer = None
            try:
                answer = yield from self._turn()
                retry = 0.0
            except LockBackendError as error:
                self._check_process()
                if error.is_final or not self.has_waited:
                    raise
                if not retry:
                    logger.warning("Lock %r is waited for on, though its store failed: %s", self.request.name, error)
                self._pending = None
                retry = min(max(SHORTEST_RETRY, 2 * retry), LOOK_INTERVAL)
            if answer:
                return answer
            if retry:
                yield from self._rest("pause", retry)
        # Whoever stands behind goes on with the place in the store; without a successor it is given up.
        queue = self._service.queue
        queue.mark_asking(self.request)
        return (yield from self._attempt(queue=bool(self.request.inbox) and queue.has_successor(self.request)))

    def _turn(self) -> Steps[Answer | None]:
        """Ask the store when it is this one's turn to speak, and wait for the next. None: go on."""
        pause = LOOK_INTERVAL
        is_leader, has_place = self._service.queue.is_leader(self.request), bool(self.request.inbox)
        may_be_own = self._may_be_own()
        if is_leader or has_place or may_be_own:
            # Most locks are free, so the first attempt takes no place where that would cost a subscription.
            is_ready = self._is_busy or (not may_be_own and self._service.backend.is_listening(self.request.name))
            queue = has_place or (is_leader and is_ready)
            answer = yield from self._attempt(queue=queue)
            if isinstance(answer, Grant) or self._time_left() <= 0 or self._waits_for_itself(answer):
                return answer
            self._is_busy = True
            if is_leader and not queue:
                return None
            pause = min(pause, answer.remaining + AFTER_EXPIRY)
        self.has_waited = True
        yield from self._rest("wait_for_turn", pause)
        self._check_process()
        self.request.holder = self.request.holder.from_now()
        return None

    def _attempt(self, *, queue: bool) -> Steps[Answer]:
        self._service.queue.mark_asking(self.request)
        self._has_queued, self._was_asked = self._has_queued or queue, True  # it has its place until it is told
        answer: Answer = yield from self._call("acquire", self.request, queue=queue)
        self._has_queued = queue
        self._check_process()
        return answer

    def _rest(self, how: str, seconds: float) -> Steps[None]:
        self.request.asking = False
        yield Call(how, (self.request,), {"timeout": max(0.0, min(seconds, self._time_left()))})

    def _call(self, method: str, request: LockRequest, **options: Any) -> Steps[Any]:
        self._pending = request
        answer = yield Call(method, (request,), options)
        self._pending = None
        return answer

    def _check_process(self) -> None:
        """A fork copies greenlets, too. What the parent asked for is the parent's, also if the copy hears of it."""
        if self.request.holder.pid != os.getpid():
            raise LockBackendError(
                f"Process {self.request.holder.pid} was forked while it asked for the lock {self.request.name!r}."
                f" It goes on to ask; in its child, process {os.getpid()}, nobody does. Ask anew there if it needs the"
                " lock."
            )

    def _time_left(self) -> float:
        return LOOK_INTERVAL if self._deadline is None else self._deadline - clock()

    # How it ends

    @property
    def _is_left_behind(self) -> bool:
        """Whether the store may keep something of a request that was not granted."""
        left = self._has_queued or bool(self.request.inbox) or self.request.in_doubt
        return left and not self.request.is_inherited

    def _interrupted(self, error: BaseException) -> None:
        """By an error, an exception of a signal handler, or because the task is cancelled."""
        if self._is_in_line:
            self._leave_line(hand_place_on=True, again=True)
        pending, renewer = self._pending, self._service.renewer
        if pending and pending is not self.request:
            renewer.release_in_background(pending)  # a grant that came too late
        has_failed = pending is self.request and isinstance(error, LockBackendError)
        was_asked = self._was_asked and not has_failed and not self.request.is_inherited
        if self._is_left_behind or was_asked:
            renewer.release_in_background(self.request)

    # Whose the lock is that is in the way

    def _may_be_own(self) -> bool:
        """Whether the lock seems to be this caller's already, or one that it may enter."""
        last = self._service.renewer.latest(self.request.name)
        return last is not None and (self._is_own(last) or self._is_deferred(last))

    def _waits_for_itself(self, busy: LockInfo) -> bool:
        return self._enterable(busy) is not None or (self._required and self._own(busy) is not None)

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

    def _enter(self, lease: Lease, *, again: bool = False) -> None:
        self._hold = Hold(self._execution, self._required, self._terms.reentrant)
        self._holds.enter(self._hold, lease, again=again)

    @property
    def _using(self) -> str:
        return self._service.backend.alias

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


def seconds_to_wait(blocking: bool, timeout: float, own: float | None) -> float | None:
    """threading.Lock's rules for the arguments of acquire()."""
    if not blocking:
        if timeout != -1:
            raise ValueError("A lock that does not block takes no timeout.")
        return 0
    if timeout == -1:
        return own
    if not timeout >= 0:  # not a number neither
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds to wait, or -1 for the lock's own wait.")
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError(f"timeout is {timeout!r}, longer than threading.TIMEOUT_MAX.")
    return timeout
