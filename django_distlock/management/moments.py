"""Moments of the past on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import UTC, datetime, time, timedelta, tzinfo

from django.utils import timezone

from ..utils.clock import wall_clock


def moment_before(text: str) -> float:
    """Returns a moment in seconds of Unix time. A time without a day is the last such time before now.

    Without a time zone in the text, it is in Django's time zone.
    """
    zone, now = timezone.get_current_timezone(), datetime.fromtimestamp(wall_clock(), UTC)
    try:
        found = datetime.fromisoformat(text)  # first, because 20261126 is a day, but can also be read as a time
    except ValueError:
        return _last(text, zone, now).timestamp()
    found = found if found.tzinfo else found.replace(tzinfo=zone)
    if found > now:
        raise ArgumentTypeError(f"{text!r} is in the future")
    return found.timestamp()


def _last(text: str, zone: tzinfo, now: datetime) -> datetime:
    """Returns the last moment with this time of day, in the time zone of the text if it names one."""
    try:
        clock_time = time.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no moment; say 03:12, or 2026-11-26 03:12:30") from None
    zone = clock_time.tzinfo or zone
    found = datetime.combine(now.astimezone(zone).date(), clock_time, zone)
    return found if found <= now else found - timedelta(days=1)
