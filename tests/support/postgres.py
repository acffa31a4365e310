"""A private PostgreSQL cluster on a unix socket."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.tools import PATIENCE, eventually

PLACES_OF_BOUNCER = f"{os.environ['PATH']}:/usr/sbin"
PLACES = "/usr/lib/postgresql/*/bin", "/usr/local/bin", "/usr/bin"


def programs() -> Path | None:
    """The folder of initdb and postgres, the newest release first."""
    found = [
        folder
        for place in PLACES
        for folder in sorted(Path("/").glob(place[1:]), reverse=True)
        if (folder / "initdb").exists() and (folder / "postgres").exists()
    ]
    return found[0] if found else None


class Postgres:
    """``with Postgres(programs()) as server: server.settings()``. Keeps nothing.

    ``sync_us``: microseconds that each sync of its log takes, as on a disk; 0: it does not sync. ``template``: of
    several servers the first leaves there what initdb makes, for the others.
    """

    def __init__(self, programs: Path, sync_us: int = 0, template: Path | None = None) -> None:
        self.programs = programs
        self._template = template
        # Syncs of files in memory take no time of their own.
        memory = "/dev/shm" if sync_us and os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-", dir=memory))
        delay = "-c", f"commit_delay={sync_us}", "-c", "commit_siblings=0"
        self._syncs = delay if sync_us else ("-F",)
        # PostgreSQL refuses to run as root.
        self.user: dict[str, Any] = {"user": "nobody", "group": "nogroup"} if os.getuid() == 0 else {}
        if self.user:
            shutil.chown(self.folder, **self.user)
        self._log = (self.folder / "log").open("wb")

        self._run: dict[str, Any] = {"stdout": self._log, "stderr": self._log, "cwd": self.folder, **self.user}
        self._data = self.folder / "data"

    def __enter__(self) -> Postgres:
        if self._template is None:
            self._initialize()
        else:
            with self._template.with_suffix(".lock").open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not self._template.exists():
                    self._initialize()
                    _copy(self._data, self._template)
            if not self._data.exists():
                _copy(self._template, self._data)
        self.start()
        return self

    def _initialize(self) -> None:
        options = "--auth=trust", "--username=tests", "--no-sync", "--encoding=UTF8"
        subprocess.run([self.programs / "initdb", *options, self._data], check=True, **self._run)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                self.programs / "postgres", "-D", self._data, "-k", self.folder, *self._syncs,
                "-c", "listen_addresses=", "-c", "max_connections=300",
                "-c", "shared_buffers=16MB", "-c", "autovacuum=off",  # sessions, and a server that waits, cost less
            ],
            **self._run,
        )  # fmt: skip
        eventually(self._answers, 4 * PATIENCE)

    def crash(self) -> None:
        """End at once, without a checkpoint. ``start()`` recovers what was committed."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(4 * PATIENCE)

    def _answers(self) -> bool:
        """Asks the file that pg_ctl asks, which costs less than a program."""
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with suppress(FileNotFoundError):
            match (self._data / "postmaster.pid").read_text().split("\n"):
                case [pid, *_, status, ""]:
                    return pid == str(self.process.pid) and status.strip() == "ready"
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.crash()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def settings(self) -> dict[str, Any]:
        """An entry for DATABASES."""
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "tests",
            "HOST": str(self.folder),
        }


def _copy(folder: Path, to: Path) -> None:
    """With its owner, whose PostgreSQL refuses those of others."""
    subprocess.run(["cp", "-a", folder, to], check=True)


def _without_prepared(bouncer: str) -> str:
    """The setting by which a pgbouncer that follows prepared statements, as it does from 1.21, lets that be."""
    told = subprocess.run([bouncer, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"\d+", told)[:2]
    return "max_prepared_statements = 0\n" if (int(major), int(minor)) >= (1, 21) else ""


class Bouncer:
    """pgbouncer before that server, in transaction mode or another.

    ``sessions``: how many of the server it has at most. ``in_turn``: it gives the one that was not used for longest,
    and else the one that was used last.
    """

    def __init__(
        self, program: str, server: Postgres, mode: str = "transaction", sessions: int = 3, *, in_turn: bool = False
    ) -> None:
        self._server = server
        self.folder = Path(tempfile.mkdtemp(prefix="bouncer-"))
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host={server.folder} user=tests\n[pgbouncer]\nlisten_addr =\n"
            f"unix_socket_dir = {self.folder}\nauth_type = any\npool_mode = {mode}\n"
            f"default_pool_size = {sessions}\nserver_round_robin = {int(in_turn)}\n{_without_prepared(program)}"
        )
        if server.user:
            shutil.chown(self.folder, **server.user)
        self._log = (self.folder / "log").open("wb")
        self._command = [program, settings]

    def __enter__(self) -> Bouncer:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, **self._server.user)
        eventually(self._answers)
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.folder / ".s.PGSQL.6432")) == 0

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(4 * PATIENCE)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def settings(self) -> dict[str, Any]:
        return {**self._server.settings(), "HOST": str(self.folder), "PORT": "6432"}
