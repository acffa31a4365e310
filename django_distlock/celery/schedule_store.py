"""The last runs of the entries of one Celery app, which its beats share in a store."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from ..backends.base import RunsBackend
from ..core.registry import DEFAULT_ALIAS, locks
from ..exceptions import RunRefused, UnreadableRun
from ..names import LONGEST_ACCEPTED, stored_name
from ..runs import DAY, LastRun
from ..types import new_token
from ..utils.clock import wall_clock
from ..utils.events import about_event
from .config import BeatSettings

MIN_TTL = 7 * DAY  # for which the store keeps a run after its entry is gone, or all beats are
MAX_TTL = 10 * 366 * DAY
NEVER = 1e8  # seconds; what django-celery-beat waits for rows that are done
MICROSECOND = 1e-6
CLOCK = ""  # stands for the clock of this host in ``_refused``, which has the names of entries

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """An entry of beat's schedule as the store shows it now.

    ``entry``: its name, with the prefix of its app. ``last_run_at``: None if it has not run yet. ``host``: of the beat
    that sent the last run. ``next_run_at``: as that beat expected; None if it is not known.
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
    """When an entry is due again; None if never."""
    return None if wait is None or wait >= NEVER else round(now + wait, 6)


class ScheduleStore:
    """The last runs of the entries of one Celery app, in the store and as this beat knows them.

    Methods that ask the store raise LockBackendError when it does not answer.
    """

    def __init__(self, app_name: str) -> None:
        """Raises ImproperlyConfigured for settings that no beat can run with; no I/O."""
        self._settings = BeatSettings.read()
        self._settings.backend()
        self.using, prefix = self._settings
        self.prefix = prefix if prefix is not None else app_name and f"{app_name}:"
        self.known: dict[str, LastRun] = {}
        self._in_doubt: dict[str, str] = {}  # the tokens of claims that the store may have executed, by entry
        self._refused: set[str] = set()  # entries, and ``CLOCK``, whose refusal is in the log already

    @property
    def _backend(self) -> RunsBackend:
        return self._settings.backend()  # looked up each time: a forked process has another one

    @property
    def spans_processes(self) -> bool:
        return locks[self.using].supports_processes

    def claim(self, entry: str, seen: float, now: float, wait: float | None) -> LastRun | None:
        """Claim the run that is due. None: it belongs to this beat, which is the first to claim it.

        ``seen``: when the entry last ran, as its row or file says; ``wait``: seconds from ``now`` to the next run.
        Otherwise returns the current last run: a newer one if another beat has claimed the run; one not newer than
        ``seen`` if the store did not know the entry, and waits for what other beats know: then ask again in a second.

        After an error the run is claimed again with the same token, because the store may have granted it already.
        Raises RunRefused if the store answers, but refuses the run to this host.
        """
        known = self.known.get(entry, LastRun(seen))
        if known.at > seen and not self.is_in_doubt(entry, known):
            return known  # the store may have lost it, as the row or the file has
        token = self._in_doubt.setdefault(entry, new_token())
        at = round(max(now, seen + MICROSECOND), 6)  # a claim that changes nothing would leave the run to others, too
        run = LastRun(at, socket.gethostname(), next_time(at, wait), token)
        before = known if known.at == seen else LastRun(seen)
        current = self._claim(entry, before, run)
        del self._in_doubt[entry]
        self.known[entry] = max(before, current or run, key=lambda run: run.at)
        return current

    def sync(self, entries: Iterable[str]) -> dict[str, LastRun]:
        """Read the last runs of these entries, and forget all others. Returns those that have one."""
        entries = list(entries)
        stored = self._backend.find_runs([self._name(entry) for entry in entries])
        known = {
            entry: max(filter(None, (run, self.known.get(entry))), key=lambda run: run.at, default=None)
            for entry, run in zip(entries, stored, strict=True)
        }
        self.known = {entry: run for entry, run in known.items() if run}
        return self.known.copy()

    def is_in_doubt(self, entry: str, run: LastRun) -> bool:
        """Whether the run is that of a claim of this beat which was not answered."""
        return self._in_doubt.get(entry) == run.token

    def publish(self, entry: str, run: LastRun) -> None:
        """Store the run, unless the store has a newer one. Raises RunRefused."""
        run = run._replace(token=run.token or new_token())
        self.known[entry] = self._claim(entry, run, run) or run

    def _claim(self, entry: str, seen: LastRun, now: LastRun) -> LastRun | None:
        try:
            current = self._backend.claim_run(self._name(entry), seen, now, _ttl_of(now))
        except RunRefused as error:
            reason = entry if isinstance(error, UnreadableRun) else CLOCK
            if isinstance(error, UnreadableRun):
                self.known.pop(entry, None)
            if reason not in self._refused:
                about = about_event("run-refused", alias=self.using, entry=entry)
                logger.error("The run of %r is not sent from here: %s", entry, error, extra=about)
            self._refused.add(reason)
            raise
        self._refused -= {entry, CLOCK}
        return current

    def verify(self) -> LastRun | None:
        """Look up the newest run, which a store loses first, and publish all again if it is gone.

        Returns the last run of that entry in the store; None if it cannot be read.
        """
        newest = max(self.known, key=lambda entry: self.known[entry].at)
        [stored] = self._backend.find_runs([self._name(newest)])
        if stored is None or stored.at < self.known[newest].at:
            logger.warning(
                "The store of lock backend %r lost runs of beat; it is told again.", self.using,
                extra=about_event("runs-lost", alias=self.using),
            )  # fmt: skip
            for entry, run in list(self.known.items()):
                with suppress(RunRefused):
                    self.publish(entry, run)
            return self.known.get(newest)
        return stored

    def _name(self, entry: object) -> str:
        """The name in the store. That of an entry is any text; without one it is its call with all arguments."""
        name = f"{self.prefix}{entry}".encode(errors="backslashreplace")
        if len(name) > LONGEST_ACCEPTED:
            name = name[:1000] + b"~" + hashlib.sha256(name).hexdigest().encode()
        return stored_name(name.decode(errors="ignore"))


def _ttl_of(run: LastRun) -> float:
    """Seconds for which the store keeps a run, so that entries that are gone do not stay for ever."""
    wait = 0.0 if run.next_at is None else max(0.0, run.next_at - max(run.at, wall_clock()))
    return min(MAX_TTL, MIN_TTL + 2 * wait)
