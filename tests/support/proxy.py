"""A proxy that breaks what passes between a client and a server, both on unix sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

PATIENCE = 10.0


class Proxy:
    """
    ``cut_reply(marker)``: the next request that contains the marker is executed by the server, its reply is
    thrown away, and the connection is closed. ``delay(marker)``: the next such request is kept until
    ``deliver()``; its connection is closed at once. ``hang``: while true, no request passes. ``silence()``:
    on the connections that are there none ever will. ``slow``: seconds that each request is kept. ``drips``: replies
    come byte by byte. ``refuse()``: nobody listens until ``accept()``.
    """

    def __init__(self, server: Path, folder: Path) -> None:
        self.server = server
        self.socket = folder / "p"
        self.url = f"unix://{self.socket}?db=0"
        self.listens = False
        self.hang = False
        self.slow = 0.0
        self.drips = False
        self.accepted = self.silenced = 0  # connections; those up to which nothing passes any more
        self.cuts = 0
        self.to_cut: list[bytes] = []
        self.to_delay: list[bytes] = []
        self.delayed: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut_reply(self, marker: str, times: int = 1) -> None:
        self.to_cut += [marker.encode()] * times

    def delay(self, marker: str) -> None:
        self.to_delay.append(marker.encode())

    def deliver(self) -> None:
        """Send what was delayed, and wait until the server has executed it."""
        self._call(self._deliver())

    def silence(self) -> None:
        self.silenced = self.accepted

    def refuse(self) -> None:
        if self.listens:
            self._call(self._refuse())

    def accept(self) -> None:
        if not self.listens:
            self._call(self._accept())

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.socket))
        listener.listen(128)
        return listener

    async def _to_server(self) -> Stream:
        return await asyncio.open_unix_connection(self.server)

    # Not by asyncio's own server: what it accepts in the round in which it is closed, it never closes.

    async def _accept(self) -> None:
        self.listens = True
        self._listener = self._listening()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accepted)

    def _accepted(self) -> None:
        client, _ = self._listener.accept()
        task = self._loop.create_task(self._connected(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: client.close())

    async def _refuse(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.socket.unlink(missing_ok=True)
        self.listens = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the loop closes sockets in its next round

    async def _deliver(self) -> None:
        while self.delayed:
            reader, writer = await self._to_server()
            writer.write(self.delayed.pop(0))
            await reader.read(65536)
            writer.close()
            await writer.wait_closed()

    def _passage(self, client: Stream, server: Stream) -> Passage:
        return Passage(self, client, server)

    async def _connected(self, client: socket.socket) -> None:
        ends: list[Stream] = []
        try:
            ends.append(await asyncio.open_connection(sock=client))
            ends.append(await self._to_server())
            await self._passage(*ends).run()
        except (asyncio.CancelledError, OSError):
            pass  # either end went away, or the proxy refuses now
        finally:
            for _, writer in ends:
                writer.transport.abort()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Passage:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: Stream, server: Stream) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self.proxy.accepted += 1
        self.number = self.proxy.accepted
        self.muted = False
        self.answered = asyncio.Event()

    async def run(self) -> None:
        pumps = [asyncio.create_task(self.requests()), asyncio.create_task(self.replies())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def requests(self) -> None:
        while data := await self.client[0].read(65536):
            await asyncio.sleep(self.proxy.slow)
            while self.proxy.hang or self.number <= self.proxy.silenced:
                await asyncio.sleep(0.005)
            if _take(self.proxy.to_delay, data):
                self.proxy.delayed.append(data)
                return
            if _take(self.proxy.to_cut, data):
                self.muted = True
                self.server[1].write(data)
                await self.answered.wait()
                self.proxy.cuts += 1
                return
            self.server[1].write(data)

    async def replies(self) -> None:
        while data := await self.server[0].read(65536):
            if self.muted:
                self.answered.set()
                await asyncio.sleep(PATIENCE)  # until the other pump ends the connection
            for part in map(bytes, zip(data, strict=True)) if self.proxy.drips else [data]:
                self.client[1].write(part)
                await asyncio.sleep(0)


def _take(markers: list[bytes], data: bytes) -> bool:
    found = next((marker for marker in markers if marker in data), None)
    if found:
        markers.remove(found)
    return found is not None
