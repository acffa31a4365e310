"""A connection to each node, for one thread at a time: a round is sent to all, then read from whoever answers first."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from redis.exceptions import (
    ConnectionError,
    MaxConnectionsError,
    NoScriptError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from ...exceptions import LockBackendError
from ...utils import fork
from ...utils.clock import clock
from ..common.permits import Permit, permits
from ..redis.client import IDLE_TRUSTED
from ..redis.config import Location
from ..redis.errors import NoReply
from ..redis.timeouts import exhausted
from .messages import (
    AGAIN,
    GIVEN_UP,
    LOADS,
    MOST_AWAITED,
    NOT_ASKED,
    Asked,
    ConnectWait,
    Message,
    NodeState,
    NodeSteps,
    NotYetConnected,
    Round,
    Verdict,
    check_process,
    time_out,
)


class Link:
    """One connection to one node, used by one thread at a time. Replies come in the order of the requests.

    A reply that nobody waited for is read before the next one: the link remembers what is awaited on it.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._pid = os.getpid()
        self.fileno: int = connection._sock.fileno()  # noqa: SLF001 - redis-py has no public way to poll many connections
        self.awaited: deque[Asked] = deque()
        self.is_broken = False

    def is_ready(self, patience: float, *, urgent: bool) -> bool:
        """Whether an answer can be expected; with ``urgent`` also where one is overdue."""
        if urgent:
            return len(self.awaited) < 2 * MOST_AWAITED  # so that all that was asked for can be given back
        return len(self.awaited) < MOST_AWAITED and self.silent_for < patience

    @property
    def silent_for(self) -> float:
        """Seconds since the oldest request that is not answered."""
        return clock() - self.awaited[0].sent_at if self.awaited else 0.0

    def send(self, message: Message, at: float) -> Asked:
        check_process(self._pid)
        asked = Asked(message.replies, at, self)
        self.awaited.append(asked)
        try:
            self.connection.send_packed_command([message.packed], check_health=False)
        except (RedisError, OSError) as error:
            self.fail(error)
        return asked

    def read(self) -> None:
        """Take the replies that have come, at least one: it is known to be there."""
        check_process(self._pid)
        if not self.awaited:
            self.fail(ConnectionError("the node closed the connection"))
        try:
            while self.awaited:
                try:
                    reply = self.connection.read_response(disable_decoding=True)
                except NoScriptError:
                    raise  # the node forgot our scripts; a new connection brings them
                except ResponseError as error:
                    reply = error
                if self.awaited[0].take(reply):
                    self.awaited.popleft()
                if self.awaited and not self.connection.can_read(0):
                    return
        except (RedisError, OSError) as error:
            self.fail(error)

    def give_up(self, error: Exception) -> None:
        """Close it; should the node wake up and execute what it was sent, it finds the remedy behind that."""
        for remedy in [asked.remedy() for asked in self.awaited if asked.remedy]:
            self.send(remedy, clock())
        self.fail(error)

    def fail(self, error: Exception) -> None:
        self.is_broken = True
        self.connection.disconnect()
        while self.awaited:
            self.awaited.popleft().fail(error)


class ConnectionSet:
    """One link to each node, or None where there is none just now, for one thread at a time."""

    def __init__(self, nodes: Sequence[NodeState]) -> None:
        self._nodes = nodes
        self.links: list[Link | None] = [None] * len(nodes)
        self._numbers: dict[int, int] = {}  # by file descriptor
        self._poll = Poll()
        self._used_at = clock()

    def put(self, number: int, link: Link) -> None:
        self.links[number] = link
        self._numbers[link.fileno] = number
        self._poll.register(link.fileno, POLLIN)

    def _leave_out(self, number: int, link: Link) -> None:
        self.links[number] = None
        del self._numbers[link.fileno]
        self._poll.unregister(link.fileno)

    def ask(self, round_: Round, patience: float, *, urgent: bool) -> list[Asked]:
        at = self._used_at = clock()
        asked = [self._send(number, round_, at, patience, urgent) for number in range(len(self.links))]
        while not round_.enough(asked):
            if not self._read(at + patience - clock()):
                time_out(asked, patience)
                break
        return asked

    def _send(self, number: int, round_: Round, at: float, patience: float, urgent: bool) -> Asked:
        link = self.links[number]
        message = round_.message(number, link)
        if message is None:
            return NOT_ASKED
        if link is None:
            return Asked(message.replies, at, failure=self._nodes[number].failure or NotYetConnected())
        if link.awaited and not link.is_ready(patience, urgent=urgent):
            return Asked(message.replies, at, failure=TimeoutError(f"no answer for {link.silent_for:.2f} s"))
        asked = link.send(message, at)
        if link.is_broken:
            self._leave_out(number, link)
        return asked

    def _read(self, timeout: float) -> bool:
        """Wait until something can be read, and read it. False if nothing came."""
        readable = self._poll.poll(max(0.0, timeout) * 1000)
        for fileno, _ in readable:
            number = self._numbers[fileno]
            link = self.links[number]
            assert link
            link.read()
            if link.is_broken:
                self._leave_out(number, link)
        return bool(readable)

    def refresh(self) -> bool:
        """Read what came while nobody waited, leave out what ended or keeps silent for too long. Whether any did."""
        missing = self.links.count(None)
        waits = any(link and link.awaited for link in self.links)
        if waits or clock() - self._used_at > IDLE_TRUSTED:
            self._read(0.0)
        if waits:
            for number, link in enumerate(self.links):
                if link and link.silent_for > GIVEN_UP:
                    self._nodes[number].failure = failure = TimeoutError(f"no answer for {link.silent_for:.1f} s")
                    link.give_up(failure)
                    self._leave_out(number, link)
        return self.links.count(None) > missing

    def close(self, error: Exception) -> None:
        for number, link in enumerate(self.links):
            if link:
                link.fail(error)
                self._leave_out(number, link)


