"""Connections of threads to the nodes: one round is sent to all, then read from whoever answers first."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError, TimeoutError

from ...exceptions import LockBackendError
from ...tickets import clock
from ..redis.location import Location
from ..redis.wire import IDLE_TRUSTED, Command
from .asking import GIVEN_UP, LOADS, MOST_AWAITED, NOT_ASKED, Arrival, Asked, Contact, Round, Steps, Verdict, time_out


class Link:
    """One connection to one node, used by one thread at a time. Replies come in the order of the requests.

    A reply that nobody waited for is read before the next one: the link remembers what is awaited on it.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.fileno: int = connection._sock.fileno()  # redis-py has no public way to poll many connections
        self.awaited: deque[Asked] = deque()
        self.is_broken = False
        self.used_at = clock()

    def send(self, commands: Sequence[Command]) -> Asked:
        asked = Asked(len(commands))
        self.awaited.append(asked)
        self.used_at = asked.sent_at
        try:
            self.connection.send_packed_command(
                [b"".join([command.packed for command in commands])], check_health=False
            )
        except (RedisError, OSError) as error:
            self.fail(error)
        return asked

    def read(self) -> None:
        """Take the replies that have come, at least one: it is known to be there."""
        try:
            while self.awaited:
                try:
                    reply = self.connection.read_response(disable_decoding=True)
                except ResponseError as error:
                    reply = error
                if self.awaited[0].take(reply):
                    self.awaited.popleft()
                if self.awaited and not self.connection.can_read(0):
                    return
        except (RedisError, OSError) as error:
            self.fail(error)

    def refresh(self) -> None:
        """Read what came while nobody waited, and notice an end of the connection."""
        if not self.awaited and clock() - self.used_at < IDLE_TRUSTED:
            return
        try:
            if not self.connection.can_read(0):
                return
        except (RedisError, OSError) as error:
            self.fail(error)
            return
        if self.awaited:
            self.read()
        else:
            self.fail(TimeoutError("the node closed the connection"))

    @property
    def silent_for(self) -> float:
        """Seconds since the oldest request that is not answered."""
        return clock() - self.awaited[0].sent_at if self.awaited else 0.0

    def give_up(self, error: Exception) -> None:
        """Close it; should the node wake up and execute what it was sent, it finds the remedy behind that."""
        for remedy in [asked.remedy for asked in self.awaited if asked.remedy]:
            self.send([remedy])
        self.fail(error)

    def fail(self, error: Exception) -> None:
        self.is_broken = True
        self.connection.disconnect()
        while self.awaited:
            self.awaited.popleft().fail(error)


