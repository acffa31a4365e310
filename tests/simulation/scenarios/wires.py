"""Connections on which bytes are sent by hand: to a model, and to a real server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from django_distlock.backends.redis.scripts import pack

if TYPE_CHECKING:
    from ..servers.redis_server import Server

Place = Path | int  # of a unix socket, or a port of 127.0.0.1

SILENCE = 0.3  # seconds in which nothing comes from a real server that has nothing to say


class Wire:
    """``receive()``: the next reply, or b"" if none comes. ``is_ended``: the server has hung up."""

    def __init__(self) -> None:
        self.buffer = b""
        self.is_ended = False

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def receive(self, *, soon: bool = False) -> bytes:
        """``soon``: what is not on its way does not come."""
        while (length := _end_of_reply(self.buffer, 0)) is None:
            if not self._read(soon=soon):
                return b""
        reply, self.buffer = self.buffer[:length], self.buffer[length:]
        return reply

    def _read(self, *, soon: bool) -> bool:
        return False

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelWire(Wire):
    """A client's end without a network: what the server sends is here at once."""

    process: Any = None  # that has it

    def __init__(self, server: Server) -> None:
        super().__init__()
        if not server.is_up:
            raise ConnectionRefusedError
        socket_of_client: Any = self
        self._session: Any = server.accept(socket_of_client)

    def send(self, data: bytes) -> None:
        self._session.receive(data)

    def close(self) -> None:
        self._session.close()

    # For the session

    def reply(self, data: bytes) -> None:
        self.buffer += data

    def hang_up(self) -> None:
        self.is_ended = True

    reset = hang_up


class RealWire(Wire):
    """A socket to a server, by its path or its port."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_INET if isinstance(place, int) else socket.AF_UNIX)
        try:
            self._socket.connect(("127.0.0.1", place) if isinstance(place, int) else str(place))
        except OSError:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self.is_ended = True

    def _read(self, *, soon: bool) -> bool:
        self._socket.settimeout(SILENCE if soon else 60.0)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return False
        except ConnectionResetError:
            data = b""
        self.buffer += data
        self.is_ended = self.is_ended or not data
        return bool(data)

    def close(self) -> None:
        self._socket.close()


def exchanged(wire: Wire, *words: str | bytes | int) -> bytes:
    """The raw reply to a command."""
    wire.send(pack(*words))
    return wire.receive()


def _end_of_reply(data: bytes, start: int) -> int | None:
    """Where the reply ends that begins there; None: it is not complete."""
    end = data.find(b"\r\n", start)
    if end < 0:
        return None
    kind, head, position = data[start : start + 1], data[start + 1 : end], end + 2
    if kind in b"$=" and head != b"-1":
        stop = position + int(head) + 2
        return stop if len(data) >= stop else None
    if kind in b"*>%~" and head != b"-1":
        for _ in range(int(head) * (2 if kind == b"%" else 1)):
            if (found := _end_of_reply(data, position)) is None:
                return None
            position = found
    return position


def elements(array: bytes) -> list[bytes]:
    """The replies in an array."""
    position, found = array.index(b"\r\n") + 2, []
    while position < len(array) and (end := _end_of_reply(array, position)) is not None:
        found.append(array[position:end])
        position = end
    return found
