"""Commands and replies on one connection: what a server may do to it meanwhile, for threads and for tasks."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import threading
import time
from contextlib import suppress
from contextvars import Context
from weakref import ref

import pytest
import redis

from django_distlock.backends.redis import exchange
from django_distlock.backends.redis.connection import ours
from django_distlock.backends.redis.errors import NotSent
from django_distlock.backends.redis.exchange import AsyncDirectExchange, DirectExchange
from django_distlock.backends.redis.scripts import pack
from django_distlock.backends.redis.timers import RunningTimer
from tests.support.tools import PATIENCE

SOCKET_TIMEOUT = 0.5


class Connection(DirectExchange):
    protocol, socket_timeout = 2, SOCKET_TIMEOUT

    def __init__(self, sock):
        self.sock = sock


class AsyncConnection(AsyncDirectExchange):
    protocol = 2

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer


class Server:
    """The other end of a connection, which answers with these parts, each by itself."""

    def __init__(self, *parts, leaves=False):
        self.sock, self._end = socket.socketpair()
        self._is_over = threading.Event()
        self._answering = threading.Thread(target=self._answer, args=(parts, leaves))
        self._answering.start()

    def _answer(self, parts, leaves):
        self._end.recv(100)
        with suppress(BrokenPipeError):  # who asked has had enough
            for part in parts:
                if self._is_over.wait(0.002):
                    return
                self._end.send(part)
        if leaves:
            self.leave()

    def say(self, data):
        self._end.send(data)

    def leave(self):
        self._end.shutdown(socket.SHUT_WR)

    def close(self):
        self._is_over.set()
        self._answering.join()
        self._end.close()
        self.sock.close()


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """A function that returns what an exchange makes of such an answer."""

    def ask(*parts, leaves=False, number=1, timeout=PATIENCE):
        server = Server(*parts, leaves=leaves)
        try:
            if request.param == "sync":
                return Connection(server.sock).exchange(b"x", number, timeout)
            return asyncio.run(ask_in_loop(server, number, timeout))
        finally:
            server.close()

    async def ask_in_loop(server, number, timeout):
        reader, writer = await asyncio.open_connection(sock=server.sock)
        try:
            return await AsyncConnection(reader, writer).exchange(b"x", number, timeout or SOCKET_TIMEOUT)
        finally:
            writer.transport.abort()

    return ask


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_connection_of_a_class_of_the_project_learns_it(valkey, timeout):
    class Mine(redis.UnixDomainSocketConnection):
        pass

    assert ours(Mine) is ours(Mine)
    connection = ours(Mine)(path=str(valkey.socket))
    try:
        assert isinstance(connection, Mine)
        assert connection.exchange(pack("PING") + pack("GET", "none"), 2, timeout) == [b"PONG", None]
    finally:
        connection.disconnect()


def test_replies_come_in_any_parts(ask):
    assert ask(b"$2\r\nab\r", b"\n:", b"7\r\n*1\r\n", b"+OK\r\n", number=3) == [b"ab", 7, [b"OK"]]


def test_an_error_may_be_a_reply(ask):
    error, number = ask(b"-WRONGTYPE no\r\n:1\r\n", number=2)
    assert (str(error), number) == ("WRONGTYPE no", 1)


@pytest.mark.parametrize("timeout", [0.3, None], ids=["of_the_call", "of_the_socket"])
def test_one_that_drips_in_has_the_time_of_all(ask, timeout):
    with pytest.raises(redis.TimeoutError):
        ask(b"$1000000\r\n", *[b"a"] * 1_000_000, timeout=timeout)  # which take half an hour


@pytest.mark.parametrize("more", [b":2\r\n", b":2"], ids=["a_reply", "half_a_reply"])
def test_one_that_was_not_asked_for(ask, more):
    """Else it would be taken for the answer to the next command."""
    with pytest.raises(redis.InvalidResponse, match="not asked for"):
        ask(b":1\r\n" + more)


def test_what_is_no_reply_at_all(ask):
    with pytest.raises(redis.InvalidResponse):
        ask(b"HTTP/1.1 400 Bad Request\r\n")


def test_the_server_leaves(ask):
    with pytest.raises(redis.ConnectionError, match="closed by server"):
        ask(b"$2\r\na", leaves=True)


THENS = {
    "it_leaves": Server.leave,
    "it_says_more": lambda server: server.say(b":2\r\n"),
    "it_begins_to_say_more": lambda server: server.say(b":2"),
}


@pytest.mark.parametrize("then", THENS.values(), ids=THENS)
def test_a_loop_hears_what_becomes_of_a_connection_that_nobody_uses(then):
    server = Server(b":1\r\n")

    async def main():
        reader, writer = await asyncio.open_connection(sock=server.sock)
        connection = AsyncConnection(reader, writer)
        assert await connection.exchange(b"x", 1, PATIENCE) == [1]
        assert not await connection.is_stale()
        then(server)
        assert await connection.is_stale()
        with pytest.raises(NotSent):  # at once: an answer would never come
            connection.exchange(b"x", 1, PATIENCE)
        writer.transport.abort()

    try:
        asyncio.run(main())
    finally:
        server.close()


def test_a_task_goes_on_also_in_a_context_without_variables():
    server = Server(b":1\r\n")

    async def main():
        reader, writer = await asyncio.open_connection(sock=server.sock)
        try:
            async with asyncio.timeout(PATIENCE):
                return await AsyncConnection(reader, writer).exchange(b"x", 1, PATIENCE)
        finally:
            writer.transport.abort()

    try:
        assert Context().run(asyncio.run, main()) == [1]
    finally:
        server.close()


def test_one_that_is_cancelled_says_so():
    async def main():
        exchange = asyncio.ensure_future(unanswered())
        await asyncio.sleep(0.01)
        exchange.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await exchange

    async def unanswered():
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            await AsyncConnection(reader, writer).exchange(b"x", 1, PATIENCE)
        finally:
            writer.transport.abort()
            theirs.close()

    asyncio.run(main())


def test_a_connection_that_has_ended_before_it_is_used():
    server = Server()
    server.leave()

    async def main():
        reader, writer = await asyncio.open_connection(sock=server.sock)
        await reader.read()  # until its end
        with pytest.raises(NotSent):
            AsyncConnection(reader, writer).exchange(b"x", 1, PATIENCE)
        writer.transport.abort()

    try:
        asyncio.run(main())
    finally:
        server.sock.close()
        server.close()


def test_a_command_that_is_larger_than_what_the_system_takes_at_once():
    packed, (ours, theirs) = pack("SET", "key", "x" * 5_000_000), socket.socketpair()
    received = []

    def take_all():
        while sum(map(len, received)) < len(packed):
            received.append(theirs.recv(65_536))
        theirs.send(b"+OK\r\n")

    ours.settimeout(PATIENCE)
    server = threading.Thread(target=take_all)
    server.start()
    try:
        assert Connection(ours).exchange(packed, 1, None) == [b"OK"]
        assert b"".join(received) == packed
    finally:
        ours.close()
        server.join(PATIENCE)
        theirs.close()


@pytest.fixture
def subscribed():
    """A connection, and the server that speaks to it unasked."""
    server = Server()
    server.sock.settimeout(PATIENCE)
    yield Connection(server.sock), server
    server.sock.close()
    server.close()


def test_messages_are_received_one_by_one(subscribed):
    connection, server = subscribed
    server.say(b"$1\r\na\r\n:2\r\n$1\r")
    assert [connection.receive(PATIENCE) for _ in range(2)] == [b"a", 2]
    assert connection.receive(0.02) is None
    server.say(b"\nb\r\n")
    assert connection.receive(PATIENCE) == b"b"
    assert connection.receive(0.0) is None


def test_it_says_whether_another_message_may_have_come(subscribed):
    connection, server = subscribed
    server.say(b"$1\r\na\r\n:2\r\n$1\r")
    assert connection.receive(PATIENCE) == b"a"
    assert connection.may_have_more()
    assert connection.receive(0.0) == 2
    assert connection.may_have_more()  # one that has come in part
    server.say(b"\nb\r\n")
    assert connection.receive(PATIENCE) == b"b"
    assert not connection.may_have_more()
    with ssl.create_default_context().wrap_socket(socket.socket(), server_hostname="name") as encrypted:
        connection.sock = encrypted
        assert connection.may_have_more()  # it may keep one that it has read


def test_more_than_is_read_at_once_is_received_without_waiting(subscribed):
    connection, server = subscribed
    assert connection.can_read_without_waiting()
    saying = threading.Thread(target=server.say, args=(b"$5\r\nhello\r\n" * 30_000,))
    saying.start()
    received, deadline = 0, time.monotonic() + PATIENCE
    while received < 30_000 and time.monotonic() < deadline:
        received += connection.receive(0.0) is not None
    saying.join(PATIENCE)
    assert received == 30_000
    assert connection.receive(0.0) is None


@pytest.mark.parametrize("timeout", [PATIENCE, 0.0])
def test_what_is_received_may_be_an_error(subscribed, timeout):
    connection, server = subscribed
    server.say(b"-ERR unknown command\r\n:1\r\n")
    with pytest.raises(redis.ResponseError, match="unknown command"):
        connection.receive(timeout)
    assert connection.receive(timeout) == 1


@pytest.mark.parametrize("timeout", [PATIENCE, 0.0])
@pytest.mark.parametrize("leave", [Server.leave, lambda server: server.sock.close()], ids=["the_server", "this_side"])
def test_nothing_is_received_when_one_side_has_left(subscribed, leave, timeout):
    connection, server = subscribed
    leave(server)
    with pytest.raises(redis.ConnectionError):
        connection.receive(timeout)


def test_what_a_handler_of_a_signal_raises_is_no_failure_of_the_connection(subscribed, monkeypatch):
    connection, server = subscribed

    def handle(*_):
        raise TimeoutError("of the caller")

    class Interrupted:
        """A parser. A signal comes while it works."""

        def gets(self):
            return False

        def feed(self, data):
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(exchange, "Reader", lambda **_: Interrupted())
    server.say(b"$1\r\na\r\n")
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError, match="of the caller"):
            connection.receive(0.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


class BareHandle:
    """As uvloop's, where less than half a millisecond is left."""

    def __init__(self, handle):
        self.cancel = handle.cancel


