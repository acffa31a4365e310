"""Commands on one connection and their replies, for threads and for tasks, with a time limit.

If RESP2 and hiredis allow it, with fewer detours than redis-py makes; else by redis-py's own methods.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context
from math import inf
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
from .timers import TOO_LATE, RunningFor, RunningTimer

RECEIVED_AT_ONCE = 65_536  # bytes
NO_TIME = 0.01  # seconds by which a reply may be late; a timeout of 0 would not wait at all
ROUNDS_UNTIL_TOLD = 5  # of the loop, until TLS passes on what has come
CLOSED = "Connection closed by server."
UNASKED = "The server said something that it was not asked for."


def _new_reader(connection: Any) -> Any:
    """The parser of replies. None if redis-py must parse them."""
    if Reader is None or connection.protocol != 2:
        return None
    return Reader(protocolError=redis.InvalidResponse, replyError=DefaultParser.parse_error)


class RedisPyExchange:
    """For threads, by the methods of redis-py, on connections of any class."""

    new_login: Any = None  # to be sent to the server, see credentials.py

    def post(self: Any, packed: bytes) -> bool:
        """Send one command whose reply nobody waits for; the next exchange leaves it out. False: it was not sent."""
        return False

    def exchange(self: Any, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        """Returns ``number`` replies; errors that are answers are among them.

        ``timeout``: seconds for all of them; None: the timeout of the socket until the first part comes, and the same
        for the rest. Raises redis-py's errors.
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

    def receive(self: Any, timeout: float) -> Any:
        """The next message on a connection that subscribes; None if nothing comes for ``timeout`` seconds.

        Raises redis-py's errors, also for an error that the server answers.
        """
        return self.read_response(disable_decoding=True) if self.can_read(timeout) else None

    def can_read_without_waiting(self: Any) -> bool:
        """Whether ``receive(0.0)`` never waits, on a connection that nobody has received from yet."""
        return False


def _send(sock: Any, packed: bytes) -> None:
    """As ``sendall()``, which asks the system before each send whether it may send."""
    if type(sock) is not socket.socket or os.name != "posix":  # TLS
        sock.sendall(packed)
        return
    try:
        sent = os.write(sock.fileno(), packed)
    except BlockingIOError:  # a socket with a timeout does not block; then sendall() waits
        sent = 0
    if sent < len(packed):
        sock.sendall(packed[sent:])


