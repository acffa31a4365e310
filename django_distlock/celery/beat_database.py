"""The scheduler for schedules in the database, as django-celery-beat keeps them."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

from .beat import SharedRuns

try:
    from django_celery_beat.schedulers import DatabaseScheduler  # type: ignore[import-untyped]
except ImportError as error:
    raise ImproperlyConfigured(
        'The scheduler distlock_database needs django-celery-beat: pip install "django-celery-beat>=2.9"'
    ) from error


class DistlockDatabaseScheduler(SharedRuns, DatabaseScheduler):  # type: ignore[misc]
    """``celery beat -S distlock_database``: the schedule is edited in the admin, its runs are shared."""
