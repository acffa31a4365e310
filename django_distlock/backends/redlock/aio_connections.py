"""The same for the tasks of one event loop: one connection per node, which all of them share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from ...utils.clock import clock
from ..common.timing import Timing
from ..redis.breaker import ServerBreaker
from ..redis.config import Location
from ..redis.credentials import take_new_login
from ..redis.timers import RunningFor
from .messages import (
    MAX_PENDING,
    NOT_ASKED,
    SCRIPT_LOADS,
    Closed,
    ConnectWait,
    Exchange,
    FanOut,
    Limits,
    Message,
    NodeState,
    NodeSteps,
    T,
    all_settled,
    time_out,
)

LATE_LOOKS = 5  # rounds of the loop in which it reads replies that came while it was blocked


class AsyncNode(NodeState):
    """One server. Replies come in the order of the messages, whichever task sent them."""

    def __init__(self, location: Location, breaker: ServerBreaker, timing: Timing) -> None:
        super().__init__(breaker, timing)
        self.location = location
        self.connection: Any = None
        self._reader: asyncio.Task[Exception] | None = None
        self._pending: deque[Exchange] = deque()
        self.connecting: asyncio.Task[None] | None = None

    @property
    def unresponsive_for(self) -> float:
        """Seconds since the oldest message without a reply was sent."""
        return clock() - self._pending[0].sent_at if self._pending else 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether it is silent for longer than any of the tasks waits that share the connection."""
        longest = max((exchange.timeout for exchange in self._pending if not exchange.is_settled), default=0.0)
        return self.unresponsive_for > longest

    def is_ready(self, timeout: float, *, urgent: bool) -> bool:
        """Whether a reply can be expected; with ``urgent`` also if one is overdue."""
        if self.connection is None:
            return False
        if self.unresponsive_for > self._timing.node_unresponsive_after:
            self.close_with_undo(self.hangs(self.unresponsive_for))
            return False
        if self.unresponsive_for < timeout:
            return True
        self.failure = TimeoutError(f"no answer for {self.unresponsive_for:.2f} s")
        return urgent and len(self._pending) < MAX_PENDING

    def send(self, message: Message, sent_at: float) -> Exchange:
        if self.connection.new_login and (login := take_new_login(self.connection)):
            self.send(Message(login.packed, 1), sent_at)
        exchange = Exchange(message.replies, sent_at, self.connection)
        self._pending.append(exchange)
        # Not by send_packed_command, which may suspend: messages must be sent in the order of ``pending``.
        self.connection._writer.write(message.packed)  # noqa: SLF001 - see above
        return exchange

    def should_wait(self, since: float, limits: Limits) -> bool:
        return (limits.retry_refused or self.connection is None) and super().should_wait(since, limits)

    @property
    def connecting_count(self) -> int:
        return int(self.connecting is not None and not self.connecting.done())

    def connect(self) -> None:
        self.connecting_since = clock()
        self.connecting = asyncio.create_task(self._connect(), name=f"distlock-connect-{self.location.text}")

    async def _connect(self) -> None:
        if asyncio.current_task() is not self.connecting:
            return  # its caller was interrupted, and another one connects anew
        connection, began = None, clock()
        try:
            connection = await self.location.aconnected()
            async with RunningFor(self.location.arguments["socket_timeout"]):
                await connection.send_packed_command([b"".join(SCRIPT_LOADS)], check_health=False)
                for _ in SCRIPT_LOADS:
                    await connection.read_response(disable_decoding=True)
            self._reader = reader = asyncio.create_task(
                self._read(connection), name=f"distlock-read-{self.location.text}"
            )
            await asyncio.sleep(0)  # a task that is cancelled before it has begun closes nothing
            if reader.done():
                raise reader.result()
        except Exception as error:  # raised to all callers of the node
            if connection is not None:
                await connection.disconnect(nowait=True)
            self.connecting_failed(began, error)
        except BaseException:
            if connection is not None:
                await connection.disconnect(nowait=True)
            raise
        else:
            self.connection = connection
            self.connected()

    async def _read(self, connection: Any) -> Exception:
        """Returns why the connection has ended."""
        try:
            while True:
                try:
                    reply = await connection.read_response(disable_decoding=True)
                except NoScriptError:
                    raise  # the node forgot our scripts; a new connection brings them
                except ResponseError as error:
                    reply = error
                self._take(reply)
        except (RedisError, OSError) as error:
            self._lose(error, connection)
            return error
        finally:
            self._lose(Closed("the loop ends"), connection)
            await connection.disconnect(nowait=True)

    def _take(self, reply: object) -> None:
        if not self._pending:
            raise ConnectionError("a reply to nothing")
        if self._pending[0].take(reply):
            self._pending.popleft()
            self.failure = None

    def close_with_undo(self, error: Exception) -> None:
        """Send commands that undo the pending messages, behind them, in case the node wakes up and executes these."""
        if self.connection is not None:
            for undo in [exchange.undo_message() for exchange in self._pending if exchange.undo_message]:
                self.send(undo, clock())
            self._lose(error, self.connection)
        for task in self.tasks:
            task.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in (self._reader, self.connecting) if task and not task.done()]

    def _lose(self, error: Exception, connection: Any) -> None:
        if self.connection is connection:
            self.connection = None
            while self._pending:
                self._pending.popleft().lose(error)


