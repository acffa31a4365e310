"""Which server is the master: what the sentinels of a service say when a connection opens, and once a second."""

from __future__ import annotations

import logging
import threading
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
from ....utils.text import printable
from ....utils.threads import Worker
from ....utils.wakeup import WakeEvent
from ..config import Location
from ..connection import RunningFor, hang_up, read_by
from ..errors import NoMaster, NoSentinel, SentinelRefusal, UnknownService, is_transient
from ..scripts import pack

logger = logging.getLogger("django_distlock")

FRESH = 0.1  # seconds for which what one found is true for others; less than the pause before another attempt
LOOK = 1.0  # seconds between questions to the sentinels while connections are in use
IDLE = 20.0  # seconds without a command after which nobody asks any more


class Master(NamedTuple):
    """``epoch`` grows with every failover: a sentinel that was cut off tells of a smaller one.

    ``is_anew``: so do all, because they were set up anew.
    """

    host: str
    port: int
    epoch: int
    is_anew: bool = False

    def __str__(self) -> str:
        return printable(f"{self.host}:{self.port}")


class Found(NamedTuple):
    """By a search that lasted so many seconds at most."""

    outcome: Master | ConnectionError
    at: float
    within: float

    def serves(self, within: float) -> bool:
        """Whether it is true for one that may last so long. Silence counts for those who would wait not much longer."""
        is_enough = within < 2 * self.within or isinstance(self.outcome, Master | NoMaster)
        return is_enough and clock() - self.at < FRESH

    def told(self) -> Master:
        if isinstance(self.outcome, Exception):
            raise type(self.outcome)(*self.outcome.args) from self.outcome.__cause__
        return self.outcome


Reply = list[Any] | Exception  # of a sentinel, to both questions


class Questions:
    """What a sentinel is asked about a service, and the pause of those who wait for what others find."""

    def __init__(self, service: str) -> None:
        # The first knows a new master earlier, the second has its state and epoch.
        questions = ("GET-MASTER-ADDR-BY-NAME", "MASTER")
        self._packed = b"".join(pack("SENTINEL", question, service) for question in questions)

    def ask(self, sentinel: Location, seconds: float) -> Reply:
        """Over a connection of its own, in so many seconds."""
        connection, by = None, clock() + seconds
        try:
            connection = sentinel.connected(within=seconds)
            return self.ask_on(connection, by)
        except (RedisError, OSError) as error:
            return error
        finally:
            if connection is not None:
                connection.disconnect()

    async def aask(self, sentinel: Location, seconds: float) -> Reply:
        connection, by = None, clock() + seconds
        try:
            connection = await sentinel.aconnected(within=seconds)
            async with RunningFor(max(0.0, by - clock()), "Timeout reading from socket"):
                return await self._aask_on(connection)
        except (RedisError, OSError) as error:
            return error
        finally:
            if connection is not None:
                await hang_up(connection)

    def ask_on(self, connection: Any, by: float) -> list[Any]:
        connection.send_packed_command([self._packed], check_health=False)
        replies: list[Any] = []
        while len(replies) < 2:
            try:
                replies.append(read_by(connection, by))
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

    def pause(self, event: WakeEvent, seconds: float) -> bool:
        return event.wait(seconds)

    async def apause(self, event: WakeEvent, seconds: float) -> bool:
        return await event.await_set(seconds)


