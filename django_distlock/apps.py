"""The app as INSTALLED_APPS names it."""

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
        from . import checks  # which registers them
        from .core.registry import tell_of_absence
        from .decorators import task_context

        task_context.connect_to_celery()  # also of a process that sends tasks by their names

        # Where it serves, nobody runs the checks.
        tell_of_absence(least=ERROR)  # what is less the first lock tells
        for warning in checks.uwsgi_without_threads():
            logger.warning("%s %s", warning.msg, warning.hint, extra=about_event("uwsgi-without-threads"))
