"""The background task that a call belongs to, of Celery or of django.tasks, where a process uses them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def identify_messages() -> None:
    """Give each message of Celery that this process sends an id, from now on, if it uses Celery."""
    if "celery" in sys.modules:
        from ..celery import messages  # noqa: F401 - whose receiver does it


def celery_run_of(function: Callable[..., Any]) -> Any:
    """The run of the Celery task that calls the function in this thread (celery/tasks.py), or None."""
    celery = sys.modules.get("celery")
    if celery is None or not (task := getattr(celery, "current_task", None)):
        return None
    from ..celery.tasks import Run

    return Run(task._get_current_object(), function)  # noqa: SLF001 - Celery's


def label(args: tuple[Any, ...]) -> str:
    """Name and id of the task of django.tasks whose context is the first argument; else ""."""
    module = sys.modules.get("django.tasks.base")
    if module is None or not args or not isinstance(args[0], module.TaskContext):
        return ""
    result = args[0].task_result
    return f"{result.task.module_path}[{result.id}]"


def refuse_task(function: Any) -> None:
    """Raises TypeError for a task that @shared_task or @task has made of a function."""
    for module, decorator in (("celery.app.task", "@shared_task"), ("django.tasks.base", "@task")):
        known = sys.modules.get(module)
        if known is not None and isinstance(function, known.Task):
            raise TypeError(
                f"@distributed_lock was put above {decorator}, on the task {function.name}, where it would guard calls"
                f" of the task object and no run in a worker. Put it below: first {decorator}, then @distributed_lock,"
                " then the function."
            )
