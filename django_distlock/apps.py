"""The app as INSTALLED_APPS names it."""

import logging

from django.apps import AppConfig

logger = logging.getLogger("django_distlock")


class DistlockConfig(AppConfig):
    name = "django_distlock"
    label = "distlock"
    verbose_name = "Distributed locks"

    def ready(self) -> None:
        from . import checks  # which registers them
        from .core.registry import check_presence
        from .decorators import task_context

        task_context.identify_messages()  # also of a process that sends tasks by their names

        for message in (*check_presence(), *checks.uwsgi_without_threads()):  # where it serves, nobody runs the checks
            if message.is_serious():
                logger.error("%s %s", message.msg, message.hint)
            elif message.id != "distlock.W001":  # that one is told when a lock is first asked for
                logger.warning("%s %s", message.msg, message.hint)
