"""Beats that share their runs, many in one process, on a clock that the test moves.

What a fleet sends is compared with what one stock beat sends on the same clock: the runs must be the same.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import celery
import pytest
from celery.schedules import crontab, schedstate, schedule, solar

from django_distlock import LockBackendError, locks
from django_distlock.backends import locmem
from django_distlock.celery.schedule_store import recorded_runs
from tests.support.beats import Recording, World, gaps, task

if celery.VERSION[:2] < (5, 7):
    pytest.skip("beat's schedulers need Celery 5.7", allow_module_level=True)

from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler

from django_distlock.celery import beat, broker
from django_distlock.celery.deferred_signals import DeferredSignals
from tests.support.inside import look_at_schedule, runs_of, schedule_store_of
from tests.support.programs import ROOT
from tests.support.schedulers import FileBeat, MemoryBeat, StockBeat

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(1)]

START = datetime(2026, 11, 21, 12, 0, 20, tzinfo=UTC)


@pytest.fixture
def world(locmem_locks, monkeypatch):
    """Makes worlds; the clock of the schedulers is that of the newest."""
    worlds = []
    for clock in ((beat, "clock"), (broker, "clock"), (locmem, "clock"), (locmem, "wall_clock")):
        monkeypatch.setattr(*clock, lambda: worlds[-1].now.timestamp())

    def new(entries, now=START, **conf):
        worlds.append(World(now, entries, **conf))
        return worlds[-1]

    yield new
    for one in worlds:
        one.end()


@pytest.fixture
def rarely(monkeypatch, settings):
    """Days pass more quickly without looks each few seconds: whether the store lost its data, and for unsent runs."""
    monkeypatch.setattr(beat.SharedRuns, "verify_interval", 86_400.0)
    settings.DISTRIBUTED_LOCKS_BEAT = {"RESEND_AFTER": 86_400}


def everything():
    return {
        "interval": task(3600.0),
        "odd interval": task(timedelta(minutes=47)),
        "relative": task(schedule(timedelta(hours=6), relative=True)),
        "each hour": task(crontab(minute=0)),
        "at night": task(crontab(minute=30, hour=2)),
        "around the change": task(crontab(minute="*/20", hour="1-4")),
        "weekly": task(crontab(minute=5, hour=7, day_of_week="sun,mon")),
        "sunset": task(solar("sunset", 52.5, 13.4)),
    }


@pytest.mark.parametrize(
    ("zone", "begin"),
    [
        ("UTC", datetime(2026, 11, 21, 20, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2026, 10, 24, 18, tzinfo=UTC)),  # the night has an hour more
        ("Europe/Berlin", datetime(2027, 3, 27, 18, tzinfo=UTC)),  # and an hour less
        ("America/New_York", datetime(2026, 10, 31, 18, tzinfo=UTC)),
        ("Australia/Lord_Howe", datetime(2026, 10, 3, 12, tzinfo=UTC)),  # half an hour
        ("Asia/Kathmandu", datetime(2026, 10, 24, 18, tzinfo=UTC)),
    ],
)
def test_a_fleet_whose_beats_come_and_go_sends_what_one_stock_beat_sends(zone, begin, world, rarely):
    end = begin + timedelta(hours=40, minutes=10)  # when nothing is due
    stock = world(everything, begin, zone=zone)
    stock.start(StockBeat)
    stock.run(end)

    fleet = world(everything, begin, zone=zone)
    for _ in range(3):
        fleet.start(MemoryBeat)
    while fleet.now < end:
        fleet.run(min(end, fleet.now + timedelta(minutes=random.randint(1, 240))))
        fleet.kill(random.choice(list(fleet.wakes)))
        fleet.start(MemoryBeat)

    for entry in everything():
        ours, theirs = fleet.times(entry), stock.times(entry)
        assert len(ours) == len(theirs), entry
        assert all(abs(our - their) < timedelta(seconds=1) for our, their in zip(ours, theirs, strict=True)), entry
    assert len(stock.times("each hour")) >= 39
    assert stock.times("sunset")


def test_a_first_start_waits_a_period_and_a_restart_goes_on_where_the_fleet_is(world):
    fleet = world(lambda: {"interval": task(8.0)})
    for _ in range(20):  # each lives shorter than the period
        only = fleet.start(MemoryBeat)
        fleet.run(fleet.now + timedelta(seconds=6))
        fleet.kill(only)
    times = fleet.times("interval")
    assert timedelta(seconds=7.9) < times[0] - START < timedelta(seconds=8.1)
    assert len(times) == 20 * 6 // 8
    stock = world(lambda: {"interval": task(8.0)})
    for _ in range(20):
        only = stock.start(StockBeat)
        stock.run(stock.now + timedelta(seconds=6))
        stock.kill(only)
    assert stock.sent == []


@pytest.mark.parametrize("ahead", [2.8, -2.8])
def test_a_clock_that_is_off_by_a_third_of_the_period_makes_no_duplicate(ahead, world):
    fleet = world(lambda: {"interval": task(8.0), "cron": task(crontab())})
    fleet.start(MemoryBeat)
    fleet.start(MemoryBeat)
    other = fleet.start(MemoryBeat, ahead=ahead)
    fleet.run(START + timedelta(minutes=5))
    assert min(gaps(fleet.times("interval"))) > 7.9
    assert len(fleet.times("cron")) == 5
    fleet.kill(other)
    fleet.run(START + timedelta(minutes=10))
    assert min(gaps(fleet.times("interval"))) > 5
    assert max(gaps(fleet.times("interval"))) < 8 * 1.5
    assert len(fleet.times("cron")) == 10


@pytest.mark.parametrize(("ahead", "told"), [(20, 1), (6.5, 1), (4.5, 0)])
def test_a_clock_that_differs_by_more_than_five_seconds_is_told_once(ahead, told, world, caplog):
    fleet = world(lambda: {"interval": task(30.0)})
    fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=1))
    fleet.start(MemoryBeat, ahead=ahead)
    fleet.run(START + timedelta(minutes=3))
    said = [record.message for record in caplog.records if "in the future" in record.message]
    assert len(said) == told
    assert all("NTP" in message for message in said)


@pytest.mark.parametrize("ahead", [70, 3600, 400 * 365 * 86_400])
def test_a_clock_that_is_far_ahead_silences_no_other_beat(ahead, world, caplog):
    fleet = world(lambda: {"interval": task(8.0), "cron": task(crontab())})
    wrong = fleet.start(MemoryBeat, ahead=ahead)
    fleet.run(START + timedelta(seconds=10))
    assert fleet.sent == []
    fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=60))
    fleet.kill(wrong)
    fleet.run(START + timedelta(seconds=100))
    again = fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=150))
    assert set(map(round, gaps(fleet.times("interval")))) == {8}
    assert len(fleet.times("interval")) == (150 - 10) // 8
    assert [when.minute for when in fleet.times("cron")] == [1, 2]
    said = [record.message for record in caplog.records if "ahead of the clock of the store" in record.message]
    assert len(said) == 1
    assert again.schedule["interval"].last_run_at < fleet.now


def test_a_file_that_was_written_where_the_clock_was_ahead_silences_no_entry(world, tmp_path, monkeypatch):
    fleet = world(lambda: {"interval": task(8.0)})
    file = str(tmp_path / "schedule")
    for ahead in (3600, 0):
        only = fleet.start(FileBeat, ahead=ahead, schedule_filename=file)
        monkeypatch.setattr(celery._state._tls, "current_app", only.app)  # of schedules that come from the file
        fleet.run(fleet.now + timedelta(seconds=30))
        only.close()
        fleet.kill(only)
    assert len(fleet.times("interval")) == 3
    assert min(fleet.times("interval")) > START + timedelta(seconds=30)


@pytest.mark.parametrize("kept", ["nothing", "the run before"])
def test_a_store_that_lost_its_data_makes_no_duplicate(kept, world, locmem_locks):
    """Some beats have not asked for this minute's run yet when the store forgets that it was sent."""
    fleet = world(lambda: {"cron": task(crontab()), **({"interval": task(20.0)} if kept == "nothing" else {})})
    fleet.start(MemoryBeat, ahead=0.5)
    for behind in (2.0, 4.0):
        fleet.start(MemoryBeat, ahead=-behind)
    fleet.run(START + timedelta(seconds=50))
    before = dict(locmem_locks.runs())
    for _ in range(5):
        sent = len(fleet.times("cron"))
        while len(fleet.times("cron")) == sent:
            fleet.run(fleet.now + timedelta(seconds=0.1))
        runs_of(locmem_locks).clear()
        if kept == "the run before":
            for name, stamp in before.items():
                locmem_locks.claim_run(name, stamp, stamp, 600)
            fleet.run(fleet.now + timedelta(seconds=1.1))  # within which the beat that ran it has looked
        before = dict(locmem_locks.runs())
    fleet.run(fleet.now + timedelta(seconds=30))
    per_minute = Counter(
        (when + timedelta(seconds=0.6)).replace(second=0, microsecond=0) for when in fleet.times("cron")
    )
    assert set(per_minute.values()) == {1}
    assert len(per_minute) >= 5
    assert min(gaps(fleet.times("interval")), default=20) > 15


