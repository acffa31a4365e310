"""The fast path of the database backend does what the algorithm on rows does."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import psycopg
import pytest

from django_distlock.backends.common import state
from django_distlock.backends.common.state import (
    CLAIMED,
    HELD,
    RESTING,
    Attempt,
    Row,
    StoredLease,
    Waiter,
    microseconds,
)
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database.libpq import Libpq
from django_distlock.backends.database.sql import Statements
from django_distlock.backends.database.statement import Statement
from django_distlock.types import new_token
from tests.support.databases import fast_path_for, operations_for, run_in, statements_for

SECOND = 1_000_000
KEY = b"lock:name"
INBOX = "an inbox"
TOKENS = [new_token() for _ in range(4)]
STATES = (HELD, HELD, CLAIMED, RESTING)
WAITER_TTL = microseconds(Timing.waiter_expires_after)
SLACK = 5 * SECOND  # that may pass between the two


@pytest.fixture(params=["postgres", "sqlite"])
def backend(request):
    return request.getfixturevalue(f"{request.param}_locks")


def make(dice, now):
    """Any row that may come to be."""
    fence = now - dice.choice((10, 3600 * SECOND))
    row = Row(now, 0, fence, ended=now - 100 * SECOND)
    taken = [*range(1, 1 + dice.choice((0, 1, 1, 1, 2)))]
    if dice.random() < 0.1:
        taken = [2]
    for slot, token in zip(taken, dice.sample(TOKENS, len(taken)), strict=True):
        expires = now + (-100 if dice.random() < 0.3 else 100) * SECOND
        row.leases.append(StoredLease(slot, token, dice.choice(STATES), fence - slot + 1, expires, "holder"))
    for token in dice.sample(TOKENS, dice.choice((0, 0, 1, 2, 3))):
        if not row.lease_of(token):
            seen = now + (-100 if dice.random() < 0.3 else 100) * SECOND
            slots = dice.choice((1, 1, 1, 2, 5))
            row.waiters.append(Waiter(now - 9 + len(row.waiters), token, INBOX, seen, slots))
    others = [token for token in TOKENS if not row.lease_of(token) and token not in [one.token for one in row.waiters]]
    if others and dice.random() < 0.2:
        row.retired[others[0]] = now + 100 * SECOND
    return row


def put(backend, row):
    """In place of what is there. Returns it as it is read."""

    def write(it):
        there = statements_for(backend).read(it, KEY)
        assert statements_for(backend).write(it, KEY, replace(row, version=there.version))
        return statements_for(backend).read(it, KEY)

    return run_in(backend, write)


def same(left, right):
    """But for the time that passed between them."""
    leases = [
        [(one.slot, one.token, one.state, one.holder.rstrip()) for one in row.live_leases] for row in (left, right)
    ]
    assert leases[0] == leases[1]
    for one, other in zip(left.live_leases, right.live_leases, strict=True):
        assert abs(one.expires - other.expires) < SLACK
        assert abs(one.fence - other.fence) < SLACK
    assert abs(left.fence - right.fence) < SLACK
    assert left.retired == right.retired
    living = [[one for one in row.waiters if one.seen + WAITER_TTL > row.now] for row in (left, right)]
    assert [(one.token, one.inbox) for one in living[0]] == [(one.token, one.inbox) for one in living[1]]
    places = [one.place for one in left.waiters]
    assert places == sorted(set(places))


def may_leave_a_slot(row):
    """To the next look of a waiter that wants more than one, and stands behind one that died."""
    are_alive = all(one.seen + WAITER_TTL > row.now for one in row.waiters)
    return not are_alive and any(one.slots > 1 for one in row.waiters)


def test_they_come_to_what_the_algorithm_comes_to(backend):
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    dice = random.Random(seed)
    fast_path = fast_path_for(backend)
    now = put(backend, Row(0)).now
    done = {"acquire": 0, "release": 0}
    for number in range(4000):
        if number >= 400 and min(done.values()) >= 10:
            break
        row = put(backend, make(dice, now))
        token, expected = dice.choice(TOKENS), replace(row, waiters=[*row.waiters], retired={**row.retired})
        if dice.random() < 0.5:
            mine = next((one.place for one in row.waiters if one.token == token), 0)
            place = mine or dice.choice((0, row.version + 1))
            slots = next((one.slots for one in row.waiters if one.token == token), dice.choice((1, 1, 2)))
            request = Attempt(token, 60 * SECOND, "me", dice.random() < 0.7, place, INBOX, slots)
            decision = state.acquire(expected, request)
            answer = run_in(backend, partial(fast_path.acquire, name=KEY, attempt=request))
            if answer is None or (may_leave_a_slot(row) and not answer.granted):
                continue
            done["acquire"] += 1
            assert decision.lease
            assert (answer.token, answer.slot) == (decision.lease.token, decision.lease.slot)
            assert abs(answer.fence - decision.lease.fence) < SLACK
            assert (answer.granted, bool(answer.place)) == (decision.granted, bool(decision.place))
            assert answer.is_first == decision.is_first
        else:
            token = dice.choice([*(lease.token for lease in row.leases * 2), token])
            decision = state.release(expected, token)
            release = partial(fast_path.release, name=KEY, token=token, by_message=dice.random() < 0.5)
            if not run_in(backend, release) or may_leave_a_slot(row):
                continue
            done["release"] += 1
            assert decision.granted
        same(run_in(backend, lambda it: statements_for(backend).read(it, KEY)), expected)
    assert min(done.values()) >= 10


def ask(backend, token, place=0, queue=True):
    request = Attempt(token, 60 * SECOND, "me", queue, place, INBOX)
    return run_in(backend, partial(fast_path_for(backend).acquire, name=KEY, attempt=request))


def test_a_lock_that_goes_from_hand_to_hand_takes_one_statement_per_step(backend, monkeypatch):
    put(backend, Row(0))  # the name was used before
    monkeypatch.setattr(Statements, "read", None)  # with which each compare-and-swap begins
    assert ask(backend, TOKENS[0]).granted
    places = {token: ask(backend, token).place for token in TOKENS[1:]}
    assert list(places.values()) == sorted(set(places.values()))
    assert [ask(backend, token, places[token]).is_first for token in TOKENS[1:]] == [True, False, False]
    fences = []
    for token, following in zip(TOKENS, [*TOKENS[1:], None], strict=True):
        assert run_in(backend, partial(operations_for(backend).release, name=KEY, token=token))
        if following:
            answer = ask(backend, following, places[following])
            assert answer.granted
            fences.append(answer.fence)
    assert fences == sorted(set(fences))
    assert ask(backend, TOKENS[0], queue=False).granted


def test_a_repeated_attempt_gets_no_second_place(backend):
    put(backend, Row(0))
    ask(backend, TOKENS[0])
    ask(backend, TOKENS[1])
    assert ask(backend, TOKENS[1]) is None
    assert len(run_in(backend, lambda it: statements_for(backend).read(it, KEY)).waiters) == 1


def test_a_statement_that_failed_when_it_was_prepared_is_not_prepared_again(postgres):
    """The server has it from then on, whatever became of the transaction."""
    statement = Statement("SELECT 6 / %s::int")
    with psycopg.connect(
        host=postgres.folder, user="tests", dbname="postgres", autocommit=True, prepare_threshold=1
    ) as connection:
        libpq = Libpq(connection)
        assert libpq.fetch_one(statement, [2]) == [3]
        with pytest.raises(psycopg.errors.DivisionByZero):
            libpq.fetch_one(statement, [0])
        assert libpq.fetch_one(statement, [2]) == [3]
        assert [row[0] for row in connection.execute("SELECT name FROM pg_prepared_statements")] == [
            statement.name.decode()
        ]
