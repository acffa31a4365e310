"""What came for commands that were sent together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from .scripts import Command, pack


class Reply:
    """``values``: one per command, errors of the server among them. ``sent_at``: before the answered attempt.

    ``in_doubt``: an earlier attempt was not answered, and the server may still execute it. ``is_by_next_owner``: by the
    node of a Cluster to which the slot is moving; nobody can listen there yet. ``queued_for``: seconds that the call
    waited for a free connection.
    """

    __slots__ = ("in_doubt", "is_by_next_owner", "queued_for", "sent_at", "values")

    def __init__(self, values: list[Any], sent_at: float) -> None:
        self.values, self.sent_at = values, sent_at
        self.in_doubt, self.is_by_next_owner, self.queued_for = False, False, 0.0


NOTHING = Reply([], sent_at=0.0)


def to_repeat(commands: Sequence[Command], replies: Sequence[Any]) -> tuple[list[int], list[bytes]]:
    """After a server forgot its scripts: the numbers of the commands to repeat, and the commands to send for this."""
    forgotten = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    scripts = {script.sha: script for index in forgotten if (script := commands[index].script)}
    loads = [pack("SCRIPT", "LOAD", script.text) for script in scripts.values()]
    return forgotten, loads + [commands[index].packed for index in forgotten]


def put_in(replies: list[Any], forgotten: Sequence[int], fresh: Sequence[Any]) -> None:
    """Put in the replies to the repeated commands. The replies to the loaded scripts come before them."""
    for index, reply in zip(forgotten, fresh[-len(forgotten) :], strict=True):
        replies[index] = reply
