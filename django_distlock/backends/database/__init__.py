"""Locks in a table of any Django database."""

from .app import check_app

check_app()  # first: Django's error for models without an app does not say what to do

from .backend import DatabaseBackend  # noqa: E402

__all__ = ["DatabaseBackend"]
