"""Histories of the database backend. Apart, because it needs the app to be installed where it is imported."""

from __future__ import annotations

from typing import Any

from django_distlock.backends.database import DatabaseBackend
from django_distlock.types import Grant, LockInfo, LockRequest
from tests.support.history import RecordingBackend


class RecordingDatabaseBackend(DatabaseBackend):
    """Tells the journal each place that a waiter is given."""

    def _acquire(self, connection: Any, request: LockRequest, queue: bool) -> Grant | LockInfo:
        before = request.place
        answered = super()._acquire(connection, request, queue)
        if RecordingBackend.journal and request.place and request.place != before:
            RecordingBackend.journal.write("place", name=request.name, place=request.place)
        return answered