def test_while_the_store_is_down_nothing_is_sent_and_afterwards_each_entry_once(
    world, locmem_locks, monkeypatch, caplog
):
    fleet = world(lambda: {"interval": task(2.0), "cron": task(crontab())})
    for _ in range(3):
        fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=39))
    sent = len(fleet.sent)
    with monkeypatch.context() as broken:
        for method in ("claim_run", "find_runs"):
            broken.setattr(locmem_locks, method, unreachable)
        fleet.start(MemoryBeat)  # during the outage
        fleet.run(START + timedelta(seconds=43.5))
        assert len(fleet.sent) == sent
    fleet.run(START + timedelta(seconds=100))
    assert min(gaps(fleet.times("interval"))) > 1.9
    assert [when.minute for when in fleet.times("cron")] == [1, 2]
    assert timedelta(seconds=3.4) < fleet.times("cron")[0] - START.replace(minute=1, second=0) < timedelta(seconds=5)
    said = [record.message for record in caplog.records]
    assert sum("until the store answers again" in text for text in said) == 4
    assert sum("answers again." in text for text in said) == 4


@pytest.mark.parametrize("is_counted_anew", [False, True])
def test_a_claim_whose_answer_was_lost_is_the_claimants_run(is_counted_anew, world, locmem_locks, monkeypatch):
    fleet = world(lambda: {"cron": task(crontab())})
    for _ in range(3):
        fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=30))
    claim, lost = locmem_locks.claim_run, []

    def in_doubt(*arguments):
        standing = claim(*arguments)
        if standing is None and not lost:
            lost.append(arguments)
            raise LockBackendError("the answer was lost")
        return standing

    monkeypatch.setattr(locmem_locks, "claim_run", in_doubt)
    fleet.run(START + timedelta(seconds=40.5))
    if is_counted_anew:  # as when entries come or go
        for one in fleet.wakes:
            one._heap = None
    fleet.run(START + timedelta(seconds=60))
    assert len(lost) == 1
    [when] = fleet.times("cron")
    assert 0.9 < when.second + when.microsecond / 1e6 < 1.2  # asked again after a second


