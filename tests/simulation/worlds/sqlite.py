"""One file of SQLite on one machine."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.backends.sqlite3.base import Database

from django_distlock.backends.common.state import waiters_from_text

from ..engine.scheduler import Host
from ..judges.rows import RowJudges, RowState
from ..plan import Fault, lasts
from ..sql.sqlite import File
from .database import ALIAS, HANDOVERS, LOOKS_AFTER, TABLE, RowsWorld, is_look

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from ..simulation import Simulation

ERRORS = {
    "FULL": ("database or disk is full", sqlite3.SQLITE_FULL),
    "IOERR": ("disk I/O error", sqlite3.SQLITE_IOERR),
    "READONLY": ("attempt to write a readonly database", sqlite3.SQLITE_READONLY_RECOVERY),
}


class SQLiteWorld(RowsWorld):
    """The library is real, and so is the file; waiting for others takes simulated time."""

    name = "sqlite"
    has_network = forks = False
    timeout, task_time = 1.0, 1.0
    operations = ("acquire", "wait", "renew", "release")

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._folder = tempfile.mkdtemp(prefix="simulation-")
        self._host = Host("machine", self.scheduler)
        self.file = File(self.scheduler, self.executed)
        self.judge = RowJudges(simulation, LOOKS_AFTER)
        self._lost_at = -1.0
        known = {"default": {}, ALIAS: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{self._folder}/db"}}
        connections.settings[ALIAS] = connections.configure_settings(known)[ALIAS]
        Database.connect = self._connect

    def _connect(self, database: Any, **options: Any) -> Any:
        if str(database).startswith(self._folder):
            return self.file.connect(database=database, **options)
        return sqlite3.Connection(database, **options)

    def setting(self) -> dict[str, Any]:
        return {
            "BACKEND": "django_distlock.backends.database.DatabaseBackend",
            "LOCATION": ALIAS,
            "OPTIONS": {"timeout": self.timeout},
        }

    def executed(self, process: Process | None, sql: str, parameters: Sequence[Any], outcome: Any) -> None:
        names = [bytes(value).decode() for value in parameters if isinstance(value, bytes | memoryview)]
        self.simulation.tell(f"{process}: {sql[:60]} {' '.join(names)} -> {str(outcome)[:160]}")
        if is_look(sql) and process:
            self.judge[names[0].removeprefix("lock:")].looked(process)
        elif isinstance(outcome, list):  # it was written
            for row in self._rows():
                if (name := row["name"].decode()) in names:
                    self.judge[name.removeprefix("lock:")].changed(RowState.of(row, self._now / 1e6))

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        return self.judge.was_taken_since(name, moment, self._now / 1e6, slots)

    def most_places(self, name: str, moment: float) -> float:
        return self.judge.most_places(name, moment)

    def promised(self, name: str, token: str, about: Mapping[str, Any]) -> None:
        self.judge[name].promised(token, about)

    def watch(self) -> None:
        self.judge.watch(self._now / 1e6)

    def may_stay(self, thread: str) -> bool:
        return thread.startswith("distlock-async-")

    def new_host(self, name: str, rate: float) -> Host:
        return self._host

    def end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    # What the file has

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        with sqlite3.Connection(f"{self._folder}/db-locks") as raw:
            raw.row_factory = sqlite3.Row
            try:
                return raw.execute(f"SELECT * FROM {TABLE}").fetchall()
            except sqlite3.OperationalError:  # before the first lock
                return []

    @property
    def _now(self) -> int:
        return int(self._host.wall_clock() * 1_000_000)

    def left(self) -> Collection[str]:
        since = self._now - 2_500_000
        queued = [row for row in self._rows() if any(one.seen > since for one in waiters_from_text(row["waiters"]))]
        taken = [row for row in self._rows() if self._leases(row)]
        return [str(tuple(row)) for row in [*taken, *queued] if not row["name"].startswith(HANDOVERS)]

    def has_lost_data_since(self, moment: float) -> bool:
        return self._lost_at >= moment

    # Faults

    def faults(self) -> dict[str, Fault]:
        def fault(happen: Callable[..., object], draw: Callable[[random.Random], Mapping[str, Any]]) -> Fault:
            return Fault(happen, ("file",), draw)

        return {
            "writer": fault(self._write, lasts),
            "refuse": fault(self._refuse, lambda chance: {**lasts(chance), "state": chance.choice([*ERRORS])}),
            "slow_disk": fault(self._slow, lasts),
            "stop": Fault(self._stop, (), lasts),
            "set_clock": Fault(self._set_clock, (), lambda chance: {"by": round(chance.uniform(-10.0, 10.0), 3)}),
        }

    def _write(self, who: str, seconds: float) -> None:
        """Somebody has the file for itself, as a backup does."""
        raw = sqlite3.Connection(f"{self._folder}/db-locks", isolation_level=None, timeout=0.0)
        try:
            raw.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            raw.close()
        else:
            self.scheduler.at(seconds, raw.close)

    def _refuse(self, who: str, seconds: float, state: str) -> None:
        text, code = ERRORS[state]
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = code
        self.file.refuses = error
        self.scheduler.at(seconds, lambda: setattr(self.file, "refuses", None))

    def _stop(self, who: str, seconds: float) -> None:
        """Whoever is stopped in the middle of a write has the file meanwhile."""
        self.simulation.disturb("", self.scheduler.now + seconds)
        self.scheduler.stop(self.simulation.processes[who], seconds)

    def _slow(self, who: str, seconds: float) -> None:
        self.file.latency = 0.05
        self.scheduler.at(seconds, lambda: setattr(self.file, "latency", 0.0))

    def _set_clock(self, who: str, by: float) -> None:
        """Of the machine, for all processes on it. Leases end early by one that is set forward."""
        self.simulation.disturb("", self.scheduler.now, of_connections=False)
        self.judge.sets_clock(self._now / 1e6)
        self._host.set_wall_clock(by)
        if by > 0.0:
            self._lost_at = self.scheduler.now
