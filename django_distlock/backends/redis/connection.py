"""Connections of redis-py that open in time, also if the look-up of a name is slow or a name has many addresses.

redis-py itself gives each address the whole timeout, and the resolver no time limit.
"""

from __future__ import annotations

import asyncio
import builtins
import socket
import threading
from collections.abc import Iterator
from math import inf
from typing import Any

import redis.asyncio

from ...utils import fork
from ...utils.clock import clock, sleep
from ...utils.shared_answer import SharedAnswer
from ...utils.threads import start_thread
from ...utils.wakeup import WakeEvent
from .exchange import AsyncDirectExchange, DirectExchange, RedisPyExchange
from .timers import RunningFor

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between attempts while a server accepts no connections
MOST_KNOWN = 1000  # addresses that failed
LATELY = 10.0  # seconds for which a failed address is tried after the others of its name
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes

Address = tuple[Any, ...]  # as getaddrinfo has it: family, type, protocol, canonical name, address


# Names. getaddrinfo has no timeout, so it runs in a thread, one for all callers with the same name.

_lookups: dict[tuple[str, int, int], SharedAnswer[list[Address]]] = {}
fork.in_child(_lookups.clear)  # its threads are the parent's
_failed_at: dict[Address, float] = {}


def _lookup(host: str, port: int, family: int) -> SharedAnswer[list[Address]]:
    key = host, port, family
    if (known := _lookups.get(key)) is not None:
        return known
    lookup: SharedAnswer[list[Address]] = SharedAnswer()
    try:  # at once, if there is nothing to look up
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass
    else:
        lookup.find(lambda: found)
        return lookup
    try:
        if (other := _lookups.setdefault(key, lookup)) is not lookup:
            return other
        if start_thread(f"distlock-lookup-{host}", _look_up, lookup, key) is None:
            _look_up(lookup, key)
    except BaseException:  # interrupted: perhaps nobody looks it up
        _forget(lookup, key)
        raise
    return lookup


def _look_up(lookup: SharedAnswer[list[Address]], key: tuple[str, int, int]) -> None:
    def addresses() -> list[Address]:
        try:
            return socket.getaddrinfo(*key, socket.SOCK_STREAM)
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from error

    lookup.find(addresses)
    _forget(lookup, key)


def _forget(lookup: SharedAnswer[list[Address]], key: tuple[str, int, int]) -> None:
    if _lookups.get(key) is lookup:
        _lookups.pop(key, None)


def _addresses(lookup: SharedAnswer[list[Address]], host: str) -> list[Address]:
    if not lookup.is_there:
        raise socket.gaierror(socket.EAI_AGAIN, f"The name {host} was not resolved in time")
    # Those that failed lately come last, because each costs its share of the time.
    return sorted(lookup.result(), key=lambda address: clock() - _failed_at.get(address[4], -inf) < LATELY)


def _shares(addresses: list[Address], deadline: float) -> Iterator[tuple[Address, float]]:
    """Each address with its share of the time that is left, in seconds."""
    for number, address in enumerate(addresses):
        yield address, _left(deadline) / (len(addresses) - number)


def _failed(address: Address, error: Exception) -> OSError:
    if len(_failed_at) > MOST_KNOWN:
        _failed_at.clear()
    _failed_at[address[4]] = clock()
    return error if isinstance(error, OSError) else builtins.TimeoutError(str(error))


def _left(deadline: float) -> float:
    return max(0.01, min(deadline - clock(), threading.TIMEOUT_MAX))


