"""What the listeners of all stores share: when they subscribe, and when their thread ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from django_distlock.backends.common import wakeup_listener
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.common.wakeup_listener import WakeupListener
from django_distlock.utils.clock import clock
from django_distlock.utils.wakeup import WakeEvent
from tests.support.tools import eventually, lock_request, threads_of


class Away(Exception):
    pass


def running():
    return threads_of("listener", "example")


class TestACrowd:
    """More waiters than are to look at once."""

    def test_looks_over_a_second_after_a_subscription_began(self):
        listener, all_wait, woken = Listener(Timing()), threading.Event(), []
        listener.meanwhile = all_wait.wait
        requests = [lock_request(f"name {number}") for number in range(2000)]
        for request in requests:
            listener.expect(request)
        all_wait.set()
        eventually(lambda: woken.append(sum(one.event.wait(0) for one in requests)) or sum(woken) == len(requests))
        assert 0 < max(woken) < len(requests) / 2
        listener.stop()

    def test_is_noted_once_however_often_its_subscription_breaks(self, listener):
        requests = [lock_request(f"name {number}") for number in range(2000)]
        for request in requests:
            listener.expect(request)
        eventually(lambda: listener.is_ready)
        for _ in range(5):
            before = len(listener.connected_at)
            listener.subscribe_again()
            eventually(lambda before=before: len(listener.connected_at) > before and listener.count_those_to_wake())
            listener.hear_all_again()
            assert listener.count_those_to_wake() <= len(requests)
        listener.stop()
        eventually(lambda: not running())
        assert listener.count_those_to_wake() == 0


class Listener(WakeupListener):
    """On a connection that is a list of tokens."""

    connection_error = Away

    def __init__(self, timing):
        self.connected_at, self.fails, self.meanwhile = [], False, lambda: None
        super().__init__("example", timing)

    def connect(self):
        self.connected_at.append(clock())
        if self.fails:
            raise Away
        self.connection = []
        return self.connection

    def subscribe(self, connection):
        self.meanwhile()
        self._mark_ready()

    def read(self, connection, timeout):
        if connection:
            self._waiters.wake(connection.pop())
        else:
            threading.Event().wait(timeout)

    def disconnect(self, connection):
        connection.append("disconnected")

    def _inbox_of(self, request):
        return "inbox"

    def scale(self, timing):
        self._timing = timing

    def subscribe_again(self):
        self._resubscribe = True

    def hear_all_again(self):
        self._wake_all()

    def count_those_to_wake(self):
        return len(self._to_wake)


@pytest.fixture
def timing():
    timing = Timing()
    timing.listener_nap, timing.resubscribe_after = 0.01, 0.05
    return timing


@pytest.fixture
def listener(timing):
    listener = Listener(timing)
    yield listener
    listener.stop()
    eventually(lambda: not running())


def test_who_is_expected_has_an_inbox_and_keeps_the_one_that_it_has(listener):
    request, other = lock_request(), lock_request()
    other.inbox = "given"
    listener.expect(request), listener.expect(other)
    assert (request.inbox, other.inbox) == ("inbox", "given")


def test_those_who_wait_when_it_begins_to_hear_are_woken(listener):
    request = lock_request()
    listener.expect(request)
    assert request.event.wait(60)
    assert listener.is_ready


def test_one_that_nobody_needs_any_more_ends_and_comes_back(listener):
    for _ in range(2):
        listener.touch()
        eventually(lambda: listener.is_ready)
        listener.stop()
        eventually(lambda: not running())
        assert not listener.is_ready


@pytest.mark.parametrize("look", [1, 2])
def test_who_comes_while_it_ends_is_heard(listener, look):
    """Just after it has looked whether it is still needed."""

    class Ending(Timing):
        looks, is_over = 0, False

        @property
        def listener_idle(self):
            if threading.current_thread() not in running() or self.is_over:
                return 3600.0
            self.looks += 1
            if self.looks == look:
                self.is_over = True
                listener.expect(request)
            return -1.0

    request = lock_request()
    listener.touch()
    eventually(lambda: listener.is_ready)
    listener.scale(Ending())
    eventually(lambda: listener.is_ready and (listener.connection.append(request.token) or request.event.wait(0.1)))
    assert len(listener.connected_at) == 2


def test_a_store_that_is_away_is_not_asked_more_often_by_many_who_look(listener):
    listener.fails = True
    began = clock()
    while clock() - began < 1.0:
        listener.touch()
    assert len(listener.connected_at) <= (clock() - began) / 0.05 + 1
    pauses = [later - earlier for earlier, later in zip(listener.connected_at, listener.connected_at[1:], strict=False)]
    assert min(pauses) >= 0.04
    listener.fails = False
    eventually(lambda: listener.is_ready)


def test_what_was_found_out_about_one_subscription_does_not_end_the_next(listener):
    listener.meanwhile = listener.subscribe_again
    listener.touch()
    eventually(lambda: listener.is_ready)
    threading.Event().wait(0.2)
    assert len(listener.connected_at) == 1
    listener.subscribe_again()
    eventually(lambda: len(listener.connected_at) == 2)


def test_steps_that_a_fork_copied_leave_the_listener_of_the_child_alone(listener, monkeypatch):
    listener.stop()
    steps = listener.steps()
    assert next(steps).method == "connect"
    monkeypatch.setattr(wakeup_listener.fork, "is_copy", lambda pid: True)
    connection = []
    with pytest.raises(StopIteration):
        steps.send(connection)
    assert connection == ["disconnected"]
    assert not listener.is_ready


def test_nobody_waits_for_an_event_whose_time_is_over():
    assert not WakeEvent().wait(-0.1)
    assert not asyncio.run(WakeEvent().await_set(-0.1))
