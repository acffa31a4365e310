"""Finds the master: asks the sentinels of a service when a connection opens, and once a second."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from ....utils import fork
from ....utils.clock import clock
from ....utils.drive import Call, Steps, adrive, drive
from ....utils.events import about_event
from ....utils.guards import new_guard
from ....utils.text import printable
from ....utils.threads import Worker
from ....utils.wakeup import WakeEvent
from ...common.timing import Timing
from ..config import Location
from ..connection import hang_up
from ..errors import NoMaster, NoSentinel, SentinelRefusal, UnknownService, is_transient, without_traceback
from ..exchange import read_by
from ..scripts import pack
from ..timers import RunningFor

logger = logging.getLogger("django_distlock")


class Master(NamedTuple):
    """``epoch`` grows with every failover; a sentinel that was cut off has a smaller one.

    ``is_reset``: most sentinels have a smaller epoch, because they were set up anew.
    """

    host: str
    port: int
    epoch: int
    is_reset: bool = False

    def __str__(self) -> str:
        return printable(f"{self.host}:{self.port}")


class SearchResult(NamedTuple):
    """The result of a search that lasted at most ``timeout`` seconds."""

    result: Master | ConnectionError
    at: float
    timeout: float

    def is_valid_for(self, timeout: float, kept: float) -> bool:
        """Whether it also counts for a search with that timeout; ``kept``: seconds for which it does.

        "No sentinel answered" counts for others that would not wait much longer.
        """
        is_enough = timeout < 2 * self.timeout or isinstance(self.result, Master | NoMaster)
        return is_enough and clock() - self.at < kept

    def get(self) -> Master:
        if isinstance(self.result, Exception):
            raise without_traceback(self.result)
        return self.result


SentinelReply = list[Any] | Exception  # the replies to both questions


class SentinelClient:
    """Asks a sentinel about a service, for threads and tasks; also waits for a search of others."""

    def __init__(self, service: str) -> None:
        # The first reply knows a new master earlier, the second one has its state and epoch.
        questions = ("GET-MASTER-ADDR-BY-NAME", "MASTER")
        self._packed = b"".join(pack("SENTINEL", question, service) for question in questions)

    def ask(self, sentinel: Location, timeout: float) -> SentinelReply:
        """Over a new connection."""
        connection, deadline = None, clock() + timeout
        try:
            connection = sentinel.connected(timeout=timeout)
            return self.ask_on(connection, deadline)
        except (RedisError, OSError) as error:
            return error
        finally:
            if connection is not None:
                connection.disconnect()

    async def aask(self, sentinel: Location, timeout: float) -> SentinelReply:
        connection, deadline = None, clock() + timeout
        try:
            connection = await sentinel.aconnected(timeout=timeout)
            async with RunningFor(max(0.0, deadline - clock())):
                return await self._aask_on(connection)
        except (RedisError, OSError) as error:
            return error
        finally:
            if connection is not None:
                await hang_up(connection)

    def ask_on(self, connection: Any, deadline: float) -> list[Any]:
        connection.send_packed_command([self._packed], check_health=False)
        replies: list[Any] = []
        while len(replies) < 2:
            try:
                replies.append(read_by(connection, deadline))
            except ResponseError as error:
                replies.append(error)
        return replies

    async def _aask_on(self, connection: Any) -> list[Any]:
        await connection.send_packed_command([self._packed], check_health=False)
        replies: list[Any] = []
        while len(replies) < 2:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except ResponseError as error:
                replies.append(error)
        return replies

    def wait_for(self, event: WakeEvent, timeout: float) -> bool:
        return event.wait(timeout)

    async def await_for(self, event: WakeEvent, timeout: float) -> bool:
        return await event.await_set(timeout)


class Sentinels:
    """The sentinels of one service. A sentinel that was of no help is asked last the next time.

    ``master``: the last server that a sentinel named, to which connections lead. Connections to another server are
    closed when they are used next. None while there are no commands; then nobody asks the sentinels either.
    """

    def __init__(self, service: str, locations: Sequence[Location], timing: Timing) -> None:
        self.service = service
        self.locations = tuple(locations)
        self._timing = timing
        self._client = SentinelClient(service)
        self._poller = Worker(f"distlock-sentinels-{service}", self._poll)
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self.master: Master | None = None
        self.used_at = 0.0  # when a command was last sent to the master
        self._order = list(self.locations)  # replaced, never changed: other threads read it
        self._named_by: Location | None = None
        self._last_search: SearchResult | None = None
        self._searcher: WakeEvent | None = None  # of the thread or task that asks
        self._waiting: list[WakeEvent] = []  # of others that share the result
        self._guard = new_guard()  # a signal handler may ask while this very thread is inside
        self._connections: dict[str, Any] = {}  # of the poller, to sentinels
        self._poll_order = deque(self.locations)
        self._polled: dict[str, Master | None] = {}  # the master that each sentinel last named; None: none

    def find(self, timeout: float) -> Master:
        """The master that the sentinels name."""
        return drive(self._shared_search(timeout), self._client)

    async def afind(self, timeout: float) -> Master:
        return await adrive(self._shared_search(timeout), self._client)

    def confirm(self, master: Master) -> Master:
        """The server itself says that it is the master. Returns the mark for connections to it.

        Raises NoMaster if a later failover became known meanwhile.
        """
        self.used_at = clock()
        with self._guard:
            confirmed = self.master
            if confirmed is None or confirmed[:2] != master[:2]:
                if confirmed and master.epoch < confirmed.epoch and not master.is_reset:
                    raise NoMaster(f"{master} is not the master any more: {confirmed} is")
                self._move_to(confirmed := master)
        self._poller.nudge(clock() + self._timing.sentinel_interval)
        return confirmed

    def report_failure(self) -> None:
        """The server that was named is of no use: ask another sentinel first the next time."""
        if self._named_by is not None:
            self._ask_last(self._named_by)

    def close(self) -> None:
        self.used_at = -self._timing.sentinel_idle
        if self._connections:
            self._poller.nudge()

    def _shared_search(self, timeout: float) -> Steps[Master]:
        """A search, which callers that come meanwhile share. Yields calls of ``SentinelClient``."""
        timeout = min(timeout, sum(map(_timeout_of, self.locations)))
        deadline, event, is_late = clock() + timeout, WakeEvent(), False
        while True:
            with self._guard:
                if self._last_search and self._last_search.is_valid_for(timeout, self._timing.search_kept):
                    return self._last_search.get()
                if self._searcher is None or is_late:
                    self._searcher = event
                    break
                self._waiting.append(event)
            is_late = not (yield Call("wait_for", (event, (deadline - clock()) / 2)))
        try:
            master = yield from self._search(deadline)
            self._last_search = SearchResult(master, clock(), timeout)
        except ConnectionError as error:
            self._last_search = SearchResult(without_traceback(error), clock(), timeout)
            raise
        finally:
            with self._guard:
                if self._searcher is event:
                    self._searcher = None
                waiting, self._waiting = self._waiting, []
            for other in waiting:
                other.set()
        return master

    def _search(self, deadline: float) -> Steps[Master]:
        problems: list[Exception] = []
        outdated: list[Master] = []
        order = self._order
        for number, sentinel in enumerate(order, 1):
            left = deadline - clock()
            share = left / 2 if number < len(order) else left  # usually the first one answers
            timeout = max(0.01, min(_timeout_of(sentinel), share))
            named = self._named_in(sentinel, (yield Call("ask", (sentinel, timeout))))
            if isinstance(named, Exception):
                problems.append(named)
                self._ask_last(sentinel)
            elif (known := self.master) and named.epoch < known.epoch:
                outdated.append(named)
                problems.append(NoMaster(f"{sentinel.text}: {known} took over from {named} before"))
            else:
                self._named_by = sentinel
                return named
        if 2 * len(outdated) > len(self.locations):  # they were set up anew; a few may be cut off
            return max(outdated, key=lambda master: master.epoch)._replace(is_reset=True)
        raise _most_telling(problems)

    def _named_in(self, sentinel: Location, reply: SentinelReply) -> Master | Exception:
        """The master that the reply names, or the reason why it names none."""
        if isinstance(reply, AuthenticationError | NoPermissionError):
            return SentinelRefusal(f"{sentinel.text}: {reply}")
        if isinstance(reply, Exception):
            silence = NoSentinel(f"{sentinel.text}: {reply}")
            silence.__cause__ = reply
            return silence
        address, described = reply
        for part in reply:
            if isinstance(part, NoPermissionError):
                return SentinelRefusal(f"{sentinel.text}: {part}")
        if address is None or isinstance(described, ResponseError):
            return UnknownService(f"{sentinel.text} watches no master {self.service!r}")
        about = dict(zip(described[::2], described[1::2], strict=True))
        is_described = [about[b"ip"], about[b"port"]] == address  # otherwise a failover is about to end
        if is_described and {b"s_down", b"o_down"} & set(about[b"flags"].split(b",")):
            return NoMaster(f"{sentinel.text}: the master {address[0].decode()}:{int(address[1])} is down")
        return Master(address[0].decode(), int(address[1]), int(about[b"config-epoch"]))

    def _ask_last(self, sentinel: Location) -> None:
        with self._guard:
            self._order = [*(one for one in self._order if one is not sentinel), sentinel]

    def _move_to(self, master: Master) -> None:
        if self.master and self.master[:2] != master[:2]:
            logger.warning(
                "The master of %r is %s now, no longer %s", self.service, master, self.master,
                extra=about_event("master-changed", service=self.service),
            )  # fmt: skip
        self.master = master
        self._polled.clear()

    # In the thread of the poller

    def _poll(self) -> float | None:
        """Ask the sentinels in turn, so that one which is cut off together with an old master hides no failover."""
        with self._guard:
            if is_unused := clock() - self.used_at > self._timing.sentinel_idle:
                self.master = None
        if is_unused:
            while self._connections:
                self._connections.popitem()[1].disconnect()
            return None
        sentinel = self._poll_order[0]
        self._poll_order.rotate(-1)
        named: Master | Exception
        try:
            if (known := self._connections.get(sentinel.text)) and known.new_login:
                self._connections.pop(sentinel.text).disconnect()
            if sentinel.text not in self._connections:
                self._connections[sentinel.text] = sentinel.connected()
            reply = self._client.ask_on(self._connections[sentinel.text], clock() + _timeout_of(sentinel))
            named = self._named_in(sentinel, reply)
        except (RedisError, OSError) as error:
            named = error
            if connection := self._connections.pop(sentinel.text, None):
                connection.disconnect()
        with self._guard:
            self._polled[sentinel.text] = named if isinstance(named, Master) else None
            if isinstance(named, Master) and self.master and (named.epoch > self.master.epoch or self._were_reset()):
                self._move_to(named)
        return clock() + self._timing.sentinel_interval

    def _were_reset(self) -> bool:
        """Whether all were polled, most named the same other server, and none this one. Then epochs begin at 0."""
        addresses = [named[:2] for named in self._polled.values() if named]
        return (
            len(self._polled) == len(self.locations)
            and len(set(addresses)) == 1
            and 2 * len(addresses) > len(self.locations)
            and self.master is not None
            and self.master[:2] not in addresses
        )


def _most_telling(problems: Sequence[Exception]) -> ConnectionError:
    """The error if no sentinel names a master. An answer counts more than silence.

    But a sentinel that knows no such master may have lost its memory: it counts only if fewer sentinels are silent.
    """
    kinds: list[type[ConnectionError]] = [NoMaster, SentinelRefusal, UnknownService, NoSentinel]
    unknown, silent = (sum(isinstance(one, kind) for one in problems) for kind in (UnknownService, NoSentinel))
    if unknown <= silent:
        kinds.remove(UnknownService)
    kind = next(kind for kind in kinds if any(isinstance(problem, kind) for problem in problems))
    error = kind("; ".join(map(str, problems)))
    if not any(map(is_transient, problems)):
        error.__cause__ = problems[0]  # so that it is final as well
    return error


def _timeout_of(sentinel: Location) -> float:
    """Seconds for its answer, and for a connection."""
    return float(max(sentinel.arguments["socket_timeout"], sentinel.arguments["socket_connect_timeout"]))
