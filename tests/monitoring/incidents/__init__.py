"""What was known of locks while something was wrong with them, recorded on a Valkey server by ``record``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django_distlock.journal import entries_in
from django_distlock.monitoring.situation import HeldLease, Situation, Waiting
from django_distlock.types import Holder

HERE = Path(__file__).parent


def holder(fields: Any) -> Holder | None:
    return Holder(*fields) if fields else None


def waiting(who: Any, since: float, behind: Any = (), *more: Any) -> Waiting:
    return Waiting(holder(who), since, tuple(waiting(*one) for one in behind), *more)


def to_data(situation: Situation) -> dict[str, Any]:
    """All of it, as JSON has it."""
    return {
        "name": situation.name,
        "using": situation.using,
        "at": situation.at,
        "long_held": situation.long_held,
        "leases": {name: list(leases) for name, leases in situation.leases.items()},
        "queues": situation.queues,
        "entries": None if situation.entries is None else [entry.to_text() for entry in situation.entries],
    }


def read(incident: str) -> Situation:
    data = json.loads((HERE / f"{incident}.json").read_text())
    leases, queues = data.pop("leases"), data.pop("queues")
    entries = data.pop("entries")
    return Situation(
        **data,
        leases={
            name: [HeldLease(first, holder(who), *rest) for first, who, *rest in of] for name, of in leases.items()
        },
        queues={name: queue and [waiting(*one) for one in queue] for name, queue in queues.items()},
        entries=None if entries is None else entries_in(entries),
    )
