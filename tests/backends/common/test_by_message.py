"""When a waiter takes its lease by the message that hands it over."""

from __future__ import annotations

import pytest

from django_distlock.backends.common.by_message import take
from django_distlock.backends.common.timing import Timing
from django_distlock.utils.clock import clock
from tests.support.tools import lock_request

PLACE = 1_800_000_000_000_000
TIMING = Timing()


@pytest.fixture
def request_in_queue():
    """One that has asked for its place, and was told since then that slot 2 is its own."""
    request = lock_request()
    request.place, request.placed_at, request.handed = f"{PLACE:016}", clock(), (2, PLACE + 1)
    return request


def test_with_what_the_message_says(request_in_queue):
    asked_at, sent = request_in_queue.placed_at, []
    grant = take(request_in_queue, TIMING, lambda *about: sent.append(about) is None, "a", "b")
    assert grant
    assert grant == (PLACE + 1, asked_at, 2)
    assert grant.ttl == TIMING.grant_ttl
    assert sent == [(request_in_queue, "a", "b")]
    assert (request_in_queue.slot, request_in_queue.is_unconfirmed) == (2, True)
    assert request_in_queue.handed is None


def test_not_without_the_command_that_confirms_it(request_in_queue):
    assert take(request_in_queue, TIMING, lambda _: False) is None
    assert not request_in_queue.is_unconfirmed


def test_not_long_after_its_question(request_in_queue):
    request_in_queue.placed_at -= TIMING.message_trusted
    assert take(request_in_queue, TIMING, pytest.fail) is None
    assert request_in_queue.handed is None


def test_not_with_a_number_that_is_not_above_its_place(request_in_queue):
    request_in_queue.handed = 1, PLACE
    assert take(request_in_queue, TIMING, pytest.fail) is None
