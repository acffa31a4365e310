"""Beats whose schedule is rows of django-celery-beat, many in one process, on a clock that the test moves."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import celery
import pytest

if celery.VERSION[:2] < (5, 7):
    pytest.skip("beat's schedulers need Celery 5.7", allow_module_level=True)

time_machine = pytest.importorskip("time_machine", reason="needs time-machine")
models = pytest.importorskip("django_celery_beat.models", reason="needs django-celery-beat")

from django_celery_beat import schedulers
from django_celery_beat.schedulers import DatabaseScheduler

from django_distlock import locks
from django_distlock.backends import locmem
from django_distlock.celery import beat, broker
from django_distlock.celery.beat_database import DistlockDatabaseScheduler
from django_distlock.celery.schedule_store import recorded_runs
from tests.support.beats import Killed, Recording, World, gaps, task
from tests.support.inside import runs_of, schedule_store_of

START = datetime(2026, 11, 21, 12, 0, 20, tzinfo=UTC)

pytestmark = [pytest.mark.slow, pytest.mark.django_db, pytest.mark.seconds(2)]


class DatabaseBeat(DistlockDatabaseScheduler, Recording):
    pass


class StockDatabaseBeat(DatabaseScheduler, Recording):
    pass


class TravellingWorld(World):
    """Rows ask the machine for the time."""

    def __init__(self, traveller, entries=dict, now=START, **conf):
        self.traveller = traveller
        super().__init__(now, entries, **conf)

    @property
    def now(self):
        return self._now

    @now.setter
    def now(self, moment):
        self._now = moment
        self.traveller.shift(moment - datetime.now(UTC))  # to move it to a time sets the zone of the process anew

    def start(self, kind=DatabaseBeat, **options):
        return super().start(kind, max_interval=None, **options)

    def set_clock(self, app, ahead):
        """It is that of the machine."""

    def run_for(self, seconds):
        self.run(self.now + timedelta(seconds=seconds))


@pytest.fixture
def world(locmem_locks, monkeypatch):
    with time_machine.travel(START, tick=False) as traveller:
        for module in (beat, broker, locmem):
            monkeypatch.setattr(module, "clock", lambda: datetime.now(UTC).timestamp())
        made = []

        def new(*arguments, **options):
            made.append(TravellingWorld(traveller, *arguments, **options))
            return made[-1]

        yield new
        for one in made:
            for started in one.started:
                started._finalize.cancel()  # it would save its rows when the tests end


@pytest.fixture
def rarely(monkeypatch, settings):
    """Hours pass more quickly without looks each few seconds or minutes: at the store, for unsent runs, at all rows."""
    monkeypatch.setattr(beat.SharedRuns, "verify_interval", 60.0)
    monkeypatch.setattr(schedulers, "SCHEDULE_SYNC_MAX_INTERVAL", 900)
    settings.DISTRIBUTED_LOCKS_BEAT = {"RESEND_AFTER": 180}  # a look each 60 s


def row(name, one_off=False, **when):
    if seconds := when.pop("every", None):
        when["interval"] = models.IntervalSchedule.objects.create(every=seconds, period="seconds")
    if clocked := when.pop("clocked", None):
        when["clocked"] = models.ClockedSchedule.objects.create(clocked_time=clocked)
    if cron := {field: when.pop(field) for field in ("minute", "hour", "timezone") if field in when}:
        when["crontab"] = models.CrontabSchedule.objects.create(**cron)
    if event := when.pop("event", None):
        when["solar"], _ = models.SolarSchedule.objects.get_or_create(event=event, latitude=27.7, longitude=85.3)
    return models.PeriodicTask.objects.create(name=name, task="task", args=json.dumps([name]), one_off=one_off, **when)


def test_rows_are_sent_once_by_three_beats_and_go_on_when_beats_are_replaced(world):
    row("interval", every=20)
    row("cron", minute="*")
    fleet = world()
    beats = [fleet.start() for _ in range(3)]
    for _ in range(8):
        fleet.run_for(45)
        fleet.kill(beats.pop(0))
        beats.append(fleet.start())
    assert set(map(round, gaps(fleet.times("interval")))) == {20}
    assert [when.minute for when in fleet.times("cron")] == [1, 2, 3, 4, 5, 6]


def test_a_row_of_the_settings_runs_although_every_start_saves_it_anew(world):
    """django-celery-beat counts a row that never ran from its last change, and each start changes it."""
    fleet = world(lambda: {"interval": task(60.0)})
    for _ in range(20):
        only = fleet.start()
        fleet.run_for(40)
        fleet.kill(only)
    assert len(fleet.times("interval")) >= 12
    assert set(map(round, gaps(fleet.times("interval")))) == {60}


@pytest.mark.parametrize("stays", [False, True])
def test_a_row_of_the_settings_that_was_enabled_again_runs_although_every_start_saves_it_anew(stays, world, rarely):
    """It ran, so it is no new one, and yet django-celery-beat counts it from its last change."""
    fleet = world(lambda: {"interval": task(60.0)})
    only = fleet.start()
    fleet.run_for(65)
    row = models.PeriodicTask.objects.get(name="interval")
    row.enabled = False
    row.save()
    fleet.run_for(15)
    only.sync()
    row.refresh_from_db()
    assert (row.last_run_at, row.total_run_count) == (None, 1)
    row.enabled = True
    row.save()
    fleet.run_for(15)
    enabled_at = fleet.now
    if not stays:
        fleet.kill(only)
    for _ in range(6):
        another = fleet.start()
        fleet.run_for(40)
        fleet.kill(another)
    again = [when for when in fleet.times("interval") if when > enabled_at]
    assert len(again) >= 3
    assert set(map(round, gaps(again))) == {60}


@pytest.mark.parametrize("when", ["clocked", "interval"])
def test_a_one_off_runs_once_and_retires(when, world, rarely):
    due = {"interval": {"every": 60}, "clocked": {"clocked": START + timedelta(minutes=1)}}
    once = row("once", one_off=True, **due[when])
    row("other", every=15)
    fleet = world()
    for _ in range(3):
        fleet.start()
    fleet.run_for(61)
    assert len(fleet.times("once")) == 1
    fleet.start()  # reads the row perhaps before the others have saved it
    fleet.run_for(90)
    assert len(fleet.times("once")) == 1
    once.refresh_from_db()
    assert (once.enabled, once.total_run_count) == (False, 0)

    if when == "clocked":
        once.clocked = models.ClockedSchedule.objects.create(clocked_time=fleet.now + timedelta(minutes=1))
    once.enabled = True
    once.save()
    fleet.run_for(120)
    assert len(fleet.times("once")) == 2
    assert gaps(fleet.times("once"))[0] > 140


def test_what_is_kept_of_rows_that_are_done_or_begin_later_is_not_kept_for_years(world, rarely, locmem_locks):
    row("other", every=3600)
    row("once", one_off=True, every=50)
    row("reminder", one_off=True, clocked=START + timedelta(minutes=1))
    row("later", every=60, start_time=START + timedelta(hours=1))
    fleet = world()
    fleet.start()
    fleet.run_for(120)
    days = {name: round((run.expires - fleet.now.timestamp()) / 86_400) for name, run in runs_of(locmem_locks).items()}
    assert days == {"fleet:once": 7, "fleet:reminder": 7, "fleet:later": 7, "fleet:other": 7}
    runs = {run.entry: run.next_run_at for run in recorded_runs("default")}
    assert (runs["fleet:once"], runs["fleet:reminder"]) == (None, None)
    assert runs["fleet:later"] is not None


def test_a_one_off_that_was_sent_but_not_saved_is_not_sent_by_a_beat_that_comes_later(world):
    as_it_was = row("once", one_off=True, clocked=START + timedelta(minutes=1))
    fleet = world()
    first = fleet.start()
    while not fleet.sent:
        fleet.run_for(0.01)
    fleet.kill(first)
    models.PeriodicTask.objects.filter(name="once").update(
        enabled=True, total_run_count=0, last_run_at=None, date_changed=as_it_was.date_changed
    )
    fleet.start()
    fleet.run_for(120)
    assert len(fleet.sent) == 1
    assert not models.PeriodicTask.objects.get(name="once").enabled


def test_rows_that_come_change_and_go(world):
    row("other", every=600)  # django-celery-beat does not notice the very first row at once
    fleet = world()
    for _ in range(3):
        fleet.start()
    fleet.run_for(60)
    added = row("added", every=20)
    fleet.run_for(70)
    assert len(fleet.times("added")) == 3
    added.interval = models.IntervalSchedule.objects.create(every=60, period="seconds")
    added.save()
    fleet.run_for(180)
    assert len(fleet.times("added")) == 6
    added.delete()
    fleet.run_for(180)
    assert len(fleet.times("added")) == 6


def test_runs_do_not_make_a_beat_ask_for_all_rows_anew(world, locmem_locks, monkeypatch):
    for number in range(10):
        row(f"row {number}", every=10)
    fleet = world()
    fleet.start()
    fleet.run_for(15)
    asked = []
    find = locmem_locks.find_runs
    monkeypatch.setattr(locmem_locks, "find_runs", lambda names: asked.append(len(names)) or find(names))
    fleet.run_for(60)
    assert len(fleet.sent) >= 60
    assert set(asked) == {1}  # whether the store lost its data


@pytest.mark.parametrize("how", ["disable", "delete", "change"])
def test_an_edit_that_is_noticed_while_a_run_is_sent_counts_at_once(how, world, monkeypatch):
    edited = row("interval", every=20)
    row("other", every=3000)
    fleet = world()
    fleet.start()
    fleet.run_for(130)
    is_due, edits = DatabaseBeat.is_due, []

    def edit_meanwhile(self, entry):
        due, wait = is_due(self, entry)
        if due and not edits:
            edits.append(fleet.now)
            if how == "delete":
                edited.delete()
            else:
                edited.enabled = how != "disable"
                if how == "change":
                    edited.interval = models.IntervalSchedule.objects.create(every=2000, period="seconds")
                edited.save()
        return due, wait

    monkeypatch.setattr(DatabaseBeat, "is_due", edit_meanwhile)
    fleet.run_for(21)
    assert edits
    sent = len(fleet.times("interval"))
    fleet.run_for(300)
    assert len(fleet.times("interval")) == sent


def test_a_row_counts_each_run_once_also_where_its_beat_forgot_what_it_counted_from(world, locmem_locks):
    counted = row("interval", every=10)
    row("other", every=3000)
    fleet = world()
    only = fleet.start()
    for seconds in (12, 30, 30):
        fleet.run_for(seconds)
        only._heap = None  # as after an error of the store
    fleet.run_for(30)
    sent = len(fleet.times("interval"))
    assert sent >= 10
    assert set(map(round, gaps(fleet.times("interval")))) == {10}
    only.sync()
    counted.refresh_from_db()
    assert counted.total_run_count == sent
    assert counted.last_run_at == fleet.times("interval")[-1]


def test_a_beat_that_reads_an_old_row_after_the_store_lost_its_data_remembers_its_run(world, locmem_locks, monkeypatch):
    """Each beat saves what it ran, so a row may become older. The rows may be read anew at any look at them."""
    edited = row("interval", every=20)
    row("other", every=3000)
    fleet = world()
    only = fleet.start()
    fleet.run_for(45)
    before, last = fleet.times("interval")
    runs_of(locmem_locks).clear()
    models.PeriodicTask.objects.filter(name="interval").update(last_run_at=before)
    reads, changed = [], DatabaseBeat.schedule_changed

    def is_changed(self):
        """Twice: what is read while the heap is filled is another schedule than it began with."""
        reads.append(fleet.now)
        return len(reads) in (1, 4) or changed(self)

    monkeypatch.setattr(DatabaseBeat, "schedule_changed", is_changed)
    monkeypatch.setattr(DatabaseBeat, "sync", lambda self: None)
    fleet.run_for(14)
    assert fleet.times("interval") == [before, last]
    fleet.run_for(10)
    assert len(fleet.times("interval")) == 3
    assert edited.name in schedule_store_of(only).known


def test_a_row_that_is_enabled_again_waits_for_its_next_time(world, rarely):
    often, quick = row("often", minute="*/10"), row("quick", every=60)
    fleet = world()
    for _ in range(3):
        fleet.start()
    fleet.run_for(630)
    for one in (often, quick):
        one.refresh_from_db()
        one.enabled = False
        one.save()
    fleet.run_for(1500)
    sent = len(fleet.sent)
    enabled_at = fleet.now
    for one in (often, quick):
        one.enabled = True
        one.save()
    fleet.run_for(50)
    assert len(fleet.sent) == sent
    fleet.run_for(590)
    [ran] = [when for when in fleet.times("often") if when > enabled_at]
    assert ran.minute % 10 == 0
    first = next(when for when in fleet.times("quick") if when > enabled_at)
    assert 55 < (first - enabled_at).total_seconds() < 70


def test_a_row_with_a_start_time_runs_first_then(world):
    row("later", every=30, start_time=START + timedelta(minutes=5))
    fleet = world()
    for _ in range(3):
        fleet.start()
    fleet.run_for(299)
    assert fleet.sent == []
    fleet.run_for(65)
    assert len(fleet.sent) == 3
    assert min(gaps(fleet.times("later"))) > 29


def test_a_store_that_lost_its_data_is_told_what_the_beats_know(world):
    row("cron", minute="*")
    fleet = world()
    for _ in range(3):
        fleet.start()
    for _ in range(4):
        fleet.run_for(50)
        runs_of(locks["default"]).clear()
    fleet.run_for(60)
    assert [when.minute for when in fleet.times("cron")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("zone", "begin"),
    [
        ("UTC", datetime(2026, 10, 24, 23, 50, tzinfo=UTC)),
        ("America/New_York", datetime(2027, 3, 27, 23, 50, tzinfo=UTC)),
    ],
)
def test_rows_in_time_zones_of_their_own_run_as_with_one_stock_beat_when_clocks_change(zone, begin, world, rarely):
    conf = {"now": begin, "zone": zone, "beat_max_loop_interval": 300}
    sent = []
    for kind in (StockDatabaseBeat, DatabaseBeat):
        one = world(**conf)
        models.PeriodicTask.objects.all().delete()
        row("at night", minute="30", hour="2", timezone="Europe/Berlin")
        row("around the change", minute="*/20", hour="1-4", timezone="Europe/Berlin")
        row("far away", minute="30", hour="*/2", timezone="Asia/Kathmandu")
        row("interval", every=2900)
        row("sunrise", event="sunrise")
        for _ in range(1 if kind is StockDatabaseBeat else 2):
            one.start(kind)
        while one.now < begin + timedelta(hours=3):
            one.run_for(1500)
            if kind is DatabaseBeat:
                one.kill(next(iter(one.wakes)))
                one.start(kind)
        sent.append(one)
    stock, fleet = sent
    for name in ("at night", "around the change", "far away", "interval", "sunrise"):
        ours, theirs = fleet.times(name), stock.times(name)
        assert len(ours) == len(theirs) >= 1, (name, ours, theirs)
        assert all(abs(our - their) < timedelta(seconds=1) for our, their in zip(ours, theirs, strict=True)), name


def test_a_row_that_is_sent_at_least_once_is_read_also_hours_before_it_is_due(world, settings, rarely, caplog):
    """A run that no beat sent since the night is sent in the morning, and not in the next night."""
    settings.DISTRIBUTED_LOCKS_BEAT = {"AT_LEAST_ONCE": ["nightly", "off"], "RESEND_AFTER": 30}
    row("nightly", minute="0", hour="14", timezone="UTC")
    row("other", minute="0", hour="14", timezone="UTC")
    row("off", every=60)
    models.PeriodicTask.objects.filter(name="off").update(enabled=False)
    fleet = world(beat_max_loop_interval=60)
    fleet.before_sending = kill_the_sender_of("nightly")
    fleet.start()
    fleet.run(START.replace(hour=14, minute=1))
    assert not fleet.wakes
    assert len(fleet.times("other")) <= 1
    fleet.now = START.replace(hour=20)
    fleet.start()
    fleet.start()
    fleet.run_for(120)
    assert [when.hour for when in fleet.runs("nightly")] == [14]
    assert [when.hour for when in fleet.times("nightly")] == [20]
    assert not [record for record in caplog.records if "AT_LEAST_ONCE" in record.message]


def test_a_row_that_begins_later_is_scheduled_for_its_beginning(world):
    begin = START + timedelta(seconds=100)
    row("later", every=3600, start_time=begin)
    fleet = world()
    fleet.start()
    fleet.run_for(130)
    [scheduled] = fleet.runs("later")
    assert abs(scheduled - begin) < timedelta(seconds=1.1)  # it waits for whole seconds


def test_a_one_off_that_is_too_late_is_disabled_and_not_sent(world, settings):
    settings.DISTRIBUTED_LOCKS_BEAT = {"SKIP_LATER_THAN": {"once": 60}}
    row("once", one_off=True, clocked=START + timedelta(seconds=100))
    row("other", one_off=True, clocked=START + timedelta(seconds=100))
    fleet = world()
    fleet.now = START + timedelta(seconds=400)
    fleet.start()
    fleet.start()
    fleet.run_for(60)
    assert len(fleet.times("other")) == 1
    assert fleet.times("once") == []
    assert not models.PeriodicTask.objects.filter(name__in=["once", "other"], enabled=True)


def test_a_row_that_was_disabled_just_now_has_no_last_run(world):
    """The schedule has it until the rows are read again."""
    row("once", one_off=True, clocked=START + timedelta(seconds=100))
    fleet = world()
    only = fleet.start()
    entry = only.schedule["once"]
    entry.model.enabled = False
    entry.model.save()
    assert entry.model.last_run_at is None
    only.populate_heap()
    assert entry.last_run_at is not None


def kill_the_sender_of(entry):
    killed = []

    def kill(beat, name):
        if name == entry and not killed:
            killed.append(beat)
            raise Killed

    return kill
