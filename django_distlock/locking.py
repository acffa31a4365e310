"""``lock()``: the handle that threads and tasks acquire and release."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import inf
from types import TracebackType
from typing import Any, Literal, NoReturn, TypedDict, Unpack
from weakref import ReferenceType, ref

from django.utils.asyncio import async_unsafe

from . import signals, waiting
from .backends.base import BaseLockBackend
from .exceptions import LockError, LockNotAcquired, LockNotHeld, LockReentry, LockTimeout
from .handlers import DEFAULT_ALIAS, locks
from .leases import Lease, State, logger
from .names import render
from .renewal import renewer_of
from .terms import Terms
from .tickets import Holder, LockInfo, Ticket, clock, current_execution

blocks_the_loop = async_unsafe(
    "A lock was asked for synchronously inside an event loop, which would block it. Use 'async with lock(...)',"
    " 'await lock(...).aacquire()', an 'async def' under the decorator, or sync_to_async."
)

# Child tasks inherit the context and sync_to_async lends one thread to many, so an execution owns a
# lease only when the thread or task is the same *and* the context remembers having acquired it.
_acquired_here: ContextVar[tuple[ReferenceType[Lease], ...]] = ContextVar("django_distlock_acquired_here", default=())


def _remember(lease: Lease) -> None:
    known = _acquired_here.get()
    count = len(known)
    if count >= 8 and count & (count - 1) == 0:  # now and then, because every lease is looked at
        known = tuple(known_lease for known_lease in known if (held := known_lease()) and held.is_live)
    _acquired_here.set((*known, ref(lease)))


class LockOptions(TypedDict, total=False):
    """Keywords of ``lock()`` and ``@distributed_lock``. What is not given comes from the alias' settings."""

    ttl: float
    wait: float | None
    renew: bool
    max_hold: float | None
    min_hold: float
    reentrant: bool
    on_lost: Literal["raise", "log"]
    label: str


_KNOWN = tuple(option.name for option in fields(Terms))
_MISTAKEN = {
    "timeout": "ttl or wait? ttl=30 is how long the store keeps a lease nobody renews (what redis-py calls timeout);"
    " wait=5 is how long to wait for a busy lock.",
    "blocking_timeout": "ttl or wait? wait=5 is how long to wait for a busy lock; ttl=30 is how long the store keeps"
    " a lease nobody renews.",
    "blocking": "wait=0 does not wait for a busy lock; wait=None waits as long as it takes.",
    "expire": "ttl=30 is how long the store keeps a lease nobody renews.",
    "auto_renewal": "renew=True keeps the lease alive while its holder lives; it is the default.",
}


