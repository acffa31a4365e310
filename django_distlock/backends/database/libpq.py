"""Statements by libpq itself, through psycopg 3. A cursor of psycopg takes about as long as a statement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psycopg import OperationalError, errors, generators, pq

from .statement import Statement

DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)

READERS: Mapping[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 21: int, 23: int}  # by the oid of a type


class Libpq:
    """One connection of psycopg. It waits as psycopg's cursors do, so greenlets run and signals are handled."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._uses: Counter[bytes] = Counter()  # by the name of the statement
        self._prepared: set[bytes] = set()
        self._posted: Statement | None = None

    @property
    def has_posted(self) -> bool:
        """Whether a statement was posted whose answer is still to be read."""
        return self._posted is not None

    def has_ended(self) -> bool:
        """Whether the server has closed the idle connection, as far as is known here; waits for nothing."""
        try:
            self._connection.pgconn.consume_input()  # the server's last words
            self._connection.pgconn.consume_input()  # the end
        except OperationalError:
            return True
        return False

    def post(self, statement: Statement, parameters: Sequence[Any]) -> None:
        """Send a statement without waiting for anything; ``read_posted()`` reads the answer."""
        self._posted = statement
        self._send(statement, parameters)
        self._connection.pgconn.flush()  # what does not go at once goes when the answer is read

    def read_posted(self) -> None:
        """Read the answer to the statement that was posted, and prepare the statement if that is due."""
        posted, self._posted = self._posted, None
        assert posted
        self._result()
        self._prepare_if_due(posted)

    def fetch_one(self, statement: Statement, parameters: Sequence[Any]) -> list[Any] | None:
        self._prepare_if_due(statement)
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

    def _prepare_if_due(self, statement: Statement) -> None:
        threshold, name = self._connection.prepare_threshold, statement.name
        if threshold is None or name in self._prepared or self._uses[name] < threshold:
            return
        self._connection.pgconn.send_prepare(name, statement.sql_of_libpq)
        self._result()
        self._prepared.add(name)  # whatever becomes of its transaction

    def _send(self, statement: Statement, parameters: Sequence[Any]) -> None:
        values = [one if type(one) is bytes else str(one).encode() for one in parameters]
        formats = [type(one) is bytes for one in parameters]  # 1: binary
        connection = self._connection.pgconn
        if statement.name in self._prepared:
            connection.send_query_prepared(statement.name, values, formats)
        else:
            self._uses[statement.name] += 1
            connection.send_query_params(statement.sql_of_libpq, values, None, formats)

    def _result(self) -> Any:
        [result] = self._connection.wait(generators.execute(self._connection.pgconn))
        if result.status not in DONE:
            raise errors.error_from_result(result, encoding="utf-8")
        return result
