"""The run of beat that a message is for: the name of the entry, and when the run was due. Does not import Celery."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

HEADER = "distlock_run"  # JSON of the entry and seconds of Unix time, because names may have characters headers may not


class ScheduledRun(NamedTuple):
    """A run of an entry of beat. All messages that are sent for it carry the same values.

    ``entry``: the name of the entry. ``scheduled_at``: when it was due, in UTC; at most some milliseconds too late.
    """

    entry: str
    scheduled_at: datetime


def header_of(entry: object, scheduled_at: float) -> str:
    return json.dumps([str(entry), scheduled_at])


def for_run(entry: Any, scheduled_at: float) -> Any:
    """Returns a copy of an entry of beat whose message names the run.

    It is a copy, because schedulers compare the options of entries, and keep them in files.
    """
    copied = object.__new__(type(entry))
    headers = {**(entry.options.get("headers") or {}), HEADER: header_of(entry.name, scheduled_at)}
    vars(copied).update(vars(entry), options={**entry.options, "headers": headers})
    return copied


def scheduled_run(request: Any) -> ScheduledRun | None:
    """Returns the run of beat for which a task runs; None if no scheduler of this package sent its message.

    ``request``: the ``self.request`` of a bound task. Its retries belong to the same run.
    """
    try:
        found = json.loads((request.headers or {}).get(HEADER, "null"))
        match found:
            case [str(entry), int() | float() as at]:
                return ScheduledRun(entry, datetime.fromtimestamp(at, UTC))
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):  # somebody else wrote it
        pass
    return None
