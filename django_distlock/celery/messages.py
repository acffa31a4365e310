"""The Celery message for which a task runs. ``apply_async(task_id=...)`` may use a task id again, for other work."""

from __future__ import annotations

from typing import Any

from celery.signals import before_task_publish  # type: ignore[import-untyped]

from ..message_ids import new_message, task_of

HEADER = "distlock_message"  # the id of the message


@before_task_publish.connect  # type: ignore[untyped-decorator]
def identify(headers: dict[str, Any], properties: dict[str, Any], **_: Any) -> None:
    """Give the message an id, unless it is a retry and has one. Its headers may come from another task's message."""
    task_id = str(properties.get("correlation_id"))
    if task_of(str(headers.get(HEADER, ""))) != task_id:
        headers[HEADER] = new_message(task_id)


def message_of(request: Any) -> str:
    """Returns the id of the message of a run; ``"TASK_ID."`` if the process that sent it gave it no id."""
    given = str((request.headers or {}).get(HEADER, ""))
    return given if task_of(given) == str(request.id) else f"{request.id}."
