"""One MariaDB, whose waiters look by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pymysql

from ..engine.network import SocketModule
from ..sql.mariadb import REFUSED_CONNECTIONS, REFUSED_WRITES, MariaDBServer
from .database import DatabaseWorld

if TYPE_CHECKING:
    from ..simulation import Simulation


class MariaDBWorld(DatabaseWorld):
    """PyMySQL is real, as Django and the package use it without TLS."""

    name = "mariadb"
    address = ("10.0.0.1", 3306)
    states = (*REFUSED_CONNECTIONS, *REFUSED_WRITES)

    def __init__(self, simulation: Simulation) -> None:
        pymysql.install_as_MySQLdb()
        super().__init__(simulation)
        pymysql.connections.socket = SocketModule(simulation.network)  # type: ignore[attr-defined]
        pymysql.connections.SSL_ENABLED = False  # it would read all certificates of the system

    def new_server(self) -> MariaDBServer:
        return MariaDBServer(self.simulation.network, self.address, self.executed)

    def database(self) -> dict[str, Any]:
        host, port = self.address
        return {"ENGINE": "django.db.backends.mysql", "NAME": "locks", "USER": "tests", "HOST": host, "PORT": str(port)}
