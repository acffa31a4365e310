"""The parts that need Celery. They are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..exceptions import TaskAlreadyQueued
    from .unique_tasks import Unique, UniqueHolder, UniqueTask, unique, unique_task

__all__ = ["TaskAlreadyQueued", "Unique", "UniqueHolder", "UniqueTask", "unique", "unique_task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import unique_tasks

    return getattr(unique_tasks, name)
