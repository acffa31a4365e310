"""The runs of beat in databases: faults, upkeep, and a fleet. What every backend does is tested elsewhere."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta

import celery
import pytest
from django.db import connections, transaction

from django_distlock import LockBackendError, locks, runs
from django_distlock.backends.database import sqlite
from django_distlock.celery.schedule_store import ScheduleStore, recorded_runs
from django_distlock.exceptions import NewerRun, UnreadableRun
from django_distlock.models import DatabaseRun
from django_distlock.runs import LastRun
from tests.support.databases import ALIAS, through
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, backend_on, eventually

TABLE = DatabaseRun._meta.db_table
START = datetime(2026, 11, 21, 12, 0, 20, tzinfo=UTC)

backend = backend_on("postgres", "sqlite", "mariadb")


def execute(statement):
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(statement)


def test_many_entries_are_listed_page_by_page(backend):
    for number in range(5):
        backend.claim_run(f"entry {number}", LastRun(100.0 + number), LastRun(100.0 + number), 60)
    backend.batch_size = 2
    assert sorted((name, stamp.at) for name, stamp in backend.runs()) == [
        (f"entry {number}", 100.0 + number) for number in range(5)
    ]
    assert [stamp.at for stamp in backend.find_runs([f"entry {number}" for number in range(5)])][4] == 104.0


def test_pruning_leaves_what_is_kept(backend):
    for entry, ttl in (("gone", 0.01), ("kept", 60)):
        backend.claim_run(entry, LastRun(100.0), LastRun(100.0), ttl)
    eventually(lambda: backend.find_runs(["gone"]) == [None])
    assert backend.prune(3600) == 0
    assert eventually(lambda: backend.prune(0)) == 1
    assert backend.prune(0) == 0
    assert [name for name, _ in backend.runs()] == ["kept"]


def test_an_entry_whose_stamp_ran_out_is_new_before_it_is_pruned(backend):
    backend.claim_run("entry", LastRun(100.0), LastRun(100.0), 0.01)
    eventually(lambda: backend.find_runs(["entry"]) == [None])
    seen = LastRun(50.0)
    assert backend.claim_run("entry", seen, LastRun(160.0, token="1"), 60) == seen
    assert backend.find_runs(["entry"]) == [seen]


def test_two_prefixes_share_the_table(sqlite_database, settings):
    entry = {"BACKEND": DATABASE, "LOCATION": ALIAS}
    settings.DISTRIBUTED_LOCKS = {"default": entry, "other": {**entry, "KEY_PREFIX": "other"}}
    locks["default"].claim_run("entry", LastRun(100.0), LastRun(100.0), 60)
    assert list(locks["other"].runs()) == []
    assert [name for name, _ in locks["default"].runs()] == ["entry"]
    locks.close()


def test_a_file_of_locks_that_has_no_runs_yet_gets_their_table(sqlite_locks):
    sqlite_locks.slots()
    with sqlite_locks.pool.connection(1) as connection:
        connection.connection.execute(f"DROP TABLE {TABLE}")
    sqlite_locks.pool.close_idle()
    stamp = LastRun(100.0)
    assert sqlite_locks.claim_run("entry", stamp, stamp, 60) == stamp


@pytest.mark.parametrize(("statement", "times"), [("UPDATE", 1), ("UPDATE", 2), ("INSERT INTO", 1)])
def test_the_reply_to_a_claim_is_lost(
    statement, times, postgres, postgres_database, settings, tmp_path_factory, monkeypatch
):
    """Once lost it is repeated unseen; twice, and the caller is told and asks again."""
    with through(postgres, tmp_path_factory.mktemp("p"), settings, PATIENCE) as proxy:
        monkeypatch.setattr(locks["default"], "grace", 0.01)
        store = ScheduleStore("shop")
        if statement == "UPDATE":
            store.publish("entry", LastRun(100.0))
            time.sleep(0.02)
        proxy.cut_reply(f"{statement} {TABLE}", times)
        if times == 2:
            with pytest.raises(LockBackendError):
                store.claim("entry", 100.0, 130.0, 30.0)
        assert eventually(lambda: store.claim("entry", 100.0, 131.0, 30.0) is None)
        assert proxy.cuts == times
        assert ScheduleStore("shop").claim("entry", 100.0, 132.0, 30.0).at == 131.0  # of another beat


def test_a_transaction_that_is_rolled_back_takes_no_run_with_it(postgres_locks):
    with transaction.atomic(using=ALIAS):
        postgres_locks.claim_run("entry", LastRun(100.0), LastRun(100.0), 60)
        transaction.set_rollback(True, using=ALIAS)
    assert [info.entry for info in recorded_runs("default")] == ["entry"]


def test_without_its_table(postgres_locks):
    execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
    try:
        with pytest.raises(LockBackendError, match=f"no table {TABLE}. Run manage.py migrate --database=locks"):
            postgres_locks.find_runs(["entry"])
    finally:
        execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")


@pytest.mark.parametrize(
    "stamp", ["something else", "1 " + "[" * 200_000, '1 [1e18,"t",null,"h"]', '1 [NaN,"t",null,"h"]']
)
def test_a_foreign_value_is_told_and_the_other_entries_are_well(stamp, postgres_locks, caplog):
    bad, good = LastRun(100.0), LastRun(101.0)
    for entry, known in (("bad", bad), ("good", good)):
        postgres_locks.claim_run(entry, known, known, 60)
    execute(f"UPDATE {TABLE} SET stamp = '{stamp}' WHERE ran_at = 100000000")
    assert postgres_locks.find_runs(["bad", "good"]) == [None, good]
    assert list(postgres_locks.runs()) == [("good", good)]
    [told] = caplog.records
    assert told.levelname == "ERROR"
    assert f"The row 'lock:bad' of {TABLE} holds something that is no run of beat" in told.message
    with pytest.raises(UnreadableRun, match="no run of beat"):
        postgres_locks.claim_run("bad", LastRun(99.0), LastRun(110.0, token="mine"), 60)


def test_what_a_newer_version_wrote_is_left_as_it_is(backend):
    stamp = LastRun(100.0)
    backend.claim_run("entry", stamp, stamp, 60)
    with backend.pool.connection(1) as connection, connection.cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET stamp = '2 more', settled_at = 0")
    with pytest.raises(NewerRun, match="written by a newer version"):
        backend.claim_run("entry", stamp, LastRun(110.0, token="mine"), 60)
    with backend.pool.connection(1) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT stamp, ran_at FROM {TABLE}")
        assert cursor.fetchone() == ("2 more", 100_000_000)


def test_a_run_of_a_day_to_come_is_refused(backend):
    stamp = LastRun(100.0)
    backend.claim_run("entry", stamp, stamp, 60)
    with backend.pool.connection(1) as connection, connection.cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET ran_at = %s", [round((time.time() + 2 * 86_400) * 1_000_000)])
    with pytest.raises(UnreadableRun, match="by the clock of this host.*Correct that clock.*delete"):
        backend.claim_run("entry", stamp, LastRun(110.0, token="mine"), 60)


@pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="beat's schedulers need Celery 5.7")
def test_a_fleet_whose_beats_come_and_go_sends_what_one_stock_beat_sends(sqlite_locks, monkeypatch):
    from celery.schedules import crontab

    from django_distlock.celery import beat
    from tests.support.beats import World, task
    from tests.support.schedulers import MemoryBeat, StockBeat

    def entries():
        return {"interval": task(20.0), "cron": task(crontab())}

    end = START + timedelta(minutes=10)
    worlds = stock, fleet = World(START, entries), World(START, entries)
    monkeypatch.setattr(beat, "clock", lambda: fleet.now.timestamp())
    monkeypatch.setattr(sqlite, "wall_clock_us", lambda: int(fleet.now.timestamp() * 1e6))
    monkeypatch.setattr(runs, "wall_clock", lambda: fleet.now.timestamp())
    stock.start(StockBeat)
    stock.run(end)
    for _ in range(3):
        fleet.start(MemoryBeat)
    while fleet.now < end:
        fleet.run(min(end, fleet.now + timedelta(seconds=random.randint(5, 60))))
        fleet.kill(random.choice(list(fleet.wakes)))
        fleet.start(MemoryBeat)
    for entry, count in (("interval", 28), ("cron", 9)):
        # Without the last moment: it is chance which of them still had its turn then.
        last = end - timedelta(seconds=5)
        ours, theirs = ([at for at in world.times(entry) if at < last] for world in (fleet, stock))
        assert len(ours) == len(theirs) >= count, entry
        assert all(abs(our - their) < timedelta(seconds=1) for our, their in zip(ours, theirs, strict=True)), entry
    for world in worlds:
        world.end()
