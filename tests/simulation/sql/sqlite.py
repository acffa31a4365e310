"""The real SQLite in a real file, whose waits for other writers take simulated time.

A statement that writes has the file for itself from its begin to its end, so that others find it busy meanwhile.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.scheduler import Process, Scheduler

LONGEST_PAUSE = 0.1  # seconds between two looks whether the file is free, as SQLite makes them
connect = sqlite3.connect  # the original


class File:
    """What happens to the file. ``refuses``: raised instead of each write; ``latency``: seconds of each statement."""

    def __init__(self, scheduler: Scheduler, watch: Callable[..., object]) -> None:
        self.scheduler, self.watch = scheduler, watch
        self.refuses: sqlite3.OperationalError | None = None
        self.latency = 0.0
        self.connections: list[Connection] = []

    def connect(self, **options: Any) -> Connection:
        timeout = options.pop("timeout", 5.0)
        connection: Connection = connect(**options, timeout=0.0, factory=Connection)
        connection.begin(self, timeout)
        return connection

    def passes(self) -> None:
        """Let others run, and time pass."""
        if self.scheduler.running:
            self.scheduler.sleep(self.scheduler.random.uniform(0.0, 0.001) + self.latency)


class Connection(sqlite3.Connection):
    def begin(self, file: File, timeout: float) -> None:
        self.file, self.timeout = file, timeout
        self._written: list[tuple[str, Sequence[Any]]] = []  # in the transaction that the package began
        self.process: Process | None = file.scheduler.process
        file.connections.append(self)
        if self.process:
            self.process.at_death.append(self.die)

    def die(self) -> None:
        """As the system closes the files of a process: what was not committed is rolled back."""
        if self in self.file.connections:
            self.close()

    def close(self) -> None:
        if self in self.file.connections:
            self.file.connections.remove(self)
        super().close()

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        return super().cursor(_waiting(factory))

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        if found := re.fullmatch(r"PRAGMA busy_timeout = (\d+)", sql):
            self.timeout = int(found[1]) / 1000
            return super().cursor()
        return self.run(lambda: sqlite3.Connection.execute(self, sql, parameters), sql, parameters)

    def run(self, execute: Callable[[], Any], sql: str, parameters: Sequence[Any]) -> Any:
        """Try until the file is free, for as long as the connection waits."""
        scheduler = self.file.scheduler
        deadline, pause = scheduler.now + self.timeout, 0.001
        self.file.passes()
        while True:
            try:
                return self._told(execute, sql, parameters)
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or scheduler.now + pause > deadline or not scheduler.running:
                    self.file.watch(self.process, sql, parameters, error)
                    raise
                scheduler.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _told(self, execute: Callable[[], Any], sql: str, parameters: Sequence[Any]) -> Any:
        is_write = sql.startswith(("INSERT", "UPDATE", "DELETE"))
        if is_write and self.file.refuses:
            raise self.file.refuses
        if not is_write or self.in_transaction:
            result = execute()
            self.file.watch(self.process, sql, parameters, "")
            self._note(sql, parameters, is_write=is_write)
            return result
        super().execute("BEGIN IMMEDIATE")
        try:
            self.file.passes()
            result = execute()
            rows = [] if result.description is None else result.fetchall()
            self.file.passes()
        except BaseException:
            super().execute("ROLLBACK")
            raise
        super().execute("COMMIT")
        self.file.watch(self.process, sql, parameters, rows)
        result.kept = rows
        return result

    def _note(self, sql: str, parameters: Sequence[Any], *, is_write: bool) -> None:
        """A transaction of the package writes all of its rows with COMMIT."""
        if is_write:
            self._written.append((sql, parameters))
        elif not self.in_transaction:
            written, self._written = self._written, []
            for one in written if sql == "COMMIT" else ():
                self.file.watch(self.process, *one, [])


def _waiting(factory: Any) -> Any:
    """A class of cursors whose statements wait in simulated time, and which have the rows of a write already."""

    class Cursor(factory):  # type: ignore[misc]
        kept: list[Any] | None = None

        def execute(self, sql: str, parameters: Any = ()) -> Any:
            self.kept = None
            return self.connection.run(lambda: super(Cursor, self).execute(sql, parameters), sql, parameters)

        def fetchone(self) -> Any:
            if self.kept is None:
                return super().fetchone()
            return self.kept.pop(0) if self.kept else None

        def fetchall(self) -> Any:
            if self.kept is None:
                return super().fetchall()
            kept, self.kept = self.kept, []
            return kept

    return Cursor
