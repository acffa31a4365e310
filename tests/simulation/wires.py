"""Connections on which bytes are sent by hand: to a model, and to a real server."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django_distlock.backends.redis.scripts import pack


class ModelWire:
    """A client's end without a network: what the server sends is here at once."""

    def __init__(self, server: Any) -> None:
        self._received = b""
        self.is_ended = False
        self._session = server.accept(self)

    def send(self, data: bytes) -> None:
        self._session.receive(data)

    def close(self) -> None:
        self._session.close()

    # For the session

    def reply(self, data: bytes) -> None:
        self._received += data

    def hang_up(self) -> None:
        self.is_ended = True

    reset = hang_up

    def receive(self) -> bytes:
        """What has come until now."""
        data, self._received = self._received, b""
        return data


class RealWire:
    """A socket to a server, by its path or its port."""

    def __init__(self, place: Path | int) -> None:
        self._socket = socket.socket(socket.AF_INET if isinstance(place, int) else socket.AF_UNIX)
        self._socket.settimeout(10.0)
        self._socket.connect(("127.0.0.1", place) if isinstance(place, int) else str(place))
        self._buffer = b""
        self.is_ended = False

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()

    def receive(self) -> bytes:
        """The next reply."""
        while (length := _length(self._buffer, 0)) is None:
            data = self._socket.recv(65536)
            if not data:
                self.is_ended = True
                return b""
            self._buffer += data
        reply, self._buffer = self._buffer[:length], self._buffer[length:]
        return reply


def exchanged(wire: ModelWire | RealWire, *words: str | int) -> bytes:
    """The raw reply to a command."""
    wire.send(pack(*words))
    return wire.receive()


def _length(data: bytes, start: int) -> int | None:
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
            if (found := _length(data, position)) is None:
                return None
            position = found
    return position


__all__: Sequence[str] = ["ModelWire", "RealWire", "exchanged"]
