"""Tasks of django.tasks that are in the queue once: what is queued, what runs, and what is left of it."""

from __future__ import annotations

import logging
import pickle
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django import VERSION
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import transaction
from django.db.models.expressions import RawSQL
from django.utils import timezone

from django_distlock import InvalidLockName, LockBackendError, LockTimeout, lock, locks
from django_distlock.exceptions import InvalidLockBackend, TaskAlreadyQueued
from django_distlock.signals import lock_busy
from django_distlock.testing import store_down
from django_distlock.types import NOT_WAITING, Grant, Holder, LockRequest
from django_distlock.unique import options
from django_distlock.unique.queued import FIELD, QueuedLease
from django_distlock.utils.clock import wall_clock
from tests.support.stores import LOCMEM
from tests.support.tenants import of_tenants, tenant
from tests.support.tools import eventually

if VERSION < (6, 0):
    pytest.skip("django.tasks comes with Django 6", allow_module_level=True)

from django.tasks import TaskResultStatus, task_backends
from django.tasks.backends.immediate import ImmediateBackend
from django.tasks.exceptions import InvalidTaskBackend
from django.tasks.signals import task_enqueued, task_finished, task_started
from django_tasks_db.backend import DatabaseBackend
from django_tasks_db.management.commands.db_worker import Worker
from django_tasks_db.models import DBTaskResult

from django_distlock.django_tasks import unique_task, unique_tasks
from tests.support import tasks_of_django as tasks

READY, RUNNING, SUCCESSFUL, FAILED = (
    TaskResultStatus[name] for name in ("READY", "RUNNING", "SUCCESSFUL", "FAILED")
)  # fmt: skip
DATABASE = {"default": {"BACKEND": "django_tasks_db.backend.DatabaseBackend"}}
IMMEDIATE = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}


@pytest.fixture(autouse=True, params=["locmem_locks", "valkey_locks"])
def store(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def runs():
    tasks.runs.clear()
    return tasks.runs


@pytest.fixture
def rows(settings, db):
    settings.TASKS = DATABASE
    return DBTaskResult.objects


@pytest.fixture
def committed_rows(settings, transactional_db):
    settings.TASKS = DATABASE
    return DBTaskResult.objects


@pytest.fixture
def immediate(settings):
    settings.TASKS = IMMEDIATE


class OwnIds(DatabaseBackend):
    def _get_id(self):
        return uuid.uuid4()


class OwnRows(DatabaseBackend):
    def enqueue(self, task, args, kwargs):
        row = DBTaskResult.objects.create(
            args_kwargs={"args": args, "kwargs": kwargs}, task_path=task.module_path, run_after=timezone.now(),
            backend_name=self.alias,
        )  # fmt: skip
        return row.task_result


def work_off(times=None):
    """What waits in the table, as a worker does."""
    Worker(
        queue_names=["*"], interval=0, batch=True, backend_name="default", startup_delay=False, max_tasks=times,
        worker_id="worker", excluded_queue_names=[],
    ).run()  # fmt: skip


def names():
    return sorted(info.name for info in locks["default"].held())


def remaining(name="unique:work:7"):
    [[info]] = locks["default"].look([name])
    return info.remaining


@pytest.fixture
def brief(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "TTL": 0.5}}


def begun_by_one_that_is_killed(row, ttl=None):
    """A worker has exchanged the lease of the message for one that nobody renews."""
    queued = QueuedLease.from_text(row.args_kwargs["kwargs"][FIELD])
    succession = queued.succession
    holder = Holder.here(f"{row.task_path}[{row.pk}]", message=queued.message)
    request = LockRequest(queued.request.name, ttl or succession.ttl, holder, deadline=NOT_WAITING)
    assert isinstance(succession.backend.exchange(queued.request, request), Grant)
    return succession, request


def result(task, sent):
    found = task.get_result(sent.id)
    return found.status, found.return_value if found.status == SUCCESSFUL else None


