"""Guards are free again whatever happens to who holds them."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from django_distlock.utils.guards import new_guard
from tests.support.tools import PATIENCE, eventually


class TimeLimit(BaseException):
    """As Celery raises from a handler of a signal."""


@pytest.fixture
def alarm():
    """``alarm(seconds)``: after that time, TimeLimit is raised somewhere."""

    def ring(*_):
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def is_free(guard):
    """For another thread."""
    answers = []

    def ask():
        answers.append(guard.acquire(blocking=False))
        if answers[0]:
            guard.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(PATIENCE)
    return answers[0]


def test_a_handler_that_raises_frees_it(alarm):
    guard, end = new_guard(), time.monotonic() + PATIENCE

    def enter_again_and_again():
        alarm(random.uniform(0.00002, 0.0002))
        while time.monotonic() < end:
            with guard:
                pass

    for _ in range(300):
        with pytest.raises(TimeLimit):
            enter_again_and_again()
        assert is_free(guard)


def test_a_handler_that_raises_ends_a_wait_for_it(alarm):
    guard = new_guard()
    is_held, may_end = threading.Event(), threading.Event()

    def hold():
        with guard:
            is_held.set()
            may_end.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(PATIENCE)

    def enter():
        alarm(0.01)
        with guard:
            pass

    try:
        with pytest.raises(TimeLimit):
            enter()
    finally:
        may_end.set()
        holder.join(PATIENCE)
    assert is_free(guard)


def test_is_an_rlock():
    guard = new_guard()
    with guard:
        with guard:
            assert not is_free(guard)
        assert not is_free(guard)
        with pytest.raises(KeyError), guard:
            raise KeyError
    assert is_free(guard)


def test_is_the_guard_of_a_condition():
    guard, seen = new_guard(), []
    condition = threading.Condition(guard)

    def wait():
        with guard:
            seen.append("waits")
            condition.wait(PATIENCE)
            seen.append("woken")

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: seen)
    with guard:
        condition.notify_all()
        assert seen == ["waits"]
    waiter.join(PATIENCE)
    assert seen == ["waits", "woken"]
    assert is_free(guard)
