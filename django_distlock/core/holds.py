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
class Entry:
    """One acquisition. ``lease`` is None once it was left, also by a release in the body of its ``with``."""

    execution: object  # the thread or task that made it
    by_with: bool
    reentrant: bool
    lease: Lease | None = None


class Holds:
    """The acquisitions of a handle that are not left yet, in their order.

    A handler of a signal may raise after any call. So what belongs together is done without a call in between.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def enter(self, entry: Entry, lease: Lease, *, again: bool = False) -> None:
        """``again``: the lease has another entry already."""
        if self._entries:
            self._forget_what_is_over(entry.execution)
        self._entries.append(entry)
        entry.lease = lease
        if again:
            lease.hold_count += 1

    def to_leave(self) -> Entry:
        """What a release means. Raises LookupError when there is nothing to leave."""
        entries = list(self._entries)
        mine = _of(current_execution(), entries)
        if not mine and entries and not entries[-1].reentrant:
            mine = _of(entries[-1].execution, entries)
        return _last([entry for entry in mine if entry.lease])

    def to_leave_by_with(self) -> Entry:
        """What the end of a ``with`` means, whatever its body released."""
        entries = list(self._entries)
        mine = _of(current_execution(), entries)
        if not [entry for entry in mine if entry.by_with]:
            mine = entries  # an iterator may end in another thread or task than it began in
        ended = _last([entry for entry in mine if entry.by_with])
        if ended.lease is None or ended.lease.state is State.RELEASED:
            # As of threading.Lock, it releases what the body has acquired since.
            since = [entry for entry in mine[mine.index(ended) :] if entry.lease and not entry.by_with]
            if since:
                ended.lease, since[-1].lease = since[-1].lease, None
        return ended

    def leave(self, entry: Entry, *, by_with: bool = False) -> Lease | None:
        """The lease to release now; None for one that was entered again, or that its ``with`` finds released.

        Raises LookupError when it was left already.
        """
        lease = entry.lease
        if lease is not None:
            entry.lease = None
            lease.hold_count -= 1  # if nothing more happens, it runs out
        if by_with or not entry.by_with:  # "with" finds its own entry at its end, whatever its body released
            self._remove(entry)
        if lease is None:
            raise LookupError
        is_over = by_with and (lease.pid != os.getpid() or lease.state is State.RELEASED)
        return None if lease.hold_count or is_over else lease

    def leases(self) -> list[Lease]:
        return [entry.lease for entry in list(self._entries) if entry.lease]

    def depth(self) -> int:
        """How often this very thread or task is in."""
        return sum(entry.lease is not None for entry in _of(current_execution(), list(self._entries)))

    def _remove(self, entry: Entry) -> None:
        with suppress(ValueError):
            self._entries.remove(entry)

    def _forget_what_is_over(self, execution: object) -> None:
        """Nobody releases leases that ran out, where a lock is taken once per TTL. Those of others say so to them."""
        for entry in list(self._entries):
            lease = entry.lease
            if entry.by_with or (lease and lease.is_live):
                continue
            if lease is None or entry.execution is execution or _is_over(entry.execution):
                self._remove(entry)


def _of(execution: object, entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.execution is execution]


def _last(entries: list[Entry]) -> Entry:
    if not entries:
        raise LookupError
    return entries[-1]


def _is_over(execution: object) -> bool:
    return execution.done() if isinstance(execution, asyncio.Task) else not cast(threading.Thread, execution).is_alive()
