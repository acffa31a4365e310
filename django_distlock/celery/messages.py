"""Which message of Celery a run belongs to. Its copies have the same id, and so have its retries.

The id of the task does not tell: it may be used again, by ``apply_async(task_id=...)``, for other work.
"""

from __future__ import annotations

import secrets
from typing import Any

from celery.signals import before_task_publish  # type: ignore[import-untyped]

HEADER = "distlock_message"  # "TASK_ID.RANDOM"


@before_task_publish.connect  # type: ignore[untyped-decorator]
def identify(headers: dict[str, Any], properties: dict[str, Any], **_: Any) -> None:
    """Headers that were copied from another task's message are not kept; a retry keeps its own."""
    task_id = str(properties.get("correlation_id"))
    if task_of(str(headers.get(HEADER, ""))) != task_id:
        headers[HEADER] = f"{task_id}.{secrets.token_hex(8)}"


def message_of(request: Any) -> str:
    """The id of a run's message; ``"TASK_ID."`` where the process that sent it did not give it one."""
    given = str((request.headers or {}).get(HEADER, ""))
    return given if task_of(given) == str(request.id) else f"{request.id}."


def task_of(message: str) -> str:
    return message.rpartition(".")[0]


def is_known(message: str) -> bool:
    """Whether it tells the copies of a message from another message with the same task id."""
    return not message.endswith(".")
