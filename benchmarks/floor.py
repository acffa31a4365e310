"""The least that a lock can cost: a plain socket, commands packed beforehand, and no checks."""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

COMPARE_AND_DELETE = b"if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0"
TOKEN_LENGTH = 26


def pack(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class Client:
    """One connection. It reads replies of one line, and lists of texts; the floor needs no others."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def call(self, packed: bytes) -> bytes:
        self._socket.sendall(packed)
        reply = self._socket.recv(4096)
        if reply.startswith(b"-"):
            raise RuntimeError(reply.decode())
        return reply


def renew(path: str, names: Sequence[str]) -> None:
    """Extend the TTL of the keys of all names, in one round trip."""
    packed = b"".join(pack(b"PEXPIRE", f"lock:{name}".encode(), b"30000") for name in names)
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
        one.sendall(packed)
        missing = len(names)
        while missing:
            missing -= one.recv(65536).count(b"\n")


class Wires:
    """One connection to each of several servers. A call is sent to all of them, and ends when all have answered."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._selector = selectors.DefaultSelector()
        for path in paths:
            one = socket.socket(socket.AF_UNIX)
            one.connect(path)
            self._selector.register(one, selectors.EVENT_READ)
        self._sockets = [cast(socket.socket, key.fileobj) for key in self._selector.get_map().values()]

    def call(self, packed: bytes) -> bytes:
        """Returns the last reply."""
        for one in self._sockets:
            one.sendall(packed)
        missing, reply = len(self._sockets), b""
        while missing:
            for key, _ in self._selector.select():
                reply = cast(socket.socket, key.fileobj).recv(4096)
                missing -= 1
        return reply


class Pair:
    """``SET NX PX`` and a delete that compares the token."""

    def __init__(self, paths: str | Sequence[str], name: bytes, ttl_ms: int) -> None:
        self._client = Client(paths) if isinstance(paths, str) else Wires(paths)
        self._client.call(pack(b"SCRIPT", b"LOAD", COMPARE_AND_DELETE))
        digest = hashlib.sha1(COMPARE_AND_DELETE, usedforsecurity=False).hexdigest().encode()
        blank = b"-" * TOKEN_LENGTH
        self._acquire = pack(b"SET", name, blank, b"NX", b"PX", b"%d" % ttl_ms).partition(blank)
        self._release = pack(b"EVALSHA", digest, b"1", name, blank).partition(blank)

    def __call__(self) -> None:
        token = os.urandom(TOKEN_LENGTH // 2).hex().encode()
        before, _, after = self._acquire
        granted = self._client.call(before + token + after)
        before, _, after = self._release
        released = self._client.call(before + token + after)
        if granted != b"+OK\r\n" or released != b":1\r\n":
            raise RuntimeError("the lock of the floor is held by somebody else")


class Baton:
    """One element in a list. The client that pops it has the lock, and pushes it back. It has no TTL and no owner, and
    clients are served in order."""

    def __init__(self, path: str, name: bytes) -> None:
        self._client = Client(path)
        self._take = pack(b"BLPOP", name, b"0")
        self._give = pack(b"RPUSH", name, b"baton")

    def lay_down(self) -> None:
        self._client.call(self._give)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._client.call(self._take)
        try:
            yield
        finally:
            self._client.call(self._give)
