"""The parts of a backend that talk to a Cluster, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....exceptions import InvalidLockBackend
from ...base import BaseLockBackend
from ..config import Location, read_location
from ..keys import SLOTS, ClusterKeys, read_prefix
from ..topology import Topology
from .client import AsyncClusterClient, ClusterClient, NodeBreakers
from .diagnostics import ClusterDiagnostics
from .pubsub import ClusterListener
from .routing import Address, Remap, SlotMap


def cluster_topology(
    backend: BaseLockBackend, own: Mapping[str, Any], hand_back: Callable[[str, str], None]
) -> Topology:
    keys = ClusterKeys(read_prefix(backend), _read_shards(backend))
    location, seeds = _read_seeds(backend, own)
    slots = SlotMap(keys.slots(), seeds, backend.timing, _read_remap(backend))
    breakers = NodeBreakers(backend.alias, location, own["socket_timeout"], slots)
    shared = (location, slots, backend.option["max_connections"], own["socket_timeout"], breakers)
    client = ClusterClient(*shared)
    listener = ClusterListener(client, slots, keys, location, hand_back, backend.alias, backend.timing)
    diagnostics = ClusterDiagnostics(location, seeds, keys, backend.terms, backend.setting("OPTIONS"))
    new_async_client = partial(AsyncClusterClient, *shared)
    return Topology(location, keys, client, new_async_client, listener, diagnostics, breakers.values)


def _read_shards(backend: BaseLockBackend) -> int:
    shards = backend.option["shards"]
    if not isinstance(shards, int) or isinstance(shards, bool) or not 1 <= shards <= SLOTS:
        raise InvalidLockBackend(
            f"{backend.setting('OPTIONS')}['shards'] is {shards!r}; it is a whole number from 1 to {SLOTS}, the same"
            " in all processes."
        )
    return shards


def _read_remap(backend: BaseLockBackend) -> Remap | None:
    remap: Remap | None = backend.option["address_remap"]
    if remap is not None and not callable(remap):
        raise InvalidLockBackend(
            f"{backend.setting('OPTIONS')}['address_remap'] is {remap!r}; it is a function that takes (host, port) as a"
            " node announces them and returns (host, port) as they are reached from here."
        )
    return remap


def _read_seeds(backend: BaseLockBackend, own: Mapping[str, Any]) -> tuple[Location, list[Address]]:
    """The location of any node, and the addresses of some nodes, which know the others."""
    setting, given = backend.setting("LOCATION"), backend.settings.get("LOCATION", "redis://127.0.0.1:6379/0")
    several = list(given) if isinstance(given, list | tuple) else [given]
    if not several:
        raise InvalidLockBackend(f"{setting} is empty. It is the URL of a node of the Cluster, or a list of URLs.")
    locations = [read_location(one, setting, own) for one in several]
    seeds = [_address(location, setting) for location in locations]
    first, *others = [_at_any_node(location) for location in locations]
    if any(other != first for other in others):
        raise InvalidLockBackend(f"The URLs of {setting} differ in more than host and port; write the rest alike.")
    text = ", ".join(location.text for location in locations)
    return Location(text, first.connection_class, first.arguments, backend.option["failover_timeout"]), seeds


def _at_any_node(location: Location) -> Location:
    there = location.at("", 0)
    return Location("", there.connection_class, {**there.arguments, "db": 0})


def _address(location: Location, setting: str) -> Address:
    arguments = location.arguments
    if "path" in arguments:
        raise InvalidLockBackend(f"{setting} is a unix socket. The nodes of a Cluster are reached by redis:// URLs.")
    if int(arguments.get("db") or 0):
        raise InvalidLockBackend(
            f"{setting} names database {arguments['db']}. A Cluster has database 0 alone; end the URL with /0."
        )
    return Address(str(arguments.get("host", "localhost")), int(arguments.get("port", 6379)))
