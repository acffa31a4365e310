"""Tasks that are in the queue once: what is published, what runs, and what is left of it."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta

import pytest
from celery import chain, chord, group
from celery.signals import before_task_publish, task_rejected, task_unknown
from celery.worker.state import revoked as revoked_tasks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import transaction
from kombu.exceptions import OperationalError

from django_distlock import InvalidLockName, LockBackendError, lock, locks
from django_distlock.celery import TaskAlreadyQueued, UniqueTask, unique, unique_task
from django_distlock.celery.scheduled import header_of
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.signals import lock_busy
from django_distlock.types import LockRequest
from django_distlock.unique.queued import FIELD as HEADER
from django_distlock.utils.clock import clock
from tests.support.deliveries import UniqueShop
from tests.support.stores import LOCMEM
from tests.support.tenants import of_tenants, tenant
from tests.support.tools import eventually, on_stores

on_each_store = on_stores("redis", "locmem")


@pytest.fixture(autouse=True)
def store(backend):
    return backend


@pytest.fixture
def shop():
    with UniqueShop() as shop:
        yield shop


def names():
    return sorted(info.name for info in locks["default"].held() if not info.name.startswith("django_distlock."))


def remaining(name="unique:work:7"):
    [[info]] = locks["default"].look([name])
    return info.remaining


class TestPublishing:
    @on_each_store
    def test_the_second_one_is_the_first(self, shop):
        task = shop.unique()
        first, second, other = task.delay(7), task.delay(7), task.delay(8)
        assert second.id == first.id != other.id
        shop.drain()
        assert shop.runs == [(7, 0), (8, 0)]
        assert shop.result(first.id) == ("SUCCESS", "return")
        assert names() == []
        assert task.delay(7).id != first.id

    def test_who_has_it_is_told(self, shop):
        task = shop.unique()
        assert task.unique_find(7) is None
        sent = task.delay(7, "look")
        found = task.unique_find(7)
        assert (found.task_id, found.state, found.info.name) == (sent.id, "queued", "unique:work:7")
        assert found.info.holder.label == f"queued: work[{sent.id}]"
        shop.drain()
        assert shop.result(sent.id)[1] == [(sent.id, "running")] or shop.result(sent.id)[1] == [[sent.id, "running"]]
        assert task.unique_find(7) is None

    def test_a_duplicate_may_raise(self, shop):
        task = shop.unique(on_duplicate="raise")
        first = task.delay(7)
        with pytest.raises(TaskAlreadyQueued, match=f"the task {first.id} is queued") as raised:
            task.delay(7)
        assert (raised.value.task_id, raised.value.name) == (first.id, "unique:work:7")

    def test_a_duplicate_may_be_dropped(self, shop, caplog):
        task, told = shop.unique(on_duplicate="drop"), []

        def receiver(name, reason, holder, **_):
            told.append((name, reason, holder.label))

        lock_busy.connect(receiver)
        first = task.delay(7)
        with caplog.at_level(logging.INFO, "django_distlock"):
            assert task.delay(7) is None
        assert told == [("unique:work:7", "duplicate", f"queued: work[{first.id}]")]
        [record] = [record for record in caplog.records if getattr(record, "distlock", {}).get("event") == "duplicate"]
        assert record.levelno == logging.INFO
        assert f"the task {first.id} is queued" in record.message

    def test_a_name_that_somebody_else_locks(self, shop):
        task = shop.unique()
        with lock("unique:work:7"):
            assert task.delay(7) is None
            assert task.unique_find(7).task_id == ""
        assert shop.next() is None

    def test_it_can_be_bypassed(self, shop):
        task = shop.unique()
        first, second = task.delay(7), task.apply_async((7,), unique=False)
        assert first.id != second.id
        shop.drain()
        assert shop.runs == [(7, 0), (7, 0)]

    def test_names_and_locks_of_runs_do_not_meet(self, shop):
        task = shop.unique("work:{number}")
        task.delay(7)
        with lock("work:7", wait=0):
            assert names() == ["unique:work:7", "work:7"]

    @on_each_store
    def test_the_name_lasts_for_its_ttl_once_it_is_published(self, shop):
        """Before, for the TTL of the alias alone."""
        task, seen = shop.unique(ttl=1000), []
        before_task_publish.connect(receiver := lambda **_: seen.append(remaining()))
        try:
            task.delay(7)
        finally:
            before_task_publish.disconnect(receiver)
        assert seen[0] <= 30
        assert 900 < remaining() <= 1000

    @pytest.mark.parametrize(
        ("options", "least", "most"),
        [
            ({"countdown": 500}, 1400, 1500),
            ({"eta": lambda: datetime.now(UTC) + timedelta(seconds=500)}, 1400, 1501),
            ({"expires": 100}, 30, 100),
            ({"expires": lambda: datetime.now(UTC) + timedelta(seconds=100)}, 30, 100),
            ({"expires": 5000}, 900, 1000),
        ],
    )
    def test_and_as_long_as_the_message_waits(self, shop, options, least, most):
        task = shop.unique(ttl=1000)
        task.apply_async((7,), **{key: value() if callable(value) else value for key, value in options.items()})
        assert least < remaining() <= most

    def test_what_cannot_be_published_is_free_again(self, shop, monkeypatch):
        task = shop.unique()
        real = type(shop.app).send_task

        def fail(*_, **__):
            raise OperationalError("no broker")

        monkeypatch.setattr(type(shop.app), "send_task", fail)
        with pytest.raises(OperationalError):
            task.delay(7)
        assert names() == []
        monkeypatch.setattr(type(shop.app), "send_task", real)
        task.delay(7)
        shop.drain()
        assert shop.runs == [(7, 0)]

    def test_publishing_that_took_longer_than_the_ttl(self, shop, settings):
        """Its lease has ended then; the worker takes the name anew."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "TTL": 0.3}}
        task = shop.unique()
        before_task_publish.connect(receiver := lambda **_: time.sleep(0.5))
        try:
            sent = task.delay(7)
        finally:
            before_task_publish.disconnect(receiver)
        assert names() == []
        shop.drain()
        assert shop.result(sent.id) == ("SUCCESS", "return")
        assert names() == []

    def test_arguments_are_checked(self, shop):
        task = shop.unique()
        with pytest.raises(TypeError):
            task.delay(7, what="return", nothing=1)
        assert names() == []

    def test_nothing_is_held_before_commit(self, shop, transactional_db):
        task = shop.unique()
        with transaction.atomic():
            task.delay_on_commit(7)
            assert names() == []
        assert names() == ["unique:work:7"]
        with pytest.raises(ValueError, match="roll"), transaction.atomic():
            task.delay_on_commit(8)
            raise ValueError("roll back")
        assert names() == ["unique:work:7"]

    @pytest.mark.parametrize("header", [{"celery_beat_task": True}, {"distlock_run": header_of("entry", 1.0)}])
    def test_for_beat_a_duplicate_counts_as_sent(self, shop, header):
        task = shop.unique(on_duplicate="raise")
        task.delay(7)
        assert task.apply_async((7,), headers=header) is None
        assert shop.next() is not None
        assert shop.next() is None


