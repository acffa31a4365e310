"""The algorithm of the database backend, on rows alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from django_distlock.backends.common import state
from django_distlock.backends.common.state import Attempt, Row, StoredLease, microseconds
from django_distlock.backends.common.timing import Timing

SECOND = 1_000_000
START = 1_700_000_000 * SECOND


@pytest.fixture
def row():
    return Row(START)


def request(token, *, queue=True, place=0, ttl=10 * SECOND, slots=1):
    return Attempt(token, ttl, f"holder {token}", queue, place, "inbox", slots)


def tokens(row):
    """Of the leases, by slot."""
    return {lease.slot: lease.token for lease in row.leases}


def test_a_free_lock_is_granted_with_the_time_as_its_number(row):
    assert state.acquire(row, request("a")).granted
    assert row.leases == [StoredLease(1, "a", "h", START, START + 10 * SECOND, "holder a")]


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
        [told] = state.release(row, row.leases[0].token).notify
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
    assert not decision.granted
    assert [told.token for told in decision.notify] == ["waiter"]
    [claim] = row.leases
    assert (claim.token, claim.state, claim.expires) == ("waiter", "c", row.now + microseconds(Timing.grant_ttl))


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
    assert [told.token for told in state.release(row, "holder").notify] == ["dead"]
    row.now += microseconds(Timing.grant_ttl)
    assert state.acquire(row, request("next", place=dead + 1)).granted


def test_a_grant_that_is_handed_back_goes_to_the_next(row):
    state.acquire(row, request("holder"))
    for token in "ab":
        state.acquire(row, request(token))
    state.release(row, "holder")
    assert [told.token for told in state.release(row, "a").notify] == ["b"]


def test_a_retired_token_gets_nothing_until_its_time_is_over(row):
    state.acquire(row, request("gone"))
    state.release(row, "gone", retire=10 * SECOND)
    assert row.careful_until == START + 10 * SECOND
    assert state.acquire(row, request("gone")).lease is None
    assert state.acquire(row, request("other")).granted
    row.now += 20 * SECOND
    assert state.acquire(row, request("gone")).granted


def test_a_cooldown_is_final_but_for_an_operator(row):
    state.acquire(row, request("a"))
    assert state.release(row, "a", cooldown=SECOND).granted
    assert state.acquire(row, request("a")).lease is None
    assert state.release(row, "a", cooldown=60 * SECOND).granted
    assert row.leases[0].expires == START + SECOND
    assert state.release(row, "a", force=True).granted
    assert row.leases == []
    assert row.ended == START


class TestFreeFor:
    """What is asked of each lock before several are granted in one step."""

    def test_whoever_would_be_granted_it(self, row):
        assert state.is_free_for(row, request("a"))
        state.acquire(row, request("a"))
        assert state.is_free_for(row, request("a"))  # repeated
        assert not state.is_free_for(row, request("b"))
        assert state.is_free_for(row, request("b", slots=2))

    def test_nobody_who_would_pass_a_waiter(self, row):
        state.acquire(row, request("a"))
        state.acquire(row, request("b"))  # which waits for the only slot
        assert not state.is_free_for(row, request("c", slots=2))

    def test_nobody_whose_token_is_retired_or_rests(self, row):
        state.release(row, "a", retire=SECOND)
        assert not state.is_free_for(row, request("a"))
        state.acquire(row, request("b"))
        state.release(row, "b", cooldown=SECOND)
        assert not state.is_free_for(row, request("b"))

    def test_a_lease_that_ran_out_is_in_nobodys_way(self, row):
        state.acquire(row, request("a", ttl=SECOND))
        row.now += SECOND
        assert state.is_free_for(row, request("b"))


class TestSlots:
    def test_the_lowest_slot_that_is_free_is_taken(self, row):
        for token in "abcd":
            assert state.acquire(row, request(token, slots=4)).granted
        state.release(row, "b")
        state.release(row, "c")
        assert state.acquire(row, request("e", slots=4)).lease.slot == 2
        assert tokens(row) == {1: "a", 2: "e", 4: "d"}

    def test_each_number_counts_all_leases(self, row):
        for token in "ab":
            assert state.acquire(row, request(token, slots=5)).granted
        assert not state.acquire(row, request("c", slots=2, queue=False)).granted
        assert not state.acquire(row, request("d", queue=False)).granted
        assert state.acquire(row, request("e", slots=3, queue=False)).granted

    def test_what_ended_is_handed_to_as_many_waiters_in_one_step(self, row):
        for token in "abc":
            state.acquire(row, request(token, ttl=SECOND, slots=3))
        places = [state.acquire(row, request(token, slots=3)).place for token in "wxyz"]
        row.now += SECOND
        decision = state.acquire(row, request("w", place=places[0], slots=3))
        assert decision.granted
        assert [told.token for told in decision.notify] == ["x", "y"]
        assert tokens(row) == {1: "w", 2: "x", 3: "y"}
        assert [lease.state for lease in row.leases] == ["h", "c", "c"]
        assert [waiter.token for waiter in row.waiters] == ["z"]

    def test_the_first_waits_for_its_own_number_and_nobody_passes_it(self, row):
        for token in "ab":
            state.acquire(row, request(token, slots=5))
        alone, more = (state.acquire(row, request(token, slots=slots)) for token, slots in (("alone", 1), ("more", 5)))
        assert state.release(row, "a").notify == []
        assert not state.acquire(row, request("more", place=more.place, slots=5)).granted
        assert [told.token for told in state.release(row, "b").notify] == ["alone", "more"]
        assert alone.is_first

    @pytest.mark.parametrize("leaves", ["release", "acquire"])
    def test_who_leaves_lets_those_behind_have_what_is_free(self, row, leaves):
        state.acquire(row, request("a", slots=5))
        alone = state.acquire(row, request("alone")).place
        for token in "xy":
            assert not state.acquire(row, request(token, slots=3)).granted
        if leaves == "release":
            decision = state.release(row, "alone")
        else:
            decision = state.acquire(row, request("alone", place=alone, queue=False))
        assert [told.token for told in decision.notify] == ["x", "y"]
        assert tokens(row) == {1: "a", 2: "x", 3: "y"}

    def test_who_becomes_the_first_is_told_that_another_lease_ends_soon(self, row):
        state.acquire(row, request("ends soon", ttl=10 * SECOND, slots=2))
        state.acquire(row, request("b", ttl=60 * SECOND, slots=2))
        for token in "xy":
            state.acquire(row, request(token, slots=2))
        row.now += 9 * SECOND + SECOND // 2
        row.waiters = [replace(waiter, seen=row.now) for waiter in row.waiters]
        assert [told.token for told in state.release(row, "b").notify] == ["x", "y"]
        assert [waiter.token for waiter in row.waiters] == ["y"]

    def test_a_renewal_is_of_one_slot(self, row):
        for token in "ab":
            state.acquire(row, request(token, slots=2))
        assert row.renew("b", 60 * SECOND)
        assert not row.renew("c", 60 * SECOND)
        assert [lease.expires for lease in row.leases] == [START + 10 * SECOND, START + 60 * SECOND]
        assert row.careful_until == START + 60 * SECOND


def test_texts(row):
    state.acquire(row, request("holder"))
    state.acquire(row, request("a"))
    state.release(row, "b", retire=SECOND)
    assert state.waiters_from_text(state.waiters_to_text(row.waiters)) == row.waiters != []
    assert state.retired_from_text(state.retired_to_text(row.retired)) == row.retired != {}
    assert state.waiters_from_text(state.waiters_to_text([])) == []
    assert state.leases_from_text(state.leases_to_text(row.leases)) == row.leases != []
    assert state.leases_from_text(state.leases_to_text([])) == []
    assert state.retired_from_text(state.retired_to_text({})) == {}


def test_a_lease_is_exchanged_in_its_slot_and_waiters_wait_on(row):
    for token in ("first", "old"):
        state.acquire(row, request(token, slots=2))
    state.acquire(row, request("waiter", slots=2))
    fence = row.fence
    decision = state.exchange(row, "old", request("new", queue=False, slots=2))
    assert (decision.granted, decision.lease.slot, decision.lease.fence) == (True, 2, fence + 1)
    assert tokens(row) == {1: "first", 2: "new"}
    assert [waiter.token for waiter in row.waiters] == ["waiter"]


def test_the_first_waiter_is_told_of_an_exchange_whose_lease_ends_soon(row):
    state.acquire(row, request("old"))
    state.acquire(row, request("waiter"))
    assert not state.exchange(row, "old", request("new", queue=False)).notify
    [told] = state.exchange(row, "new", request("short", queue=False, ttl=SECOND // 2)).notify
    assert told.token == "waiter"


def test_what_was_only_handed_over_is_not_exchanged(row):
    state.acquire(row, request("holder"))
    state.acquire(row, request("waiter"))
    state.release(row, "holder")
    assert not state.exchange(row, "waiter", request("new", queue=False)).granted
    assert tokens(row) == {1: "waiter"}


def test_a_retired_token_exchanges_nothing(row):
    state.acquire(row, request("old"))
    state.release(row, "new", retire=SECOND)
    assert not state.exchange(row, "old", request("new", queue=False)).granted
    assert tokens(row) == {1: "old"}
    assert state.exchange(row, "old", request("other", queue=False), retire=SECOND).granted
    state.release(row, "other")
    assert not state.acquire(row, request("old", queue=False)).granted
    assert tokens(row) == {}