def test_a_run_counts_from_its_claim_also_where_its_beat_was_stopped_just_after(
    world, locmem_locks, monkeypatch, tmp_path
):
    """Else the file of that beat would remember a later run than the fleet, and a restart would move the others on."""
    fleet = world(lambda: {"interval": task(60.0)})
    claim = locmem_locks.claim_run

    def stopped_after(name, seen, now, ttl):
        standing = claim(name, seen, now, ttl)
        if standing is None and now.at > seen.at:
            fleet.now += timedelta(seconds=9)
        return standing

    monkeypatch.setattr(locmem_locks, "claim_run", stopped_after)
    file = str(tmp_path / "schedule")
    for until in (65, 75):
        only = fleet.start(FileBeat, schedule_filename=file)
        monkeypatch.setattr(celery._state._tls, "current_app", only.app)  # of schedules that come from the file
        fleet.run(START + timedelta(seconds=until))
        [(_, stamp)] = locmem_locks.runs()
        assert only.schedule["interval"].last_run_at.timestamp() == stamp.at
        assert (stamp.host != "", round(stamp.at - START.timestamp())) == (True, 60)
        only.close()
        fleet.kill(only)
    assert len(fleet.sent) == 1


@pytest.fixture
def told_to_end():
    """Handlers as Celery has them."""

    def end(*_):
        raise SystemExit

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, end) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_beat_that_is_told_to_end_after_it_claimed_a_run_sends_it_before(
    number, world, locmem_locks, monkeypatch, told_to_end
):
    fleet = world(lambda: {"interval": task(10.0)})
    only = fleet.start(MemoryBeat)
    claim = locmem_locks.claim_run

    def end_after(name, seen, now, ttl):
        standing = claim(name, seen, now, ttl)
        if standing is None and now.at > seen.at:
            signal.raise_signal(number)
        return standing

    monkeypatch.setattr(locmem_locks, "claim_run", end_after)
    with pytest.raises(SystemExit):
        fleet.run(START + timedelta(seconds=15))
    assert len(fleet.times("interval")) == 1
    assert signal.getsignal(number).__name__ == "end"
    with pytest.raises(SystemExit):  # as ever
        signal.raise_signal(number)
    assert schedule_store_of(only).known["interval"].host


