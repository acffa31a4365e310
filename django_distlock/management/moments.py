"""Moments of the past on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import UTC, datetime, time, timedelta, tzinfo

from django.utils import timezone

from ..utils.clock import wall_clock


def moment_before(text: str) -> float:
    """Seconds of Unix time. A time without a day is the last one before now.

    In the time zone of Django, where the text names none.
    """
    zone, now = timezone.get_current_timezone(), datetime.fromtimestamp(wall_clock(), UTC)
    try:
        found = datetime.fromisoformat(text)  # first: 20261126 is a day, and would be a time as well
    except ValueError:
        return _last(text, zone, now).timestamp()
    found = found if found.tzinfo else found.replace(tzinfo=zone)
    if found > now:
        raise ArgumentTypeError(f"{text!r} is in the future")
    return found.timestamp()


def _last(text: str, zone: tzinfo, now: datetime) -> datetime:
    """The last moment at which it was that time of the day, in its own time zone if it names one."""
    try:
        clock_time = time.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no moment; say 03:12, or 2026-11-26 03:12:30") from None
    zone = clock_time.tzinfo or zone
    found = datetime.combine(now.astimezone(zone).date(), clock_time, zone)
    return found if found <= now else found - timedelta(days=1)
