"""One call that asks for a lock, from its terms to its lease or its failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from math import inf
from typing import Any, NoReturn
from weakref import ReferenceType, ref

from . import signals, transactions, waiting
from .entries import Entries, Entry
from .exceptions import LockNotAcquired, LockReentry, LockTimeout
from .handlers import locks
from .leases import Lease
from .options import Options
from .types import Holder, LockInfo, Ticket, current_execution
from .utils.clock import clock

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
        self.wait = waiting.Wait(service, ticket, self._seconds, self._waits_for_itself, self._may_be_own)

    def steps(self) -> waiting.Steps:
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

    def conclude(self, outcome: waiting.Outcome) -> signals.News | None:
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
