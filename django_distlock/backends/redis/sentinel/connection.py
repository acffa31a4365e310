"""Connections to whichever server is the master, as the sentinels say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NoReturn

import redis
from redis.exceptions import TimeoutError

from ....utils.clock import clock
from ..config import Location
from ..connection import AsyncTcpConnection, AsyncTlsConnection, TcpConnection, TlsConnection, hang_up
from ..errors import NoMaster, NotSent
from ..exchange import read_by
from ..scripts import pack
from ..timers import RunningFor
from .discovery import Master, Sentinels

_ROLE = pack("ROLE")


class _MasterConnection:
    """When a sentinel has named another master, it is of no use any more, and its replies do not count."""

    sentinels: Sentinels
    master: Master | None = None  # None: the connection is being opened

    def send_packed_command(self, *args: Any, **options: Any) -> Any:
        self._check_before_sending()
        return super().send_packed_command(*args, **options)  # type: ignore[misc]

    def _check_before_sending(self) -> None:
        if self.master is not None:
            if self.master is not self.sentinels.master:
                raise NotSent(self._moved_message())
            self.sentinels.used_at = clock()

    def _check_master(self) -> None:
        if self.master is not None and self.master is not self.sentinels.master:
            raise NoMaster(self._moved_message())

    def _moved_message(self) -> str:
        return f"{self.master} is not known to be the master any more"


class _ThreadMasterConnection(_MasterConnection):
    def read_response(self, *args: Any, **options: Any) -> Any:
        self._check_master()
        reply = super().read_response(*args, **options)  # type: ignore[misc]
        self._check_master()
        return reply

    def exchange(self, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        self._check_before_sending()
        replies: list[Any] = super().exchange(packed, number, timeout)  # type: ignore[misc]
        self._check_master()
        return replies

    def receive(self, timeout: float) -> Any:
        """A connection that only waits for messages must also notice that the master has moved."""
        self._check_master()
        message = super().receive(timeout)  # type: ignore[misc]
        self._check_master()
        return message

    def can_read(self, *args: Any, **options: Any) -> Any:
        self._check_master()
        return super().can_read(*args, **options)  # type: ignore[misc]


class _Connection(_ThreadMasterConnection, TcpConnection):
    pass


class _SSLConnection(_ThreadMasterConnection, TlsConnection):
    pass


class _AsyncMasterConnection(_MasterConnection):
    async def exchange(self, packed: bytes, number: int, timeout: float) -> list[Any]:
        self._check_before_sending()
        replies: list[Any] = await super().exchange(packed, number, timeout)  # type: ignore[misc]
        self._check_master()
        return replies

    async def read_response(self, *args: Any, **options: Any) -> Any:
        self._check_master()
        reply = await super().read_response(*args, **options)  # type: ignore[misc]
        self._check_master()
        return reply


class _AsyncConnection(_AsyncMasterConnection, AsyncTcpConnection):
    pass


class _AsyncSSLConnection(_AsyncMasterConnection, AsyncTlsConnection):
    pass


@dataclass(frozen=True, slots=True)
class MasterLocation(Location):
    """The master of a service."""

    sentinels: Sentinels = field(kw_only=True)

    @classmethod
    def of(
        cls, sentinels: Sentinels, arguments: Mapping[str, Any], *, tls: bool, failover_timeout: float
    ) -> MasterLocation:
        watched = ", ".join(sentinel.text for sentinel in sentinels.locations)
        text = f"{sentinels.service}/{arguments.get('db', 0)} of the sentinels {watched}"
        kind = _SSLConnection if tls else _Connection
        return cls(text, kind, arguments, failover_timeout, sentinels=sentinels)

    @property
    def async_connection_class(self) -> type[Any]:
        return _AsyncSSLConnection if self.connection_class is _SSLConnection else _AsyncConnection

    @property
    def is_half_plain(self) -> bool:
        known = self.sentinels.locations
        is_tls = [issubclass(one.connection_class, redis.SSLConnection) for one in (self, *known)]
        return is_tls[0] and not all(is_tls)

    @property
    def server(self) -> tuple[object, ...]:
        sentinels = frozenset(sentinel.server[:2] for sentinel in self.sentinels.locations)
        return self.sentinels.service, sentinels, int(self.arguments.get("db") or 0)

    def connected(self, *, timeout: float = inf, **arguments: Any) -> Any:
        deadline = clock() + min(timeout, self._default_timeout)
        master = self.sentinels.find(deadline - clock())
        connection = None
        try:
            there = {**arguments, "host": master.host, "port": master.port}
            connection = Location.connected(self, timeout=deadline - clock(), **there)
            connection.send_packed_command([_ROLE], check_health=False)
            self._mark(connection, master, read_by(connection, deadline))
        except BaseException as error:
            if connection is not None:
                connection.disconnect()
            self._raise_failure(master, error)
        return connection

    async def aconnected(self, *, timeout: float = inf, **arguments: Any) -> Any:
        deadline = clock() + min(timeout, self._default_timeout)
        master = await self.sentinels.afind(deadline - clock())
        connection = None
        try:
            there = {**arguments, "host": master.host, "port": master.port}
            connection = await Location.aconnected(self, timeout=deadline - clock(), **there)
            async with RunningFor(max(0.0, deadline - clock())):
                await connection.send_packed_command([_ROLE], check_health=False)
                self._mark(connection, master, await connection.read_response(disable_decoding=True))
        except BaseException as error:
            if connection is not None:
                await hang_up(connection)
            self._raise_failure(master, error)
        return connection

    def close(self) -> None:
        self.sentinels.close()

    @property
    def _default_timeout(self) -> float:
        """Seconds to find the master, and to log in there."""
        return float(self.arguments["socket_connect_timeout"] + self.arguments["socket_timeout"])

    def _mark(self, connection: _MasterConnection, master: Master, role: list[Any]) -> None:
        if role[0] != b"master":
            raise NoMaster(f"{master}, which the sentinels name, is no master yet, or no more")
        connection.sentinels, connection.master = self.sentinels, self.sentinels.confirm(master)

    def _raise_failure(self, master: Master, error: BaseException) -> NoReturn:
        self.sentinels.report_failure()
        if isinstance(error, TimeoutError):
            raise NoMaster(f"{master}, which the sentinels name as the master, does not answer: {error}") from error
        raise error
