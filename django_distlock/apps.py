"""The app for INSTALLED_APPS."""

import logging

from django.apps import AppConfig
from django.core.checks import ERROR
from django.utils.translation import gettext_lazy as _

from .utils.events import about_event

logger = logging.getLogger("django_distlock")


class DistlockConfig(AppConfig):
    name = "django_distlock"
    label = "distlock"
    verbose_name = _("Distributed locks")

    def ready(self) -> None:
        from . import checks  # the import registers them
        from .core.registry import tell_of_absence
        from .decorators import task_context

        task_context.connect_to_celery()  # also for a process that sends tasks by their names

        # A process that serves requests does not run the checks.
        tell_of_absence(least=ERROR)  # the first lock reports warnings
        for warning in checks.uwsgi_without_threads():
            logger.warning("%s %s", warning.msg, warning.hint, extra=about_event("uwsgi-without-threads"))
