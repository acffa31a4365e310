"""Simulates distant servers: sockets that delay everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from .measure import Child


@contextmanager
def away(urls: Sequence[str], seconds: float) -> Iterator[list[str]]:
    """Gives URLs of the same servers, each ``seconds`` away in either direction."""
    with TemporaryDirectory(prefix="away-") as folder:
        paths = [Path(folder, str(number)) for number in range(len(urls))]
        servers = [url.removeprefix("unix://").partition("?")[0] for url in urls]
        child = Child(_pass_on, servers, [str(path) for path in paths], seconds)
        try:
            child.told()
            yield [f"unix://{path}?db=0" for path in paths]
        finally:
            child.end()


def _pass_on(pipe: Connection, servers: Sequence[str], paths: Sequence[str], seconds: float) -> None:
    asyncio.run(_passing_on(pipe, servers, paths, seconds))


async def _passing_on(pipe: Connection, servers: Sequence[str], paths: Sequence[str], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    for server, path in zip(servers, paths, strict=True):
        await loop.create_unix_server(lambda server=server: _End(server, seconds), path)  # type: ignore[misc]
    pipe.send("ready")
    await asyncio.sleep(3600)


class _End(asyncio.Protocol):
    """One end of a connection. Data that it receives leaves by the other end after the delay."""

    def __init__(self, server: str | None, seconds: float, other: _End | None = None) -> None:
        self._server, self._seconds, self.other = server, seconds, other
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self._server is not None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(self._server))

    async def _connect(self, server: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, self.other = await loop.create_unix_connection(lambda: _End(None, self._seconds, self), server)
        except OSError:
            self.transport.abort()  # type: ignore[union-attr]
            return
        for data in self._early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            asyncio.get_running_loop().call_later(self._seconds, self.other.transport.write, data)  # type: ignore[union-attr]

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()
