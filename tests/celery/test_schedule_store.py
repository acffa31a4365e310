"""What beats share of their runs: the setting, the last runs, and what is refused."""

from __future__ import annotations

import importlib
import json
import sys
import time
from contextlib import contextmanager

import celery
import pytest
import redis
from django.core.exceptions import ImproperlyConfigured

from django_distlock import LockBackendError, locks
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.dummy import DummyBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.backends.optional import RunsBackend
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redlock import RedlockBackend
from django_distlock.celery.schedule_store import NEVER, ScheduleStore, recorded_runs
from django_distlock.exceptions import UnreadableRun
from django_distlock.formats import FORMAT
from django_distlock.runs import LastRun
from tests.support.inside import runs_of
from tests.support.programs import ROOT
from tests.support.tools import backend_on, eventually

backend = backend_on("redis", "sqlite")


@contextmanager
def replies_lost(backend, monkeypatch):
    """The store keeps what beats claim, and they do not learn of it."""
    claim_run = backend.claim_run

    def unanswered(*arguments):
        claim_run(*arguments)
        raise LockBackendError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(backend, "claim_run", unanswered)
        yield


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ([], "it is a dict"),
        ({"alias": "default"}, "unknown key 'alias'. Known: ALIAS, PREFIX, AT_LEAST_ONCE, RESEND_AFTER, "),
        ({"ALIAS": None}, "both are texts"),
        ({"PREFIX": 1}, "both are texts"),
        ({"ALIAS": "nope"}, "no alias 'nope'"),
        ({"AT_LEAST_ONCE": "nightly"}, r"\['AT_LEAST_ONCE'\] is 'nightly'. It is a list of the names of entries"),
        ({"AT_LEAST_ONCE": [1]}, "a list of the names of entries"),
        ({"RESEND_AFTER": 0}, r"\['RESEND_AFTER'\] is 0. It is the number of seconds after which a run .* at least 1"),
        ({"RESEND_AFTER": "30"}, "is '30'. It is the number of seconds"),
        ({"RESEND_AFTER": None}, "is None. It is the number of seconds"),
        ({"SKIP_LATER_THAN": ["nightly"]}, "It is a dict of the names of entries and of seconds"),
        ({"SKIP_LATER_THAN": {"nightly": 0}}, r"\['nightly'\] is 0. It is the number of seconds by which"),
        ({"SKIP_LATER_THAN": {"a": 60}, "AT_LEAST_ONCE": ["a"]}, "names 'a' in 'AT_LEAST_ONCE' and skips .* 60 s late"),
    ],
)
def test_a_wrong_setting_is_named(setting, message, settings, locmem_locks):
    settings.DISTRIBUTED_LOCKS_BEAT = setting
    with pytest.raises(ImproperlyConfigured, match=message):
        ScheduleStore("shop")


KEEPERS = {
    "Redis": (RedisBackend, "redis://nowhere.invalid"),
    "database": (DatabaseBackend, "default"),
    "local memory": (LocMemBackend, None),
    "Redlock": (RedlockBackend, [f"redis://nowhere{number}.invalid" for number in range(3)]),
    "dummy": (DummyBackend, None),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_backend_that_keeps_no_runs_is_refused_as_the_docs_say(kind, settings):
    backend, location = KEEPERS[kind]
    where = {} if location is None else {"LOCATION": location}
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": f"{backend.__module__}.{backend.__name__}", **where}}
    if keeps_runs := issubclass(backend, RunsBackend):
        assert ScheduleStore("shop").using == "default"
    else:
        refused = (
            rf"DISTRIBUTED_LOCKS_BEAT\['ALIAS'\] is 'default', a {backend.__name__}, .* on Redis or on a database\."
        )
        with pytest.raises(ImproperlyConfigured, match=refused):
            ScheduleStore("shop")
        assert list(recorded_runs("default")) == []
    locks.close()
    page = ROOT.joinpath("docs", "beat.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| `ALIAS`")]
    [said] = [clause for clause in row.split(";") if kind in clause]
    assert ("cannot" not in said) == keeps_runs


