"""How a lock is acquired: one algorithm without I/O, which threads and tasks drive."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn

from .. import signals
from ..exceptions import LockBackendError
from ..journal import NOT_RENEWED, Event
from ..options import Terms
from ..types import Crowded, Grant, LockInfo, LockRequest, State, digest, execution_kind, place_of
from ..utils import fork
from ..utils.clock import clock
from ..utils.drive import Call, Steps
from . import busy as said
from . import transactions
from .events import about_request
from .holds import BY_WITH, Hold, Holds, had_by, remember
from .lease import Lease
from .own_leases import OwnLeases
from .registry import hint_at_local_memory
from .ungranted import UngrantedLease

if TYPE_CHECKING:
    from django.dispatch import Signal

    from .service import Service

logger = logging.getLogger("django_distlock")

MOST_LATE_GRANTS = 3  # after so many grants that came too late to be of use, it is no accident any more
SHORTEST_RETRY = 0.2  # seconds after which a waiter asks again a store that failed; doubled up to the look_interval
AFTER_EXPIRY = 0.002  # seconds to let pass after a lease runs out, so that one look finds it gone
TRANSACTIONS_TIMEOUT = 1.0  # seconds for the calling thread to name its open transactions, also where nobody waits


@cache
def _lease_class(grant_class: type[Grant]) -> type[Lease]:
    """The class of leases for grants of this class. Few processes need another than ``Lease``."""
    from ..grants import HandedGrant, SessionGrant
    from .handed_lease import HandedLease
    from .session_lease import SessionLease

    if issubclass(grant_class, HandedGrant):
        return HandedLease
    return SessionLease if issubclass(grant_class, SessionGrant) else Lease


class Acquisition(OwnLeases):
    """One request for a lock, from the first attempt to its lease or its failure.

    Whatever ends it, nothing of it stays in the store but what was granted. What cannot be taken back at once is left
    to the renewer, because whoever was interrupted must not wait for the store.

    ``timeout``: seconds to wait; None: as long as it takes. ``by_with``: for ``with`` and the decorator, which must
    have the lock and so do not wait for themselves.
    """

    lease: Lease | None = None
    busy: LockInfo | None = None  # who has the lock, where it was not granted
    grant: Grant | None = None  # the one that its lease is made of
    outage_pauses: tuple[float, float] | None = None  # the shortest and the longest, of one that outlasts an outage
    needed: Sequence[Lease] = ()  # of its lock_all(): once one of them is lost, it waits in vain
    _deadline = inf
    _hold: Hold | None = None
    _left: Lease | None = None  # when that was undone
    _is_told_to_wait = False  # by the journal
    _pending: LockRequest | None = None  # of the call that is under way; None between calls
    _was_sent = False  # to the store
    _wants_place = False  # whether the attempt asks for a place there
    _is_leader = False  # among the waiters of this process
    _is_last = False  # the attempt, because the deadline has come
    _pause = 0.0  # seconds until it asks again, unless it is woken
    _retry_pause = 0.0  # the last one after which it asked again a store that failed; 0: it has answered since
    _late_grants, _late_token = 0, ""  # that came too late to be of use
    _refusal: Crowded | None = None  # by those of this process that wait already
    has_waited = False  # had a place in the store, or stood behind others: its deadline alone fails it then

    def __init__(
        self,
        service: Service,
        request: LockRequest,
        timeout: float | None,
        terms: Terms,
        holds: Holds,
        execution: object,
        by_with: bool,
    ) -> None:
        self.request = request
        self.backend = service.backend  # which makes the calls of ``steps()``
        self._service, self._timeout = service, timeout
        self._terms, self._holds, self._execution, self._by_with = terms, holds, execution, by_with
        self._has_place = False  # in the queue of the store, as that answered
        self._is_in_line = False  # of this process
        self._is_busy = False  # the lock, as the store said
        self._began = clock()
        if timeout is not None:
            self._deadline = request.deadline = self._began + timeout

    # For the caller

    def ask(self) -> Lease | LockInfo | None:
        """The first attempt, of a thread. None: it has to wait, in ``steps()``. Raises LockBackendError.

        Those of this process that came before go first. Without time to wait, the store is asked at once.
        """
        self._refuse_transactions()
        if self._terms.slots > 1 and (pending := self._pending_lease()):
            return pending
        if self.outage_pauses or not self._take_turn(clock()):
            return self._refusal
        try:
            answer = self.backend.acquire(self.request, queue=self._wants_place)
        except LockBackendError as error:
            self._refuse_to_be_a_copy(error)
            raise
        return self._answered(answer)

    async def aask(self) -> Lease | LockInfo | None:
        """``ask()`` for tasks."""
        self._refuse_transactions()
        if self._terms.slots > 1 and (pending := self._pending_lease()):
            return pending
        if self.outage_pauses or not self._take_turn(clock()):
            return self._refusal
        try:
            answer = await self.backend.aacquire(self.request, queue=self._wants_place)
        except LockBackendError as error:
            self._refuse_to_be_a_copy(error)
            raise
        return self._answered(answer)

    def steps(self) -> Steps[Lease | LockInfo]:
        """Wait and ask again until the lock is granted, or not worth waiting for. Raises LockBackendError, LockLost."""
        if self._service.journal:
            self._note(Event.WAITS, " ".join(digest(had.token) for had in had_by(self._execution, self.backend.alias)))
        self._check_needed()  # after it began to watch them
        while not self._refusal:
            try:
                if self._pause:
                    yield from self._wait_for_turn(self._pause)
                if not self._take_turn(clock()):
                    self._check_needed()
                    continue
                answer = yield Call("acquire", (self.request,), {"queue": self._wants_place})
            except LockBackendError as error:
                if not self._may_ask_again(error):
                    raise
                yield self._wait("pause", self._retry_pause)
            else:
                if (end := self._answered(answer)) is not None:
                    return end
                self._check_needed(is_answered=True)
        return self._refusal

    def conclude(self, answer: Lease | LockInfo) -> Signal | None:
        """Begin with the lease that was granted, or enter the caller's own one that is in the way.

        Returns the signal to send with ``about()``; None where nothing is to be told or nobody listens.
        """
        if isinstance(answer, LockInfo):
            self.busy = answer
            own = self._enterable_beside(answer)
            if not own and self._timeout != 0 and clock() >= self._deadline:
                self._note(Event.TIMED_OUT, str(answer.holder or ""))
            elif self._is_told_to_wait:
                self._note(Event.WAIT_ENDED, said.CROWD if isinstance(answer, Crowded) else said.OWN_IN_THE_WAY)
            if own:
                self._enter(own)
                return None
            return signals.lock_busy if signals.lock_busy.receivers else None
        if self.grant is None:  # its own lease already, which a transaction keeps
            self._enter(answer)
            return None
        self.lease = lease = answer
        self._service.renewer.register(lease)
        remember(lease)
        self._hold = hold = Hold(self._execution, self._by_with, self._terms.reentrant)
        self._holds.enter(hold, lease)
        if journal := self._service.journal:
            journal.note(journal.GRANTED, self.request, self._began, lease.fence, "" if lease._renews else NOT_RENEWED)
        return signals.lock_acquired if signals.lock_acquired.receivers else None

    def conclude_unanswered(self, error: LockBackendError) -> Signal | None:
        """The same where ``steps()`` raised: enter what the caller goes on with, if anything.

        With ``on_unavailable="run"`` that is its own lease, where it may enter one again, or one that was not granted.
        But an error that somebody has to correct does not pass as an outage does.
        """
        if self._terms.on_unavailable == "run" and not error.is_final and self.request.holder.pid == fork.pid():
            self.undo(error)
            lease = next(filter(self._is_enterable, self._leases_here()), None)
            if lease is None:
                about = self._about("runs-without-lock")
                logger.warning(said.RUNS_WITHOUT, self.request.holder, self._lock_text, error, extra=about)
                lease = UngrantedLease(
                    self.backend, self.request, self._terms, self._service.renewer, self._execution, error
                )
            self._enter(lease)
        return signals.lock_unavailable if signals.lock_unavailable.receivers else None

    def _enter(self, lease: Lease) -> None:
        """One that was not granted now."""
        self.lease = lease
        lease._pass_to(self._execution)
        remember(lease)
        self._hold = hold = Hold(self._execution, self._by_with, self._terms.reentrant)
        self._holds.enter(hold, lease, again=True)

    def about(self, error: LockBackendError | None = None) -> dict[str, Any]:
        """What the signal carries that ``conclude()`` or ``conclude_unanswered()`` returned."""
        name, waited = self.request.name, self._waited
        about = {"name": name, "template": self.request.template or name, "using": self.backend.alias, "waited": waited}
        if error:
            return {**about, "error": error, "lease": self.lease}
        if self.lease:
            return {**about, "lease": self.lease}
        return {**about, "holder": self.busy and self.busy.holder, "reason": said.reason_of(self.busy)}

    def undo(self, error: BaseException) -> None:
        """Take back what there is of it: it failed, or its caller is interrupted before it learns of its lease.

        A second interrupt may strike in here. Then it is called once more.
        """
        renewer = self._service.renewer
        hint_at_local_memory(error)
        if self._is_in_line:
            self._service.queue.give_up(self.request, again=True)
        if self._hold:
            with suppress(LookupError):
                self._left = self._holds.leave(self._hold, BY_WITH)
        if self.grant and self.lease:
            self.lease._release_after_interrupt()
            return
        if self._left and self._left._is_free():  # a lease of its own that it has entered again
            self._left._release_in_background()
        if self.busy:
            return  # answered to the end: nothing of the request is left
        pending = self._pending
        if self._is_told_to_wait and self.request.holder.pid == fork.pid():
            self._note(Event.WAIT_ENDED, type(error).__name__)
        is_answered = isinstance(error, LockBackendError)  # by the backend, which has set in_doubt itself
        if pending and not is_answered:
            pending.in_doubt = True
        if pending and pending is not self.request:
            renewer.release_in_background(pending)  # a grant that came too late
        was_sent = self._was_sent and not (is_answered and pending is self.request)
        if self._may_be_left_in_store or (was_sent and not self.request.is_inherited):
            renewer.release_in_background(self.request)

    def fail(self) -> NoReturn:
        """Raise what a busy lock means for a caller who must have it."""
        busy, slots = self.busy, self._terms.slots
        assert busy
        if lease := self._own_lease(busy):
            raise said.reentry_error(self._lock_text, execution_kind(), slots, lease)
        raise said.not_acquired(self._lock_text, busy, slots, None if self._timeout == 0 else self._waited)

    async def wait_for_transactions(self) -> None:
        """Until it is known what is open: for as long as it waits, and for TRANSACTIONS_TIMEOUT at least."""
        assert self.around
        within = None if self._timeout is None else max(self._timeout, TRANSACTIONS_TIMEOUT)
        if not await self.around.is_known(within) and self._terms.in_atomic == "refuse":
            transactions.refuse_unknown(f"the lock {self._lock_text}", self.request.name, self.backend.alias)

    # The algorithm

    @property
    def _may_take_by_message(self) -> bool:
        """Whether a lease will do that the store confirms a moment later. ``acquire()`` returns one for a whole TTL."""
        terms = self._terms
        is_plain = terms.renew and terms.max_hold is None and not terms.min_hold
        return self._by_with and is_plain and terms.ttl >= self.backend.timing.grant_ttl

    def _refuse_transactions(self) -> None:
        if self._terms.in_atomic == "refuse" and (opened := self._open_transactions()):
            transactions.refuse(f"The lock {self._lock_text}", opened)

    def _take_turn(self, now: float) -> bool:
        """Whether it is the turn of the request to ask the store, for which it is marked."""
        queue, request = self._service.queue, self.request
        self._is_last = is_last = now >= self._deadline
        if is_last:
            # Whoever stands behind goes on with the place in the store; without a successor it is given up.
            queue.mark_asking(request)
            wants_place = bool(request.inbox) and queue.has_successor(request)
        else:
            if self._is_in_line:
                is_leader = queue.take_turn(request, now)
            else:
                self._is_in_line = True
                is_leader = queue.join(request, now)
            self._is_leader = is_leader
            if is_leader:
                # Most locks are free, so the first attempt takes no place where that would cost a subscription.
                is_cheap = self._is_busy or (self.backend.is_listening(request.name) and not self._may_be_own())
            else:
                is_cheap = False
                if self._may_be_own():
                    queue.mark_asking(request)  # first: it may inherit a place until then
                if not request.asking:
                    if not (request.waits or queue.admit(request)):
                        self._is_in_line, self._refusal = False, said.crowded_here(request, self.backend.alias)
                    self._pause = inf
                    return False
            wants_place = is_cheap or request.inbox != ""
            if wants_place and not request.inbox:
                request.takes_by_message = self._may_take_by_message
        self._pending, self._was_sent, self._wants_place = request, True, wants_place
        return True

    def _answered(self, answer: Grant | LockInfo) -> Lease | LockInfo | None:
        """What the acquisition ends with. None: it goes on, after ``_pause``."""
        request = self.request
        self._pending, self._has_place = None, self._wants_place
        self._refuse_to_be_a_copy()
        if isinstance(answer, LockInfo):
            is_crowded = isinstance(answer, Crowded)  # so that it was given no place
            self._has_place = self._has_place and not is_crowded
            if not (self._is_last or is_crowded or self._is_over(answer)):
                if not self._is_busy and self._leases_here() and self._own_lease(answer):
                    about = self._about("waits-for-itself")
                    logger.warning(said.WAITS_FOR_ITSELF, self._lock_text, execution_kind(), extra=about)
                self._is_busy, self._pause = True, answer.remaining + AFTER_EXPIRY
                if self._is_leader and not self._wants_place:
                    self._pause = self._retry_pause = 0.0  # at once, now with a place
                elif self._wants_place and not request.waits:
                    self._service.queue.begin_to_wait(request)
                return None
            if self._is_in_line:
                self._service.queue.give_up(request)
                self._is_in_line = False
            if self._may_be_left_in_store:
                self._give_back(request)
            self._was_sent = self._has_place = False  # nothing is left of it
            if answer.token == self._late_token:
                raise said.slow_error(self.request)
            return answer
        service = self._service
        if self._is_in_line:
            service.queue.leave(request)
            self._is_in_line = False
        new_lease = Lease if type(answer) is Grant else _lease_class(type(answer))  # type: ignore[arg-type]  # hashable
        lease = new_lease(self.backend, request, answer, self._terms, service.renewer, self._execution)
        if lease._granted_clock < lease._deadline:
            self.grant = answer
            return lease
        # This process was stopped in between, and others may have the lock by now. The request takes another token
        # before it releases the late grant: that release may arrive at any later time, and ends whatever the old
        # token holds then.
        self._late_grants, self._late_token = self._late_grants + 1, request.token
        self._pending = request  # first: until then, the request itself is what an interrupt gives back
        self.request = request.with_new_token()
        self._was_sent = self._has_place = False
        self._give_back(request)
        if self._late_grants == MOST_LATE_GRANTS or clock() >= self._deadline:
            raise said.slow_error(self.request)
        self._pause = 0.0
        return None

    def _wait_for_turn(self, longest: float) -> Steps[None]:
        self.has_waited = True
        request = self.request
        yield self._wait("wait_for_turn", self._service.queue.schedule_look(request, longest))
        self._refuse_to_be_a_copy()
        request.holder, self._retry_pause = request.holder.from_now(), 0.0

    def _check_needed(self, *, is_answered: bool = False) -> None:
        """Raise LockLost if it waits in vain. What was lost in an outage counts only after an answer of the store."""
        for lease in self.needed:
            if lease._ended is State.LOST and (is_answered or not lease._is_unknown):
                raise lease._lost_error()

    def _may_ask_again(self, error: LockBackendError) -> bool:
        """Whether it is to ask a store again that failed, after ``_retry_pause``."""
        self._refuse_to_be_a_copy(error)
        # An attempt that failed after the wait was the last: another one would take too long. It would, too, after a
        # look from the queue that took long to fail.
        grace = 0.0 if self._pending is self.request else self.backend.timing.prompt_failure
        is_last = self._is_last or clock() >= self._deadline + grace
        if is_last or error.is_final or not (self.has_waited or self.outage_pauses):
            return False
        if error.was_asked and not self._retry_pause:
            logger.warning(said.WAITS_ON, self.request.name, error, extra=self._about("waits-on"))
        shortest, longest = self.outage_pauses or (SHORTEST_RETRY, self.backend.timing.look_interval)
        self._pending, self._pause = None, 0.0
        self._retry_pause = min(max(shortest, 2 * self._retry_pause), longest)
        return True

    def _is_over(self, busy: LockInfo) -> bool:
        """Whether there is no use in waiting."""
        if not self._leases_here():  # most often others alone have it
            return clock() >= self._deadline
        would_wait_for_itself = self._by_with and self._own_lease(busy)
        return bool(self._enterable_beside(busy) or would_wait_for_itself) or clock() >= self._deadline

    def _wait(self, how: str, seconds: float) -> Call:
        self.request.asking = False
        return Call(how, (self.request,), {"timeout": max(0.0, min(seconds, self._deadline - clock()))})

    def _give_back(self, request: LockRequest) -> None:
        """What the store may keep of it. In the background: the time of the call may be over."""
        self._pending = request
        self._service.renewer.release_in_background(request)
        self._pending = None

    def _refuse_to_be_a_copy(self, error: LockBackendError | None = None) -> None:
        """For a greenlet that a fork has copied. What the parent asked for is the parent's, whoever hears of it."""
        if self.request.holder.pid != fork.pid():
            raise said.copied_error(self.request) from error

    # How it ends

    @property
    def _may_be_left_in_store(self) -> bool:
        """Whether the store may keep something of a request that was not granted."""
        left = self._has_place or bool(self.request.inbox) or self.request.in_doubt
        return left and not self.request.is_inherited

    # What is told of it

    def _note(self, event: Event, text: str = "") -> None:
        if journal := self._service.journal:
            journal.note(event, self.request.copy(), self._began, text=text)
            self._is_told_to_wait = event is Event.WAITS

    @property
    def _waited(self) -> float:
        return clock() - self._began

    def _about(self, event: str) -> dict[str, Any]:
        return about_request(event, self.backend.alias, self.request, waited=self._waited)

    @property
    def _lock_text(self) -> str:
        return f"{self.request.name!r} ({place_of(self.backend.alias, self.request.prefix)})"
