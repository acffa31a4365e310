"""Connections of threads to the nodes: who uses which, and how they are opened."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty
from typing import Any

from redis.exceptions import ConnectionError, MaxConnectionsError

from ...exceptions import LockBackendError
from ...utils import fork
from ...utils.clock import clock
from ..permits import permits
from ..redis.location import Location
from ..redis.timeouts import exhausted
from .asking import LOADS, Arrival, Contact, Steps, Verdict
from .lineup import Lineup, Link


class Node(Contact):
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
        self._idle: deque[Lineup] = deque()
        self._filling: list[Lineup] = []  # those that wait for connections, in the order in which they came
        self._permits = permits(self._most)  # one per lineup that may be in use
        self._is_open = True
        weakref.finalize(self, _disconnect, self._idle, self._nodes).atexit = False

    def run(
        self,
        steps: Steps,
        patience: float,
        within: float,
        *,
        urgent: bool = False,
        persists: bool = False,
    ) -> Any:
        """Take the steps, each round of which may last ``patience`` seconds; their result.

        ``within``: seconds to wait for connections, if a majority is not connected; ``persists``: also to nodes that
        refuse. ``urgent``: also ask nodes that owe an answer. Raises MaxConnectionsError.
        """
        fork.notice()  # a child must not talk on its parent's connections
        vacant, idle = self._permits, self._idle
        try:
            permit = vacant.get(timeout=within)
        except Empty:
            raise MaxConnectionsError(exhausted(self._most)) from None
        try:
            lineup = self._lineup(within, persists)
            try:
                round_ = next(steps)
                while True:
                    round_ = steps.send(lineup.ask(round_, patience, urgent=urgent))
            except StopIteration as end:
                return end.value
            except (LockBackendError, Verdict):
                raise
            except BaseException as error:  # interrupted: what stands on the links is not known any more
                lineup.close(error if isinstance(error, Exception) else TimeoutError("interrupted"))
                raise
            finally:
                idle.append(lineup)
        finally:
            vacant.put(permit)
            del permit  # a traceback may keep this frame
            if not self._is_open:
                self.close()

    # Connections

    def _lineup(self, within: float, persists: bool) -> Lineup:
        try:
            lineup = self._idle.pop()
        except IndexError:
            lineup = Lineup(self._nodes)
        lineup.refresh()
        if None in lineup.links:
            self._fill(lineup, within, persists)
            lineup.refresh()
        return lineup

    def _fill(self, lineup: Lineup, within: float, persists: bool) -> None:
        arrival = Arrival(self._majority, within, persists=persists)
        with self._changed:
            try:
                self._filling.append(lineup)
                while missing := self._missing(lineup):
                    ready = len(self._nodes) - len(missing)
                    for node in missing:
                        self._connect(node, insist=ready < self._majority)
                    left = arrival.wait(ready, missing)
                    if left <= 0:
                        return
                    self._changed.wait(left)
            finally:
                with suppress(ValueError):  # interrupted before it was added
                    self._filling.remove(lineup)

    def _missing(self, lineup: Lineup) -> list[Node]:
        missing = []
        for number, node in enumerate(self._nodes):
            if lineup.links[number] is None:
                if node.spare:
                    lineup.put(number, node.spare.pop())
                else:
                    missing.append(node)
        return missing

    def _connect(self, node: Node, *, insist: bool) -> None:
        """As many connections at a time as lineups wait for one: a crowd that comes cold must not wait in a row."""
        self._is_open = True
        wanted = sum(lineup.links[node.number] is None for lineup in self._filling)
        if node.may_connect(wanted, insist=insist):
            name = f"distlock-connect-{node.location.text}"
            try:
                node.open_in(threading.Thread(target=self._connected, args=(node,), name=name, daemon=True))
            except RuntimeError as error:  # no more threads here, or the interpreter exits
                node.fail(ConnectionError(str(error)))

    def _connected(self, node: Node) -> None:
        failure: Exception | None = None
        try:
            link = Link(self._opened(node.location))
        except Exception as error:  # told to whoever asks the node
            failure = error
        with self._changed:
            node.opened()
            if failure:
                node.fail(failure)
            else:
                node.failure = None
                self._hand_out(node, link)
            self._changed.notify_all()

    def _hand_out(self, node: Node, link: Link) -> None:
        """To the lineup that waits longest: when each takes what it finds, many have some and nobody a majority."""
        for lineup in self._filling:
            if lineup.links[node.number] is None:
                lineup.put(node.number, link)
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


def _disconnect(idle: deque[Lineup], nodes: Sequence[Node]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close(ConnectionError("closed"))
    for node in nodes:
        while node.spare:
            node.spare.pop().connection.disconnect()
