"""A connection to each node, for one thread at a time: messages go to all, the first reply is read first."""

from __future__ import annotations

import select
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from redis.exceptions import ConnectionError, MaxConnectionsError, TimeoutError

from ...exceptions import LockBackendError
from ...utils import fork
from ...utils.clock import clock
from ...utils.guards import new_guard
from ...utils.threads import Worker, new_thread
from ..common.permits import Permit, new_permits
from ..common.timing import Timing
from ..redis.attempts import exhausted
from ..redis.breaker import ServerBreaker
from ..redis.config import Location
from ..redis.errors import without_traceback
from .messages import (
    NOT_ASKED,
    SCRIPT_LOADS,
    Closed,
    ConnectWait,
    Exchange,
    FanOut,
    Limits,
    NodeState,
    NodeSteps,
    StaleConnections,
    T,
    check_process,
    time_out,
)
from .node_connection import NodeConnection
from .quorum import NoMajority


class ConnectionSet:
    """One connection to each node, or None for a node without one, for one thread at a time."""

    def __init__(self, nodes: Sequence[NodeState], timing: Timing) -> None:
        self._nodes, self._timing = nodes, timing
        self.connections: list[NodeConnection | None] = [None] * len(nodes)
        self._numbers: dict[int, int] = {}  # by file descriptor
        self._poll = Poll()
        self._used_at = clock()

    def put(self, number: int, connection: NodeConnection) -> None:
        self.connections[number] = connection
        self._numbers[connection.fileno] = number
        self._poll.register(connection.fileno, POLLIN)

    def _remove(self, number: int, connection: NodeConnection) -> None:
        self.connections[number] = None
        del self._numbers[connection.fileno]
        self._poll.unregister(connection.fileno)

    def send(self, fan_out: FanOut, timeout: float, *, urgent: bool) -> list[Exchange]:
        sent_at = self._used_at = clock()
        numbers = range(len(self.connections))
        exchanges = [self._send_to(number, fan_out, sent_at, timeout, urgent) for number in numbers]
        while not fan_out.enough(exchanges):
            if not self._read(sent_at + timeout - clock()):
                time_out(exchanges, timeout)
                break
        return exchanges

    def _send_to(self, number: int, fan_out: FanOut, sent_at: float, timeout: float, urgent: bool) -> Exchange:
        connection = self.connections[number]
        message = fan_out.message(number, connection)
        if message is None:
            return NOT_ASKED
        if connection is None:
            return self._nodes[number].unasked(message, sent_at)
        if connection.pending and not connection.is_ready(timeout, urgent=urgent):
            failure = TimeoutError(f"no answer for {connection.unresponsive_for:.2f} s")
            return Exchange(message.replies, sent_at, failure=failure)
        exchange = connection.send(message, sent_at)
        if connection.is_closed:
            self._remove(number, connection)
        return exchange

    def _read(self, timeout: float) -> bool:
        """Wait until something can be read, and read it. False if nothing came."""
        readable = self._poll.poll(max(0.0, timeout) * 1000)
        for fileno, _ in readable:
            number = self._numbers[fileno]
            connection = self.connections[number]
            assert connection
            connection.read()
            if connection.is_closed:
                self._remove(number, connection)
        return bool(readable)

    def drop_dead(self) -> bool:
        """Read replies that came while nobody waited; remove dead connections. Returns whether any was removed."""
        missing, timing = self.connections.count(None), self._timing
        waits = any(connection and connection.pending for connection in self.connections)
        if waits or clock() - self._used_at > timing.idle_trusted:
            self._read(0.0)
        if waits:
            for number, connection in enumerate(self.connections):
                if connection and connection.unresponsive_for > timing.node_unresponsive_after:
                    connection.close_with_undo(self._nodes[number].hangs(connection.unresponsive_for))
                    self._remove(number, connection)
        return self.connections.count(None) > missing

    @property
    def awaits_release(self) -> bool:
        """Whether a release is still on its way that must be repeated if its connection ends. Called in any thread."""
        return any(connection and connection.awaits_release for connection in self.connections)

    def close(self, error: Exception) -> None:
        for number, connection in enumerate(self.connections):
            if connection:
                connection.close(error)
                self._remove(number, connection)


class SelectPoll:
    """For systems without ``poll()``, such as Windows."""

    def __init__(self) -> None:
        self._filenos: set[int] = set()

    def register(self, fileno: int, _: int) -> None:
        self._filenos.add(fileno)

    def unregister(self, fileno: int) -> None:
        self._filenos.discard(fileno)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        if not self._filenos:
            return []
        return [(fileno, POLLIN) for fileno in select.select(self._filenos, [], [], milliseconds / 1000)[0]]


Poll: Any = getattr(select, "poll", SelectPoll)
POLLIN: int = getattr(select, "POLLIN", 1)


