"""Ids of messages: ``"TASK_ID.RANDOM"``. Copies and retries of a message have the same id.

The id of the task does not identify a message, because another message, for other work, may have the same one.
"""

from __future__ import annotations

import secrets


def new_message(task_id: str) -> str:
    return f"{task_id}.{secrets.token_hex(8)}"


def task_of(message: str) -> str:
    return message.rpartition(".")[0]


def is_known(message: str) -> bool:
    """Returns whether the id belongs to one message, and not to all messages with the same task id."""
    return not message.endswith(".")
