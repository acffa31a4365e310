"""Which background task a call belongs to: one of Celery, or one of django.tasks. Imports neither."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

SETTING = "DISTRIBUTED_LOCKS_REMEMBER_TASKS"
DAY = 86_400.0


def identify_messages() -> None:
    """From now on each message of Celery that this process sends says which one it is. Without Celery: nothing."""
    if "celery" in sys.modules:
        import_string("django_distlock.celery.messages.identify")


def remembered() -> float:
    """Seconds for which a task that is acknowledged late is known to be done, if the broker asks for no more.

    Raises ImproperlyConfigured.
    """
    seconds = getattr(settings, SETTING, DAY)
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < inf:
        return float(seconds)
    raise ImproperlyConfigured(f"{SETTING} is {seconds!r:.80}; it is a number of seconds above 0.")


def celery_run_of(function: Callable[..., Any]) -> Any:
    """The run of the Celery task that calls the function here (see celery/tasks.py), or None."""
    celery = sys.modules.get("celery")
    if celery is None or not (task := getattr(celery, "current_task", None)):
        return None
    return import_string("django_distlock.celery.tasks.Run")(task._get_current_object(), function)  # noqa: SLF001 - Celery's


def label(args: tuple[Any, ...]) -> str:
    """Name and id of the task of django.tasks that a function was called as; "" if that cannot be told."""
    module = sys.modules.get("django.tasks.base")
    if module is None or not args or not isinstance(args[0], module.TaskContext):
        return ""
    result = args[0].task_result
    return f"{result.task.module_path}[{result.id}]"


def refuse_task(function: Any) -> None:
    """Raises TypeError for what @shared_task or @task has made of a function."""
    for module, decorator in (("celery.app.task", "@shared_task"), ("django.tasks.base", "@task")):
        known = sys.modules.get(module)
        if known is not None and isinstance(function, known.Task):
            raise TypeError(
                f"@distributed_lock was put above {decorator}, on the task {function.name}, where it would guard calls"
                f" of the task object and no run in a worker. Put it below: first {decorator}, then @distributed_lock,"
                " then the function."
            )