class Node(NodeState):
    """One server, for the threads of this process. Spare connections go to the next set that has none."""

    def __init__(self, number: int, location: Location, breaker: ServerBreaker, timing: Timing) -> None:
        super().__init__(breaker, timing)
        self.number, self.location = number, location
        self.spare: list[NodeConnection] = []
        self._opening: frozenset[threading.Thread] = frozenset()  # replaced, never changed: any thread counts them

    @property
    def connecting_count(self) -> int:
        return sum(map(threading.Thread.is_alive, self._opening))

    def connect_in(self, thread: threading.Thread) -> None:
        """Raises RuntimeError if no thread can be started."""
        self.connecting_since = clock()
        self._opening = frozenset((*filter(threading.Thread.is_alive, self._opening), thread))
        thread.start()

    def connecting_ended(self) -> None:
        """Called in the thread that connects."""
        self._opening -= {threading.current_thread()}


class Nodes:
    """All nodes of a backend, for the threads of this process, at most ``max_connections`` of them at a time.

    The calling thread sends and reads. Each connection is opened in a short-lived thread, because a node that hangs may
    take any time. Another thread reads the late replies to releases for which no caller waits any more.
    """

    def __init__(
        self,
        alias: str,
        locations: Sequence[Location],
        breakers: Sequence[ServerBreaker],
        majority: int,
        max_connections: int,
        timing: Timing,
    ) -> None:
        self._locations, self._breakers, self._timing = locations, breakers, timing
        self._majority, self._max_connections = majority, max_connections
        # If no thread can be started, the next call reads them, as every call does.
        self._reader = Worker(f"distlock-replies-{alias}", self._read_late, on_refusal=lambda error: None)
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self._guard = new_guard()  # a signal handler may ask while it is held
        self._changed = threading.Condition(self._guard)
        servers = zip(self._locations, self._breakers, strict=True)
        self._nodes = [Node(number, *server, self._timing) for number, server in enumerate(servers)]
        self._idle: deque[ConnectionSet] = deque()
        self._filling: list[ConnectionSet] = []  # sets that wait for connections, in the order of arrival
        self._permits = new_permits(self._max_connections)  # one per set that may be in use
        self._failure: NoMajority | None = None  # the error of the last run
        self._failed_within = 0.0  # the timeout of that run
        self._is_reading_late = False  # whether the thread reads from an idle set
        self._is_open = True
        weakref.finalize(self, _disconnect, self._idle, self._nodes, Closed("closed")).atexit = False

    def run(self, steps: NodeSteps[T], limits: Limits) -> T:
        """The result of the steps.

        Raises MaxConnectionsError if others use all connections. If the nodes do not answer the others, it raises their
        error.
        """
        pid = fork.pid()  # first: a child must not use its parent's connections
        permits, idle = self._permits, self._idle
        deadline = clock() + limits.connect_timeout
        permit = self._permit(permits, deadline, limits, pid)
        try:
            check_process(pid)
            connection_set = self._connection_set(_connect_timeout(deadline, limits), limits)
            try:
                check_process(pid)
                fan_out = next(steps)
                while True:
                    exchanges = connection_set.send(fan_out, limits.timeout, urgent=limits.urgent)
                    check_process(pid)
                    fan_out = steps.send(exchanges)
            except StopIteration as end:
                self._failure = None
                result: T = end.value
                return result
            except (LockBackendError, StaleConnections) as error:
                if isinstance(error, NoMajority):
                    self._failure, self._failed_within = without_traceback(error), limits.timeout
                raise
            except BaseException as error:  # interrupted: nobody knows what is on the connections
                connection_set.close(TimeoutError(f"interrupted by {type(error).__name__}"))
                raise
            finally:
                idle.append(connection_set)
                if connection_set.awaits_release:
                    self._reader.nudge(clock() + self._timing.retry_delay)
        finally:
            permits.put(permit)
            del permit  # a traceback may keep this frame, and with it the permit
            if not self._is_open:
                self.close()

    def _read_late(self) -> float | None:
        """Look at each idle set in turn. Callers read the sets in use; these are looked at afterwards."""
        permits, idle, awaits_release = self._permits, self._idle, False
        for _ in range(len(idle)):
            with suppress(Empty, IndexError):  # all are in use by now
                permit = permits.get_nowait()
                try:
                    self._is_reading_late = True
                    connection_set = idle.popleft()
                    if connection_set.awaits_release:
                        connection_set.drop_dead()
                    awaits_release = connection_set.awaits_release or awaits_release
                    idle.append(connection_set)
                finally:
                    permits.put(permit)
                    with self._guard:
                        self._is_reading_late = False
                        self._changed.notify_all()
        if not self._is_open:
            self.close()
        return clock() + self._timing.retry_delay if awaits_release else None

    def _permit(self, permits: SimpleQueue[Permit], deadline: float, limits: Limits, pid: int) -> Permit:
        step = self._timing.reconnect_pause  # meanwhile, the nodes may begin or cease to answer
        while True:
            # A failure of others that had less time says nothing.
            failure = self._failure if self._failed_within >= limits.timeout else None
            left = (deadline if failure else max(deadline, limits.queue_deadline)) - clock()
            with suppress(Empty):
                return permits.get(timeout=max(0.0, min(left, step)))
            check_process(pid)
            if left <= step:
                break
        if failure:
            raise without_traceback(failure)
        raise MaxConnectionsError(exhausted(self._max_connections))

    # Connections

    def _connection_set(self, timeout: float, limits: Limits) -> ConnectionSet:
        connection_set = self._idle_set(timeout)
        connection_set.drop_dead()
        deadline = clock() + timeout
        while None in connection_set.connections:
            self._fill(connection_set, deadline - clock(), limits)
            if not connection_set.drop_dead():
                break  # else some spare connections had died unnoticed
        return connection_set

    def _idle_set(self, timeout: float) -> ConnectionSet:
        with suppress(IndexError):
            return self._idle.pop()
        with self._guard:  # the only set may be in use for late replies, for a moment
            wait = min(timeout, self._timing.reconnect_pause)
            self._changed.wait_for(lambda: bool(self._idle) or not self._is_reading_late, wait)
        with suppress(IndexError):
            return self._idle.pop()
        return ConnectionSet(self._nodes, self._timing)

    def _fill(self, connection_set: ConnectionSet, timeout: float, limits: Limits) -> None:
        connect_wait = ConnectWait(self._majority, timeout, self._timing, limits)
        with self._guard:
            try:
                self._filling.append(connection_set)
                self._wait_for_connections(connection_set, connect_wait, limits)
            finally:
                with suppress(ValueError):  # interrupted before it was added
                    self._filling.remove(connection_set)

    def _wait_for_connections(self, connection_set: ConnectionSet, connect_wait: ConnectWait, limits: Limits) -> None:
        pid, changed = fork.pid(), self._changed
        while missing := self._missing(connection_set):
            ready = len(self._nodes) - len(missing)
            for node in missing:
                self._connect(node, lacks_majority=ready < self._majority, despite_outage=limits.despite_outage)
                check_process(pid)
            if (seconds := connect_wait.seconds(ready, missing)) <= 0:
                return
            changed.wait(seconds)
            check_process(pid)

    def _missing(self, connection_set: ConnectionSet) -> list[Node]:
        missing = []
        for number, node in enumerate(self._nodes):
            if connection_set.connections[number] is None:
                try:
                    connection = node.spare.pop()
                except IndexError:
                    missing.append(node)
                else:
                    connection_set.put(number, connection)
        return missing

    def _connect(self, node: Node, *, lacks_majority: bool, despite_outage: bool) -> None:
        """Open a connection for each set that waits for one: threads that start together must not wait one by one."""
        self._is_open = True
        wanted = sum(connection_set.connections[node.number] is None for connection_set in self._filling)
        if node.may_connect(wanted, lacks_majority=lacks_majority, despite_outage=despite_outage):
            name = f"distlock-connect-{node.location.text}"
            try:
                node.connect_in(new_thread(name, self._open_in_thread, node))
            except RuntimeError as error:  # no more threads are possible, or the interpreter exits
                node.connecting_failed(clock(), ConnectionError(str(error)))

    def _open_in_thread(self, node: Node) -> None:
        pid, began = fork.pid(), clock()
        failure: Exception | None = None
        try:
            connection = NodeConnection(self._open(node.location))
        except Exception as error:  # raised to all callers of the node
            failure = error
        if fork.is_copy(pid):
            return
        with self._guard:
            node.connecting_ended()
            if failure:
                node.connecting_failed(began, failure)
            else:
                node.connected()
                self._hand_out(node, connection)
            self._changed.notify_all()

    def _hand_out(self, node: Node, connection: NodeConnection) -> None:
        """Give it to the set that waits longest: else many sets would have some nodes, and none a majority."""
        for connection_set in self._filling:
            if connection_set.connections[node.number] is None:
                connection_set.put(node.number, connection)
                return
        if self._is_open:
            node.spare.append(connection)
        else:
            connection.close(Closed("closed"))

    def _open(self, location: Location) -> Any:
        connection = location.connected()
        try:
            connection.send_packed_command([b"".join(SCRIPT_LOADS)], check_health=False)
            for _ in SCRIPT_LOADS:
                connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def reset(self) -> None:
        """Close idle connections, because they may have died unnoticed."""
        self._close_idle(ConnectionError("it may have died unnoticed"))

    def close(self) -> None:
        self._is_open = False
        self._close_idle(Closed("closed"))

    def _close_idle(self, why: Exception) -> None:
        with self._guard:
            _disconnect(self._idle, self._nodes, why)


def _connect_timeout(deadline: float, limits: Limits) -> float:
    """Seconds to wait for connections: until the deadline, or as long again if the caller queued past it."""
    now = clock()
    return max(0.0, deadline - now, min(limits.connect_timeout, limits.queue_deadline - now))


def _disconnect(idle: deque[ConnectionSet], nodes: Sequence[Node], why: Exception) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close(why)
    for node in nodes:
        with suppress(IndexError):  # others take from them, too
            while True:
                node.spare.pop().close(why)