class _Tcp:
    """``connect_deadline``: the moment on ``clock()`` until which the socket must be open."""

    connect_deadline = inf

    def __init__(self, **arguments: Any) -> None:
        keepalive = {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
        super().__init__(**{"socket_keepalive": True, "socket_keepalive_options": keepalive, **arguments})

    def _open_socket(self: Any, address: Address) -> socket.socket:
        opened = socket.socket(*address[:3])
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.socket_keepalive:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in self.socket_keepalive_options.items():
                    opened.setsockopt(socket.IPPROTO_TCP, option, value)
        except BaseException:
            opened.close()
            raise
        return opened


class _SocketKeeper:
    """For threads. ``sock``: of the open connection, or of the last one."""

    def _connect(self: Any) -> socket.socket:
        opened: socket.socket = super()._connect()  # type: ignore[misc]
        self.sock = opened
        return opened


class TcpConnection(DirectExchange, _Tcp, redis.Connection):
    def _connect(self) -> socket.socket:
        lookup, resolved = _lookup(self.host, self.port, self.socket_type), WakeEvent()
        lookup.notify(resolved)
        resolved.wait(_left(self.connect_deadline))
        failure = OSError(f"The name {self.host} has no address")
        for address, seconds in _shares(_addresses(lookup, self.host), self.connect_deadline):
            opened = self._open_socket(address)
            try:
                opened.settimeout(seconds)
                opened.connect(address[4])
                opened.settimeout(_left(self.connect_deadline))
            except OSError as error:
                opened.close()
                failure = _failed(address, error)
            except BaseException:
                opened.close()
                raise
            else:
                _failed_at.pop(address[4], None)
                self.sock = opened
                return opened
        raise failure


class TlsConnection(_SocketKeeper, redis.SSLConnection, TcpConnection):
    pass


class AsyncTcpConnection(AsyncDirectExchange, _Tcp, redis.asyncio.Connection):
    async def _connect(self) -> None:
        lookup, resolved = _lookup(self.host, self.port, self.socket_type), WakeEvent()
        lookup.notify(resolved)
        await resolved.await_set(_left(self.connect_deadline))
        failure = OSError(f"The name {self.host} has no address")
        for address, seconds in _shares(_addresses(lookup, self.host), self.connect_deadline):
            opened = self._open_socket(address)
            try:
                async with RunningFor(seconds, "Timeout connecting to server"):
                    await asyncio.get_running_loop().sock_connect(opened, address[4])
            except (OSError, redis.TimeoutError) as error:
                opened.close()
                failure = _failed(address, error)
            except BaseException:
                opened.close()
                raise
            else:
                _failed_at.pop(address[4], None)
                self._reader, self._writer = await asyncio.open_connection(sock=opened, **self._tls())
                return
        raise failure

    def _tls(self) -> dict[str, Any]:
        return {}


class AsyncTlsConnection(AsyncTcpConnection, redis.asyncio.SSLConnection):
    def _tls(self) -> dict[str, Any]:
        return {"ssl": self.ssl_context.get(), "server_hostname": self.host}


class _Unix:
    """The same. A server on a unix socket accepts as many at a time as its backlog is long; others have to wait."""

    connect_deadline = inf

    def _open_socket(self: Any) -> socket.socket | None:
        """None: not possible now."""
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.setblocking(False)
            opened.connect(self.path)
        except BlockingIOError:
            opened.close()
            if clock() >= self.connect_deadline:
                raise
            return None
        except BaseException:
            opened.close()
            raise
        return opened


class UnixConnection(DirectExchange, _Unix, redis.UnixDomainSocketConnection):
    def _connect(self) -> socket.socket:
        pause = FIRST_PAUSE
        while (opened := self._open_socket()) is None:
            sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        opened.settimeout(_left(self.connect_deadline))
        self.sock = opened
        return opened


class AsyncUnixConnection(AsyncDirectExchange, _Unix, redis.asyncio.UnixDomainSocketConnection):
    async def _connect(self) -> None:
        pause = FIRST_PAUSE
        while (opened := self._open_socket()) is None:
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=opened)


_OURS: dict[type[Any], type[Any]] = {
    redis.Connection: TcpConnection,
    redis.SSLConnection: TlsConnection,
    redis.UnixDomainSocketConnection: UnixConnection,
}
_TWINS: tuple[tuple[Any, Any], ...] = (
    (redis.SSLConnection, AsyncTlsConnection),
    (redis.UnixDomainSocketConnection, AsyncUnixConnection),
    (redis.Connection, AsyncTcpConnection),
)


def ours(connection_class: type[Any]) -> type[Any]:
    """Our class in the place of a class of redis-py. Another class, such as of a cache, gets ``exchange()``."""
    if connection_class not in _OURS:
        bases = _SocketKeeper, RedisPyExchange, connection_class
        _OURS[connection_class] = type(connection_class.__name__, bases, {"__module__": connection_class.__module__})
    return _OURS[connection_class]


def twin(connection_class: type[Any]) -> type[Any]:
    """The class for asyncio that corresponds to this class for threads."""
    found: type[Any] = next(twin for kind, twin in _TWINS if issubclass(connection_class, kind))
    return found


async def hang_up(connection: Any) -> None:
    """Close a connection of asyncio at once: TLS would wait for the other side, and the loop may end."""
    if writer := connection._writer:  # noqa: SLF001 - redis-py has no public way
        writer.transport.abort()
    await connection.disconnect(nowait=True)