class Selection:
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


Poll: Any = getattr(select, "poll", Selection)
POLLIN: int = getattr(select, "POLLIN", 1)


class Node(NodeState):
    """One server, as the threads of this process see it. Its spare links wait for whoever has none."""

    def __init__(self, number: int, location: Location) -> None:
        self.number, self.location = number, location
        self.spare: list[Link] = []
        self._opening: set[threading.Thread] = set()

    @property
    def openings(self) -> int:
        return sum(map(threading.Thread.is_alive, self._opening))

    def open_in(self, thread: threading.Thread) -> None:
        """Raises RuntimeError where no thread can be started."""
        self.connecting_since = clock()
        self._opening = {*filter(threading.Thread.is_alive, self._opening), thread}
        thread.start()

    def opened(self) -> None:
        """By this thread, or not."""
        self._opening.discard(threading.current_thread())


class Nodes:
    """All nodes of a backend, for the threads of this process, at most ``most`` of them at a time.

    No thread of ours takes part in a round. Connections are opened in threads of their own that end with
    it, because a node that hangs lets nobody know for how long.
    """

    def __init__(self, locations: Sequence[Location], majority: int, most: int) -> None:
        self._locations, self._majority, self._most = locations, majority, most
        self._start()
        fork.in_child(self._start)

    def _start(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # a signal handler may ask while it is held
        self._nodes = [Node(number, location) for number, location in enumerate(self._locations)]
        self._idle: deque[ConnectionSet] = deque()
        self._filling: list[ConnectionSet] = []  # those that wait for connections, in the order in which they came
        self._permits = permits(self._most)  # one per set that may be in use
        self._failure: NoReply | None = None  # what the last run ended with, if no majority answered
        self._is_open = True
        weakref.finalize(self, _disconnect, self._idle, self._nodes).atexit = False

    def run(
        self,
        steps: NodeSteps,
        patience: float,
        within: float,
        *,
        urgent: bool = False,
        persists: bool = False,
        queues_until: float = -inf,
    ) -> Any:
        """Take the steps, each round of which may last ``patience`` seconds; their result.

        ``within``: seconds to wait for connections, while all are in use or a majority is not connected; ``persists``:
        also to nodes that refuse. ``queues_until``: the moment on ``clock()`` to which the caller waits at least where
        all are in use and the nodes answer. ``urgent``: also ask nodes that owe an answer. Raises MaxConnectionsError,
        or what the others failed with where the nodes do not answer them.
        """
        fork.notice()  # a child must not talk on its parent's connections
        pid, vacant, idle = os.getpid(), self._permits, self._idle
        by = clock() + within
        permit = self._permit(vacant, by, queues_until, pid)
        try:
            check_process(pid)
            connections = self._connection_set(_left(by, within, queues_until), persists)
            try:
                check_process(pid)
                round_ = next(steps)
                while True:
                    asked = connections.ask(round_, patience, urgent=urgent)
                    check_process(pid)
                    round_ = steps.send(asked)
            except StopIteration as end:
                self._failure = None
                return end.value
            except (LockBackendError, Verdict) as error:
                if isinstance(error, NoReply):
                    self._failure = _same(error)
                raise
            except BaseException as error:  # interrupted: what stands on the links is not known any more
                connections.close(error if isinstance(error, Exception) else TimeoutError("interrupted"))
                raise
            finally:
                idle.append(connections)
        finally:
            vacant.put(permit)
            del permit  # a traceback may keep this frame
            if not self._is_open:
                self.close()

    def _permit(self, vacant: SimpleQueue[Permit], by: float, queues_until: float, pid: int) -> Permit:
        while True:
            left = (by if self._failure else max(by, queues_until)) - clock()
            with suppress(Empty):
                return vacant.get(timeout=max(0.0, min(left, AGAIN)))  # whether the nodes answer may change meanwhile
            check_process(pid)
            if left <= AGAIN:
                break
        if failure := self._failure:
            raise _same(failure)
        raise MaxConnectionsError(exhausted(self._most))

    # Connections

    def _connection_set(self, within: float, persists: bool) -> ConnectionSet:
        try:
            connections = self._idle.pop()
        except IndexError:
            connections = ConnectionSet(self._nodes)
        connections.refresh()
        by = clock() + within
        while None in connections.links:
            self._fill(connections, by - clock(), persists)
            if not connections.refresh():
                break  # else some that stood spare had died unnoticed
        return connections

    def _fill(self, connections: ConnectionSet, within: float, persists: bool) -> None:
        arrival = ConnectWait(self._majority, within, persists=persists)
        with self._changed:
            try:
                self._filling.append(connections)
                self._wait_for_links(connections, arrival)
            finally:
                with suppress(ValueError):  # interrupted before it was added
                    self._filling.remove(connections)

    def _wait_for_links(self, connections: ConnectionSet, arrival: ConnectWait) -> None:
        pid, changed = os.getpid(), self._changed
        while missing := self._missing(connections):
            ready = len(self._nodes) - len(missing)
            for node in missing:
                self._connect(node, insist=ready < self._majority)
                check_process(pid)
            if (left := arrival.wait(ready, missing)) <= 0:
                return
            changed.wait(left)
            check_process(pid)

    def _missing(self, connections: ConnectionSet) -> list[Node]:
        missing = []
        for number, node in enumerate(self._nodes):
            if connections.links[number] is None:
                if node.spare:
                    connections.put(number, node.spare.pop())
                else:
                    missing.append(node)
        return missing

    def _connect(self, node: Node, *, insist: bool) -> None:
        """As many connections at a time as sets wait for one: a crowd that comes cold must not wait in a row."""
        self._is_open = True
        wanted = sum(connections.links[node.number] is None for connections in self._filling)
        if node.may_connect(wanted, insist=insist):
            name = f"distlock-connect-{node.location.text}"
            try:
                node.open_in(threading.Thread(target=self._connected, args=(node,), name=name, daemon=True))
            except RuntimeError as error:  # no more threads here, or the interpreter exits
                node.fail(ConnectionError(str(error)))

    def _connected(self, node: Node) -> None:
        pid = os.getpid()
        failure: Exception | None = None
        try:
            link = Link(self._opened(node.location))
        except Exception as error:  # told to whoever asks the node
            failure = error
        if fork.is_copy(pid):
            return
        with self._changed:
            node.opened()
            if failure:
                node.fail(failure)
            else:
                node.failure = None
                self._hand_out(node, link)
            self._changed.notify_all()

    def _hand_out(self, node: Node, link: Link) -> None:
        """To the set that waits longest: when each takes what it finds, many have some and nobody a majority."""
        for connections in self._filling:
            if connections.links[node.number] is None:
                connections.put(node.number, link)
                return
        if self._is_open:
            node.spare.append(link)
        else:
            link.connection.disconnect()

    def _opened(self, location: Location) -> Any:
        connection = location.connected()
        try:
            connection.send_packed_command([b"".join(LOADS)], check_health=False)
            for _ in LOADS:
                connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def reset(self) -> None:
        """Close what stands idle: connections may have died unnoticed."""
        with self._changed:
            _disconnect(self._idle, self._nodes)

    def close(self) -> None:
        self._is_open = False
        self.reset()


def _left(by: float, within: float, queues_until: float) -> float:
    """Seconds to wait for connections. Who queued for longer than that would take has as much again for them."""
    now = clock()
    return max(0.0, by - now, min(within, queues_until - now))


def _same(error: NoReply) -> NoReply:
    """To be kept, or told to somebody else: without the traceback, which holds connections."""
    same = NoReply(*error.args)
    same.is_final, same.__cause__ = error.is_final, error.__cause__
    return same


def _disconnect(idle: deque[ConnectionSet], nodes: Sequence[Node]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close(ConnectionError("closed"))
    for node in nodes:
        while node.spare:
            node.spare.pop().connection.disconnect()
