"""The parts of a backend that talk to its server, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ...types import new_token
from ..base import BaseLockBackend
from .client import AsyncClient, Client
from .cluster.client import AsyncClusterClient, ClusterClient
from .cluster.pubsub import ClusterListener
from .config import Location
from .diagnostics import Diagnostics
from .keys import Keys, read_prefix
from .pubsub import RedisListener
from .sentinel.config import find_location


class Topology(NamedTuple):
    location: Location
    keys: Keys
    client: Client | ClusterClient
    new_async_client: Callable[[], AsyncClient | AsyncClusterClient]
    listener: RedisListener | ClusterListener
    diagnostics: Diagnostics


def server_topology(
    backend: BaseLockBackend, timeouts: Mapping[str, float], hand_back: Callable[[str, str], None]
) -> Topology:
    keys = Keys(read_prefix(backend))
    location = find_location(backend, timeouts)
    shared = (location, backend.option["max_connections"], timeouts["socket_timeout"], backend.timing)
    listener = RedisListener(location, lambda: keys.inbox(new_token()), hand_back, backend.alias, backend.timing)
    diagnostics = Diagnostics(location, keys.prefix, backend.terms, backend.setting("OPTIONS"))
    return Topology(location, keys, Client(*shared), partial(AsyncClient, *shared), listener, diagnostics)
