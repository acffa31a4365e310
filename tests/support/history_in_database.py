"""Histories of the database backend. Apart, because it needs the app to be installed where it is imported."""

from __future__ import annotations

from django_distlock.backends.database import DatabaseBackend
from tests.support.history import Recording


class RecordingDatabaseBackend(Recording, DatabaseBackend):
    """In a database."""