class Sentinels:
    """The sentinels of one service. One that was of no help is asked last the next time.

    ``master``: where connections lead, the last server that a sentinel named. Connections that were marked with
    another one are to be left. None while nobody uses them: then nobody asks whether the master has moved either.
    """

    def __init__(self, service: str, locations: Sequence[Location]) -> None:
        self.service = service
        self.locations = tuple(locations)
        self._questions = Questions(service)
        self._watch = Worker(f"distlock-sentinels-{service}", self._look)
        self._begin()
        fork.in_child(self._begin)

    def _begin(self) -> None:
        """Also in a forked child, which asks anew over lines of its own."""
        self.master: Master | None = None
        self.used_at = 0.0  # when a command was last sent to the master
        self._order = deque(self.locations)
        self._named_by: Location | None = None
        self._found: Found | None = None
        self._searcher: WakeEvent | None = None  # of the thread or task that asks
        self._waiting: list[WakeEvent] = []  # of those who share what it finds
        self._guard = threading.RLock()  # a signal handler may ask while this very thread is inside
        self._lines: dict[str, Any] = {}  # of the watch, to sentinels
        self._round = deque(self.locations)
        self._named: dict[str, Master | None] = {}  # in this round of the watch, by whom; None: no answer

    def find(self, within: float) -> Master:
        """The master by what the sentinels say, in so many seconds."""
        return drive(self._shared_search(within), self._questions)

    async def afind(self, within: float) -> Master:
        return await adrive(self._shared_search(within), self._questions)

    def confirm(self, master: Master) -> Master:
        """That server says so, too. Returns what to mark connections to it with.

        Raises NoMaster if a later failover became known meanwhile.
        """
        self.used_at = clock()
        with self._guard:
            confirmed = self.master
            if confirmed is None or confirmed[:2] != master[:2]:
                if confirmed and master.epoch < confirmed.epoch and not master.is_anew:
                    raise NoMaster(f"{master} is not the master any more: {confirmed} is")
                self._move_to(confirmed := master)
        self._watch.nudge(clock() + LOOK)
        return confirmed

    def doubt(self) -> None:
        """The server that was named is of no use: another sentinel is asked first the next time."""
        if self._named_by is not None:
            self._ask_last(self._named_by)

    def close(self) -> None:
        self.used_at = -IDLE
        if self._lines:
            self._watch.nudge()

    def _shared_search(self, within: float) -> Steps[Master]:
        """Who comes while others search shares what they find. Makes the calls of ``Questions``."""
        within = min(within, sum(map(_timeout, self.locations)))
        by, event, is_late = clock() + within, WakeEvent(), False
        while True:
            with self._guard:
                if self._found and self._found.serves(within):
                    return self._found.told()
                if self._searcher is None or is_late:
                    self._searcher = event
                    break
                self._waiting.append(event)
            is_late = not (yield Call("pause", (event, (by - clock()) / 2)))
        try:
            found = yield from self._search(by)
            self._found = Found(found, clock(), within)
        except ConnectionError as error:
            self._found = Found(error, clock(), within)
            raise
        finally:
            with self._guard:
                if self._searcher is event:
                    self._searcher = None
                waiting, self._waiting = self._waiting, []
            for other in waiting:
                other.set()
        return found

    def _search(self, by: float) -> Steps[Master]:
        problems: list[Exception] = []
        outdated: list[Master] = []
        order = list(self._order)
        for number, sentinel in enumerate(order, 1):
            left = by - clock()
            share = left / 2 if number < len(order) else left  # most often the first one answers
            told = self._told(sentinel, (yield Call("ask", (sentinel, max(0.01, min(_timeout(sentinel), share))))))
            if isinstance(told, Exception):
                problems.append(told)
                self._ask_last(sentinel)
            elif (known := self.master) and told.epoch < known.epoch:
                outdated.append(told)
            else:
                self._named_by = sentinel
                return told
        if outdated:  # by all that answer
            return max(outdated, key=lambda master: master.epoch)._replace(is_anew=True)
        raise _worst(problems)

    def _told(self, sentinel: Location, reply: Reply) -> Master | Exception:
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
        is_described = [about[b"ip"], about[b"port"]] == address  # else a failover is about to end
        if is_described and {b"s_down", b"o_down"} & set(about[b"flags"].split(b",")):
            return NoMaster(f"{sentinel.text}: the master {address[0].decode()}:{int(address[1])} is down")
        return Master(address[0].decode(), int(address[1]), int(about[b"config-epoch"]))

    def _ask_last(self, sentinel: Location) -> None:
        with self._guard:
            self._order.remove(sentinel)
            self._order.append(sentinel)

    def _move_to(self, master: Master) -> None:
        if self.master and self.master[:2] != master[:2]:
            logger.warning("The master of %r is %s now, no longer %s", self.service, master, self.master)
        self.master = master
        self._named.clear()

    # In the thread of the watch

    def _look(self) -> float | None:
        """Ask one after the other, so that one which is cut off together with an old master hides no failover."""
        with self._guard:
            if is_unused := clock() - self.used_at > IDLE:
                self.master = None
        if is_unused:
            while self._lines:
                self._lines.popitem()[1].disconnect()
            return None
        sentinel = self._round[0]
        self._round.rotate(-1)
        told: Master | Exception
        try:
            if sentinel.text not in self._lines:
                self._lines[sentinel.text] = sentinel.connected()
            told = self._told(
                sentinel, self._questions.ask_on(self._lines[sentinel.text], clock() + _timeout(sentinel))
            )
        except (RedisError, OSError) as error:
            told = error
            if line := self._lines.pop(sentinel.text, None):
                line.disconnect()
        with self._guard:
            self._named[sentinel.text] = told if isinstance(told, Master) else None
            if isinstance(told, Master) and self.master and (told.epoch > self.master.epoch or self._are_set_up_anew()):
                self._move_to(told)
        return clock() + LOOK

    def _are_set_up_anew(self) -> bool:
        """Whether in a whole round most named the same other server and none this one. Epochs begin at 0 then."""
        addresses = [named[:2] for named in self._named.values() if named]
        return (
            len(self._named) == len(self.locations)
            and len(set(addresses)) == 1
            and 2 * len(addresses) > len(self.locations)
            and self.master is not None
            and self.master[:2] not in addresses
        )


def _worst(problems: Sequence[Exception]) -> ConnectionError:
    """What to report when no sentinel names a master: what one says that answers counts more than silence."""
    kinds: tuple[type[ConnectionError], ...] = (NoMaster, SentinelRefusal, UnknownService, NoSentinel)
    kind = next(kind for kind in kinds if any(isinstance(problem, kind) for problem in problems))
    worst = kind("; ".join(map(str, problems)))
    if not any(map(is_transient, problems)):
        worst.__cause__ = problems[0]  # tells that it is final, too
    return worst


def _timeout(sentinel: Location) -> float:
    """Seconds that it has for its answer, and for a connection."""
    return float(max(sentinel.arguments["socket_timeout"], sentinel.arguments["socket_connect_timeout"]))
