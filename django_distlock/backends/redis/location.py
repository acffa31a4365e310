"""Where the server is and as whom to talk to it: from LOCATION to arguments of redis-py's connections."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

import redis.asyncio
from django.core.cache import InvalidCacheBackendError
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from ...exceptions import InvalidLockBackend
from ...texts import printable, quoted

Result = TypeVar("Result")

PASSWORDS = ("password", "ssl_password")

SCHEMES = ("redis://", "rediss://", "unix://")

# What a cache alias lends to locks. Timeouts and the pool are the locks' own: a cache under load
# takes no connection from them, and a cache that waits for ever does not make locks do so.
_LENT = {
    "host", "port", "path", "db", "username", "password", "credential_provider", "protocol",
    "socket_keepalive", "socket_keepalive_options", "socket_type",
}  # fmt: skip

_TWINS: tuple[tuple[Any, Any], ...] = (
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
    (redis.Connection, redis.asyncio.Connection),
)


class Secret(str):
    """A password that is not shown where the variables of a traceback are: on debug pages, and by error trackers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"


@dataclass(frozen=True, slots=True)
class Location:
    """One server. ``text`` names it in messages, without the password."""

    text: str
    connection_class: type[Any]
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        secrets = {key: Secret(self.arguments[key]) for key in PASSWORDS if isinstance(self.arguments.get(key), str)}
        object.__setattr__(self, "arguments", {**self.arguments, **secrets})

    def at(self, host: str, port: int) -> Location:
        """Another server that is talked to in the same way."""
        arguments = {**self.arguments, "host": host, "port": port}
        is_tls = issubclass(self.connection_class, redis.SSLConnection)
        return Location(_readable(arguments, is_tls), self.connection_class, arguments)

    @property
    def patience(self) -> float:
        """Seconds in which another server may take the place of one that failed; 0.0: none will."""
        return 0.0

    @property
    def is_half_plain(self) -> bool:
        """Whether the server is reached by TLS and those who tell where it is are not."""
        return False

    @property
    def server(self) -> tuple[object, ...]:
        """Which database of which server, as far as addresses tell."""
        return server_of(self.arguments)

    @property
    def async_connection_class(self) -> type[Any]:
        return _twin(self.connection_class)

    # Without retries, because redis-py would repeat commands by itself, and then nobody knows that one
    # went unanswered.

    def connected(self, *, within: float = inf, **arguments: Any) -> Any:
        """``within``: seconds for each step until the connection stands, where they are less than the timeouts.

        Raises redis-py's errors.
        """
        arguments = self._in_time(within, arguments)
        if (usual := arguments["socket_timeout"]) and within < usual:
            arguments |= {"socket_timeout": within, "redis_connect_func": partial(_shake_hands, usual)}
        connection = self.connection_class(**arguments, retry=Retry(NoBackoff(), 0))
        try:
            connection.connect()
        except Exception as error:
            if self._is_of_provider(error):
                raise redis.ConnectionError(f"{type(error).__name__}: {error}") from error
            raise
        return connection

    async def aconnected(self, *, within: float = inf, **arguments: Any) -> Any:
        arguments = self._in_time(within, arguments)
        connection = self.async_connection_class(**arguments, retry=AsyncRetry(NoBackoff(), 0))
        try:
            is_hurried = (usual := arguments["socket_timeout"]) and within < usual
            await in_time(within if is_hurried else None, connection.connect())
        except BaseException as error:
            await hang_up(connection)  # redis-py forgets that where the other side ended TLS, or a task was cancelled
            if isinstance(error, redis.ConnectionError) and isinstance(error.__cause__, redis.RedisError):
                raise error.__cause__ from None  # redis-py wraps it on unix sockets
            if isinstance(error, Exception) and self._is_of_provider(error):
                raise redis.ConnectionError(f"{type(error).__name__}: {error}") from error
            raise
        return connection

    def _in_time(self, within: float, arguments: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {**self.arguments, **arguments}
        return {**arguments, "socket_connect_timeout": min(within, arguments["socket_connect_timeout"])}

    def close(self) -> None:
        """Nobody needs the server any more."""

    def _is_of_provider(self, error: Exception) -> bool:
        """Whatever a credential provider raises means that there is no connection."""
        return bool(self.arguments.get("credential_provider")) and not isinstance(error, redis.RedisError | OSError)


def _shake_hands(timeout: float, connection: Any) -> None:
    """The socket has the timeout of a hurry until here; what comes after the handshake has the usual one."""
    connection.socket_timeout = timeout
    connection.on_connect()
    connection._sock.settimeout(timeout)  # redis-py has no public way


async def in_time(seconds: float | None, step: Awaitable[Result]) -> Result:
    """Raises redis-py's TimeoutError after so many seconds; None: never."""
    try:
        async with asyncio.timeout(seconds):
            return await step
    except builtins.TimeoutError as error:
        raise redis.TimeoutError("Timeout connecting to server") from error


async def hang_up(connection: Any) -> None:
    """Close a connection of asyncio at once: TLS would wait for the other side, and a loop that ends does not."""
    if writer := connection._writer:  # redis-py has no public way
        writer.transport.abort()
    await connection.disconnect(nowait=True)


def server_of(arguments: Mapping[str, Any]) -> tuple[object, ...]:
    database = int(arguments.get("db") or 0)
    if path := arguments.get("path"):
        return path, database
    host = str(arguments.get("host", "localhost")).lower()
    return "127.0.0.1" if host == "localhost" else host, int(arguments.get("port", 6379)), database


def _twin(connection_class: type[Any]) -> type[Any]:
    """The class of redis-py that does for asyncio what this one does for threads."""
    found: type[Any] = next(twin for kind, twin in _TWINS if issubclass(connection_class, kind))
    return found


def read_location(location: object, setting: str, timeouts: Mapping[str, float]) -> Location:
    """Raises InvalidLockBackend for a location that is neither a URL nor a django-redis cache."""
    if isinstance(location, str) and location.startswith("cache:"):
        kind, arguments = _of_cache(location.removeprefix("cache:"), setting)
    elif isinstance(location, str) and location.startswith(SCHEMES):
        kind, arguments = arguments_of_url(location, setting)
    else:
        raise InvalidLockBackend(
            f"{setting} is {quoted(location)}. It is a URL such as redis://127.0.0.1:6379/0 (or rediss://,"
            ' unix://), or "cache:default" for the server of that django-redis cache.'
        )
    arguments = {**arguments, **timeouts}
    return Location(_readable(arguments, issubclass(kind, redis.SSLConnection)), kind, arguments)


def arguments_of_url(url: str, setting: str) -> tuple[type[Any], dict[str, Any]]:
    try:
        arguments: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
        kind: type[Any] = arguments.pop("connection_class", redis.Connection)
        for pool_argument in ("max_connections", "timeout"):
            arguments.pop(pool_argument, None)
        kind(**arguments)
        _twin(kind)(**arguments)
    except TypeError as error:  # names an argument that no connection has
        raise InvalidLockBackend(f"{setting} is a URL with an unknown parameter: {error}.") from None
    except ValueError as error:  # neither shown nor chained, because it may quote the password
        raise InvalidLockBackend(f"{setting} is a URL that redis-py cannot read: {type(error).__name__}.") from None
    return kind, arguments


def _of_cache(cache: str, setting: str) -> tuple[type[Any], dict[str, Any]]:
    pool = pool_of_cache(cache, setting)
    if isinstance(pool, SentinelConnectionPool):
        raise InvalidLockBackend(f'{setting} is "cache:{cache}", a cache with sentinels. Here it is a single server.')
    return pool.connection_class, lent(pool)


def pool_of_cache(cache: str, setting: str) -> Any:
    """The connection pool of a django-redis cache, to its primary."""
    named = quoted(f"cache:{cache}")
    try:
        from django_redis import get_redis_connection  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidLockBackend(
            f'{setting} is {named}, which needs django-redis: pip install "django-distlock[django-redis]".'
        ) from error
    try:
        return get_redis_connection(cache, write=True).connection_pool
    except InvalidCacheBackendError as error:
        raise InvalidLockBackend(f"{setting} is {named}, but CACHES has no alias {quoted(cache)}.") from error
    except NotImplementedError as error:
        raise InvalidLockBackend(
            f"{setting} is {named}, but CACHES[{cache!r}] is no django-redis cache. Give a URL instead."
        ) from error


def lent(pool: Any) -> dict[str, Any]:
    """The arguments of a pool that say where and who."""
    return {key: value for key, value in pool.connection_kwargs.items() if key in _LENT or key.startswith("ssl_")}


def _readable(arguments: Mapping[str, Any], tls: bool) -> str:
    if path := arguments.get("path"):
        return printable(f"unix://{path}?db={arguments.get('db', 0)}")
    server = f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}/{arguments.get('db', 0)}"
    return printable(f"rediss://{server}" if tls else f"redis://{server}")
