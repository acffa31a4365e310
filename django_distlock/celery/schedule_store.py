"""The last runs of the entries of one Celery app. Its beats share them in a store."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import inf

from ..backends.optional import RunsBackend
from ..core.registry import DEFAULT_ALIAS, locks
from ..exceptions import LockBackendError, RunRefused, UnreadableRun
from ..names import LONGEST_ACCEPTED, stored_name
from ..runs import DAY, MICROSECOND, LastRun, UnsentRun
from ..types import new_token
from ..utils.clock import clock, sleep, wall_clock
from ..utils.events import about_event
from .config import BeatSettings

MIN_TTL = 7 * DAY  # seconds for which the store keeps a run after its entry, or all beats, are gone
MAX_TTL = 10 * 366 * DAY
NEVER = 1e8  # seconds; the wait that django-celery-beat gives for rows that are done
MOST_UNSENT = 100  # unsent runs of an entry
RESET_PAUSE, RESET_TIMEOUT = 0.2, 30.0  # seconds
CLOCK = ""  # stands for the clock of this host in ``_refused``, which otherwise has the names of entries

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """An entry of beat's schedule as the store shows it now.

    ``entry``: its name, with the prefix of its app. ``last_run_at``: None if it has not run yet. ``host``: the host of
    the beat that sent the last run. ``next_run_at``: the time that this beat expected; None if it is unknown.
    ``unsent``: for an entry in ``AT_LEAST_ONCE``, when the runs were due that may not have been sent yet.
    """

    entry: str
    using: str
    last_run_at: datetime | None
    host: str
    next_run_at: datetime | None
    unsent: tuple[datetime, ...] = ()


def recorded_runs(using: str = DEFAULT_ALIAS) -> Iterator[RunInfo]:
    """Yields the entries that beats keep in this alias, each once, in no order; none if the alias cannot keep runs.

    Raises LockBackendError if the store does not answer.
    """
    backend = locks[using]
    if isinstance(backend, RunsBackend):
        for entry, run in backend.runs():
            last, due = _moment(run.ran_at if run.host else None), _moment(run.next_at)
            unsent = tuple(datetime.fromtimestamp(one.scheduled_at, UTC) for one in run.unsent)
            yield RunInfo(entry, using, last, run.host, due, unsent)


def reset_run(entry: str, using: str = DEFAULT_ALIAS) -> bool:
    """Let the schedule of an entry count from now on, as if the entry was new, and drop its unsent runs.

    Returns False if the store does not know the entry. ``entry``: its name with the prefix, as in ``recorded_runs()``.
    Running beats take the change over when the entry is next due. A value that cannot be read is replaced. Raises
    LockBackendError, also if beats changed the entry first each time for half a minute; RunRefused if the clock of this
    host is ahead.
    """
    backend = locks[using]
    if not isinstance(backend, RunsBackend):
        return False
    name, deadline = stored_name(entry), clock() + RESET_TIMEOUT
    while True:
        [current] = backend.find_runs([name])
        if current is None and not backend.forget_run(name):
            return False
        at = wall_clock() if current is None else max(wall_clock(), current.at + MICROSECOND)
        fresh = LastRun(round(at, 6), token=new_token())
        standing = backend.claim_run(name, current or fresh, fresh, MIN_TTL)
        if standing is None or standing.token == fresh.token:
            return True
        if clock() >= deadline:
            raise LockBackendError(
                f"The entry {entry!r} is not reset: others moved it each time, for {RESET_TIMEOUT:g} s. Try again, or"
                " stop its beats before."
            )
        sleep(RESET_PAUSE)  # a beat was faster, or the store lost its data a moment ago


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def next_time(now: float, wait: float | None) -> float | None:
    """Returns when an entry is due again; None if never."""
    return None if wait is None or wait >= NEVER else round(now + wait, 6)


class ScheduleStore:
    """The last runs of the entries of one Celery app, in the store and as this beat knows them.

    Methods that ask the store raise LockBackendError if it does not answer.

    ``claimed``: by entry, the run that this beat has claimed, or taken over, and has not sent yet.
    """

    def __init__(self, app_name: str) -> None:
        """Raises ImproperlyConfigured for settings with which no beat can run. No I/O."""
        self._settings = BeatSettings.read()
        self._settings.backend()
        self.using, prefix = self._settings.alias, self._settings.prefix
        self.prefix = prefix if prefix is not None else app_name and f"{app_name}:"
        self.known: dict[str, LastRun] = {}
        self.claimed: dict[str, UnsentRun] = {}
        self._in_doubt: dict[str, str] = {}  # the tokens of claims that the store may have executed, by entry
        self._sent: dict[str, set[str]] = {}  # the tokens of runs that this beat has sent and not yet marked, by entry
        self._found_at: dict[str, float] = {}  # when unsent runs were first found, by token
        self._refused: set[str] = set()  # entries, and ``CLOCK``, whose refusal is already in the log

    @property
    def _backend(self) -> RunsBackend:
        return self._settings.backend()  # looked up each time, because a forked process has another one

    @property
    def spans_processes(self) -> bool:
        return locks[self.using].supports_processes

    @property
    def at_least_once(self) -> frozenset[str]:
        """The names of the entries whose runs are marked when they are sent."""
        return self._settings.at_least_once

    @property
    def named(self) -> Mapping[str, frozenset[str]]:
        """The names of entries in the settings, by key."""
        return {"AT_LEAST_ONCE": self.at_least_once, "SKIP_LATER_THAN": frozenset(self._settings.skip_later_than)}

    def is_too_late(self, entry: str, lateness: float) -> bool:
        """Returns whether a run of the entry that is ``lateness`` seconds late is skipped."""
        return lateness > self._settings.skip_later_than.get(str(entry), inf)

    @property
    def resend_after(self) -> float:
        return self._settings.resend_after

    def is_marked(self, entry: str) -> bool:
        """Returns whether runs of the entry are marked when they are sent, so that other beats send unmarked ones."""
        return str(entry) in self.at_least_once

    def claim(
        self, entry: str, seen: float, now: float, wait: float | None, scheduled_at: float | None = None
    ) -> LastRun | None:
        """Claim the run that is due. Returns None if this beat is the first to claim it: the run belongs to it.

        ``seen``: when the entry last ran, according to its row or file. ``wait``: seconds from ``now`` to the next run.
        ``scheduled_at``: when the run was due; None means ``now``.

        Otherwise returns the current last run. It is newer if another beat has claimed the run. It is not newer than
        ``seen`` if the store did not know the entry and waits for what other beats know; then ask again in a second.

        After an error the run is claimed again with the same token, because the store may have granted it already.
        Raises RunRefused if the store answers, but refuses the run to this host.
        """
        known = self.known.get(entry, LastRun(seen))
        if known.ran_at > seen and not self.is_in_doubt(entry, known):
            return self._unless_claimed(entry, known)  # the row or the file has lost it, and the store may have, too
        mine = UnsentRun(now if scheduled_at is None else scheduled_at, self._in_doubt.setdefault(entry, new_token()))
        while True:
            # Other beats could also claim the run if a claim changed nothing.
            at = round(max(now, seen + MICROSECOND, known.at + MICROSECOND), 6)
            unsent = self._with_claimed(mine, entry, known.unsent) if self.is_marked(entry) else ()
            run = LastRun(at, socket.gethostname(), next_time(at, wait), mine.token, 0, unsent)
            before = known if known.ran_at == seen else LastRun(seen, unsent=known.unsent)
            current = self._claim(entry, before, run)
            if current is None or current.ran_at != seen or current.at <= before.at:
                break
            known = current  # the stamp of the same run, marked as sent meanwhile
        self.known[entry] = max(before, current or run, key=lambda run: run.at)
        if current:
            return self._unless_claimed(entry, current)
        del self._in_doubt[entry]
        self.claimed[entry] = mine
        self._report_given_up(entry, before, run)
        return None

    def _unless_claimed(self, entry: str, run: LastRun) -> LastRun | None:
        """Returns the run; None if its unsent runs have this beat's claim in doubt, so that the claim succeeded."""
        token = self._in_doubt.pop(entry, "")
        for one in run.unsent:
            if one.token == token:
                self.claimed[entry] = one
                return None
        return run

    def _report_given_up(self, entry: str, before: LastRun, now: LastRun) -> None:
        if self.is_marked(entry):
            for one in self._without_sent(entry, before.unsent):
                if one not in now.unsent:
                    logger.error(
                        "The run of %r that was due at %s is given up, and may never have been sent: %d others wait.",
                        entry, _moment(one.scheduled_at), len(now.unsent),
                        extra=about_event("run-given-up", alias=self.using, entry=entry),
                    )  # fmt: skip

    def _with_claimed(self, mine: UnsentRun, entry: str, unsent: Iterable[UnsentRun]) -> tuple[UnsentRun, ...]:
        others = [one for one in self._without_sent(entry, unsent) if one.token != mine.token]
        return (*others, mine)[-MOST_UNSENT:]

    def _without_sent(self, entry: str, unsent: Iterable[UnsentRun]) -> tuple[UnsentRun, ...]:
        sent = self._sent.get(entry, ())
        return tuple(one for one in unsent if one.token not in sent)

    def mark_sent(self, entry: str, run: UnsentRun) -> None:
        """Mark the run as sent, so that other beats need not send it.

        If the store does not answer, ``store_marks()`` marks it later.
        """
        if self.is_marked(entry):
            self._sent.setdefault(entry, set()).add(run.token)
            self.store_marks()

    def store_marks(self) -> None:
        """Mark in the store the runs that this beat has sent and could not mark yet."""
        for entry in list(self._sent):
            with suppress(RunRefused):  # it is in the log
                if self._change(entry, partial(self._without_sent, entry)):
                    del self._sent[entry]

    def find_overdue(self, now: float) -> list[tuple[str, UnsentRun]]:
        """Read the runs that must be sent at least once. Returns those that were not marked for too long, with entries.

        ``now``: on ``clock()``. The time counts from the moment at which this beat first found them, because the clocks
        of hosts differ.
        """
        entries = [entry for entry in self.known if self.is_marked(entry)]
        if not entries:
            return []
        for entry, run in zip(entries, self._backend.find_runs([self._name(entry) for entry in entries]), strict=True):
            self.known[entry] = max(self.known[entry], run or self.known[entry], key=lambda run: run.at)
        unsent = [(entry, one) for entry in entries for one in self._without_sent(entry, self.known[entry].unsent)]
        self._found_at = {one.token: self._found_at.get(one.token, now) for _, one in unsent}
        return [(entry, one) for entry, one in unsent if now - self._found_at[one.token] >= self.resend_after]

    def take_over(self, entry: str, run: UnsentRun) -> bool:
        """Claim a run that was not marked as sent. Returns whether it now belongs to this beat."""
        mine = run._replace(token=new_token())
        self._change(entry, lambda unsent: tuple(mine if one == run else one for one in unsent))
        is_mine = entry in self.known and mine in self.known[entry].unsent
        if is_mine:
            self.claimed[entry] = mine
        return is_mine

    def _change(self, entry: str, changed: Callable[[tuple[UnsentRun, ...]], tuple[UnsentRun, ...]]) -> bool:
        """Store other unsent runs of the entry. Returns False if no beat may do so yet, because the store lost data."""
        while (known := self.known.get(entry)) and (unsent := changed(known.unsent)) != known.unsent:
            run = known.changed(unsent)
            current = self._claim(entry, known, run)
            if current is not None and current.at <= known.at:
                return False
            self.known[entry] = current or run
        return True

    def sync(self, entries: Iterable[str]) -> dict[str, LastRun]:
        """Read the last runs of these entries, and forget all others. Returns the runs, for entries that have one."""
        entries = list(entries)
        stored = self._backend.find_runs([self._name(entry) for entry in entries])
        known = {
            entry: max(filter(None, (run, self.known.get(entry))), key=lambda run: run.at, default=None)
            for entry, run in zip(entries, stored, strict=True)
        }
        self.known = {entry: run for entry, run in known.items() if run}
        return self.known.copy()

    def is_in_doubt(self, entry: str, run: LastRun) -> bool:
        """Returns whether the run comes from a claim of this beat that got no answer."""
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
        """Look up the newest run, because a store loses that one first, and publish all runs again if it is gone.

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
        """Returns the name in the store. The name of an entry may be any text, such as its call with all arguments."""
        name = f"{self.prefix}{entry}".encode(errors="backslashreplace")
        if len(name) > LONGEST_ACCEPTED:
            name = name[:1000] + b"~" + hashlib.sha256(name).hexdigest().encode()
        return stored_name(name.decode(errors="ignore"))


def _ttl_of(run: LastRun) -> float:
    """Returns the seconds for which the store keeps a run, so that removed entries do not stay for ever."""
    wait = 0.0 if run.next_at is None else max(0.0, run.next_at - max(run.at, wall_clock()))
    return min(MAX_TTL, MIN_TTL + 2 * wait)
