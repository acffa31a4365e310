"""The data of a log record for programs: the fixed name of the event, and what it is about."""

from __future__ import annotations

from typing import Any


def about_event(event: str, **about: object) -> dict[str, Any]:
    """Returns the ``extra`` of a log record. It gives the record an attribute ``distlock``: a dict with ``event`` and
    the keywords.

    ``alias``, ``name``, ``template`` and ``fence`` say which lock and which lease. ``waited`` and ``held`` are seconds.
    A keyword that is None is left out.
    """
    return {"distlock": {"event": event, **{key: value for key, value in about.items() if value is not None}}}
