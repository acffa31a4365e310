"""One PostgreSQL, which notifies waiters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from ..sql.postgres import REFUSED_CONNECTIONS, REFUSED_WRITES, PostgresServer
from ..sql.psycopg import Connection
from .database import DatabaseWorld

if TYPE_CHECKING:
    from ..simulation import Simulation


class PostgresWorld(DatabaseWorld):
    name = "postgresql"
    states = (*REFUSED_CONNECTIONS, *REFUSED_WRITES, "READONLY")

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        psycopg.connect = partial(Connection, simulation.network)  # type: ignore[assignment]

    def new_server(self) -> PostgresServer:
        return PostgresServer(self.simulation.network, self.address, self.executed)

    def database(self) -> dict[str, Any]:
        host, port = self.address
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "locks",
            "USER": "tests",
            "HOST": host,
            "PORT": str(port),
        }
