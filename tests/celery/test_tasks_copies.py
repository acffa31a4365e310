"""Messages that are delivered more than once, and task ids that are used again: what runs, and what is recorded."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError

from django_distlock import Lock, LockNotAcquired, distributed_lock, lock, locks, skip
from django_distlock.celery.messages import HEADER
from django_distlock.celery.tasks import REQUEUES
from django_distlock.options import settled
from django_distlock.types import LockRequest
from tests.support.deliveries import Shop
from tests.support.tenants import of_tenants, tenant
from tests.support.tools import eventually

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("locmem_locks")]


@pytest.fixture
def shop():
    # Messages of the transport of a real broker say whether they were delivered before; none is asked here.
    with Shop(broker_read_url="redis://nowhere.invalid") as shop:
        yield shop


@pytest.fixture
def used_again():
    """A task id. (Results are kept in the memory of this process.)"""
    return f"sync-{uuid.uuid4()}"


def test_a_first_delivery_that_runs_after_its_copy_does_not_run_again(shop):
    sent = shop.task().delay()
    message = shop.next()
    shop.deliver(message, redelivered=True)
    shop.deliver(message)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")


@pytest.mark.parametrize("on_busy", ["skip", "raise", skip("skipped"), "retry", lambda busy, *_: "answered"])
def test_no_delivery_answers_for_a_task_that_is_at_work(on_busy, shop, beside):
    sent = shop.task(on_busy=on_busy).delay("wait")
    message = shop.next()
    first = beside(shop.deliver, message, True)
    assert shop.is_working.wait(30)
    shop.deliver(message)
    assert shop.result(sent.id)[0] in ("PENDING", "RETRY")
    again = shop.next()
    assert again.headers[REQUEUES] == 1
    assert again.headers[HEADER] == message.headers[HEADER]
    shop.go.set()
    first.result(30)
    assert shop.result(sent.id) == ("SUCCESS", "wait")
    shop.deliver(again)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "wait")
    assert shop.next() is None


def test_no_delivery_takes_a_second_slot_beside_one_that_is_at_work(shop, beside):
    sent = shop.task(slots=3).delay("wait")
    message = shop.next()
    first = beside(shop.deliver, message, True)
    assert shop.is_working.wait(30)
    shop.deliver(message)
    assert shop.result(sent.id)[0] == "PENDING"
    assert lock("work", slots=3).usage().held == 1
    again = shop.next()
    shop.go.set()
    first.result(30)
    shop.deliver(again)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "wait")
    assert shop.next() is None


@pytest.mark.parametrize("on_busy", ["skip", "raise", "retry"])
def test_no_delivery_answers_for_one_that_is_at_work_in_any_slot(on_busy, shop, beside):
    """Where all are taken, the first one to be free is named as busy: the lease of another one has little time left."""
    sent = shop.task(slots=2, on_busy=on_busy).delay("wait")
    message = shop.next()
    with Lock("work", "default", settled(slots=2, ttl=20.0)):
        first = beside(shop.deliver, message, True)
        assert shop.is_working.wait(30)
        shop.deliver(message)
        assert shop.result(sent.id)[0] == "PENDING"
        again = shop.next()
        assert again.headers[REQUEUES] == 1
        shop.go.set()
        first.result(30)
        shop.deliver(again)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "wait")
    assert shop.next() is None


def test_other_messages_take_the_other_slots(shop, beside):
    task = shop.task(slots=2)
    waits, returns = task.delay("wait"), task.delay()
    first = beside(shop.deliver, shop.next())
    assert shop.is_working.wait(30)
    shop.deliver(shop.next())
    assert shop.result(returns.id) == ("SUCCESS", "return")
    shop.go.set()
    first.result(30)
    assert shop.result(waits.id) == ("SUCCESS", "wait")


def test_a_copy_completes_what_a_dead_run_has_begun(shop):
    """Its lease is there until its TTL has passed."""
    sent = shop.task().delay()
    message = shop.next()
    dead = Lock("work", "default", settled(ttl=0.5, renew=False), message=message.headers[HEADER])
    ThreadPoolExecutor(1).submit(dead.acquire).result()
    shop.deliver(message)
    assert shop.runs == []
    again = shop.next()
    eventually(lambda: not dead.locked())
    shop.deliver(again)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")


@pytest.mark.parametrize("transport", ["redis://nowhere.invalid", "memory://"], ids=["flags copies", "does not"])
@pytest.mark.parametrize("what", ["return", "retry"])
def test_a_task_id_that_is_used_again_is_other_work(what, transport, shop, used_again):
    shop.app.conf.broker_read_url = transport
    work = shop.task()
    for _ in range(3):
        work.apply_async([what], task_id=used_again)
        shop.drain()
    retries = [0] if what == "return" else [0, 1]
    assert shop.runs == [(used_again, attempt) for attempt in retries] * 3


def test_a_task_id_that_is_used_again_is_other_work_also_after_its_lock_was_busy(shop, used_again):
    work = shop.task(on_busy="retry")
    work.apply_async(task_id=used_again)
    shop.drain()
    work.apply_async(task_id=used_again)
    with ThreadPoolExecutor(1) as pool:
        other = lock("work")
        pool.submit(other.acquire).result()
        shop.deliver(shop.next())
        pool.submit(other.release).result()
    shop.drain()
    assert shop.runs == [(used_again, 0)] * 2


@pytest.mark.parametrize("on_busy", ["skip", "raise"])
def test_other_work_under_the_id_of_a_task_that_is_at_work_is_dropped_and_records_nothing(
    on_busy, shop, beside, used_again, caplog
):
    """Celery keeps the first success that is recorded under an id, so the true result would be lost."""
    work = shop.task(on_busy=on_busy)
    work.apply_async(["wait"], task_id=used_again)
    first = beside(shop.deliver, shop.next())
    assert shop.is_working.wait(30)
    work.apply_async(task_id=used_again)
    shop.drain()
    assert shop.result(used_again)[0] == "PENDING"
    assert "another message with this task id is at work" in caplog.text
    shop.go.set()
    first.result(30)
    assert shop.result(used_again) == ("SUCCESS", "wait")
    assert shop.runs == [(used_again, 0)]


def test_a_task_that_succeeds_and_retries_goes_on(shop):
    sent = shop.task().delay("retry without raising")
    first = shop.next()
    shop.deliver(first)
    shop.drain()
    assert shop.runs == [(sent.id, 0), (sent.id, 1), (sent.id, 2)]
    shop.deliver(first, redelivered=True)
    assert len(shop.runs) == 3


def test_a_copy_of_an_attempt_whose_retry_succeeded_does_not_run(shop):
    sent = shop.task().delay("retry")
    first = shop.next()
    shop.deliver(first)
    shop.drain()
    shop.deliver(first, redelivered=True)
    assert shop.runs == [(sent.id, 0), (sent.id, 1)]


def test_what_replaces_a_task_waits_for_its_lock(shop, beside):
    """It has the same task id."""
    sent = shop.task().delay("replace")
    held = threading.Event()

    def hold():
        with Lock("work", "default", settled(), message=f"{sent.id}.of the replaced one"):
            held.set()
            assert shop.go.wait(30)

    shop.deliver(shop.next())
    holding = beside(hold)
    assert held.wait(30)
    shop.deliver(shop.next())
    shop.go.set()
    holding.result(30)
    shop.drain()
    assert len(shop.runs) == 2
    assert shop.result(sent.id) == ("SUCCESS", "replaced")


def test_a_label_that_ends_like_a_task_is_not_that_task(shop):
    """Labels of requests are paths, which clients choose."""
    shop.app.conf.broker_read_url = "memory://"  # which never says that a message is new
    sent = shop.task().apply_async(task_id="abc-123")
    with ThreadPoolExecutor(1) as pool:
        other = lock("work", label="GET /k/1/[abc-123]")
        pool.submit(other.acquire).result()
        shop.drain()
        pool.submit(other.release).result()
    assert shop.result(sent.id) == ("SUCCESS", None)


def test_a_task_that_is_passed_the_headers_of_another_one_is_not_taken_for_it(shop):
    work = shop.task()
    first = work.apply_async(task_id="first")
    message = shop.next()
    work.apply_async(task_id="second", headers={HEADER: message.headers[HEADER], "mine": 1})
    other = shop.next()
    assert other.headers["mine"] == 1
    for one in (message, other):
        assert one.headers[HEADER].startswith(f"{one.headers['id']}.")
        shop.deliver(one)
    assert shop.runs == [(first.id, 0), ("second", 0)]


class TestWithoutAnId:
    """Of messages that were sent by a process without this package: the task id alone tells."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, shop):
        def forget(headers, **_):
            del headers[HEADER]

        before_task_publish.connect(forget)
        yield
        before_task_publish.disconnect(forget)

    def test_a_message_that_is_flagged_is_a_copy(self, shop):
        sent = shop.task().delay()
        message = shop.next()
        shop.deliver(message)
        shop.deliver(message, redelivered=True)
        assert shop.runs == [(sent.id, 0)]

    def test_one_that_is_not_is_other_work(self, shop, used_again):
        work = shop.task()
        for _ in range(2):
            work.apply_async(task_id=used_again)
            shop.drain()
        assert shop.runs == [(used_again, 0)] * 2

    def test_no_delivery_answers_for_a_task_that_is_at_work(self, shop, beside):
        sent = shop.task().delay("wait")
        message = shop.next()
        first = beside(shop.deliver, message)
        assert shop.is_working.wait(30)
        shop.deliver(message)
        assert shop.result(sent.id)[0] == "PENDING"
        shop.go.set()
        first.result(30)
        shop.drain()
        assert shop.runs == [(sent.id, 0)]

    def test_a_task_that_succeeds_and_retries_goes_on(self, shop):
        sent = shop.task().delay("retry without raising")
        shop.drain()
        assert shop.runs == [(sent.id, 0), (sent.id, 1), (sent.id, 2)]