@pytest.mark.usefixtures("rows")
class TestQueueing:
    def test_the_second_one_is_the_first(self, rows, runs):
        first, second, other = tasks.work.enqueue(7), tasks.work.enqueue(number=7), tasks.work.enqueue(8)
        assert second.id == first.id != other.id
        assert second.status == READY
        assert rows.count() == 2
        work_off()
        assert runs == [(7, "return"), (8, "return")]
        assert result(tasks.work, first) == (SUCCESSFUL, "return")
        assert names() == []
        assert tasks.work.enqueue(7).id != first.id

    def test_who_has_it_is_told(self):
        assert tasks.work.unique_find(7) is None
        sent = tasks.work.enqueue(7, "look")
        found = tasks.work.unique_find(7)
        assert (found.task_id, found.state, found.info.name) == (sent.id, "queued", "unique:work:7")
        assert found.info.holder.label == f"queued: tests.support.tasks_of_django.work[{sent.id}]"
        work_off()
        assert result(tasks.work, sent) == (SUCCESSFUL, [sent.id, "running"])
        assert tasks.work.unique_find(7) is None

    def test_a_duplicate_of_one_that_runs(self):
        sent = tasks.work.enqueue(7, "again")
        work_off()
        assert result(tasks.work, sent) == (SUCCESSFUL, sent.id)

    def test_a_duplicate_may_raise(self):
        first = tasks.work.enqueue(7)
        with pytest.raises(TaskAlreadyQueued, match=f"the task {first.id} is queued") as raised:
            tasks.raising.enqueue(7)
        assert (raised.value.task_id, raised.value.name) == (first.id, "unique:work:7")

    def test_a_duplicate_may_be_dropped(self, caplog):
        told = []

        def receiver(name, reason, holder, **_):
            told.append((name, reason, holder.label))

        lock_busy.connect(receiver)
        first = tasks.dropping.enqueue(7)
        with caplog.at_level(logging.INFO, "django_distlock"):
            assert tasks.dropping.enqueue(7) is None
        assert told == [("unique:work:7", "duplicate", f"queued: {tasks.dropping.module_path}[{first.id}]")]
        assert f"the task {first.id} is queued" in caplog.text

    def test_a_name_that_somebody_else_locks(self, rows):
        with lock("unique:work:7"):
            assert tasks.work.enqueue(7) is None
            assert tasks.work.unique_find(7).task_id == ""
        assert rows.count() == 0

    def test_it_can_be_bypassed(self, runs):
        beside = tasks.work.using(unique=False)
        first, second, third = tasks.work.enqueue(7), beside.enqueue(7), beside.using(priority=5).enqueue(7)
        assert len({first.id, second.id, third.id}) == 3
        assert beside.unique_find(7).task_id == beside.using(unique=True).enqueue(7).id == first.id
        work_off()
        assert runs == [(7, "return")] * 3
        assert names() == []

    def test_the_options_of_a_task_stay(self, rows):
        tasks.work.using(priority=5).enqueue(7)
        assert rows.get().priority == 5
        assert tasks.work.using(priority=7).enqueue(7).id == str(rows.get().id)

    def test_the_name_lasts_for_its_ttl_once_it_is_queued(self, monkeypatch):
        seen, real = [], DatabaseBackend.enqueue

        def enqueue(self, task, args, kwargs):
            seen.append(remaining())
            return real(self, task, args, kwargs)

        monkeypatch.setattr(DatabaseBackend, "enqueue", enqueue)
        tasks.work.enqueue(7)
        assert seen[0] <= 30
        assert 900 < remaining() <= 1000

    def test_and_as_long_as_the_message_waits(self):
        tasks.work.using(run_after=timezone.now() + timedelta(seconds=500)).enqueue(7)
        assert 1400 < remaining() <= 1500

    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
    def test_what_cannot_be_queued_is_free_again(self, monkeypatch, kind):
        def fail(*_):
            raise kind("no table")

        with monkeypatch.context() as patched:
            patched.setattr(DatabaseBackend, "enqueue", fail)
            with pytest.raises(kind):
                tasks.work.enqueue(7)
        eventually(lambda: names() == [])
        assert tasks.work.enqueue(7).status == READY

    def test_queueing_that_took_longer_than_the_ttl(self, settings, monkeypatch):
        """Its lease has ended then; the worker takes the name anew."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "TTL": 0.3}}
        real = DatabaseBackend.enqueue

        def enqueue(self, task, args, kwargs):
            time.sleep(0.5)
            return real(self, task, args, kwargs)

        monkeypatch.setattr(DatabaseBackend, "enqueue", enqueue)
        sent = tasks.work.enqueue(7, "look")
        assert names() == []
        work_off()
        assert result(tasks.work, sent) == (SUCCESSFUL, [sent.id, "running"])
        assert names() == []

    @pytest.mark.parametrize("task", [tasks.work, tasks.whole, tasks.constant, tasks.by_callable])
    def test_arguments_are_checked(self, task, rows):
        for refused in (lambda: task.enqueue(7, nothing=1), lambda: task.unique_find(7, 8, 9)):
            with pytest.raises(TypeError):
                refused()
        assert (names(), rows.count()) == ([], 0)

    @pytest.mark.parametrize("kind", [uuid.UUID, str])
    def test_ids_are_made_as_the_backend_is_told(self, settings, kind):
        made = []

        def make():
            made.append(kind(str(uuid.uuid1())))
            return made[-1]

        settings.TASKS = {"default": {**DATABASE["default"], "OPTIONS": {"id_function": make}}}
        assert tasks.work.enqueue(7).id == str(made[0])

    def test_ids_that_the_database_would_make(self, settings, runs):
        """They would be known too late."""
        made = RawSQL("no_such_function()", ())
        settings.TASKS = {"default": {**DATABASE["default"], "OPTIONS": {"id_function": lambda: made}}}
        sent = tasks.work.enqueue(7)
        assert tasks.work.unique_find(7).task_id == sent.id
        work_off()
        assert runs == [(7, "return")]

    @pytest.mark.parametrize("backend", ["OwnIds", "OwnRows"])
    def test_a_backend_that_makes_others(self, settings, rows, backend):
        settings.TASKS = {"default": {"BACKEND": f"{__name__}.{backend}"}}
        with pytest.raises(InvalidTaskBackend, match=f"a {backend}, which gives a message another id"):
            tasks.work.enqueue(7)
        assert (names(), rows.count()) == ([], 0)
        assert tasks.work.using(unique=False).enqueue(7).status == READY

    def test_a_first_one_that_cannot_be_looked_up(self, rows):
        """As one that was deleted. Its id is known, and its state."""
        first = tasks.at_success.enqueue(7)
        work_off()
        rows.all().delete()
        found = tasks.at_success.enqueue(7)
        assert (found.id, found.status) == (first.id, SUCCESSFUL)

    def test_by_a_callable_that_gets_no_context(self, runs):
        tasks.by_callable.enqueue(7)
        assert names() == ["unique:account 7"]
        work_off()
        assert runs == [7]

    def test_as_a_whole(self, rows):
        tasks.whole.enqueue(1)
        tasks.whole.enqueue(2)
        assert names() == ["unique:tests.support.tasks_of_django.whole"]
        assert rows.count() == 1


@pytest.mark.usefixtures("rows")
class TestEnds:
    @pytest.mark.parametrize(("what", "status"), [("return", SUCCESSFUL), ("raise", FAILED)])
    def test_until_the_end(self, runs, what, status):
        sent = tasks.work.enqueue(7, what)
        work_off()
        assert runs == [(7, what)]
        assert tasks.work.get_result(sent.id).status == status
        assert names() == []

    def test_until_success(self, rows, runs):
        sent = tasks.at_success.enqueue(7)
        time.sleep(0.1)
        work_off()
        found = tasks.at_success.unique_find(7)
        assert (found.task_id, found.state) == (sent.id, "done")
        assert 900 < found.info.remaining < 1000
        assert tasks.at_success.enqueue(7).id == sent.id
        assert rows.count() == 1

    def test_until_success_of_one_that_fails(self):
        tasks.at_success.enqueue(7, "raise")
        work_off()
        assert names() == []

    def test_until_success_of_one_whose_result_no_backend_can_keep(self):
        """It fails for that."""
        sent = tasks.at_success.enqueue(7, "object")
        work_off()
        [error] = tasks.at_success.get_result(sent.id).errors
        assert error.exception_class is TypeError
        assert names() == []

    @pytest.mark.parametrize("task", [tasks.work, tasks.at_start, tasks.with_context])
    def test_one_that_fails_before_it_is_called(self, task, runs):
        def fail(**_):
            raise RuntimeError("no tracing today")

        sent = task.enqueue(7)
        task_started.connect(fail)
        try:
            work_off()
        finally:
            task_started.disconnect(fail)
        assert task.get_result(sent.id).status == FAILED
        assert runs == []
        eventually(lambda: names() == [])

    @pytest.mark.parametrize("task", [tasks.at_start, tasks.guarded])
    def test_until_the_start(self, task):
        first = task.enqueue(7, "again")
        work_off(1)
        status, second = result(task, first)
        assert status == SUCCESSFUL
        assert second != first.id
        assert task.enqueue(7).id == second
        work_off()
        assert names() == []

    def test_until_the_start_of_a_coroutine(self, runs):
        tasks.guarded_awaited.enqueue(7)
        work_off()
        assert runs == [(7, None)]

    @pytest.mark.parametrize("task", [tasks.guarded, tasks.guarded_awaited])
    def test_a_run_that_skips_frees_the_name(self, task, runs):
        task.enqueue(7)
        handle = lock("run:7", wait=0)
        with ThreadPoolExecutor(1) as another_thread:
            assert another_thread.submit(handle.acquire).result()
            work_off()
            another_thread.submit(handle.release).result()
        assert runs == []
        eventually(lambda: names() == [])

    def test_with_a_context(self):
        sent = tasks.with_context.enqueue(7)
        work_off()
        assert result(tasks.with_context, sent) == (SUCCESSFUL, [sent.id, sent.id])

    def test_a_coroutine(self):
        sent = tasks.awaited.enqueue(7)
        work_off()
        assert result(tasks.awaited, sent) == (SUCCESSFUL, [7, "running"])
        assert names() == []


@pytest.mark.usefixtures("rows")
class TestInATestCase:
    """Whose own transaction, in which each test runs, is never committed, and does not count."""

    def test_a_transaction_of_the_test_is_decided_where_commit_is_captured(
        self, rows, django_capture_on_commit_callbacks
    ):
        with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
            tasks.work.enqueue(7)
            tasks.work.enqueue(7)
        assert names() == ["unique:work:7"]
        assert rows.ready().count() == 1

    def test_and_nothing_is_held_where_it_is_not(self, rows):
        with transaction.atomic():
            tasks.work.enqueue(7)
            tasks.work.enqueue(7)
        assert names() == []
        assert rows.ready().count() == 2


@pytest.mark.usefixtures("committed_rows")
class TestTransactions:
    """What is written in one may be run when it is committed, and is decided then."""

    def test_nothing_is_held_before_commit(self, committed_rows, runs):
        with transaction.atomic():
            sent = tasks.work.enqueue(7)
            assert names() == []
        assert 900 < remaining() <= 1000
        assert tasks.work.unique_find(7).task_id == sent.id
        assert tasks.work.enqueue(7).id == sent.id
        work_off()
        assert runs == [(7, "return")]
        assert names() == []

    def test_rolled_back(self, committed_rows):
        with pytest.raises(ValueError, match="roll"), transaction.atomic():
            tasks.work.enqueue(7)
            raise ValueError("roll back")
        assert (names(), committed_rows.count()) == ([], 0)
        with transaction.atomic():
            with pytest.raises(ValueError, match="roll"), transaction.atomic():
                tasks.work.enqueue(7)
                raise ValueError("roll back to the savepoint")
            tasks.work.enqueue(8)
        assert names() == ["unique:work:8"]

    def test_of_several_one_does_the_work(self, runs, caplog):
        """The others count as done, and were not attempted."""
        with caplog.at_level(logging.INFO, "django_distlock"), transaction.atomic():
            first, second = tasks.work.enqueue(7), tasks.raising.enqueue(7)
        assert f"{second.id}] is not queued: the task {first.id} is queued" in caplog.text
        assert result(tasks.raising, second) == (SUCCESSFUL, None)
        work_off()
        assert runs == [(7, "return")]
        assert result(tasks.work, first) == (SUCCESSFUL, "return")
        assert tasks.raising.get_result(second.id).attempts == 0

    def test_a_duplicate_is_told_as_queued_and_never_as_finished(self):
        told = []

        def receiver(signal, task_result, **_):
            told.append((signal, task_result.id))

        task_enqueued.connect(receiver)
        task_finished.connect(receiver)
        with transaction.atomic():
            first, second = tasks.work.enqueue(7), tasks.work.enqueue(7)
        work_off()
        assert told == [(task_enqueued, first.id), (task_enqueued, second.id), (task_finished, first.id)]

    def test_a_duplicate_of_what_was_queued_before(self, runs):
        first = tasks.work.enqueue(7)
        with transaction.atomic():
            second = tasks.work.enqueue(7)
        assert result(tasks.work, second) == (SUCCESSFUL, None)
        work_off()
        assert runs == [(7, "return")]
        assert result(tasks.work, first)[0] == SUCCESSFUL

    def test_one_that_a_worker_has_when_it_is_decided(self, runs):
        """Its publisher may be slow, or have been stopped: then nothing is taken for it any more."""
        with transaction.atomic():
            transaction.on_commit(work_off)
            tasks.work.enqueue(7)
        assert runs == [(7, "return")]
        assert names() == []

    def test_one_that_is_done_while_it_is_decided(self, runs, monkeypatch):
        backend, asked = type(locks["default"]), []
        real = backend.acquire

        def acquire(self, request, **options):
            asked.append(request)
            if len(asked) == 1:
                work_off()
            return real(self, request, **options)

        with monkeypatch.context() as patched:
            patched.setattr(backend, "acquire", acquire)
            with transaction.atomic():
                tasks.work.enqueue(7)
        assert runs == [(7, "return")]
        eventually(lambda: names() == [])

    def test_one_that_a_worker_runs_while_it_is_decided(self, committed_rows, monkeypatch, caplog):
        """It is no duplicate of itself."""
        backend, begun, told = type(locks["default"]), [], []
        real = backend.acquire

        def acquire(self, request, **options):
            if not begun:
                begun.append(None)
                committed_rows.update(status=RUNNING)
                begun.append(begun_by_one_that_is_killed(committed_rows.get()))
            return real(self, request, **options)

        def receiver(name, **_):
            told.append(name)

        lock_busy.connect(receiver)
        with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "django_distlock"):
            patched.setattr(backend, "acquire", acquire)
            with transaction.atomic():
                sent = tasks.work.enqueue(7)
        found = tasks.work.unique_find(7)
        assert (found.task_id, found.state) == (sent.id, "running")
        assert "is not queued" not in caplog.text
        assert told == []
        assert committed_rows.get().status == RUNNING

    def test_a_transaction_that_takes_long(self, monkeypatch):
        """The ttl counts from COMMIT."""
        now = 0.0
        monkeypatch.setattr(unique_tasks, "wall_clock", lambda: wall_clock() - now)
        with transaction.atomic():
            now = 5000.0
            tasks.work.enqueue(7)
            now = 0.0
        assert 900 < remaining() <= 1000

    def test_a_store_that_is_away_at_commit(self, runs, caplog):
        """The message is there. A worker takes the name anew."""
        with store_down("default"), transaction.atomic():
            sent = tasks.work.enqueue(7, "look")
        assert names() == []
        work_off()
        assert result(tasks.work, sent) == (SUCCESSFUL, [sent.id, "running"])

    def test_with_autocommit_off_nobody_is_told_of_commit(self, committed_rows):
        transaction.set_autocommit(False)
        try:
            with pytest.raises(transaction.TransactionManagementError, match="manual transaction management"):
                tasks.work.enqueue(7)
            transaction.rollback()
        finally:
            transaction.set_autocommit(True)
        assert (names(), committed_rows.count()) == ([], 0)

    def test_on_commit(self, runs):
        """As for each task that is not to be queued before."""
        with transaction.atomic():
            transaction.on_commit(lambda: tasks.work.enqueue(7))
            assert names() == []
        assert names() == ["unique:work:7"]


@pytest.mark.usefixtures("rows")
class TestMessages:
    def test_a_run_again_by_the_arguments_of_its_result(self, runs):
        first = tasks.work.enqueue(7)
        work_off()
        done = tasks.work.get_result(first.id)
        assert FIELD in done.kwargs
        again = tasks.work.enqueue(*done.args, **done.kwargs)
        assert tasks.work.unique_find(7).task_id == again.id != first.id
        work_off()
        assert runs == [(7, "return")] * 2

    def test_a_message_that_somebody_has_copied_has_no_lease(self, rows, runs):
        first = tasks.work.enqueue(7)
        copied = rows.get()
        copied.pk = DBTaskResult._meta.pk.default()
        copied.priority = 9
        copied.save(force_insert=True)
        work_off(1)
        assert runs == [(7, "return")]
        assert tasks.work.unique_find(7).task_id == first.id

    def test_one_that_is_run_once_more_by_hand(self, rows, runs):
        """As one whose worker was killed."""
        tasks.work.enqueue(7)
        work_off()
        rows.update(status=READY)
        work_off()
        assert runs == [(7, "return")] * 2
        assert names() == []

    def test_one_whose_worker_was_killed_a_moment_ago(self, rows, runs, brief):
        """Its lease goes on until its TTL has passed."""
        sent = tasks.work.enqueue(7)
        begun_by_one_that_is_killed(rows.get())
        work_off()
        assert runs == [(7, "return")]
        assert result(tasks.work, sent) == (SUCCESSFUL, "return")
        assert names() == []

    def test_one_whose_other_run_goes_on(self, rows, runs, brief):
        sent = tasks.work.enqueue(7)
        succession, request = begun_by_one_that_is_killed(rows.get(), ttl=60)
        work_off()
        assert runs == []
        [error] = tasks.work.get_result(sent.id).errors
        assert error.exception_class is LockTimeout
        assert "'unique:work:7' (default) stayed busy for" in error.traceback
        assert tasks.work.unique_find(7).state == "running"
        succession.backend.release(request)

    def test_one_that_has_succeeded_and_keeps_its_name(self, rows, runs):
        sent = tasks.at_success.enqueue(7)
        work_off()
        rows.update(status=READY)
        work_off()
        assert runs == [(7, "return")] * 2
        assert result(tasks.at_success, sent) == (SUCCESSFUL, "return")
        found = tasks.at_success.unique_find(7)
        assert (found.task_id, found.state) == (sent.id, "done")
        assert 900 < found.info.remaining < 1000

    @pytest.mark.parametrize("task", [tasks.work, tasks.at_start])
    def test_a_message_whose_name_is_anothers_by_then_is_dropped(self, rows, runs, task, caplog):
        first = task.enqueue(7)
        [info] = locks["default"].held()
        call_command("locks", "release", info.name, "--no-input")
        second = task.enqueue(7)
        work_off(1)
        assert f"{first.id}] is dropped: the lease of its message" in caplog.text
        assert result(task, first) == (SUCCESSFUL, None)
        assert runs == []
        work_off()
        assert runs == [(7, "return")]
        assert result(task, second) == (SUCCESSFUL, "return")
        assert names() == []

    def test_a_lease_that_cannot_be_read(self, rows, runs, settings, caplog):
        settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "away": settings.DISTRIBUTED_LOCKS["default"]}
        first, second = tasks.work.enqueue(7), tasks.away_but_run.enqueue(7)
        for row in rows.all():
            row.args_kwargs["kwargs"][FIELD] = "nonsense"
            row.save()
        work_off()
        assert tasks.work.get_result(first.id).errors[0].exception_class is LockBackendError
        assert result(tasks.away_but_run, second) == (SUCCESSFUL, 7)
        assert runs == [7]
        assert "cannot be read" in caplog.text

    def test_called_as_a_function(self, runs):
        assert tasks.work.func(7) == tasks.work.call(7) == async_to_sync(tasks.work.acall)(7) == "return"
        assert names() == []

    def test_a_thread_keeps_nothing_of_its_runs(self, runs):
        tasks.work.enqueue(7)
        tasks.work.using(unique=False).enqueue(8)
        work_off()
        assert runs == [(7, "return"), (8, "return")]
        assert (unique_tasks.started.get(), unique_tasks.called.get()) == (None, "")

    def test_in_an_event_loop(self, runs):
        sent = async_to_sync(tasks.work.aenqueue)(7)
        assert async_to_sync(tasks.work.aenqueue)(7).id == sent.id
        assert async_to_sync(tasks.work.aunique_find)(7).task_id == sent.id
        done = tasks.work.get_result(sent.id)
        assert async_to_sync(tasks.work.acall)(*done.args, **done.kwargs) == "return"
        assert names() == []


@pytest.mark.usefixtures("rows")
class TestStores:
    def test_tenants(self, settings, runs):
        of_tenants(settings)
        with tenant("a"):
            first = tasks.work.enqueue(7)
        with tenant("b"):
            assert tasks.work.unique_find(7) is None
            second = tasks.work.enqueue(7)
            assert tasks.work.enqueue(7).id == second.id != first.id
        with tenant("c"):  # of whoever runs it: the message says whose name it has
            work_off()
        assert runs == [(7, "return")] * 2
        for each in "abc":
            with tenant(each):
                assert tasks.work.unique_find(7) is None

    def test_a_store_that_is_away(self, settings, runs, caplog):
        away = {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "unix:///nowhere"}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}, "away": away}
        with pytest.raises(LockBackendError):
            tasks.away.enqueue(7)
        sent = tasks.away_but_run.enqueue(7)
        assert "it is not known whether it is queued already" in caplog.text
        work_off()
        assert result(tasks.away_but_run, sent) == (SUCCESSFUL, 7)

    def test_a_store_that_goes_away(self, settings, runs):
        settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "away": settings.DISTRIBUTED_LOCKS["default"]}
        first, second = tasks.work.enqueue(7), tasks.away_but_run.enqueue(7)
        with store_down("default"), store_down("away"):
            work_off()
        assert tasks.work.get_result(first.id).status == FAILED
        assert result(tasks.away_but_run, second) == (SUCCESSFUL, 7)
        assert runs == [7]
        eventually(lambda: names() == [])

    def test_one_that_cannot_keep_tasks_unique(self, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {
                "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
                "LOCATION": [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)],
            }
        }
        with pytest.raises(InvalidLockBackend, match="a RedlockBackend, where no lease can follow"):
            tasks.work.enqueue(7)


@pytest.mark.usefixtures("immediate")
class TestImmediateBackend:
    def test_it_runs_under_its_name(self, runs):
        sent = tasks.work.enqueue(7, "look")
        assert (sent.status, sent.return_value) == (SUCCESSFUL, [sent.id, "running"])
        assert names() == []

    def test_a_duplicate_of_one_that_runs(self):
        sent = tasks.work.enqueue(7, "again")
        assert sent.return_value == sent.id

    def test_until_the_start(self, runs):
        sent = tasks.at_start.enqueue(7, "again")
        assert sent.return_value != sent.id
        assert runs == [(7, "again"), (7, "return")]
        assert tasks.guarded.enqueue(7).return_value == "return"
        assert async_to_sync(tasks.guarded_awaited.aenqueue)(7).status == SUCCESSFUL
        assert names() == []

    def test_until_success(self, runs):
        assert tasks.at_success.enqueue(7, "raise").status == FAILED
        sent = tasks.at_success.enqueue(7)
        found = tasks.at_success.enqueue(7)
        assert (found.id, found.status) == (sent.id, SUCCESSFUL)
        assert runs == [(7, "raise"), (7, "return")]

    def test_coroutines_and_contexts(self):
        assert tasks.awaited.enqueue(7).return_value == [7, "running"]
        sent = async_to_sync(tasks.with_context.aenqueue)(7)
        assert sent.return_value == [sent.id, sent.id]
        assert names() == []

    def test_it_is_interrupted(self, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(ImmediateBackend, "_execute_task", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tasks.work.enqueue(7)
        eventually(lambda: names() == [])

    def test_in_a_transaction_it_runs_at_once(self, transactional_db):
        with transaction.atomic():
            assert tasks.work.enqueue(7).status == SUCCESSFUL
            assert names() == []


def alone(number):
    return number


def alone_with_context(context, number):
    return number


class TestDecorator:
    def test_a_template_that_asks_for_what_is_not_there(self):
        with pytest.raises(InvalidLockName, match="no such argument"):
            unique_task("alone:{nothing}")(alone)

    def test_a_template_that_asks_for_the_context(self):
        """``enqueue()`` is not given it."""
        with pytest.raises(InvalidLockName, match="asks for 'context', which enqueue"):
            unique_task("alone:{context}", takes_context=True)(alone_with_context)

    @pytest.mark.parametrize(
        "copied",
        [
            copy,
            deepcopy,
            pytest.param(
                lambda task: pickle.loads(pickle.dumps(task)),
                marks=pytest.mark.skipif(VERSION < (6, 1), reason="Django 6.1 pickles tasks by their path"),
            ),
        ],
    )
    def test_copies(self, copied):
        for task in (tasks.work, tasks.work.using(unique=False)):
            assert copied(task) == task
            assert hash(copied(task)) == hash(task)
        assert copied(tasks.work) != copied(tasks.work.using(unique=False))

    def test_tasks_that_differ_in_an_option_are_unequal(self):
        made = [unique_task("alone:{number}", on_duplicate=each)(alone) for each in ("drop", "drop", "raise")]
        assert made[0] == made[1] != made[2]

    def test_names_that_are_no_names(self):
        for wrong in (
            lambda: unique_task(lambda number: number),
            lambda: unique_task(alone, name=alone),
            lambda: unique_task("alone", name="alone"),
        ):
            with pytest.raises(TypeError, match="name"):
                wrong()

    @pytest.mark.parametrize(
        "given", [{"until": "then"}, {"on_duplicate": "retry"}, {"on_unavailable": "skip"}, {"ttl": 0}, {"ttl": "x"}]
    )
    def test_wrong_values(self, given):
        with pytest.raises(ValueError, match=next(iter(given))):
            unique_task("x", **given)

    def test_other_backends_are_refused(self, settings):
        settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}, **second_backend()}
        task = tasks.work.using()
        with pytest.raises(InvalidTaskBackend, match="a DummyBackend. This package does not know"):
            task.enqueue(7)
        assert names() == []
        assert task_backends["default"].results == []
        assert task.using(unique=False).enqueue(7).status == READY
        assert "default" in options.task_backends
        assert is_refused_by_checks()
        assert task.using(backend="second").enqueue(7).return_value == "return"

    def test_those_that_are_known_are_not(self, settings):
        settings.TASKS = {**DATABASE, **second_backend()}
        tasks.work.using().using(backend="second")
        assert options.task_backends == {"default", "second"}
        assert not is_refused_by_checks()


def is_refused_by_checks():
    """Other tests may have left decorators of which the checks tell."""
    return "distlock.E008" in [each.id for each in run_checks(tags=["distlock"])]


def second_backend():
    return {"second": IMMEDIATE["default"]}
