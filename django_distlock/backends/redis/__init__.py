"""Locks on a Redis or Valkey server, on the master that sentinels watch, and on a Cluster."""

from .backend import RedisBackend
from .cluster.backend import RedisClusterBackend

__all__ = ["RedisBackend", "RedisClusterBackend"]
