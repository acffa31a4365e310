"""What one handle holds, and which lease a release means."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .leases import Lease, State
from .tickets import current_execution


@dataclass(slots=True, eq=False)
class Entry:
    """One acquisition. ``lease`` is None once the body of its ``with`` released it."""

    lease: Lease | None
    execution: object  # the thread or task that made it
    by_with: bool
    reentrant: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reentrant = self.lease is not None and self.lease.terms.reentrant


class Entries:
    """The acquisitions of a handle that are not left yet, in their order."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def enter(self, lease: Lease, execution: object, *, by_with: bool) -> None:
        self._entries.append(Entry(lease, execution, by_with))

    def leave(self, *, by_with: bool = False) -> Lease | None:
        """The lease to release now; None for one that was entered again, or that its ``with`` finds released.

        Raises LookupError when there is nothing to leave.
        """
        mine = self._of(current_execution())
        if not mine and (last := self._entries[-1:]) and not last[0].reentrant:
            mine = self._of(last[0].execution)
        fitting = (entry for entry in reversed(mine) if (entry.by_with if by_with else entry.lease))
        if (entry := next(fitting, None)) is None:
            raise LookupError
        lease, entry.lease = entry.lease, None
        if by_with or not entry.by_with:  # "with" finds its own entry at its end, whatever its body released
            try:
                self._entries.remove(entry)
            except ValueError:  # two threads release at once, and the other one was first
                raise LookupError from None
        if lease is None:
            raise LookupError
        if by_with and (lease.pid != os.getpid() or lease.state is State.RELEASED):
            return None
        lease.entries -= 1
        return None if lease.entries else lease

    def leases(self) -> list[Lease]:
        return [entry.lease for entry in list(self._entries) if entry.lease]

    def depth(self) -> int:
        """How often this very thread or task is in."""
        return sum(entry.lease is not None for entry in self._of(current_execution()))

    def _of(self, execution: object) -> list[Entry]:
        return [entry for entry in list(self._entries) if entry.execution is execution]
