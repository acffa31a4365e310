"""The operations that unique tasks need from a backend of ``django.tasks``, for the backends that can have them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connections, router
from django.tasks import Task, TaskResult, TaskResultStatus, task_backends
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.backends.immediate import ImmediateBackend
from django.tasks.exceptions import InvalidTaskBackend, TaskResultDoesNotExist
from django.utils import timezone

from ..core import transactions

if TYPE_CHECKING:
    AnyTask = Task[..., Any]
    AnyResult = TaskResult[..., Any]
else:
    AnyTask, AnyResult = Task, TaskResult

REMEDY = "Use django.tasks' ImmediateBackend, or the DatabaseBackend of django-tasks-db."


class Queue(ABC):
    """The operations of a backend."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @abstractmethod
    def new_id(self) -> str:
        """Returns the id of the next message; "" if only the backend makes it, later."""

    @abstractmethod
    def enqueue(self, task: AnyTask, result_id: str, args: Any, kwargs: Any) -> AnyResult:
        """Queue a message with the id from ``new_id()``. Raises InvalidTaskBackend if the message has another id."""

    @abstractmethod
    def find(self, result_id: str) -> AnyResult | None:
        """Returns the result with this id; None if it cannot be looked up."""

    @abstractmethod
    def open_transaction(self) -> str | None:
        """Returns the alias of the database with the messages if a transaction is open there; else None."""


class ImmediateQueue(Queue):
    """A backend that runs each task within ``enqueue()``, and makes its id there."""

    def new_id(self) -> str:
        return ""

    def enqueue(self, task: AnyTask, result_id: str, args: Any, kwargs: Any) -> AnyResult:
        result: AnyResult = self._backend.enqueue(task, args, kwargs)
        return result

    def find(self, result_id: str) -> AnyResult | None:
        return None

    def open_transaction(self) -> str | None:
        return None


class DatabaseQueue(Queue):
    """A backend that adds messages to a table, perhaps in a transaction of the caller."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        from django_tasks_db.models import DBTaskResult

        self._model: Any = DBTaskResult

    def new_id(self) -> str:
        key = self._model._meta.pk
        made = (self._backend.id_function or key.get_default)()
        # The value of a database expression is known only when the row is written, but the id must be known before.
        return str(key.get_default() if hasattr(made, "resolve_expression") else key.to_python(made))

    def enqueue(self, task: AnyTask, result_id: str, args: Any, kwargs: Any) -> AnyResult:
        backend = copy(self._backend)  # other threads and tasks may use the original
        backend.id_function = lambda: UUID(result_id)
        result: AnyResult = backend.enqueue(task, args, kwargs)
        if result.id != result_id:
            self._waiting(result.id).delete()
            raise InvalidTaskBackend(
                f"Unique tasks are queued by {backend.alias!r}, a {type(backend).__name__}, which gives a message"
                f" another id than its id_function: {result.id} in the place of {result_id}. {REMEDY}"
            )
        return result

    def find(self, result_id: str) -> AnyResult | None:
        try:
            result: AnyResult = self._backend.get_result(result_id)
        except TaskResultDoesNotExist:
            return None
        return result

    def open_transaction(self) -> str | None:
        alias = router.db_for_write(self._model)
        connection = connections[alias]
        is_manual = not (connection.in_atomic_block or connection.get_autocommit())
        is_open = is_manual or any(opened() is connection for opened in transactions.open_here())
        return alias if is_open else None

    def is_waiting(self, result_id: str) -> bool:
        return bool(self._waiting(result_id).exists())

    def conclude(self, result_id: str) -> None:
        """Mark the message as one that succeeded with None, unless a worker has it already."""
        self._waiting(result_id).update(status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now())

    def _waiting(self, result_id: str) -> Any:
        written = self._model.objects.using(router.db_for_write(self._model))
        return written.filter(pk=result_id, status=TaskResultStatus.READY)


def queue_of(alias: str) -> Queue:
    """Returns the queue of the backend. Raises InvalidTaskBackend if no task can be unique on the backend."""
    backend = task_backends[alias]
    if (kind := _kind_of(backend)) is None:
        raise InvalidTaskBackend(f"{refusal_of(backend)} {REMEDY}")
    return kind(backend)


def refusal_of(backend: BaseTaskBackend) -> str:
    """Returns why no task can be unique on the backend; "" if tasks can."""
    if _kind_of(backend) is not None:
        return ""
    return (
        f"Unique tasks are queued by {backend.alias!r}, a {type(backend).__name__}. This package does not know how"
        " that backend runs its messages."
    )


def _kind_of(backend: Any) -> type[Queue] | None:
    if isinstance(backend, ImmediateBackend):
        return ImmediateQueue
    database = sys.modules.get("django_tasks_db.backend")
    if database and isinstance(backend, database.DatabaseBackend) and hasattr(backend, "id_function"):
        return DatabaseQueue
    return None
