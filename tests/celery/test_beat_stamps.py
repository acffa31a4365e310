"""Beats on a real server on which somebody wrote something else where runs should be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import celery
import pytest

if celery.VERSION[:2] < (5, 7):
    pytest.skip("beat's schedulers need Celery 5.7", allow_module_level=True)

from django_distlock.celery import beat
from tests.support.beats import World, task
from tests.support.schedulers import MemoryBeat

pytestmark = pytest.mark.slow

KEY = "lock|r:fleet:victim"
BAD = {
    "garbage": "something else",
    "deep": "1 " + "[" * 200_000,
    "a huge time": '1 [1e18,"t",null,"h"]',
    "NaN": '1 [NaN,"t",null,"h"]',
    "the year 2999": '1 [32472144000.0,"t",null,"h"]',
}


@pytest.fixture
def fleet(valkey_locks, store, monkeypatch):
    """It began an hour ago: the server has a clock of its own, which is not moved."""
    monkeypatch.setattr(valkey_locks, "grace", 0.001)
    world = World(
        datetime.now(UTC) - timedelta(hours=1), lambda: {"victim": task(5.0), "other": task(5.0), "cron": task(5.0)}
    )
    monkeypatch.setattr(beat, "clock", lambda: world.now.timestamp())
    yield world
    world.end()


def run_for(fleet, seconds):
    fleet.run(fleet.now + timedelta(seconds=seconds))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_one_run_that_cannot_be_read_stops_this_entry_alone_until_it_is_deleted(when, value, fleet, store, caplog):
    if when == "before the start":
        store.set(KEY, BAD[value])
    fleet.start(MemoryBeat)
    run_for(fleet, 21)
    if when == "while it runs":
        assert len(fleet.times("victim")) >= 3
        store.set(KEY, BAD[value])
        run_for(fleet, 21)
    stopped = len(fleet.times("victim"))
    fleet.start(MemoryBeat)
    run_for(fleet, 41)
    assert len(fleet.times("victim")) == stopped
    assert len(fleet.times("other")) >= 10
    assert len(fleet.times("cron")) >= 10
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2  # each beat once
    assert all("The run of 'victim' is not sent" in record.message and KEY in record.message for record in told)
    assert store.get(KEY) == BAD[value]

    store.delete(KEY)
    run_for(fleet, 21)
    assert len(fleet.times("victim")) >= stopped + 2
