"""``lock_all()``: several locks together, all or none, without deadlock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from .. import signals
from ..exceptions import LockBackendError, LockError, LockLost, LockNotHeld
from ..options import LONGEST_TTL, Terms
from ..types import Grant, LockInfo, current_execution
from ..utils import fork
from ..utils.clock import clock, safe_deadline
from ..utils.drive import Call, Steps, adrive, drive
from .acquire import Acquisition
from .busy import slow_error
from .holds import BY_WITH, NothingToLeave
from .lease import Lease
from .lock import Lock, sync_owner

if TYPE_CHECKING:
    from django.dispatch import Signal

    from ..backends.base import BaseLockBackend

WAIT: float = Terms().wait or 0.0  # seconds, as of one lock
AS_LONG_AS_IT_TAKES = min(LONGEST_TTL, threading.TIMEOUT_MAX)  # seconds, which no process lives


def lock_all(*handles: Lock, wait: float | timedelta | None = WAIT) -> LockGroup:
    """A handle on several locks, which ``with`` and ``async with`` acquire together: all of them, or none.

    ``with lock_all(lock("account:{}", a), lock("account:{}", b), wait=5) as leases:``

    ``handles``: of ``lock()``, in any order. The same name twice on one store is one lock, also by two aliases of one
    store; it belongs to the alias that was given first. ``leases`` is a tuple in the order of the handles.

    ``wait`` (10): seconds to wait for all of them together; 0 does not wait, None waits as long as it takes. The
    ``wait`` of the handles and their aliases does not count. ``on_unavailable`` is one decision: if all handles say
    "run", the body runs without any of the locks during an outage of one store; else it raises LockBackendError.

    Code that acquires locks only by this cannot deadlock: all processes take them in one order. A lock that was
    granted is renewed while the call waits for the next ones. A thread or task that already holds a lock and asks for
    more does not have this guarantee.

    ``with`` raises LockNotAcquired or LockTimeout for a lock that is busy, LockLost if one is lost while the call
    waits for the next ones, which ends the wait, LockReentry, LockBackendError, ValueError for the same name with
    different options. Then nothing is held. Raises TypeError for an argument that is no handle of ``lock()``,
    ValueError for a bad ``wait`` or without a handle.
    """
    if not handles:
        raise ValueError("lock_all() was given no lock: name one or more, lock_all(lock('a'), lock('b')).")
    for handle in handles:
        if type(handle) is not Lock:
            raise TypeError(f"lock_all() takes handles of lock(), and {handle!r} is none.")
    return LockGroup(handles, Terms(wait=wait).wait)


class Leases(tuple[Lease, ...]):
    """The leases of ``lock_all()``, in the order of its handles; the same lease twice if a name was given twice."""

    __slots__ = ()

    def ensure_held(self) -> None:
        """Return if all leases are certainly held now, by the local clock; no I/O.

        Raises LockLost, which names the first lost lease, or LockNotHeld after the release of one. The
        ``ensure_held()`` of each lease also raises after the loss of any other.
        """
        for lease in self:
            lease.ensure_held()

    @property
    def is_held(self) -> bool:
        """Whether all are certainly held at this moment, in this process."""
        return all(lease.is_held for lease in self)

    @property
    def remaining(self) -> float:
        """Seconds until the holder must stop unless all are renewed before: the smallest value; 0.0 if one ended."""
        return min(lease.remaining for lease in self)


def leases_of(entered: Lease | Leases) -> Sequence[Lease]:
    """The leases that ``with`` gave, for one lock or several, each lease once."""
    return tuple(dict.fromkeys(entered)) if isinstance(entered, Leases) else (entered,)


class Entered(NamedTuple):
    """One ``with`` that is not left yet."""

    acquisition: GroupAcquisition
    leases: Leases


class LockGroup:
    """The locks of ``lock_all()``. Threads and tasks may share it, and enter it again after it was left."""

    def __init__(self, handles: Sequence[Lock], wait: float | None) -> None:
        self._handles, self._wait = handles, wait
        self._entered: list[Entered] = []

    def __enter__(self) -> Leases:
        acquisition = GroupAcquisition(self._handles, self._wait, sync_owner())
        try:
            drive(acquisition.steps(), acquisition)
            return self._enter(acquisition)
        except BaseException as error:
            self._undo(acquisition, error)
            raise

    async def __aenter__(self) -> Leases:
        acquisition = GroupAcquisition(self._handles, self._wait, current_execution())
        try:
            await adrive(acquisition.steps(), acquisition)
            return self._enter(acquisition)
        except BaseException as error:  # cancelled: the caller will never know that the locks were granted
            self._undo(acquisition, error)
            raise

    def _enter(self, acquisition: GroupAcquisition) -> Leases:
        leases = acquisition.leases()
        self._entered.append(Entered(acquisition, leases))
        return leases

    def _undo(self, acquisition: GroupAcquisition, error: BaseException) -> None:
        self._entered[:] = [entered for entered in self._entered if entered.acquisition is not acquisition]
        try:
            acquisition.undo(error)
        except BaseException:  # a second interrupt
            acquisition.undo(error)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = self._leave()
        try:
            problem = _leave_all(left, error)
        except BaseException:
            _drop(left)
            raise
        if problem is not error and problem is not None:
            raise problem

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = self._leave()
        try:
            problem = await _aleave_all(left, error)
        except BaseException:
            _drop(left)
            raise
        if problem is not error and problem is not None:
            raise problem

    def _leave(self) -> list[Lock]:
        """The handles to leave, in the order in which they were acquired. Raises LockNotHeld."""
        if not self._entered:
            raise LockNotHeld(f"{self!r} is not held.")
        mine = [entered for entered in self._entered if entered.acquisition.execution is current_execution()]
        entered = (mine or self._entered)[-1]  # an iterator may begin in another thread or task
        self._entered.remove(entered)
        for lease in entered.leases:
            if lease._group is entered.leases:
                lease._group = ()
        return entered.acquisition.handles

    def __repr__(self) -> str:
        names = ", ".join(repr(handle.name) for handle in self._handles)
        return f"<{type(self).__module__}.{type(self).__qualname__} object of {names} at {id(self):#x}>"


def _leave_all(handles: list[Lock], error: BaseException | None) -> BaseException | None:
    """Release all of them, the last one first, also if one fails. Returns the error to raise."""
    while handles:
        try:
            handles[-1].__exit__(None, error, None)
        except BaseException as failure:
            error = _graver(error, failure)
        handles.pop()
    return error


async def _aleave_all(handles: list[Lock], error: BaseException | None) -> BaseException | None:
    while handles:
        try:
            await handles[-1].__aexit__(None, error, None)
        except BaseException as failure:
            error = _graver(error, failure)
        handles.pop()
    return error


def _graver(first: BaseException | None, second: BaseException) -> BaseException:
    """The first error; but an error never hides an interrupt or a cancellation."""
    return first if isinstance(first, BaseException) and isinstance(second, Exception) else second


def _drop(handles: Sequence[Lock]) -> None:
    """Their release was interrupted, and nobody repeats it. Their leases end with their TTL."""
    for handle in handles:
        handle._drop_hold(None, BY_WITH)


class Member(NamedTuple):
    """One lock of a group. ``place``: where it stands in the order of all locks of all stores."""

    place: tuple[str, str]
    handle: Lock
    acquisition: Acquisition


class GroupAcquisition:
    """One request for several locks, from the first attempt to their leases or the failure.

    If all are free, and the store can do it, they are granted in one step. Otherwise they are acquired one after
    another, each as if it were alone, in an order that is the same in all processes. So nobody waits in a circle. And
    nobody has a place in one queue while it waits in another one, so a lock is handed only to a waiter that takes it.
    """

    def __init__(self, handles: Sequence[Lock], wait: float | None, execution: object) -> None:
        self.execution = execution
        self._handles, self._timeout = handles, AS_LONG_AS_IT_TAKES if wait is None else wait
        self._open: list[Member] = []  # asked for and not given back, in this order
        self._signal: Signal | None = None  # to say that the last one was busy
        self._by_handle, self._members = self._begin()

    def _begin(self) -> tuple[list[Member], list[Member]]:
        """The members by handle; and each lock once, in the order of all locks. All have one deadline."""
        known: dict[tuple[str, str], Member] = {}
        by_handle = []
        for handle in self._handles:
            acquisition = handle._acquisition(self.execution, BY_WITH, timeout=self._timeout)
            place = identity_of(acquisition.backend), acquisition.request.key
            member = known.setdefault(place, Member(place, handle, acquisition))
            if _options_of(member.handle) != _options_of(handle):
                raise ValueError(f"lock_all() was given the lock {handle.name!r} twice, with different options.")
            by_handle.append(member)
        return by_handle, sorted(known.values(), key=lambda member: member.place)

    @property
    def handles(self) -> list[Lock]:
        return [member.handle for member in self._members]

    def leases(self) -> Leases:
        """The leases of all handles, when all were acquired."""
        leases = Leases(lease for member in self._by_handle if (lease := member.acquisition.lease))
        for member in self._members:
            if member.acquisition.grant and (lease := member.acquisition.lease):  # else its holder had it before
                lease._group = leases
        return leases

    def answer(self, acquisition: Acquisition) -> Lease | LockInfo:
        """The answer to one request, after its wait."""
        answer = acquisition.ask()
        return drive(acquisition.steps(), acquisition.backend) if answer is None else answer

    async def aanswer(self, acquisition: Acquisition) -> Lease | LockInfo:
        """``answer()`` for tasks."""
        await self.alearn_transactions(acquisition)
        answer = await acquisition.aask()
        return await adrive(acquisition.steps(), acquisition.backend) if answer is None else answer

    def learn_transactions(self, acquisition: Acquisition) -> None:
        """Learn which transactions are open around the caller. A thread knows its own."""

    async def alearn_transactions(self, acquisition: Acquisition) -> None:
        if acquisition.depends_on_transactions():
            await acquisition.wait_for_transactions()

    def steps(self) -> Steps[None]:
        """Acquire all of them. Raises the error of the one that fails, or LockLost; then none is held."""
        try:
            if not (yield from self._acquire_in_one_step()):
                for member in self._members:
                    yield from self._acquire(member)
            self._check_that_all_stand()
        except LockBackendError as error:
            failed = self._open[-1].acquisition
            self.undo(error)  # in the background, because a store does not answer
            if not self._may_run_without(error):
                yield from _send(signals.lock_unavailable, failed, error)
                raise
            yield from self._run_without(error)
        except LockError as error:
            failed = self._open[-1].acquisition
            yield from self._give_back(error)
            if self._signal:
                yield from _send(self._signal, failed)
            raise
        else:
            for member in self._members:
                if member.acquisition.grant:
                    yield from _send(signals.lock_acquired, member.acquisition)

    def _acquire_in_one_step(self) -> Steps[bool]:
        """All of them, if their store can do it and all are free. Returns whether all are held; else none is."""
        acquisitions = [member.acquisition for member in self._members]
        stores = {store for (store, _), _, _ in self._members}
        if len(acquisitions) == 1 or len(stores) > 1 or not all(map(_passes_nobody_here, acquisitions)):
            return False
        self._open.extend(self._members)
        for acquisition in acquisitions:
            if acquisition._terms.in_atomic == "refuse":
                yield Call("learn_transactions", (acquisition,))
                acquisition._refuse_transactions()
        for acquisition in acquisitions:
            acquisition._pending, acquisition._was_sent = acquisition.request, True
        grants = yield Call(
            "acquire_all", ([acquisition.request for acquisition in acquisitions],), on=acquisitions[0].backend
        )
        if grants is None or any(map(_came_too_late, acquisitions, grants)):
            for acquisition in acquisitions:
                if grants or acquisition.request.in_doubt:
                    acquisition._service.renewer.release_in_background(acquisition.request)
                    acquisition.request = acquisition.request.with_new_token()
                acquisition._pending, acquisition._was_sent = None, False
            self._open.clear()
            return False
        for acquisition, grant in zip(acquisitions, grants, strict=True):
            lease = acquisition._answered(grant)
            if lease is None:
                raise slow_error(acquisition.request)
            acquisition.conclude(lease)
        return True

    def _acquire(self, member: Member) -> Steps[None]:
        acquisition = member.acquisition
        if self._open:
            acquisition.request.holder = acquisition.request.holder.from_now()
            acquisition.needed = [lease for one in self._open if (lease := one.acquisition.lease)]
        self._open.append(member)
        with ExitStack() as watching:
            for lease in acquisition.needed:
                watching.enter_context(lease._watched(acquisition.request.event))
            answer = yield Call("answer", (acquisition,))
        signal = acquisition.conclude(answer)
        if acquisition.lease is None:
            self._signal = signal
            acquisition.fail()

    def _check_that_all_stand(self) -> None:
        """After the last grant: the first lease may have ended while the call waited for the others."""
        for member in self._members:
            lease = member.acquisition.lease
            if lease and not lease.is_held:
                raise lease._lost_error()

    def _give_back(self, problem: LockError) -> Steps[None]:
        """Release what was granted, at once and without a signal, whatever its min_hold."""
        while self._open:
            acquisition = self._open[-1].acquisition
            if acquisition.grant and (lease := acquisition.lease):
                _leave(acquisition)
                try:
                    yield Call("release", (lease._request, lease._begin_release()), on=acquisition.backend)
                except (LockLost, LockNotHeld):  # it is over anyway
                    pass
                except LockBackendError as error:
                    lease._release_after_failure(error)
                lease._renewer.wake_first(lease._request.key)
            else:
                acquisition.undo(problem)
            self._open.pop()

    def undo(self, error: BaseException) -> None:
        """Give back, in the background, what was granted. If this is interrupted, it is called once more."""
        while self._open:
            acquisition = self._open[-1].acquisition
            if acquisition.grant:
                _leave(acquisition)
            acquisition.undo(error)
            self._open.pop()

    def _may_run_without(self, error: LockBackendError) -> bool:
        wanted = all(member.acquisition._terms.on_unavailable == "run" for member in self._members)
        return wanted and not error.is_final and self._members[0].acquisition.request.holder.pid == fork.pid()

    def _run_without(self, error: LockBackendError) -> Steps[None]:
        """Continue without any of the locks, with leases that were not granted."""
        self._by_handle, self._members = self._begin()
        for member in self._members:
            yield Call("learn_transactions", (member.acquisition,))
            self._open.append(member)
            member.acquisition.conclude_unanswered(error)
        for member in self._members:
            yield from _send(signals.lock_unavailable, member.acquisition, error)


def _passes_nobody_here(acquisition: Acquisition) -> bool:
    """Whether nobody in this process has the lock or waits for it."""
    return not acquisition._leases_here() and not acquisition._service.queue.length(acquisition.request.key)


def _came_too_late(acquisition: Acquisition, grant: Grant) -> bool:
    return clock() >= safe_deadline(grant.sent_at, acquisition.request.ttl)


def _leave(acquisition: Acquisition) -> None:
    """Its caller does not continue with the lease, so it is not kept for its min_hold."""
    if lease := acquisition.lease:
        lease._terms = lease._terms.replace(min_hold=0.0)
    if acquisition._hold:
        with suppress(NothingToLeave):
            acquisition._holds.leave(acquisition._hold, BY_WITH)


def _send(signal: Signal, acquisition: Acquisition, error: LockBackendError | None = None) -> Steps[None]:
    if signal.receivers:
        yield Call("send_signal", (signal, type(acquisition.backend)), acquisition.about(error), on=signals)


def _options_of(handle: Lock) -> Terms:
    """The options that one lease has."""
    return handle._options.own.replace(wait=None, label="")


def identity_of(backend: BaseLockBackend) -> str:
    """Identifies the store, in all processes alike; equal for aliases of one store."""
    keyspace = backend.keyspace
    return backend.alias if keyspace is None else _as_text(keyspace)


def _as_text(part: object) -> str:
    if isinstance(part, frozenset):
        return f"{{{' '.join(sorted(map(_as_text, part)))}}}"
    if isinstance(part, tuple):
        return f"({' '.join(map(_as_text, part))})"
    return repr(part)
