"""The same for the tasks of one event loop: one connection per node, on which all of them ask."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from ...utils.clock import clock
from ..redis.config import Location
from ..redis.connection import RunningFor
from .messages import (
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
    time_out,
)

LATE_LOOKS = 5  # rounds of the loop in which it reads what came while it was blocked


class AsyncNode(NodeState):
    """One server. Replies come in the order of the requests, whoever sent them."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.connection: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._awaited: deque[Asked] = deque()
        self.connecting: asyncio.Task[None] | None = None

    @property
    def silent_for(self) -> float:
        """Seconds since the oldest request that is not answered."""
        return clock() - self._awaited[0].sent_at if self._awaited else 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether it was silent for longer than anybody's patience: the tasks of a loop share the connection."""
        longest = max((asked.patience for asked in self._awaited if not asked.is_settled), default=0.0)
        return self.silent_for > longest

    def is_ready(self, patience: float, *, urgent: bool) -> bool:
        """Whether an answer can be expected; with ``urgent`` also where one is overdue."""
        if self.connection is None:
            return False
        if self.silent_for > GIVEN_UP:
            self.failure = TimeoutError(f"no answer for {self.silent_for:.1f} s")
            self.end(self.failure)
            return False
        if self.silent_for < patience:
            return True
        self.failure = TimeoutError(f"no answer for {self.silent_for:.2f} s")
        return urgent and len(self._awaited) < MOST_AWAITED

    def send(self, message: Message, at: float) -> Asked:
        asked = Asked(message.replies, at, self.connection)
        self._awaited.append(asked)
        # Not by send_packed_command, which may suspend: the order of requests must be the order of what is awaited.
        self.connection._writer.write(message.packed)  # noqa: SLF001 - see above
        return asked

    def may_come(self, since: float, *, persists: bool) -> bool:
        return (persists or self.connection is None) and super().may_come(since, persists=persists)

    @property
    def openings(self) -> int:
        return int(self.connecting is not None and not self.connecting.done())

    def connect(self) -> None:
        self.connecting_since = clock()
        self.connecting = asyncio.create_task(self._connect(), name=f"distlock-connect-{self.location.text}")

    async def _connect(self) -> None:
        if asyncio.current_task() is not self.connecting:
            return  # who began it was interrupted, and another one begins anew
        connection = None
        try:
            connection = await self.location.aconnected()
            async with RunningFor(self.location.arguments["socket_timeout"], "Timeout reading from socket"):
                await connection.send_packed_command([b"".join(LOADS)], check_health=False)
                for _ in LOADS:
                    await connection.read_response(disable_decoding=True)
        except Exception as error:  # told to whoever asks the node
            if connection is not None:
                await connection.disconnect(nowait=True)
            self.fail(error)
        except BaseException:
            if connection is not None:
                await connection.disconnect(nowait=True)
            raise
        else:
            self.connection = connection
            self._reader = asyncio.create_task(self._read(connection), name=f"distlock-read-{self.location.text}")
            self.failure = None

    async def _read(self, connection: Any) -> None:
        try:
            while True:
                try:
                    reply = await connection.read_response(disable_decoding=True)
                except NoScriptError:
                    raise  # the node forgot our scripts; a new connection brings them
                except ResponseError as error:
                    reply = error
                if not self._awaited:
                    raise ConnectionError("a reply to nothing")
                if self._awaited[0].take(reply):
                    self._awaited.popleft()
                    self.failure = None
        except (RedisError, OSError) as error:
            self._lose(error, connection)
        finally:
            self._lose(ConnectionError("the loop ends"), connection)
            await connection.disconnect(nowait=True)

    def end(self, error: Exception) -> None:
        """Close the connection; should the node wake up and execute what it was sent, the remedy is behind that."""
        if self.connection is not None:
            for remedy in [asked.remedy() for asked in self._awaited if asked.remedy]:
                self.send(remedy, clock())
            self._lose(error, self.connection)
        for task in self.tasks:
            task.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for task in (self._reader, self.connecting) if task and not task.done()]

    def _lose(self, error: Exception, connection: Any) -> None:
        if self.connection is connection:
            self.connection = None
            while self._awaited:
                self._awaited.popleft().fail(error)


