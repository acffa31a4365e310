"""The label of a holder that has given none."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from ..types import program

SERVERS = (  # commands whose processes answer requests or run tasks
    "runserver", "runserver_plus", "runsslserver", "testserver",
    "db_worker", "qcluster", "rqworker", "rqworker-pool", "run_huey", "runworker",
)  # fmt: skip


def here(caller: tuple[str, str]) -> str:
    """The task of Celery that runs here, else the command of Django, else the function that asked for the lock, or
    the decorated function.

    ``caller``: its module and its name.
    """
    if (celery := sys.modules.get("celery._state")) and (task := celery.get_current_task()):
        return of_task(task)
    return of_function(caller)


def of_task(task: Any) -> str:
    """Name and id, as in Celery's own log. A task that is called like a function has no id."""
    return f"{task.name}[{task.request.id}]" if task.request.id else str(task.name)


@lru_cache(maxsize=1024)
def of_function(caller: tuple[str, str]) -> str:
    """In most processes, the name of the program alone would be a server, such as gunicorn."""
    module, function = caller
    running = program()
    _, _, command = running.partition(" ")
    if module == "__main__" or (command and command not in SERVERS):
        return running
    return module if function == "<module>" else f"{module}.{function}"
