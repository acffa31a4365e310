"""Guarded tasks, of Celery and of django.tasks, as far as no worker is needed to see what they do."""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

import pytest
from celery import Celery, current_app, shared_task, uuid
from celery import Task as CeleryTask
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Retry
from celery.signals import worker_init, worker_process_init

from django_distlock import (
    Lock,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockTimeout,
    distributed_lock,
    lock,
    lock_all,
    locks,
)
from django_distlock.celery import countdowns, requeue, tasks
from django_distlock.celery.messages import HEADER
from django_distlock.celery.tasks import REQUEUES, WAITS, Run
from django_distlock.decorators import task_context
from django_distlock.options import DEFAULTS, settled
from django_distlock.testing import store_down
from tests.support.leases import request_of
from tests.support.tools import PATIENCE

pytestmark = pytest.mark.usefixtures("locmem_locks")


@pytest.fixture(autouse=True)
def current():
    previous = current_app._get_current_object()
    yield
    previous.set_current()


@pytest.fixture
def app():
    with Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        # Tasks of one name in several tests: not shared, or they would be registered in every app.
        app.task = partial(app.task, shared=False)
        yield app


def labels():
    return [info.holder.label for info in locks["default"].held()]


def elsewhere(function, *args):
    """In another thread, which does not own what this one holds."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(function, *args).result()


class TestDecorating:
    def test_above_shared_task_it_says_to_go_below(self, app):
        app.set_current()  # the autouse fixture sets it back

        @shared_task(name="tests.above")
        def work():
            pass

        with pytest.raises(TypeError, match="put above @shared_task, on the task tests.above.*Put it below"):
            distributed_lock("name")(work)

    def test_above_a_task_of_an_app_too(self, app):
        @app.task(name="tests.above")
        def work():
            pass

        with pytest.raises(TypeError, match="put above @shared_task"):
            distributed_lock("name")(work)

    @pytest.mark.parametrize("arguments", [(), (1, 2, 3), ("no such",)])
    def test_wrong_arguments_raise_where_the_task_is_sent(self, app, arguments):
        @app.task()
        @distributed_lock("order:{order_id}", on_busy="retry")
        def work(order_id, note): ...

        with pytest.raises(TypeError):
            work.delay(*arguments)

    @pytest.mark.parametrize("arguments", [(), (1, 2)])
    def test_wrong_arguments_raise_for_a_bound_task_too(self, app, arguments):
        @app.task(bind=True)
        @distributed_lock("order:{order_id}")
        def work(self, order_id): ...

        with pytest.raises(TypeError):
            work.delay(*arguments)

    def test_the_method_of_a_task_class(self, app):
        class Work(CeleryTask):
            name = "tests.of_a_class"

            @distributed_lock("order:{order_id}")
            def run(self, order_id):
                return self.request.lease.name, labels()

        task = app.register_task(Work())
        assert task.apply((7,), task_id="the-id").get() == ("order:7", ["tests.of_a_class[the-id]"])

    def test_a_name_that_is_made_of_the_bound_task(self, app):
        @app.task(bind=True, name="tests.named")
        @distributed_lock(name=lambda self, pk: f"{self.name}:{pk}")
        def work(self, pk):
            return self.request.lease.name

        assert work.apply((7,)).get() == "tests.named:7"


class TestRunning:
    def test_its_lease_is_at_the_request_while_it_runs(self, app):
        @app.task(bind=True, autoretry_for=(KeyError,))
        @distributed_lock("name")
        def work(self):
            self.request.lease.ensure_held()
            return self.request.lease

        lease = work.apply().get()
        assert lease.state == "released"

    def test_what_celery_calls_after_its_body_finds_no_lease_there(self, app):
        class Base(CeleryTask):
            def on_success(self, *_):
                found.append(self.request.lease)

        @app.task(bind=True, base=Base)
        @distributed_lock("name")
        def work(self):
            found.append(self.request.lease)

        found = []
        work.apply().get()
        assert [lease and lease.name for lease in found] == ["name", None]

    def test_a_helper_of_the_task_holds_a_lock_by_the_tasks_name(self, app):
        @distributed_lock("helper")
        def helper():
            return labels()

        @app.task(bind=True, name="tests.with_helper")
        @distributed_lock("name")
        def work(self):
            assert self.request.lease.name == "name"
            return helper()

        assert work.apply(task_id="the-id").get() == ["tests.with_helper[the-id]"] * 2

    def test_a_lock_inside_of_a_task_has_the_tasks_name(self, app):
        @app.task(name="tests.with_lock")
        def work():
            with lock("name"):
                return labels()

        assert work.apply(task_id="the-id").get() == ["tests.with_lock[the-id]"]

    def test_what_a_task_calls_under_the_decorator_has_the_tasks_name(self, app):
        @distributed_lock("name")
        async def acalled():
            return labels()

        @distributed_lock("name")
        def iterated():
            yield from labels()

        @app.task(name="tests.calls")
        def work():
            return [*asyncio.run(acalled()), *iterated()]

        assert work.apply(task_id="the-id").get() == ["tests.calls[the-id]"] * 2

    def test_a_label_of_ones_own_stands_before_it(self, app):
        @app.task(name="tests.labelled")
        @distributed_lock("name", label="nightly report")
        def work():
            return labels()

        assert work.apply(task_id="the-id").get() == ["nightly report tests.labelled[the-id]"]

    def test_called_like_a_function_it_has_no_id(self, app):
        @app.task(name="tests.called")
        @distributed_lock("name")
        def work():
            return labels()

        assert work() == ["tests.called"]

    def test_a_function_outside_tasks_is_called_what_it_was(self):
        @distributed_lock("name")
        def work():
            return labels()

        assert work() == [f"{__name__}.{work.__qualname__}"]


class TestBusy:
    @pytest.fixture
    def work(self, app):
        @app.task(max_retries=0)
        @distributed_lock("name", on_busy="retry")
        def work():
            return "done"

        return work

    @pytest.mark.parametrize(
        "call", [lambda work: work(), lambda work: work.apply(throw=True), lambda work: work.apply().get()]
    )
    def test_where_no_worker_runs_it_retry_raises_at_once(self, work, call):
        with lock("name"), pytest.raises(LockNotAcquired, match="held by") as caught:
            elsewhere(call, work)
        assert caught.type is LockNotAcquired  # and no LockTimeout

    def test_always_eager_it_raises(self, work, app):
        app.conf.task_always_eager = app.conf.task_eager_propagates = True
        with lock("name"), pytest.raises(LockNotAcquired):
            elsewhere(work.delay)
        assert work.delay().get() == "done"

    def test_a_plain_function_that_retries_raises(self):
        with lock("name"), pytest.raises(LockNotAcquired):
            elsewhere(distributed_lock("name", on_busy="retry")(lambda: None))

    def test_the_error_travels_between_processes_with_all_it_says(self):
        with lock("name", label="somebody"), pytest.raises(LockNotAcquired) as caught:
            elsewhere(distributed_lock("name")(lambda: None))
        copy = pickle.loads(pickle.dumps(caught.value))
        assert str(copy) == str(caught.value)
        assert copy.holder == caught.value.holder
        assert copy.retry_after == caught.value.retry_after > 25


class TestUnavailable:
    @pytest.fixture
    def work(self, app):
        @app.task(max_retries=0)
        @distributed_lock("name", on_unavailable="retry")
        def work():
            return "done"

        return work

    @pytest.mark.parametrize("call", [lambda work: work(), lambda work: work.apply().get()])
    def test_where_no_worker_runs_it_retry_raises(self, work, call):
        with store_down(), pytest.raises(LockBackendError):
            call(work)
        assert call(work) == "done"

    def test_it_decides_also_where_the_store_fails_when_it_is_asked_who_has_the_lock(self, work, monkeypatch):
        def fail(run, busy, *, retries):
            raise LockBackendError("down")

        def retry(run, problem, retry_for):
            raise Retry(exc=problem)

        monkeypatch.setattr(Run, "handle_busy", fail)
        monkeypatch.setattr(Run, "retry", retry)
        with lock("name"), pytest.raises(Retry) as caught:
            elsewhere(work)
        assert isinstance(caught.value.exc, LockBackendError)

    def test_a_time_for_what_is_not_sent_again_is_refused(self):
        for options in ({}, {"on_busy": "skip"}, {"on_busy": "skip", "on_unavailable": "run"}):
            with pytest.raises(ValueError, match="retry_for is for tasks that are sent again"):
                distributed_lock("name", retry_for=5, **options)
        for wrong in (0, -1, "5", math.nan):
            with pytest.raises(ValueError, match="retry_for is .* It is the number of seconds for which a task waits"):
                distributed_lock("name", on_busy="retry", retry_for=wrong)

    def test_what_can_be_no_task_is_refused(self):
        async def coroutine(): ...

        def generator():
            yield

        for function in (coroutine, generator):
            with pytest.raises(ValueError, match="on_unavailable is 'retry', which sends tasks of Celery again, and "):
                distributed_lock("name", on_unavailable="retry")(function)

    def test_the_task_has_its_lease(self, app):
        @app.task(bind=True, acks_late=True)
        @distributed_lock("name", on_unavailable="run")
        def work(self):
            with pytest.raises(LockNotHeld):
                self.request.lease.ensure_held()
            return self.request.lease.fence, self.request.lease.is_held

        with store_down():
            assert work.apply().get() == (0, False)


class TestSentAgain:
    """A run as a worker makes it, with what is published in a list."""

    @pytest.fixture
    def run(self, app):
        sent = []

        @app.task(bind=True, name="tests.again", acks_late=True)
        @distributed_lock("name")
        def work(self): ...

        work.apply_async = lambda args, kwargs, **options: sent.append(options)  # what the signature ends in

        def make(**request):
            given = {"id": "the-id", "args": (), "kwargs": {}, "called_directly": False, "is_eager": False, **request}
            work.push_request(**given)
            run = Run(work, work.run.__func__)
            run.waiting(["name"], DEFAULTS, None)
            return run

        make.sent = sent
        return make

    def busy(self, message=""):
        held = Lock("name", "default", settled(), message=message)
        with held, pytest.raises(LockNotAcquired) as caught:
            elsewhere(distributed_lock("name")(lambda: None))
        return caught.value

    @pytest.fixture(autouse=True)
    def no_countdown(self, monkeypatch):
        """Is under way when a test begins."""
        monkeypatch.setattr(countdowns, "clock", lambda: 0.0)  # none of them ends before the test does
        fresh = countdowns.Countdowns()
        for module in (countdowns, requeue):
            monkeypatch.setattr(module, "countdowns", fresh)
        monkeypatch.setattr(requeue, "sleep", lambda seconds: None)

    def test_a_retry_keeps_what_the_message_had_and_spends_no_retry(self, run):
        began = time.time()
        with pytest.raises(Retry):
            run(
                retries=2, headers={"mine": 1}, group="the-group", delivery_info={"routing_key": "q", "exchange": ""}
            ).retry(self.busy(), None)
        [options] = run.sent
        assert (options["retries"], options["task_id"], options["group_id"]) == (2, "the-id", "the-group")
        [attempt, waits] = options["headers"].pop(WAITS)
        assert attempt == 2
        assert began <= waits.pop("name") <= time.time()
        assert waits == {}
        assert options["headers"] == {"mine": 1, REQUEUES: 1}
        assert options["queue"] == "q"
        assert 0.25 <= options["countdown"] <= 0.5

    def test_a_process_has_one_countdown_under_way_and_sends_others_to_the_end_of_the_queue(self, run):
        """Each would wait in a worker, unacknowledged, and let it take one more."""
        for _ in range(3):
            with pytest.raises(Retry):
                run().retry(self.busy(), None)
        assert [options["countdown"] is None for options in run.sent] == [False, True, True]
        assert not requeue.countdowns.take(0.0)

    def test_one_whose_worker_has_threads_has_as_many(self, run):
        worker_init.send(sender=type("Worker", (), {"concurrency": 2}))
        for _ in range(3):
            with pytest.raises(Retry):
                run().retry(self.busy(), None)
        assert [options["countdown"] is None for options in run.sent] == [False, False, True]

    def test_a_new_child_has_none_at_first(self, run):
        """With max_tasks_per_child=1 it follows one that has just sent a message."""
        worker_process_init.send(sender=None)
        with pytest.raises(Retry):
            run().retry(self.busy(), None)
        assert [options["countdown"] for options in run.sent] == [None]
        assert requeue.countdowns.most == 1

    @pytest.mark.parametrize(
        ("write", "exchange"),
        [
            ("amqp://nowhere.invalid", "topic"),
            ("amqp://nowhere.invalid", "direct"),
            ("redis://nowhere.invalid", "topic"),
        ],
    )
    def test_rabbitmqs_own_delays_are_whole_seconds_and_any_number_of_them(self, write, exchange, run, app):
        """Celery cuts them, and RabbitMQ knows no delay of 0. Behind a direct exchange a worker waits."""
        app.conf.broker_write_url, app.conf.task_default_queue_type = write, "quorum"
        app.conf.task_default_exchange_type = exchange
        for requeues in (0, 1, 9):
            with pytest.raises(Retry):
                run(headers={REQUEUES: requeues}).retry(self.busy(), None)
        pauses = [options["countdown"] for options in run.sent]
        if (write, exchange) == ("amqp://nowhere.invalid", "topic"):
            assert all(pause.is_integer() and pause >= 1 for pause in pauses)
        else:
            assert pauses[0] < 1
            assert pauses[1:] == [None, None]

    def test_so_does_one_whose_store_is_away_with_growing_pauses(self, run):
        requeue.countdowns.most = 2
        for requeues in (0, 9):
            with pytest.raises(Retry) as caught:
                run(retries=2, headers={REQUEUES: requeues}).retry(LockBackendError("away"), None)
            assert isinstance(caught.value.exc, LockBackendError)
        assert [options["retries"] for options in run.sent] == [2, 2]
        assert [options["headers"][REQUEUES] for options in run.sent] == [1, 10]
        assert run.sent[0]["countdown"] <= 0.5 < 2.5 <= run.sent[1]["countdown"] <= 5

    def test_tasks_that_wait_for_one_lock_are_sent_at_a_pace(self, run, monkeypatch):
        """Each keeps others from it for a while, if there is a store that can tell them."""
        monkeypatch.setattr(requeue, "PACE", 1 / PATIENCE)
        with pytest.raises(Retry):
            run().retry(self.busy(), None)
        assert [info.name for info in locks["default"].held("django_distlock.requeue:")] == [
            "django_distlock.requeue:name"
        ]
        with store_down(), pytest.raises(Retry):
            run().retry(LockNotAcquired("busy", name="name", using="default"), None)
        assert len(run.sent) == 2

    def test_after_its_time_it_fails(self, run):
        busy, since = self.busy(), time.time() - 60
        waits = {WAITS: [2, {"name": since}], REQUEUES: 7}
        with pytest.raises(Retry):
            run(retries=2, headers=waits).retry(busy, 3600)
        text = r"^The task did not get its lock for 60\.\d s, and was sent again 7 times in all\. .*held by"
        with pytest.raises(LockTimeout, match=text) as caught:
            run(retries=2, headers=waits).retry(busy, 30)
        assert vars(caught.value) == vars(busy)
        with pytest.raises(LockBackendError, match="away"):
            run(retries=2, headers=waits).retry(LockBackendError("away"), 30)
        [options] = run.sent
        assert options["headers"][WAITS] == [2, {"name": since}]

    def test_it_is_tried_once_more_at_the_end_of_its_time(self, run, monkeypatch):
        now = round(time.time())
        monkeypatch.setattr(tasks, "wall_clock", lambda: now)
        with pytest.raises(Retry):
            run(retries=0, headers={REQUEUES: 9, WAITS: [0, {"name": now - 60}]}).retry(self.busy(), 60.25)
        assert run.sent[0]["countdown"] <= 0.25

    def test_what_waits_for_the_pace_has_less_time_for_its_countdown(self, run, monkeypatch):
        def wait(problem, label, message, timeout):
            now[0] += timeout - 0.25

        now = [round(time.time())]
        monkeypatch.setattr(tasks, "wall_clock", lambda: now[0])
        monkeypatch.setattr(tasks, "keep_pace", wait)
        monkeypatch.setattr(requeue, "longest_pause", lambda held_for, remaining: math.inf)
        with pytest.raises(Retry):
            run(headers={REQUEUES: 9}).retry(self.busy(), 1.0)
        assert run.sent[0]["countdown"] <= 0.25

    def test_one_that_has_another_lock_does_not_keep_that_from_others_for_the_pace(self, run, monkeypatch):
        monkeypatch.setattr(tasks, "keep_pace", lambda *_: pytest.fail("It waits."))
        requeue.countdowns.take(60.0)
        busy = self.busy()
        with lock("outer"), pytest.raises(Retry):
            run().retry(busy, None)
        assert 0.25 <= run.sent[0]["countdown"] <= 0.5

    def test_it_waits_in_its_worker_for_no_longer_than_it_may_wait_at_all(self, run):
        def wait(retry_for, waited=0.0, **given):
            waits = {"name": time.time() - waited} if waited else {}
            again = run(retries=1, headers={WAITS: [1, waits]})
            return again.waiting(["name"], settled(**given), retry_for).own.wait

        assert wait(60, wait=3) == 3
        assert 59 < wait(60, wait=100) <= 60
        assert 9 < wait(60, wait=100, waited=50) <= 10
        assert 59 < wait(60, wait=None) <= 60
        assert wait(60, wait=100, waited=70) == 0
        assert wait(None, wait=None) is None

    def test_a_lock_that_it_gets_ends_the_wait_for_that_lock_alone(self, run):
        headers = {WAITS: [0, {"name": 1.0, "inner": 2.0}], REQUEUES: 3}
        again = run(retries=0, headers=headers)
        with lock("name") as lease, again.holding(lease):
            pass
        with pytest.raises(Retry):
            again.retry(self.busy(), 60)
        [options] = run.sent
        [_, waits] = options["headers"][WAITS]
        assert waits.pop("name") > 2
        assert waits == {"inner": 2.0}

    def test_a_retry_of_the_task_waits_anew(self, run):
        with pytest.raises(Retry):
            run(retries=1, headers={WAITS: [0, {"name": 1.0}]}).retry(self.busy(), 60)
        assert run.sent[0]["headers"][WAITS][1]["name"] > 1

    def test_it_does_not_meet_others(self, run):
        run(retries=1).handle_busy(self.busy("other-id."), retries=False)
        assert run.sent == []

    def test_a_retry_that_meets_itself_is_sent_again_and_records_nothing(self, run):
        mine = {HEADER: "the-id.1234"}
        with pytest.raises(Ignore):
            run(retries=1, headers={REQUEUES: 3, **mine}).handle_busy(self.busy("the-id.1234"), retries=False)
        [options] = run.sent
        assert options["headers"] == {REQUEUES: 4, **mine}
        assert options["retries"] == 1

    def test_it_has_a_countdown_that_grows_also_beside_others_of_its_process(self, run):
        """Copies of long tasks would be delivered again at once, for as long as those work."""
        busy = self.busy("the-id.1234")
        busy.holder = busy.holder._replace(since=time.time() - 3600)
        busy.retry_after = None
        requeue.countdowns.take(60.0)
        for requeues, shortest in ((0, 0.25), (9, 2.5)):
            with pytest.raises(Ignore):
                run(headers={REQUEUES: requeues, HEADER: "the-id.1234"}).handle_busy(busy, retries=True)
            assert shortest <= run.sent[-1]["countdown"] <= 2 * shortest
        requeue.countdowns.most = 2
        assert requeue.countdowns.take(60.0)

    def test_so_does_one_that_was_refused_because_others_of_its_process_wait(self, run):
        """The store was not asked then who has the lock."""
        crowded = LockNotAcquired(reason="crowded", name="name", using="default")
        with Lock("name", "default", settled(), message="the-id.1234"), pytest.raises(Ignore):
            run(headers={HEADER: "the-id.1234"}).handle_busy(crowded, retries=False)
        assert len(run.sent) == 1

    def test_one_that_is_done_is_not_skipped_either(self, run):
        with lock("name") as lease, run().holding(lease):
            pass
        with pytest.raises(Ignore):
            run(delivery_info={"redelivered": True}).handle_busy(self.busy(), retries=False)

    def test_one_with_several_locks_is_done_by_each_of_them(self, run):
        with lock_all(lock("b"), lock("a"), lock("b")) as leases, run().holding(leases):
            pass
        marks = sorted(info.name for info in locks["default"].held("django_distlock.done:"))
        assert len(marks) == 2
        for name in "ab":
            busy = LockNotAcquired("busy", name=name, using="default")
            with pytest.raises(Ignore):
                run(delivery_info={"redelivered": True}).handle_busy(busy, retries=False)

    def test_one_that_raised_is_not_done(self, run):
        with pytest.raises(KeyError), lock("name") as lease, run().holding(lease):
            raise KeyError
        with lock("name") as lease, run(delivery_info={"redelivered": True}).holding(lease):
            pass

    def test_one_that_lost_its_lock_is_not_done(self, run):
        with pytest.raises(LockLost), lock("name") as lease, run().holding(lease):
            assert locks[lease.using].release(request_of(lease))
            with pytest.raises(LockLost):
                lease.renew()
        assert list(locks["default"].held("django_distlock.done:")) == []


@pytest.mark.parametrize("imported", ["", "import celery"])
def test_celery_is_reached_by_tasks_alone(imported):
    code = (
        f"import sys; from django.conf import settings; settings.configure(DEBUG=True); {imported}\n"
        "from django_distlock import distributed_lock\n"
        "distributed_lock('name', on_busy='retry')(lambda: None)()\n"
        f"assert ('celery' in sys.modules) == {bool(imported)}\n"
        "assert 'django_distlock.celery.tasks' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestDjangoTasks:
    @pytest.fixture(autouse=True)
    def module(self, monkeypatch):
        pytest.importorskip("django.tasks", reason="Django 6 has them")
        module = types.ModuleType("guarded_tasks")  # functions of tasks are at the top of a module
        exec(
            "from django.tasks import task\n"
            "from django_distlock import distributed_lock, locks\n"
            "def labels(): return [info.holder.label for info in locks['default'].held()]\n"
            "@task\n@distributed_lock('job:{pk}', on_busy='skip')\n"
            "def plain(pk): return labels()\n"
            "@task(takes_context=True)\n@distributed_lock('job:{pk}', on_busy='raise')\n"
            "def with_context(context, pk): return labels()\n"
            "@task\n@distributed_lock('job:{pk}')\n"
            "async def awaited(pk): return [info.name async for info in locks['default'].aheld()]\n"
            "@task(takes_context=True)\n@distributed_lock('job:{pk}')\n"
            "async def awaited_with_context(context, pk): return labels()\n",
            vars(module),
        )
        monkeypatch.setitem(sys.modules, "guarded_tasks", module)
        return module

    def test_above_a_task_it_says_to_go_below(self, module):
        with pytest.raises(TypeError, match="put above @task, on the task plain"):
            distributed_lock("name")(module.plain)

    def test_it_holds_the_lock_while_it_runs(self, module):
        assert module.plain.enqueue(7).return_value == ["guarded_tasks.plain"]
        assert labels() == []

    def test_with_its_context_it_is_known_by_name_and_id(self, module):
        result = module.with_context.enqueue(7)
        assert result.return_value == [f"guarded_tasks.with_context[{result.id}]"]

    def test_async(self, module):
        assert module.awaited.enqueue(7).return_value == ["job:7"]
        result = asyncio.run(module.awaited_with_context.aenqueue(pk=7))
        assert result.return_value == [f"guarded_tasks.awaited_with_context[{result.id}]"]

    def test_busy_it_answers_as_it_was_told(self, module):
        with lock("job:7"):
            assert elsewhere(module.plain.enqueue, 7).return_value is None
            [error] = elsewhere(module.with_context.enqueue, 7).errors
            assert error.exception_class is LockNotAcquired
            [error] = elsewhere(module.awaited.enqueue, 7).errors
            assert error.exception_class is LockNotAcquired

    def test_wrong_arguments_fail_the_task_before_any_lock(self, module):
        [error] = module.plain.enqueue().errors
        assert error.exception_class is TypeError


class TestBodyOfAUniqueTask:
    """Of django.tasks: who runs it has said which function that is, and what to call when it begins."""

    @pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped"])
    @pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
    def test_it_begins_once_and_with_its_lock(self, is_async, is_wrapped):
        @distributed_lock("helper")
        def helper(): ...

        @distributed_lock("helper")
        async def ahelper(): ...

        @distributed_lock("name")
        def body():
            helper()

        @distributed_lock("name")
        async def abody():
            await ahelper()

        def run():
            task_context.unique_body.set((outermost, lambda: begun.append(lock("name").locked())))
            if is_async:
                asyncio.run(outermost())
            else:
                outermost()

        guarded, begun = abody if is_async else body, []
        outermost = functools.wraps(guarded)(lambda: guarded()) if is_wrapped else guarded
        copy_context().run(run)
        assert begun == [True]


class TestInAWorker:
    """By what a worker calls for a message that it has got."""

    def deliver(self, app, task):
        task_id = uuid()  # all apps of a process share the results in memory
        build_tracer(task.name, task, app=app)(task_id, (), {}, {"id": task_id, "delivery_info": {}})
        return app.AsyncResult(task_id)

    def test_a_wrong_setting_is_told_before_the_work_is_done(self, app, settings):
        settings.DISTRIBUTED_LOCKS_REMEMBER_TASKS = "1h"
        done = []

        @app.task(name="tests.remembered", acks_late=True)
        @distributed_lock("name")
        def work():
            done.append(1)

        result = self.deliver(app, work)
        assert result.state == "FAILURE"
        assert "DISTRIBUTED_LOCKS_REMEMBER_TASKS is '1h'" in str(result.result)
        assert done == []

    def test_a_name_that_meets_a_busy_lock_itself(self, app):
        @distributed_lock("shard")
        def shard():
            return "1"

        @app.task(name="tests.sharded")
        @distributed_lock(name=lambda: shard(), on_busy="skip")
        def work():
            return "done"

        holder = lock("shard")
        elsewhere(holder.acquire)
        result = self.deliver(app, work)
        assert (result.state, result.result) == ("SUCCESS", None)
        elsewhere(holder.release)
        assert work.apply().get() == "done"