class Settled:
    """Options as given, and the terms that follow from them with the defaults of a backend."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        for option in given:
            if option not in _KNOWN:
                hint = _MISTAKEN.get(option) or f"The options are {', '.join(_KNOWN)}, using."
                raise TypeError(f"A lock has no option {option!r}: {hint}")
        Terms(**given)  # tells bad values where they are written, not where they are first used
        self.given = given
        self._last: tuple[BaseLockBackend, Terms] | None = None

    def terms(self, backend: BaseLockBackend) -> Terms:
        if self._last is None or self._last[0] is not backend:
            self._last = backend, replace(backend.terms, **self.given)
        return self._last[1]


# A program has few different sets of options and asks for locks often. Typed, because 1 == True.
_settled = lru_cache(maxsize=256, typed=True)(lambda **given: Settled(given))


def lock(name: str, /, *values: object, using: str = DEFAULT_ALIAS, **options: Unpack[LockOptions]) -> Lock:
    """A handle on the lock of that name; nothing is asked of the store yet.

    ``values`` fill the fields of the name, escaped as the decorator's templates do:
    ``lock("order:{}", pk)`` is the lock of ``@distributed_lock("order:{pk}")``.

    ``using``: alias in the setting ``DISTRIBUTED_LOCKS``. The options below default to its entry.

    - ``ttl`` (30): seconds the store keeps a lease that nobody renews.
    - ``wait`` (10): seconds to wait for a busy lock; 0 does not wait, None waits as long as it takes.
    - ``renew`` (True): renew at a third of the TTL until release; False: the TTL is all there is.
    - ``max_hold`` (3600): seconds after which a lease is renewed no more; None: no bound.
    - ``min_hold`` (0): seconds the lock stays taken after it was granted, however soon it is released.
    - ``reentrant`` (False): the thread or task that holds the lock may enter it again. Otherwise ``with``
      raises LockReentry there.
    - ``on_lost`` ("raise"): leaving ``with`` after the lease was lost raises LockLost, unless the body
      raised; "log" never raises at the end of ``with``.
    - ``label``: what people read as the purpose of the holder; default: the program that runs.

    Raises InvalidLockName, ValueError for a value out of range, TypeError for an unknown option.
    """
    return Lock(render(name, values), using, _settled(**options))


@dataclass(slots=True, eq=False)
class Entry:
    """One acquisition by a handle. ``lease`` is None once the body of its ``with`` released it."""

    lease: Lease | None
    by_with: bool
    reentrant: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reentrant = self.lease is not None and self.lease.terms.reentrant


class Lock:
    """threading.Lock's protocol over all processes, with an ``a`` twin for each call.

    One handle may be shared by threads and tasks. Each acquisition is a lease of its own, so that a late
    release of a lost one never frees its successor.
    """

    def __init__(self, name: str, using: str, options: Settled, label: str = "") -> None:
        self.name = name
        self.using = using
        self.label = label
        self._options = options
        self._entered: dict[object, list[Entry]] = {}  # by execution

    @blocks_the_loop
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """True when the lock is held now, False when it stayed busy.

        ``timeout``: seconds to wait; -1 means the lock's own ``wait``. Raises LockBackendError.
        """
        return self._made(_Attempt(self, blocking, timeout)).lease is not None

    async def aacquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """``acquire()`` for tasks. Cancelled, it leaves nothing behind."""
        return (await self._amade(_Attempt(self, blocking, timeout))).lease is not None

    @blocks_the_loop
    def release(self) -> None:
        """Give up the lease that this thread or task took by this handle, else the handle's last one.

        A reentrant lock is given up by its owner alone, after as many releases as acquisitions.
        Raises LockNotHeld, LockLost, LockBackendError (the release is then repeated in the background).
        """
        if lease := self._leave():
            lease.release()

    async def arelease(self) -> None:
        """``release()`` for tasks. Cancelled, it is finished in the background."""
        if lease := self._leave():
            await lease.arelease()

    @blocks_the_loop
    def locked(self) -> bool:
        """Whether anybody holds the lock now, as the store says."""
        return locks[self.using].look([self.name]) != [None]

    async def alocked(self) -> bool:
        """``locked()`` for tasks."""
        return await locks[self.using].alook([self.name]) != [None]

    @blocks_the_loop
    def __enter__(self) -> Lease:
        attempt = self._made(_Attempt(self, insists=True))
        return attempt.lease or attempt.fail()

    async def __aenter__(self) -> Lease:
        attempt = await self._amade(_Attempt(self, insists=True))
        return attempt.lease or attempt.fail()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if lease := self._leave(by_with=True):
                lease.release()
        except LockError as problem:
            self._tell(problem, error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if lease := self._leave(by_with=True):
                await lease.arelease()
        except LockError as problem:
            self._tell(problem, error)

    def _made(self, attempt: _Attempt) -> _Attempt:
        outcome = waiting.acquire(attempt.wait, attempt.steps())
        try:
            signals.announce(attempt.conclude(outcome))
        except BaseException:
            attempt.undo()
            raise
        return attempt

    async def _amade(self, attempt: _Attempt) -> _Attempt:
        outcome = await waiting.aacquire(attempt.wait, attempt.steps())
        try:
            await signals.aannounce(attempt.conclude(outcome))
        except BaseException:  # cancelled: whoever asked will never know that the lock was granted
            attempt.undo()
            raise
        return attempt

    def _tell(self, problem: LockError, body_error: BaseException | None) -> None:
        """An error at the end of ``with`` never takes the place of one that the body raised."""
        if body_error is None and self._options.terms(locks[self.using]).on_lost == "raise":
            raise problem
        logger.error("%s", problem)

    def _enter(self, lease: Lease, execution: object, by_with: bool) -> None:
        self._entered.setdefault(execution, []).append(Entry(lease, by_with))

    def _leave(self, *, by_with: bool = False) -> Lease | None:
        """The lease to release now; None for one that was entered again, or that its ``with`` finds released."""
        execution = current_execution()
        mine = self._entered.get(execution)
        if not mine:
            execution, mine = next(reversed(list(self._entered.items())), (execution, []))
            if mine and mine[-1].reentrant:
                mine = []
        fitting = (entry for entry in reversed(mine) if (entry.by_with if by_with else entry.lease))
        if (entry := next(fitting, None)) is None:
            raise self._not_held()
        lease, entry.lease = entry.lease, None
        if by_with or not entry.by_with:  # "with" finds its own entry at its end, whatever its body released
            mine.remove(entry)
        if not mine:
            self._entered.pop(execution, None)
        if lease is None:
            raise self._not_held()
        if by_with and (lease.pid != os.getpid() or lease.state is State.RELEASED):
            return None
        lease.entries -= 1
        return None if lease.entries else lease

    def _not_held(self) -> LockNotHeld:
        return LockNotHeld(f"The lock {self.name!r} ({self.using}) is not held by this handle and {_kind()}.")

    def _leases(self) -> list[Lease]:
        return [entry.lease for entries in list(self._entered.values()) for entry in entries if entry.lease]

    # What threading.Condition asks of a reentrant lock

    def _is_owned(self) -> bool:
        return bool(self._recursion_count())

    def _recursion_count(self) -> int:
        return sum(entry.lease is not None for entry in self._entered.get(current_execution(), ()))

    def _release_save(self) -> int:
        count = self._recursion_count()
        for _ in range(count or 1):
            self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        for _ in range(count):
            if not self.acquire():
                raise LockTimeout(f"The lock {self.name!r} ({self.using}) stayed busy after a wait for a condition.")

    def __repr__(self) -> str:
        status = "locked" if self._leases() else "unlocked"
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{status} {kind} object {self.name!r} using {self.using!r} at {id(self):#x}>"

    def __del__(self) -> None:
        for lease in self._leases():
            if lease.state in (State.HELD, State.UNKNOWN) and not sys.is_finalizing():
                lease.forsake()
                warnings.warn(
                    f"A handle of lock {self.name!r} ({self.using}) was dropped while it held the lock, which now"
                    " runs out by its TTL. Use 'with', or keep the handle and release it.",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )


class _Attempt:
    """One call of acquire, from its terms to its lease or its failure.

    ``insists``: ``with`` and the decorator, which must have the lock and so do not wait for themselves.
    """

    lease: Lease | None = None
    busy: LockInfo | None = None

    def __init__(self, handle: Lock, blocking: bool = True, timeout: float = -1, *, insists: bool = False) -> None:
        self._handle = handle
        self._insists = insists
        self.backend = locks[handle.using]
        self.terms = handle._options.terms(self.backend)
        self.keeper = renewer_of(self.backend)
        self._seconds = _seconds(blocking, timeout, self.terms.wait)
        self._began = clock()
        self.execution = current_execution()
        holder = Holder.here(self.terms.label or handle.label, self.execution)
        ticket = Ticket(handle.name, self.terms.ttl, holder)
        self.wait = waiting.Wait(self.backend, self.keeper, ticket, self._seconds, self._waits_for_itself)

    def steps(self) -> waiting.Steps:
        last = self.keeper.last_of(self._handle.name)
        return self.wait.steps(may_be_own=last is not None and self._is_own(last))

    def _waits_for_itself(self, busy: LockInfo) -> bool:
        return (self._insists or self.terms.reentrant) and self._own(busy) is not None

    def _own(self, busy: LockInfo) -> Lease | None:
        """The lease of this very thread or task which is in the way, as the store says."""
        lease = self.keeper.find(busy.token)
        return lease if lease and self._is_own(lease) else None

    def _is_own(self, lease: Lease) -> bool:
        return lease.is_live and lease.owner is self.execution and ref(lease) in _acquired_here.get()

    def conclude(self, outcome: waiting.Outcome) -> signals.News | None:
        about: dict[str, Any] = {"name": self._handle.name, "using": self._handle.using}
        if outcome.grant:
            self.lease = Lease(self.backend, self.wait.ticket, outcome.grant, self.terms, self.keeper, self.execution)
            self.keeper.keep(self.lease)
            _remember(self.lease)
            self._handle._enter(self.lease, self.execution, self._insists)
            return signals.News(signals.lock_acquired, type(self.backend), {**about, "lease": self.lease})
        self.busy = outcome.busy
        assert self.busy
        if self.terms.reentrant and (own := self._own(self.busy)):
            own.entries += 1
            self.lease = own
            self._handle._enter(own, self.execution, self._insists)
            return None
        about |= {"holder": self.busy.holder, "waited": clock() - self._began}
        return signals.News(signals.lock_busy, type(self.backend), about)

    def undo(self) -> None:
        """The caller is interrupted before it learns of its lease."""
        if not (lease := self.lease):
            return
        if lease in self._handle._leases():
            self._handle._leave(by_with=self._insists)
        if lease.ticket is self.wait.ticket and self.keeper.drop(lease):
            self.keeper.abandon(lease.ticket, rest=lease.end())

    def fail(self) -> NoReturn:
        busy = self.busy
        assert busy
        lock_is = f"The lock {self._handle.name!r} ({self._handle.using})"
        if self._own(busy):
            raise LockReentry(
                f"{lock_is} is held by this very {_kind()} already, which would wait for itself."
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
    return f"{state} {busy.holder}{left}"


def _kind() -> str:
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
