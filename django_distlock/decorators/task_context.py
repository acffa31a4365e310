"""The background task to which a call belongs, of Celery or of django.tasks, if the process uses them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# The unique task of django.tasks that runs here: its function, and a callable for the moment at which its body begins.
unique_body: ContextVar[tuple[Callable[..., Any], Callable[[], None]] | None] = ContextVar(
    "distlock_unique_body", default=None
)


def beginning_of(function: Callable[..., Any]) -> Callable[[], None] | None:
    """Returns the callable to call when the function has its lock, if it is the body of a unique task of django.tasks;
    else None."""
    if (unique := unique_body.get()) is None:
        return None
    body, begins = unique
    return begins if inspect.unwrap(body, stop=lambda each: each is function) is function else None


def connect_to_celery() -> None:
    """If the process uses Celery, give an id to each message that it sends, and count how many tasks run at a time."""
    if "celery" in sys.modules:
        from ..celery import countdowns, messages  # noqa: F401 - their receivers do it


def celery_run_of(function: Callable[..., Any]) -> Any:
    """Returns the run of the Celery task that calls the function in this thread (celery/tasks.py), or None."""
    celery = sys.modules.get("celery")
    if celery is None or not (task := getattr(celery, "current_task", None)):
        return None
    from ..celery.tasks import Run

    return Run(task._get_current_object(), function)  # noqa: SLF001 - Celery's


def label(args: tuple[Any, ...]) -> str:
    """Returns name and id of the task of django.tasks whose context is the first argument; else ""."""
    module = sys.modules.get("django.tasks.base")
    if module is None or not args or not isinstance(args[0], module.TaskContext):
        return ""
    result = args[0].task_result
    return f"{result.task.module_path}[{result.id}]"


# By the module that a process has loaded if it uses the library: the class of tasks, and the decorator that makes them.
TASK_CLASSES = (
    ("celery.app.task", "Task", "@shared_task"),
    ("django.tasks.base", "Task", "@task"),
    ("dramatiq.actor", "Actor", "@dramatiq.actor"),
    ("huey.api", "TaskWrapper", "@huey.task()"),
)


def refuse_task(function: Any) -> None:
    """Raises TypeError for a task that the decorator of a task queue has made from a function."""
    for module, kind, decorator in TASK_CLASSES:
        known = sys.modules.get(module)
        if known is not None and isinstance(function, getattr(known, kind, ())):
            raise TypeError(_refusal(decorator, function))
    # RQ's @job returns the function itself, with a method delay().
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
