"""``lock()``: the handle that threads and tasks acquire and release."""

from __future__ import annotations

import sys
import threading
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Unpack

from django.utils.asyncio import async_unsafe

from ..exceptions import InvalidLockBackend, LockBackendError, LockError, LockLost, LockNotHeld, LockTimeout
from ..names import fixed_name, parse, render, stored_name
from ..options import DEFAULTS, LockOptions, Options, seconds_to_wait, settled
from ..signals import asend_signal, send_signal
from ..types import Holder, LockInfo, LockRequest, State, Usage, current_execution, execution_kind
from ..utils.drive import Call, Steps, adrive, drive
from ..utils.events import about_event
from ..utils.other_words import answer_other_words
from . import dropped, labels, transactions
from .acquire import Acquisition
from .holds import BY_CALL, BY_WITH, Hold, Holds, NothingToLeave
from .lease import Lease, logger
from .registry import DEFAULT_ALIAS, locks

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend

service_of, holder_here = locks.service, Holder.here  # looked up once

# Called inside the methods, not wrapped around them: an interrupt in a wrapper could lose a lease just granted.
refuse_in_event_loop: Callable[[], None] = async_unsafe(
    "A lock was asked for synchronously inside an event loop, which would block it. Use 'async with lock(...)',"
    " 'await lock(...).aacquire()', an 'async def' under the decorator, or sync_to_async."
)(lambda: None)


def sync_owner() -> object:
    """The calling thread, which owns what it acquires. Raises inside an event loop, which the call would block."""
    if _get_running_loop() is None:  # asked here, because Django's own check takes longer than all the rest
        return threading.current_thread()
    refuse_in_event_loop()
    return current_execution()  # DJANGO_ALLOW_ASYNC_UNSAFE is set; then the task owns it


def lock(name: str | LockInfo, /, *values: object, using: str = DEFAULT_ALIAS, **options: Unpack[LockOptions]) -> Lock:
    """A handle on the lock of that name. It does not ask the store yet.

    ``values`` fill the fields of the name, escaped as the decorator's templates do:
    ``lock("order:{}", pk)`` is the lock of ``@distributed_lock("order:{pk}")``. Instead of a name, give a LockInfo of
    ``held()`` for its lock.

    ``using``: alias in the setting ``DISTRIBUTED_LOCKS``; a LockInfo has its own. The entry of the alias has the
    defaults of the options below. Seconds may be a ``timedelta``.

    - ``ttl`` (30): seconds the store keeps a lease that nobody renews.
    - ``wait`` (10): seconds to wait for a busy lock; 0 does not wait, None waits as long as it takes.
    - ``max_waiters`` (None): how many may wait for the lock. If so many processes wait, or so many callers of this
      process, another caller does not wait, but gets LockNotAcquired at once, with ``reason="crowded"``. Callers that
      wait already continue. It does not apply with ``wait=0``. None: no bound.
    - ``renew`` (True): renew at a third of the TTL until release; False: never renew.
    - ``max_hold`` (None): seconds after which a lease is no longer renewed, also while its holder works; None: no
      bound, so a holder that hangs keeps the lock until its process ends.
    - ``min_hold`` (0): seconds the lock stays taken after it was granted, even if it is released sooner or its holder
      is killed. If it is longer than ``ttl``, the first lease lasts that long.
    - ``slots`` (1): how many may hold the lock at once, over all processes, up to 1,000. A caller counts all leases of
      the name, whatever numbers the others gave. It is no rate per minute: a slot is taken as long as the work takes.
    - ``reentrant`` (False): the thread or task that holds the lock may enter it again by this handle. Otherwise
      ``with`` raises LockReentry. Give it to the inner lock.
    - ``on_lost`` ("raise"): what the end of ``with`` does if the lease was lost. "raise" raises LockLost, unless the
      body raised an error; "log" raises nothing; a callable gets the LockLost, also if the body raised an error.
    - ``in_atomic`` ("defer"): what ``with`` does inside ``transaction.atomic()``. "defer" keeps the
      lock until the outermost transaction is committed or rolled back, so the next holder reads what
      was written; the same transaction may enter it again meanwhile. "refuse" raises
      TransactionManagementError; "ignore" frees the lock at the end of ``with``, before COMMIT.
    - ``on_unavailable`` ("raise"): what happens if the store does not answer. "raise" raises
      LockBackendError; "run" runs the body *without* the lock, for locks that only save work: the lease has the state
      "unavailable" and is never held. An error that somebody has to correct (``LockBackendError.is_final``) is always
      raised.
    - ``label``: what people read as the purpose of the holder. Default: name and id of the running Celery task,
      else the command of ``manage.py``, else the function that called ``lock()``.

    Raises InvalidLockName, also for a field that no value fills, ValueError for a value out of range, TypeError for an
    unknown option.
    """
    frame = sys._getframe(1)
    caller = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
    if isinstance(name, LockInfo):
        if values or using not in (DEFAULT_ALIAS, name.using):
            raise TypeError("A LockInfo names its lock and its backend: it takes neither values nor another using=.")
        own_name = stored_name(name.name, own=False)
        handle = Lock(own_name, name.using, settled(**options), "", "", caller, prefix=name.prefix)
    elif values:
        filled, given = render(name, values), settled(**options) if options else DEFAULTS
        handle = Lock(filled, using, given, "", "", caller, parse(name).normalized)
    else:
        handle = Lock(fixed_name(name), using, settled(**options) if options else DEFAULTS, "", "", caller)
    handle._made_at = frame.f_lasti
    return handle


