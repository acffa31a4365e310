"""The app as INSTALLED_APPS names it."""

import logging

from django.apps import AppConfig


class DistlockConfig(AppConfig):
    name = "django_distlock"
    label = "distlock"
    verbose_name = "Distributed locks"

    def ready(self) -> None:
        from . import checks  # which registers them
        from .decorators import task_context

        task_context.identify_messages()  # also of a process that sends tasks by their names

        if checks.threads_are_off():  # where uWSGI serves, nobody runs the checks
            [message] = checks.uwsgi_without_threads()
            logging.getLogger("django_distlock").warning("%s %s", message.msg, message.hint)