class Node(Contact):
    """One server, as the threads of this process see it. Its links are touched with the guard of ``Nodes`` held."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.free: list[Link] = []
        self.links: set[Link] = set()

    def take(self, patience: float, *, urgent: bool) -> Link | None:
        """A link on which an answer can be expected; with ``urgent`` one on which an answer is overdue, too."""
        overdue = None
        for link in reversed(self.free[:]):
            link.refresh()
            if link.is_broken:
                self.drop(link)
            elif not link.awaited or (link.silent_for < patience and len(link.awaited) < MOST_AWAITED):
                self.free.remove(link)
                self.failure = None
                return link
            elif link.silent_for > GIVEN_UP:
                self.failure = TimeoutError(f"no answer for {link.silent_for:.1f} s")
                link.give_up(self.failure)
                self.drop(link)
            else:
                self.failure = TimeoutError(f"no answer for {link.silent_for:.2f} s")
                overdue = link
        if urgent and overdue and len(overdue.awaited) < MOST_AWAITED:
            self.free.remove(overdue)
            return overdue
        return None

    def give(self, link: Link) -> None:
        if link.is_broken:
            self.drop(link)
        else:
            self.free.append(link)

    def drop(self, link: Link) -> None:
        self.links.discard(link)
        if link in self.free:
            self.free.remove(link)


class Nodes:
    """All nodes of a backend, for the threads of this process.

    No thread of ours takes part in a round. Connections are opened in threads of their own that end with
    it, because a node that hangs lets nobody know for how long.
    """

    def __init__(self, locations: Sequence[Location], majority: int, most: int, connect_timeout: float) -> None:
        self._locations, self._majority, self._most = locations, majority, most
        self._connect_timeout = connect_timeout
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._nodes = [Node(location) for location in self._locations]
        self._is_open = True
        weakref.finalize(self, _disconnect, self._nodes).atexit = False

    def run(self, steps: Steps, patience: float, *, urgent: bool = False, within: float | None = None) -> Any:
        """Take the steps, each round of which may last ``patience`` seconds; their result.

        ``urgent``: also ask nodes that owe an answer. ``within``: seconds to wait for connections, if a
        majority is not connected.
        """
        if self._pid != os.getpid():
            self._start()  # a forked child must not talk on its parent's connections
        links = self._taken(patience, urgent, self._connect_timeout if within is None else within)
        try:
            round_ = next(steps)
            while True:
                round_ = steps.send(self._ask(links, round_, patience))
        except StopIteration as end:
            return end.value
        except (LockBackendError, Verdict):
            raise
        except BaseException as error:  # interrupted: what stands on the links is not known any more
            for link in links:
                if link:
                    link.fail(error if isinstance(error, Exception) else TimeoutError("interrupted"))
            raise
        finally:
            self._give(links)

    def _ask(self, links: Sequence[Link | None], round_: Round, patience: float) -> list[Asked]:
        asked, waiting = [], {}
        for node, link, commands in zip(self._nodes, links, round_.commands, strict=True):
            if not commands:
                asked.append(NOT_ASKED)
            elif link is None or link.is_broken:
                failure = node.failure or TimeoutError("no connection yet")
                asked.append(Asked(len(commands), failure))
            else:
                asked.append(link.send(commands))
                if link.awaited:
                    waiting[link.fileno] = link
        deadline = clock() + patience
        while waiting and not round_.enough(asked):
            readable = _readable(waiting, deadline - clock())
            if not readable:
                time_out(asked, patience)
                break
            for fileno in readable:
                link = waiting[fileno]
                link.read()
                if not link.awaited:
                    del waiting[fileno]
        return asked

    # Connections

    def _taken(self, patience: float, urgent: bool, within: float) -> list[Link | None]:
        with self._changed:
            links = [node.take(patience, urgent=urgent) for node in self._nodes]
            if None not in links:
                return links
            arrival = Arrival(self._majority, within)
            while True:
                missing = [index for index, link in enumerate(links) if link is None]
                ready = len(links) - len(missing)
                for index in missing:
                    self._connect(self._nodes[index], insist=ready < self._majority)
                nodes = [self._nodes[index] for index in missing]
                coming = any(node.is_connecting or len(node.free) < len(node.links) for node in nodes)
                left = arrival.wait(ready, nodes, coming=coming)
                if left <= 0 or not missing:
                    return links
                self._changed.wait(left)
                for index in missing:
                    links[index] = self._nodes[index].take(patience, urgent=urgent)

    def _give(self, links: Sequence[Link | None]) -> None:
        with self._changed:
            for node, link in zip(self._nodes, links, strict=True):
                if link:
                    node.give(link)
            self._changed.notify_all()
        if not self._is_open:
            self.close()

    def _connect(self, node: Node, *, insist: bool) -> None:
        self._is_open = True
        if len(node.links) < self._most and node.may_connect(insist=insist):
            node.begin()
            name = f"distlock-connect-{node.location.text}"
            threading.Thread(target=self._connected, args=(node,), name=name, daemon=True).start()

    def _connected(self, node: Node) -> None:
        failure: Exception | None = None
        try:
            link = Link(self._opened(node.location))
        except (RedisError, OSError) as error:
            failure = error
        with self._changed:
            if failure:
                node.fail(failure)
            elif not self._is_open:
                node.succeed()
                link.connection.disconnect()
            else:
                node.succeed()
                node.links.add(link)
                node.free.append(link)
            self._changed.notify_all()

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
            _disconnect(self._nodes, only_free=True)

    def close(self) -> None:
        self._is_open = False
        self.reset()


def _disconnect(nodes: Sequence[Node], *, only_free: bool = False) -> None:
    for node in nodes:
        for link in list(node.free if only_free else node.links):
            link.connection.disconnect()
            node.drop(link)


if hasattr(select, "poll"):

    def _readable(links: dict[int, Link], timeout: float) -> list[int]:
        poll = select.poll()
        for fileno in links:
            poll.register(fileno, select.POLLIN)
        return [fileno for fileno, _ in poll.poll(max(0.0, timeout) * 1000)]

else:  # Windows

    def _readable(links: dict[int, Link], timeout: float) -> list[int]:
        return select.select(list(links), [], [], max(0.0, timeout))[0]