def test_apps_that_share_a_store_do_not_meet(backend, settings):
    for app in ("shop", "office"):
        ScheduleStore(app).publish("celery.backend_cleanup", LastRun(100.0))
    settings.DISTRIBUTED_LOCKS_BEAT = {"PREFIX": "both/"}
    ScheduleStore("third").publish("celery.backend_cleanup", LastRun(100.0))
    entries = sorted(run.entry for run in recorded_runs("default"))
    assert entries == ["both/celery.backend_cleanup", "office:celery.backend_cleanup", "shop:celery.backend_cleanup"]


def test_runs_are_kept_for_a_week_or_two_periods_after_their_entry_is_gone(valkey_locks, store):
    schedule = ScheduleStore("shop")
    week, month, now = 7 * 86_400, 30 * 86_400, time.time()
    schedule.publish("often", LastRun(now, next_at=now + 2))
    schedule.publish("monthly", LastRun(now, next_at=now + month))
    schedule.publish("begins in a month", LastRun(now - 365 * month, next_at=now + month))
    schedule.publish("overdue", LastRun(now - month, next_at=now - 1))
    for entry, kept in (("often", week + 4), ("monthly", week + 2 * month), ("overdue", week)):
        assert kept - 60 <= store.ttl(f"lock|r:shop:{entry}") <= kept
    assert week + 2 * month - 60 <= store.ttl("lock|r:shop:begins in a month") <= week + 2 * month


def test_of_an_entry_that_is_done_nobody_expects_another_run(valkey_locks, store, monkeypatch):
    monkeypatch.setattr(valkey_locks, "grace", 0.001)
    schedule, now = ScheduleStore("shop"), time.time()
    for entry, wait in (("without", None), ("never", NEVER)):
        schedule.publish(entry, LastRun(now - 10))
        eventually(lambda entry=entry, wait=wait: schedule.claim(entry, now - 10, now, wait) is None)
        assert store.ttl(f"lock|r:shop:{entry}") <= 7 * 86_400
    assert {run.next_run_at for run in recorded_runs("default")} == {None}


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_whose_reply_is_lost_is_granted_when_it_is_asked_again(times, proxied, proxy, monkeypatch):
    """Once lost it is repeated unseen; twice, and the caller is told and asks again."""
    monkeypatch.setattr(proxied, "grace", 0.01)
    schedule = ScheduleStore("shop")
    schedule.publish("entry", LastRun(100.0))
    eventually(lambda: schedule.claim("entry", 100.0, 110.0, 30.0) is None)
    proxy.cut_reply("EVALSHA", times)
    if times == 2:
        with pytest.raises(LockBackendError):
            schedule.claim("entry", 110.0, 130.0, 30.0)
    assert schedule.claim("entry", 110.0, 131.0, 30.0) is None
    standing = ScheduleStore("shop").claim("entry", 110.0, 132.0, 30.0)  # of another beat
    assert standing.at == 131.0


@pytest.fixture
def beats(locmem_locks, settings, monkeypatch):
    """Two, of an entry that must be sent at least once."""
    monkeypatch.setattr(locmem_locks, "grace", 0.0)
    settings.DISTRIBUTED_LOCKS_BEAT = {"AT_LEAST_ONCE": ["entry"]}
    beats = ScheduleStore("shop"), ScheduleStore("shop")
    beats[0].publish("entry", LastRun(100.0))
    return beats


def test_an_unsent_run_of_another_beat_is_not_taken_for_an_own_one(beats):
    first, second = beats
    assert first.claim("entry", 100.0, 110.0, 10.0) is None
    standing = second.claim("entry", 100.0, 110.0, 10.0)
    assert standing.unsent == (first.claimed["entry"],)
    assert second.claimed == {}


