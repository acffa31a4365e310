"""Commands that are sent on one connection, and their replies: for threads and for tasks, in time.

With fewer detours than redis-py makes, where RESP2 and hiredis allow it; else by its own methods.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from types import TracebackType
from typing import Any

import redis
from redis.exceptions import BusyLoadingError, ResponseError

try:
    from hiredis import Reader
except ImportError:
    Reader = None  # type: ignore[assignment, misc]

from ...utils.clock import clock
from .errors import NotSent, is_transient

RECEIVED_AT_ONCE = 65_536  # bytes
TOO_LATE = "Timeout reading from socket"


class RunningTimer:
    """Calls ``on_over`` after so many seconds in which the event loop runs, unless it is stopped before.

    Where thousands of tasks begin at once, it gets to what came for the first ones when their time would be over
    otherwise. It is started again and again at little cost: what is scheduled stays when it is stopped, for the next
    start to use.
    """

    __slots__ = ("_counted_from", "_handle", "_is_on", "_left", "_loop", "_on_over", "_part")

    PARTS = 4  # rounds of the loop that there are at least

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over, self._loop = on_over, asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._is_on = False

    def start(self, seconds: float) -> None:
        now = self._loop.time()
        self._is_on, self._left, self._part, self._counted_from = True, seconds, seconds / self.PARTS, now
        if self._handle is None or self._handle.when() > now + self._part:
            self.cancel()
            self._handle = self._loop.call_at(now + self._part, self._tick)

    def stop(self) -> None:
        self._is_on = False

    def cancel(self) -> None:
        """Stop it for good."""
        if self._handle:
            self._handle.cancel()
            self._handle = None

    def _tick(self) -> None:
        assert self._handle
        due, self._handle = self._handle.when(), None
        if not self._is_on:
            return
        self._left -= max(0.0, due - self._counted_from)  # what comes after that, the loop did not run
        self._counted_from = now = self._loop.time()
        if self._left > 1e-9:
            self._handle = self._loop.call_at(now + min(self._part, self._left), self._tick)
        else:
            self._is_on = False
            self._on_over()


class RunningFor:
    """``async with RunningFor(seconds, message)`` raises redis-py's TimeoutError when the block takes longer.

    By a ``RunningTimer``.
    """

    __slots__ = ("_message", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float, message: str) -> None:
        self._seconds, self._message = seconds, message

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._timer = RunningTimer(lambda: self._timeout.reschedule(0.0))
        self._timer.start(self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        del self._timer  # which refers to this
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except builtins.TimeoutError as late:
            raise redis.TimeoutError(self._message) from late


def _new_reader(connection: Any) -> Any:
    """What takes replies apart. None where redis-py must do it."""
    if Reader is None or connection.protocol != 2:
        return None
    return Reader(protocolError=redis.InvalidResponse, replyError=connection._parser.parse_error)  # noqa: SLF001


class DirectExchange:
    """Of threads."""

    _replies: Any = None  # the reader of all that comes, from the first exchange on

    def exchange(self: Any, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        """``number`` replies, with the errors among them that are answers.

        ``timeout``: seconds for all of them; None: for each those of the socket. Raises redis-py's errors.
        """
        reader = self._replies
        if reader is None:
            reader = self._replies = _new_reader(self)
            if reader is None:
                return exchange(self, packed, number, timeout)
        replies: list[Any] = []
        sock = self._sock
        try:
            if timeout is not None:
                deadline = clock() + timeout
                sock.settimeout(timeout)
            sock.sendall(packed)
            while len(replies) < number:
                if (reply := reader.gets()) is not False:
                    replies.append(_answer(reply) if isinstance(reply, Exception) else reply)
                    continue
                if timeout is not None:
                    sock.settimeout(max(0.01, deadline - clock()))
                if not (data := sock.recv(RECEIVED_AT_ONCE)):
                    raise redis.ConnectionError("Connection closed by server.")
                reader.feed(data)
            if timeout is not None:
                sock.settimeout(self.socket_timeout)
        except builtins.TimeoutError as error:
            raise redis.TimeoutError(TOO_LATE) from error
        except OSError as error:
            raise redis.ConnectionError(f"Error while talking to the server: {error}") from error
        return replies


class AsyncDirectExchange(asyncio.Protocol):
    """Of tasks, one at a time. From the first exchange on it reads in the place of redis-py's StreamReader."""

    _replies: Any = None  # the reader of all that comes
    _found: list[Any]  # of the exchange that is under way, which ends when it has them all
    _number = 0
    _end: asyncio.Future[None] | None = None
    _timer: RunningTimer
    _failure: Exception | None = None  # after which it is of no use any more

    async def exchange(self: Any, packed: bytes, number: int, timeout: float) -> list[Any]:
        """The same. ``timeout``: seconds for all replies, in which the event loop runs."""
        if self._replies is None:
            self._replies = _new_reader(self)
            if self._replies is None:
                return await _aexchange(self, packed, number, timeout)
            self._timer = RunningTimer(self._time_out)
            self._writer.transport.set_protocol(self)
        if self._failure:
            raise NotSent(str(self._failure))
        found: list[Any] = []
        self._found, self._number = found, number
        self._end = end = asyncio.get_running_loop().create_future()
        self._writer.transport.write(packed)
        self._timer.start(timeout)
        try:
            await end
        finally:
            self._timer.stop()
            self._end = None
        return found

    async def is_stale(self: Any) -> bool:
        """Whether it has ended while nobody used it."""
        if self._replies is None:
            can_read = getattr(self, "can_read", None) or self.can_read_destructive  # until redis-py 7
            return bool(await can_read())
        for _ in range(2):  # in the first one the loop looks, in the second one it tells
            await asyncio.sleep(0)
        return self._failure is not None

    def data_received(self, data: bytes) -> None:
        try:
            self._replies.feed(data)
            while (reply := self._replies.gets()) is not False:
                if self._end is None or len(self._found) == self._number:
                    raise redis.InvalidResponse("a reply to nothing")
                self._found.append(_answer(reply) if isinstance(reply, Exception) else reply)
        except Exception as error:  # raised to the task
            self._fail(error)
        else:
            if self._end and len(self._found) == self._number and not self._end.done():
                self._end.set_result(None)

    def eof_received(self) -> None:
        self.connection_lost(None)  # at once; the loop says so only in its next round

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        if error is None:
            self._fail(redis.ConnectionError("Connection closed by server."))
        else:
            self._fail(redis.ConnectionError(f"Error while talking to the server: {error}"))

    def _time_out(self) -> None:
        self._fail(redis.TimeoutError(TOO_LATE))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._end and not self._end.done():
            self._end.set_exception(error)


def read_by(connection: Any, deadline: float) -> Any:
    """The next reply on a connection of threads. Raises redis-py's TimeoutError at that moment on ``clock()``."""
    # Not by an argument of read_response, which redis-py 6 and 7 do not know.
    if not connection.can_read(max(0.0, deadline - clock())):
        raise redis.TimeoutError(TOO_LATE)
    return connection.read_response(disable_decoding=True)


def exchange(connection: Any, packed: bytes, number: int, timeout: float | None) -> list[Any]:
    """``DirectExchange.exchange()`` by the methods of redis-py, for connections of any class."""
    connection.send_packed_command([packed], check_health=False)
    deadline, replies = None if timeout is None else clock() + timeout, []
    for _ in range(number):
        try:
            if deadline is None:
                replies.append(connection.read_response(disable_decoding=True))
            else:
                replies.append(read_by(connection, deadline))
        except (ResponseError, BusyLoadingError) as reply:
            replies.append(_raise_if_transient(reply))
    return replies


async def _aexchange(connection: Any, packed: bytes, number: int, timeout: float) -> list[Any]:
    replies = []
    async with RunningFor(timeout, TOO_LATE):
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
