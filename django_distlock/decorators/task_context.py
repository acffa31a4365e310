"""The background task that a call belongs to, of Celery or of django.tasks, where a process uses them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# The unique task of django.tasks that runs here: its function, and what is to be called when its body begins.
unique_body: ContextVar[tuple[Callable[..., Any], Callable[[], None]] | None] = ContextVar(
    "distlock_unique_body", default=None
)


def beginning_of(function: Callable[..., Any]) -> Callable[[], None] | None:
    """What is to be called when the function has its lock: it is the body of a unique task of django.tasks."""
    if (unique := unique_body.get()) is None:
        return None
    body, begins = unique
    return begins if inspect.unwrap(body, stop=lambda each: each is function) is function else None


def connect_to_celery() -> None:
    """If the process uses Celery: give each message that it sends an id, and know how many tasks it runs at a time."""
    if "celery" in sys.modules:
        from ..celery import countdowns, messages  # noqa: F401 - whose receivers do it


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


# By the module that a process has loaded where it uses them: the class of its tasks, and what makes them of functions.
TASK_CLASSES = (
    ("celery.app.task", "Task", "@shared_task"),
    ("django.tasks.base", "Task", "@task"),
    ("dramatiq.actor", "Actor", "@dramatiq.actor"),
    ("huey.api", "TaskWrapper", "@huey.task()"),
)


def refuse_task(function: Any) -> None:
    """Raises TypeError for a task that a decorator of a task queue has made of a function."""
    for module, kind, decorator in TASK_CLASSES:
        known = sys.modules.get(module)
        if known is not None and isinstance(function, getattr(known, kind, ())):
            raise TypeError(_refusal(decorator, function))
    # RQ's @job leaves a function, which has a method delay() then.
    if getattr(getattr(function, "delay", None), "__globals__", {}).get("__name__") == "rq.decorators":
        raise TypeError(_refusal("@job", function))


def _refusal(decorator: str, task: Any) -> str:
    names = [getattr(task, attribute, None) for attribute in ("name", "actor_name", "__name__")]
    names.append(getattr(getattr(task, "func", None), "__name__", None))  # Huey's
    name = next(filter(None, names), repr(task))
    return (
        f"@distributed_lock was put above {decorator}, on the task {name}, where it would guard"
        f" calls of the task object and no run in a worker. Put it below: first {decorator}, then @distributed_lock,"
        " then the function."
    )
