"""The twin of psycopg 3 as far as Django and the package use a connection. Its errors have the words of the original.

Where a connection breaks, libpq says the same of a server that has ended and of a socket that was shut down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import generators, pq

from ..engine.network import Socket
from .postgres import encoded, next_message
from .tables import Rows

if TYPE_CHECKING:
    from ..engine.network import Network

BROKEN = (
    "server closed the connection unexpectedly\n\tThis probably means the server terminated abnormally"
    "\n\tbefore or while processing the request."
)
NUMBERS = {"format", "version", "fence", "expires", "careful_until"}  # columns, also where there is no row
REFUSED = "Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?"


class Connection:
    def __init__(self, network: Network, *, host: str, port: str, connect_timeout: float, **rest: Any) -> None:
        self.adapters = rest["context"].adapters
        self.prepare_threshold = rest.get("prepare_threshold")
        self.autocommit = False
        self.closed = False
        self.pgconn = self
        self._buffer = b""
        self._notifications: list[Any] = []
        self._prepared: dict[bytes, bytes] = {}
        self._to_send: tuple[str, Sequence[Any]] | None = None
        self._is_sent = False  # a statement whose answer was not read yet
        self._socket = Socket(network)
        self._socket.settimeout(connect_timeout)
        try:
            self._connect(host, int(port))
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(None)

    def _connect(self, host: str, port: int) -> None:
        where = f'connection failed: connection to server at "{host}", port {port} failed'
        try:
            self._socket.connect((host, port))
            self._socket.sendall(encoded("connect"))
            kind, *about = self._next_message()
        except ConnectionRefusedError:
            raise psycopg.OperationalError(f"{where}: {REFUSED}") from None
        except TimeoutError:
            raise psycopg.errors.ConnectionTimeout("connection timeout expired") from None
        except OSError:
            raise psycopg.OperationalError(f"{where}: {BROKEN}") from None
        if kind != "ready":
            raise psycopg.OperationalError(f"{where}: FATAL:  {about[-1]}")
        self.info = SimpleNamespace(
            backend_pid=about[0], server_version=about[1], parameter_status=lambda name: "Etc/UTC"
        )

    def _next_message(self) -> tuple[Any, ...]:
        while (found := next_message(self._buffer)) is None:
            if not (data := self._socket.recv(65536)):
                raise ConnectionResetError
            self._buffer += data
        message, self._buffer = found
        return message

    def ask(self, sql: str, parameters: Sequence[Any]) -> tuple[int, Any]:
        """The number of rows, and the rows."""
        self._ask(sql, parameters)
        return self._answer()

    def _ask(self, sql: str, parameters: Sequence[Any]) -> None:
        self._check()
        with suppress(OSError):  # the server's last words may be there
            self._socket.sendall(encoded("query", sql, [*map(_sent, parameters)]))

    def _answer(self) -> tuple[int, Any]:
        self._check()
        try:
            while True:
                kind, *about = self._next_message()
                if kind == "result":
                    return about[0], about[1]
                if kind == "notify":
                    self._keep(about)
                else:
                    self._fail(*about)
        except OSError:
            self.close()
            raise psycopg.OperationalError(f"consuming input failed: {BROKEN}") from None
        except BaseException as error:
            if not isinstance(error, psycopg.Error):
                self.close()  # an interrupted statement
            raise

    def _fail(self, state: str, text: str) -> None:
        error = psycopg.errors.lookup(state)(text)
        if state in ("57P01", "25P03"):
            self.close()
        raise error

    def _check(self) -> None:
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")

    # For the package

    def send_query_params(self, sql: bytes, values: Sequence[Any], types: None, formats: Sequence[int]) -> None:
        assert not self._is_sent, "another command is already in progress"
        parameters = [value if is_binary else value.decode() for value, is_binary in zip(values, formats, strict=True)]
        self._to_send = re.sub(r"\$\d+", "%s", sql.decode()), parameters

    def send_prepare(self, name: bytes, sql: bytes) -> None:
        self._check()
        assert not self._is_sent, "another command is already in progress"
        self._prepared[name], self._to_send = sql, None

    def send_query_prepared(self, name: bytes, values: Sequence[Any], formats: Sequence[int]) -> None:
        self.send_query_params(self._prepared[name], values, None, formats)

    def wait(self, executed: Connection) -> list[Answer]:
        self.flush()
        if not self._is_sent:
            return [Answer(pq.ExecStatus.COMMAND_OK)]
        self._is_sent = False
        _, rows = self._answer()
        return [Answer(pq.ExecStatus.TUPLES_OK, rows)]

    def flush(self) -> int:
        """0: all was sent."""
        if self._to_send is not None:
            (sql, parameters), self._to_send = self._to_send, None
            self._ask(sql, parameters)
            self._is_sent = True
        return 0

    def consume_input(self) -> None:
        """Read what is there."""
        while self._socket.is_readable:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self.close()
                raise psycopg.OperationalError(BROKEN)
            self._buffer += data
        while found := next_message(self._buffer):
            (kind, *about), self._buffer = found
            if kind == "notify":
                self._keep(about)

    def _keep(self, about: Sequence[Any]) -> None:
        number, channel, text = about
        self._notifications.append(SimpleNamespace(be_pid=number, relname=channel.encode(), extra=text.encode()))

    def notifies(self) -> Any:
        return self._notifications.pop(0) if self._notifications else None

    def fileno(self) -> int:
        if self.closed:
            raise psycopg.OperationalError("the connection is lost")
        return self._socket.fileno()

    def cursor(self, *arguments: Any, **options: Any) -> Cursor:
        self._check()
        return Cursor(self)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        return self.cursor().execute(sql, parameters)

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def commit(self) -> None: ...

    rollback = commit


_execute = generators.execute


def execute(connection: Any) -> Any:
    return connection if isinstance(connection, Connection) else _execute(connection)


generators.execute = execute  # by which the package asks libpq


class Answer:
    """As libpq tells it: in text, with the types of its columns."""

    def __init__(self, status: pq.ExecStatus, rows: Rows | None = None) -> None:
        self.status = status
        self._columns, self._rows = rows or Rows((), ())
        self.ntuples, self.nfields = len(self._rows), len(self._columns)

    def ftype(self, column: int) -> int:
        is_number = self._columns[column] in NUMBERS or isinstance(self._rows[0][column], int)
        return 20 if is_number else 25

    def get_value(self, row: int, column: int) -> bytes | None:
        value = self._rows[row][column]
        return None if value is None else str(value).encode()


class Cursor:
    arraysize = 1

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.adapters = connection.adapters
        self.rowcount = -1
        self.description: Any = None
        self._rows: Iterator[tuple[Any, ...]] = iter(())
        self.closed = False

    def execute(self, sql: str, parameters: Sequence[Any] | None = None, **options: Any) -> Cursor:
        self.rowcount, rows = self.connection.ask(sql, parameters or ())
        self.description = [(column,) for column in rows.columns] if rows else None
        self._rows = iter(rows.rows if rows else ())
        return self

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(self._rows, None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._rows)

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sent(value: Any) -> Any:
    return bytes(value.obj) if isinstance(value, psycopg.Binary) else value
