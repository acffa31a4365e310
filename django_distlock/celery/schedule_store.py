"""What the beats of one Celery app know of each other's runs, and the setting that says where they keep it."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple, Self

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from ..backends.base import RunsBackend
from ..core.registry import DEFAULT_ALIAS, locks
from ..exceptions import RunRefused, UnreadableRun
from ..names import LONGEST_ACCEPTED, stored_name
from ..types import LastRun, new_token
from ..utils.text import quoted

SETTING = "DISTRIBUTED_LOCKS_BEAT"
KEYS = ("ALIAS", "PREFIX")

SHORTEST_KEPT = 7 * 86_400.0  # seconds that a run stays after its entry is gone, or all beats are
LONGEST_KEPT = 10 * 366 * 86_400.0
NEVER = 1e8  # seconds; what django-celery-beat waits for rows that are done
MICROSECOND = 1e-6
CLOCK = ""  # as the reason why runs are refused: it is that of this host, and not an entry

logger = logging.getLogger("django_distlock")


class BeatSettings(NamedTuple):
    """``DISTRIBUTED_LOCKS_BEAT``. ``prefix`` None: the name of the Celery app."""

    alias: str
    prefix: str | None

    @classmethod
    def read(cls) -> Self:
        """Raises ImproperlyConfigured for what cannot be meant."""
        given = getattr(settings, SETTING, {})
        if not isinstance(given, Mapping):
            raise ImproperlyConfigured(f"{SETTING} is {quoted(given)}; it is a dict with the keys {', '.join(KEYS)}.")
        if unknown := [key for key in given if key not in KEYS]:
            raise ImproperlyConfigured(f"{SETTING} has the unknown key {unknown[0]!r}. Known: {', '.join(KEYS)}.")
        alias, prefix = given.get("ALIAS", DEFAULT_ALIAS), given.get("PREFIX")
        if not isinstance(alias, str) or not isinstance(prefix, str | None):
            raise ImproperlyConfigured(
                f"{SETTING}: 'ALIAS' is {quoted(alias)}, 'PREFIX' is {quoted(prefix)}. The one is an alias"
                " of DISTRIBUTED_LOCKS, the other what the names of this app's entries begin with; both are texts."
            )
        return cls(alias, prefix)

    def backend(self) -> RunsBackend:
        """Raises ImproperlyConfigured if the alias does not exist or cannot keep runs; no I/O."""
        backend = locks[self.alias]
        if not isinstance(backend, RunsBackend):
            raise ImproperlyConfigured(
                f"{SETTING}['ALIAS'] is {self.alias!r}, a {type(backend).__name__}, which cannot keep the runs of beat."
                " Name an alias on Redis or on a database."
            )
        return backend


@dataclass(frozen=True, slots=True)
class RunInfo:
    """An entry of beat's schedule as the store shows it now.

    ``entry``: its name, with the prefix of its app. ``last_run_at``: None while it did not run yet. ``host``: of
    the beat that sent the last run. ``next_run_at``: as that beat expected; None where that is not known.
    """

    entry: str
    using: str
    last_run_at: datetime | None
    host: str
    next_run_at: datetime | None


def recorded_runs(using: str = DEFAULT_ALIAS) -> Iterator[RunInfo]:
    """The entries that beats keep in this alias, each once, in no order; none where it keeps no runs.

    Raises LockBackendError when the store does not answer.
    """
    backend = locks[using]
    if isinstance(backend, RunsBackend):
        for entry, run in backend.runs():
            last, due = _moment(run.at if run.host else None), _moment(run.next_at)
            yield RunInfo(entry, using, last, run.host, due)


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def next_time(now: float, wait: float | None) -> float | None:
    """When an entry is due again, if it is ever."""
    return None if wait is None or wait >= NEVER else round(now + wait, 6)


class ScheduleStore:
    """The last runs of the entries of one Celery app, in the store and as this beat knows them.

    What reaches the store raises LockBackendError when that does not answer.
    """

    def __init__(self, app_name: str) -> None:
        """Raises ImproperlyConfigured for settings that no beat can run with; no I/O."""
        self._setting = BeatSettings.read()
        self._setting.backend()
        self.using, prefix = self._setting
        self.prefix = prefix if prefix is not None else app_name and f"{app_name}:"
        self.known: dict[str, LastRun] = {}
        self._in_doubt: dict[str, str] = {}  # the tokens of claims that the store may have executed, by entry
        self._refused: set[str] = set()  # the reasons, in short, that were told

    @property
    def _backend(self) -> RunsBackend:
        return self._setting.backend()  # never kept: a forked process has another one

    @property
    def spans_processes(self) -> bool:
        return locks[self.using].supports_processes

    def claim(self, entry: str, seen: float, now: float, wait: float | None) -> LastRun | None:
        """None if the run that is due belongs to this beat; it is the first to claim it.

        ``seen``: when the entry last ran, as its row or file says; ``wait``: seconds from ``now`` to the next run.
        Else the run that stands: a newer one if the run was claimed already; one not newer than ``seen`` if the
        store did not know the entry, and waits for what other beats tell it: then ask again in a second.

        After an error the run is claimed again with the same token, because the store may have given it already.
        Raises RunRefused if the store answers, but gives this run to nobody here.
        """
        known = self.known.get(entry, LastRun(seen))
        if known.at > seen and not self.is_in_doubt(entry, known):
            return known  # which the store may have forgotten, as the row or the file has
        token = self._in_doubt.setdefault(entry, new_token())
        at = round(max(now, seen + MICROSECOND), 6)  # a claim that moved nothing would leave the run to others, too
        run = LastRun(at, socket.gethostname(), next_time(at, wait), token)
        before = known if known.at == seen else LastRun(seen)
        standing = self._claimed(entry, before, run)
        del self._in_doubt[entry]
        self.known[entry] = max(before, standing or run, key=lambda run: run.at)
        return standing

    def sync(self, entries: Iterable[str]) -> dict[str, LastRun]:
        """The last runs of those entries that have one; all others are forgotten."""
        wanted = list(entries)
        stored = self._backend.find_runs([self._name(entry) for entry in wanted])
        known = {
            entry: max(filter(None, (run, self.known.get(entry))), key=lambda run: run.at, default=None)
            for entry, run in zip(wanted, stored, strict=True)
        }
        self.known = {entry: run for entry, run in known.items() if run}
        return self.known.copy()

    def is_in_doubt(self, entry: str, run: LastRun) -> bool:
        """Whether the run is of this beat's own claim, whose answer it did not receive."""
        return self._in_doubt.get(entry) == run.token

    def publish(self, entry: str, run: LastRun) -> None:
        """Let the store keep this run unless it has a newer one. Raises RunRefused."""
        run = replace(run, token=run.token or new_token())
        self.known[entry] = self._claimed(entry, run, run) or run

    def _claimed(self, entry: str, seen: LastRun, now: LastRun) -> LastRun | None:
        try:
            standing = self._backend.claim_run(self._name(entry), seen, now, _kept(now))
        except RunRefused as error:
            reason = entry if isinstance(error, UnreadableRun) else CLOCK
            if isinstance(error, UnreadableRun):
                self.known.pop(entry, None)
            if reason not in self._refused:
                logger.error("The run of %r is not sent from here: %s", entry, error)
            self._refused.add(reason)
            raise
        self._refused -= {entry, CLOCK}
        return standing

    def verify(self) -> LastRun | None:
        """Publish again what the store lost. It forgets the newest run first, so that one is looked up.

        Returns the last run of that entry as it stands now; None for what cannot be read.
        """
        newest = max(self.known, key=lambda entry: self.known[entry].at)
        [stored] = self._backend.find_runs([self._name(newest)])
        if stored is None or stored.at < self.known[newest].at:
            logger.warning("The store of lock backend %r lost runs of beat; it is told again.", self.using)
            for entry, run in list(self.known.items()):
                with suppress(RunRefused):
                    self.publish(entry, run)
            return self.known.get(newest)
        return stored

    def _name(self, entry: object) -> str:
        """Entries are called by anything; those without a name, by their calls with all arguments."""
        name = f"{self.prefix}{entry}".encode(errors="backslashreplace")
        if len(name) > LONGEST_ACCEPTED:
            name = name[:1000] + b"~" + hashlib.sha256(name).hexdigest().encode()
        return stored_name(name.decode(errors="ignore"))


def _kept(run: LastRun) -> float:
    """Seconds that the store keeps a run: entries that are gone must not stay for ever."""
    wait = 0.0 if run.next_at is None else max(0.0, run.next_at - max(run.at, time.time()))
    return min(LONGEST_KEPT, SHORTEST_KEPT + 2 * wait)
