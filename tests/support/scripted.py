"""A server whose every answer is scripted: for errors and silences that no real one gives at will."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from django_distlock.backends.redis.operations import ACQUIRE
from django_distlock.backends.redlock.messages import ACQUIRE as ACQUIRE_ON_NODE
from django_distlock.backends.redlock.messages import RENEW as RENEW_ON_NODE

PATIENCE = 10.0
SERVICE = "mymaster"
HANDSHAKE = (b"HELLO", b"AUTH", b"CLIENT", b"SELECT")
ACQUIRES = {ACQUIRE.sha, ACQUIRE_ON_NODE.sha}
FENCE = 1


class Scripted:
    """
    ``with Scripted() as server``: on a port of 127.0.0.1 it plays a server, a master and the sentinel that names it,
    a Cluster of one node, and a node of a quorum. All locks are free.

    ``answer``: what becomes of a command, by its words in capitals: text, an error in the words of the server; CLOSE
    ends the connection; SILENCE; None: it is executed. ``delay``: seconds until it answers. ``seen``: the commands that
    came, without handshakes. ``failed``: how many were not executed. ``master``: the port that the sentinel names.
    """

    CLOSE, SILENCE = object(), object()

    def __init__(self) -> None:
        self.answer: Callable[[Sequence[bytes]], Any] = lambda words: None
        self.delay = 0.0
        self.seen: list[bytes] = []
        self.failed = 0
        self.master = 0
        self._forgotten: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Scripted:
        self._thread.start()
        self._call(self._start())
        self.master = self.port
        return self

    @property
    def cpu(self) -> float:
        """Seconds of the processor that it took itself."""
        assert self._thread.ident
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def fail(self, with_: Any, on: Sequence[bytes], times: int | None = None) -> None:
        """Answer so to the commands that begin with one of these words; ``times``: only so often."""
        left = [with_] * times if times else None

        def answer(words: Sequence[bytes]) -> Any:
            if words[0] not in on:
                return None
            return with_ if left is None else left.pop() if left else None

        self.answer = answer

    def refuse(self) -> None:
        """Nobody listens any more, and who was connected is not."""
        self._call(self._stop())

    def forget(self) -> None:
        """Whatever comes over connections that stand now is swallowed."""
        self._forgotten = set(self._tasks)

    def disconnect(self) -> None:
        """Nobody is connected any more; who comes next is not refused."""
        self._call(self._disconnect())

    def heal(self) -> None:
        """As it was at the beginning: nobody is connected any more; who comes next is not refused."""
        self._call(self._heal())

    @property
    def url(self) -> str:
        """With a password, so that a handshake has an answer that can fail."""
        return f"redis://:pw@127.0.0.1:{self.port}/0?protocol=2"

    async def _start(self, port: int = 0) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self.port: int = listener.getsockname()[1]
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    # Not by asyncio's own server: what it accepts in the round in which it is closed, it never closes.

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return  # who came was disconnected in the same round of the loop
        task = self._loop.create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: client.close())

    @property
    def _listens(self) -> bool:
        return self._listener.fileno() >= 0

    async def _heal(self) -> None:
        self.answer = lambda words: None
        self.delay = 0.0
        self.seen.clear()
        self.failed = 0
        self.master = self.port
        await (self._disconnect() if self._listens else self._start(self.port))

    async def _stop(self) -> None:
        if self._listens:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        await self._end()

    async def _disconnect(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()
        await self._end()

    async def _end(self) -> None:
        """Nobody is connected any more of those who were accepted."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the loop closes sockets in its next round

    async def _serve(self, client: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=client)
        task = asyncio.current_task()
        try:
            while words := await self._command(reader):
                if words[0] not in HANDSHAKE:
                    self.seen.append(words[0])
                    await asyncio.sleep(self.delay)
                answer = self.SILENCE if task in self._forgotten else self.answer(words)
                self.failed += answer is not None
                if answer is self.CLOSE:
                    return
                if answer is not self.SILENCE:
                    writer.write(b"-%b\r\n" % answer.encode() if answer else encoded(self._executed(words)))
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side has left, or the test is over
        finally:
            writer.transport.abort()

    @staticmethod
    async def _command(reader: asyncio.StreamReader) -> list[bytes]:
        words = []
        for _ in range(int((await reader.readline())[1:] or 0)):
            length = int((await reader.readline())[1:])
            words.append((await reader.readexactly(length + 2))[:-2])
        return [words[0].upper(), *words[1:]] if words else []

    def _executed(self, words: Sequence[bytes]) -> Any:
        here = [b"127.0.0.1", str(self.master).encode()]
        match words:
            case [b"ROLE"]:
                return [b"master", 0, []]
            case [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", _]:
                return here
            case [b"SENTINEL", *_]:
                about = {b"ip": here[0], b"port": here[1], b"flags": b"master", b"config-epoch": b"0"}
                return [word for pair in about.items() for word in pair]
            case [b"CLUSTER", *_]:
                return [[0, 16383, [here[0], self.port, b"id"]]]
            case [b"SCAN", *_]:
                return [b"0", []]
            case [b"TIME"]:
                return [b"%d" % time.time(), b"0"]
            case [b"INFO"]:
                return b"redis_version:7.0.0\r\n"
            case [b"EVALSHA", script, *_]:
                if script.decode() == RENEW_ON_NODE.sha:
                    return b"%016d" % FENCE
                return FENCE if script.decode() in ACQUIRES else 1
            case [b"GET" | b"PTTL", _]:
                return -2 if words[0] == b"PTTL" else None
        return "OK"


def encoded(reply: Any) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case str():
            return b"+%b\r\n" % reply.encode()
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case int():
            return b":%d\r\n" % reply
    return b"*%d\r\n%b" % (len(reply), b"".join(map(encoded, reply)))
