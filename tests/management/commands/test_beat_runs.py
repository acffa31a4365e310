"""``manage.py beat_runs``: what it prints and does, and the code it ends with."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from functools import partial

import celery
import pytest
from celery import Celery

from django_distlock import LockBackendError, locks
from django_distlock.celery import schedule_store
from django_distlock.celery.schedule_store import ScheduleStore, recorded_runs, reset_run
from django_distlock.celery.scheduled import scheduled_run
from django_distlock.runs import LastRun, UnsentRun
from tests.support import commands
from tests.support.inside import runs_of
from tests.support.tools import backend_on

NOON = 1_705_305_600.0  # 2024-01-15 08:00 UTC

pytestmark = pytest.mark.django_db

backend = backend_on("redis", "sqlite", "locmem", "zookeeper")
said = partial(commands.said, command="beat_runs")


def ran(entry, *, app="shop", **values):
    ScheduleStore(app).publish(entry, LastRun(NOON, "web-1", NOON + 3600, **values))


def test_the_list_tells_when_entries_ran_and_what_was_not_sent(backend):
    ran("report", changes=0, unsent=(UnsentRun(NOON - 1, "t"),))
    ScheduleStore("shop").publish("cleanup", LastRun(NOON))
    for arguments in ([], ["list"]):
        heading, first, second, count = said(*arguments).splitlines()
        assert heading.split("  ")[0] == "ENTRY"
        assert first.split() == ["shop:cleanup", "-", "-", "-", "-"]
        assert second.split()[0] == "shop:report"
        assert "2024-01-15 08:00:00+00:00  web-1    2024-01-15 09:00:00+00:00  1" in second
        assert count == "2 entries"
    [cleanup, report] = json.loads(said("list", "--json"))
    assert cleanup == {
        "entry": "shop:cleanup", "using": "default", "last_run_at": None, "host": None, "next_run_at": None,
        "unsent": [],
    }  # fmt: skip
    assert report["unsent"] == ["2024-01-15T07:59:59+00:00"]
    assert report["host"] == "web-1"
    assert json.loads(said("--json")) == [cleanup, report]


@pytest.mark.parametrize("name", ["report", "shop:report"])
def test_reset_lets_an_entry_count_from_now_on_and_drops_what_was_not_sent(name, backend, monkeypatch):
    monkeypatch.setattr(backend, "grace", 0.02)
    ran("report", unsent=(UnsentRun(NOON - 1, "t"),))
    ran("other")
    before = time.time()
    assert said("reset", name).startswith("reset  shop:report")
    [other, report] = sorted(recorded_runs("default"), key=lambda run: run.entry)
    assert (report.last_run_at, report.host, report.unsent) == (None, "", ())
    [stamp] = backend.find_runs(["shop:report"])
    assert before - 0.01 <= stamp.ran_at <= time.time() + 0.01
    assert other.host == "web-1"
    outcome = json.loads(said("reset", name, "--json"))
    assert outcome == {"entry": "shop:report", "using": "default", "outcome": "reset"}


def test_a_beat_takes_a_reset_over_and_sends_a_period_later(backend, monkeypatch):
    monkeypatch.setattr(backend, "grace", 0.02)
    schedule = ScheduleStore("shop")
    schedule.publish("report", LastRun(NOON))
    said("reset", "report")
    standing = schedule.claim("report", NOON, time.time(), 60.0)
    assert standing.ran_at > NOON + 60
    assert (standing.host, standing.unsent) == ("", ())


def test_what_nobody_knows_is_not_reset(backend):
    ran("report")
    assert "knows no entry 'nothing'" in said("reset", "nothing", code=1)
    assert [run.entry for run in recorded_runs("default")] == ["shop:report"]


def test_of_two_apps_one_must_be_named(backend, monkeypatch):
    monkeypatch.setattr(backend, "grace", 0.02)
    ran("report")
    ran("report", app="office")
    assert "Several apps have such an entry: office:report, shop:report." in said("reset", "report", code=2)
    said("reset", "office:report")


def test_a_run_that_cannot_be_read_is_replaced(valkey_locks, store):
    store.set("lock|r:shop:report", "something else")
    assert reset_run("shop:report") is True
    [stamp] = valkey_locks.find_runs(["shop:report"])
    assert stamp.host == ""


def test_a_stamp_that_is_a_little_ahead_is_moved_on_and_not_back(locmem_locks, monkeypatch):
    monkeypatch.setattr(locmem_locks, "grace", 0.0)
    ahead = LastRun(time.time() + 30, "web-1", None, "t")
    locmem_locks.claim_run("shop:report", ahead, ahead, 60)
    assert reset_run("shop:report")
    [stamp] = locmem_locks.find_runs(["shop:report"])
    assert ahead.at < stamp.at < ahead.at + 1


def test_a_reset_ends_where_others_are_faster_each_time(locmem_locks, monkeypatch):
    monkeypatch.setattr(schedule_store, "RESET_TIMEOUT", 0.3)
    monkeypatch.setattr(locmem_locks, "claim_run", lambda name, seen, now, ttl: LastRun(NOON, "web-1"))
    ran_at = LastRun(NOON, "web-1")
    monkeypatch.setattr(locmem_locks, "find_runs", lambda names: [ran_at])
    with pytest.raises(LockBackendError, match="The entry 'shop:report' is not reset: others moved it"):
        reset_run("shop:report")


def test_the_alias_is_that_of_the_setting_or_is_named(locmem_locks, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"},
        "runs": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"},
    }
    settings.DISTRIBUTED_LOCKS_BEAT = {"ALIAS": "runs", "PREFIX": "shop:"}
    locks["runs"].grace = 0.02
    ScheduleStore("x").publish("report", LastRun(NOON))
    assert "shop:report" in said()
    assert said("--using", "default").strip() == "0 entries"
    assert "There is no backend 'nope'. Known: default, runs." in said("--using", "nope", code=2)
    assert "knows no entry" in said("reset", "report", "--using", "default", code=1)
    said("reset", "report")
    locks.close()


def test_a_backend_that_does_not_answer(settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {
            "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "unix:///nowhere/at/all.sock"
        }
    }  # fmt: skip
    for arguments in ([], ["reset", "report"]):
        assert "/nowhere/at/all.sock" in said(*arguments, code=3)
    settings.DISTRIBUTED_LOCKS_BEAT = {"RESEND_AFTER": 0}
    assert "RESEND_AFTER" in said(code=3)
    locks.close()


@pytest.fixture
def app(monkeypatch, locmem_locks):
    """The current app, whose messages are in ``app.sent``."""
    made = Celery("shop", set_as_current=False, broker="memory://")
    monkeypatch.setattr(celery._state._tls, "current_app", made)
    made.sent = []

    @made.task(name="report", shared=False)
    def report(*args, **kwargs):
        raise AssertionError("it is not run here")

    def note(name, args=None, kwargs=None, **options):
        made.sent.append((name, args, kwargs, options.get("headers")))
        return made.AsyncResult("id-1")

    monkeypatch.setattr(made, "send_task", note)
    made.conf.beat_schedule = {
        "nightly": {"task": "report", "schedule": 86_400.0, "args": [1], "kwargs": {"b": 2}},
        "elsewhere": {"task": "not.registered.here", "schedule": 60.0},
    }
    return made


@pytest.mark.parametrize("name", ["nightly", "shop:nightly"])
def test_run_now_sends_the_message_of_an_entry_once_and_moves_nothing(name, app, locmem_locks):
    ran("nightly")
    before = dict(locmem_locks.runs())
    assert "as task id-1" in said("run-now", name)
    [(task, args, kwargs, headers)] = app.sent
    assert (task, list(args), kwargs) == ("report", [1], {"b": 2})
    run = scheduled_run(type("Request", (), {"headers": headers}))
    assert run.entry == "nightly"
    assert abs((datetime.now(UTC) - run.scheduled_at).total_seconds()) < 60
    assert dict(locmem_locks.runs()) == before
    assert "headers" not in app.conf.beat_schedule["nightly"].get("options", {})


def test_run_now_of_a_task_that_is_registered_elsewhere(app):
    assert json.loads(said("run-now", "elsewhere", "--json")) == {"entry": "elsewhere", "task_id": "id-1"}
    assert app.sent[0][0] == "not.registered.here"


def test_run_now_of_what_is_no_entry(app):
    said_ = said("run-now", "nothing", code=1)
    assert "The Celery app 'shop' has no entry 'nothing' in beat_schedule" in said_
    assert app.sent == []


def test_run_now_that_fails_says_why(app, monkeypatch):
    def refuse(*_, **__):
        raise OSError("the broker is down")

    monkeypatch.setattr(app, "send_task", refuse)
    assert "the broker is down" in said("run-now", "nightly", code=1)


def test_run_now_of_a_unique_task_that_is_queued_already(app, monkeypatch):
    """By on_duplicate="drop" it gives nothing back."""
    monkeypatch.setattr(app.tasks["report"], "apply_async", lambda *_, **__: None)
    assert "The task 'report' sends no second message" in said("run-now", "nightly", code=1)


def test_run_now_needs_no_store(app, settings):
    """The schedule is Celery's."""
    settings.DISTRIBUTED_LOCKS = {
        "default": {
            "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "unix:///nowhere/at/all.sock"
        }
    }  # fmt: skip
    said("run-now", "nightly")
    assert len(app.sent) == 1
    locks.close()


def test_run_now_of_a_row(app):
    models = pytest.importorskip("django_celery_beat.models", reason="needs django-celery-beat")
    interval = models.IntervalSchedule.objects.create(every=1, period="days")
    models.PeriodicTask.objects.create(name="row", task="report", args="[7]", interval=interval, enabled=False)
    said("run-now", "shop:row")
    [(task, args, _, headers)] = app.sent
    assert (task, list(args), headers["periodic_task_name"]) == ("report", [7], "row")
    row = models.PeriodicTask.objects.get()
    assert (row.last_run_at, row.total_run_count, row.enabled) == (None, 0, False)


@pytest.mark.seconds(4)
def test_while_a_beat_runs_a_reset_entry_is_forgotten_by_the_store_alone(locmem_locks):
    """What else beats know of it they tell the store again, and it is older than the reset."""
    schedule = ScheduleStore("shop")
    schedule.publish("report", LastRun(NOON, "web-1"))
    runs_of(locmem_locks).clear()
    schedule.verify()
    reset_run("shop:report")
    schedule.verify()
    [stamp] = locmem_locks.find_runs(["shop:report"])
    assert stamp.host == ""
