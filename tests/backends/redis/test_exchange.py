"""Commands and replies on one connection: what a server may do to it meanwhile, for threads and for tasks."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest
import redis

from django_distlock.backends.redis.errors import NotSent
from django_distlock.backends.redis.exchange import AsyncDirectExchange, DirectExchange, Reader
from tests.support.tools import PATIENCE

pytestmark = pytest.mark.skipif(Reader is None, reason="without hiredis, redis-py reads the replies")

PARSER = SimpleNamespace(parse_error=lambda text: redis.ResponseError(text))


class Connection(DirectExchange):
    protocol, socket_timeout, _parser = 2, PATIENCE, PARSER

    def __init__(self, sock):
        self._sock = sock


class AsyncConnection(AsyncDirectExchange):
    protocol, _parser = 2, PARSER

    def __init__(self, writer):
        self._writer = writer


class Server:
    """The other end of a connection, which answers with these parts, each by itself."""

    def __init__(self, *parts, leaves=False):
        self.sock, self._end = socket.socketpair()
        self._is_over = threading.Event()
        self._answering = threading.Thread(target=self._answer, args=(parts, leaves))
        self._answering.start()

    def _answer(self, parts, leaves):
        self._end.recv(100)
        for part in parts:
            if self._is_over.wait(0.02):
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
        _, writer = await asyncio.open_connection(sock=server.sock)
        try:
            return await AsyncConnection(writer).exchange(b"x", number, timeout)
        finally:
            writer.transport.abort()

    return ask


def test_replies_come_in_any_parts(ask):
    assert ask(b"$2\r\nab\r", b"\n:", b"7\r\n*1\r\n", b"+OK\r\n", number=3) == [b"ab", 7, [b"OK"]]


def test_an_error_may_be_a_reply(ask):
    error, number = ask(b"-WRONGTYPE no\r\n:1\r\n", number=2)
    assert (str(error), number) == ("WRONGTYPE no", 1)


def test_one_that_drips_in_has_the_time_of_all(ask):
    with pytest.raises(redis.TimeoutError):
        ask(b"$10000\r\n", *[b"a"] * 10_000, timeout=0.3)  # which take minutes


def test_what_is_no_reply_at_all(ask):
    with pytest.raises(redis.InvalidResponse):
        ask(b"HTTP/1.1 400 Bad Request\r\n")


def test_the_server_leaves(ask):
    with pytest.raises(redis.ConnectionError, match="closed by server"):
        ask(b"$2\r\na", leaves=True)


@pytest.mark.parametrize("then", [Server.leave, lambda server: server.say(b":2\r\n")], ids=["leaves", "says_more"])
def test_a_loop_hears_what_becomes_of_a_connection_that_nobody_uses(then):
    server = Server(b":1\r\n")

    async def main():
        _, writer = await asyncio.open_connection(sock=server.sock)
        connection = AsyncConnection(writer)
        assert await connection.exchange(b"x", 1, PATIENCE) == [1]
        assert not await connection.is_stale()
        then(server)
        assert await connection.is_stale()
        with pytest.raises(NotSent):
            await connection.exchange(b"x", 1, PATIENCE)
        writer.transport.abort()

    try:
        asyncio.run(main())
    finally:
        server.close()
