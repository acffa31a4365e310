"""Histories of the database backend. Apart, because it needs the app to be installed where it is imported."""

from __future__ import annotations

from typing import Any

from django_distlock.backends.database import DatabaseBackend
from django_distlock.types import Grant, LockInfo, Ticket

from .history import RecordingBackend


class RecordingDatabaseBackend(DatabaseBackend):
    """Tells the journal each place that a waiter is given."""

    def _acquire(self, connection: Any, ticket: Ticket, queue: bool) -> Grant | LockInfo:
        before = ticket.place
        answered = super()._acquire(connection, ticket, queue)
        if RecordingBackend.journal and ticket.place and ticket.place != before:
            RecordingBackend.journal.write("place", name=ticket.name, place=ticket.place)
        return answered
