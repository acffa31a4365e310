"""Schedulers of beat that may run on every host. One of them sends each run that is due."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import celery  # type: ignore[import-untyped]
from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler  # type: ignore[import-untyped]
from celery.schedules import schedstate  # type: ignore[import-untyped]
from celery.utils.time import maybe_make_aware  # type: ignore[import-untyped]
from django.core.exceptions import ImproperlyConfigured

from ..core.registry import locks
from ..exceptions import LockBackendError, RunRefused
from ..runs import LastRun, UnsentRun
from ..signals import beat_run_sent, send_signal
from ..utils.clock import clock
from ..utils.events import about_event
from .broker import Broker
from .config import BEAT_SETTING
from .deferred_signals import DeferredSignals
from .schedule_store import ScheduleStore, next_time
from .scheduled import for_run

if celery.VERSION[:2] < (5, 7):
    raise ImproperlyConfigured(
        f"The beat schedulers of django-distlock need Celery 5.7 or later, this is {celery.__version__}: its beat waits"
        ' at an entry that another beat has sent. pip install "django-distlock[beat]"'
    )

RETRY = 1.0  # seconds until a store is asked again that failed, or that waits for what other beats know
LONG_TICK = 1.0  # seconds after which the waits that a tick has computed are out of date
EARLY = 0.01  # seconds by which Celery wakes before an entry is due
LOOKS = 3  # how often in RESEND_AFTER seconds a beat looks for runs that were not sent
RETIREMENT = 10.0  # seconds for the beat that sent a one-off to disable it, before another one does
CLOCK_TOLERANCE = 5.0  # seconds that a run may be ahead of this host's clock without a warning

logger = logging.getLogger("django_distlock")


class SharedRuns(Scheduler):  # type: ignore[misc]
    """Runs that all beats of an app share.

    Mix in before any ``celery.beat.Scheduler``: ``class MyScheduler(SharedRuns, TheirScheduler)``.

    All beats tick. Each entry has one ``last_run_at``, in the store. A run that is due belongs to the beat that
    changes it, by compare-and-set. The other beats take over the newer time. There is no leader and nothing to renew,
    so a beat that dies costs no time. While the store does not answer, nothing is sent: runs are late, but never sent
    twice. A beat that gets no answer from the broker claims nothing.

    Runs of the entries in ``AT_LEAST_ONCE`` are marked in the store when they are sent. If a run is not marked for
    ``RESEND_AFTER`` seconds, another beat takes it over, again by compare-and-set, and sends it.

    ``verify_interval``: seconds after which a beat verifies again that the store has its data.
    """

    verify_interval = 1.0

    _heap: Any  # an attribute of Scheduler

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._schedule_store = ScheduleStore(app.main or "")
        self._has_synced = False  # with the other beats, through the store
        self._is_store_down = False
        self._clocks_reported: set[str] = set()
        self._signals = DeferredSignals()
        self._broker = Broker(lambda: self.connection)
        self._tick_at = self._verify_at = self._resend_at = self._filled_at = 0.0  # on clock()
        super().__init__(app, *args, **kwargs)

    def setup_schedule(self) -> None:
        if not self._schedule_store.spans_processes:
            logger.warning(
                "Beats of other processes are not kept from sending the same runs: %s names the alias %r, whose locks"
                " are in the memory of one process.",
                BEAT_SETTING, self._schedule_store.using,
                extra=self._about("beat-alone"),
            )  # fmt: skip
        super().setup_schedule()

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due: the scheduler's own tick, the check that the store has its data, and runs not sent yet."""
        if clock() >= self._tick_at:
            wait = self._tick(*args, **kwargs)
            self._tick_at = clock() + (wait or 0.0)
        if clock() >= self._verify_at:
            self._verify()
            self._verify_at = clock() + self.verify_interval
        if clock() >= self._resend_at:
            self._resend()
            self._resend_at = clock() + self._schedule_store.resend_after / LOOKS
        return max(0.0, min(self._tick_at, self._verify_at, self._resend_at) - clock())

    def _tick(self, *args: Any, **kwargs: Any) -> float | None:
        began = clock()
        try:
            wait: float | None = super().tick(*args, **kwargs)
        except LockBackendError as error:
            self._heap = None  # filled only in part
            self._store_failed(error)
            return RETRY
        finally:
            self._signals.deliver()
        if clock() - max(began, self._filled_at) > LONG_TICK:
            # This beat was stopped, or the broker was slow. It would wait too long for runs that became due meanwhile.
            self._heap = None
            return 0.0
        return wait

    def _verify(self) -> None:
        if not self._schedule_store.known:
            return
        try:
            newest = self._schedule_store.verify()
            self._schedule_store.store_marks()
        except LockBackendError as error:
            self._store_failed(error)
        else:
            self._store_answered()
            if newest:
                self._check_clock(newest)

    def _resend(self) -> None:
        """Send runs that were claimed and not marked as sent, also if all beats of that time have died."""
        try:
            for name, run in self._schedule_store.find_overdue(clock()):
                self._send_again(self.schedule.get(name), run)
        except LockBackendError as error:
            self._store_failed(error)
        finally:
            self._signals.deliver()

    def _send_again(self, entry: ScheduleEntry | None, run: UnsentRun) -> None:
        if entry is not None and self._broker.answers():
            self._signals.defer()  # until the run is sent
            with suppress(RunRefused):  # it is in the log
                self._take_over(entry, run)

    def _take_over(self, entry: ScheduleEntry, run: UnsentRun) -> None:
        """Take the run over and send it, unless another beat does."""
        if self._schedule_store.take_over(entry.name, run) and not self._drop_if_late(entry):
            logger.warning(
                "The run of %r that was due at %s was claimed, and not marked as sent for %g s. It is sent now, perhaps"
                " for the second time.",
                entry.name, _utc(run.scheduled_at), self._schedule_store.resend_after,
                extra=self._about("run-sent-again", entry=entry.name),
            )  # fmt: skip
            self.apply_entry(entry, producer=self.producer)

    def names_of_entries(self) -> Iterable[str]:
        """Returns the names of all entries of the schedule, also of entries not read yet, which are due much later."""
        return map(str, self.schedule)

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Read when the entries last ran, before the heap is filled: at the start, and whenever entries change."""
        if not self._has_synced:
            self._check_names()
        entries: list[ScheduleEntry] = list(self.schedule.values())
        before = set(self._schedule_store.known)
        runs = self._schedule_store.sync(entry.name for entry in entries)
        for entry in entries:
            self._read_row(entry)
            if (run := runs.get(entry.name)) and not self._join_fleet(entry, run, is_new=entry.name not in before):
                del runs[entry.name]
        super().populate_heap(*args, **kwargs)
        for event in self._heap:
            if (name := event.entry.name) not in runs:
                now = _seconds(event.entry.default_now())
                with suppress(RunRefused):
                    # For an overdue entry, it is unknown here when it was due.
                    due = next_time(now, event.time - now + EARLY) if event.time > now else None
                    self._schedule_store.publish(name, LastRun(_seconds(event.entry.last_run_at), next_at=due))
        self._has_synced = True
        self._filled_at = clock()  # filling takes long if there are many entries

    def _check_names(self) -> None:
        for key, named in self._schedule_store.named.items():
            if named and (unknown := sorted(named.difference(self.names_of_entries()))):
                logger.warning(
                    "%s[%r] names %s, which the schedule of this beat does not have. Correct it, or add it.",
                    BEAT_SETTING, key, ", ".join(map(repr, unknown)),
                    extra=self._about("beat-unknown-entry"),
                )  # fmt: skip

    def _join_fleet(self, entry: ScheduleEntry, run: LastRun, is_new: bool) -> bool:
        """Continue from the last run of the fleet, not from this beat's start. Returns False if the store lost it."""
        own = _seconds(entry.last_run_at)
        if self._schedule_store.is_in_doubt(entry.name, run):
            return True
        if run.ran_at > own:
            self._adopt(entry, run)
        elif is_new and (self._has_synced or (entry.total_run_count and not self._is_saved_anew(entry))):
            # The entry was enabled again, or a file or a row has a run that the store lost.
            return run.ran_at == own
        elif not entry.total_run_count or _counts_from_change(entry):
            _set_last_run(entry, run.ran_at, entry.total_run_count)
        return True

    def _read_row(self, entry: ScheduleEntry) -> None:
        """Take over the times of the row: the entry was made when the row was read, and does not follow its changes.

        A host whose clock was ahead may have written rows and files.
        """
        if (row := getattr(entry, "model", None)) is not None and row.last_run_at:  # None: it was disabled just now
            entry.last_run_at, entry.total_run_count = row.last_run_at, row.total_run_count
        now = _seconds(entry.default_now())
        if _seconds(entry.last_run_at) > now + CLOCK_TOLERANCE:
            _set_last_run(entry, now, entry.total_run_count)

    def _is_saved_anew(self, entry: ScheduleEntry) -> bool:
        """Returns whether the start of a beat has saved the row, as it does for the entries of the settings."""
        return _counts_from_change(entry) and entry.name in (*self.app.conf.beat_schedule, "celery.backend_cleanup")

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """Claim the run if the entry is due. A run that another beat has claimed is not due in this one.

        Celery sends a run directly after it has called this method, so there is no other moment for the claim.
        """
        while True:
            due, wait = state = super().is_due(entry)
            if not due:
                return state  # type: ignore[no-any-return]
            if not self._broker.answers():
                return schedstate(False, RETRY)  # type: ignore[no-any-return]
            seen, now = _seconds(entry.last_run_at), _seconds(entry.default_now())
            scheduled_at = self._scheduled_at(entry, seen, now)
            self._signals.defer()  # until the run is sent
            try:
                wait_after = None if _is_one_off(entry) else wait
                current = self._schedule_store.claim(entry.name, seen, now, wait_after, scheduled_at)
            except RunRefused:
                return schedstate(False, RETRY)  # type: ignore[no-any-return]
            except LockBackendError as error:
                self._store_failed(error)
                return schedstate(False, RETRY)  # type: ignore[no-any-return]
            self._store_answered()
            if current is None and self._drop_if_late(entry):
                run = self._schedule_store.known[entry.name]
                _set_last_run(entry, run.ran_at, entry.total_run_count + _is_one_off(entry))
                # A one-off that has run disables itself when it is asked again whether it is due.
                return super().is_due(entry) if _is_one_off(entry) else schedstate(False, wait)  # type: ignore[no-any-return]
            if current is None:
                # A one-off is asked again at once, and disables itself then.
                return schedstate(True, 0) if _is_one_off(entry) else state  # type: ignore[no-any-return]
            if current.ran_at <= seen:
                return schedstate(False, RETRY)  # type: ignore[no-any-return]
            self._adopt(entry, current)
            if current.host and _is_one_off(entry):
                # Two beats that save one row would overwrite each other's count.
                return schedstate(False, RETIREMENT)  # type: ignore[no-any-return]

    def _drop_if_late(self, entry: ScheduleEntry) -> bool:
        """Returns whether the run that this beat has claimed is too late to be sent. If so, no beat sends it."""
        run = self._schedule_store.claimed[entry.name]
        lateness = _seconds(entry.default_now()) - run.scheduled_at
        if not self._schedule_store.is_too_late(entry.name, lateness):
            return False
        del self._schedule_store.claimed[entry.name]
        self._mark_sent(entry.name, run)
        logger.warning(
            "The run of %r that was due at %s is skipped: it is %.1f s late.", entry.name, _utc(run.scheduled_at),
            lateness, extra=self._about("run-skipped", entry=entry.name, lateness=lateness),
        )  # fmt: skip
        return True

    def _scheduled_at(self, entry: ScheduleEntry, seen: float, now: float) -> float:
        """Returns when the run that is due now became due: from its schedule, or from the beat of the run before it.

        The schedule does not know when a row begins. That beat does not know whether the schedule was changed since.
        """
        known = self._schedule_store.known.get(entry.name)
        expected = [known.next_at] if known and known.next_at is not None else []
        if entry.schedule is not None:
            with suppress(NotImplementedError):  # a schedule need not have this method
                left = entry.schedule.remaining_estimate(datetime.fromtimestamp(seen, self.app.timezone))
                expected.append(_seconds(entry.default_now()) + left.total_seconds())
        return round(max((at for at in expected if at <= now), default=now), 6)

    def apply_async(self, entry: ScheduleEntry, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Send the claimed run and mark it as sent, also if its message cannot be made.

        If the broker cannot be reached, the run is not marked, so that another beat sends it.
        """
        run = self._schedule_store.claimed.pop(entry.name, None)
        if run is None:
            return super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        try:
            sent = for_run(entry, run.scheduled_at)
            result = super().apply_async(sent, producer=producer, advance=advance, **kwargs)
        except Exception as error:
            if not self._broker.failed(error):
                self._mark_sent(entry.name, run)
            raise
        self._mark_sent(entry.name, run)
        self._report_sent(entry, run)
        return result

    def _report_sent(self, entry: ScheduleEntry, run: UnsentRun) -> None:
        lateness = max(0.0, _seconds(entry.default_now()) - run.scheduled_at)
        logger.info(
            "The run of %r that was due at %s was sent %.3f s late.", entry.name, _utc(run.scheduled_at), lateness,
            extra=self._about("run-sent", entry=entry.name, lateness=lateness),
        )  # fmt: skip
        about = {"entry": entry.name, "scheduled_at": _utc(run.scheduled_at), "lateness": lateness}
        send_signal(beat_run_sent, type(locks[self._schedule_store.using]), using=self._schedule_store.using, **about)

    def _about(self, event: str, **about: object) -> dict[str, Any]:
        return about_event(event, alias=self._schedule_store.using, **about)

    def _mark_sent(self, name: str, run: UnsentRun) -> None:
        try:
            self._schedule_store.mark_sent(name, run)
        except LockBackendError as error:
            self._store_failed(error)

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        """The last run is the time of the claim, even if this beat was stopped since: all beats share that time."""
        reserved = super().reserve(entry)
        if claimed := self._schedule_store.known.get(entry.name):
            _set_last_run(reserved, claimed.ran_at, reserved.total_run_count)
        return reserved

    def _adopt(self, entry: ScheduleEntry, run: LastRun) -> None:
        """Take over the run of another beat."""
        self._check_clock(run)
        _set_last_run(entry, run.ran_at, entry.total_run_count + bool(run.host))

    def _check_clock(self, run: LastRun) -> None:
        ahead = run.at - _seconds(self.app.now())
        if ahead > CLOCK_TOLERANCE and run.host not in self._clocks_reported:
            self._clocks_reported.add(run.host)
            logger.warning(
                "A run of beat on %s is stamped %.1f s in the future: the clock there is ahead, or the one of this host"
                " is behind. Runs come early or late by that, set the clocks by NTP.",
                run.host or "another host", ahead, extra=self._about("clock-differs"),
            )  # fmt: skip

    def _store_failed(self, error: LockBackendError) -> None:
        if not self._is_store_down:
            logger.warning(
                "No run is sent until the store answers again, asked every %g s: %s", RETRY, error,
                extra=self._about("beat-store-down"),
            )  # fmt: skip
        self._is_store_down = True

    def _store_answered(self) -> None:
        if self._is_store_down:
            using = self._schedule_store.using
            logger.warning("The store of lock backend %r answers again.", using, extra=self._about("beat-store-up"))
        self._is_store_down = False

    @property
    def info(self) -> str:
        """Returns the text for beat's banner."""
        shared = f"    . runs -> shared in lock backend {self._schedule_store.using!r} ({self._schedule_store.prefix}*)"
        return "\n".join(filter(None, (super().info, shared)))


class DistlockScheduler(SharedRuns, PersistentScheduler):  # type: ignore[misc]
    """``celery beat -S distlock``: Celery's own scheduler, with its file."""


class MemoryScheduler(SharedRuns):
    """``celery beat -S distlock_memory``: a scheduler without a file; the store knows when entries ran."""


def _seconds(when: datetime) -> float:
    """Returns seconds of Unix time. Naive times are in UTC, as for Celery."""
    return float(maybe_make_aware(when).timestamp())


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _set_last_run(entry: ScheduleEntry, at: float, count: int) -> None:
    """Set the last run of the entry and its row, in the time zone that they use, so that schedules compute the same
    times."""
    when = datetime.fromtimestamp(at, entry.last_run_at.tzinfo or UTC)
    if entry.last_run_at.tzinfo is None:
        when = when.replace(tzinfo=None)
    for record in filter(None, (entry, getattr(entry, "model", None))):
        record.last_run_at, record.total_run_count = when, count


def _counts_from_change(entry: ScheduleEntry) -> bool:
    """Returns whether the row of the entry has no run: it never ran, or it was disabled since."""
    row = getattr(entry, "model", None)
    return row is not None and row.last_run_at == row.date_changed


def _is_one_off(entry: ScheduleEntry) -> bool:
    """Returns whether the entry is a row of django-celery-beat that runs once."""
    return bool(getattr(getattr(entry, "model", None), "one_off", False))
