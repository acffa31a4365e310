"""The algorithm of the database backend, on rows alone."""

from __future__ import annotations

import pytest

from django_distlock.backends.common import state
from django_distlock.backends.common.state import Attempt, Row, microseconds
from django_distlock.backends.common.timing import Timing

SECOND = 1_000_000
START = 1_700_000_000 * SECOND


@pytest.fixture
def row():
    return Row(START)


def request(token, *, queue=True, place=0, ttl=10 * SECOND):
    return Attempt(token, ttl, f"holder {token}", queue, place, "inbox")


def test_a_free_lock_is_granted_with_the_time_as_its_number(row):
    assert state.acquire(row, request("a")).granted
    assert (row.token, row.state, row.fence, row.expires) == ("a", "h", START, START + 10 * SECOND)


def test_numbers_grow_when_the_clock_does_not(row):
    for token in "abc":
        state.acquire(row, request(token))
        state.release(row, token)
    assert row.fence == START + 2


def test_waiters_get_places_in_the_order_they_came(row):
    state.acquire(row, request("holder"))
    places = [state.acquire(row, request(token)).place for token in "abc"]
    assert places == sorted(set(places))
    order = []
    for _ in "abc":
        told = state.release(row, row.token).notify
        assert state.acquire(row, request(told.token, place=told.place)).granted
        order.append(told.token)
    assert order == ["a", "b", "c"]


def test_only_the_first_is_told_when_the_lease_ends(row):
    state.acquire(row, request("holder"))
    assert state.acquire(row, request("a")).is_first
    assert not state.acquire(row, request("b")).is_first


def test_who_does_not_wait_never_barges(row):
    state.acquire(row, request("holder", ttl=SECOND))
    state.acquire(row, request("waiter"))
    row.now += SECOND
    decision = state.acquire(row, request("barger", queue=False))
    assert (decision.granted, decision.notify.token, row.state) == (False, "waiter", "c")
    assert row.expires == row.now + microseconds(Timing.grant_ttl)


def test_a_waiter_that_does_not_look_is_passed_over_and_comes_back_to_its_place(row):
    state.acquire(row, request("holder"))
    silent = state.acquire(row, request("silent")).place
    row.now += microseconds(Timing.waiter_expires_after)
    other = state.acquire(row, request("other"))
    assert other.is_first
    assert state.acquire(row, request("silent", place=silent)).is_first
    assert [waiter.token for waiter in row.waiters] == ["silent", "other"]


def test_a_grant_that_is_not_taken_goes_to_the_next(row):
    state.acquire(row, request("holder"))
    dead = state.acquire(row, request("dead")).place
    state.acquire(row, request("next"))
    assert state.release(row, "holder").notify.token == "dead"
    row.now += microseconds(Timing.grant_ttl)
    assert state.acquire(row, request("next", place=dead + 1)).granted


def test_a_grant_that_is_handed_back_goes_to_the_next(row):
    state.acquire(row, request("holder"))
    for token in "ab":
        state.acquire(row, request(token))
    state.release(row, "holder")
    assert state.release(row, "a").notify.token == "b"


def test_a_retired_token_gets_nothing_until_its_time_is_over(row):
    state.acquire(row, request("gone"))
    state.release(row, "gone", retire=10 * SECOND)
    assert row.careful_until == START + 10 * SECOND
    assert state.acquire(row, request("gone")).is_retired
    assert state.acquire(row, request("other")).granted
    row.now += 20 * SECOND
    assert state.acquire(row, request("gone")).granted


def test_a_cooldown_is_final_but_for_an_operator(row):
    state.acquire(row, request("a"))
    assert state.release(row, "a", cooldown=SECOND).granted
    assert state.acquire(row, request("a")).is_retired
    assert state.release(row, "a", cooldown=60 * SECOND).granted
    assert row.expires == START + SECOND
    assert state.release(row, "a", force=True).granted
    assert not row.is_taken


def test_texts(row):
    state.acquire(row, request("holder"))
    state.acquire(row, request("a"))
    state.release(row, "b", retire=SECOND)
    assert state.waiters_from_text(state.waiters_to_text(row.waiters)) == row.waiters != []
    assert state.retired_from_text(state.retired_to_text(row.retired)) == row.retired != {}
    assert state.waiters_from_text(state.waiters_to_text([])) == []
    assert state.retired_from_text(state.retired_to_text({})) == {}