def test_a_claim_whose_reply_is_lost_is_found_among_the_unsent_runs(beats, locmem_locks, monkeypatch):
    first, second = beats
    with replies_lost(locmem_locks, monkeypatch), pytest.raises(LockBackendError):
        first.claim("entry", 100.0, 110.0, 10.0)
    second.sync(["entry"])
    assert second.claim("entry", 110.0, 120.0, 10.0) is None
    assert first.claim("entry", 100.0, 121.0, 10.0) is None
    assert [beat.claimed["entry"].scheduled_at for beat in beats] == [110.0, 120.0]


def test_a_beat_never_claims_again_what_it_knows_to_have_run(locmem_locks, monkeypatch):
    """The store may have forgotten it, and the row or the file that the caller read, too."""
    monkeypatch.setattr(locmem_locks, "grace", 0.0)
    schedule = ScheduleStore("shop")
    schedule.publish("entry", LastRun(100.0))
    assert schedule.claim("entry", 100.0, 110.0, 10.0) is None
    runs_of(locmem_locks).clear()
    for _ in range(2):
        assert schedule.claim("entry", 100.0, 111.0, 10.0).at == 110.0
    assert schedule.known["entry"].at == 110.0
    runs_of(locmem_locks).clear()
    older = LastRun(90.0)
    locmem_locks.claim_run("shop:entry", older, older, 60)
    assert schedule.claim("entry", 100.0, 112.0, 10.0).at == 110.0
    assert schedule.claim("entry", 110.0, 120.0, 10.0) is None


def test_a_run_that_a_row_or_a_file_tells_has_nothing_of_another_one(locmem_locks):
    """Neither where that one was sent from, nor when the next one was expected then."""
    schedule = ScheduleStore("shop")
    schedule.publish("entry", LastRun(100.0, "web-1", 110.0))
    runs_of(locmem_locks).clear()
    assert schedule.claim("entry", 150.0, 160.0, 10.0).at == 150.0
    [run] = recorded_runs("default")
    assert (run.host, run.next_run_at) == ("", None)


UNREADABLE = {
    "garbage": b"something else",
    "another kind of key": None,
    "deep": b"1 " + b"[" * 200_000,
    "bytes": b"\xff\xfe[",
    "a huge time": b'1 [1e18,"t",null,"h"]',
    "NaN": b'1 [NaN,"t",null,"h"]',
    "infinity": b'1 [Infinity,"t",null,"h"]',
    "400 digits": b"1 [" + b"9" * 400 + b',"t",null,"h"]',
    "another form": b'1 {"at": 1.0}',
    "no times": b'1 ["1.0","t",null,"h"]',
    "days ahead": b'1 [%d.0,"t",null,"h"]' % (time.time() + 2 * 86_400),
    "the year 2999": b'1 [32472144000.0,"t",null,"h"]',
}


@pytest.fixture
def unreadable(request, valkey_locks, store):
    """What stands where the run of an entry should: how it reads for Redis."""
    key, value = "lock|r:shop:bad", UNREADABLE[request.param]
    with redis.Redis.from_url(locks["default"].location.text, socket_timeout=5) as client:
        if value is None:
            client.rpush(key, "x")
            yield lambda: client.type(key) == b"list"
        else:
            client.set(key, value)
            yield lambda: client.get(key) == value


@pytest.mark.parametrize("unreadable", UNREADABLE, indirect=True)
def test_a_foreign_value_is_told_and_not_touched_and_the_other_entries_are_well(unreadable, valkey_locks, caplog):
    now = LastRun(time.time() - 1, "web-1", None, "token")
    valkey_locks.claim_run("shop:good", now, now, 60)
    assert valkey_locks.find_runs(["shop:bad", "shop:good"]) == [None, now]
    assert [run.entry for run in recorded_runs("default")] == ["shop:good"]
    [told] = caplog.records
    assert told.levelname == "ERROR"
    assert "'lock|r:shop:bad' at" in told.message
    assert "holds something that is no run of beat, or a run of more than a day after now" in told.message
    assert told.message.index("Correct that clock") < told.message.index("delete")
    schedule = ScheduleStore("shop")
    for call in (
        lambda: schedule.publish("bad", LastRun(now.at)),
        lambda: schedule.claim("bad", now.at, now.at + 1, 30.0),
    ):
        with pytest.raises(UnreadableRun, match="no run of beat"):
            call()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert unreadable()


