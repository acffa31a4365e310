"""The scheduler for schedules in the database, as django-celery-beat keeps them."""

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
    """``celery beat -S distlock_database``: the schedule is edited in the admin, its runs are shared."""

    def names_of_entries(self) -> Iterable[str]:
        """Also of rows that are disabled."""
        return list(self.Model.objects.values_list("name", flat=True))

    def enabled_models(self) -> list[Any]:
        """Also rows that it does not read until they are due soon: an earlier run may not be sent yet."""
        rows = super().enabled_models()
        read = {row.name for row in rows}
        kept = self.Model.objects.enabled().filter(name__in=self._schedule_store.at_least_once - read)
        return [*rows, *kept]
