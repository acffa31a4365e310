"""PostgreSQL as the driver of ``psycopg.py`` sees it: pickled messages, and the words of version 15."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .server import Result, Server, ServerError, Session, Steps
from .statements import Part
from .tables import Rows, Transaction

if TYPE_CHECKING:
    from ..engine.network import Socket

VERSION = 150018
TERMINATED = ServerError("57P01", "terminating connection due to administrator command")
IDLE = ServerError("25P03", "terminating connection due to idle-in-transaction timeout")
REFUSED_CONNECTIONS = {
    "STARTING": "the database system is starting up",
    "STOPPING": "the database system is shutting down",
    "TOO_MANY": "sorry, too many clients already",
}
REFUSED_WRITES = {
    "DISK_FULL": ServerError(
        "53100", 'could not extend file "base/5/16385": No space left on device\nHINT:  Check free disk space.'
    ),
}


def encoded(*message: Any) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(4, "big") + data


def next_message(buffer: bytes) -> tuple[tuple[Any, ...], bytes] | None:
    """The message and what comes after it; None: it has not come whole yet."""
    end = 4 + int.from_bytes(buffer[:4], "big")
    if len(buffer) < 4 or len(buffer) < end:
        return None
    message: tuple[Any, ...] = pickle.loads(buffer[4:end])
    return message, buffer[end:]


class PostgresServer(Server):
    """``on_notify``: called with the text of each notification."""

    deadlock_timeout = 1.0
    on_notify: Callable[[str], object] = staticmethod(lambda text: None)

    def new_session(self, socket: Socket, number: int) -> PostgresSession:
        return PostgresSession(self, socket, number)

    def check_write(self, everything: Sequence[Part]) -> None:
        if "READONLY" in self.states:
            verb = everything[-1].verb
            raise ServerError("25006", f"cannot execute {verb} in a read-only transaction")
        for state, error in REFUSED_WRITES.items():
            if state in self.states:
                raise error.again()

    def deadlock_error(self, cycle: Sequence[Transaction], part: Part) -> ServerError:
        lines = "\n".join(
            f"Process {one.number} waits for ShareLock on transaction {one.number}; blocked by process {other.number}."
            for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        )
        hint = "HINT:  See server log for query details."
        return ServerError("40P01", f"deadlock detected\nDETAIL:  {lines}\n{hint}\n{_context(part)}")

    def too_late(self, what: str, part: Part) -> ServerError:
        state = "55P03" if what == "lock" else "57014"
        return ServerError(state, f"canceling statement due to {what} timeout\n{_context(part)}")

    def notify(self, number: int, channel: str, text: str) -> None:
        for session in self.sessions:
            if channel in session.channels:  # type: ignore[attr-defined]
                session.send(encoded("notify", number, channel, text))
        self.on_notify(text)

    def terminate(self, session: Session) -> None:
        """As pg_terminate_backend does."""
        where = f"\n{_context(session.waits_in)}" if session.waits_in else ""
        session.send(encoded("error", TERMINATED.code, f"{TERMINATED}{where}"))
        session.end()

    def end_idle(self, session: Session) -> None:
        session.send(encoded("error", IDLE.code, str(IDLE)))
        session.end()


class PostgresSession(Session):
    def __init__(self, server: PostgresServer, socket: Socket, number: int) -> None:
        super().__init__(server, socket, number)
        self.channels: set[str] = set()
        self.is_aborted = False  # the transaction that BEGIN began

    def next_request(self, buffer: bytes) -> tuple[Any, bytes] | None:
        return next_message(buffer)

    def steps_of(self, request: Any) -> Steps[bytes]:
        kind, *about = request
        if kind == "connect":
            return self._connected()
        return self._answered(*about)

    def _connected(self) -> Steps[bytes]:
        yield self.server.passes(0.001 + self.server.latency)
        is_full = len(self.server.sessions) > self.server.max_connections
        states = {*self.server.states, *(["TOO_MANY"] if is_full else [])}
        for state, text in REFUSED_CONNECTIONS.items():
            if state in states:
                self.send(encoded("fatal", text))
                self.end()
                return b""
        return encoded("ready", self.number, VERSION)

    def _answered(self, sql: str, parameters: Sequence[Any]) -> Steps[bytes]:
        try:
            result = yield from self._executed(sql, parameters)
            outcome: Any = result.rows.rows if result.rows else result.count
            reply = encoded("result", result.count, result.rows)
        except ServerError as error:
            self.fail_statement()
            self.is_aborted = self.transaction is not None
            outcome, reply = error, encoded("error", error.code, str(error))
        if self.server.watch:
            self.server.watch(self, sql, parameters, outcome)
        return reply

    def _executed(self, sql: str, parameters: Sequence[Any]) -> Steps[Result]:
        word = sql.split()[0].upper().rstrip(";")
        if word in ("COMMIT", "ROLLBACK"):
            return (yield from self._end_transaction(word))
        if self.is_aborted:
            raise ServerError(
                "25P02", "current transaction is aborted, commands ignored until end of transaction block"
            )
        if word == "BEGIN":
            self.transaction = Transaction(self.number)
            limit = re.search(r"SET LOCAL idle_in_transaction_session_timeout = (\d+)", sql)
            self.longest_idle = int(limit[1]) / 1000 if limit else 0.0
        elif word == "LISTEN":
            yield self.server.passes(0.0005 + self.server.latency)
            self.channels.add(sql.split()[1].strip('"'))
        elif word == "SET":
            self._set(sql)
        elif "pg_backend_pid()" in sql or sql.startswith("SELECT set_config("):
            yield self.server.passes(0.0005 + self.server.latency)
            return self._told(sql, parameters)
        else:
            result: Result = yield from self.server.execute(self, sql, parameters)
            return result
        return Result()

    def _end_transaction(self, word: str) -> Steps[Result]:
        transaction, self.transaction = self.transaction, None
        if transaction and word == "COMMIT" and not self.is_aborted:
            self.statement_transaction = transaction
            yield from self.server.commit(self, transaction)
        elif transaction:
            self.server.roll_back(transaction)
        self.is_aborted = False
        return Result()

    def _set(self, sql: str) -> None:
        """Of all sessions: it is enough for one test at a time."""
        if found := re.fullmatch(r"SET (deadlock|lock|statement)_timeout = '?(\d+)(?:ms)?'?", sql):
            setattr(self.server, f"{found[1]}_timeout", int(found[2]) / 1000)
        elif found := re.fullmatch(r"SET default_transaction_read_only = (on|off)", sql):
            (self.server.states.add if found[1] == "on" else self.server.states.discard)("READONLY")

    def _told(self, sql: str, parameters: Sequence[Any]) -> Result:
        if "pg_terminate_backend" in sql:
            for session in [one for one in self.server.sessions if one.number == parameters[0]]:
                self.server.terminate(session)
            return Result(1, Rows(["pg_terminate_backend"], [(True,)]))
        if "set_config" not in sql:
            return Result(1, Rows(["pg_backend_pid"], [(self.number,)]))
        is_so = "pg_backend_pid" not in sql or parameters[-1] == self.number
        rows = [("read committed" if "isolation" in sql else parameters[0],)] if is_so else []
        return Result(len(rows), Rows(["set_config"], rows))


def _context(part: Part) -> str:
    if part.verb == "INSERT":
        return f'CONTEXT:  while inserting index tuple (0,1) in relation "{part.table}_pkey"'
    return f'CONTEXT:  while updating tuple (0,1) in relation "{part.table}"'
