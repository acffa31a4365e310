"""Locks on a Redis or Valkey server."""

from .backend import RedisBackend

__all__ = ["RedisBackend"]