class DirectExchange(RedisPyExchange):
    """The same, quickly."""

    _replies: Any = None  # reads everything, from the first exchange or message on
    _unwanted = 0  # replies that are still to come, and nobody waits for

    def post(self: Any, packed: bytes) -> bool:
        if self._replies is None:
            return False
        try:
            _send(self.sock, packed)
        except OSError:
            self.disconnect()  # it may have gone in part
            return False
        self._unwanted += 1
        return True

    def exchange(self: Any, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        reader = self._replies
        if reader is None:
            reader = self._replies = _new_reader(self)
            if reader is None:
                return super().exchange(packed, number, timeout)
        sock, deadline = self.sock, inf
        try:
            if timeout is None:
                _send(sock, packed)
            else:
                deadline = clock() + timeout
                sock.settimeout(timeout)
                sock.sendall(packed)
                if (left := deadline - clock()) < timeout - NO_TIME:  # else it was sent at once, as usual
                    sock.settimeout(max(NO_TIME, left))
            replies: list[Any] = []
            while True:
                if not (data := sock.recv(RECEIVED_AT_ONCE)):
                    raise redis.ConnectionError(CLOSED)
                reader.feed(data)
                while (reply := reader.gets()) is not False:
                    if self._unwanted:
                        self._unwanted -= 1
                        continue
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

    def receive(self: Any, timeout: float) -> Any:
        reader = self._replies
        if reader is None:
            reader = self._replies = _new_reader(self)
            if reader is None:
                return super().receive(timeout)
        sock = self.sock
        try:
            while (found := reader.gets()) is False:
                if sock.gettimeout() != timeout:  # setting it is a call of the system
                    sock.settimeout(timeout)
                if not (data := sock.recv(RECEIVED_AT_ONCE)):
                    raise redis.ConnectionError(CLOSED)
                reader.feed(data)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except builtins.TimeoutError:
            if not timeout:
                raise  # of a handler of a signal
            return None
        except OSError as error:
            raise redis.ConnectionError(f"Error while talking to the server: {error}") from error
        if isinstance(found, Exception):
            raise found
        return found

    def can_read_without_waiting(self: Any) -> bool:
        if self._replies is None:
            self._replies = _new_reader(self)
        return self._replies is not None

    def may_have_more(self: Any) -> bool:
        """Whether a message may have come of which a selector does not tell."""
        return type(self.sock) is not socket.socket or bool(self._replies.has_data())


class Answer:
    """The replies that a task waits for: a future for ``asyncio.isfuture()``, which is awaited immediately, and once.

    Its task continues within the callback of the loop that has received the replies, where no other task runs. With
    asyncio's own futures it continues in the next round of the loop, which takes a twentieth of the time of a lock. So
    it does here after a failure, because a traceback would keep the callbacks that reported it.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_error", "_go_on", "_loop", "found", "is_over", "number")

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        self._loop, self.number = loop, number
        self.found: list[Any] = []
        self.is_over, self._asyncio_future_blocking = False, False
        self._error: BaseException | None = None
        self._go_on: Callable[[Answer], object] | None = None
        self._context: Context | None = None

    def succeed(self) -> None:
        """With the replies. Only the loop calls it."""
        self.is_over = True
        if self._context is not None and self._go_on:  # a context without variables is falsy
            self._context.run(self._go_on, self)

    def fail(self, error: BaseException) -> None:
        self.is_over, self._error = True, error
        if self._go_on:
            self._loop.call_soon(self._go_on, self, context=self._context)

    # For the task

    def __await__(self) -> Generator[Answer, None, list[Any]]:
        if not self.is_over:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, go_on: Callable[[Answer], object], *, context: Context) -> None:
        self._go_on, self._context = go_on, context

    def cancel(self, msg: object = None) -> bool:
        if self.is_over:
            return False
        self.fail(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    def result(self) -> list[Any]:
        if self._error is None:
            return self.found
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it would keep this frame, and with it the connection


class AsyncDirectExchange(asyncio.BufferedProtocol):
    """For tasks, one at a time. From the first exchange on, it reads in the place of redis-py's StreamReader."""

    new_login: Any = None
    _replies: Any = None  # reads everything
    _transport: Any
    _received: memoryview
    _timer: RunningTimer
    _answer: Answer | None = None  # of the exchange that is under way
    _unwanted = 0  # replies that are still to come, and nobody waits for
    _failure = ""  # the connection is of no use after it

    def exchange(self: Any, packed: bytes, number: int, timeout: float) -> Awaitable[list[Any]]:
        """The same. ``timeout``: seconds for all replies, counted while the event loop runs."""
        if self._replies is None and not self._begin():
            return _aexchange(self, packed, number, timeout)
        if self._failure:
            raise NotSent(self._failure)
        try:
            self._transport.write(packed)
        except RuntimeError as error:  # from uvloop, whose transport was closed
            raise NotSent(str(error)) from error
        self._answer = answer = Answer(self._timer.loop, number)
        self._timer.start(timeout)
        return answer

    def post(self: Any, packed: bytes) -> bool:
        """The same."""
        if self._replies is None or self._failure:
            return False
        try:
            self._transport.write(packed)
        except RuntimeError:  # of uvloop, whose transport was closed
            return False
        self._unwanted += 1
        return True

    def _begin(self: Any) -> bool:
        """Prepare to parse replies here. Returns whether that is possible."""
        self._replies = _new_reader(self)
        if self._replies is None:
            return False
        self._transport = transport = self._writer.transport
        # A plain protocol makes a new one of 256 KiB each time. Parts of a bytearray, which TLS fills, are copies.
        self._received = memoryview(bytearray(RECEIVED_AT_ONCE))
        if self._reader.at_eof() or transport.is_closing():
            self._failure = CLOSED  # only the stream learned of it
        self._timer = RunningTimer(self._time_out)
        transport.set_protocol(self)
        return True

    async def is_stale(self: Any) -> bool:
        """Whether the connection has ended while nobody used it."""
        if self._replies is None:
            can_read = getattr(self, "can_read", None) or self.can_read_destructive  # until redis-py 7
            return bool(await can_read())
        for _ in range(ROUNDS_UNTIL_TOLD):
            await asyncio.sleep(0)
        return bool(self._failure) or self._transport.is_closing()

    def get_buffer(self, size: int) -> memoryview:
        return self._received

    def buffer_updated(self, size: int) -> None:
        answer, replies = self._answer, self._replies
        try:
            replies.feed(self._received, 0, size)
            while self._unwanted:
                if replies.gets() is False:
                    return
                self._unwanted -= 1
            if answer is None or answer.is_over:
                if replies.has_data():
                    raise redis.InvalidResponse(UNASKED)
                return
            found, number = answer.found, answer.number
            while len(found) < number:
                if (reply := replies.gets()) is False:
                    return
                found.append(_answer(reply) if isinstance(reply, Exception) else reply)
            if replies.has_data():
                raise redis.InvalidResponse(UNASKED)
        except Exception as error:  # raised to the task
            self._fail(error)
            return
        self._timer.stop()
        self._answer = None
        answer.succeed()

    def eof_received(self) -> None:
        self.connection_lost(None)  # at once; the loop would call it only in its next round

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
        answer, self._answer = self._answer, None
        self._timer.stop()
        if answer and not answer.is_over:
            answer.fail(error)


def read_by(connection: Any, deadline: float) -> Any:
    """The next reply on a connection for threads. Raises redis-py's TimeoutError at that moment on ``clock()``."""
    # Not by an argument of read_response, which redis-py 6 and 7 do not have.
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
    """Raises errors of the connection, as redis-py does."""
    if isinstance(reply, redis.ConnectionError) and not isinstance(reply, BusyLoadingError):
        raise reply
    return _raise_if_transient(reply)


def _raise_if_transient(reply: Exception) -> Exception:
    """Raise errors that a retry may avoid; return other errors as replies."""
    if is_transient(reply):
        raise reply
    return reply
