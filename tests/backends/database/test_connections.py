"""Statements that are posted on idle connections, whose answers nobody waits for."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connections

from django_distlock import locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database.libpq import Libpq
from django_distlock.backends.database.statement import Statement
from tests.support.databases import run_in
from tests.support.stores import DATABASE
from tests.support.tools import eventually, lock_request

SETTING = "SELECT set_config('distlock.told', CAST(%s AS text), false)"
TOLD = Statement(SETTING)
ASKED = Statement("SELECT current_setting('distlock.told', true), pg_backend_pid()")
FAILS = Statement("SELECT 1 / (CAST(%s AS integer) - 1)")


def asked(backend):
    return run_in(backend, lambda it: ASKED.fetch_one(it, []))


@pytest.fixture
def pool(postgres_locks):
    return postgres_locks.pool


def test_it_is_executed_before_the_next_call_there(postgres_locks, pool):
    _, session = asked(postgres_locks)
    for number in range(2 * pool.prepare_after):  # it is prepared at last
        assert pool.post(TOLD, [f"yes {number}"])
        assert asked(postgres_locks) == [f"yes {number}", session]


def test_its_failure_is_nobodys_else(postgres_locks, pool):
    asked(postgres_locks)
    assert pool.post(FAILS, [1])
    told, _ = asked(postgres_locks)
    assert not told


def test_not_where_no_connection_is_idle(postgres_locks, pool):
    assert not pool.post(TOLD, ["yes"])
    assert not run_in(postgres_locks, lambda _: pool.post(TOLD, ["yes"]))


def test_not_behind_another_one(postgres_locks, pool):
    asked(postgres_locks)
    assert pool.post(TOLD, ["first"])
    assert not pool.post(TOLD, ["second"])
    assert asked(postgres_locks)[0] == "first"


def test_not_on_a_connection_that_may_have_ended_unnoticed(postgres_locks, pool, monkeypatch):
    _, session = asked(postgres_locks)
    monkeypatch.setattr(Timing, "idle_trusted", 0.0)
    assert not pool.post(TOLD, ["yes"])
    assert asked(postgres_locks)[1] == session


@pytest.mark.parametrize("when", ["before", "after"])
def test_where_the_connection_ended_the_next_call_has_another_one(postgres_locks, pool, when):
    def end():
        with connections["locks"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [session])
            eventually(lambda: not cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [session]).rowcount)

    _, session = asked(postgres_locks)
    if when == "before":
        end()
    is_posted = pool.post(TOLD, ["yes"])
    if when == "after":
        assert is_posted
        end()
    told, other = asked(postgres_locks)
    assert (told, other != session) == (None, True)


def test_one_that_ended_while_it_was_idle_for_long_is_not_used(postgres_locks, pool, monkeypatch):
    """So nothing is in doubt."""
    request = lock_request(ttl=60)
    postgres_locks.acquire(request, queue=False)
    _, session = asked(postgres_locks)
    monkeypatch.setattr(Timing, "idle_trusted", 0.0)
    with connections["locks"].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [session])
    eventually(lambda: not Path(f"/proc/{session}").exists())  # and so its sockets are closed
    assert postgres_locks.release(request)
    assert postgres_locks.look([request.name]) == [[]]  # it does not rest, as it would after a repeated release


def test_one_on_which_the_answer_was_not_read_to_its_end_is_closed(postgres_locks, pool, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    _, session = asked(postgres_locks)
    assert pool.post(TOLD, ["yes"])
    with monkeypatch.context() as patch:
        patch.setattr(Libpq, "read_posted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            asked(postgres_locks)
    with connections["locks"].cursor() as cursor:
        eventually(lambda: not cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [session]).rowcount)
    assert asked(postgres_locks)[1] != session


def test_a_health_check_comes_after_the_answer(postgres_database, settings, long_calls):
    connections.settings["locks"]["CONN_HEALTH_CHECKS"] = True
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "locks"}}
    backend = locks["default"]
    _, session = asked(backend)
    assert backend.pool.post(TOLD, ["yes"])
    backend.pool.close_old()  # as at the begin of a request: then the next call checks the connection
    assert asked(backend) == ["yes", session]
    locks.close()
