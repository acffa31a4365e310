"""The scheduler for schedules that django-celery-beat keeps in the database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from .beat import SharedRuns

try:
    from django_celery_beat.schedulers import DatabaseScheduler  # type: ignore[import-untyped]
except ImportError as error:
    raise ImproperlyConfigured(
        'The scheduler distlock_database needs django-celery-beat: pip install "django-celery-beat>=2.9"'
    ) from error


class DistlockDatabaseScheduler(SharedRuns, DatabaseScheduler):  # type: ignore[misc]
    """``celery beat -S distlock_database``: people edit the schedule in the admin, and beats share its runs."""

    def names_of_entries(self) -> Iterable[str]:
        """Includes rows that are disabled."""
        return list(self.Model.objects.values_list("name", flat=True))

    def enabled_models(self) -> list[Any]:
        """Adds rows that django-celery-beat reads only when they are due soon: an earlier run may still be unsent."""
        rows = super().enabled_models()
        read = {row.name for row in rows}
        kept = self.Model.objects.enabled().filter(name__in=self._schedule_store.at_least_once - read)
        return [*rows, *kept]
