"""One PostgreSQL, which notifies waiters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from ..plan import Event, Fault, lasts
from ..sql.postgres import REFUSED_CONNECTIONS, REFUSED_WRITES, PostgresServer
from ..sql.psycopg import Connection
from .database import LONGEST_RESTART, DatabaseWorld

if TYPE_CHECKING:
    from ..simulation import Simulation


class PostgresWorld(DatabaseWorld):
    name = "postgresql"
    states = (*REFUSED_CONNECTIONS, *REFUSED_WRITES, "READONLY")

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        psycopg.connect = partial(Connection, simulation.network)  # type: ignore[assignment]
        self._crashes_when_handed: list[float] = []  # seconds that each of them lasts

    def new_server(self) -> PostgresServer:
        server = PostgresServer(self.simulation.network, self.address, self.executed)
        server.on_notify = self._notified
        return server

    def faults(self) -> dict[str, Fault]:
        def draw(chance: random.Random) -> Mapping[str, Any]:
            return chance.choice([{"seconds": round(chance.uniform(0.0, LONGEST_RESTART), 3)}, lasts(chance)])

        return {**super().faults(), "crash_handing": Fault(self._crash_when_handed, (self._where,), draw)}

    def _crash_when_handed(self, who: str, seconds: float) -> None:
        """As soon as somebody has been told that the lock is his, before that is confirmed, or just then."""
        self._crashes_when_handed.append(seconds)

    def _notified(self, text: str) -> None:
        if " " in text and self._crashes_when_handed:
            now, crash = self.scheduler.now, {"seconds": self._crashes_when_handed.pop()}
            after = max(0.0, self.scheduler.random.uniform(-1.0, 4.0)) * self.simulation.distance
            if after:
                crashes = Event(now + after, "crash", self._where, crash)
                self.scheduler.at(after, partial(self.simulation.begin_fault, crashes))
            else:  # who handed it over gets no answer
                self.simulation.begin_fault(Event(now, "crash", self._where, crash))

    def database(self) -> dict[str, Any]:
        host, port = self.address
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "locks",
            "USER": "tests",
            "HOST": host,
            "PORT": str(port),
        }
