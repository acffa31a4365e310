"""Unique tasks on real workers: what is left when a publisher or a worker is killed, and that the work is done once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid

import pytest

from django_distlock import lock, locks
from django_distlock.celery import UniqueTask, unique
from django_distlock.celery.unique_tasks import UniqueHolder
from tests.support.forkserver import ROOT, Program
from tests.support.tools import PATIENCE, eventually
from tests.support.workers.harness import Worker
from tests.support.workers.pools import pools

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.usefixtures("the_locks"), pytest.mark.seconds(1)]

TTL = 2.0  # of the alias "brief"


@pytest.fixture
def not_started(server, tmp_path_factory):
    """A worker whose queue is there."""
    worker = Worker(server, tmp_path_factory.mktemp("w"), "solo")
    yield worker
    if hasattr(worker, "process"):
        worker.stop()


@pytest.fixture
def name():
    return uuid.uuid4().hex[:12]


def task_of(worker, task="unique", **given):
    """As another process knows it, which publishes to the queue of the worker."""

    def body(name, do="return"):
        raise AssertionError("workers run it")

    made = worker.app.task(base=UniqueTask, unique=unique("{name}", using="brief", **given), name=task, shared=False)
    return made(body)


def holder(name):
    [leases] = locks["brief"].look([f"unique:{name}"])
    return UniqueHolder.of(leases[0]) if leases else None


def is_free(name):
    return holder(name) is None


def publish(worker, name, times=1, killed=()):
    """A program that publishes, and is killed at these signals."""
    environment = {
        **os.environ,
        "WORKERS": json.dumps(worker.plan),
        "DJANGO_SETTINGS_MODULE": "tests.support.workers.settings",
        "PYTHONPATH": str(ROOT),
    }
    arguments = ["-m", "tests.support.workers.publisher", name, times, *killed]
    return Program(arguments, like="celery", cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("pool", pools())
def test_it_is_queued_and_run_once(start, name, pool):
    worker = start(pool)
    task = task_of(worker)
    sent = task.delay(name)
    worker.ran(name)
    assert holder(name).state == "running"
    assert {task.delay(name).id for _ in range(5)} == {sent.id}
    worker.go(name)
    assert worker.ended(sent.id)["result"] == name
    eventually(lambda: is_free(name))
    assert len(worker.journal(name, "run")) == 1
    again = task.delay(name)
    assert again.id != sent.id
    assert worker.ended(again.id)["result"] == name


def test_publishers_beside_each_other(start, name):
    """Two with 50 each, while the first task is at work."""
    worker = start("threads")
    programs = [publish(worker, name, 50) for _ in range(2)]
    ids = [program.communicate(timeout=60)[0].split() for program in programs]
    assert [len(each) for each in ids] == [50, 50]
    assert len({*ids[0], *ids[1]}) == 1
    worker.ran(name)
    worker.go(name)
    worker.ended(ids[0][0])
    eventually(lambda: is_free(name))
    assert len(worker.journal(name, "run")) == 1


@pytest.mark.parametrize("pool", pools("prefork", "threads"))
@pytest.mark.parametrize("line", ["first", "last"])
def test_the_name_of_a_worker_that_is_killed_is_free_after_the_ttl(start, name, pool, line):
    worker = start(pool)
    task = task_of(worker, ttl=3600)
    task.delay(name, "stay")
    worker.ran(name)
    if line == "last":
        worker.go(name)
        eventually(lambda: worker.journal(name, "done"))
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    left = holder(name)
    assert left.state == "running"
    assert left.info.remaining <= TTL
    first = left.task_id
    eventually(lambda: task.delay(name).id != first, PATIENCE)


def test_a_copy_of_what_a_killed_worker_did_is_run(start, name):
    first = start("prefork", visibility_timeout=1)
    sent = task_of(first, "unique_late").delay(name)
    first.ran(name)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    time.sleep(1.1)
    second = start("prefork", visibility_timeout=1, queue=first.queue)
    assert second.ended(sent.id)["result"] == name
    assert [len(second.journal(name, what)) for what in ("run", "done")] == [2, 1]
    eventually(lambda: is_free(name))


def test_a_message_that_a_killed_worker_had_prefetched_is_run_once(start, name):
    first = start("solo", visibility_timeout=1)
    first.send("hold", f"{name} before")
    first.ran(f"{name} before")
    task = task_of(first)
    sent = task.delay(name)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert task.delay(name).id == sent.id
    time.sleep(1.1)
    second = start("threads", visibility_timeout=1, queue=first.queue)
    second.ran(name)
    second.go(name)
    assert second.ended(sent.id)["result"] == name
    eventually(lambda: is_free(name))
    assert len(second.journal(name, "run")) == 1


def test_a_visibility_timeout_that_is_shorter_than_the_queue_costs_no_second_run(start, name):
    first = start("solo", visibility_timeout=1)
    first.send("hold", f"{name} before")
    first.ran(f"{name} before")
    sent = task_of(first).delay(name)
    time.sleep(1.1)
    second = start("threads", visibility_timeout=1, queue=first.queue)
    first.go(name)
    assert second.ended(sent.id)["result"] == name
    first.go(f"{name} before")
    last = [worker.send("plain", name, f"{name} after") for worker in (first, second)]
    for each in last:
        first.ended(each)
    eventually(lambda: is_free(name))
    assert len(first.journal(name, "run")) == 1


def test_a_publisher_that_is_killed_before_it_publishes(not_started, name):
    program = publish(not_started, name, killed=["before_task_publish"])
    program.communicate(timeout=60)
    assert program.returncode == -signal.SIGKILL
    if left := holder(name):
        assert left.state == "queued"
        assert left.info.remaining <= TTL
    eventually(lambda: is_free(name))
    not_started.start()
    not_started.go(name)
    sent = task_of(not_started).delay(name)
    assert not_started.ended(sent.id)["result"] == name
    assert len(not_started.journal(name, "run")) == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_publisher_that_is_killed_before_it_lengthens_the_lease(not_started, name, is_late):
    program = publish(not_started, name, killed=["after_task_publish"])
    program.communicate(timeout=60)
    assert program.returncode == -signal.SIGKILL
    if left := holder(name):
        assert left.info.remaining <= TTL
    if is_late:
        eventually(lambda: is_free(name))
    not_started.start()
    not_started.ran(name)  # it takes the name anew
    sent = task_of(not_started).delay(name)
    assert sent.id == not_started.journal(name, "run")[0]["id"]
    not_started.go(name)
    assert not_started.ended(sent.id)["result"] == name
    assert len(not_started.journal(name, "run")) == 1


def test_a_message_whose_name_is_anothers_by_then_is_dropped(not_started, name):
    """It was published by one that was killed before it lengthened the lease."""
    publish(not_started, name, killed=["after_task_publish"]).communicate(timeout=60)
    eventually(lambda: is_free(name))
    sent = task_of(not_started).delay(name)
    not_started.start()
    not_started.go(name)
    assert not_started.ended(sent.id)["result"] == name
    assert "another message does the work" in not_started.log()
    assert [run["id"] for run in not_started.journal(name, "run")] == [sent.id]


def test_at_most_one_waits_for_the_lock_of_the_run(start, name):
    worker = start("threads")
    task = task_of(worker, "unique_start", until="start")
    first = task.delay(name)
    worker.ran(name)
    second = task.delay(name)
    assert second.id != first.id
    assert {task.delay(name).id for _ in range(10)} == {second.id}
    eventually(lambda: f"{second.id}] retry" in worker.log())
    assert task.delay(name).id == second.id
    worker.go(name)
    assert worker.ended(second.id)["result"] == name
    assert [run["id"] for run in worker.journal(name, "run")] == [first.id, second.id]
    eventually(lambda: is_free(name))


def test_a_retry_keeps_the_name(start, name):
    worker = start("prefork")
    task = task_of(worker)
    sent = task.delay(name, "retry")
    worker.go(name)
    worker.ran(name)
    eventually(lambda: worker.result(sent.id)["status"] == "RETRY" or len(worker.journal(name, "run")) > 1)
    assert task.delay(name).id == sent.id
    assert worker.ended(sent.id)["result"] == name
    assert [run["retries"] for run in worker.journal(name, "run")] == [0, 1]
    eventually(lambda: is_free(name))


@pytest.mark.seconds(5)
def test_a_revoked_one_frees_the_name(start, name):
    worker = start("threads")
    task = task_of(worker)
    sent = task.apply_async((name,), countdown=5)
    eventually(lambda: sent.id in worker.log())
    worker.app.control.revoke(sent.id, destination=[worker.name])
    assert worker.ended(sent.id)["status"] == "REVOKED"
    eventually(lambda: is_free(name))
    assert worker.journal(name, "run") == []


def test_a_task_that_the_worker_does_not_know_frees_the_name(start, name):
    worker = start("threads")
    sent = task_of(worker, "of_another_program").delay(name)
    assert worker.ended(sent.id)["status"] == "FAILURE"
    eventually(lambda: is_free(name))


@pytest.mark.seconds(6)
def test_a_lock_of_the_run_is_another_one(start, name):
    worker = start("threads")
    with lock(name, using="brief"):
        sent = task_of(worker).delay(name)
        worker.go(name)
        assert worker.ended(sent.id)["result"] == name
