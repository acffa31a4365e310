"""The parts of a backend that talk to its server, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.sentinel import SentinelConnectionPool

from ..base import BaseLockBackend
from .breaker import ServerBreaker
from .client import AsyncClient, Client
from .codec import new_process
from .config import DEFAULT, Location, pool_of_cache, read_location
from .diagnostics import Diagnostics
from .keys import Keys, read_prefix
from .pubsub import RedisListener

if TYPE_CHECKING:
    from .cluster.client import AsyncClusterClient, ClusterClient
    from .cluster.pubsub import ClusterListener

SENTINEL_OPTIONS = ("sentinels", "service_name", "sentinel_kwargs")


class Topology(NamedTuple):
    location: Location
    keys: Keys
    client: Client | ClusterClient
    new_async_client: Callable[[], AsyncClient | AsyncClusterClient]
    listener: RedisListener | ClusterListener
    diagnostics: Diagnostics
    breakers: Callable[[], Iterable[ServerBreaker]]  # one per server


def server_topology(
    backend: BaseLockBackend, own: Mapping[str, Any], hand_back: Callable[[str, str], None]
) -> Topology:
    keys = Keys(read_prefix(backend, takes_braces=True))
    location = _location(backend, own)
    timeout = own["socket_timeout"]
    breaker = ServerBreaker(backend.alias, location, timeout, backend.timing, location.failover_timeout)
    shared = (location, backend.option["max_connections"], timeout, backend.timing, breaker)
    listener = RedisListener(location, lambda: keys.inbox(new_process()), hand_back, backend.alias, backend.timing)
    diagnostics = Diagnostics(location, keys.prefix, backend.terms, backend.setting("OPTIONS"))
    client, new_async_client = Client(*shared), partial(AsyncClient, *shared)
    return Topology(location, keys, client, new_async_client, listener, diagnostics, lambda: (breaker,))


def _location(backend: BaseLockBackend, own: Mapping[str, Any]) -> Location:
    given, setting = backend.settings.get("LOCATION", DEFAULT), backend.setting("LOCATION")
    if all(backend.option[option] is None for option in SENTINEL_OPTIONS):
        is_cache = isinstance(given, str) and given.startswith("cache:")
        pool = pool_of_cache(given.removeprefix("cache:"), setting) if is_cache else None
        if not isinstance(pool, SentinelConnectionPool):
            return read_location(given, setting, own)
    from .sentinel.config import find_location  # few processes need it

    return find_location(backend, own)