@pytest.mark.parametrize("how", ["a second signal", "its time is over"])
def test_a_broker_that_does_not_answer_keeps_no_beat_from_ending(how, world, monkeypatch, told_to_end):
    monkeypatch.setattr(DeferredSignals, "timeout", 0.2 if how == "its time is over" else 600.0)

    class HangingBeat(MemoryBeat):
        def apply_async(self, entry, *args, **kwargs):
            signal.raise_signal(signal.SIGTERM)
            if how == "a second signal":
                signal.raise_signal(signal.SIGTERM)
            time.sleep(60)
            super().apply_async(entry, *args, **kwargs)

    fleet = world(lambda: {"interval": task(10.0)})
    fleet.start(HangingBeat)
    with pytest.raises(SystemExit):
        fleet.run(START + timedelta(seconds=15))
    assert fleet.sent == []


TOLD_AGAIN = """
import signal, sys, threading, time
from django.conf import settings
settings.configure()
from django_distlock.celery.deferred_signals import DeferredSignals

def end(*_):
    raise SystemExit

def told_again_at(point):
    DeferredSignals.timeout, left, signals = 600.0, point, DeferredSignals()

    def trace(frame, event, argument):
        nonlocal left
        left -= event == "line"
        if event == "line" and left == 0:
            signal.raise_signal(signal.SIGTERM)
        return trace

    handlers = [signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)]
    signals.defer()
    signal.raise_signal(signal.SIGTERM)
    others = sys.gettrace()  # as of who measures coverage
    sys.settrace(trace)
    try:
        signals.deliver()
    except SystemExit:
        sys.settrace(others)
    else:
        raise AssertionError(f"the signal was lost at point {point}")
    while any(thread.name == "distlock-signal" for thread in threading.enumerate()):
        time.sleep(0.001)
    return left <= 0

point = 1
while told_again_at(point):
    point += 1
print(point)
"""