def test_the_host_of_a_run_is_printable_whatever_was_written(valkey_locks, store):
    store.set("lock|r:shop:entry", FORMAT + json.dumps([1.0, "t", 1e300, "web\x1b[2J\r\n\ud800"]))
    [run] = recorded_runs("default")
    assert run.next_run_at is None
    assert run.host == "web\\x1b[2J\\r\\n\\ud800"


def test_an_older_celery_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(celery, "VERSION", celery.VERSION._replace(minor=6))
    monkeypatch.delitem(sys.modules, "django_distlock.celery.beat", raising=False)
    with pytest.raises(ImproperlyConfigured, match=r"need Celery 5\.7 or later.*pip install"):
        importlib.import_module("django_distlock.celery.beat")


def test_a_claim_in_doubt_that_is_read_before_it_is_made_again_is_one_unsent_run(locmem_locks, monkeypatch, settings):
    settings.DISTRIBUTED_LOCKS_BEAT = {"AT_LEAST_ONCE": ["entry"]}
    monkeypatch.setattr(locmem_locks, "grace", 0.0)
    schedule = ScheduleStore("shop")
    schedule.publish("entry", LastRun(100.0))
    with replies_lost(locmem_locks, monkeypatch), pytest.raises(LockBackendError):
        schedule.claim("entry", 100.0, 110.0, 10.0, 109.0)
    assert schedule.find_overdue(0.0) == []
    assert schedule.claim("entry", 100.0, 111.0, 10.0, 109.5) is None
    [(_, stamp)] = locmem_locks.runs()
    assert stamp.unsent == (schedule.claimed["entry"],)
    schedule.mark_sent("entry", schedule.claimed["entry"])
    [(_, stamp)] = locmem_locks.runs()
    assert (stamp.unsent, stamp.ran_at) == ((), 111.0)


@pytest.fixture
def claimed(locmem_locks, monkeypatch, settings):
    """A beat that has claimed a run of an entry which is sent at least once, and another one that knows the claim."""
    settings.DISTRIBUTED_LOCKS_BEAT = {"AT_LEAST_ONCE": ["entry"], "RESEND_AFTER": 10}
    monkeypatch.setattr(locmem_locks, "grace", 0.0)
    first, second = ScheduleStore("shop"), ScheduleStore("shop")
    first.publish("entry", LastRun(100.0))
    assert first.claim("entry", 100.0, 110.0, 10.0) is None
    second.sync(["entry"])
    return first, second


def test_of_two_beats_that_find_a_run_unsent_one_takes_it_over(claimed):
    _, second = claimed
    third = ScheduleStore("shop")
    third.sync(["entry"])
    for schedule in (second, third):
        assert schedule.find_overdue(0.0) == []
    [(entry, run)] = second.find_overdue(10.0)
    assert third.find_overdue(10.0) == [(entry, run)]
    assert (second.take_over(entry, run), third.take_over(entry, run)) == (True, False)
    assert third.claimed == {}
    second.mark_sent(entry, second.claimed[entry])
    assert third.find_overdue(10.0) == []


def test_who_marks_too_late_leaves_the_run_to_the_beat_that_took_it_over(claimed, locmem_locks):
    first, second = claimed
    second.find_overdue(0.0)
    [(entry, run)] = second.find_overdue(10.0)
    assert second.take_over(entry, run)
    first.mark_sent("entry", first.claimed["entry"])
    [(_, stamp)] = locmem_locks.runs()
    assert stamp.unsent == (second.claimed["entry"],)


def test_a_mark_that_a_beat_does_not_know_yet_costs_its_next_claim_no_time(claimed):
    first, second = claimed
    first.mark_sent("entry", first.claimed["entry"])
    assert second.known["entry"].unsent
    assert second.claim("entry", 110.0, 120.0, 10.0) is None
    assert second.known["entry"].unsent == (second.claimed["entry"],)