class AsyncNodes:
    """All nodes of a backend, for the tasks of one event loop."""

    ending: AsyncIterator[None]  # kept here, because the loop itself has only a weak reference

    def __init__(
        self, locations: Sequence[Location], breakers: Sequence[ServerBreaker], majority: int, timing: Timing
    ) -> None:
        self._majority, self._timing = majority, timing
        self._nodes = [AsyncNode(*server, timing) for server in zip(locations, breakers, strict=True)]
        self._running = 0
        self._keeps = True  # connections for the next call

    async def arun(self, steps: NodeSteps[T], limits: Limits) -> T:
        """As ``Nodes.run``. Tasks share the connections of their loop, so no task waits until one is free."""
        self._running += 1
        try:
            ready = await self._ready(limits)
            fan_out = next(steps)
            while True:
                fan_out = steps.send(await self._send(ready, fan_out, limits.timeout))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()
            self._running -= 1
            if not self._keeps:
                await self._close_idle()

    async def _send(self, ready: Sequence[bool], fan_out: FanOut, timeout: float) -> list[Exchange]:
        done = asyncio.get_running_loop().create_future()
        exchanges: list[Exchange] = []
        sent_at = clock()

        def check() -> None:
            if not done.done() and fan_out.enough(exchanges):
                done.set_result(True)

        for number, (node, is_ready) in enumerate(zip(self._nodes, ready, strict=True)):
            message = fan_out.message(number, node.connection)
            if message is None:
                exchanges.append(NOT_ASKED)
            elif not is_ready or node.connection is None:
                exchanges.append(node.unasked(message, sent_at))
            else:
                exchange = node.send(message, sent_at)
                exchange.notify, exchange.timeout = check, timeout
                exchanges.append(exchange)
        if all_settled(exchanges) or fan_out.enough(exchanges):
            return exchanges
        late = asyncio.get_running_loop().call_later(timeout, _settle, done)
        try:
            if not await done:
                for _ in range(LATE_LOOKS):
                    await asyncio.sleep(0)  # the loop was blocked; replies that have come already count
                time_out(exchanges, timeout)
        finally:
            late.cancel()
            for exchange in exchanges:
                if exchange is not NOT_ASKED:
                    exchange.notify = None
        return exchanges

    async def _ready(self, limits: Limits) -> list[bool]:
        """For each node, whether a reply can be expected."""
        ready = [node.is_ready(limits.timeout, urgent=limits.urgent) for node in self._nodes]
        if all(ready):
            return ready
        connect_wait = ConnectWait(self._majority, limits.connect_timeout, self._timing, limits)
        while True:
            missing = [node for node, is_ready in zip(self._nodes, ready, strict=True) if not is_ready]
            often, anyway = sum(ready) < self._majority, limits.despite_outage
            for node in missing:
                if node.connection is None and node.may_connect(1, lacks_majority=often, despite_outage=anyway):
                    node.connect()
            if (seconds := connect_wait.seconds(sum(ready), missing)) <= 0:
                return ready
            connecting = [node.connecting for node in missing if node.is_connecting and node.connecting]
            if connecting:
                await asyncio.wait(connecting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(seconds)
            ready = [node.is_ready(limits.timeout, urgent=limits.urgent) for node in self._nodes]

    async def areset(self) -> None:
        """Close connections with overdue replies, because they may have died unnoticed."""
        for node in self._nodes:
            if node.is_overdue:
                node.close_with_undo(TimeoutError(f"no answer for {node.unresponsive_for:.2f} s"))

    async def aclose(self) -> None:
        """The loop ends. Tasks that end with it may still ask, and close the connections that they used."""
        self._keeps = False
        await self._close_idle()

    async def _close_idle(self) -> None:
        if self._running:
            return
        tasks = [task for node in self._nodes for task in node.tasks]
        for node in self._nodes:
            node.close_with_undo(Closed("closed"))
        await asyncio.gather(*tasks, return_exceptions=True)


def _settle(done: asyncio.Future[bool]) -> None:
    if not done.done():
        done.set_result(False)
