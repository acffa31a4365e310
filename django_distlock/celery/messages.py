"""Ids of Celery's messages. The copies of a message have the same id, and so have its retries.

The id of the task does not identify a message: ``apply_async(task_id=...)`` may use it again, for other work.
"""

from __future__ import annotations

import secrets
from typing import Any

from celery.signals import before_task_publish  # type: ignore[import-untyped]

HEADER = "distlock_message"  # "TASK_ID.RANDOM"


@before_task_publish.connect  # type: ignore[untyped-decorator]
def identify(headers: dict[str, Any], properties: dict[str, Any], **_: Any) -> None:
    """Give the message an id, unless it is a retry, which has one. Headers may come from another task's message."""
    task_id = str(properties.get("correlation_id"))
    if task_of(str(headers.get(HEADER, ""))) != task_id:
        headers[HEADER] = f"{task_id}.{secrets.token_hex(8)}"


def message_of(request: Any) -> str:
    """The id of the message of a run; ``"TASK_ID."`` if the process that sent it gave it none."""
    given = str((request.headers or {}).get(HEADER, ""))
    return given if task_of(given) == str(request.id) else f"{request.id}."


def task_of(message: str) -> str:
    return message.rpartition(".")[0]


def is_known(message: str) -> bool:
    """Whether the id is that of one message, and not that of all with the same task id."""
    return not message.endswith(".")
