"""Beat on every host: real beats and workers, killed, stopped, replaced, and with a store that goes down.

Each entry notes what is sent and what runs; a run is due once in each window of the clock. What the rules of beat do
under each fault is proved in ``test_beat.py``, on a clock that the test moves; here a few real fleets show that
processes do the same. The others, those that take minutes, and the random run are done where ``DISTLOCK_SOAK=600``
names the seconds of the latter. Each prints what it counted as a line of JSON; ``DISTLOCK_FIGURES=file`` collects them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise

import celery
import pytest

from example_project.valkey import Valkey
from tests.support.fleet.harness import STARTS_WITHIN, Fleet, per_window, report, silences
from tests.support.tools import eventually

if celery.VERSION[:2] < (5, 7):
    pytest.skip("beat's schedulers need Celery 5.7", allow_module_level=True)

SOAK = float(os.environ.get("DISTLOCK_SOAK", "0"))
slow = pytest.mark.skipif(not SOAK, reason="a long fleet: DISTLOCK_SOAK=600 runs it")
with_database = pytest.param(
    "distlock_database",
    marks=pytest.mark.skipif(not find_spec("django_celery_beat"), reason="django-celery-beat is not installed"),
)
EVERY_SCHEDULER = ["distlock", "distlock_memory", with_database]

ATTEMPTS = 4  # to start beats within a window, on a busy machine
BOTH = {"wall": ("wall", 2), "interval": ("every", 2)}


@pytest.fixture
def fleets(valkey, own_valkey, tmp_path):
    """Starts one fleet; its stamps are on a server of their own."""
    started = []

    def start(entries=None, store=None, **options):
        started.append(Fleet(tmp_path, valkey, store or own_valkey(), entries, **options))
        return started[-1].__enter__()

    yield start
    for fleet in started:
        fleet.__exit__(AssertionError, None, None)


def settled(fleet):
    """The moment from which all beats are at work."""
    eventually(lambda: len(fleet.sends()) >= 2, 60)
    return time.time()


def let_run(until):
    time.sleep(max(0.0, until - time.time()))


def check_once(fleet, begin):
    """One send in each window of the wall clock; intervals keep their distance, and nobody is silent for long."""
    end, verdict = time.time(), fleet.judge(begin)
    assert verdict.wrong == []
    windows = per_window(fleet.sends("wall"), 2, begin, end)
    if not verdict.excused:
        assert set(windows.values()) == {1}, windows
    check_no_duplicate(fleet)
    silence = check_silences(fleet, "interval", 2, begin, end)
    sends = {"windows": len(windows), "sends": sum(windows.values()), "excused": verdict.excused}
    return {**sends, "longest_silence": silence, "slowness": round(fleet.machine.slowness(begin), 3)}


def check_silences(fleet, entry, period, begin, end):
    """Returns the longest, which is below 1.25 periods; and there are not more sends than periods."""
    sends, slowness = fleet.sends(entry, begin, end), fleet.machine.slowness(begin)
    longest = max(silences(sends))
    assert longest < period * 1.25 + slowness, (entry, slowness, silences(sends))
    assert (len(sends) - 1.5) * period < sends[-1].at - sends[0].at + slowness, (entry, slowness, silences(sends))
    return round(longest, 3)


def check_no_duplicate(fleet):
    """Of no entry the same run was sent twice: each message knows which run was the one before."""
    for entry, rhythm in fleet.rhythms.items():
        due = sorted(rhythm.due_after(one.seen) for one in fleet.sends(entry))
        assert all(later - earlier > rhythm.period - 0.001 for earlier, later in pairwise(due)), (entry, due)


def check_runs(fleet):
    """What was sent ran, and once."""
    sent = {one.id for one in fleet.sends()}
    eventually(lambda: sent <= {one.id for one in fleet.runs()}, 20)
    ran = [one.id for one in fleet.runs()]
    assert len(ran) == len(set(ran))
    return {"runs": len(ran)}


@pytest.mark.seconds(11)
def test_three_workers_with_a_beat_inside_send_and_run_each_due_run_once(fleets):
    fleet = fleets(BOTH)
    fleet.start(beats=3, with_beat=True)
    begin = settled(fleet)
    let_run(begin + 9)
    report("worker -B", **check_once(fleet, begin), **check_runs(fleet))


@pytest.mark.seconds(20)
def test_rows_of_the_database_run_once_and_one_offs_once_for_ever(fleets):
    pytest.importorskip("django_celery_beat")
    at = time.time() + 12
    rows = {
        "interval": ("every", 2, False),
        "clocked": ("clocked", at, True),
        "once": ("every", 8, True),
    }
    fleet = fleets(rows=rows, scheduler="distlock_database")
    fleet.start(beats=3, workers=1)
    begin = settled(fleet)
    eventually(lambda: fleet.sends("clocked") and fleet.sends("once"), 60)
    let_run(max(at, begin + 8) + 1)
    [clocked] = fleet.sends("clocked")
    # django-celery-beat looks each 5 s
    assert at - 0.1 < clocked.at < max(at, begin) + 6 + fleet.machine.slowness(begin)
    fleet.beat("late")  # reads the rows after the one-offs ran
    fleet.wait_for(5)
    let_run(time.time() + 4)
    assert len(fleet.sends("clocked")) == len(fleet.sends("once")) == 1
    silence = check_silences(fleet, "interval", 2, begin, time.time())
    check_no_duplicate(fleet)
    figures = {"clocked_late": round(clocked.at - at, 3), "longest_silence": silence}
    report("database", **figures, sends=len(fleet.sends("interval", begin)), **check_runs(fleet))


@pytest.mark.seconds(16)
def test_beats_that_are_killed_ended_replaced_and_stopped_miss_nothing_and_double_nothing(fleets):
    fleet = fleets(BOTH, scheduler="distlock")
    fleet.start(beats=3, workers=2)
    begin = settled(fleet)
    fleet.stop("b3")
    stopped = time.time()
    time.sleep(1.5)
    fleet.replace("b1", signal.SIGKILL)
    fleet.replace("b2", signal.SIGTERM)
    let_run(stopped + 9)
    fleet.go_on("b3")
    let_run(time.time() + 4.5)
    assert all(fleet.is_alive(name) for name in ("b1", "b2", "b3"))
    report("kill, restart, stop", **check_once(fleet, begin), **check_runs(fleet))


@slow
def test_a_beat_frozen_between_claim_and_publish_sends_that_run_once_and_late(fleets):
    fleet = fleets({"wall": ("wall", 2)})
    fleet.start(beats=3)
    begin = settled(fleet)
    by, _ = fleet.strike_next("before", signal.SIGSTOP)
    frozen_at = time.time()
    let_run((frozen_at // 2) * 2 + 6.8)
    others = fleet.sends()
    assert [one for one in others if one.at > frozen_at and one.by != by]
    fleet.send_signal(by, signal.SIGCONT)
    thawed = time.time()
    let_run(thawed + 4)
    sends = fleet.sends()
    late = [one for one in sends if one.by == by and frozen_at < one.at < thawed + 0.5]
    assert len(late) == 1
    windows = per_window([one for one in sends if one is not late[0]], 2, begin, time.time())
    missed = [window for window, count in windows.items() if count == 0]
    assert missed == [int(frozen_at // 2)]
    assert set(windows.values()) == {0, 1}
    check_no_duplicate(fleet)
    report("frozen after its claim", late_by=round(late[0].at - frozen_at, 3), sends=len(sends), windows=len(windows))


@slow
@pytest.mark.parametrize("data", ["kept", "lost"])
def test_a_store_that_is_down_for_four_seconds_makes_no_duplicate_and_ends_no_beat(data, fleets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("v")
    durable = ["--appendonly", "yes"] if data == "kept" else []
    store = Valkey(*durable, folder=folder).start()
    try:
        fleet = fleets(BOTH, store=store, settle=5.0)
        fleet.start(beats=3)
        begin = settled(fleet)
        time.sleep(random.uniform(1.5, 3.5))
        store.stop()
        down = time.time()
        time.sleep(4)
        sent_meanwhile = [one for one in fleet.sends() if one.at > down + 0.5]
        store.start()
        up = time.time()
        eventually(lambda: [one for one in fleet.sends("interval") if one.at > up], 20)
        resumed = fleet.sends("interval")[-1].at
        let_run(resumed + 5)
        assert sent_meanwhile == []
        windows = per_window(fleet.sends("wall"), 2, begin, time.time())
        check_no_duplicate(fleet)
        assert all(fleet.is_alive(name) for name in ("b1", "b2", "b3"))
        report(
            "store down",
            data=data,
            resumed_after=round(resumed - up, 3),
            windows=len(windows),
            sends=sum(windows.values()),
        )
    finally:
        store.stop()


@slow
def test_a_beat_that_takes_over_after_the_run_was_sent_does_not_send_it_again(fleets):
    fleet = fleets({"wall": ("wall", 8)}, scheduler="distlock")
    figures = fail_over(fleet, period=8, entry="wall")
    report("fail-over", scheduler="distlock", **figures)


def fail_over(fleet, period, entry):
    """One beat sends a run and is killed; others start in the same window."""
    fleet.beat("b1")
    alive, begin = ["b1"], time.time()
    for attempt in range(1, ATTEMPTS + 1):
        before = len(fleet.sends(entry))
        eventually(lambda before=before: len(fleet.sends(entry)) > before, period + STARTS_WITHIN)
        sent = fleet.sends(entry)[-1]
        for name in alive:
            fleet.end(name)
        alive = [f"b{2 * attempt}", f"b{2 * attempt + 1}"]
        for name in alive:
            fleet.beat(name)
        fleet.wait_for(1 + 2 * attempt)
        if time.time() // period == sent.at // period:
            break
    else:
        pytest.fail("the machine is too slow to start beats within the window")
    eventually(lambda: fleet.sends(entry, sent.at + 1), period + 30)
    time.sleep(4)
    windows = per_window(fleet.sends(entry), period, begin, time.time() + period)
    assert windows[int(sent.at // period)] == 1
    assert windows[int(sent.at // period) + 1] == 1
    assert max(windows.values()) == 1, windows
    return {"windows": len(windows), "sends": len(fleet.sends(entry)), "attempts": attempt}


@slow
@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER)
def test_a_crontab_is_sent_once_a_minute_when_another_beat_takes_over(scheduler, fleets):
    each_minute = {"rows": {"cron": ("cron", "*", False)}} if "database" in scheduler else {}
    fleet = fleets({"cron": ("cron", "* * * * *")} if not each_minute else None, scheduler=scheduler, **each_minute)
    let_run((time.time() // 60 + 1) * 60 - 20 if time.time() % 60 < 40 else 0)
    report("crontab fail-over", scheduler=scheduler, **fail_over(fleet, period=60, entry="cron"))


@slow
@pytest.mark.parametrize("scheduler", [*EVERY_SCHEDULER, "worker -B"])
def test_long_and_short_entries_for_three_minutes(scheduler, fleets):
    crontab = {"crontab": ("cron", "*" if scheduler == "distlock_database" else "* * * * *")}
    intervals = {"interval": ("every", 2), "long": ("every", 30)}
    if scheduler == "distlock_database":
        fleet = fleets(rows={name: (*when, False) for name, when in (intervals | crontab).items()}, scheduler=scheduler)
        walls = {"crontab": 60}
    else:
        entries = intervals | crontab | {"wall": ("wall", 2), "long wall": ("wall", 30)}
        fleet = fleets(entries, scheduler="distlock" if scheduler == "worker -B" else scheduler)
        walls = {"crontab": 60, "wall": 2, "long wall": 30}
    if scheduler == "worker -B":
        fleet.start(beats=3, with_beat=True)
    else:
        fleet.start(beats=3, workers=2)
    begin = settled(fleet)
    let_run(begin + 180)
    end, verdict = time.time(), fleet.judge(begin)
    silence = {}
    for entry, period in {"interval": 2, "long": 30, **walls}.items():
        silence[entry] = check_silences(fleet, entry, period, begin, end)
        assert len(fleet.sends(entry, begin, end)) >= 180 // period - 1, entry
    for entry, period in walls.items():
        assert set(per_window(fleet.sends(entry), period, begin, end).values()) == {1}, entry
    assert verdict.wrong == []
    check_no_duplicate(fleet)
    figures = {"longest_silence": silence, "slowness": round(fleet.machine.slowness(begin), 3), **check_runs(fleet)}
    report("three minutes", scheduler=scheduler, **verdict.figures(), **figures)


@slow
def test_an_interval_longer_than_a_beat_lives_runs(fleets):
    fleet = fleets({"interval": ("every", 8)})
    begin = time.time()
    for number in range(1, 11):
        fleet.beat(f"b{number}")
        fleet.wait_for(number)
        let_run(begin + 6 * number)
        fleet.end(f"b{number}")
    between = silences(fleet.sends())
    assert len(fleet.sends()) >= 5
    check_no_duplicate(fleet)
    assert min(between) > 7.5
    assert max(between) < 8 + 6  # it may be due while no beat runs
    report("replaced each 6 s", sends=len(fleet.sends()), silences=[round(one, 2) for one in between])


@slow
def test_twenty_entries_under_random_faults(fleets):
    """Beats are killed, ended, stopped and replaced at random, also several at a time; the store hangs, or is emptied.

    Each run that was due is claimed once, as soon as any beat can, and is sent once, unless its beat is ended between
    claim and message, or all forget it who knew of it.
    """
    walls = {f"wall {number}": ("wall", 2 + number % 3) for number in range(10)}
    fleet = fleets(walls | {f"interval {number}": ("every", 2 + number) for number in range(10)}, scheduler="distlock")
    faults: Counter[str] = Counter()

    def harm(name, until, chance):
        while time.time() < until:
            how = chance.choice(["kill", "end", "stop", "stop"]) if name else chance.choice(["hang", "hang", "empty"])
            match how:
                case "kill":
                    fleet.replace(name, signal.SIGKILL)
                case "end":
                    fleet.replace(name, signal.SIGTERM)
                case "stop":
                    fleet.pause(name, chance.uniform(0.5, 9))
                case "hang":
                    fleet.pause_store(chance.uniform(0.2, 4))
                case "empty":
                    fleet.empty_store()
            faults[how] += 1
            time.sleep(chance.uniform(1, 12 if name else 20))

    fleet.start(beats=3, workers=2)
    begin = settled(fleet)
    with ThreadPoolExecutor(4) as pool:
        victims = ["b1", "b2", "b3", None]
        harms = [pool.submit(harm, name, begin + SOAK, random.Random(random.random())) for name in victims]
    for one in harms:
        one.result()
    time.sleep(5)
    end, verdict = time.time(), fleet.judge(begin)
    assert all(fleet.is_alive(name) for name in ("b1", "b2", "b3"))
    counts = Counter()
    for name, (_, period) in walls.items():
        counts.update(min(count, 2) for count in per_window(fleet.sends(name), period, begin, end).values())
    print(*verdict.wrong, fleet.faults(), sep="\n")  # is shown when it fails
    report(
        "soak",
        seconds=round(end - begin),
        faults=dict(faults),
        **verdict.figures(),
        windows_without_send=counts[0],
        windows_with_two=counts[2],
        slowness=round(fleet.machine.slowness(begin), 3),
        **check_runs(fleet),
    )
    assert verdict.wrong == []
    if not verdict.forgotten:
        check_no_duplicate(fleet)


@slow
def test_clocks_that_differ_by_a_third_of_the_period_make_no_duplicate(fleets):
    fleet = fleets({"interval": ("every", 4), "wall": ("wall", 4)})
    for name, ahead in (("b1", 0), ("b2", 0.7), ("b3", -0.7)):
        fleet.beat(name, ahead)
    fleet.wait_for(3)
    begin = settled(fleet)
    let_run(begin + 12)
    between = silences(fleet.sends("interval", begin))
    slowness = fleet.machine.slowness(begin)
    assert min(between) > 4 * 0.65 - 0.1 - slowness  # once, when the lead goes from the slowest clock to the fastest
    assert max(between) < 4 * 1.35 + 0.5 + slowness
    assert min(silences(fleet.sends("wall", begin))) > 4 * 0.65 - 0.1 - slowness
    check_no_duplicate(fleet)
    report("clocks apart by 35 %", sends=len(fleet.sends()), shortest=round(min(between), 3))


@slow
def test_stock_beats_send_everything_as_often_as_there_are_beats(fleets):
    """The harness sees duplicates when there are any."""
    fleet = fleets(BOTH, scheduler="celery.beat:Scheduler")
    fleet.start(beats=3)
    begin = settled(fleet)
    let_run(begin + 7)
    windows = per_window(fleet.sends("wall"), 2, begin, time.time())
    assert set(windows.values()) == {3}
    report("stock beats", windows=len(windows), sends=sum(windows.values()))
