"""Locks in a table of any Django database."""

from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]
