"""A server of a database: its sessions, and how their statements wait, commit and fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .statements import Part, parts
from .tables import Key, Locks, Rows, Tables, Transaction

if TYPE_CHECKING:
    from ..engine.network import Address, Network, Socket

R = TypeVar("R")

# What a statement waits for: it is called with what lets the statement go on, or fail.
Wait = Callable[[Callable[..., object]], object]
Steps = Generator[Wait, None, R]


class Unflushed(NamedTuple):
    """What was committed without waiting for the disk. ``before``: the rows that it changed."""

    number: int  # its position in the log
    at: float
    before: Mapping[Key, tuple[Any, ...] | None]


class ServerError(Exception):
    """``code``: SQLSTATE, or the number of MySQL."""

    def __init__(self, code: str | int, text: str) -> None:
        super().__init__(text)
        self.code = code

    def again(self) -> ServerError:
        """One that can be raised without the traceback of the last time."""
        return ServerError(self.code, str(self))


@dataclass
class Result:
    """``count``: of rows that were read or changed; -1: of a statement that does neither."""

    count: int = -1
    rows: Rows | None = None


class Server(ABC):
    """``watch``: called with each statement and its outcome."""

    deadlock_timeout = 0.0  # seconds of waiting after which it looks for one
    has_statement_time = False  # its clock stands still during a statement

    def __init__(self, network: Network, address: Address, watch: Callable[..., object] | None = None) -> None:
        self.network, self.address, self.watch = network, address, watch
        self.scheduler = network.scheduler
        self.is_up = self.has_power = True
        self.is_hanging = False
        self.clock_error = 0.0  # seconds
        self.latency = 0.0  # seconds that a statement takes in addition
        self.lock_timeout = self.statement_timeout = 0.0  # seconds; 0: none
        self.states: set[str] = set()  # in which it refuses
        self.max_connections = 100
        self.sessions: list[Session] = []
        self.tables = Tables(self.clock)
        self.locks = Locks()
        self._numbers = 1000
        self._log_position = 0
        self._unflushed: list[Unflushed] = []
        self._late: list[Callable[[], object]] = []  # while it hangs
        network.servers[address] = self

    def clock(self) -> int:
        return int((1_800_000_000.0 + self.scheduler.now + self.clock_error) * 1_000_000)

    # What happens to it

    def accept(self, socket: Socket) -> Session:
        self._numbers += 1
        session = self.new_session(socket, self._numbers)
        self.sessions.append(session)
        return session

    @abstractmethod
    def new_session(self, socket: Socket, number: int) -> Session: ...

    def crash(self) -> None:
        """Its connections end. What was being committed is there afterwards, or it is not."""
        self.is_up = False
        for session in list(self.sessions):
            session.end()
        self._late.clear()
        self._lose_unflushed()

    def lose_power(self) -> None:
        """Nobody is told."""
        self.is_up = self.has_power = False
        for session in list(self.sessions):
            session.end(tells=False)
        self._late.clear()
        self._lose_unflushed()

    def _lose_unflushed(self) -> None:
        """The log ends somewhere in what nobody waited for."""
        left, self._unflushed = self._unflushed, []
        kept = self.scheduler.random.randint(0, len(left)) if left else 0
        for one in reversed(left[kept:]):
            self.tables.put_back(one.before)

    def wipe(self, table: str) -> None:
        self.tables.wipe(table)
        self._unflushed.clear()

    def start(self) -> None:
        self.is_up = self.has_power = True
        self.is_hanging = False

    def hang(self) -> None:
        self.is_hanging = True

    def go_on(self) -> None:
        self.is_hanging = False
        late, self._late = self._late, []
        for step in late:
            self.scheduler.at(0.0, step)

    def when_awake(self, step: Callable[[], object]) -> None:
        if self.is_hanging:
            self._late.append(step)
        else:
            step()

    # Statements

    def passes(self, seconds: float) -> Wait:
        return lambda go_on: self.scheduler.at(seconds, go_on)

    def execute(self, session: Session, sql: str, parameters: Sequence[Any]) -> Steps[Result]:
        """One statement of the tables."""
        transaction = session.transaction or Transaction(session.number)
        transaction.moment = self.clock() if self.has_statement_time else None
        yield self.passes(self.scheduler.random.uniform(0.0001, 0.001) + self.latency)
        everything = parts(sql, parameters)
        if any(part.is_write for part in everything):
            self.check_write(everything)
            if "DEADLOCK" in self.states and not session.was_victim and self.scheduler.random.random() < 0.5:
                session.was_victim = True
                raise self.deadlock_error([Transaction(session.number), Transaction(1)], everything[-1])
            session.was_victim = False
        session.statement_transaction = transaction
        known: dict[str, Rows] = {}
        found: list[tuple[Part, list[Key]]] = []  # as the statement begins
        for part in everything:
            if part.is_write:
                found.append((part, self.rows_to_lock(transaction, part, known)))
            elif part.name:
                known[part.name] = self.tables.select(transaction, part, known)
        changed = 0
        for part, keys in found:
            returned: list[tuple[Any, ...]] = []
            columns: Sequence[str] = [part.returning] if "," not in part.returning else part.returning.split(", ")
            for key in keys:
                yield from self._lock(session, transaction, key, part)
                if part.verb == "INSERT" and self.tables.is_there(transaction, key):
                    continue  # ON CONFLICT DO NOTHING
                columns, rows = self.tables.change(transaction, part, known, key)
                returned += rows
            changed = len(returned)
            known[part.name] = Rows([column.rpartition(".")[2] for column in columns], returned)
        last = everything[-1]
        if not last.is_write:
            selected = self.tables.select(transaction, last, known)
            result = Result(len(selected.rows), selected)
        else:
            result = Result(changed, known[""] if last.returning else None)
        if session.transaction is None:
            yield from self.commit(session, transaction)
        return result

    def rows_to_lock(self, transaction: Transaction, part: Part, known: dict[str, Rows]) -> list[Key]:
        return self.tables.found(transaction, part, known)

    def commit(self, session: Session, transaction: Transaction) -> Steps[None]:
        """From here on nobody knows the outcome until it is told."""
        if transaction.rows or transaction.notifications:
            session.is_committing = True
            transaction.log_position = self._log_position
            if not transaction.is_asynchronous:
                yield self.passes(self.scheduler.random.choice([0.0005, 0.001, 0.002]) + self.latency)
            session.is_committing = False
            if "DOUBT" in self.states and self.scheduler.random.random() < 0.5:
                session.is_committing = True
                session.end()
                return
        self.finish(transaction)

    def finish(self, transaction: Transaction) -> None:
        before = self.tables.commit(transaction)
        if transaction.is_asynchronous:
            self._log_position += 1
            self._unflushed.append(Unflushed(self._log_position, self.scheduler.now, before))
        else:  # the log is written in order: all that came before it is on the disk, too
            position = transaction.log_position
            self._unflushed = [one for one in self._unflushed if one.number > position]
        self.locks.end(transaction)
        for channel, text in transaction.notifications:
            self.notify(transaction.number, channel, text)

    @abstractmethod
    def notify(self, number: int, channel: str, text: str) -> None:
        """Tell who listens."""

    def roll_back(self, transaction: Transaction) -> None:
        self.locks.end(transaction)

    def _lock(self, session: Session, transaction: Transaction, key: Key, part: Part) -> Steps[None]:
        if self.locks.take(key, transaction):
            return
        session.waits_in = part
        try:
            yield partial(self._wait_for_lock, transaction, key, part)
        finally:
            session.waits_in = None

    def _wait_for_lock(self, transaction: Transaction, key: Key, part: Part, go_on: Callable[..., object]) -> None:
        is_over = False

        def take() -> None:
            nonlocal is_over
            is_over = True
            self.scheduler.at(0.0, go_on)

        def fail(error: Callable[[], ServerError | None]) -> None:
            nonlocal is_over
            if not is_over and not transaction.is_over and (found := error()):
                is_over = True
                self.locks.give_up(key, transaction)
                go_on(found)

        self.locks.wait(key, transaction, take)
        self.scheduler.at(self.deadlock_timeout, lambda: fail(lambda: self._deadlock(transaction, part)))
        if self.lock_timeout:
            self.scheduler.at(self.lock_timeout, lambda: fail(lambda: self.too_late("lock", part)))
        if self.statement_timeout:
            self.scheduler.at(self.statement_timeout, lambda: fail(lambda: self.too_late("statement", part)))

    @abstractmethod
    def check_write(self, everything: Sequence[Part]) -> None:
        """Raise the error of a server that does not write just now."""

    def _deadlock(self, transaction: Transaction, part: Part) -> ServerError | None:
        cycle = self.locks.cycle(transaction)
        return self.deadlock_error(cycle, part) if cycle else None

    @abstractmethod
    def deadlock_error(self, cycle: Sequence[Transaction], part: Part) -> ServerError:
        """``cycle``: transactions each of which waits for the next one."""

    @abstractmethod
    def terminate(self, session: Session) -> None:
        """An operator ends it."""

    @abstractmethod
    def end_idle(self, session: Session) -> None:
        """Nothing happened in its transaction for longer than it may be idle."""

    @abstractmethod
    def too_late(self, what: str, part: Part) -> ServerError: ...


class Session(ABC):
    """The server's end of a connection. One statement at a time. ``transaction``: that BEGIN began."""

    def __init__(self, server: Any, socket: Socket, number: int) -> None:
        self.server, self.socket, self.number = server, socket, number
        self.transaction: Transaction | None = None
        self.statement_transaction: Transaction | None = None
        self.waits_in: Part | None = None  # for a row
        self.is_committing = False
        self.was_victim = False  # of a deadlock, with its last statement: the next one goes through
        self.is_open = True
        self.longest_idle = 0.0  # seconds for which nothing may happen in a transaction; 0: no limit
        self._is_busy = False
        self._answers = 0
        self._has_hung_up = False  # the client, which the server notices when it is idle
        self._buffer = b""
        self._requests: deque[Any] = deque()

    @abstractmethod
    def next_request(self, buffer: bytes) -> tuple[Any, bytes] | None: ...

    @abstractmethod
    def steps_of(self, request: Any) -> Steps[bytes]:
        """Returns the reply."""

    # For the network

    def receive(self, data: bytes) -> None:
        if not self.is_open:
            if self.server.has_power:
                self.socket.reset()
            return
        self._buffer += data
        while found := self.next_request(self._buffer):
            request, self._buffer = found
            self._requests.append(request)
        self.server.when_awake(self._begin_next)

    def close(self) -> None:
        """What runs goes on to its end."""
        self._has_hung_up = True
        self.server.when_awake(self._begin_next)

    # Statements

    def _begin_next(self) -> None:
        if not self.is_open or self._is_busy:
            return
        if self._requests:
            self._is_busy = True
            self._go_on(self.steps_of(self._requests.popleft()))
        elif self._has_hung_up:
            self.end(tells=False)

    def _go_on(self, steps: Steps[bytes], error: Exception | None = None) -> None:
        if not self.is_open:
            return
        if self.server.is_hanging:
            self.server.when_awake(partial(self._go_on, steps, error))
            return
        try:
            wait = steps.throw(error) if error else next(steps)
        except StopIteration as done:
            self._is_busy = False
            if self.is_open:
                self.statement_transaction = None
                self.send(done.value)
                self._answers += 1
                if self.longest_idle and self.is_in_transaction:
                    self.server.scheduler.at(self.longest_idle, partial(self._end_if_idle, self._answers))
                self._begin_next()
        else:
            wait(partial(self._go_on, steps))

    @property
    def is_in_transaction(self) -> bool:
        return self.transaction is not None

    def _end_if_idle(self, since: int) -> None:
        """``since``: the last answer before."""
        if self.is_open and self._answers == since and not self._is_busy and not self.server.is_hanging:
            self.server.end_idle(self)

    def fail_statement(self) -> None:
        """Roll back what an error has ended."""
        if self.statement_transaction:
            self.server.roll_back(self.statement_transaction)
            self.statement_transaction = None

    def send(self, data: bytes) -> None:
        if self.is_open and not self._has_hung_up:
            self.socket.reply(data)

    def end(self, *, tells: bool = True) -> None:
        """The server ends it. Nobody knows what becomes of a commit then."""
        if not self.is_open:
            return
        self.is_open = False
        if self in self.server.sessions:
            self.server.sessions.remove(self)
        if transaction := self.statement_transaction or self.transaction:
            if self.is_committing and self.server.scheduler.random.random() < 0.5:
                self.server.finish(transaction)
            else:
                self.server.roll_back(transaction)
        self.transaction = self.statement_transaction = None
        if tells:
            self.socket.hang_up()
