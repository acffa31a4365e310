"""Moments and lengths of time as texts for people, in their language."""

from __future__ import annotations

from datetime import UTC, datetime, time

from django.utils import timezone
from django.utils.formats import get_format
from django.utils.translation import gettext_lazy as _

# The admin's script gets these texts, too, and fills them in the same way.
LENGTHS = {
    "seconds": _("%(seconds)s s"),
    "minutes": _("%(minutes)s min %(seconds)s s"),
    "hours": _("%(hours)s h %(minutes)s min"),
    "days": _("%(days)s d %(hours)s h"),
}


def format_duration(seconds: float) -> str:
    """Returns the text of a length of time in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return LENGTHS["seconds"] % {"seconds": whole}
    if whole < 3600:
        return LENGTHS["minutes"] % {"minutes": whole // 60, "seconds": f"{whole % 60:02}"}
    if whole < 86_400:
        return LENGTHS["hours"] % {"hours": whole // 3600, "minutes": f"{whole % 3600 // 60:02}"}
    return LENGTHS["days"] % {"days": whole // 86_400, "hours": f"{whole % 86_400 // 3600:02}"}


def moment(at: float, now: float) -> str:
    """Returns the text of a moment in Django's time zone, to the second, with the day if it is not today."""
    zone = timezone.get_current_timezone()
    when, today = (datetime.fromtimestamp(one, UTC).astimezone(zone).replace(microsecond=0) for one in (at, now))
    return to_the_second(when.time() if when.date() == today.date() else when)


def to_the_second(when: datetime | time) -> str:
    """Formats with Django's first input format that has seconds, because its output formats have none."""
    formats = get_format("DATETIME_INPUT_FORMATS" if isinstance(when, datetime) else "TIME_INPUT_FORMATS")
    return when.strftime(next(one for one in formats if "%S" in one))
