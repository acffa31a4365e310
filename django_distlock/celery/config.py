"""The settings of the part for Celery. This module does not import Celery."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple, Self

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from ..backends.optional import RunsBackend
from ..core.registry import DEFAULT_ALIAS, locks
from ..options import Seconds, as_seconds
from ..runs import DAY
from ..utils.text import quoted

BEAT_SETTING = "DISTRIBUTED_LOCKS_BEAT"
LATEST_RESEND = 2.0  # times RESEND_AFTER: by then any beat that runs has sent the run again; looks are a third apart
BEAT_KEYS = ("ALIAS", "PREFIX", "AT_LEAST_ONCE", "RESEND_AFTER", "SKIP_LATER_THAN")
LATENESS = Seconds("by which a run of the entry may be late; a later one is skipped.", above=0.0)
RESEND_AFTER = Seconds(
    "after which a run that was claimed, and is not marked as sent, is sent by another beat; at least 1.", least=1.0
)
REMEMBER_SETTING = "DISTRIBUTED_LOCKS_REMEMBER_TASKS"


class BeatSettings(NamedTuple):
    """The setting ``DISTRIBUTED_LOCKS_BEAT``. ``prefix``: None means the name of the Celery app.

    ``at_least_once``: the entries whose runs are sent again if no beat has marked them as sent within ``resend_after``
    seconds. ``skip_later_than``: by entry, the seconds by which a run may be late and is still sent.
    """

    alias: str
    prefix: str | None
    at_least_once: frozenset[str]
    resend_after: float
    skip_later_than: Mapping[str, float]

    @classmethod
    def read(cls) -> Self:
        """Read the setting. Raises ImproperlyConfigured for unknown keys and values that cannot be used."""
        given, known = getattr(settings, BEAT_SETTING, {}), ", ".join(BEAT_KEYS)
        if not isinstance(given, Mapping):
            raise ImproperlyConfigured(f"{BEAT_SETTING} is {quoted(given)}; it is a dict with the keys {known}.")
        if unknown := [key for key in given if key not in BEAT_KEYS]:
            raise ImproperlyConfigured(f"{BEAT_SETTING} has the unknown key {unknown[0]!r}. Known: {known}.")
        alias, prefix = given.get("ALIAS", DEFAULT_ALIAS), given.get("PREFIX")
        if not isinstance(alias, str) or not isinstance(prefix, str | None):
            raise ImproperlyConfigured(
                f"{BEAT_SETTING}: 'ALIAS' is {quoted(alias)}, 'PREFIX' is {quoted(prefix)}. The one is an alias"
                " of DISTRIBUTED_LOCKS, the other what the names of this app's entries begin with; both are texts."
            )
        at_least_once = _names("AT_LEAST_ONCE", given.get("AT_LEAST_ONCE", ()))
        resend_after = _seconds(RESEND_AFTER, "['RESEND_AFTER']", given.get("RESEND_AFTER", 30.0))
        skip_later_than = _lengths("SKIP_LATER_THAN", given.get("SKIP_LATER_THAN", {}))
        for name in sorted(at_least_once & skip_later_than.keys()):
            if skip_later_than[name] <= LATEST_RESEND * resend_after:
                raise ImproperlyConfigured(
                    f"{BEAT_SETTING} names {name!r} in 'AT_LEAST_ONCE' and skips its runs when they are"
                    f" {skip_later_than[name]:g} s late, before another beat would send them. Let 'SKIP_LATER_THAN' be"
                    f" more than {LATEST_RESEND:g} times 'RESEND_AFTER', which is {resend_after:g} s."
                )
        return cls(alias, prefix, at_least_once, resend_after, skip_later_than)

    def backend(self) -> RunsBackend:
        """Returns the backend. Raises ImproperlyConfigured if the alias does not exist or cannot keep runs. No I/O."""
        backend = locks[self.alias]
        if not isinstance(backend, RunsBackend):
            raise ImproperlyConfigured(
                f"{BEAT_SETTING}['ALIAS'] is {self.alias!r}, a {type(backend).__name__}, which cannot keep the runs of"
                " beat. Name an alias on Redis or on a database."
            )
        return backend


def _names(key: str, given: object) -> frozenset[str]:
    """Raises ImproperlyConfigured for a value that is not a collection of texts."""
    if isinstance(given, list | tuple | set | frozenset) and all(isinstance(name, str) for name in given):
        return frozenset(given)
    raise ImproperlyConfigured(f"{BEAT_SETTING}[{key!r}] is {quoted(given)}. It is a list of the names of entries.")


def _lengths(key: str, given: object) -> Mapping[str, float]:
    """Raises ImproperlyConfigured for a value that is not a dict of lengths of time."""
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return {name: _seconds(LATENESS, f"[{key!r}][{name!r}]", length) for name, length in given.items()}
    raise ImproperlyConfigured(
        f"{BEAT_SETTING}[{key!r}] is {quoted(given)}. It is a dict of the names of entries and of seconds."
    )


def _seconds(check: Seconds, where: str, given: object) -> float:
    try:
        return float(check(f"{BEAT_SETTING}{where}", given) or 0.0)
    except ValueError as error:
        raise ImproperlyConfigured(str(error)) from None


def is_beat_used() -> bool:
    """Returns whether the settings of this package or of Celery say so. Those of Celery may have any prefix."""
    schedulers = [str(getattr(settings, name)) for name in dir(settings) if name.endswith("BEAT_SCHEDULER")]
    return hasattr(settings, BEAT_SETTING) or any("distlock" in scheduler for scheduler in schedulers)


def remember_tasks_for() -> float:
    """Returns the seconds for which the store remembers that a task with late acknowledgement is done.

    The visibility timeout of the broker may make it longer. Raises ImproperlyConfigured.
    """
    seconds = as_seconds(getattr(settings, REMEMBER_SETTING, DAY))
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < inf:
        return float(seconds)
    raise ImproperlyConfigured(f"{REMEMBER_SETTING} is {seconds!r:.80}; it is a number of seconds above 0.")
