"""Moments of the past on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import UTC, datetime, time, timedelta

from django.utils import timezone

from ..utils.clock import wall_clock


def moment_before(text: str) -> float:
    """Seconds of Unix time. A time without a day is the last one before now. In the time zone of Django."""
    zone, now = timezone.get_current_timezone(), datetime.fromtimestamp(wall_clock(), UTC)
    try:
        clock_time = time.fromisoformat(text)
    except ValueError:
        pass
    else:
        found = datetime.combine(now.astimezone(zone).date(), clock_time, zone)
        if found > now:
            found -= timedelta(days=1)
        return found.timestamp()
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no moment; say 03:12, or 2026-11-26 03:12:30") from None
    found = found if found.tzinfo else found.replace(tzinfo=zone)
    if found > now:
        raise ArgumentTypeError(f"{text!r} is in the future")
    return found.timestamp()
