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

PATIENCE = 240.0  # seconds in which a broker starts and its clients find it


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request, tmp_path_factory):
    with broker_that_restarts(request.param, request, tmp_path_factory.mktemp("b")) as broker:
        yield broker


def body(name, do="return"):
    raise AssertionError("workers run it")


def is_free(name):
    return locks["brief"].look([f"unique:{name}"]) == [[]]


class Queue:
    """One of each type that the broker has, with a worker: of three tasks one is at work, one with it, one queued."""

    def __init__(self, worker):
        self.worker = worker
        made = worker.app.task(base=UniqueTask, unique=unique("{name}", using="brief"), name="unique", shared=False)
        self.task, self.names = made(body), [f"{uuid.uuid4().hex[:8]} {number}" for number in range(3)]
        self.failing = f"{self.names[0]} failing"

    def fill(self, broker):
        first = self.task.delay(self.names[0])
        self.worker.ran(self.names[0], patience=PATIENCE)
        self.sent = [first, *(self.task.delay(name) for name in self.names[1:])]
        if broker.known:
            eventually(lambda: broker.known(self.worker.queue) == 2, PATIENCE)

    def ask_for_more_while_it_is_away(self):
        assert [self.task.delay(name).id for name in self.names] == [each.id for each in self.sent]
        with pytest.raises(OperationalError):
            self.task.apply_async((self.failing,), retry=False)
        assert is_free(self.failing)

    def judge(self):
        for name in (*self.names, self.failing):
            self.worker.go(name)
        for each, name in zip(self.sent, self.names, strict=True):
            assert self.worker.ended(each.id, patience=PATIENCE)["result"] == name
        eventually(lambda: all(map(is_free, self.names)), PATIENCE)
        again = [self.task.delay(name) for name in (*self.names, self.failing)]
        assert not {each.id for each in again} & {each.id for each in self.sent}
        for each in again:
            assert self.worker.ended(each.id, patience=PATIENCE)["status"] == "SUCCESS"
        for name, before in zip(self.names, self.sent, strict=True):
            runs = [run["id"] for run in self.worker.journal(name, "run")]
            assert runs.count(before.id) == 1
            assert len(runs) == 2
        eventually(lambda: all(map(is_free, (*self.names, self.failing))), PATIENCE)


@pytest.mark.seconds(11)
def test_what_is_queued_and_what_runs_while_the_broker_restarts(start, broker):
    queues = [
        Queue(start("threads", broker=broker.url, queue_type=queue_type, concurrency=1))
        for queue_type in broker.queue_types
    ]
    for queue in queues:
        queue.fill(broker)
    broker.stop()
    for queue in queues:
        queue.ask_for_more_while_it_is_away()
    broker.start()
    for queue in queues:
        queue.judge()
