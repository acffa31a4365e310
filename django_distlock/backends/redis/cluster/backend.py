"""Locks on a Redis or Valkey Cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..backend import RedisBackend
from ..topology import Topology
from .config import cluster_topology
from .pubsub import ClusterListener


class RedisClusterBackend(RedisBackend):
    """As on one server. All keys of a lock are in one slot. The node that owns it grants the lock and wakes waiters."""

    options: ClassVar[Mapping[str, Any]] = {
        "socket_timeout": 2.0, "socket_connect_timeout": 2.0, "max_connections": 50, "failover_timeout": 30.0,
        "shards": 64, "address_remap": None,
        "credential_provider": None,
    }  # fmt: skip
    options_elsewhere: ClassVar[Mapping[str, str]] = {
        "cluster": "This backend is always for a Cluster; take it out.",
        **dict.fromkeys(("sentinels", "service_name", "sentinel_kwargs"), "A Cluster has no sentinels; take it out."),
    }
    in_cluster = True
    _listener: ClusterListener

    def _topology(self, arguments: Mapping[str, Any]) -> Topology:
        return cluster_topology(self, arguments, self._hand_back)

    def is_listening(self, name: str) -> bool:
        return self._listener.hears(name)
