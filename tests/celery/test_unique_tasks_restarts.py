"""Unique tasks whose broker restarts: each is run once, and none keeps its name."""

from __future__ import annotations

import uuid

import pytest
from kombu.exceptions import OperationalError

from django_distlock import locks
from django_distlock.celery import UniqueTask, unique
from tests.support.brokers import broker_that_restarts
from tests.support.tools import eventually

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.usefixtures("the_locks")]

PATIENCE = 120.0  # seconds in which a broker starts and its clients find it


@pytest.fixture(params=["redis", "classic", "quorum"])
def broker(request, tmp_path_factory):
    with broker_that_restarts(request.param, tmp_path_factory.mktemp("b")) as broker:
        yield broker


def body(name, do="return"):
    raise AssertionError("workers run it")


def is_free(name):
    return locks["brief"].look([f"unique:{name}"]) == [[]]


def test_what_is_queued_and_what_runs_while_the_broker_restarts(start, broker):
    """Of three tasks one is at work, one is with the worker, and one in the queue."""
    worker = start("threads", broker=broker.url, queue_type=broker.queue_type, concurrency=1)
    made = worker.app.task(base=UniqueTask, unique=unique("{name}", using="brief"), name="unique", shared=False)
    task, names = made(body), [f"{uuid.uuid4().hex[:8]} {number}" for number in range(3)]
    first = task.delay(names[0])
    worker.ran(names[0], patience=PATIENCE)
    sent = [first, *(task.delay(name) for name in names[1:])]
    if broker.known:
        eventually(lambda: broker.known(worker.queue) == 2)
    broker.stop()
    assert [task.delay(name).id for name in names] == [each.id for each in sent]
    failing = f"{names[0]} failing"
    with pytest.raises(OperationalError):
        task.apply_async((failing,), retry=False)
    assert is_free(failing)
    broker.start()
    for name in (*names, failing):
        worker.go(name)
    for each, name in zip(sent, names, strict=True):
        assert worker.ended(each.id, patience=PATIENCE)["result"] == name
    eventually(lambda: all(map(is_free, names)), PATIENCE)
    again = [task.delay(name) for name in (*names, failing)]
    assert not {each.id for each in again} & {each.id for each in sent}
    for each in again:
        assert worker.ended(each.id, patience=PATIENCE)["status"] == "SUCCESS"
    for name, before in zip(names, sent, strict=True):
        runs = [run["id"] for run in worker.journal(name, "run")]
        assert runs.count(before.id) == 1
        assert len(runs) == 2
    eventually(lambda: all(map(is_free, (*names, failing))), PATIENCE)
