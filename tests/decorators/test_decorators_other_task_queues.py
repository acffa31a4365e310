"""Dramatiq, Huey and RQ: the decorator stands below theirs, and says so where it was put above."""

from __future__ import annotations

import dramatiq
import huey
import pytest
import redis
import rq.decorators
from dramatiq.brokers.stub import StubBroker

from django_distlock import distributed_lock, locks

MARKS = {
    "@dramatiq.actor": lambda function: dramatiq.actor(function, broker=StubBroker()),
    "@huey.task()": huey.MemoryHuey(immediate=True).task(),
    "@job": rq.decorators.job("default", connection=redis.Redis()),
}


def held_names():
    return [info.name for info in locks["default"].held()]


@pytest.mark.parametrize("mark", MARKS)
def test_above_it_is_refused(mark):
    @MARKS[mark]
    def export():
        pass

    with pytest.raises(TypeError) as caught:
        distributed_lock("name")(export)
    assert f"put above {mark}, on the task export, " in str(caught.value)
    assert f"first {mark}, then @distributed_lock" in str(caught.value)


def test_a_function_with_another_delay_is_none_of_theirs(locmem_locks):
    def poll():
        return held_names()

    for delay in (2.0, lambda: None):
        poll.delay = delay
        assert distributed_lock("name")(poll)() == ["name"]


@pytest.mark.parametrize(
    ("mark", "run"),
    [("@dramatiq.actor", lambda task: task()), ("@huey.task()", lambda task: task()()), ("@job", lambda task: task())],
)
def test_below_it_guards_the_run(mark, run, locmem_locks):
    @MARKS[mark]
    @distributed_lock("name")
    def report():
        return held_names()

    assert run(report) == ["name"]
    assert held_names() == []
