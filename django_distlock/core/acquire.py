"""How a lock is asked for and waited for: one algorithm, driven by threads and by tasks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from math import inf
from typing import Any, NamedTuple, NoReturn, cast
from weakref import ReferenceType, ref

from .. import signals
from ..exceptions import LockBackendError, LockNotAcquired, LockReentry, LockTimeout
from ..options import Options
from ..types import Grant, Holder, LockInfo, Ticket, current_execution
from ..utils.clock import clock, safe_deadline
from . import transactions
from .holds import Entries, Entry
from .lease import Lease
from .registry import Service, locks

logger = logging.getLogger("django_distlock")

LOOK_INTERVAL = 1.0  # seconds after which a waiter asks the store again, should nobody have woken it
MOST_LATE_GRANTS = 3  # after so many grants that came too late to be of use, it is no accident any more
SHORTEST_RETRY = 0.2  # seconds after which a waiter asks again a store that failed; then twice as many, up to a look
AFTER_EXPIRY = 0.002  # seconds to let pass after a lease runs out, so that one look finds it gone


class Outcome(NamedTuple):
    """``grant`` if the lock was acquired, else ``busy`` tells who has it."""

    grant: Grant | None
    busy: LockInfo | None


class Ask(NamedTuple):
    """A call for the driver to make: ``backend.method(ticket, …)``, or its ``a`` twin."""

    method: str
    ticket: Ticket
    arguments: dict[str, Any]


Steps = Generator[Ask, Any, Outcome]
Pointless = Callable[[LockInfo], bool]


class Wait:
    """One request for a lock, from the first attempt to the grant or the end of the wait.

    Whatever ends it, nothing of it stays in the store but what was granted. What cannot be taken back at
    once is left to the keeper, because whoever was interrupted must not wait for the store.
    """

    def __init__(
        self,
        service: Service,
        ticket: Ticket,
        seconds: float | None,
        pointless: Pointless,
        may_be_own: Callable[[], bool],
    ) -> None:
        self.backend = service.backend
        self.ticket = ticket
        self.grant: Grant | None = None
        self._queue = service.queue
        self._keeper = service.renewer
        self._pointless = pointless  # told who has the lock: whether waiting for it makes no sense
        self._may_be_own = may_be_own  # whether that seems to be so, without asking the store
        self._give_up = ticket.give_up = None if seconds is None else clock() + seconds
        self._asked = False  # whether the store was told of the ticket
        self._queued = False
        self._is_in_line = False
        self._is_busy = False  # the lock, as the store said
        self._waits = False  # has a place in the store, or stood behind others: its deadline alone fails it

    def steps(self) -> Steps:
        for _ in range(MOST_LATE_GRANTS):
            outcome = yield from self._outcome()
            if outcome.grant is None:
                if self._is_left_behind:
                    yield Ask("release", self.ticket, {})
                return outcome
            if clock() < safe_deadline(outcome.grant.sent_at, self.ticket.ttl):
                self.grant = outcome.grant
                return outcome
            # This process was stopped in between: others may have the lock by now. The ticket is finished before it
            # is given back, because that may be executed at any time, and nobody may go on with its token then.
            late, self.ticket = self.ticket, self.ticket.afresh()
            self._asked = self._queued = False
            yield Ask("release", late, {})
            if self._time_left() <= 0:
                break
        raise LockBackendError(
            f"The store grants the lock {self.ticket.name!r} so slowly that its TTL of {self.ticket.ttl:g} s"
            " has passed when the answer comes. Give it a longer ttl."
        )

    def _outcome(self) -> Steps:
        return (yield from self._attempt(queue=False) if self._time_left() <= 0 else self._waited())

    @property
    def _is_left_behind(self) -> bool:
        """Whether the store may keep something of a request that was not granted."""
        left = self._queued or bool(self.ticket.inbox) or self.ticket.unanswered
        return left and not self.ticket.is_bequeathed

    def _is_final(self, outcome: Outcome) -> bool:
        return self._time_left() <= 0 or outcome.grant is not None or self._pointless(cast("LockInfo", outcome.busy))

    def _waited(self) -> Steps:
        granted = False
        self._is_in_line = True
        try:
            self._queue.join(self.ticket)
            outcome = yield from self._in_line()
            granted = outcome.grant is not None
            return outcome
        finally:
            self._leave_line(bequeath=not granted)
            self._is_in_line = False

    def _leave_line(self, *, bequeath: bool, again: bool = False) -> None:
        self._queue.leave(self.ticket, bequeath=bequeath, succeed=self.backend.succeed, again=again)

    def _in_line(self) -> Steps:
        retry = 0.0
        while self._time_left() > 0:
            outcome = None
            try:
                outcome = yield from self._turn()
                retry = 0.0
            except LockBackendError as error:
                self._check_process()
                if error.is_final or not self._waits:
                    raise
                if not retry:
                    logger.warning("Lock %r is waited for on, though its store failed: %s", self.ticket.name, error)
                retry = min(max(SHORTEST_RETRY, 2 * retry), LOOK_INTERVAL)
            if outcome:
                return outcome
            if retry:
                yield self._rest("pause", retry)
        # Whoever stands behind goes on with the place in the store; without an heir it is given up.
        self._queue.asks(self.ticket)
        return (yield from self._attempt(queue=bool(self.ticket.inbox) and self._queue.has_heir(self.ticket)))

    def _turn(self) -> Generator[Ask, Any, Outcome | None]:
        """Ask the store when it is this one's turn to speak, and wait for the next. None: go on."""
        pause = LOOK_INTERVAL
        speaks, has_place, is_own = self._queue.speaks(self.ticket), bool(self.ticket.inbox), self._may_be_own()
        if speaks or has_place or is_own:
            # Most locks are free, so the first attempt takes no place where that would cost a subscription.
            is_ready = self._is_busy or (not is_own and self.backend.is_listening(self.ticket.name))
            queue = has_place or (speaks and is_ready)
            outcome = yield from self._attempt(queue=queue)
            if self._is_final(outcome):
                return outcome
            self._is_busy = True
            if speaks and not queue:
                return None
            pause = min(pause, cast("LockInfo", outcome.busy).remaining + AFTER_EXPIRY)
        self._waits = True
        yield self._rest("wait_turn", pause)
        self._check_process()
        self.ticket.holder = self.ticket.holder.from_now()
        return None

    def _rest(self, how: str, seconds: float) -> Ask:
        self.ticket.asking = False
        return Ask(how, self.ticket, {"timeout": max(0.0, min(seconds, self._time_left()))})

    def _attempt(self, *, queue: bool) -> Steps:
        self._queue.asks(self.ticket)
        self._queued, self._asked = queue, True
        answer = yield Ask("acquire", self.ticket, {"queue": queue})
        self._check_process()
        return Outcome(answer, None) if isinstance(answer, Grant) else Outcome(None, answer)

    def _check_process(self) -> None:
        """A fork copies greenlets, too. What the parent asked for is the parent's, also if the copy hears of it."""
        if self.ticket.holder.pid != os.getpid():
            raise LockBackendError(
                f"Process {self.ticket.holder.pid} was forked while it asked for the lock {self.ticket.name!r}. It goes"
                f" on to ask; in its child, process {os.getpid()}, nobody does. Ask anew there if it needs the lock."
            )

    def _time_left(self) -> float:
        return LOOK_INTERVAL if self._give_up is None else self._give_up - clock()

    def interrupted(self, steps: Steps, asked: Ask | None, error: BaseException) -> None:
        """``asked``: what was not answered, unless it was between two calls."""
        failed = asked is not None and asked.method == "acquire" and isinstance(error, LockBackendError)
        steps.close()
        if self._is_in_line:
            self._leave_line(bequeath=True, again=True)
        if asked and asked.ticket is not self.ticket:
            self._keeper.abandon(asked.ticket)  # a grant that came too late
        if self._is_left_behind or (self._asked and not failed and not self.ticket.is_bequeathed):
            self._keeper.abandon(self.ticket)


