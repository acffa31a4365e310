"""Where the server is and how to log in: from LOCATION to arguments of redis-py's connections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Any
from weakref import WeakSet

import redis
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.redis import RedisCache, RedisCacheClient
from django.utils.module_loading import import_string
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from ...exceptions import InvalidLockBackend
from ...utils import fork
from ...utils.clock import clock
from ...utils.drive import Call, Steps, adrive, drive
from ...utils.text import printable, quoted
from ...version import VERSION
from ..base import BaseLockBackend
from .connection import hang_up, ours, twin
from .credentials import Credentials, Secret
from .errors import EndedTls, is_about_leaving
from .timers import RunningFor

PASSWORDS = ("password", "ssl_password")

MARGIN = 0.05  # seconds
DEFAULT = "redis://127.0.0.1:6379/0"
SCHEMES = ("redis://", "rediss://", "unix://")

# The arguments that locks take from a cache alias. Timeouts and the pool are not among them: a cache under load takes
# no connections from locks, and a cache without a timeout does not make locks wait for ever.
_LENT = {
    "host", "port", "path", "db", "username", "password", "credential_provider", "protocol",
    "socket_keepalive", "socket_keepalive_options", "socket_type",
}  # fmt: skip


_connections: WeakSet[Any] = WeakSet()  # all connections that threads use


def _hang_up_in_child() -> None:
    """Greenlets that a fork has copied must not read their parent's replies."""
    for connection in list(_connections):
        connection.disconnect()  # in the child; the parent's stays open
    _connections.clear()


fork.in_child(_hang_up_in_child)


