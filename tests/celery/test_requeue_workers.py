"""Tasks that wait for a lock with slots, on real workers and brokers: judged by what they have written down."""

from __future__ import annotations

import itertools
import os
import signal
import uuid
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest

from django_distlock import lock
from django_distlock.celery.requeue import LONGEST_WAIT, PACE
from tests.support.tools import eventually
from tests.support.workers.pools import POOLS, slow

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(1)]

SLOTS, CONCURRENCY = 3, 8  # of the task, and of its worker


@pytest.fixture
def name():
    return uuid.uuid4().hex[:12]


@pytest.fixture
def broker(request):
    """None: the server of the module."""
    return request.getfixturevalue("rabbitmq").url if request.param == "rabbitmq" else None


QUICK = [("prefork", "rabbitmq"), ("threads", "redis")]  # each pool, and each broker
on_pools_and_brokers = pytest.mark.parametrize(
    ("pool", "broker"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [slow])
        for pair in itertools.product(POOLS, ["redis", "rabbitmq"])
    ],
    indirect=["broker"],
)


@contextmanager
def all_slots(name):
    with ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(lock(f"job:{name}", slots=SLOTS))
        yield


def most_at_once(runs):
    now = most = 0
    for _, change in sorted([(run["begin"], 1) for run in runs] + [(run["at"], -1) for run in runs]):
        now += change
        most = max(most, now)
    return most


def most_requeues_in(requeues):
    """How many there can have been in the time in which these were sent."""
    times = [each["at"] for each in requeues]
    return PACE * (max(times) - min(times) + 1) + CONCURRENCY * (max(times) - min(times)) / LONGEST_WAIT


@on_pools_and_brokers
def test_each_of_many_runs_once_beside_few(start, name, pool, broker):
    worker = start(pool, concurrency=CONCURRENCY, broker=broker)
    sent = [worker.send("limited", name, 0.05) for _ in range(60)]
    runs = eventually(lambda: len(runs := worker.journal(name, "run")) >= len(sent) and runs, 90)
    assert Counter(run["id"] for run in runs) == Counter(sent)
    assert most_at_once(runs) <= SLOTS
    assert {run["retries"] for run in runs} == {0}


@on_pools_and_brokers
def test_those_that_wait_for_long_are_sent_again_at_a_pace_and_leave_the_worker_to_others(start, name, pool, broker):
    worker = start(pool, concurrency=CONCURRENCY, broker=broker)
    with all_slots(name):
        sent = [worker.send("limited", name, 0.0) for _ in range(30)]
        eventually(lambda: len(worker.journal(name, "requeue")) >= 60, 90)
        eventually(lambda: any(each["eta"] for each in worker.journal(name, "requeue")), 60)
        worker.send("plain", "beside", name)
        eventually(lambda: worker.journal(name, "plain"), 60)
        assert worker.journal(name, "run") == []
    runs = eventually(lambda: len(runs := worker.journal(name, "run")) >= len(sent) and runs, 90)
    assert Counter(run["id"] for run in runs) == Counter(sent)
    requeues = worker.journal(name, "requeue")
    assert len(requeues) <= most_requeues_in(requeues)
    assert {each["eta"] is None for each in requeues} == {
        True,
        False,
    }  # few wait in the worker, the others in the queue


def test_one_that_gives_up_fails(start, name, the_locks):
    worker = start("prefork")
    with lock(f"job:{name}"):
        result = worker.ended(worker.send("impatient", name))
    assert result["status"] == "FAILURE"
    assert result["result"]["exc_type"] == "LockTimeout"
    assert worker.journal(name, "requeue")
    assert worker.journal(name, "run") == []


def test_the_work_of_one_that_is_killed_while_it_stands_by_is_done(start, name, the_locks):
    worker = start("prefork", concurrency=1)
    with all_slots(name):
        task_id = worker.send("limited", name, 0.0)
        waiter = eventually(lambda: next(iter(the_locks.waiters([f"job:{name}"])[0] or ()), None))
        os.kill(waiter.holder.pid, signal.SIGKILL)
    assert worker.ended(task_id)["status"] == "SUCCESS"
    assert [run["id"] for run in worker.journal(name, "run")] == [task_id]