class AsyncNodes:
    """All nodes of a backend, for the tasks of one event loop."""

    ending: AsyncIterator[None]  # held here because the loop itself keeps no more than a weak reference

    def __init__(self, locations: Sequence[Location], majority: int) -> None:
        self._majority = majority
        self._nodes = [AsyncNode(location) for location in locations]
        self._running = 0
        self._keeps = True  # connections for the next call

    async def arun(
        self,
        steps: NodeSteps,
        patience: float,
        within: float,
        *,
        urgent: bool = False,
        persists: bool = False,
        queues_until: float = -inf,
    ) -> Any:
        """As ``Nodes.run``; tasks share the connections of their loop, so none waits until one is free."""
        self._running += 1
        try:
            ready = await self._ready(patience, urgent, within, persists)
            round_ = next(steps)
            while True:
                round_ = steps.send(await self._ask(ready, round_, patience))
        except StopIteration as end:
            return end.value
        finally:
            steps.close()
            self._running -= 1
            if not self._keeps:
                await self._close_idle()

    async def _ask(self, ready: Sequence[bool], round_: Round, patience: float) -> list[Asked]:
        heard = asyncio.get_running_loop().create_future()
        asked: list[Asked] = []
        at = clock()

        def check() -> None:
            if not heard.done() and round_.enough(asked):
                heard.set_result(True)

        for number, (node, is_ready) in enumerate(zip(self._nodes, ready, strict=True)):
            message = round_.message(number, node.connection)
            if message is None:
                asked.append(NOT_ASKED)
            elif not is_ready or node.connection is None:
                failure = node.failure or NotYetConnected()
                asked.append(Asked(message.replies, at, failure=failure))
            else:
                one = node.send(message, at)
                one.notify, one.patience = check, patience
                asked.append(one)
        if all(one.is_settled for one in asked) or round_.enough(asked):
            return asked
        late = asyncio.get_running_loop().call_later(patience, _settle, heard)
        try:
            if not await heard:
                for _ in range(LATE_LOOKS):
                    await asyncio.sleep(0)  # the loop was blocked: replies that are here already count
                time_out(asked, patience)
        finally:
            late.cancel()
            for one in asked:
                if one is not NOT_ASKED:
                    one.notify = None
        return asked

    async def _ready(self, patience: float, urgent: bool, within: float, persists: bool) -> list[bool]:
        ready = [node.is_ready(patience, urgent=urgent) for node in self._nodes]
        if all(ready):
            return ready
        arrival = ConnectWait(self._majority, within, persists=persists)
        while True:
            missing = [node for node, is_ready in zip(self._nodes, ready, strict=True) if not is_ready]
            for node in missing:
                if node.connection is None and node.may_connect(1, insist=sum(ready) < self._majority):
                    node.connect()
            if (left := arrival.wait(sum(ready), missing)) <= 0:
                return ready
            coming = [node.connecting for node in missing if node.is_connecting and node.connecting]
            if coming:
                await asyncio.wait(coming, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(left)
            ready = [node.is_ready(patience, urgent=urgent) for node in self._nodes]

    async def areset(self) -> None:
        """Close connections that owe an answer to nobody who is more patient: they may have died unnoticed."""
        for node in self._nodes:
            if node.is_overdue:
                node.end(TimeoutError(f"no answer for {node.silent_for:.2f} s"))

    async def aclose(self) -> None:
        """The loop ends. Others that end with it may still ask, and close what they used."""
        self._keeps = False
        await self._close_idle()

    async def _close_idle(self) -> None:
        if self._running:
            return
        tasks = [task for node in self._nodes for task in node.tasks]
        for node in self._nodes:
            node.end(ConnectionError("closed"))
        await asyncio.gather(*tasks, return_exceptions=True)


def _settle(heard: asyncio.Future[bool]) -> None:
    if not heard.done():
        heard.set_result(False)
