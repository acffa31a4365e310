"""Which run of beat a message is for: the name of the entry, and when the run was due. Imports no Celery."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

HEADER = "distlock_run"  # JSON of the entry and of seconds of Unix time; entries may have names that no header may have


class ScheduledRun(NamedTuple):
    """A run of an entry of beat. All messages that were sent for it carry the same values.

    ``entry``: the name of the entry. ``scheduled_at``: when it was due, in UTC, some milliseconds too late at most.
    """

    entry: str
    scheduled_at: datetime


def header_of(entry: object, scheduled_at: float) -> str:
    return json.dumps([str(entry), scheduled_at])


def for_run(entry: Any, scheduled_at: float) -> Any:
    """A copy of an entry of beat, whose message tells that run.

    A copy, because schedulers compare the options of entries, and keep them in files.
    """
    copied = object.__new__(type(entry))
    headers = {**(entry.options.get("headers") or {}), HEADER: header_of(entry.name, scheduled_at)}
    vars(copied).update(vars(entry), options={**entry.options, "headers": headers})
    return copied


def scheduled_run(request: Any) -> ScheduledRun | None:
    """The run of beat for which a task runs; None: the schedulers of this package did not send its message.

    ``request``: that of a bound task, ``self.request``. Its retries are of the same run.
    """
    try:
        found = json.loads((request.headers or {}).get(HEADER, "null"))
        match found:
            case [str(entry), int() | float() as at]:
                return ScheduledRun(entry, datetime.fromtimestamp(at, UTC))
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):  # somebody else wrote it
        pass
    return None
