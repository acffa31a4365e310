"""From the settings of an entry to the location of its server: one server, or a master that sentinels watch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from redis.sentinel import SentinelConnectionPool

from ....exceptions import InvalidLockBackend
from ....options import as_seconds
from ....utils.text import quoted
from ...base import BaseLockBackend
from ..config import (
    DEFAULT,
    SCHEMES,
    Location,
    arguments_of_url,
    completed,
    lent,
    pool_of_cache,
    read_location,
    read_provider,
)
from ..connection import TcpConnection, TlsConnection
from .connection import MasterLocation
from .discovery import Sentinels

SENTINEL_TIMEOUT = 0.5  # seconds for an answer of a sentinel, unless sentinel_kwargs say otherwise


def find_location(backend: BaseLockBackend, own: Mapping[str, Any]) -> Location:
    """Raises InvalidLockBackend, which names what to change."""
    given = backend.settings.get("LOCATION", DEFAULT)
    setting = backend.setting("LOCATION")
    is_cache = isinstance(given, str) and given.startswith("cache:")
    if backend.option["sentinels"] is None:
        _refuse_without_sentinels(backend)
        if is_cache and isinstance(
            pool := pool_of_cache(given.removeprefix("cache:"), setting), SentinelConnectionPool
        ):
            return _location_of_pool(pool, own, backend)
        return read_location(given, setting, own)
    if is_cache:
        raise InvalidLockBackend(
            f"{setting} is {quoted(given)}, so that cache says where the sentinels are; take 'sentinels' out of"
            f" {backend.setting('OPTIONS')}, or name no cache."
        )
    service, arguments, tls = _master(backend, backend.settings.get("LOCATION"))
    sentinels = Sentinels(service, _sentinels(backend), backend.timing)
    return MasterLocation.of(
        sentinels, completed(arguments, own, setting), tls=tls, failover_timeout=backend.option["failover_timeout"]
    )


def _refuse_without_sentinels(backend: BaseLockBackend) -> None:
    for option in ("service_name", "sentinel_kwargs"):
        if backend.option[option] is not None:
            raise InvalidLockBackend(
                f"{backend.setting('OPTIONS')} has {option!r} but no 'sentinels', a list of (host, port)."
            )


def _master(backend: BaseLockBackend, location: object) -> tuple[str, dict[str, Any], bool]:
    """The name of the service, the arguments of connections to its master, and whether they use TLS."""
    service = backend.option["service_name"]
    if service is not None and not (isinstance(service, str) and service):
        raise InvalidLockBackend(
            f"{backend.setting('OPTIONS')}['service_name'] is {quoted(service)}; it is the name under which the"
            " sentinels watch the master, such as 'mymaster'."
        )
    if location is None:
        if service is None:
            raise InvalidLockBackend(
                f"{backend.setting('OPTIONS')} has 'sentinels' but no 'service_name': under which name do they watch"
                " the master? Often it is 'mymaster'."
            )
        return service, {}, False
    setting = backend.setting("LOCATION")
    example = f"redis://:password@{service or 'mymaster'}/0"
    if not (isinstance(location, str) and location.startswith(SCHEMES[:2])):
        raise InvalidLockBackend(
            f"{setting} is {quoted(location)}. With sentinels it is a URL such as {example}, or absent."
        )
    kind, arguments = arguments_of_url(location, setting)
    host, port = arguments.pop("host", None), arguments.pop("port", None)
    if port is not None or (service is not None and host not in (None, service)):
        raise InvalidLockBackend(
            f"{setting} names the server {host}{f':{port}' if port else ''}, but the sentinels tell where it is: write"
            f" the name of the service there, as in {example}, or leave LOCATION out."
        )
    if service is None and host is None:
        raise InvalidLockBackend(f"{setting} names no service; write it there, as in {example}.")
    return service or str(host), arguments, issubclass(kind, redis.SSLConnection)


def _sentinels(backend: BaseLockBackend) -> list[Location]:
    where = backend.setting("OPTIONS")
    given = backend.option["sentinels"]
    pairs = [_pair(one) for one in given] if isinstance(given, list | tuple) else []
    addresses = [pair for pair in pairs if pair]
    if not addresses or len(addresses) < len(pairs):
        raise InvalidLockBackend(
            f"{where}['sentinels'] is {quoted(given)}; it is a list of (host, port), with one at least."
        )
    options = backend.option["sentinel_kwargs"] or {}
    if not isinstance(options, Mapping):
        raise InvalidLockBackend(f"{where}['sentinel_kwargs'] is {quoted(options)}; it is a dict of keywords.")
    options = {keyword: as_seconds(value) for keyword, value in options.items()}
    for timeout in ("socket_timeout", "socket_connect_timeout"):
        value = options.get(timeout, SENTINEL_TIMEOUT)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise InvalidLockBackend(
                f"{where}['sentinel_kwargs'][{timeout!r}] is {quoted(value)}; it is a number of seconds above 0."
            )
    if (provider := options.get("credential_provider")) is not None:
        if options.get("username") or options.get("password"):
            raise InvalidLockBackend(
                f"{where}['sentinel_kwargs'] has a user or a password, and a 'credential_provider', which names"
                " others. Take one of them out."
            )
        whose = f"{where}['sentinel_kwargs']['credential_provider']"
        options = {**options, "credential_provider": read_provider(provider, whose)}
    try:
        return [_sentinel({**options, "host": host, "port": port}) for host, port in addresses]
    except TypeError as error:  # its text names the unknown argument
        raise InvalidLockBackend(f"{where}['sentinel_kwargs'] has an unknown keyword: {error}.") from None


def _pair(given: object) -> tuple[str, int] | None:
    match given:
        case (str(host), int(port)) if host and 0 < port < 65536:
            return host, port
    return None


def _sentinel(options: Mapping[str, Any]) -> Location:
    arguments = {"socket_timeout": SENTINEL_TIMEOUT, "socket_connect_timeout": SENTINEL_TIMEOUT, **options}
    tls = arguments.pop("ssl", False)
    arguments["protocol"] = 2
    location = Location(f"{arguments['host']}:{arguments['port']}", TlsConnection if tls else TcpConnection, arguments)
    location.connection_class(**arguments)
    location.async_connection_class(**arguments)
    return location


def _location_of_pool(pool: SentinelConnectionPool, own: Mapping[str, Any], backend: BaseLockBackend) -> Location:
    """The sentinels and the master of a cache."""
    known = []
    for client in pool.sentinel_manager.sentinels:
        their_pool = client.connection_pool
        known.append(
            _sentinel({**lent(their_pool), "ssl": issubclass(their_pool.connection_class, redis.SSLConnection)})
        )
    arguments = {key: value for key, value in lent(pool).items() if key not in ("host", "port")}
    return MasterLocation.of(
        Sentinels(pool.service_name, known, backend.timing),
        completed(arguments, own, backend.setting("LOCATION")),
        tls=issubclass(pool.connection_class, redis.SSLConnection),
        failover_timeout=backend.option["failover_timeout"],
    )