def acquire(wait: Wait, steps: Steps) -> Outcome:
    """Take the steps. Raises LockBackendError."""
    ask = None
    try:
        ask = next(steps)
        while True:
            try:
                answer = getattr(wait.backend, ask.method)(ask.ticket, **ask.arguments)
            except LockBackendError as error:
                ask = steps.throw(error)
            else:
                ask = None
                ask = steps.send(answer)
    except StopIteration as end:
        return cast("Outcome", end.value)
    except BaseException as error:
        wait.interrupted(steps, ask, error)
        raise


async def aacquire(wait: Wait, steps: Steps) -> Outcome:
    ask = None
    try:
        ask = next(steps)
        while True:
            try:
                answer = await getattr(wait.backend, f"a{ask.method}")(ask.ticket, **ask.arguments)
            except LockBackendError as error:
                ask = steps.throw(error)
            else:
                ask = None
                ask = steps.send(answer)
    except StopIteration as end:
        return cast("Outcome", end.value)
    except BaseException as error:
        wait.interrupted(steps, ask, error)
        raise


SHORTEST_LOOK = 1.0  # seconds for an answer that a thread has at once, unless it is busy

# Child tasks inherit the context and sync_to_async lends one thread to many, so an execution owns a
# lease only when the thread or task is the same *and* the context remembers having acquired it.
_acquired_here: ContextVar[tuple[ReferenceType[Lease], ...]] = ContextVar("django_distlock_acquired_here", default=())