def test_a_beat_that_is_told_to_end_twice_at_any_moment_ends():
    """Also while the first signal is being delivered."""
    told = subprocess.run(
        [sys.executable, "-c", TOLD_AGAIN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(told.stdout) > 8


def test_a_beat_that_was_stopped_while_it_sent_is_in_time_for_the_next_run(world):
    class StoppedBeat(MemoryBeat):
        def apply_async(self, entry, *args, **kwargs):
            super().apply_async(entry, *args, **kwargs)
            if len(fleet.sent) == 1:
                fleet.now += timedelta(seconds=9)

    fleet = world(lambda: {"interval": task(10.0)})
    fleet.start(StoppedBeat)
    fleet.run(START + timedelta(seconds=35))
    assert [round((when - START).total_seconds()) for when in fleet.times("interval")] == [10, 20, 30]


def test_an_entry_that_comes_while_the_store_is_down_runs(world, locmem_locks, monkeypatch):
    fleet = world(lambda: {"a": task(30.0)})
    beats = [fleet.start(MemoryBeat, max_interval=5) for _ in range(3)]
    fleet.run(START + timedelta(seconds=10))
    with monkeypatch.context() as broken:
        for method in ("claim_run", "find_runs"):
            broken.setattr(locmem_locks, method, unreachable)
        for one in beats:
            one.update_from_dict({"b": task(15.0)})
        fleet.run(START + timedelta(seconds=20))
    fleet.run(START + timedelta(seconds=70))
    assert len(fleet.times("a")) == 2
    assert len(fleet.times("b")) >= 3
    assert set(map(round, gaps(fleet.times("b")))) == {15}


def test_a_row_that_is_newer_than_this_hosts_clock_is_claimed_once(world, locmem_locks):
    """A claim must move the stamp past what everybody saw, or it moves nothing for the others."""
    fleet = world(dict)
    first, second = fleet.start(MemoryBeat), fleet.start(MemoryBeat)
    ahead = (START + timedelta(seconds=1)).timestamp()
    for one in (first, second):
        schedule_store_of(one).sync(["entry"])
        schedule_store_of(one).publish("entry", beat.LastRun(ahead))
    fleet.now += timedelta(seconds=locmem_locks.grace)
    claims = [schedule_store_of(one).claim("entry", ahead, ahead - 1, None) for one in (first, second)]
    assert claims[0] is None
    assert claims[1].at > ahead


def test_a_deadline_for_missed_runs_holds_for_the_fleet(world):
    for deadline, expected in ((600, 0), (None, 1)):
        runs_of(locks["default"]).clear()
        fleet = world(lambda: {"cron": task(crontab(minute=0))}, beat_cron_starting_deadline=deadline)
        only = fleet.start(MemoryBeat)
        fleet.run(START + timedelta(hours=1))
        fleet.kill(only)
        fleet.now = START + timedelta(hours=5, minutes=30)
        before = len(fleet.sent)
        for _ in range(3):
            fleet.start(MemoryBeat)
        fleet.run(fleet.now + timedelta(minutes=2))
        assert len(fleet.sent) - before == expected
        fleet.run(fleet.now + timedelta(hours=1))
        assert len(fleet.sent) - before == expected + 1


def test_a_file_that_remembers_a_run_which_the_store_lost_tells_it(world, tmp_path, monkeypatch):
    fleet = world(lambda: {"interval": task(3600.0)})
    file = str(tmp_path / "schedule")
    first = fleet.start(FileBeat, schedule_filename=file)
    monkeypatch.setattr(celery._state._tls, "current_app", first.app)  # of schedules that come from the file
    fleet.run(START + timedelta(minutes=90))
    first.close()
    fleet.kill(first)
    runs_of(locks["default"]).clear()
    second = fleet.start(FileBeat, schedule_filename=file)
    monkeypatch.setattr(celery._state._tls, "current_app", second.app)
    fleet.run(START + timedelta(minutes=130))
    second.close()
    assert [round((when - START).total_seconds()) for when in fleet.times("interval")] == [3600, 7200]


def test_entries_that_come_change_and_go_while_beats_run(world):
    fleet = world(lambda: {"a": task(60.0)})
    beats = [fleet.start(MemoryBeat) for _ in range(3)]
    fleet.run(START + timedelta(seconds=90))
    for one in beats:
        one.update_from_dict({"b": task(20.0), "a": task(30.0)})
        look_at_schedule(one)
        fleet.wakes[one] = fleet.now
    fleet.run(START + timedelta(seconds=165))
    assert len(fleet.times("b")) == 3
    assert len(fleet.times("a")) == 1 + 3
    for one in beats:
        del one.schedule["b"]
        look_at_schedule(one)
        fleet.wakes[one] = fleet.now
    fleet.run(START + timedelta(seconds=300))
    assert len(fleet.times("b")) == 3
    assert list(schedule_store_of(beats[0]).known) == ["a"]


def test_an_entry_that_comes_is_seen_after_the_longest_time_between_two_loops(world):
    fleet = world(lambda: {"a": task(3600.0)}, beat_max_loop_interval=7)
    beats = [fleet.start(MemoryBeat, max_interval=None) for _ in range(3)]
    fleet.run(START + timedelta(seconds=30))
    came = fleet.now
    for one in beats:
        one.update_from_dict({"b": task(20.0)})
    fleet.run(came + timedelta(seconds=19))
    assert fleet.sent == []
    fleet.run(came + timedelta(seconds=58))
    assert len(fleet.times("b")) == 2
    assert timedelta(seconds=20) <= fleet.times("b")[0] - came <= timedelta(seconds=27.1)
    assert set(map(round, gaps(fleet.times("b")))) == {20}


def test_a_scheduler_of_ones_own_joins_in_by_the_mixin(world):
    """This one reads its schedule from elsewhere, has entries of its own, and sends nothing while it is closed."""

    class ShopEntry(ScheduleEntry):
        def is_due(self):
            return super().is_due() if self.app.world.is_open else schedstate(False, 5.0)

    class ShopScheduler(Scheduler):
        Entry = ShopEntry

        def setup_schedule(self):
            self.update_from_dict(self.app.world.shelf)

    class ShopBeat(beat.SharedRuns, ShopScheduler, Recording):
        pass

    fleet = world(dict)
    fleet.shelf, fleet.is_open = {"a": task(60.0)}, True
    for _ in range(3):
        fleet.start(ShopBeat)
    fleet.run(START + timedelta(seconds=190))
    assert len(fleet.times("a")) == 3
    fleet.is_open = False
    fleet.run(START + timedelta(seconds=350))
    fleet.is_open = True
    fleet.run(START + timedelta(seconds=400))
    assert len(fleet.times("a")) == 4
    assert timedelta(seconds=350) <= fleet.times("a")[3] - START <= timedelta(seconds=355.1)


def test_schedulers_keep_nothing_in_an_entry_and_touch_no_store_before_they_tick(world, monkeypatch, tmp_path):
    fleet = world(lambda: {"a": task(60.0)})
    for method in ("claim_run", "find_runs"):
        monkeypatch.setattr(locks["default"], method, unreachable)
    lazy = fleet.start(FileBeat, schedule_filename=str(tmp_path / "never"), lazy=True)
    assert "runs -> shared in lock backend 'default' (fleet:*)" in lazy.info
    assert "db -> " in lazy.info
    fleet.kill(lazy)
    eager = fleet.start(MemoryBeat)
    assert eager.tick() <= eager.verify_interval
    assert set(vars(eager.schedule["a"])) == set(vars(StockBeat(eager.app).schedule["a"]))


def test_entries_may_have_names_that_no_lock_may_have(world, settings):
    """Those without a name are called what their calls look like, with all arguments."""
    settings.DISTRIBUTED_LOCKS_BEAT = {"PREFIX": ""}
    long = "x" * 20_000
    names = [1, f"{long}a", f"{long}b", "half of a pair \ud800", "django_distlock.nightly"]
    fleet = world(lambda: {name: task(8.0) for name in names})
    fleet.start(MemoryBeat)
    fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=30))
    assert [len(fleet.times(name)) for name in names] == [3] * len(names)
    assert len({run.entry for run in recorded_runs("default")}) == len(names)