class TestEnds:
    @on_each_store
    def test_a_run_has_a_lease_that_ends_soon(self, shop, beside):
        task = shop.unique(ttl=1000)
        sent = task.delay(7, "wait")
        assert remaining() > 900
        running = beside(shop.deliver, shop.next())
        assert shop.is_working.wait(30)
        found = task.unique_find(7)
        assert (found.task_id, found.state) == (sent.id, "running")
        assert remaining() <= 30
        assert task.delay(7).id == sent.id
        shop.go.set()
        running.result(30)
        assert names() == []

    @pytest.mark.parametrize("what", ["return", "raise", "reject"])
    def test_until_the_end(self, shop, what):
        shop.unique().delay(7, what)
        shop.drain()
        assert shop.runs == [(7, 0)]
        assert names() == []

    @on_each_store
    def test_until_success(self, shop):
        task = shop.unique(until="success", ttl=1000)
        sent = task.delay(7)
        time.sleep(0.1)
        shop.drain()
        found = task.unique_find(7)
        assert (found.task_id, found.state) == (sent.id, "done")
        assert 900 < found.info.remaining < 1000
        assert task.delay(7).id == sent.id
        assert shop.next() is None

    def test_until_success_of_one_that_fails(self, shop):
        task = shop.unique(until="success", ttl=1000)
        task.delay(7, "raise")
        shop.drain()
        assert names() == []

    @pytest.mark.parametrize("guarded", [None, {"on_busy": "skip"}])
    def test_until_the_start(self, shop, beside, guarded):
        task = shop.unique(until="start", guarded=guarded)
        first = task.delay(7, "wait")
        running = beside(shop.deliver, shop.next())
        assert shop.is_working.wait(30)
        assert task.unique_find(7) is None
        second = task.delay(7)
        assert second.id != first.id
        assert task.delay(7).id == second.id
        shop.go.set()
        running.result(30)
        shop.drain()
        assert shop.runs == [(7, 0), (7, 0)]
        assert names() == []

    def test_at_most_one_waits_for_the_lock_of_the_run(self, shop, beside):
        task = shop.unique(until="start", guarded={"on_busy": "retry"}, ttl=1000)
        task.delay(7, "wait")
        running = beside(shop.deliver, shop.next())
        assert shop.is_working.wait(30)
        second = task.delay(7)
        for _ in range(3):
            shop.deliver(shop.next())  # it finds the lock busy, and is sent again
            assert task.unique_find(7).task_id == second.id
            assert task.delay(7).id == second.id
            assert remaining() > 900
        shop.go.set()
        running.result(30)
        shop.drain()
        assert shop.runs == [(7, 0), (7, 0)]
        assert names() == []

    def test_a_run_that_skips_frees_the_name(self, shop, beside):
        task = shop.unique(until="start", guarded={"on_busy": "skip"})
        task.delay(7, "wait")
        running = beside(shop.deliver, shop.next())
        assert shop.is_working.wait(30)
        task.delay(7)
        shop.deliver(shop.next())
        eventually(lambda: task.unique_find(7) is None)
        shop.go.set()
        running.result(30)

    def test_busy_and_retried_until_the_end(self, shop, beside):
        task = shop.unique(guarded={"on_busy": "retry"})
        with lock("run:7"):
            sent = task.delay(7)
            for _ in range(2):
                beside(shop.deliver, shop.next()).result(30)
                found = task.unique_find(7)
                assert (found.task_id, found.state) == (sent.id, "queued")
        shop.drain()
        assert shop.runs == [(7, 0)]
        assert shop.result(sent.id) == ("SUCCESS", "return")
        assert names() == []


