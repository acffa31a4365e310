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
    by_with: bool
    reentrant: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reentrant = self.lease is not None and self.lease.terms.reentrant


class Entries:
    """The acquisitions of a handle that are not left yet, by the thread or task that made them."""

    def __init__(self) -> None:
        self._by_execution: dict[object, list[Entry]] = {}

    def enter(self, lease: Lease, execution: object, *, by_with: bool) -> None:
        self._by_execution.setdefault(execution, []).append(Entry(lease, by_with))

    def leave(self, *, by_with: bool = False) -> Lease | None:
        """The lease to release now; None for one that was entered again, or that its ``with`` finds released.

        Raises LookupError when there is nothing to leave.
        """
        execution = current_execution()
        mine = self._by_execution.get(execution)
        if not mine:
            execution, mine = next(reversed(list(self._by_execution.items())), (execution, []))
            if mine and mine[-1].reentrant:
                mine = []
        fitting = (entry for entry in reversed(mine) if (entry.by_with if by_with else entry.lease))
        if (entry := next(fitting, None)) is None:
            raise LookupError
        lease, entry.lease = entry.lease, None
        if by_with or not entry.by_with:  # "with" finds its own entry at its end, whatever its body released
            mine.remove(entry)
        if not mine:
            self._by_execution.pop(execution, None)
        if lease is None:
            raise LookupError
        if by_with and (lease.pid != os.getpid() or lease.state is State.RELEASED):
            return None
        lease.entries -= 1
        return None if lease.entries else lease

    def leases(self) -> list[Lease]:
        return [entry.lease for entries in list(self._by_execution.values()) for entry in entries if entry.lease]

    def depth(self) -> int:
        """How often this very thread or task is in."""
        return sum(entry.lease is not None for entry in self._by_execution.get(current_execution(), ()))
