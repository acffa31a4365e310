"""The pauses before tasks that did not get their lock are tried again, and the countdowns that a process may have."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from celery.canvas import Signature

from django_distlock import LockTimeout, distributed_lock, lock, locks
from django_distlock.celery import requeue, tasks
from django_distlock.celery.countdowns import Countdowns
from django_distlock.celery.tasks import REQUEUES
from tests.support.deliveries import Shop
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("locmem_locks")


@pytest.fixture
def shop():
    with Shop() as shop:
        yield shop


@pytest.fixture
def holder(locmem_locks):
    """In another thread, as in another worker."""
    with ThreadPoolExecutor(1) as pool:
        handle = lock("work")
        pool.submit(handle.acquire).result()
        yield lambda: pool.submit(handle.release).result()
        if handle.locked():
            pool.submit(handle.release).result()


class TestStandingBy:
    """Whether a delivery whose lock is busy waits in its worker."""

    @pytest.fixture
    def work(self, shop):
        def work(**options):
            def body():
                shop.runs.append("work")

            guarded = distributed_lock("work", on_busy="retry", **options)(body)
            return shop.app.task(name="work", shared=False)(guarded)

        return work

    def test_it_waits_in_the_queue_of_the_lock_and_runs_when_that_is_free(
        self, shop, work, holder, beside, monkeypatch
    ):
        monkeypatch.setattr(tasks, "STANDS_BY", 60.0)
        work().delay()
        delivered = beside(shop.deliver, shop.next())
        eventually(lambda: locks["default"].count_waiters(["work"]) == [1])
        holder()
        delivered.result(60)
        assert shop.runs == ["work"]
        assert shop.next() is None

    @pytest.mark.usefixtures("holder")
    def test_then_it_is_sent_again(self, shop, work, monkeypatch):
        monkeypatch.setattr(tasks, "STANDS_BY", 0.01)
        sent = work().delay()
        shop.deliver(shop.next())
        assert shop.runs == []
        assert shop.result(sent.id)[0] == "RETRY"
        assert shop.next().headers[REQUEUES] == 1

    @pytest.mark.usefixtures("holder")
    def test_for_as_long_as_it_is_told(self, shop, work, monkeypatch):
        monkeypatch.setattr(tasks, "STANDS_BY", math.inf)  # which no lock accepts
        work(wait=0).delay()
        shop.deliver(shop.next())
        assert shop.next().headers[REQUEUES] == 1


@pytest.mark.usefixtures("holder")
class TestRetryFor:
    """The message has with it since when it waits, for each lock and one attempt. A delivery takes ten seconds."""

    @pytest.fixture(autouse=True)
    def now(self, monkeypatch):
        now = [time.time()]
        monkeypatch.setattr(tasks, "wall_clock", lambda: now[0])
        monkeypatch.setattr(tasks, "STANDS_BY", 0.01)
        return now

    @pytest.fixture
    def deliver(self, shop, now):
        """The next message. Returns its headers, or None."""

        def deliver():
            if message := shop.next():
                shop.deliver(message)
                now[0] += 10
            return message and message.headers

        return deliver

    @pytest.fixture
    def helper(self, shop):
        @distributed_lock("work", on_busy="retry", retry_for=25)
        def helper():
            shop.runs.append("work")

        return helper

    def test_it_ends_where_the_inner_one_of_two_decorators_waits(self, shop, helper, deliver):
        sent = shop.app.task(name="stacked", shared=False)(distributed_lock("outer")(helper)).delay()
        assert [headers[REQUEUES] for headers in [deliver() for _ in range(4)][1:]] == [1, 2, 3]
        assert deliver() is None
        assert shop.result(sent.id)[0] == "FAILURE"

    def test_it_ends_where_a_helper_of_a_guarded_task_waits(self, shop, helper, deliver):
        @shop.app.task(name="calls", shared=False)
        @distributed_lock("outer")
        def task():
            helper()

        sent = task.delay()
        assert [headers[REQUEUES] for headers in [deliver() for _ in range(4)][1:]] == [1, 2, 3]
        assert deliver() is None
        assert shop.result(sent.id)[0] == "FAILURE"

    def test_it_begins_anew_with_a_retry_of_the_task_that_gave_up(self, shop, helper, deliver):
        options = {"autoretry_for": (LockTimeout,), "max_retries": 1, "retry_kwargs": {"countdown": 0}}
        sent = shop.app.task(name="auto", shared=False, **options)(helper).delay()
        assert [deliver()["retries"] for _ in range(8)] == [0] * 4 + [1] * 4
        assert deliver() is None
        assert shop.result(sent.id)[0] == "FAILURE"

    def test_it_begins_anew_where_the_body_goes_on_without_the_lock(self, shop, helper, deliver):
        @shop.app.task(name="goes_on", shared=False)
        def task():
            with suppress(LockTimeout):
                helper()
            helper()

        sent = task.delay()
        assert [headers[REQUEUES] for headers in [deliver() for _ in range(5)][1:]] == [1, 2, 3, 4]
        assert shop.result(sent.id)[0] == "RETRY"

    def test_it_begins_anew_with_a_retry_of_a_task_whose_helper_waited(self, shop, helper, holder, deliver):
        @shop.app.task(name="retries_itself", bind=True, shared=False)
        def task(self):
            helper()
            if not self.request.retries:
                raise self.retry(countdown=0)

        sent = task.delay()
        deliver()
        deliver()
        holder()
        deliver()
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            pool.submit(stack.enter_context, lock("work")).result()
            assert deliver()["retries"] == 1
            pool.submit(stack.close).result()
        assert shop.result(sent.id)[0] == "RETRY"
        deliver()
        assert shop.result(sent.id)[0] == "SUCCESS"
        assert shop.runs == ["work", "work"]


@pytest.mark.usefixtures("holder")
class TestRetryForInTheWorker:
    """No run waits there for longer."""

    @pytest.mark.parametrize("wait", [3600, None])
    @pytest.mark.parametrize("name", ["work", ["other", "work"]], ids=["one lock", "several"])
    def test_it_bounds_the_wait(self, shop, name, wait):
        @shop.app.task(name="waits", shared=False)
        @distributed_lock(name, on_busy="retry", wait=wait, retry_for=0.5)
        def task(): ...

        sent = task.delay()
        shop.deliver(shop.next())
        state, error = shop.result(sent.id)
        assert (state, type(error)) == ("FAILURE", LockTimeout)
        assert shop.next() is None

    def test_it_ends_where_the_pace_left_no_time_to_try_again(self, shop, monkeypatch):
        """Another worker would fail at once, before this one recorded RETRY, which would replace that failure."""
        monkeypatch.setattr(tasks, "STANDS_BY", 0.01)
        monkeypatch.setattr(tasks, "keep_pace", lambda _problem, _label, _message, timeout: time.sleep(timeout - 0.01))

        @shop.app.task(name="waits", shared=False)
        @distributed_lock("work", on_busy="retry", retry_for=0.5)
        def task(): ...

        sent = task.delay()
        shop.deliver(shop.next())
        assert shop.next() is None
        assert shop.result(sent.id)[0] == "FAILURE"


@pytest.mark.usefixtures("holder")
@pytest.mark.skipif(tasks.ignores_result is None, reason="Celery before 5.7 records RETRY at the end alone")
class TestRecordingRetry:
    @pytest.fixture
    def sent(self, shop):
        @shop.app.task(name="work", shared=False)
        @distributed_lock("work", on_busy="retry")
        def task(): ...

        return task.delay()

    def test_what_the_next_run_has_recorded_meanwhile_stays(self, shop, sent, monkeypatch):
        """Another worker may run what was sent before this one goes on."""

        def send_and_see_it_run(message, *args, send=Signature.apply_async, **options):
            result = send(message, *args, **options)
            assert shop.result(sent.id)[0] == "RETRY"
            shop.app.backend.mark_as_failure(sent.id, ValueError("what the next run raised"))
            return result

        monkeypatch.setattr(Signature, "apply_async", send_and_see_it_run)
        shop.deliver(shop.next())
        assert shop.next() is not None
        state, error = shop.result(sent.id)
        assert (state, str(error)) == ("FAILURE", "what the next run raised")

    def test_where_it_fails_the_task_is_sent_again(self, shop, sent, monkeypatch, caplog):
        record, failures = shop.app.backend.mark_as_retry, iter([ConnectionError("no result backend")])

        def fail_once(*args, **kwargs):
            for failure in failures:
                raise failure
            return record(*args, **kwargs)

        monkeypatch.setattr(shop.app.backend, "mark_as_retry", fail_once)
        shop.deliver(shop.next())
        assert "no result backend" in caplog.text
        assert shop.next() is not None
        assert shop.result(sent.id)[0] == "RETRY"

    def test_a_request_without_results_has_none(self, shop):
        @shop.app.task(name="work", shared=False, ignore_result=True)
        @distributed_lock("work", on_busy="retry")
        def task(): ...

        sent = task.delay()
        shop.deliver(shop.next())
        assert shop.next() is not None
        assert shop.result(sent.id)[0] == "PENDING"


def test_a_store_that_is_slower_than_the_moment_of_standing_by_fails_no_task(shop, proxy, settings, monkeypatch):
    """It is asked once more, with the time that a call without a wait has."""
    entry = {"BACKEND": REDIS, "LOCATION": proxy.url, "OPTIONS": {"socket_timeout": 4 * PATIENCE}}
    settings.DISTRIBUTED_LOCKS = {"default": entry}
    monkeypatch.setattr(tasks, "STANDS_BY", 0.05)

    @shop.app.task(name="slow", shared=False)
    @distributed_lock("work", on_busy="retry")
    def task():
        return "done"

    def for_a_moment(run, failure, had_little_time=tasks.Run.had_little_time):
        proxy.slow = 0.0
        return had_little_time(run, failure)

    monkeypatch.setattr(tasks.Run, "had_little_time", for_a_moment)
    with lock("warm"):
        pass
    sent = task.delay()
    proxy.slow = 3.0
    shop.deliver(shop.next())
    assert shop.result(sent.id) == ("SUCCESS", "done")


class TestPause:
    @pytest.mark.parametrize(("requeues", "longest"), [(0, 0.5), (1, 1), (2, 2), (3, 4), (4, 5), (8, 5), (10_000, 5)])
    def test_it_grows_to_five_seconds_and_is_scattered(self, requeues, longest):
        pauses = [requeue.pause_before(requeues, math.inf) for _ in range(200)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
        assert max(pauses) - min(pauses) > longest / 4

    def test_it_is_no_longer_than_the_longest(self):
        assert max(requeue.pause_before(9, 1.5) for _ in range(200)) <= 1.5

    @pytest.mark.parametrize(
        ("held_for", "remaining", "longest"),
        [(0.0, 30.0, 0.5), (3.0, 30.0, 3.0), (60.0, 1.5, 1.5), (60.0, 0.0, 0.1), (60.0, None, 60.0), (-5.0, None, 0.5)],
        ids=["just taken", "for a while", "ends soon", "ends now", "no lease is told", "clock behind"],
    )
    def test_a_lock_that_was_held_for_long_is_tried_later(self, held_for, remaining, longest):
        assert requeue.longest_pause(held_for, remaining) == longest


class TestCountdowns:
    def test_there_are_as_many_at_a_time_as_a_process_may_have(self):
        countdowns = Countdowns()
        assert [countdowns.take(60.0), countdowns.take(60.0)] == [True, False]
        countdowns.most = 3
        assert [countdowns.take(60.0), countdowns.take(60.0), countdowns.take(60.0)] == [True, True, False]

    def test_one_that_is_over_counts_no_more(self):
        countdowns = Countdowns()
        assert [countdowns.take(0.0), countdowns.take(60.0), countdowns.take(0.0)] == [True, True, False]