class TestRetries:
    @pytest.mark.parametrize("until", ["end", "success"])
    @on_each_store
    def test_a_retry_keeps_the_name(self, shop, until):
        task = shop.unique(until=until, ttl=1000)
        sent = task.delay(7, "retry")
        shop.deliver(shop.next())
        found = task.unique_find(7)
        assert (found.task_id, found.state) == (sent.id, "queued")
        assert 900 < found.info.remaining <= 1060
        assert task.delay(7).id == sent.id
        shop.drain()
        assert shop.runs == [(7, 0), (7, 1)]
        assert shop.result(sent.id) == ("SUCCESS", "retry")
        assert names() == ([] if until == "end" else ["unique:work:7"])

    def test_a_retry_that_cannot_be_published_frees_it(self, shop, monkeypatch):
        task = shop.unique()
        task.delay(7, "retry")
        message = shop.next()

        def fail(*_, **__):
            raise OperationalError("no broker")

        monkeypatch.setattr(type(shop.app), "send_task", fail)
        shop.deliver(message)
        assert names() == []

    def test_with_until_start_it_takes_it_again_if_it_is_free(self, shop):
        task = shop.unique(until="start")
        sent = task.delay(7, "retry")
        shop.deliver(shop.next())
        assert task.unique_find(7).task_id == sent.id
        shop.drain()
        assert shop.runs == [(7, 0), (7, 1)]
        assert names() == []

    def test_else_it_goes_without(self, shop, beside):
        shop.unique(until="start", options={"max_retries": 5})

        def work(task, number):
            shop.runs.append((number, task.request.retries))
            if not task.request.retries:
                shop.is_working.set()
                assert shop.go.wait(30)
                raise task.retry(countdown=60)

        task = shop.app.task(
            base=UniqueTask, unique=unique("also:{number}", until="start"), bind=True, name="also", shared=False
        )(work)
        first = task.delay(7)
        running = beside(shop.deliver, shop.next())
        assert shop.is_working.wait(30)
        second = task.delay(7)
        shop.go.set()
        running.result(30)
        assert task.unique_find(7).task_id == second.id
        messages = [shop.next(), shop.next()]
        assert [HEADER in message.headers for message in messages] == [True, False]
        shop.deliver(messages[1])
        assert shop.result(first.id)[0] == "SUCCESS"
        assert shop.runs == [(7, 0), (7, 1)]

    def test_a_retry_that_does_not_raise(self, shop):
        task = shop.unique()
        sent = task.delay(7, "retry without raising")
        shop.deliver(shop.next())
        assert task.unique_find(7).state == "queued"
        shop.drain()
        assert shop.runs == [(7, 0), (7, 1)]
        assert shop.result(sent.id) == ("SUCCESS", "retry without raising")
        assert names() == []

    def test_what_was_not_unique_is_retried_as_such(self, shop):
        task = shop.unique()
        task.apply_async((7, "retry"), unique=False)
        task.delay(7)
        shop.drain()
        assert sorted(shop.runs) == [(7, 0), (7, 0), (7, 1)]

    def test_autoretry(self, shop):
        task = shop.unique(
            options={"autoretry_for": (ValueError,), "retry_kwargs": {"countdown": 60, "max_retries": 1}}
        )
        sent = task.delay(7, "raise")
        shop.deliver(shop.next())
        assert task.unique_find(7).task_id == sent.id
        shop.drain()
        assert shop.runs == [(7, 0), (7, 1)]
        assert shop.result(sent.id)[0] == "FAILURE"
        assert names() == []


