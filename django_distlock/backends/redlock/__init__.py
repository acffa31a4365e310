"""Locks on a majority of independent Redis or Valkey servers."""

from .backend import RedlockBackend

__all__ = ["RedlockBackend"]