def test_what_was_run_by_whom_and_when_it_is_expected_again(world):
    fleet = world(lambda: {"a": task(60.0), "b": task(crontab(minute=0))})
    fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=90))
    runs = {info.entry: info for info in recorded_runs("default")}
    assert sorted(runs) == ["fleet:a", "fleet:b"]
    a, b = runs["fleet:a"], runs["fleet:b"]
    assert abs(a.last_run_at - START) - timedelta(seconds=60) < timedelta(seconds=1)
    assert a.host
    assert abs(a.next_run_at - START) - timedelta(seconds=120) < timedelta(seconds=1)
    assert (b.last_run_at, b.host) == (None, "")
    assert abs(b.next_run_at - START.replace(hour=13, second=0)) < timedelta(seconds=1)


def test_an_entry_keeps_the_time_zone_that_it_was_given(world):
    fleet = world(lambda: {"a": task(60.0)}, zone="Europe/Berlin")
    first, second = fleet.start(MemoryBeat), fleet.start(MemoryBeat)
    fleet.run(START + timedelta(seconds=90))
    for one in (first, second):
        assert str(one.schedule["a"].last_run_at.tzinfo) == "Europe/Berlin"
        assert one.schedule["a"].last_run_at.astimezone(ZoneInfo("UTC")) > START + timedelta(seconds=50)
        assert one.schedule["a"].total_run_count == 1


def test_the_schedulers_are_those_of_celery():
    assert issubclass(beat.DistlockScheduler, PersistentScheduler)
    assert not issubclass(beat.MemoryScheduler, PersistentScheduler)


def unreachable(*_):
    raise LockBackendError("the store is down")