class TestCopies:
    @pytest.mark.parametrize("until", ["end", "success", "start"])
    @pytest.mark.parametrize("acks_late", [True, False])
    def test_a_copy_of_what_is_done_does_not_run(self, shop, until, acks_late):
        """As where the visibility timeout is shorter than the queue."""
        task = shop.unique(until=until, options={"acks_late": acks_late})
        sent = task.delay(7)
        message = shop.next()
        shop.deliver(message)
        shop.deliver(message, redelivered=True)
        assert shop.runs == [(7, 0)]
        assert shop.result(sent.id) == ("SUCCESS", "return")
        assert shop.next() is None

    @on_each_store
    def test_a_copy_of_what_is_at_work_is_sent_again(self, shop, beside):
        task = shop.unique()
        sent = task.delay(7, "wait")
        message = shop.next()
        running = beside(shop.deliver, message)
        assert shop.is_working.wait(30)
        shop.deliver(message, redelivered=True)
        assert shop.result(sent.id)[0] == "PENDING"
        again = shop.next()
        shop.deliver(again)
        again = shop.next()
        shop.go.set()
        running.result(30)
        shop.deliver(again)
        assert shop.runs == [(7, 0)]
        assert shop.result(sent.id) == ("SUCCESS", "wait")
        assert shop.next() is None
        assert names() == []

    @pytest.mark.parametrize("until", ["end", "start"])
    def test_a_copy_of_a_retry_that_waits_is_sent_again(self, shop, until):
        task = shop.unique(until=until)
        task.delay(7, "retry")
        message = shop.next()
        shop.deliver(message)
        retry = shop.next()
        shop.deliver(message, redelivered=True)
        copy = shop.next()
        assert shop.runs == [(7, 0)]
        shop.deliver(retry)
        shop.deliver(copy)
        assert shop.runs == [(7, 0), (7, 1)]
        assert shop.next() is None

    @on_each_store
    def test_a_copy_of_one_that_was_killed_runs(self, shop):
        """Its lease has ended by its TTL."""
        task = shop.unique()
        sent = task.delay(7)
        message = shop.next()
        [[info]] = locks["default"].look(["unique:work:7"])
        locks["default"].release(_request(info))
        shop.deliver(message)
        assert shop.runs == [(7, 0)]
        assert shop.result(sent.id) == ("SUCCESS", "return")

    @pytest.mark.parametrize("until", ["end", "start"])
    def test_a_copy_whose_name_is_anothers_is_dropped(self, shop, caplog, until):
        task = shop.unique(until=until)
        task.delay(7)
        message = shop.next()
        [[info]] = locks["default"].look(["unique:work:7"])
        locks["default"].release(_request(info))
        second = task.delay(7)
        shop.deliver(message)
        assert shop.runs == []
        assert "another message does the work" in caplog.text
        assert task.unique_find(7).task_id == second.id
        shop.drain()
        assert shop.runs == [(7, 0)]


