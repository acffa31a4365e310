"""What one handle holds, and which lease a release means."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from ..types import current_execution
from .lease import Lease, State


@dataclass(slots=True, eq=False)
class Hold:
    """One acquisition. ``lease`` is None once it was left, also by a release in the body of its ``with``."""

    execution: object  # the thread or task that made it
    by_with: bool
    reentrant: bool
    lease: Lease | None = None


class Holds:
    """The acquisitions of a handle that are not left yet, in their order.

    A handler of a signal may raise after any call. So what belongs together is done without a call in between.
    """

    __slots__ = ("_holds",)

    def __init__(self) -> None:
        self._holds: list[Hold] = []

    def enter(self, hold: Hold, lease: Lease, *, again: bool = False) -> None:
        """``again``: the lease has another hold already."""
        if self._holds:
            self._forget_what_is_over(hold.execution)
        self._holds.append(hold)
        hold.lease = lease
        if again:
            lease._hold_count += 1

    def to_leave(self) -> Hold:
        """What a release means. Raises LookupError when there is nothing to leave."""
        holds = list(self._holds)
        mine = _of(current_execution(), holds)
        if not mine and holds and not holds[-1].reentrant:
            mine = _of(holds[-1].execution, holds)
        return _last([hold for hold in mine if hold.lease])

    def to_leave_by_with(self) -> Hold:
        """What the end of a ``with`` means, whatever its body released."""
        holds = list(self._holds)
        mine = _of(current_execution(), holds)
        if not [hold for hold in mine if hold.by_with]:
            mine = holds  # an iterator may end in another thread or task than it began in
        ended = _last([hold for hold in mine if hold.by_with])
        if ended.lease is None or ended.lease.state is State.RELEASED:
            # As of threading.Lock, it releases what the body has acquired since.
            since = [hold for hold in mine[mine.index(ended) :] if hold.lease and not hold.by_with]
            if since:
                ended.lease, since[-1].lease = since[-1].lease, None
        return ended

    def leave(self, hold: Hold, *, by_with: bool = False) -> Lease | None:
        """The lease to release now; None for one that was entered again, or that its ``with`` finds released.

        Raises LookupError when it was left already.
        """
        lease = hold.lease
        if lease is not None:
            hold.lease = None
            lease._hold_count -= 1  # if nothing more happens, it runs out
        if by_with or not hold.by_with:  # "with" finds its own hold at its end, whatever its body released
            self._remove(hold)
        if lease is None:
            raise LookupError
        is_over = by_with and (lease._pid != os.getpid() or lease.state is State.RELEASED)
        return None if lease._hold_count or is_over else lease

    def leases(self) -> list[Lease]:
        return [hold.lease for hold in list(self._holds) if hold.lease]

    def depth(self) -> int:
        """How often this very thread or task is in."""
        return sum(hold.lease is not None for hold in _of(current_execution(), list(self._holds)))

    def _remove(self, hold: Hold) -> None:
        with suppress(ValueError):
            self._holds.remove(hold)

    def _forget_what_is_over(self, execution: object) -> None:
        """Nobody releases leases that ran out, where a lock is taken once per TTL. Those of others say so to them."""
        for hold in list(self._holds):
            lease = hold.lease
            if hold.by_with or (lease and lease._is_live):
                continue
            if lease is None or hold.execution is execution or _is_over(hold.execution):
                self._remove(hold)


def is_entered(lease: Lease) -> bool:
    """Whether its holder is in; else it was left already and is released later, or right now."""
    return lease._hold_count > 0


def _of(execution: object, holds: list[Hold]) -> list[Hold]:
    return [hold for hold in holds if hold.execution is execution]


def _last(holds: list[Hold]) -> Hold:
    if not holds:
        raise LookupError
    return holds[-1]


def _is_over(execution: object) -> bool:
    return execution.done() if isinstance(execution, asyncio.Task) else not cast(threading.Thread, execution).is_alive()
