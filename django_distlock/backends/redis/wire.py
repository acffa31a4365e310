"""Commands to one server and their replies, over connections of redis-py, once for threads and once for asyncio.

redis-py's clients repeat a command by themselves when its reply is lost. A lock must know that, because
the lost command may still be executed, so commands are sent here with the repetition in sight.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, NoReturn

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    MaxConnectionsError,
    NoScriptError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from ...tickets import clock
from .commands import Command, pack
from .errors import AGAIN, NotServed, Unanswered, is_worth_waiting, unless_not_served
from .location import Location, hang_up
from .patience import clipped, exhausted, may_wait_on

IDLE_TRUSTED = 1.0  # seconds for which an idle connection is used again without a look at its socket


class Answer(NamedTuple):
    """``replies``: one per command, errors of the server among them. ``sent_at``: before the answered attempt.

    ``repeated``: an earlier attempt went unanswered; the server may execute it yet.
    """

    replies: list[Any]
    sent_at: float
    repeated: bool


NOTHING = Answer([], sent_at=0.0, repeated=False)


class Idle(NamedTuple):
    connection: Any
    since: float


def _to_repeat(commands: Sequence[Command], replies: Sequence[Any]) -> tuple[list[int], list[bytes]]:
    """After a server forgot its scripts: which commands to send again, and what to send for that."""
    forgotten = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    scripts = {script.sha: script for index in forgotten if (script := commands[index].script)}
    loads = [pack("SCRIPT", "LOAD", script.text) for script in scripts.values()]
    return forgotten, loads + [commands[index].packed for index in forgotten]


class Wire:
    """For threads. Opens at most ``most`` connections and waits nowhere longer than ``timeout`` seconds.

    ``send`` puts all commands on the wire at once and returns their replies; it tries twice, because an
    idle connection may have died unnoticed. Then it raises Unanswered, or redis-py's ConnectionError when
    there was no connection at all. ``within``: seconds for a connection and for an answer, where they are less
    than the timeout; a try that took so long is not repeated.

    Where another server may take over, or this one serves in a moment, it goes on trying for as long, or
    ``until`` a moment on ``clock()`` (None: open end) if the location has the patience.
    """

    insists = True  # tries again also after the whole timeout

    def __init__(self, location: Location, most: int, timeout: float) -> None:
        self._location = location
        self._most, self._timeout = most, timeout
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._idle: deque[Idle] = deque()
        weakref.finalize(self, _disconnect, self._idle).atexit = False
        # A permit per connection that may be in use; a queue in C is several times faster than a semaphore.
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(self._most):
            self._permits.put(None)

    def send(self, *commands: Command, within: float | None = None, until: float | None = 0.0) -> Answer:
        if not commands:
            return NOTHING
        if self._pid != os.getpid():
            self._start()  # a forked child must not talk on its parent's connections
        patience = self._timeout if within is None else min(within, self._timeout)
        permits, began, repeated, left = self._permits, clock(), False, patience
        while True:
            try:
                permits.get(timeout=left)
            except Empty:
                if not may_wait_on(self._location, began, until):
                    _fail(MaxConnectionsError(exhausted(self._most)), repeated)
            else:
                try:
                    return self._send(commands, left, began, repeated, until)
                except (RedisError, OSError, Unanswered) as error:
                    if not is_worth_waiting(error, self._location, began, patience, until):
                        raise
                    repeated = isinstance(error, Unanswered)
                finally:
                    permits.put(None)
                time.sleep(AGAIN)
            left = clipped(patience, until)

    def _send(
        self, commands: Sequence[Command], patience: float, began: float, repeated: bool, until: float | None
    ) -> Answer:
        is_second = False
        while True:
            sent_at, connection = clock(), None
            try:
                connection = self._connected(patience)
                replies = self._exchange(connection, [command.packed for command in commands], patience)
                if NoScriptError in map(type, replies):
                    forgotten, again = _to_repeat(commands, replies)
                    fresh = self._exchange(connection, again, patience)[-len(forgotten) :]
                    for index, reply in zip(forgotten, fresh, strict=True):
                        replies[index] = reply
            except BaseException as error:
                if connection is not None:
                    connection.disconnect()
                repeated = repeated or _was_sent(connection, error)
                too_late = clock() - began >= patience and (patience < self._timeout or not self.insists)
                if is_second or too_late or connection is None or not _is_worth_repeating(error):
                    _fail(error, repeated)
                is_second, patience = True, clipped(patience, until)
                self.close()  # what killed this connection may have killed the idle ones
            else:
                self._idle.append(Idle(connection, clock()))
                return Answer(replies, sent_at, repeated)

    def _connected(self, patience: float) -> Any:
        while self._idle:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                break  # another thread took the last one
            if clock() - since < IDLE_TRUSTED or not self._is_stale(connection):
                return connection
            connection.disconnect()
        return self._location.connected(within=patience)

    @staticmethod
    def _is_stale(connection: Any) -> bool:
        try:
            return bool(connection.can_read(0))
        except RedisError:
            return True

    def _exchange(self, connection: Any, packed: list[bytes], patience: float) -> list[Any]:
        connection.send_packed_command([b"".join(packed)], check_health=False)
        read_by = clock() + patience if patience < self._timeout else None
        return [self._read(connection, read_by) for _ in packed]

    @staticmethod
    def _read(connection: Any, read_by: float | None) -> Any:
        # Not by an argument of read_response, which redis-py 6 and 7 do not know.
        if read_by is not None and not connection.can_read(max(0.0, read_by - clock())):
            raise TimeoutError("Timeout reading from socket")
        try:
            return connection.read_response(disable_decoding=True)
        except (ResponseError, BusyLoadingError) as error:
            return unless_not_served(error)

    def locate(self, key: str) -> None:
        """Learn where the key is. One server has all keys."""

    def parts(self) -> Iterator[Any]:
        """Where to send commands ``at`` that ask for all keys: together they have them all."""
        yield None

    def close(self) -> None:
        _disconnect(self._idle)


class AsyncWire:
    """The same for the tasks of one event loop."""

    ending: AsyncIterator[None]  # held here because the loop itself keeps no more than a weak reference
    insists = True

    def __init__(self, location: Location, most: int, timeout: float) -> None:
        self._location = location
        self._most, self._timeout = most, timeout
        self._idle: deque[Idle] = deque()
        self._vacant = asyncio.BoundedSemaphore(most)
        self._keeps = True  # connections for the next call

    async def send(self, *commands: Command, within: float | None = None, until: float | None = 0.0) -> Answer:
        if not commands:
            return NOTHING  # asyncio's transports choke on an empty chunk: such a one is never closed
        patience = self._timeout if within is None else min(within, self._timeout)
        began, repeated, left = clock(), False, patience
        while True:
            if await self._is_vacant(left):
                try:
                    return await self._send(commands, left, began, repeated, until)
                except (RedisError, OSError, Unanswered) as error:
                    if not is_worth_waiting(error, self._location, began, patience, until):
                        raise
                    repeated = isinstance(error, Unanswered)
                finally:
                    self._vacant.release()
                await asyncio.sleep(AGAIN)
            elif not may_wait_on(self._location, began, until):
                _fail(MaxConnectionsError(exhausted(self._most)), repeated)
            left = clipped(patience, until)

    async def _is_vacant(self, patience: float) -> bool:
        """Take a permit for a connection."""
        if not self._vacant.locked():
            return await self._vacant.acquire()
        try:
            async with asyncio.timeout(patience):
                return await self._vacant.acquire()
        except builtins.TimeoutError:
            return False

    async def _send(
        self, commands: Sequence[Command], patience: float, began: float, repeated: bool, until: float | None
    ) -> Answer:
        is_second, cancelled = False, _cancellations()
        while True:
            sent_at, connection = clock(), None
            try:
                connection = await self._connected(patience)
                replies = await self._exchange(connection, [command.packed for command in commands], patience)
                if NoScriptError in map(type, replies):
                    forgotten, again = _to_repeat(commands, replies)
                    fresh = (await self._exchange(connection, again, patience))[-len(forgotten) :]
                    for index, reply in zip(forgotten, fresh, strict=True):
                        replies[index] = reply
            except BaseException as error:
                if connection is not None:
                    await hang_up(connection)
                repeated = repeated or _was_sent(connection, error)
                _check_cancelled(cancelled)
                too_late = clock() - began >= patience and (patience < self._timeout or not self.insists)
                if is_second or too_late or connection is None or not _is_worth_repeating(error):
                    _fail(error, repeated)
                is_second, patience = True, clipped(patience, until)
                await self._close_idle()
            else:
                if self._keeps:
                    self._idle.append(Idle(connection, clock()))
                else:
                    await hang_up(connection)
                _check_cancelled(cancelled)
                return Answer(replies, sent_at, repeated)

    async def _connected(self, patience: float) -> Any:
        while self._idle:
            connection, since = self._idle.pop()
            if clock() - since < IDLE_TRUSTED or not await self._is_stale(connection):
                return connection
            await hang_up(connection)
        return await self._location.aconnected(within=patience)

    @staticmethod
    async def _is_stale(connection: Any) -> bool:
        can_read = getattr(connection, "can_read", None) or connection.can_read_destructive  # until redis-py 7
        try:
            return bool(await can_read())
        except RedisError:
            return True
        except BaseException:
            await hang_up(connection)
            raise

    async def _exchange(self, connection: Any, packed: list[bytes], patience: float) -> list[Any]:
        # Not by an argument of read_response, which answers None when its time is over.
        sooner = asyncio.timeout(patience) if patience < self._timeout else nullcontext()
        try:
            async with sooner:
                await connection.send_packed_command([b"".join(packed)], check_health=False)
                return [await self._read(connection) for _ in packed]
        except builtins.TimeoutError:
            raise TimeoutError("Timeout reading from socket") from None

    @staticmethod
    async def _read(connection: Any) -> Any:
        try:
            return await connection.read_response(disable_decoding=True)
        except (ResponseError, BusyLoadingError) as error:
            return unless_not_served(error)

    async def locate(self, key: str) -> None: ...

    async def parts(self) -> AsyncIterator[Any]:
        yield None

    async def aclose(self) -> None:
        """The loop ends. What is still sent by others that end with it goes over connections of its own."""
        self._keeps = False
        await self._close_idle()

    async def _close_idle(self) -> None:
        while self._idle:
            await hang_up(self._idle.pop().connection)


def _disconnect(idle: deque[Idle]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().connection.disconnect()


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _check_cancelled(before: int) -> None:
    """redis-py sends through asyncio.wait_for, which on Python 3.11 may lose a cancellation or make it an error."""
    if _cancellations() > before:
        raise asyncio.CancelledError


def _was_sent(connection: Any, error: BaseException) -> bool:
    """Whether the server may have executed the commands, or may do so yet."""
    return connection is not None and not isinstance(error, NotServed)


def _fail(error: BaseException, sent: bool) -> NoReturn:
    if isinstance(error, NotServed):
        refusal, error = error, error.reply
        refusal.__cause__ = None  # else the reply, which is raised out of it, would be its own cause
    if sent and isinstance(error, RedisError | OSError):
        raise Unanswered(error) from error
    raise error  # also what a handler of a signal raised, such as a time limit


def _is_worth_repeating(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, AuthenticationError)