def test_a_timer_asks_nothing_of_its_handle(monkeypatch):
    over = []

    async def is_over():
        deadline = time.monotonic() + PATIENCE
        while not over and time.monotonic() < deadline:
            await asyncio.sleep(0)
        return over.pop()

    async def main():
        call_at = (loop := asyncio.get_running_loop()).call_at
        monkeypatch.setattr(loop, "call_at", lambda *args: BareHandle(call_at(*args)))
        timer = RunningTimer(lambda: over.append(True))
        timer.start(PATIENCE)
        timer.start(0.01)  # earlier than what is scheduled
        assert await is_over()
        timer.start(0.01)
        timer.stop()
        timer.start(0.01)  # by what is scheduled
        assert await is_over()
        timer.end()

    asyncio.run(main())


def test_a_timer_does_not_count_for_how_long_the_loop_was_busy(monkeypatch):
    over, now = [], [0.0]

    async def main():
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        RunningTimer(lambda: over.append(True)).start(40.0)
        for _ in range(4):  # parts, of which one passes each time
            assert not over
            now[0] += 1000.0
            for _ in range(2):  # the loop finds what is due, and does it
                await asyncio.sleep(0)
        assert over

    asyncio.run(main())


def test_an_exchange_that_failed_leaves_nothing_to_the_garbage_collector():
    server = Server(b"$2\r\na", leaves=True)

    async def main():
        reader, writer = await asyncio.open_connection(sock=server.sock)
        connection = AsyncConnection(reader, writer)
        with pytest.raises(redis.ConnectionError):
            await connection.exchange(b"x", 1, PATIENCE)
        writer.transport.abort()
        await asyncio.sleep(0.01)
        return ref(connection)

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
        server.close()


