"""A connection to each node, for one thread at a time: a round is sent to all, then read from whoever answers first."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from ...utils.clock import clock
from ..redis.wire import IDLE_TRUSTED
from .asking import GIVEN_UP, MOST_AWAITED, NOT_ASKED, Asked, Contact, NotYetConnected, Request, Round, time_out


class Link:
    """One connection to one node, used by one thread at a time. Replies come in the order of the requests.

    A reply that nobody waited for is read before the next one: the link remembers what is awaited on it.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.fileno: int = connection._sock.fileno()  # redis-py has no public way to poll many connections
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

    def send(self, request: Request, at: float) -> Asked:
        asked = Asked(request.replies, at, self)
        self.awaited.append(asked)
        try:
            self.connection.send_packed_command([request.packed], check_health=False)
        except (RedisError, OSError) as error:
            self.fail(error)
        return asked

    def read(self) -> None:
        """Take the replies that have come, at least one: it is known to be there."""
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


class Lineup:
    """One link to each node, or None where there is none just now, for one thread at a time."""

    def __init__(self, nodes: Sequence[Contact]) -> None:
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
        request = round_.request(number, link)
        if request is None:
            return NOT_ASKED
        if link is None:
            return Asked(request.replies, at, failure=self._nodes[number].failure or NotYetConnected())
        if link.awaited and not link.is_ready(patience, urgent=urgent):
            return Asked(request.replies, at, failure=TimeoutError(f"no answer for {link.silent_for:.2f} s"))
        asked = link.send(request, at)
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

    def refresh(self) -> None:
        """Read what came while nobody waited; notice which connections ended, and which nodes keep silent too long."""
        waits = any(link and link.awaited for link in self.links)
        if waits or clock() - self._used_at > IDLE_TRUSTED:
            self._read(0.0)
        if waits:
            for number, link in enumerate(self.links):
                if link and link.silent_for > GIVEN_UP:
                    self._nodes[number].failure = failure = TimeoutError(f"no answer for {link.silent_for:.1f} s")
                    link.give_up(failure)
                    self._leave_out(number, link)

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
