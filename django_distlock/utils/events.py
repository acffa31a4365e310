"""What a record of the log tells programs: the event by a fixed name, and what it is about."""

from __future__ import annotations

from typing import Any


def about_event(event: str, **about: object) -> dict[str, Any]:
    """The ``extra`` of a record, whose attribute ``distlock`` is a dict of ``event`` and what is given here.

    ``alias``, ``name``, ``template`` and ``fence`` say which lock and which lease; ``waited`` and ``held`` are seconds.
    What is None is left out.
    """
    return {"distlock": {"event": event, **{key: value for key, value in about.items() if value is not None}}}
