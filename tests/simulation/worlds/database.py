"""One server of a database."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import connections

from django_distlock import LockBackendError
from django_distlock.backends.common.state import CLAIMED, HELD, StoredLease, waiters_from_text
from django_distlock.backends.common.timing import Timing
from django_distlock.models import DatabaseLock

from ..judges.rows import RowJudges, RowState, leases_in
from ..plan import OF_DATABASES, Fault, lasts
from ..sql.server import Server, Session
from ..sql.tables import Key, Transaction
from .base import World

if TYPE_CHECKING:
    from ..engine.network import Socket
    from ..simulation import Simulation

ALIAS = "simulated"
TABLE = DatabaseLock._meta.db_table
LONGEST_RESTART = 0.2  # seconds in which a server is back before callers notice
LOOKS_AFTER = Timing.poll_interval_longest  # seconds, where a waiter is not notified
HANDOVERS = b"lock:django_distlock.handover:"


def is_look(sql: str) -> bool:
    """Of a waiter that is not notified, whether it is its turn."""
    return sql.startswith("SELECT token, others, expires <= ")


class RowsWorld(World):
    """One that keeps each lock in a row."""

    @property
    @abstractmethod
    def _now(self) -> int:
        """Microseconds, by the clock of the database."""

    @abstractmethod
    def _rows(self) -> Sequence[Mapping[str, Any]]: ...

    def _leases(self, row: Mapping[str, Any]) -> list[StoredLease]:
        return [lease for lease in leases_in(row) if lease.expires > self._now]

    def _rows_of(self, name: str) -> list[Mapping[str, Any]]:
        return [row for row in self._rows() if row["name"] == f"lock:{name}".encode()]

    def leases(self, name: str) -> int:
        return sum(len(self._leases(row)) for row in self._rows_of(name))

    def holders(self) -> Mapping[str, Collection[str]]:
        return {
            row["name"].decode().removeprefix("lock:"): {one.token for one in self._leases(row) if one.state == HELD}
            for row in self._rows()
        }


class DatabaseWorld(RowsWorld):
    """``states``: in which the server refuses."""

    address = ("10.0.0.1", 5432)
    timeout, task_time = 1.0, 1.0
    own_profiles = OF_DATABASES
    survived = ("deadlock", "restart")
    states: ClassVar[Sequence[str]]

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.server = self.new_server()
        self.judge = RowJudges(simulation, LOOKS_AFTER)
        self.server.tables.watch = self._committed
        self.server.tables.reverted = self._reverted
        self._lost_at = self._clock_set_at = -1.0
        self._is_wiped = self._went_back = self._others_write = False
        known = {"default": {}, ALIAS: self.database()}
        connections.settings[ALIAS] = connections.configure_settings(known)[ALIAS]

    @abstractmethod
    def new_server(self) -> Server: ...

    @abstractmethod
    def database(self) -> dict[str, Any]:
        """The entry in DATABASES."""

    def setting(self) -> dict[str, Any]:
        return {
            "BACKEND": "django_distlock.backends.database.DatabaseBackend",
            "LOCATION": ALIAS,
            "OPTIONS": {"timeout": self.timeout},
        }

    def executed(self, session: Session, sql: str, parameters: Sequence[Any], outcome: Any) -> None:
        name = next((value for value in parameters if isinstance(value, bytes)), b"").decode()
        if self._others_write and sql.startswith("SELECT") and ", version, token" in sql:
            self.server.tables.rewrite(TABLE, name.encode())
        if is_look(sql):
            self.judge[name.removeprefix("lock:")].looked(session.socket.process)
        self.simulation.tell(f"{session.socket.process} #{session.number}: {sql[:60]} {name} -> {str(outcome)[:160]}")

    def ways_to_grant(self, locks: int) -> int:
        """Each row is read and written; what begins the transaction takes two statements at most, and COMMIT is one."""
        return 2 * (2 * locks + 3)

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """A caller who waits for so many seconds waits as long for a thread."""
        return inf if wait is not None and "was not asked within" in str(error) else 0.0

    def may_stay(self, thread: str) -> bool:
        return thread.startswith("distlock-async-")

    def _committed(self, row: Mapping[str, Any]) -> None:
        if "waiters" in row:
            name = row["name"].decode().removeprefix("lock:")
            self.judge[name].changed(RowState.of(row, self.server.clock() / 1e6))

    def _reverted(self, row: Mapping[str, Any]) -> None:
        if "waiters" in row:
            name = row["name"].decode().removeprefix("lock:")
            self.judge[name].reverted(RowState.of(row, self.server.clock() / 1e6))

    def is_kept_for(self, name: str, token: str, seconds: float) -> bool:
        brought_back = {one.token for one in self.judge[name].brought_back}
        return any(
            one.expires > self._now + 1e6 * seconds
            and (one.token in brought_back or (one.token, one.state) == (token, CLAIMED))
            for row in self._rows_of(name)
            for one in self._leases(row)
        )

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        return self.judge.was_taken_since(name, moment, self.server.clock() / 1e6, slots)

    def most_places(self, name: str, moment: float) -> float:
        return self.judge.most_places(name, moment)

    def promised(self, name: str, token: str, about: Mapping[str, Any]) -> None:
        self.judge[name].promised(token, about)

    def watch(self) -> None:
        self.judge.watch(self.server.clock() / 1e6)

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return self.server.tables.all(TABLE)

    @property
    def _now(self) -> int:
        return self.server.clock()

    def left(self) -> Collection[str]:
        """That a text was adopted is remembered for as long as the text could be shown again."""
        now = self.server.clock()
        return [
            str(row)
            for row in self._rows()
            if not row["name"].startswith(HANDOVERS)
            and (self._leases(row) or any(one.seen > now - 2_500_000 for one in waiters_from_text(row["waiters"])))
        ]

    def has_lost_data_since(self, moment: float) -> bool:
        return self._lost_at >= moment

    def cut(self, socket: Socket) -> None:
        for session in list(self.server.sessions):
            if session.socket is socket:
                session.end()

    # Faults

    @property
    def _where(self) -> str:
        return ":".join(map(str, self.address))

    @property
    def may_repeat_numbers(self) -> bool:
        return self._went_back and self._is_wiped

    def faults(self) -> dict[str, Fault]:
        def fault(happen: Callable[..., object], draw: Callable[[random.Random], Mapping[str, Any]] = lasts) -> Fault:
            return Fault(happen, (self._where,), draw)

        def in_state(*states: str) -> Callable[[random.Random], Mapping[str, Any]]:
            return lambda chance: {**lasts(chance), "state": chance.choice(states)}

        return {
            "crash": fault(self._crash),
            "power_loss": fault(self._lose_power),
            "hang": fault(self._hang),
            "refuse": fault(self._refuse, in_state(*self.states)),
            "doubt": fault(self._refuse, in_state("DOUBT")),
            "restart": fault(self._crash, lambda chance: {"seconds": round(chance.uniform(0.0, LONGEST_RESTART), 3)}),
            "others_write": fault(self._let_others_write),
            "deadlock": fault(self._refuse, in_state("DEADLOCK")),
            "row_lock": fault(self._lock_rows),
            "lock_timeout": fault(self._limit_locks),
            "wipe": fault(self._wipe, lambda chance: {}),
            "terminate": fault(self._terminate, lambda chance: {}),
            "slow_server": fault(self._slow, lambda chance: {**lasts(chance), "latency": chance.choice([0.01, 0.3])}),
            "server_clock": fault(self._set_clock, lambda chance: {"by": round(chance.uniform(-10.0, 10.0), 3)}),
        }

    def _crash(self, who: str, seconds: float) -> None:
        if self.server.is_up:
            self.server.crash()
            self.scheduler.at(seconds, self.server.start)

    def _let_others_write(self, who: str, seconds: float) -> None:
        """Other processes change each row, each time before whoever has read it can write it."""
        self._others_write = True
        self.scheduler.at(seconds, lambda: setattr(self, "_others_write", False))

    def _lose_power(self, who: str, seconds: float) -> None:
        if self.server.is_up:
            self.server.lose_power()
            self.scheduler.at(seconds, self.server.start)

    def _hang(self, who: str, seconds: float) -> None:
        self.server.hang()
        self.scheduler.at(seconds, self.server.go_on)

    def _refuse(self, who: str, seconds: float, state: str) -> None:
        self.server.states.add(state)
        self.scheduler.at(seconds, partial(self.server.states.discard, state))

    def _lock_rows(self, who: str, seconds: float) -> None:
        """Somebody's transaction has changed all rows and goes on for a while."""
        theirs, began = Transaction(1), self.scheduler.now
        for row in self._rows():
            self._take_when_free((TABLE, row["name"]), theirs)

        def end() -> None:
            if self._clock_set_at >= began:  # what waited all the while was decided by the clock as it was
                self.judge.sets_clock(self.server.clock() / 1e6)
            self.server.locks.end(theirs)

        self.scheduler.at(seconds, end)

    def _take_when_free(self, key: Key, theirs: Transaction) -> None:
        if not self.server.locks.take(key, theirs):
            self.server.locks.wait(key, theirs, lambda: None)

    def _limit_locks(self, who: str, seconds: float) -> None:
        self.server.lock_timeout = 0.2

        def end() -> None:
            self.server.lock_timeout = 0.0

        self._lock_rows(who, seconds)
        self.scheduler.at(seconds, end)

    def _wipe(self, who: str) -> None:
        self.server.wipe(TABLE)
        self.judge.lost_data()
        self._lost_at, self._is_wiped = self.scheduler.now, True

    def _terminate(self, who: str) -> None:
        """An operator ends all sessions."""
        for session in list(self.server.sessions):
            self.server.terminate(session)

    def _slow(self, who: str, seconds: float, latency: float) -> None:
        self.server.latency = latency

        def end() -> None:
            self.server.latency = 0.0

        self.scheduler.at(seconds, end)

    def _set_clock(self, who: str, by: float) -> None:
        """Leases end early by a clock that is set forward."""
        self.judge.sets_clock(self.server.clock() / 1e6)
        self._clock_set_at = self.scheduler.now
        self.server.clock_error += by
        if by > 0.0:
            self._lost_at = self.scheduler.now
        self._went_back = self._went_back or by < 0.0
