"""Runs that were claimed and not sent, and beats that cannot publish, on a clock that the test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import celery
import pytest

if celery.VERSION[:2] < (5, 7):
    pytest.skip("beat's schedulers need Celery 5.7", allow_module_level=True)

from celery.schedules import crontab
from kombu import Connection

from django_distlock import LockBackendError, signals
from django_distlock.backends import locmem
from django_distlock.celery import beat, broker
from tests.support.beats import Killed, World, gaps, task
from tests.support.inside import lose_broker
from tests.support.schedulers import FileBeat, MemoryBeat
from tests.support.tools import eventually, in_a_thread

START = datetime(2026, 11, 21, 12, 0, 20, tzinfo=UTC)
RESEND_AFTER = 20.0
LATEST = RESEND_AFTER * 4 / 3 + 2  # seconds from a claim to the second attempt, if a beat looks


@pytest.fixture(autouse=True)
def setting(settings):
    settings.DISTRIBUTED_LOCKS_BEAT = {
        "AT_LEAST_ONCE": ["rare", "often", "checked"],
        "RESEND_AFTER": RESEND_AFTER,
        "SKIP_LATER_THAN": {"punctual": 60, "checked": timedelta(minutes=10)},
    }


@pytest.fixture
def fleets(locmem_locks, monkeypatch):
    """Makes fleets; the clock of all is that of the newest."""
    made = []
    for module, name in ((beat, "clock"), (broker, "clock"), (locmem, "clock"), (locmem, "wall_clock")):
        monkeypatch.setattr(module, name, lambda: made[-1].now.timestamp())

    def new(beats=3, **entries):
        made.append(World(START, lambda: {name: task(when) for name, when in entries.items()}))
        for _ in range(beats):
            made[-1].start(MemoryBeat)
        return made[-1]

    yield new
    for one in made:
        one.end()


def run_for(fleet, seconds):
    fleet.run(fleet.now + timedelta(seconds=seconds))


def strike(fleet, moment, entry, blow):
    """``blow`` the beat that is the next to send this entry, ``before_sending`` or ``after_sending``."""
    victims = []

    def hook(victim, name):
        if name == entry and not victims:
            victims.append(victim)
            blow(victim)

    setattr(fleet, moment, hook)
    return victims


def kill(victim):
    raise Killed


def due(fleet, entry):
    """When the runs were due that were sent, in seconds from the start."""
    return [round((at - START).total_seconds()) for at in fleet.runs(entry)]


def sent(fleet, entry):
    return [round((at - START).total_seconds()) for at in fleet.times(entry)]


def test_a_run_whose_beat_died_before_it_sent_is_sent_once_by_another_one(fleets):
    fleet = fleets(rare=600.0)
    victims = strike(fleet, "before_sending", "rare", kill)
    run_for(fleet, 600 + LATEST)
    assert len(victims) == 1
    assert due(fleet, "rare") == [600]
    assert sent(fleet, "rare")[0] >= 600 + RESEND_AFTER
    run_for(fleet, 600)
    assert due(fleet, "rare") == [600, 1200]  # counted from the claim
    assert sent(fleet, "rare")[1] == 1200


def test_a_run_whose_beat_died_before_its_mark_is_sent_twice_and_says_so(fleets, caplog):
    fleet = fleets(rare=600.0)
    strike(fleet, "after_sending", "rare", kill)
    run_for(fleet, 610)
    assert due(fleet, "rare") == [600]
    run_for(fleet, 600)
    first, second, _ = fleet.runs("rare")
    assert first == second  # by which a task refuses it
    assert sum("perhaps for the second time" in record.message for record in caplog.records) == 1


def test_runs_that_are_more_frequent_than_the_time_to_resend_are_all_sent(fleets):
    fleet = fleets(often=5.0)
    strike(fleet, "before_sending", "often", kill)
    run_for(fleet, 62)
    assert sorted(due(fleet, "often")) == list(range(5, 61, 5))
    assert [at for at in sent(fleet, "often") if at != 5][:3] == [10, 15, 20]
    assert due(fleet, "often").index(5) >= 3


def test_an_entry_that_is_not_named_is_sent_at_most_once(fleets):
    fleet = fleets(plain=600.0)
    strike(fleet, "before_sending", "plain", kill)
    run_for(fleet, 1100)
    assert fleet.sent == []


@pytest.mark.parametrize("down", [30, 7200])
def test_a_run_is_sent_after_all_beats_were_down(down, fleets):
    """Also where the next ones were missed meanwhile: they are sent once, as ever."""
    fleet = fleets(rare=600.0)
    strike(fleet, "before_sending", "rare", kill)
    run_for(fleet, 601)
    for one in list(fleet.wakes):
        fleet.kill(one)
    fleet.now += timedelta(seconds=down)
    fleet.start(MemoryBeat)
    fleet.start(MemoryBeat)
    run_for(fleet, LATEST)
    assert sorted(due(fleet, "rare")) == ([600] if down < 600 else [600, 1200])


def test_a_beat_that_was_stopped_for_longer_sends_its_run_a_second_time_and_takes_no_other(fleets):
    fleet = fleets(beats=2, rare=600.0)

    def stop(victim):
        fleet.kill(victim)
        run_for(fleet, LATEST)
        assert due(fleet, "rare") == [600]
        fleet.wakes[victim] = fleet.now

    strike(fleet, "before_sending", "rare", stop)
    run_for(fleet, 1190)
    first, second = fleet.runs("rare")
    assert first == second
    run_for(fleet, 20)
    assert due(fleet, "rare")[2:] == [1200]


@pytest.mark.parametrize("lost", ["the request", "the answer"])
def test_a_mark_that_the_store_did_not_answer_is_made_later(lost, fleets, locmem_locks, monkeypatch):
    fleet = fleets(rare=600.0)
    claim = locmem_locks.claim_run

    def unanswered(name, seen, now, ttl):
        if now.changes:
            if lost == "the answer":
                claim(name, seen, now, ttl)
            raise LockBackendError("no answer")
        return claim(name, seen, now, ttl)

    monkeypatch.setattr(locmem_locks, "claim_run", unanswered)
    run_for(fleet, 600 + RESEND_AFTER / 2)
    assert sent(fleet, "rare") == [600]
    monkeypatch.setattr(locmem_locks, "claim_run", claim)
    run_for(fleet, 500)
    assert sent(fleet, "rare") == [600]
    [(_, stamp)] = locmem_locks.runs()
    assert (stamp.unsent, stamp.changes) == ((), 1)


def test_a_claim_that_was_not_answered_and_then_sent_by_another_beat_is_not_sent_again(
    fleets, locmem_locks, monkeypatch
):
    fleet = fleets(beats=1, rare=600.0)
    [first] = fleet.wakes
    claim = locmem_locks.claim_run

    def unanswered(name, seen, now, ttl):
        claim(name, seen, now, ttl)
        if now.host and now.at > seen.at:
            raise LockBackendError("no answer")

    run_for(fleet, 590)
    with monkeypatch.context() as broken:
        broken.setattr(locmem_locks, "claim_run", unanswered)
        run_for(fleet, 10.005)
    assert fleet.sent == []
    fleet.kill(first)  # stopped, for the moment
    fleet.start(MemoryBeat)
    run_for(fleet, LATEST)
    assert due(fleet, "rare") == [600]
    fleet.wakes[first] = fleet.now
    run_for(fleet, 500)
    assert due(fleet, "rare") == [600]
    run_for(fleet, 100)
    assert due(fleet, "rare") == [600, 1200]


def test_a_claim_that_was_not_answered_and_marked_beside_another_run_is_still_the_claimants(
    fleets, locmem_locks, monkeypatch
):
    """The stamp has another token since, but its run is among those that are not sent."""
    fleet = fleets(beats=2, often=5.0)
    run_for(fleet, 7)
    claim, lost = locmem_locks.claim_run, []

    def unanswered(name, seen, now, ttl):
        standing = claim(name, seen, now, ttl)
        if standing is None and now.host and now.at - seen.at > 1 and not lost:
            lost.append(now.unsent[-1])
            run = now.changed(now.unsent)
            assert claim(name, now, run, ttl) is None
            raise LockBackendError("no answer")
        return standing

    monkeypatch.setattr(locmem_locks, "claim_run", unanswered)
    run_for(fleet, 50)
    assert len(lost) == 1
    assert due(fleet, "often") == list(range(5, 56, 5))


def test_marks_move_no_schedule_and_count_no_run(fleets):
    fleet = fleets(often=5.0, plain=5.0)
    run_for(fleet, 301)
    assert set(map(round, gaps(fleet.times("often")))) == {5}
    counts = {one.schedule["often"].total_run_count for one in fleet.wakes}
    assert counts == {one.schedule["plain"].total_run_count for one in fleet.wakes} == {60}
    assert {one.schedule["often"].last_run_at for one in fleet.wakes} == {fleet.times("often")[-1]}


def test_the_header_tells_the_moment_for_which_a_run_was_scheduled(fleets):
    fleet = fleets(hourly=crontab(minute=0), plain=30.0)
    run_for(fleet, 2 * 3600)
    assert [at.replace(microsecond=0) for at in fleet.runs("hourly")] == [
        START.replace(hour=hour, second=0) for hour in (13, 14)
    ]
    assert due(fleet, "plain")[:3] == [30, 60, 90]
    for one in list(fleet.wakes):
        fleet.kill(one)
    fleet.now += timedelta(hours=3)
    before = len(fleet.runs("hourly"))
    fleet.start(MemoryBeat)
    run_for(fleet, 60)
    assert [at.hour for at in fleet.runs("hourly")[before:]] == [15]  # the first that was missed


def test_a_schedule_that_changed_is_not_late_by_what_the_former_one_expected(fleets):
    fleet = fleets(beats=1, plain=600.0)
    [only] = fleet.wakes
    run_for(fleet, 650)
    only.update_from_dict({"plain": task(6000.0, last_run_at=only.schedule["plain"].last_run_at)})
    run_for(fleet, 6000)
    assert due(fleet, "plain") == [600, 6600]


def test_a_file_keeps_nothing_of_a_message(fleets, tmp_path, monkeypatch):
    fleet = fleets(beats=0, often=5.0)
    only = fleet.start(FileBeat, schedule_filename=str(tmp_path / "schedule"))
    monkeypatch.setattr(celery._state._tls, "current_app", only.app)  # of schedules that come from the file
    run_for(fleet, 8)
    assert due(fleet, "often") == [5]
    assert only.schedule["often"].options == {}
    only.close()


def test_a_beat_that_cannot_publish_leaves_all_runs_to_the_others(fleets, caplog):
    fleet = fleets(often=5.0, plain=5.0)
    run_for(fleet, 11)
    cut_off = next(iter(fleet.wakes))
    fleet.cut_off.add(cut_off)
    run_for(fleet, 90)
    assert set(due(fleet, "often")) == set(range(5, 101, 5))
    lost = set(range(5, 101, 5)) - set(due(fleet, "plain"))
    assert len(lost) <= 1  # by which it noticed
    said = [record.message for record in caplog.records if "leaves all runs to others" in record.message]
    assert len(said) == 1
    fleet.cut_off.clear()
    for one in list(fleet.wakes):
        if one is not cut_off:
            fleet.kill(one)
    before = len(fleet.times("plain"))
    run_for(fleet, 30)
    assert len(fleet.times("plain")) - before == 6
    assert sum("The broker answers again" in record.message for record in caplog.records) == 1


def test_a_broker_that_hangs_is_given_up(proxy, monkeypatch, caplog):
    """Its server takes connections, and answers none of them."""
    monkeypatch.setattr(broker, "LONGEST", 0.3)
    with Connection(f"redis+socket://{proxy.socket}?virtual_host=1") as connection:
        asked = broker.Broker(lambda: connection)
        proxy.hang = True
        assert in_a_thread(asked.answers) is False
        proxy.hang = False
        assert "leaves all runs to others until the broker answers" in caplog.text
        eventually(asked.answers)


def test_a_beat_that_starts_without_a_broker_claims_nothing(fleets):
    fleet = fleets(beats=1, plain=10.0)
    fleet.cut_off.update(fleet.wakes)
    run_for(fleet, 35)
    assert fleet.sent == []
    fleet.start(MemoryBeat)
    run_for(fleet, 10)
    assert due(fleet, "plain")[0] == 10
    assert len(fleet.sent) == 2  # what was overdue, and the next one


def test_while_no_beat_reaches_the_broker_runs_wait(fleets):
    fleet = fleets(rare=600.0)
    fleet.cut_off.update(fleet.wakes)
    run_for(fleet, 700)
    assert fleet.sent == []
    fleet.cut_off.clear()
    run_for(fleet, 2)
    assert due(fleet, "rare") == [600]
    run_for(fleet, 400)
    assert due(fleet, "rare") == [600]


def test_a_beat_that_cannot_publish_takes_no_run_over(fleets, locmem_locks):
    fleet = fleets(beats=2, rare=600.0)
    strike(fleet, "before_sending", "rare", kill)
    run_for(fleet, 601)
    [other] = fleet.wakes
    fleet.cut_off.add(other)
    lose_broker(other)
    run_for(fleet, 3 * LATEST)
    [(_, stamp)] = locmem_locks.runs()
    assert stamp.changes == 0
    fleet.cut_off.clear()
    run_for(fleet, LATEST)
    assert due(fleet, "rare") == [600]


def test_a_message_that_no_beat_can_send_is_lost_and_keeps_no_other_from_being_sent(fleets, caplog):
    """Its arguments cannot be written as JSON, for example."""
    fleet = fleets(often=5.0, plain=5.0)

    def refuse(_, name):
        if name == "often":
            raise TypeError("no JSON")

    fleet.before_sending = refuse
    run_for(fleet, 51)
    assert due(fleet, "plain") == list(range(5, 51, 5))
    assert sum("Message Error" in record.message for record in caplog.records) == 10
    assert not [record for record in caplog.records if "leaves all runs" in record.message]


def test_names_that_no_entry_has_are_told(fleets, caplog):
    fleet = fleets(beats=1, rare=600.0)
    run_for(fleet, 5)
    said = [record.message for record in caplog.records if "the schedule of this beat does not have" in record.message]
    assert len(said) == 2
    assert "['AT_LEAST_ONCE'] names 'checked', 'often', which" in said[0]
    assert "['SKIP_LATER_THAN'] names 'checked', 'punctual', which" in said[1]


def test_of_very_many_runs_that_cannot_be_sent_the_oldest_is_given_up(fleets, caplog, monkeypatch):
    monkeypatch.setattr("django_distlock.celery.schedule_store.MOST_UNSENT", 3)
    fleet = fleets(beats=10, often=2.0)

    def strike_all(victim, name):
        if len(fleet.wakes) > 1:
            raise Killed

    fleet.before_sending = strike_all
    run_for(fleet, 30)
    assert len(fleet.wakes) == 1
    killed = 9
    given_up = sum("is given up" in record.message for record in caplog.records)
    run_for(fleet, 40)
    resent = sum("perhaps for the second time" in record.message for record in caplog.records)
    assert given_up >= killed - 3
    assert given_up + resent == killed


def events(caplog):
    return [record.distlock for record in caplog.records if hasattr(record, "distlock")]


def skipped(caplog):
    return [about["entry"] for about in events(caplog) if about["event"] == "run-skipped"]


@pytest.mark.parametrize("late", [30, 90])
def test_a_run_that_is_later_than_allowed_is_skipped_by_all_beats_once(late, fleets, caplog):
    fleet = fleets(punctual=600.0, plain=600.0)
    run_for(fleet, 590)
    for one in list(fleet.wakes):
        fleet.kill(one)
    fleet.now = START + timedelta(seconds=600 + late)
    for _ in range(3):
        fleet.start(MemoryBeat)
    run_for(fleet, 700)
    following = 600 + late + 600
    assert due(fleet, "plain") == [600, following]
    assert due(fleet, "punctual") == ([600, following] if late < 60 else [following])
    assert skipped(caplog) == ([] if late < 60 else ["punctual"])


def test_a_run_that_no_beat_sent_is_not_sent_again_when_it_is_too_late(fleets, locmem_locks, caplog):
    fleet = fleets(beats=1, checked=crontab(minute=0))
    strike(fleet, "before_sending", "checked", kill)
    fleet.run(START.replace(hour=13, minute=1))
    fleet.now = START.replace(hour=13, minute=20)
    fleet.start(MemoryBeat)
    fleet.start(MemoryBeat)
    run_for(fleet, LATEST)
    assert fleet.sent == []
    assert skipped(caplog) == ["checked"]
    [(_, stamp)] = locmem_locks.runs()
    assert stamp.unsent == ()


def test_signal_and_log_tell_how_late_a_run_was_sent(fleets, caplog):
    caplog.set_level("INFO")
    told = []

    def note(sender, **about):
        told.append((about["entry"], about["using"], about["scheduled_at"], round(about["lateness"])))

    fleet = fleets(rare=600.0)
    strike(fleet, "before_sending", "rare", kill)
    signals.beat_run_sent.connect(note)
    run_for(fleet, 1210)
    signals.beat_run_sent.disconnect(note)
    late = (fleet.times("rare")[0] - fleet.runs("rare")[0]).total_seconds()
    assert late >= RESEND_AFTER
    assert [(entry, using, lateness) for entry, using, _, lateness in told] == [
        ("rare", "default", round(late)), ("rare", "default", 0),
    ]  # fmt: skip
    assert [at for _, _, at, _ in told] == fleet.runs("rare")
    logged = [about for about in events(caplog) if about["event"] == "run-sent"]
    assert [(about["entry"], round(about["lateness"])) for about in logged] == [("rare", round(late)), ("rare", 0)]