def _request(info):
    return LockRequest(info.name, 1, info.holder, info.token)


class TestCanvas:
    def test_a_chord_of_equal_members_ends(self, shop):
        task, other = shop.unique(), shop.other()
        result = chord([task.s(7), task.s(7), task.s(7)])(other.s())
        shop.drain()
        assert shop.runs == [(7, 0)]
        assert shop.result(result.id) == ("SUCCESS", ["return", None, None])
        assert names() == []

    def test_a_chain_goes_on_behind_a_duplicate(self, shop):
        task, other = shop.unique(), shop.other()
        task.delay(7)
        first = chain(task.si(7), other.s())()
        shop.drain()
        assert shop.runs == [(7, 0)]
        assert shop.result(first.id) == ("SUCCESS", None)

    def test_so_it_is_where_the_worker_sends_the_next_one(self, shop):
        task, other = shop.unique(), shop.other()
        last = chain(other.si(1), task.si(7))()
        middle = chain(other.si(1), task.si(7), other.s())()
        body = chord([other.si(1), other.si(2)])(task.si(7))
        linked = task.si(7)
        other.apply_async(link=linked)
        with lock("unique:work:7"):
            shop.drain()
        assert shop.runs == []
        assert [shop.result(each.id) for each in (last, middle, body)] == [("SUCCESS", None)] * 3

    def test_a_group(self, shop):
        task = shop.unique()
        result = group([task.s(7), task.s(8), task.s(7)])()
        shop.drain()
        assert [shop.result(each.id)[1] for each in result.results] == ["return", "return", None]
        assert shop.runs == [(7, 0), (8, 0)]


class TestStores:
    @on_each_store
    def test_tenants(self, shop, settings, store):
        of_tenants(settings)
        task = shop.unique()
        with tenant("a"):
            first = task.delay(7)
        with tenant("b"):
            assert task.unique_find(7) is None
            second = task.delay(7, "look")
            assert task.delay(7).id == second.id != first.id
            assert task.unique_find(7).info.prefix == locks["default"].prefix_now()
        with tenant("c"):  # of whoever runs it: the message says whose name it has
            shop.drain()
        assert shop.runs == [(7, 0), (7, 0)]
        for each in "abc":
            with tenant(each):
                assert task.unique_find(7) is None

    @on_each_store
    def test_the_lease_of_a_run_is_lost(self, shop, beside, caplog):
        task = shop.unique()
        sent = task.delay(7, "wait")
        running = beside(shop.deliver, shop.next())
        assert shop.is_working.wait(30)
        locks["default"].release(_request(task.unique_find(7).info))
        second = task.delay(7)
        assert second.id != sent.id
        shop.go.set()
        running.result(30)
        assert shop.result(sent.id) == ("SUCCESS", "wait")
        assert "was lost" in caplog.text
        assert task.unique_find(7).task_id == second.id

    def test_it_is_listed(self, shop, capsys):
        sent = shop.unique().delay(7)
        call_command("locks", "list")
        assert f"queued: work[{sent.id}]" in capsys.readouterr().out
        call_command("locks", "release", "--prefix", "unique:work:", "--no-input")
        assert names() == []