def _remember(lease: Lease) -> None:
    known = _acquired_here.get()
    count = len(known)
    if count >= 8 and count & (count - 1) == 0:  # now and then, because every lease is looked at
        known = tuple(known_lease for known_lease in known if (held := known_lease()) and held.is_live)
    _acquired_here.set((*known, ref(lease)))


def take_over(lease: Lease) -> None:
    """Keep a lease that another process acquired; it is this thread's or task's from now on."""
    locks.service(lease.using).renewer.keep(lease)
    _remember(lease)


def acquired_here() -> list[Lease]:
    """What this context has acquired and still remembers: that of its thread or task, and of the one it came from."""
    return [lease for known in _acquired_here.get() if (lease := known())]


class Attempt:
    """One call of acquire, from its terms to its lease or its failure.

    ``insists``: ``with`` and the decorator, which must have the lock and so do not wait for themselves.
    """

    lease: Lease | None = None
    _entry: Entry | None = None
    busy: LockInfo | None = None
    around: transactions.Around | None = None  # None: those of this very thread are looked up

    def __init__(
        self,
        name: str,
        using: str,
        label: str,
        message: str,
        options: Options,
        entries: Entries,
        blocking: bool = True,
        timeout: float = -1,
        *,
        insists: bool = False,
    ) -> None:
        self._name, self._using = name, using
        self._entries = entries
        self._insists = insists
        service = locks.service(using)
        self.backend = service.backend
        self.terms = options.terms(self.backend.terms)
        self.keeper = service.renewer
        self._seconds = _seconds(blocking, timeout, self.terms.wait)
        self._began = clock()
        self.execution = current_execution()
        holder = Holder.here(label or self.terms.label, self.execution, message)
        ticket = Ticket(name, self.terms.ttl, holder, min_hold=self.terms.min_hold)
        self.wait = Wait(service, ticket, self._seconds, self._waits_for_itself, self._may_be_own)

    def steps(self) -> Steps:
        if self.terms.in_atomic == "refuse" and (opened := self._open_transactions()):
            transactions.refuse(f"The lock {self._name!r} ({self._using})", opened)
        return self.wait.steps()

    def _may_be_own(self) -> bool:
        """Whether the lock seems to be this caller's already, or one that it may enter."""
        last = self.keeper.last_of(self._name)
        return last is not None and (self._is_own(last) or self._is_deferred(last))

    def _waits_for_itself(self, busy: LockInfo) -> bool:
        return self._enterable(busy) is not None or (self._insists and self._own(busy) is not None)

    def _enterable(self, busy: LockInfo) -> Lease | None:
        """The lease that is in the way and that may be entered again."""
        lease = self.keeper.find(busy.token)
        if lease and (self._is_deferred(lease) or (self.terms.reentrant and self._is_own(lease))):
            return lease
        return None

    def _is_deferred(self, lease: Lease) -> bool:
        """Whether it was left already, and is held for a transaction that is open here."""
        if lease.entries or not lease.pledges or not lease.is_live:
            return False
        return any(transaction in lease.pledges for transaction in self._open_transactions())

    def _open_transactions(self) -> Sequence[transactions.Transaction]:
        return transactions.open_here() if self.around is None else self.around.known()

    async def look_around(self) -> None:
        """Find out what is open around the task, where the lock may depend on it; not for longer than it waits."""
        self.around = transactions.Around()
        last = self.keeper.last_of(self._name)
        refuses = self.terms.in_atomic == "refuse"
        if not refuses and not (last and last.pledges):
            return
        within = None if self._seconds is None else max(self._seconds, SHORTEST_LOOK)
        if not await self.around.is_known(within) and refuses:
            raise LockTimeout(
                f"Whether the lock {self._name!r} ({self._using}) is asked for inside a transaction, which"
                " in_atomic='refuse' forbids, is not known: the thread that waits for this task in async_to_sync was"
                " busy with something else. Wait longer, or keep it free of slow work."
            )

    def _own(self, busy: LockInfo) -> Lease | None:
        """The lease of this very thread or task which is in the way, as the store says.

        Not one that it has left, and that an open response holds.
        """
        lease = self.keeper.find(busy.token)
        return lease if lease and lease.entries and self._is_own(lease) else None

    def _is_own(self, lease: Lease) -> bool:
        return lease.is_live and lease.belongs_to(self.execution) and ref(lease) in _acquired_here.get()

    def conclude(self, outcome: Outcome) -> signals.News | None:
        about: dict[str, Any] = {"name": self._name, "using": self._using}
        if outcome.grant:
            self.lease = Lease(self.backend, self.wait.ticket, outcome.grant, self.terms, self.keeper, self.execution)
            self.keeper.keep(self.lease)
            _remember(self.lease)
            self._enter(self.lease)
            return signals.News(signals.lock_acquired, type(self.backend), {**about, "lease": self.lease})
        self.busy = outcome.busy
        assert self.busy
        if own := self._enterable(self.busy):
            self.lease = own
            own.pass_to(self.execution)
            _remember(own)
            self._enter(own, again=True)
            return None
        about |= {"holder": self.busy.holder, "waited": clock() - self._began}
        return signals.News(signals.lock_busy, type(self.backend), about)

    def _enter(self, lease: Lease, *, again: bool = False) -> None:
        self._entry = Entry(self.execution, self._insists, self.terms.reentrant)
        self._entries.enter(self._entry, lease, again=again)

    def undo(self) -> None:
        """The caller is interrupted before it learns of its lease."""
        left = None
        if self._entry:
            with suppress(LookupError):
                left = self._entries.leave(self._entry, by_with=True)
        if not self.wait.grant:
            if left and left.is_free:
                left.let_go()
        elif self.lease:
            self.lease.abandon()
        else:
            self.keeper.abandon(self.wait.ticket)

    def fail(self) -> NoReturn:
        busy = self.busy
        assert busy
        lock_is = f"The lock {self._name!r} ({self._using})"
        if self._own(busy):
            raise LockReentry(
                f"{lock_is} is held by this very {kind()} already, which would wait for itself."
                " Use reentrant=True if it may enter again."
            )
        message = f"{lock_is} is busy: {_described(busy)}"
        retry_after = busy.remaining if busy.remaining < inf else None
        if self._seconds == 0:
            raise LockNotAcquired(message, retry_after=retry_after, holder=busy.holder)
        waited = f"{clock() - self._began:.1f} s of waiting"
        raise LockTimeout(f"{message}, after {waited}", retry_after=retry_after, holder=busy.holder)


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


def _seconds(blocking: bool, timeout: float, own: float | None) -> float | None:
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