@answer_other_words
class Lock:
    """The protocol of threading.Lock over all processes; each method has an async version that begins with ``a``.

    Threads and tasks may share a handle. Each acquisition is a lease of its own, so the late release of a lost
    lease never frees that of its successor.

    If KEY_PREFIX is a callable, each acquisition calls it once, and so does each method that looks at the lock.
    """

    _made_at = -1  # the instruction of the caller that made it, until it is used

    def __init__(
        self,
        name: str,
        using: str,
        options: Options,
        label: str = "",
        message: str = "",
        caller: tuple[str, str] = ("", ""),
        template: str = "",
        prefix: str = "",
    ) -> None:
        """``template``: of a name with values. ``prefix``: of a LockInfo, where KEY_PREFIX is a callable."""
        self.name, self.using, self.label = name, using, label
        self._options, self._message, self._caller = options, message, caller
        self._template, self._prefix, self._holds = template, prefix, Holds()

    def acquire(self, blocking: bool = True, timeout: float | timedelta = -1) -> bool:
        """Return True if the lock is now held, False if it stayed busy.

        ``timeout``: seconds to wait; -1 means the lock's own ``wait``. A thread may wait for a lock that it holds
        itself, as with threading.Lock, because another thread may release it; the log has a warning. Raises
        LockBackendError; with ``on_unavailable="run"`` it returns True instead, and ``lease.is_held`` is False.
        """
        return self._acquire(self._acquisition(sync_owner(), BY_CALL, blocking, timeout)).lease is not None

    async def aacquire(self, blocking: bool = True, timeout: float | timedelta = -1) -> bool:
        """``acquire()`` for tasks. Cancelled, it leaves nothing behind."""
        acquisition = self._acquisition(current_execution(), BY_CALL, blocking, timeout)
        return (await self._aacquire(acquisition)).lease is not None

    def release(self) -> None:
        """Release the lease of this thread or task by this handle, else the last one of the handle.

        Only its owner can release a reentrant lock, with as many releases as acquisitions.
        Raises LockNotHeld, LockLost, LockBackendError (the release is then tried again in the background).
        """
        refuse_in_event_loop()
        hold = None
        try:
            hold = self._holds.to_leave()
            if lease := self._holds.leave(hold, BY_CALL):
                if lease._is_free():
                    lease.release()
                else:
                    lease._let_others_enter()
        except NothingToLeave:
            raise self._not_held() from None
        except BaseException:
            self._drop_hold(hold, BY_CALL)
            raise

    async def arelease(self) -> None:
        """``release()`` for tasks. Cancelled, it is finished in the background."""
        hold = None
        try:
            hold = self._holds.to_leave()
            if lease := self._holds.leave(hold, BY_CALL):
                if lease._is_free():
                    await lease.arelease()
                else:
                    lease._let_others_enter()
        except NothingToLeave:
            raise self._not_held() from None
        except BaseException:
            self._drop_hold(hold, BY_CALL)
            raise

    @property
    def lease(self) -> Lease | None:
        """The lease of this thread or task by this handle, else the last held one of the handle, else None.

        A lease that was not granted counts, too (``on_unavailable="run"``).
        """
        return self._holds.latest()

    def locked(self) -> bool:
        """Whether another caller would now find the lock busy; asks the store. Raises LockBackendError.

        It is busy if somebody holds it. With ``slots``, it is busy if so many hold it, or if somebody waits, because
        nobody may overtake a waiter.
        """
        refuse_in_event_loop()
        return drive(self._is_locked(), self._backend_now())

    async def alocked(self) -> bool:
        """``locked()`` for tasks."""
        return await adrive(self._is_locked(), self._backend_now())

    def _is_locked(self) -> Steps[bool]:
        [leases] = yield Call("look", ([self.name],))
        usage = Usage(self._options.own.slots, tuple(leases))
        if usage.is_full or not usage.held:
            return usage.is_full
        [waiting] = yield Call("count_waiters", ([self.name],))
        return bool(waiting)

    def usage(self) -> Usage:
        """Who holds the lock now; asks the store. Raises LockBackendError."""
        refuse_in_event_loop()
        [leases] = self._backend_now().look([self.name])
        return Usage(self._options.own.slots, tuple(leases))

    async def ausage(self) -> Usage:
        """``usage()`` for tasks."""
        [leases] = await self._backend_now().alook([self.name])
        return Usage(self._options.own.slots, tuple(leases))

    def force_release(self, *, by: str = "", slot: int | None = None) -> bool:
        """Free the lock, whoever holds it, in any process. False if nobody holds it, or it changed hands meanwhile.

        The next renewal tells the holder, which may work until then. ``by``: who frees it, for the log and the signal
        ``lock_forced``; default: the label that a holder would have. ``slot``: which slot to free; default: all.
        Raises LockBackendError.
        """
        from .forced import force_release  # few processes need it

        by = by or labels.here(self._caller)
        freed = [force_release(info, by=by) for info in self.usage().leases if slot in (None, info.slot)]
        return any(freed)

    async def aforce_release(self, *, by: str = "", slot: int | None = None) -> bool:
        """``force_release()`` for tasks."""
        from .forced import aforce_release

        by, usage = by or labels.here(self._caller), await self.ausage()
        return any([await aforce_release(info, by=by) for info in usage.leases if slot in (None, info.slot)])

    def _backend_now(self) -> BaseLockBackend:
        """The backend that looks at the lock of this name, under the caller's prefix."""
        return locks[self.using].pinned(self._prefix)

    def __enter__(self) -> Lease:
        acquisition = self._acquire(self._acquisition(sync_owner(), BY_WITH))
        return acquisition.lease or acquisition.fail()

    async def __aenter__(self) -> Lease:
        acquisition = await self._aacquire(self._acquisition(current_execution(), BY_WITH))
        return acquisition.lease or acquisition.fail()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hold = None
        try:
            hold = self._holds.to_leave_by_with()
            if lease := self._holds.leave(hold, BY_WITH):
                if self._options.own.in_atomic == "defer":
                    transactions.retain_until_commit(lease)
                if lease._is_free():
                    lease.release()
                else:
                    lease._let_others_enter()
        except NothingToLeave:
            self._raise_or_log(self._not_held(), error)
        except LockError as problem:
            self._raise_or_log(problem, error)
        except BaseException:
            self._drop_hold(hold, BY_WITH)
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hold = None
        try:
            hold = self._holds.to_leave_by_with()
            if lease := self._holds.leave(hold, BY_WITH):
                if self._options.own.in_atomic == "defer":
                    await transactions.aretain_until_commit(lease)
                if lease._is_free():
                    await lease.arelease()
                else:
                    lease._let_others_enter()
        except NothingToLeave:
            self._raise_or_log(self._not_held(), error)
        except LockError as problem:
            self._raise_or_log(problem, error)
        except BaseException:
            self._drop_hold(hold, BY_WITH)
            raise

    def _acquisition(
        self, execution: object, by_with: bool, blocking: bool = True, timeout: float | timedelta = -1
    ) -> Acquisition:
        self._made_at = -1
        service = service_of(self.using)
        terms = self._options.terms(service.backend.terms) if self._options.given else service.backend.terms
        seconds = terms.wait if blocking and timeout == -1 else seconds_to_wait(blocking, timeout)
        label = self.label or terms.label or labels.here(self._caller)
        holder = holder_here(label, execution, self._message, terms.slots)
        request = LockRequest(self.name, terms.ttl, holder)
        if self._template:
            request.template = self._template
        if terms.min_hold:
            request.min_hold, request.ttl = terms.min_hold, max(terms.ttl, terms.min_hold)
        if terms.slots > 1:
            self._check_slots(service.backend)
            request.slots = terms.slots
        if terms.max_waiters:
            self._check_max_waiters(service.backend)
            request.max_waiters = terms.max_waiters
        if service.ask_prefix:
            request = request.copy(prefix=self._prefix or service.ask_prefix())
        return Acquisition(service, request, seconds, terms, self._holds, execution, by_with)

    def _check_slots(self, backend: BaseLockBackend) -> None:
        if backend.supports_exclusion and not backend.supports_slots:
            raise InvalidLockBackend(
                f"The lock {self.name!r} ({self.using}) is to have slots={self._options.own.slots}, and a"
                f" {type(backend).__name__} lets one at a time hold a lock. Choose another backend by using=: one"
                " Redis, Sentinel, a Cluster or a database."
            )

    def _check_max_waiters(self, backend: BaseLockBackend) -> None:
        if backend.supports_exclusion and not backend.supports_max_waiters:
            raise InvalidLockBackend(
                f"The lock {self.name!r} ({self.using}) is to have max_waiters={self._options.own.max_waiters}, and a"
                f" {type(backend).__name__} counts no waiters. Take it out, or choose another backend by using=."
            )

    def _acquire(self, acquisition: Acquisition) -> Acquisition:
        try:
            try:
                answer = acquisition.ask()
                if answer is None:
                    answer = drive(acquisition.steps(), acquisition.backend)
            except LockBackendError as error:
                if signal := acquisition.conclude_unanswered(error):
                    send_signal(signal, type(acquisition.backend), **acquisition.about(error))
                if acquisition.lease is None:
                    raise
            else:
                if signal := acquisition.conclude(answer):
                    send_signal(signal, type(acquisition.backend), **acquisition.about())
        except BaseException as error:
            try:
                acquisition.undo(error)
            except BaseException:  # a second interrupt
                acquisition.undo(error)
                raise
            raise
        return acquisition

    async def _aacquire(self, acquisition: Acquisition) -> Acquisition:
        try:
            if acquisition.depends_on_transactions():
                await acquisition.wait_for_transactions()
            try:
                answer = await acquisition.aask()
                if answer is None:
                    answer = await adrive(acquisition.steps(), acquisition.backend)
            except LockBackendError as error:
                if signal := acquisition.conclude_unanswered(error):
                    await asend_signal(signal, type(acquisition.backend), **acquisition.about(error))
                if acquisition.lease is None:
                    raise
            else:
                if signal := acquisition.conclude(answer):
                    await asend_signal(signal, type(acquisition.backend), **acquisition.about())
        except BaseException as error:  # cancelled: the caller will never know that the lock was granted
            try:
                acquisition.undo(error)
            except BaseException:  # a second interrupt
                acquisition.undo(error)
                raise
            raise
        return acquisition

    def _raise_or_log(self, problem: LockError, body_error: BaseException | None) -> None:
        """An error at the end of ``with`` never replaces an error of the body."""
        on_lost = self._options.own.on_lost
        if body_error is None and on_lost == "raise":
            raise problem
        if callable(on_lost) and isinstance(problem, LockLost):
            on_lost(problem)
        else:
            about = about_event("end-failed", alias=self.using, name=self.name, template=self._template or self.name)
            logger.error("%s", problem, extra=about)

    def _not_held(self) -> LockNotHeld:
        return LockNotHeld(
            f"The lock {self.name!r} ({self.using}) is not held by this handle and {execution_kind()}: acquire() was"
            " not called or returned False, or it was released already."
        )

    def _drop_hold(self, hold: Hold | None, by_with: bool) -> None:
        """A release was interrupted, and nobody repeats it: drop the hold, so that the lease ends with its TTL."""
        with suppress(NothingToLeave):
            hold = hold or (self._holds.to_leave_by_with() if by_with else self._holds.to_leave())
            self._holds.leave(hold, by_with)

    # What threading.Condition calls on a reentrant lock

    def _is_owned(self) -> bool:
        return bool(self._holds.depth())

    def _recursion_count(self) -> int:
        return self._holds.depth()

    def _release_save(self) -> int:
        count = self._recursion_count()
        for _ in range(count or 1):
            self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        for _ in range(count):
            if not self.acquire():
                message = f"The lock {self.name!r} ({self.using}) stayed busy after a wait for a condition."
                raise LockTimeout(message, name=self.name, using=self.using)

    def __await__(self) -> NoReturn:
        raise TypeError("A lock is entered by 'async with lock(...)', or taken by 'await lock(...).aacquire()'.")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("A lock is entered by 'with lock(...)'. The decorator is @distributed_lock(...).")

    def __repr__(self) -> str:
        is_locked = any(lease.state is not State.UNAVAILABLE for lease in self._holds.leases())
        status = "locked" if is_locked else "unlocked"
        class_name = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{status} {class_name} object {self.name!r} using {self.using!r} at {id(self):#x}>"

    def __del__(self) -> None:
        if getattr(self, "_holds", None):  # missing if ``__init__()`` failed
            dropped.tell_of_leases(self, self.name, self.using, self._holds.leases())
        elif self._made_at >= 0:
            dropped.tell_of_statement(self.name, self._made_at, sys._getframe().f_back)
