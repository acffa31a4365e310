"""What lists tell: each lock that is held, once, and none that nobody has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_distlock.types import LockInfo, Slot

if TYPE_CHECKING:
    from ..simulation import Simulation
    from .calls import Judge, Judges


class ListJudge:
    """Of one list, which takes several requests. Each of its parts was true at some moment of it."""

    def __init__(self, judges: Judges, simulation: Simulation, judge: Judge, prefix: str) -> None:
        self._judges, self._simulation = judges, simulation
        self._judge, self._prefix = judge, prefix
        self._believed = self._present()

    def told_slots(self, slots: Sequence[Slot]) -> None:
        if len({*slots}) < len(slots) or not all(name.startswith(self._prefix) for name, _ in slots):
            self._judges.fail(f"{self._judge}: told {slots}")
        for name in {*self._held().values()} - {name for name, _ in slots}:
            self._judges.fail(f"{self._judge}: not told that {name} is held")
        self._answered()

    def told_infos(self, infos: Sequence[LockInfo]) -> None:
        self.told_slots([Slot(info.name, info.slot) for info in infos])
        for token in self._held().keys() - {info.token for info in infos}:
            self._judges.fail(f"{self._judge}: not told who holds {self._believed[token]}")
        for info in infos:
            asker = self._simulation.asker(info.token)
            if asker is None or asker.name != info.name:
                self._judges.fail(f"{self._judge}: told that {info} is held, for which nobody has asked so")

    def told_waiters(self, names: Sequence[str], numbers: Sequence[int | None]) -> None:
        if len(names) != len(numbers) or any(number is not None and number < 0 for number in numbers):
            self._judges.fail(f"{self._judge}: {numbers} wait for {names}")
        self._answered()

    def _answered(self) -> None:
        """The next request has its own time."""
        self._judge.got(None)
        self._judge.asked_at, self._judge.is_waiting = self._judges.now, True

    def _held(self) -> dict[str, str]:
        """Since the list began, and still."""
        if self._judges.may_fail(self._judge.began):
            return {}
        present = self._present()
        return {token: name for token, name in self._believed.items() if token in present}

    def _present(self) -> dict[str, str]:
        """The name of each lease that is believed, by its token."""
        leases = [lease for lease in self._judges.holders.leases() if self._judges.believes(lease)]
        return {lease.token: lease.name for lease in leases if lease.name.startswith(self._prefix)}
