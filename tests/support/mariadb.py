"""A private MariaDB on a unix socket."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.tools import eventually

NAMES = "mariadbd", "mysqld"
PLACES = "/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin"


def program() -> Path | None:
    """The server."""
    found = [Path(place, name) for name in NAMES for place in PLACES if Path(place, name).exists()]
    return found[0] if found else None


class MariaDB:
    """``with MariaDB(program()) as server: server.settings()``. Keeps nothing."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix="mariadb-"))
        self.socket = self.folder / "s"
        self._log = (self.folder / "log").open("wb")

    def __enter__(self) -> MariaDB:
        (self.folder / "data").mkdir()
        self.start()
        return self

    def start(self) -> None:
        data, statements = self.folder / "data", self.folder / "init.sql"
        statements.write_text("CREATE DATABASE IF NOT EXISTS tests CHARACTER SET utf8mb4;\n")
        self.process = subprocess.Popen(
            [
                self._program, "--no-defaults", f"--datadir={data}", f"--socket={self.socket}", "--skip-networking",
                "--skip-grant-tables", f"--init-file={statements}", f"--pid-file={self.folder / 'pid'}",
                "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M", "--max-connections=100",
                *(["--user=root"] if os.getuid() == 0 else []),
            ],
            stdout=self._log,
            stderr=self._log,
        )  # fmt: skip
        eventually(self._answers, 60)

    def crash(self) -> None:
        """End at once. ``start()`` recovers what is in its logs."""
        self.process.kill()
        self.process.wait(30)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.socket))
        except OSError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.crash()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def settings(self) -> dict[str, Any]:
        """An entry for DATABASES."""
        # PyMySQL would read the certificates of the machine for each connection, which takes longer than many a test.
        driver = find_spec("MySQLdb")
        options = {"ssl_disabled": True} if driver and driver.name == "pymysql" else {}
        return {
            "ENGINE": "django.db.backends.mysql", "NAME": "tests", "USER": "root", "HOST": str(self.socket),
            "OPTIONS": options,
        }  # fmt: skip
