"""What holds a lease: the holds of handles, each ended by a release, and the retainers after the last hold.

Also which leases a context has acquired: they show who owns a lease.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from itertools import islice
from typing import ClassVar, cast
from weakref import ReferenceType, ref

from ..journal import RESPONSE, Event
from ..types import State, current_execution
from ..utils import fork
from .lease import RELEASED, Lease

BY_WITH, BY_CALL = True, False  # how a lease is acquired, and how it is left


class NothingToLeave(LookupError):
    """There is no hold that a release could end, or it was left already."""


class Hold:
    """One acquisition. ``lease`` is None after it was left, also by a release in the body of its ``with``.

    ``execution``: the thread or task that made it.
    """

    __slots__ = ("by_with", "execution", "lease", "reentrant")

    def __init__(self, execution: object, by_with: bool, reentrant: bool) -> None:
        self.execution = execution
        self.by_with = by_with
        self.reentrant = reentrant
        self.lease: Lease | None = None


class Holds(list[Hold]):
    """The acquisitions of a handle that are not left yet, in their order.

    A signal handler may raise after any call. So changes that belong together have no call between them.
    """

    __slots__ = ()

    def enter(self, hold: Hold, lease: Lease, again: bool = False) -> None:
        """``again``: the lease already has another hold."""
        if self:
            self._forget_what_is_over(hold.execution)
        self.append(hold)
        hold.lease = lease
        if again:
            lease._hold_count += 1

    def to_leave(self) -> Hold:
        """The hold that a release ends. Raises NothingToLeave."""
        holds = list(self)
        mine = _of(current_execution(), holds)
        if not mine and holds and not holds[-1].reentrant:
            mine = _of(holds[-1].execution, holds)
        return _last([hold for hold in mine if hold.lease])

    def to_leave_by_with(self) -> Hold:
        """The hold that the end of a ``with`` ends, whatever its body released. Raises NothingToLeave."""
        holds = list(self)
        if len(holds) == 1 and holds[0].by_with:
            return holds[0]  # whichever thread or task asks
        mine = _of(current_execution(), holds)
        if not [hold for hold in mine if hold.by_with]:
            mine = holds  # an iterator may begin in another thread or task
        ended = _last([hold for hold in mine if hold.by_with])
        if ended.lease is None or ended.lease._ended is RELEASED:
            # As with threading.Lock, it releases what the body has acquired since.
            since = [hold for hold in mine[mine.index(ended) :] if hold.lease and not hold.by_with]
            if since:
                ended.lease, since[-1].lease = since[-1].lease, None
        return ended

    def leave(self, hold: Hold, by_with: bool) -> Lease | None:
        """The lease to release now. None if it was entered again, or if its ``with`` finds it released.

        Raises NothingToLeave when it was left already.
        """
        lease = hold.lease
        if lease is not None:
            hold.lease = None
            lease._hold_count -= 1  # if nothing more happens, it ends by its TTL
        if by_with or not hold.by_with:  # at its end, "with" finds its own hold, whatever its body released
            try:
                self.remove(hold)
            except ValueError:  # another thread was quicker
                lease = None
        if lease is None:
            raise NothingToLeave
        if lease._hold_count or (by_with and (lease._ended is RELEASED or lease._pid != fork.pid())):
            return None
        return lease

    def leases(self) -> list[Lease]:
        return [hold.lease for hold in list(self) if hold.lease]

    def latest(self) -> Lease | None:
        """The latest lease of this thread or task, else of any other one, if it still stands."""
        mine = [hold.lease for hold in _of(current_execution(), list(self))]
        standing = [lease for lease in (*self.leases(), *mine) if lease and not lease._is_over]
        return standing[-1] if standing else None

    def depth(self) -> int:
        """How many holds this thread or task has."""
        return sum(hold.lease is not None for hold in _of(current_execution(), list(self)))

    def _forget_what_is_over(self, execution: object) -> None:
        """If a lock is taken once per TTL, nobody releases the leases that ended. Other threads learn of theirs."""
        for hold in list(self):
            lease = hold.lease
            if hold.by_with or (lease and not lease._is_over):
                continue
            if lease is None or hold.execution is execution or _is_over(hold.execution):
                with suppress(ValueError):  # another thread was quicker
                    self.remove(hold)


def is_entered(lease: Lease) -> bool:
    """Whether its holder has not left it yet; else it is released later, or right now."""
    return lease._hold_count > 0


def _of(execution: object, holds: list[Hold]) -> list[Hold]:
    return [hold for hold in holds if hold.execution is execution]


def _last(holds: list[Hold]) -> Hold:
    if not holds:
        raise NothingToLeave
    return holds[-1]


def _is_over(execution: object) -> bool:
    return execution.done() if isinstance(execution, asyncio.Task) else not cast(threading.Thread, execution).is_alive()


def raises_when_lost(lease: Lease) -> bool:
    """Whether the end of its ``with`` raises LockLost if it was lost."""
    return lease._terms.on_lost == "raise" and lease._ended is not State.UNAVAILABLE


class Retainer:
    """Keeps a lease that its holder has left, for a transaction or for a response that is not finished.

    When it is released or collected, the lease is released if nothing else needs it.

    ``reason``: equal reasons count as one; by default each is different. ``most``: seconds for which the lease is
    renewed because of this; None: no bound.
    """

    what: ClassVar[str] = ""  # keeps it, in the words of the journal; "": the journal does not say
    _lease: Lease | None = None  # until it is made

    def __init__(self, lease: Lease, reason: object = None, *, most: float | None = None) -> None:
        self._reason = reason or object()
        self._lease = lease  # first: else nothing would release the retainer
        lease._retain(self._reason, most=most)
        if self.what:
            lease._note(Event.KEPT, self.what)

    def drop(self) -> None:
        """The holder itself continues, and releases the lease when nothing else holds it."""
        if self._lease:
            self._lease._drop_retainer(self._reason)

    def release(self, *, promptly: bool = True) -> None:
        """``promptly=False``: in the background, without waiting for anything."""
        if self._lease:
            self._lease._release_retainer(self._reason, promptly=promptly)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release(promptly=False)


class ResponseRetainer(Retainer):
    """For a response whose content is made after its view has returned."""

    what = RESPONSE

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease, most=lease._backend.response_max_hold)


# A lease, what the context had acquired before it, and how many more it takes until the ended ones are looked for.
Acquired = tuple[ReferenceType[Lease], "Acquired | None", int]

SPARE = 8  # at least
MOST_TOLD = 20  # leases, in an entry of the journal
# Child tasks inherit the context, and sync_to_async lends one thread to many. So an execution owns a lease only if the
# thread or task is the same *and* the context remembers that it acquired the lease.
_acquired: ContextVar[Acquired | None] = ContextVar("django_distlock_acquired", default=None)


def remember(lease: Lease) -> None:
    """Note that this context has acquired it: a thread or a task, and whatever it lends its context to."""
    before = _acquired.get()
    while before and ((latest := before[0]()) is None or latest._ended is RELEASED):
        before = before[1]
    spare = before[2] - 1 if before else SPARE
    if not spare:
        live = [known for known in acquired_here() if known.is_held]
        spare, before = max(SPARE, len(live)), None
        for known in reversed(live):
            before = ref(known), before, spare
    _acquired.set((ref(lease), before, spare))


def remembers(lease: Lease) -> bool:
    return any(known is lease for known in acquired_here())


def had_by(execution: object, using: str) -> list[Lease]:
    """The leases of an alias that this thread or task has; the latest one first, at most MOST_TOLD."""
    had = (one for one in acquired_here() if one.using == using and one._belongs_to(execution) and one.is_held)
    return list(islice(had, MOST_TOLD))


def acquired_here() -> Iterator[Lease]:
    """The leases that this context has acquired and remembers: by its thread or task, and by the one it came from.

    The latest one first.
    """
    known = _acquired.get()
    while known:
        reference, known, _ = known
        if lease := reference():
            yield lease