def test_a_copy_that_the_broker_does_not_take_goes_back_and_records_nothing(shop, beside, monkeypatch):
    work = shop.task(on_busy="raise")
    sent = work.delay("wait")
    message = shop.next()
    first = beside(shop.deliver, message)
    assert shop.is_working.wait(30)

    def refuse(*_, **__):
        raise OperationalError("the broker is down")

    monkeypatch.setattr(work, "apply_async", refuse)
    shop.deliver(message, redelivered=True)
    assert shop.rejected == [message]
    assert shop.result(sent.id)[0] == "PENDING"
    shop.go.set()
    first.result(30)
    assert shop.result(sent.id) == ("SUCCESS", "wait")


@pytest.mark.parametrize(
    ("visibility_timeout", "remember", "kept"),
    [(None, None, 86_400), (2, None, 86_400), (100_000, None, 100_000), (2, 60, 60), (100, 60, 100)],
)
def test_a_task_that_is_done_is_remembered_for_a_day_or_as_the_setting_says(
    visibility_timeout, remember, kept, shop, settings
):
    """Copies may wait longer than the visibility timeout, behind other tasks."""
    if remember is not None:
        settings.DISTRIBUTED_LOCKS_REMEMBER_TASKS = remember
    if visibility_timeout is not None:
        shop.app.conf.broker_transport_options = {"visibility_timeout": visibility_timeout}
    shop.task().delay()
    shop.drain()
    [mark] = locks["default"].held("django_distlock.done:")
    assert mark.resting
    assert kept - 30 < mark.remaining <= kept


