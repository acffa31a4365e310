"""Commands that are sent on one connection, and their replies: for threads and for tasks, in time.

With fewer detours than redis-py makes, where RESP2 and hiredis allow it; else by its own methods.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import Any

import redis
from redis.connection import DefaultParser
from redis.exceptions import BusyLoadingError, ResponseError

try:
    from hiredis import Reader
except ImportError:
    Reader = None  # type: ignore[assignment, misc]

from ...utils.clock import clock
from .errors import NotSent, is_transient

RECEIVED_AT_ONCE = 65_536  # bytes
NO_TIME = 0.01  # seconds by which a reply may come later than it should; a timeout of 0 would not wait at all
ROUNDS_UNTIL_TOLD = 5  # of the loop, until TLS tells what has come
TOO_LATE = "Timeout reading from socket"
CLOSED = "Connection closed by server."
UNASKED = "The server said something that it was not asked for."


class RunningTimer:
    """Calls ``on_over`` after so many seconds in which the event loop runs, unless it is stopped before.

    Where thousands of tasks begin at once, it gets to what came for the first ones when their time would be over
    otherwise. It is started again and again at little cost: what is scheduled stays when it is stopped, for the next
    start to use.
    """

    __slots__ = ("_counted_from", "_due", "_handle", "_is_on", "_left", "_loop", "_on_over", "_part")

    PARTS = 4  # rounds of the loop that there are at least

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over, self._loop = on_over, asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._is_on, self._due = False, 0.0

    def start(self, seconds: float) -> None:
        now = self._loop.time()
        self._is_on, self._left, self._part, self._counted_from = True, seconds, seconds / self.PARTS, now
        if self._handle is None or self._due > now + self._part:
            self._schedule(now + self._part)

    def stop(self) -> None:
        self._is_on = False

    def end(self) -> None:
        """It is started no more."""
        if self._handle:
            self._handle.cancel()
        self._is_on, self._handle, self._on_over = False, None, _nothing

    def _schedule(self, due: float) -> None:
        if self._handle:
            self._handle.cancel()
        self._due = due  # uvloop's handles do not tell
        self._handle = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._handle = None
        if not self._is_on:
            return
        self._left -= max(0.0, self._due - self._counted_from)  # what comes after that, the loop did not run
        self._counted_from = now = self._loop.time()
        if self._left > 1e-9:
            self._schedule(now + min(self._part, self._left))
        else:
            self._is_on = False
            self._on_over()


def _nothing() -> None: ...


class RunningFor:
    """``async with RunningFor(seconds)`` raises redis-py's TimeoutError when the block takes longer.

    By a ``RunningTimer``.
    """

    __slots__ = ("_message", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float, message: str = TOO_LATE) -> None:
        self._seconds, self._message = seconds, message

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._timer = RunningTimer(lambda: self._timeout.reschedule(0.0))
        self._timer.start(self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.end()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except builtins.TimeoutError as late:
            raise redis.TimeoutError(self._message) from late


def _new_reader(connection: Any) -> Any:
    """What takes replies apart. None where redis-py must do it."""
    if Reader is None or connection.protocol != 2:
        return None
    return Reader(protocolError=redis.InvalidResponse, replyError=DefaultParser.parse_error)


class RedisPyExchange:
    """Of threads, by the methods of redis-py, for connections of any class."""

    new_login: Any = None  # which the server is to be told, see credentials.py

    def exchange(self: Any, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        """``number`` replies, with the errors among them that are answers.

        ``timeout``: seconds for all of them; None: those of the socket until the first part comes, and as many for the
        rest. Raises redis-py's errors.
        """
        self.send_packed_command([packed], check_health=False)
        deadline, replies = None if timeout is None else clock() + timeout, []
        for _ in range(number):
            try:
                if deadline is None:
                    replies.append(self.read_response(disable_decoding=True))
                else:
                    replies.append(read_by(self, deadline))
            except (ResponseError, BusyLoadingError) as reply:
                replies.append(_raise_if_transient(reply))
        return replies


class DirectExchange(RedisPyExchange):
    """The same, quickly."""

    _replies: Any = None  # the reader of all that comes, from the first exchange on

    def exchange(self: Any, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        reader = self._replies
        if reader is None:
            reader = self._replies = _new_reader(self)
            if reader is None:
                return super().exchange(packed, number, timeout)
        sock, deadline = self.sock, inf
        try:
            if timeout is None:
                sock.sendall(packed)
            else:
                deadline = clock() + timeout
                sock.settimeout(timeout)
                sock.sendall(packed)
                if (left := deadline - clock()) < timeout - NO_TIME:  # else it was done at once, as mostly
                    sock.settimeout(max(NO_TIME, left))
            replies: list[Any] = []
            while True:
                if not (data := sock.recv(RECEIVED_AT_ONCE)):
                    raise redis.ConnectionError(CLOSED)
                reader.feed(data)
                while (reply := reader.gets()) is not False:
                    replies.append(_answer(reply) if isinstance(reply, Exception) else reply)
                    if len(replies) == number:
                        if reader.has_data():
                            raise redis.InvalidResponse(UNASKED)
                        if deadline < inf:
                            sock.settimeout(self.socket_timeout)
                        return replies
                now = clock()
                deadline = min(deadline, now + self.socket_timeout)
                if now >= deadline:
                    raise builtins.TimeoutError
                sock.settimeout(max(NO_TIME, deadline - now))
        except builtins.TimeoutError as error:
            raise redis.TimeoutError(TOO_LATE) from error
        except OSError as error:
            raise redis.ConnectionError(f"Error while talking to the server: {error}") from error


class AsyncDirectExchange(asyncio.Protocol):
    """Of tasks, one at a time. From the first exchange on it reads in the place of redis-py's StreamReader."""

    new_login: Any = None
    _replies: Any = None  # the reader of all that comes
    _found: list[Any]  # of the exchange that is under way, which ends when it has them all
    _number = 0
    _end: asyncio.Future[None] | None = None
    _timer: RunningTimer
    _failure = ""  # after which it is of no use any more

    async def exchange(self: Any, packed: bytes, number: int, timeout: float) -> list[Any]:
        """The same. ``timeout``: seconds for all replies, in which the event loop runs."""
        transport = self._writer.transport
        if self._replies is None:
            self._replies = _new_reader(self)
            if self._replies is None:
                return await _aexchange(self, packed, number, timeout)
            if self._reader.at_eof() or transport.is_closing():
                self._failure = CLOSED  # which the stream was told, and nobody else is
            self._timer = RunningTimer(self._time_out)
            transport.set_protocol(self)
        if self._failure:
            raise NotSent(self._failure)
        try:
            transport.write(packed)
        except RuntimeError as error:  # of uvloop, whose transport was closed
            raise NotSent(str(error)) from error
        found: list[Any] = []
        self._found, self._number = found, number
        self._end = end = asyncio.get_running_loop().create_future()
        self._timer.start(timeout)
        try:
            await end
        finally:
            self._timer.stop()
            self._end = None
            del self._found
            del end  # its error would keep this frame, and with it the connection
        return found

    async def is_stale(self: Any) -> bool:
        """Whether it has ended while nobody used it."""
        if self._replies is None:
            can_read = getattr(self, "can_read", None) or self.can_read_destructive  # until redis-py 7
            return bool(await can_read())
        for _ in range(ROUNDS_UNTIL_TOLD):
            await asyncio.sleep(0)
        return bool(self._failure) or self._writer.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self._end is None or self._end.done():
            self._fail(redis.InvalidResponse(UNASKED))
            return
        replies, found = self._replies, self._found
        try:
            replies.feed(data)
            while len(found) < self._number:
                if (reply := replies.gets()) is False:
                    return
                found.append(_answer(reply) if isinstance(reply, Exception) else reply)
            if replies.has_data():
                raise redis.InvalidResponse(UNASKED)
        except Exception as error:  # raised to the task
            self._fail(error)
        else:
            self._end.set_result(None)

    def eof_received(self) -> None:
        self.connection_lost(None)  # at once; the loop says so only in its next round

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.end()
        if error is None:
            self._fail(redis.ConnectionError(CLOSED))
        else:
            self._fail(redis.ConnectionError(f"Error while talking to the server: {error}"))

    def _time_out(self) -> None:
        self._fail(redis.TimeoutError(TOO_LATE))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or str(error)
        if self._end and not self._end.done():
            self._end.set_exception(error)


def read_by(connection: Any, deadline: float) -> Any:
    """The next reply on a connection of threads. Raises redis-py's TimeoutError at that moment on ``clock()``."""
    # Not by an argument of read_response, which redis-py 6 and 7 do not know.
    if not connection.can_read(max(0.0, deadline - clock())):
        raise redis.TimeoutError(TOO_LATE)
    return connection.read_response(disable_decoding=True)


async def _aexchange(connection: Any, packed: bytes, number: int, timeout: float) -> list[Any]:
    replies = []
    async with RunningFor(timeout):
        await connection.send_packed_command([packed], check_health=False)
        for _ in range(number):
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except (ResponseError, BusyLoadingError) as reply:
                replies.append(_raise_if_transient(reply))
    return replies


def _answer(reply: Exception) -> Exception:
    """Errors of the connection are raised, as redis-py does."""
    if isinstance(reply, redis.ConnectionError) and not isinstance(reply, BusyLoadingError):
        raise reply
    return _raise_if_transient(reply)


def _raise_if_transient(reply: Exception) -> Exception:
    """Raise what a retry may avoid; return other errors as replies."""
    if is_transient(reply):
        raise reply
    return reply