class TestPosted:
    """A command whose reply nobody waits for."""

    def test_threads_leave_its_reply_out(self):
        server = Server(b":1\r\n")
        try:
            connection = Connection(server.sock)
            assert not connection.post(b"before anything is known of the protocol")
            assert connection.exchange(b"x", 1, PATIENCE) == [1]
            assert connection.post(b"y")
            server.say(b":2\r\n:3\r\n")
            assert connection.exchange(b"z", 1, PATIENCE) == [3]
        finally:
            server.close()

    def test_tasks_leave_its_reply_out(self):
        server = Server(b":1\r\n")

        async def main():
            reader, writer = await asyncio.open_connection(sock=server.sock)
            connection = AsyncConnection(reader, writer)
            assert not connection.post(b"before anything is known of the protocol")
            assert await connection.exchange(b"x", 1, PATIENCE) == [1]
            assert connection.post(b"y")
            answer = connection.exchange(b"z", 1, PATIENCE)
            server.say(b":2\r\n:")
            await asyncio.sleep(0.01)
            server.say(b"3\r\n")
            assert await answer == [3]
            assert not await connection.is_stale()
            writer.transport.abort()

        try:
            asyncio.run(main())
        finally:
            server.close()

    @pytest.mark.parametrize("then", THENS.values(), ids=THENS)
    def test_a_loop_hears_of_its_reply_and_of_what_comes_after_it(self, then):
        server = Server(b":1\r\n")

        async def main():
            reader, writer = await asyncio.open_connection(sock=server.sock)
            connection = AsyncConnection(reader, writer)
            assert await connection.exchange(b"x", 1, PATIENCE) == [1]
            assert connection.post(b"y")
            server.say(b":2\r\n")
            assert not await connection.is_stale()
            then(server)
            assert await connection.is_stale()
            with pytest.raises(NotSent):
                connection.exchange(b"x", 1, PATIENCE)
            assert not connection.post(b"y")
            writer.transport.abort()

        try:
            asyncio.run(main())
        finally:
            server.close()

    def test_a_reply_that_is_too_many(self):
        server = Server(b":1\r\n")
        try:
            connection = Connection(server.sock)
            assert connection.exchange(b"x", 1, PATIENCE) == [1]
            assert connection.post(b"y")
            server.say(b":2\r\n:3\r\n:4\r\n")
            with pytest.raises(redis.InvalidResponse, match="not asked for"):
                connection.exchange(b"z", 1, PATIENCE)
        finally:
            server.close()

    def test_over_a_connection_that_is_gone(self):
        server = Server(b":1\r\n")
        connection = Connection(server.sock)
        closed = []
        connection.disconnect = lambda: closed.append(True)
        assert connection.exchange(b"x", 1, PATIENCE) == [1]
        server.close()
        assert not connection.post(b"y")
        assert closed
