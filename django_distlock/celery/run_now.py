"""Sends the message of an entry of beat by hand, without a beat."""

from __future__ import annotations

import logging
from typing import Any

from celery import current_app  # type: ignore[import-untyped]
from celery.beat import ScheduleEntry, Scheduler, SchedulingError  # type: ignore[import-untyped]
from django.apps import apps
from django.db import DatabaseError
from kombu.exceptions import OperationalError

from ..utils.clock import wall_clock
from ..utils.events import about_event
from .config import BeatSettings
from .scheduled import for_run

logger = logging.getLogger("django_distlock")


class NotSent(Exception):
    """The message of an entry was not sent. The text says why."""


def run_now(name: str, by: str) -> str:
    """Send the message of an entry once. Its schedule does not change, and no beat is needed. Returns the task's id.

    ``name``: the name of an entry in ``beat_schedule`` of the current Celery app, or of a row of django-celery-beat.
    It may have the prefix of the app, as in lists. ``by``: who does it, for the log. Raises NotSent.
    """
    app = current_app
    app.loader.import_default_modules()  # these may add entries
    app.finalize()
    prefix = BeatSettings.read().prefix
    own = name.removeprefix(prefix if prefix is not None else f"{app.main or ''}:")
    try:
        entry = _row(name, app) or _entry(name, app) or _row(own, app) or _entry(own, app)
        if entry is None:
            raise NotSent(
                f"The Celery app {app.main!r} has no entry {name!r} in beat_schedule"
                + (", and there is no such row of django-celery-beat." if _has_rows() else ".")
            )
        message = for_run(entry, round(wall_clock(), 6))
        sent = Scheduler(app, lazy=True).apply_async(message, advance=False)
    except (SchedulingError, OperationalError, OSError, DatabaseError) as error:
        raise NotSent(str(error)) from error
    if sent is None:
        raise NotSent(f"The task {entry.task!r} sends no second message while one is queued or running.")
    logger.info("%s sent a run of %r.", by, entry.name, extra=about_event("run-sent-by-hand", entry=entry.name))
    return str(sent.id)


def _entry(name: str, app: Any) -> Any:
    fields = app.conf.beat_schedule.get(name)
    return fields and ScheduleEntry(**dict(fields, name=name, app=app))


def _row(name: str, app: Any) -> Any:
    if not _has_rows():
        return None
    from django_celery_beat.models import PeriodicTask  # type: ignore[import-untyped]
    from django_celery_beat.schedulers import ModelEntry  # type: ignore[import-untyped]

    row = PeriodicTask.objects.filter(name=name).first()
    return row and ModelEntry(row, app=app)


def _has_rows() -> bool:
    return apps.is_installed("django_celery_beat")