def test_a_task_that_passed_its_lock_on_is_done(shop):
    runs = []

    @shop.app.task(bind=True, name="work", shared=False, acks_late=True)
    @distributed_lock("work")
    def work(self):
        runs.append(self.request.id)
        self.request.lease.detach()

    work.delay()
    message = shop.next()
    shop.deliver(message)
    [info] = locks["default"].held("work")
    assert locks["default"].release(LockRequest(info.name, 30, info.holder, token=info.token))
    shop.deliver(message, redelivered=True)
    assert len(runs) == 1


def test_a_busy_lock_of_others_is_answered_as_ever(shop):
    with ThreadPoolExecutor(1) as pool:
        other = lock("work")
        pool.submit(other.acquire).result()
        sent = shop.task(on_busy="raise").delay()
        shop.drain()
        pool.submit(other.release).result()
    state, error = shop.result(sent.id)
    assert state == "FAILURE"
    assert isinstance(error, LockNotAcquired)


def test_what_is_done_is_remembered_of_the_tenant_whose_lock_it_was(shop, settings):
    of_tenants(settings)
    with tenant("acme"):
        shop.task().delay()
        message = shop.next()
        shop.deliver(message)
        [mark] = locks["default"].held("django_distlock.done:")
        assert (mark.prefix, mark.resting) == ("acme", True)
        shop.deliver(message, redelivered=True)
    assert len(shop.runs) == 1
    with tenant("globex"):
        assert list(locks["default"].held("django_distlock.done:")) == []
