"""Statements by libpq itself, through psycopg 3. A cursor of psycopg takes about as long as a statement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psycopg import errors, generators, pq

from .statement import Statement

DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)

READERS: Mapping[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 21: int, 23: int}  # by the oid of a type


class Libpq:
    """One connection of psycopg. It waits as psycopg's cursors do, so greenlets run and signals are handled."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._uses: dict[bytes, int] = {}  # by the name of the statement
        self.has_posted = False  # a statement whose answer is still to be read

    def post(self, statement: Statement, parameters: Sequence[Any]) -> None:
        """Send a statement whose answer nobody waits for."""
        self._send(statement, parameters)
        self.has_posted = True
        if self._connection.pgconn.flush():  # it did not go at once
            self.read_posted()

    def read_posted(self) -> None:
        """Read the answer to the statement that was posted."""
        self.has_posted = False
        self._result()

    def fetch_one(self, statement: Statement, parameters: Sequence[Any]) -> list[Any] | None:
        self._send(statement, parameters)
        result = self._result()
        if not result.ntuples:
            return None
        readers = statement.readers
        if readers is None:
            types = map(result.ftype, range(result.nfields))
            readers = statement.readers = [READERS.get(one, bytes.decode) for one in types]
        value = result.get_value
        return [None if (text := value(0, n)) is None else read(text) for n, read in enumerate(readers)]

    def _send(self, statement: Statement, parameters: Sequence[Any]) -> None:
        values = [one if type(one) is bytes else str(one).encode() for one in parameters]
        formats = [type(one) is bytes for one in parameters]  # 1: binary
        connection, uses = self._connection.pgconn, self._uses.get(statement.name, 0)
        prepare_after = self._connection.prepare_threshold
        if prepare_after is None or uses < prepare_after:
            connection.send_query_params(statement.sql_of_libpq, values, None, formats)
            self._uses[statement.name] = uses + 1
        else:
            if uses == prepare_after:
                connection.send_prepare(statement.name, statement.sql_of_libpq)
                self._result()
                self._uses[statement.name] = uses + 1  # now: a statement that is rolled back is sent again
            connection.send_query_prepared(statement.name, values, formats)

    def _result(self) -> Any:
        [result] = self._connection.wait(generators.execute(self._connection.pgconn))
        if result.status not in DONE:
            raise errors.error_from_result(result, encoding="utf-8")
        return result
