"""The circuit breaker by itself: by a clock that stands still until it is told to move."""

from __future__ import annotations

import pytest

from django_distlock.backends.common import breaker as module
from django_distlock.backends.common.breaker import CircuitBreaker
from django_distlock.backends.common.timing import Timing

SILENT = Exception("no answer")
LONGEST_PROBE = Timing.probe_pause_longest + 2.0 + Timing.probe_slack


class Breaker(CircuitBreaker):
    asked = 0

    def _ask(self) -> None:
        self.asked += 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def failing(self, breaker: Breaker, seconds: float, *, refused: bool = False) -> bool:
        """An attempt that begins now and fails after so many seconds."""
        began = self.now
        self.now += seconds
        return breaker.failed(began, SILENT, refused=refused)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "clock", clock)
    return clock


@pytest.fixture
def breaker(clock):
    return Breaker(2.0, 0.0, Timing())


def test_a_refused_connection_opens_it(clock, breaker):
    assert clock.failing(breaker, 0.001, refused=True)
    assert breaker.is_open
    assert breaker.failure is SILENT
    assert breaker.asked == 1


def test_two_attempts_in_a_row_that_had_the_whole_timeout_open_it(clock, breaker):
    assert clock.failing(breaker, 2.0)  # which is news
    assert not breaker.is_open
    clock.now += 100.0
    assert clock.failing(breaker, 2.0)
    assert breaker.is_open


def test_so_do_two_at_the_same_time(clock, breaker):
    began, clock.now = clock.now, clock.now + 2.0
    breaker.failed(began, SILENT, refused=False)
    assert not breaker.is_open
    breaker.failed(began, SILENT, refused=False)
    assert breaker.is_open


def test_those_of_impatient_callers_do_not_however_many_they_are(clock, breaker):
    """The server may be slow, and answer others in time."""
    for _ in range(20):
        clock.failing(breaker, 0.5)
    began, clock.now = clock.now, clock.now + 0.5
    for _ in range(20):
        breaker.failed(began, SILENT, refused=False)
    assert not breaker.is_open


def test_but_have_it_asked_with_the_whole_timeout_which_counts(clock, breaker):
    clock.failing(breaker, 2.0)
    assert not breaker.asked
    clock.failing(breaker, 0.5)
    assert breaker.asked == 1
    began, clock.now = clock.now, clock.now + 2.0
    assert breaker.count(began, SILENT, refused=False)
    assert breaker.is_open


def test_what_nobody_wanted_does_not_keep_it_asked(clock, breaker):
    clock.failing(breaker, 0.5)
    wanted_at = breaker.wanted_at
    began, clock.now = clock.now, clock.now + 2.0
    breaker.count(began, SILENT, refused=False)
    assert breaker.wanted_at == wanted_at


def test_an_answer_in_between_begins_the_count_anew(clock, breaker):
    clock.failing(breaker, 2.0)
    breaker.answered_at = clock.now = clock.now + 1.0
    assert not breaker.is_failing
    clock.now += 1.0
    assert clock.failing(breaker, 2.0)
    assert not breaker.is_open


def test_what_began_before_an_answer_says_nothing(clock, breaker):
    breaker.answered_at = clock.now + 1.0
    assert not clock.failing(breaker, 2.0)
    assert not clock.failing(breaker, 0.0, refused=False) or breaker.is_failing
    assert not breaker.is_open


def test_an_answer_closes_it(clock, breaker):
    clock.failing(breaker, 0.001, refused=True)
    breaker.answered_at = clock.now
    assert not breaker.is_open
    assert not breaker.is_tripped


def test_where_another_server_may_take_over_it_has_time_for_that(clock):
    breaker = Breaker(2.0, 30.0, Timing())
    while clock.now < 129.0:
        clock.failing(breaker, 1.0, refused=True)
        assert not breaker.is_open
    clock.failing(breaker, 1.0, refused=True)
    assert breaker.is_open


def test_nobody_keeps_it_open_who_does_not_ask(clock, breaker):
    """A thread that does not get to run must not turn callers away for ever."""
    clock.failing(breaker, 0.001, refused=True)
    clock.now += LONGEST_PROBE - 0.1
    assert breaker.is_open
    clock.now += 0.2
    assert not breaker.is_open
    assert breaker.is_tripped
    clock.failing(breaker, 0.001, refused=True)
    assert breaker.is_open
    assert breaker.asked == 2
    breaker.keep_open(clock.now + 10.0)
    clock.now += 10.0
    assert breaker.is_open