def _named(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with one that makes ``CLIENT LIST`` show the version of the package, if they have none."""
    return arguments if {"lib_name", "driver_info"} & arguments.keys() else {**_name(), **arguments}


@cache  # to make it, redis-py reads the metadata of its own package, which takes a millisecond
def _name() -> dict[str, Any]:
    if (driver_info := getattr(redis, "DriverInfo", None)) is not None:  # newer versions warn of lib_name
        return {"driver_info": driver_info().add_upstream_driver("django-distlock", VERSION)}
    return {"lib_name": f"redis-py(django-distlock_v{VERSION})"}


@dataclass(frozen=True, slots=True)
class Location:
    """One server. ``text`` names it in messages, without the password.

    ``failover_timeout``: seconds in which another server may take the place of one that failed; 0.0: none will.
    """

    text: str
    connection_class: type[Any]
    arguments: Mapping[str, Any]
    failover_timeout: float = 0.0

    def __post_init__(self) -> None:
        secrets = {key: Secret(self.arguments[key]) for key in PASSWORDS if isinstance(self.arguments.get(key), str)}
        provider = self.arguments.get("credential_provider")
        credentials = {} if provider is None else {"credential_provider": Credentials.of(provider)}
        # Our commands do not need RESP3, with which a server may send something between two replies.
        object.__setattr__(self, "arguments", {"protocol": 2, **_named(self.arguments), **secrets, **credentials})

    def at(self, host: str, port: int) -> Location:
        """Another server with the same arguments."""
        arguments = {**self.arguments, "host": host, "port": port}
        is_tls = issubclass(self.connection_class, redis.SSLConnection)
        return Location(_readable(arguments, is_tls), self.connection_class, arguments)

    @property
    def is_half_plain(self) -> bool:
        """Whether the server is reached by TLS, and its sentinels are not."""
        return False

    @property
    def server(self) -> tuple[object, ...]:
        """The database of the server, by its address."""
        return server_of(self.arguments)

    @property
    def credentials(self) -> Credentials | None:
        """The source of user and password, which may differ each time."""
        return self.arguments.get("credential_provider")

    @property
    def async_connection_class(self) -> type[Any]:
        return twin(self.connection_class)

    # Without retries: redis-py would repeat commands by itself, and nobody would know that one was not answered.

    def connected(self, *, timeout: float = inf, **arguments: Any) -> Any:
        """``timeout``: seconds to open the connection, if less than in the arguments.

        Raises redis-py's errors.
        """
        if self.credentials is None:
            return self.open(timeout, arguments)
        return drive(self._log_in(timeout, arguments), self)

    async def aconnected(self, *, timeout: float = inf, **arguments: Any) -> Any:
        if self.credentials is None:
            return await self.aopen(timeout, arguments)
        return await adrive(self._log_in(timeout, arguments), self)

    def _log_in(self, timeout: float, arguments: Mapping[str, Any]) -> Steps[Any]:
        """A connection with the login of the credential provider, which is asked again if the server refuses it."""
        credentials, longest = self.credentials, self.arguments["socket_connect_timeout"]
        assert credentials
        deadline = clock() + timeout
        login = yield Call("login", (min(timeout, longest),), on=credentials)
        try:
            connection = yield Call("open", (deadline - clock(), {**arguments, "credential_provider": login}))
        except redis.AuthenticationError:  # the password may just have changed
            login = yield Call("login", (min(deadline - clock(), longest),), {"anew": True}, on=credentials)
            connection = yield Call("open", (deadline - clock(), {**arguments, "credential_provider": login}))
        credentials.follow(connection, login)
        return connection

    def open(self, timeout: float, arguments: Mapping[str, Any]) -> Any:
        """A connection with the arguments of the location and these, such as the login that a provider gave."""
        deadline, arguments = clock() + timeout, {**self.arguments, **arguments}
        shake_hands = partial(_shake_hands, deadline)
        connection = self.connection_class(**arguments, retry=Retry(NoBackoff(), 0), redis_connect_func=shake_hands)
        _connections.add(connection)
        connection.connect_deadline = min(deadline, clock() + arguments["socket_connect_timeout"])
        try:
            connection.connect()
        except Exception as error:
            if better := self._better(error):
                raise better from error
            raise
        return connection

    async def aopen(self, timeout: float, arguments: Mapping[str, Any]) -> Any:
        """Without redis-py's own timeouts, which continue while the event loop does not run."""
        timeouts = {"socket_connect_timeout": None, "socket_timeout": None}
        arguments = {**self.arguments, **arguments, **timeouts}
        usual = [self.arguments[each] for each in timeouts]
        connection = self.async_connection_class(**arguments, retry=AsyncRetry(NoBackoff(), 0))
        connection.connect_deadline = clock() + min(timeout, usual[0])
        try:
            # A bit longer than the socket may take, because its error says more about what took so long.
            async with RunningFor(min(timeout, sum(usual)) + MARGIN, "Timeout connecting to server"):
                await connection.connect()
        except BaseException as error:
            await hang_up(connection)  # redis-py does not do this if the other side ended TLS, or a task was cancelled
            if isinstance(error, Exception) and (better := self._better(error)):
                raise better from error
            raise
        return connection

    def close(self) -> None:
        """Call this when nobody needs the server any more."""

    def _better(self, error: Exception) -> Exception | None:
        """An error that says more about why there is no connection."""
        is_tls = issubclass(self.connection_class, redis.SSLConnection)
        return EndedTls(str(error)) if is_tls and is_about_leaving(error) else None


def _shake_hands(deadline: float, connection: Any) -> None:
    """In the time that is left. After the handshake, the usual timeout holds."""
    if connection.pid != fork.pid():
        raise redis.ConnectionError("the process was forked")
    usual, read = connection.socket_timeout, connection.read_response

    def read_in_time(*args: Any, **options: Any) -> Any:
        """Replies that come one by one share the time of all."""
        connection.sock.settimeout(max(0.01, min(usual, deadline - clock())))
        return read(*args, **options)

    connection.read_response = read_in_time
    try:
        connection.on_connect()
    finally:
        del connection.read_response
    connection.sock.settimeout(usual)


def server_of(arguments: Mapping[str, Any]) -> tuple[object, ...]:
    database = int(arguments.get("db") or 0)
    if path := arguments.get("path"):
        return path, database
    host = str(arguments.get("host", "localhost")).lower()
    return "127.0.0.1" if host == "localhost" else host, int(arguments.get("port", 6379)), database


def check_numbers(backend: BaseLockBackend) -> None:
    """Raises InvalidLockBackend for an option that is no number, or none above 0."""
    for option in ("socket_timeout", "socket_connect_timeout", "max_connections", "failover_timeout"):
        value, whole = backend.option[option], option == "max_connections"
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or not 0 < value < inf:
            needed = "a whole number above 0" if whole else "a number of seconds above 0"
            raise InvalidLockBackend(f"{backend.setting('OPTIONS')}[{option!r}] is {quoted(value)}; it is {needed}.")


def read_credentials(backend: BaseLockBackend) -> dict[str, Any]:
    """The argument of connections for the option ``credential_provider``: the source of user and password."""
    if (given := backend.option["credential_provider"]) is None:
        return {}
    return {"credential_provider": read_provider(given, f"{backend.setting('OPTIONS')}['credential_provider']")}


def read_provider(given: object, where: str) -> CredentialProvider:
    """From an object or a dotted path. Raises InvalidLockBackend."""
    provider: Any = given
    try:
        provider = import_string(given) if isinstance(given, str) else given
        provider = provider() if isinstance(provider, type) else provider
    except (ImportError, TypeError) as error:
        raise InvalidLockBackend(f"{where} is {quoted(given)}; no provider can be made of it: {error}.") from error
    if not all(callable(getattr(provider, name, None)) for name in ("get_credentials", "get_credentials_async")):
        raise InvalidLockBackend(
            f"{where} is {quoted(given)}; it is a redis.CredentialProvider, or the dotted path of one or of its class."
        )
    found: CredentialProvider = provider
    return found


def completed(arguments: Mapping[str, Any], own: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The arguments of connections, completed by ours: timeouts, and the source of user and password."""
    if "credential_provider" in own and (arguments.get("username") or arguments.get("password")):
        raise InvalidLockBackend(
            f"{setting} names a user or a password, and OPTIONS has a 'credential_provider', which names others."
            " Take one of them out."
        )
    return {**arguments, **own}


def read_location(location: object, setting: str, own: Mapping[str, Any]) -> Location:
    """``own``: see ``completed()``. Raises InvalidLockBackend for what is neither a URL nor a cache in Redis."""
    if isinstance(location, str) and location.startswith("cache:"):
        kind, arguments = _of_cache(location.removeprefix("cache:"), setting)
    elif isinstance(location, str) and location.startswith(SCHEMES):
        kind, arguments = arguments_of_url(location, setting)
    else:
        raise InvalidLockBackend(
            f"{setting} is {quoted(location)}. It is a URL such as redis://127.0.0.1:6379/0 (or rediss://,"
            ' unix://), or "cache:default" for the server of that cache.'
        )
    arguments = completed(arguments, own, setting)
    return Location(_readable(arguments, issubclass(kind, redis.SSLConnection)), ours(kind), arguments)


def arguments_of_url(url: str, setting: str) -> tuple[type[Any], dict[str, Any]]:
    try:
        arguments: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
        kind: type[Any] = arguments.pop("connection_class", redis.Connection)
        for pool_argument in ("max_connections", "timeout"):
            arguments.pop(pool_argument, None)
        for one_kind in (kind, twin(kind)):
            one_kind(**_named(arguments))
    except TypeError as error:  # its text names the unknown argument
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
    """The connection pool of a cache in Redis (of Django or of django-redis), to its primary."""
    named = quoted(f"cache:{cache}")
    if cache not in caches.settings:
        raise InvalidLockBackend(f"{setting} is {named}, but CACHES has no alias {quoted(cache)}.")
    try:
        known: Any = caches[cache]
    except InvalidCacheBackendError as error:
        is_missing = getattr(error.__cause__, "name", "") == "django_redis"  # the module that was not found
        hint = ' pip install "django-distlock[django-redis]"' if is_missing else ""
        raise InvalidLockBackend(f"{setting} is {named}, which cannot be loaded: {error}.{hint}") from error
    if isinstance(known, RedisCache):
        # A separate client, because the client of the cache is private. Only its arguments are used.
        location, options = caches.settings[cache].get("LOCATION", ""), caches.settings[cache].get("OPTIONS", {})
        servers = re.split("[;,]", location) if isinstance(location, str) else location
        return RedisCacheClient(servers, **options).get_client(write=True).connection_pool
    try:
        from django_redis import get_redis_connection  # type: ignore[import-untyped]

        return get_redis_connection(cache, write=True).connection_pool
    except (ImportError, NotImplementedError) as error:
        raise InvalidLockBackend(
            f"{setting} is {named}, but CACHES[{cache!r}] is no cache in Redis, neither Django's nor that of"
            " django-redis. Give a URL instead."
        ) from error


def lent(pool: Any) -> dict[str, Any]:
    """The arguments of a pool that name the server and the user."""
    return {key: value for key, value in pool.connection_kwargs.items() if key in _LENT or key.startswith("ssl_")}


def _readable(arguments: Mapping[str, Any], tls: bool) -> str:
    if path := arguments.get("path"):
        return printable(f"unix://{path}?db={arguments.get('db', 0)}")
    server = f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}/{arguments.get('db', 0)}"
    return printable(f"rediss://{server}" if tls else f"redis://{server}")