class TestOthers:
    def test_eager(self, shop):
        shop.app.conf.task_always_eager = True
        task = shop.unique()
        assert task.delay(7, "look").get()[0][1] == "running"
        assert names() == []
        shop.unique("locked:{number}", options={"name": "second"})
        assert task.delay(7, "return").get() == "return"
        assert shop.runs == [(7, 0), (7, 0)]

    def test_eager_retries(self, shop):
        shop.app.conf.task_always_eager = True
        task = shop.unique()
        assert task.delay(7, "retry").get() == "retry"
        assert shop.runs == [(7, 0), (7, 1)]
        assert names() == []

    def test_called_as_a_function(self, shop):
        task = shop.unique()
        assert task(7) == "return"
        assert task.apply((7,)).get() == "return"

    def test_revoked(self, shop):
        task = shop.unique()
        sent = task.delay(7)
        revoked_tasks.add(sent.id)
        try:
            shop.drain()
        finally:
            revoked_tasks.discard(sent.id)
        assert shop.runs == []
        eventually(lambda: names() == [])

    def test_expired(self, shop):
        shop.unique().apply_async((7,), expires=datetime.now(UTC) - timedelta(seconds=5))
        shop.drain()
        assert shop.runs == []
        eventually(lambda: names() == [])

    def test_a_task_that_the_worker_does_not_know(self, shop):
        task = shop.unique()
        for signal in (task_unknown, task_rejected):
            task.delay(7)
            signal.send(sender=None, message=shop.next(), exc=None, name="work", id="x")
            eventually(lambda: names() == [])

    def test_a_header_that_cannot_be_read(self, shop, caplog):
        task = shop.unique()
        sent = task.delay(7)
        message = shop.next()
        message.headers[HEADER] = "nonsense"
        task_unknown.send(sender=None, message=message, exc=None, name="work", id="x")
        assert "cannot be freed" in caplog.text
        shop.deliver(message)
        assert shop.result(sent.id)[0] == "FAILURE"
        assert shop.runs == []
        sent = shop.unique("also:{number}", on_unavailable="run", options={"name": "also"}).delay(7)
        message = shop.next()
        message.headers[HEADER] = "nonsense"
        shop.deliver(message)
        assert shop.result(sent.id) == ("SUCCESS", "return")
        assert "cannot be read" in caplog.text

    def test_a_task_that_is_replaced_by_another_one(self, shop):
        def work(task, number):
            raise task.replace(unique_one.si(number))

        unique_one = shop.unique(until="success", ttl=1000)
        task = shop.app.task(base=UniqueTask, unique=unique("r:{number}"), bind=True, name="r", shared=False)(work)
        sent = task.delay(7)
        shop.drain()
        assert shop.runs == [(7, 0)]
        assert shop.result(sent.id) == ("SUCCESS", "return")
        assert names() == ["unique:work:7"]
        assert unique_one.unique_find(7).task_id == sent.id

    def test_a_task_that_replaces_itself(self, shop):
        def work(task, number, again=True):
            shop.runs.append(number)
            if again:
                raise task.replace(task.si(number, again=False))
            return "replaced"

        task = shop.app.task(base=UniqueTask, unique=unique("r:{number}"), bind=True, name="r", shared=False)(work)
        sent = task.delay(7)
        shop.drain()
        assert shop.runs == [7, 7]
        assert shop.result(sent.id) == ("SUCCESS", "replaced")
        assert names() == []

    def test_a_store_that_is_away(self, shop, settings, caplog):
        away = {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "unix:///nowhere"}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}, "away": away}
        task = shop.unique(using="away")
        with pytest.raises(LockBackendError):
            task.delay(7)
        runs = shop.unique("also:{number}", using="away", on_unavailable="run", options={"name": "also"})
        sent = runs.delay(7)
        assert "it is not known whether it is queued already" in caplog.text
        shop.drain()
        assert shop.result(sent.id) == ("SUCCESS", "return")

    def test_a_store_that_goes_away(self, shop, monkeypatch, caplog):
        task, runs = shop.unique(), shop.unique("also:{number}", on_unavailable="run", options={"name": "also"})
        first, second = task.delay(7), runs.delay(7)

        def fail(*_, **__):
            raise LockBackendError("away")

        with monkeypatch.context() as patched:
            patched.setattr(type(locks["default"]), "exchange", fail)
            shop.drain()
        assert shop.result(first.id)[0] == "FAILURE"
        assert shop.result(second.id) == ("SUCCESS", "return")
        eventually(lambda: names() == [])

    @pytest.mark.parametrize("until", ["end", "start"])
    def test_a_store_that_is_away_when_a_task_retries(self, shop, until, monkeypatch, caplog):
        """The retry is sent, and finds its name free, or goes without."""
        task = shop.unique(until=until)
        sent = task.delay(7, "retry")
        message, backend = shop.next(), type(locks["default"])
        asked = {"end": "exchange", "start": "acquire"}[until]
        real, calls = getattr(backend, asked), []

        def fail(self, *args, **kwargs):
            calls.append(args)
            if len(calls) == (2 if until == "end" else 1):
                raise LockBackendError("away")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(backend, asked, fail)
            shop.deliver(message)
        assert "is sent again without a lease" in caplog.text
        eventually(lambda: names() == [])
        shop.drain()
        assert shop.runs == [(7, 0), (7, 1)]
        assert shop.result(sent.id) == ("SUCCESS", "retry")
        eventually(lambda: names() == [])

    def test_an_interrupt_while_it_is_published(self, shop, monkeypatch):
        task = shop.unique()

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(type(shop.app), "send_task", interrupt)
            with pytest.raises(KeyboardInterrupt):
                task.delay(7)
        eventually(lambda: names() == [])

    def test_an_interrupt_when_the_run_begins(self, shop, monkeypatch):
        shop.unique().delay(7)
        real, message = type(locks["default"]).exchange, shop.next()

        def interrupt(self, *args):
            real(self, *args)
            raise SystemExit

        with monkeypatch.context() as patched:
            patched.setattr(type(locks["default"]), "exchange", interrupt)
            with pytest.raises(SystemExit):
                shop.deliver(message)
        assert shop.runs == []
        eventually(lambda: names() == [])

    def test_a_grant_that_comes_too_late(self, shop, monkeypatch, caplog):
        """As where the worker was stopped: another one may have the name by then."""
        sent = shop.unique().delay(7)
        real, message = type(locks["default"]).exchange, shop.next()

        def late(self, *args):
            return real(self, *args)._replace(sent_at=clock() - 60)

        with monkeypatch.context() as patched:
            patched.setattr(type(locks["default"]), "exchange", late)
            shop.deliver(message)
        assert shop.runs == []
        assert shop.result(sent.id)[0] == "FAILURE"
        eventually(lambda: names() == [])

    def test_a_name_that_cannot_be_released_is_told(self, shop, monkeypatch, caplog):
        sent = shop.unique().delay(7)
        message = shop.next()
        real, backend = type(locks["default"]).release, type(locks["default"])

        def fail(self, request, *args, **kwargs):
            if request.name.startswith("unique:"):
                raise LockBackendError("away")
            return real(self, request, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(backend, "release", fail)
            shop.deliver(message)
            assert "away" in caplog.text
        assert shop.result(sent.id) == ("SUCCESS", "return")
        eventually(lambda: names() == [])

    def test_a_class(self, shop):
        class Sync(UniqueTask):
            name = "sync"
            unique = unique("sync:{account}")

            def run(self, account):
                shop.runs.append((account, self.request.retries))

        task = shop.app.register_task(Sync())
        first = task.delay(7)
        assert task.delay(account=7).id == first.id
        shop.drain()
        assert shop.runs == [(7, 0)]

    def test_a_class_without_unique(self, shop):
        def work():
            pass

        with pytest.raises(ImproperlyConfigured, match="its attribute 'unique' is None"):
            shop.app.task(base=UniqueTask, name="plain", shared=False)(work).bind(shop.app)

    def test_custom_call(self, shop):
        class Called(UniqueTask):
            abstract = True

            def __call__(self, *args, **kwargs):
                shop.runs.append("called")
                return super().__call__(*args, **kwargs)

        def work(task, x):
            return task.request.id

        task = shop.app.task(base=Called, unique=unique("c:{x}"), bind=True, name="c", shared=False)(work)
        sent = task.delay(7)
        shop.drain()
        assert shop.result(sent.id) == ("SUCCESS", sent.id)
        assert shop.runs == ["called"]

    def test_a_task_that_calls_itself_as_a_function(self, shop):
        def work(task, number):
            shop.runs.append(number)
            return number + (task(number - 1) if number else 0)

        task = shop.app.task(base=UniqueTask, unique=unique("n:{number}"), bind=True, name="n", shared=False)(work)
        sent = task.delay(3)
        shop.drain()
        assert shop.result(sent.id) == ("SUCCESS", 6)


decorated_runs = []


@unique_task("sync:{account}", on_duplicate="drop", name="decorated", bind=True, max_retries=9)
def decorated(self, account):
    decorated_runs.append((account, self.max_retries))


@unique_task
def whole_of_it(account=1):
    return account


class TestDecorator:
    def test_it_stands_in_the_place_of_shared_task(self, shop):
        shop.app.set_current()
        assert decorated.delay(7) is not None
        assert decorated.delay(7) is None
        shop.drain()
        assert decorated_runs == [(7, 9)]
        decorated_runs.clear()

    def test_bare(self, shop):
        shop.app.set_current()
        whole_of_it.delay(1)
        whole_of_it.delay(2)
        assert names() == ["unique:tests.celery.test_unique_tasks.whole_of_it"]
        assert shop.next() is not None
        assert shop.next() is None

    def test_a_template_that_asks_for_what_is_not_there(self):
        with pytest.raises(InvalidLockName, match="no such argument"):

            @unique_task("sync:{nothing}")
            def sync(account):
                pass

    def test_a_callable(self, shop):
        def account_of(number, what="return"):
            return f"account {number}"

        shop.unique(account_of).delay(7)
        assert names() == ["unique:account 7"]
        for wrong in (lambda: unique_task(lambda pk: pk), lambda: unique_task(account_of, until="start")):
            with pytest.raises(TypeError, match="is given to unique"):
                wrong()

    @pytest.mark.parametrize(
        "given", [{"until": "then"}, {"on_duplicate": "retry"}, {"on_unavailable": "skip"}, {"ttl": 0}, {"ttl": "x"}]
    )
    def test_wrong_values(self, given):
        with pytest.raises(ValueError, match=next(iter(given))):
            unique("x", **given)

    def test_a_base_that_is_not_unique(self):
        with pytest.raises(TypeError, match="derives from UniqueTask"):
            unique_task("x", base=object)

    def test_a_store_that_cannot_do_it(self, shop, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {
                "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
                "LOCATION": [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)],
            }
        }
        task = shop.unique()
        with pytest.raises(InvalidLockBackend, match="a RedlockBackend, where no lease can follow"):
            task.delay(7)
