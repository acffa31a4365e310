"""Ids of messages: ``"TASK_ID.RANDOM"``. The copies of a message have the same id, and so have its retries.

The id of the task does not identify a message: another message, for other work, may have it, too.
"""

from __future__ import annotations

import secrets


def new_message(task_id: str) -> str:
    return f"{task_id}.{secrets.token_hex(8)}"


def task_of(message: str) -> str:
    return message.rpartition(".")[0]


def is_known(message: str) -> bool:
    """Whether the id is that of one message, and not that of all with the same task id."""
    return not message.endswith(".")
