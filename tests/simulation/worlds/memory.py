"""Local memory: one process with many threads and tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django_distlock import locks
from django_distlock.backends.common import state
from django_distlock.backends.common.state import Attempt, Decision, Row
from django_distlock.types import LockInfo

from ..engine.scheduler import Host
from ..judges.rows import RowJudges, RowState
from .base import World

if TYPE_CHECKING:
    from ..simulation import Simulation

FOR_EVER = 10**18  # microseconds: a waiter in memory is there as long as its request


class MemoryWorld(World):
    name = "memory"
    has_network = False
    operations = ("wait",)
    most_processes = 1

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.judge = RowJudges(simulation, looks_within=0.0)
        state.acquire = self._watched(state.acquire)  # type: ignore[assignment] - it takes the same, and returns the same
        state.release = self._watched(state.release)
        Row.renew = self._watched(Row.renew)  # type: ignore[method-assign] - it takes the same, and returns the same

    def _watched(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """A change of a row, with the row before and after it."""

        def changed(row: Row, by: Attempt | str, *about: Any, **options: Any) -> Decision | bool:
            judge = self.judge[self.simulation.name_of(by if isinstance(by, str) else by.token)]
            judge.stands(self._state_of(row))
            result: Decision | bool = change(row, by, *about, **options)
            judge.changed(self._state_of(row))
            return result

        return changed

    def new_host(self, name: str, rate: float) -> Host:
        self.judge.lost_data()  # what the process before it knew went with it
        return super().new_host(name, rate)

    def forked(self) -> None:
        self.judge.lost_data()

    def _state_of(self, row: Row) -> RowState:
        waiters = tuple(replace(one, seen=FOR_EVER) for one in row.live_waiters)
        return RowState(row.now / 1e6, row.fence, tuple(row.leases), waiters)

    def setting(self) -> dict[str, Any]:
        return {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}

    def leases(self, name: str) -> int:
        return sum(info.name == name for info in self._taken())

    def _taken(self) -> list[LockInfo]:
        """By the clock of the one process that lives."""
        found: list[LockInfo] = []
        before, running = self.scheduler.acting, self.scheduler.running
        for alias, process in self.simulation.processes.items():
            if process.is_alive:
                self.scheduler.acting, self.scheduler.running = process, None
                found += locks[alias].held()
        self.scheduler.acting, self.scheduler.running = before, running
        return found

    @property
    def _now(self) -> float:
        return next((one.host.clock() for one in self.simulation.processes.values() if one.is_alive), 0.0)

    def holders(self) -> Mapping[str, Collection[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for info in self._taken():
            if info.holder and not info.resting:
                found[info.name].add(info.token)
        return found

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        return self.judge.was_taken_since(name, moment, self._now, slots)

    def most_places(self, name: str, moment: float) -> float:
        return self.judge.most_places(name, moment)

    def promised(self, name: str, token: str, about: Mapping[str, Any]) -> None:
        self.judge[name].promised(token, about)

    def watch(self) -> None:
        self.judge.watch(self._now)

    @property
    def may_repeat_numbers(self) -> bool:
        """What a process knew went with it."""
        return not all(process.is_alive for process in self.simulation.processes.values())
