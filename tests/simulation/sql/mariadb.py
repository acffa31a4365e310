"""MariaDB, as PyMySQL reaches it by bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import mysql_packets as packets
from .server import Result, Server, ServerError, Session, Steps
from .statements import Part
from .tables import Key, Rows, Transaction

if TYPE_CHECKING:
    from ..engine.network import Socket

STATES = {1205: "HY000", 1213: "40001", 1792: "25006", 1290: "HY000", 1040: "08004", 1969: "70100", 1021: "HY000"}
CLOCK = b"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
REFUSED_CONNECTIONS = {"TOO_MANY": ServerError(1040, "Too many connections")}
REFUSED_WRITES = {
    "READONLY": ServerError(
        1290, "The MariaDB server is running with the --read-only option so it cannot execute this statement"
    ),
    "READONLY_SESSION": ServerError(1792, "Cannot execute statement in a READ ONLY transaction"),
    "DISK_FULL": ServerError(
        1021,
        'Disk full (distlock_lock); waiting for someone to free some space... (errno: 28 "No space left on device")',
    ),
}
SERVER_DATA = ("10.11.19-MariaDB", "STRICT_TRANS_TABLES", "InnoDB", 0, 0, 0)  # that Django asks for


class MariaDBServer(Server):
    """``UTC_TIMESTAMP`` is when the statement began, also after it has waited for a row."""

    has_statement_time = True

    def new_session(self, socket: Socket, number: int) -> MariaDBSession:
        session = MariaDBSession(self, socket, number)
        self.when_awake(session.greet)
        return session

    def check_write(self, everything: Sequence[Part]) -> None:
        for state, error in REFUSED_WRITES.items():
            if state in self.states:
                raise error.again()

    def rows_to_lock(self, transaction: Transaction, part: Part, known: dict[str, Rows]) -> list[Key]:
        """Rows are found by their key and locked before the rest of the condition is looked at, committed or not."""
        if part.verb == "INSERT":
            return [(part.table, part.parameters[0])]
        keys = [(part.table, value) for value in part.parameters if isinstance(value, bytes)]
        return [key for key in keys if self.locks.owner(key) or self.tables.is_there(transaction, key)]

    def deadlock_error(self, cycle: Sequence[Transaction], part: Part) -> ServerError:
        return ServerError(1213, "Deadlock found when trying to get lock; try restarting transaction")

    def too_late(self, what: str, part: Part) -> ServerError:
        if what == "lock":
            return ServerError(1205, "Lock wait timeout exceeded; try restarting transaction")
        return ServerError(1969, "Query execution was interrupted (max_statement_time exceeded)")

    def notify(self, number: int, channel: str, text: str) -> None:
        raise AssertionError("MariaDB does not notify")

    def terminate(self, session: Session) -> None:
        """As KILL does: no last words."""
        session.end()

    def end_idle(self, session: Session) -> None:
        session.end()


class MariaDBSession(Session):
    is_known = False  # its user
    commits = True  # each statement by itself

    def _ok(self, number: int, count: int = 0) -> bytes:
        return packets.ok(number, count, packets.AUTOCOMMIT if self.commits else 0)

    def greet(self) -> None:
        self.server.scheduler.at(0.0005 + self.server.latency, lambda: self.server.when_awake(self._greet))

    def _greet(self) -> None:
        is_full = len(self.server.sessions) > self.server.max_connections
        if is_full or "TOO_MANY" in self.server.states:
            error = REFUSED_CONNECTIONS["TOO_MANY"]
            self.send(packets.failure(0, int(error.code), STATES[1040], str(error)))
            self.end()
        else:
            self.send(packets.handshake(self.number))

    def next_request(self, buffer: bytes) -> tuple[Any, bytes] | None:
        return packets.next_packet(buffer)

    def steps_of(self, request: Any) -> Steps[bytes]:
        if not self.is_known:
            self.is_known = True
            return self._answered(2)
        command, text = request[0], request[1:]
        if command == packets.QUIT:
            return self._quit()
        return self._asked(text) if command == packets.QUERY else self._answered(1)

    def _answered(self, number: int) -> Steps[bytes]:
        yield self.server.passes(0.0005 + self.server.latency)
        return self._ok(number)

    def _quit(self) -> Steps[bytes]:
        yield self.server.passes(0.0)
        self.end()
        return b""

    def _asked(self, text: bytes) -> Steps[bytes]:
        sql, parameters = packets.statement(text.replace(CLOCK, b"now_us()"))
        try:
            result = yield from self._executed(sql, parameters)
            outcome: Any = result.rows.rows if result.rows else result.count
            reply = packets.result(result.rows) if result.rows else self._ok(1, max(0, result.count))
        except ServerError as error:
            self._fail(error)
            outcome, reply = error, packets.failure(1, int(error.code), STATES[int(error.code)], str(error))
        if self.server.watch:
            self.server.watch(self, sql, parameters, outcome)
        return reply

    def _fail(self, error: ServerError) -> None:
        """A deadlock ends the transaction; any other error the statement alone."""
        if self.transaction is None:
            self.fail_statement()
        elif error.code == 1213:
            self.server.roll_back(self.transaction)
            self.transaction = None

    def _executed(self, sql: str, parameters: Sequence[Any]) -> Steps[Result]:
        word = sql.split()[0].upper()
        if word in ("COMMIT", "ROLLBACK"):
            return (yield from self._end_transaction(word))
        if word not in ("BEGIN", "SET", "KILL") and "VERSION()" not in sql:
            if not self.commits and not self.transaction:
                self.transaction = Transaction(self.number)
            result: Result = yield from self.server.execute(self, sql, parameters)
            return result
        yield self.server.passes(0.0005 + self.server.latency)
        if word == "BEGIN":
            self.transaction = Transaction(self.number)
        elif word == "SET":
            self._set(sql)
        elif word == "KILL":
            for session in [one for one in self.server.sessions if one.number == int(sql.split()[1])]:
                self.server.terminate(session)
        else:
            return Result(1, Rows([f"c{number}" for number in range(len(SERVER_DATA))], [SERVER_DATA]))
        return Result(0)

    @property
    def is_in_transaction(self) -> bool:
        """One that has written."""
        return bool(self.transaction and self.transaction.rows)

    def _end_transaction(self, word: str) -> Steps[Result]:
        transaction, self.transaction = self.transaction, None
        if transaction and word == "COMMIT":
            self.statement_transaction = transaction
            yield from self.server.commit(self, transaction)
        elif transaction:
            self.server.roll_back(transaction)
        return Result(0)

    def _set(self, sql: str) -> None:
        if found := re.fullmatch(r"SET AUTOCOMMIT = ([01])", sql):
            self.commits = found[1] == "1"
        elif found := re.search(r"idle_write_transaction_timeout = (\d+)", sql):
            self.longest_idle = float(found[1])
        elif found := re.fullmatch(r"SET innodb_lock_wait_timeout = (\d+)", sql):
            self.server.lock_timeout = float(found[1])
        elif found := re.fullmatch(r"SET max_statement_time = ([\d.]+)", sql):
            self.server.statement_timeout = float(found[1])
        elif found := re.fullmatch(r"SET SESSION TRANSACTION READ (ONLY|WRITE)", sql):
            change = self.server.states.add if found[1] == "ONLY" else self.server.states.discard
            change("READONLY_SESSION")
