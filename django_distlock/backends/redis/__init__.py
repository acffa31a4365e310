"""Locks on a Redis or Valkey server, on the master that sentinels watch, and on a Cluster."""

from typing import TYPE_CHECKING, Any

from .backend import RedisBackend

if TYPE_CHECKING:
    from .cluster.backend import RedisClusterBackend

__all__ = ["RedisBackend", "RedisClusterBackend"]


def __getattr__(name: str) -> Any:
    """The modules of a Cluster are imported only if one is used."""
    if name != "RedisClusterBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cluster.backend import RedisClusterBackend

    return RedisClusterBackend
