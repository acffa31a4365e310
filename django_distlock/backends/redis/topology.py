"""What a backend uses to talk to its server, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ...types import new_token
from ..base import BaseLockBackend
from .client import AsyncWire, Wire
from .cluster.client import AsyncClusterWire, ClusterWire
from .cluster.pubsub import ClusterListener
from .config import Location
from .diagnostics import Checkup
from .keys import Keys, read_prefix
from .pubsub import Listener
from .sentinel.config import find_location


class Parts(NamedTuple):
    location: Location
    keys: Keys
    wire: Wire | ClusterWire
    new_async_wire: Callable[[], AsyncWire | AsyncClusterWire]
    listener: Listener | ClusterListener
    checkup: Checkup


def server_parts(
    backend: BaseLockBackend, timeouts: Mapping[str, float], hand_back: Callable[[str, str], None]
) -> Parts:
    keys = Keys(read_prefix(backend))
    location = find_location(backend, timeouts)
    shared = (location, backend.option["max_connections"], timeouts["socket_timeout"])
    listener = Listener(location, lambda: keys.inbox(new_token()), hand_back, backend.alias)
    checkup = Checkup(location, keys.prefix, backend.terms, backend.setting("OPTIONS"))
    return Parts(location, keys, Wire(*shared), partial(AsyncWire, *shared), listener, checkup)
