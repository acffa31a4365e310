"""Unique tasks whose workers are killed again and again: what the tasks wrote down is judged.

The broker is RabbitMQ: Redis loses a message whose worker is killed while it takes that from the queue.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
import uuid
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import attrgetter

import pytest

from django_distlock import locks
from django_distlock.celery import UniqueTask, unique
from example_project.valkey import Valkey
from tests.support.programs import processes_of
from tests.support.tools import eventually
from tests.support.workers.harness import Worker
from tests.support.workers.pools import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.once]

REDIS = "django_distlock.backends.redis.RedisBackend"
TTL = 2.0
LASTS = max(6.0, SOAK)
EMPTY = 60.0  # seconds at most until all that is queued at the end has run


@pytest.fixture
def server(settings, rabbitmq):
    with Valkey() as server:
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": REDIS, "LOCATION": server.url},
            "brief": {"BACKEND": REDIS, "LOCATION": server.url, "KEY_PREFIX": "brief", "TTL": TTL},
        }
        yield server
        locks.close()


@dataclass
class Body:
    """One run of the body of a task. ``end``: when it was done, or its worker killed."""

    task_id: str
    pid: int
    begin: float
    end: float


def bodies(lines, killed):
    """Of one name. ``killed``: by the process of a worker, the moment at which it and its children were killed."""
    found = []
    for line in lines:
        if line["what"] == "run":
            found.append(Body(line["id"], line["pid"], line["at"], killed.get(line["pid"], inf)))
        elif line["what"] == "done":
            [done] = [each for each in found if (each.pid, each.task_id) == (line["pid"], line["id"])][-1:]
            done.end = line["at"]
    return sorted(found, key=attrgetter("begin"))


def dropped_in(logs):
    """The ids of those that left the work to another message."""
    return set(re.findall(r"unique_work\[([0-9a-f-]+)\] is dropped: ", logs))


@pytest.mark.seconds(7)
def test_one_body_at_a_time_and_nothing_is_left(server, rabbitmq, tmp_path_factory):
    """Each message is worked off, or leaves that to another one which has its name; and each name is free then."""
    seed = random.randrange(10_000)
    chance, queue = random.Random(seed), uuid.uuid4().hex
    names = [f"{queue[:8]} {number}" for number in range(4)]
    sent: dict[str, set[str]] = {name: set() for name in names}
    started, killed = [], {}

    def start():
        options = {"queue": queue, "broker": rabbitmq.url}
        started.append(Worker(server, tmp_path_factory.mktemp("w"), "prefork", **options).start())
        return started[-1]

    def kill(worker):
        pids = processes_of(worker.process.pid)
        os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        killed.update(dict.fromkeys(pids, time.time()))

    def left():
        """What is not worked off yet."""
        dropped = dropped_in("".join(worker.log() for worker in started))
        of_messages = {
            each for name in names for each in sent[name] - {line["id"] for line in observer.journal(name, "done")}
        }
        held = {name for name in names if locks["brief"].look([f"unique:{name}"]) != [[]]}
        return (of_messages - dropped) | held

    try:
        workers = [start(), start()]
        observer, until = workers[0], time.monotonic() + LASTS
        made = observer.app.task(
            base=UniqueTask, unique=unique("{name}", using="brief"), name="unique_work", shared=False
        )
        task = made(body)
        while time.monotonic() < until:
            name = chance.choice(names)
            sent[name].add(task.delay(name, chance.uniform(0.0, 0.3), retries=chance.random() < 0.2).id)
            time.sleep(chance.uniform(0.0, 0.05))
            if chance.random() < 0.04:
                kill(workers.pop(chance.randrange(2)))
                workers.append(start())
        try:
            eventually(lambda: not left(), EMPTY)
        except AssertionError:
            told = [line for one in left() for worker in started for line in worker.log().splitlines() if one in line]
            raise AssertionError("\n".join([f"seed {seed}: {left()} is left", *told])) from None
        for name in names:
            for former, later in pairwise(bodies(observer.journal(name), killed)):
                assert later.begin >= former.end, f"seed {seed}, {name}: {former} and {later}"
        print(f"seed {seed}: {sum(map(len, sent.values()))} tasks, {len(started) - 2} kills")
    finally:
        for worker in started:
            worker.stop()


def body(name, seconds, retries=False):
    raise AssertionError("workers run it")
