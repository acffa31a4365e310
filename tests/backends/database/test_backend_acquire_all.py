"""Several locks in one transaction, or none of them and no row written."""

from __future__ import annotations

import threading

import pytest
from django.db import Error, connections

from django_distlock import LockBackendError, lock, lock_all
from django_distlock.backends.common import state
from django_distlock.backends.common.state import Attempt
from django_distlock.backends.database.engines import own_class
from django_distlock.backends.database.sql import Statements
from django_distlock.testing.tools import locked_names
from django_distlock.types import Grant
from tests.support.databases import ALIAS, row_key, statements_for
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request, renewer_of

NAMES = ("a", "b", "c")

backend = backend_on("postgres", "mariadb", "sqlite")


def requests(**more):
    return [lock_request(name, **more) for name in NAMES]


@pytest.fixture
def before_write(monkeypatch):
    """Call ``before_write(index, action)``: what happens just before that row is written."""
    actions, written = {}, []
    real = Statements.write

    def write(self, connection, name, row, notify=()):
        written.append(name)
        if action := actions.pop(len(written) - 1, None):
            action(connection)
        return real(self, connection, name, row, notify)

    monkeypatch.setattr(Statements, "write", write)
    return actions.__setitem__


def elsewhere(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)


def test_they_are_leases_as_any_other(backend):
    several = requests(ttl=40)
    grants = backend.acquire_all(several)
    assert [lease.fence for [lease] in backend.look(NAMES)] == [grant.fence for grant in grants]
    assert all(30 < left <= 40 for left in (lease.remaining for [lease] in backend.look(NAMES)))
    assert backend.renew([(request, 60.0) for request in several]) == [True] * 3
    assert [backend.release(request) for request in several] == [True] * 3


def test_where_another_process_takes_one_just_now_no_row_is_written(postgres_locks, before_write):
    other = lock_request("c")
    # By the fast path, which writes by itself
    before_write(1, lambda connection: elsewhere(lambda: postgres_locks.acquire(other, queue=False)))
    with lock("c"):  # its row exists
        pass
    assert postgres_locks.acquire_all(requests()) is None
    assert locked_names(postgres_locks) == ["c"]
    assert postgres_locks.release(other) is True
    assert len(postgres_locks.acquire_all(requests())) == 3  # on a connection whose transaction is over


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_that_fails_in_the_midst_leaves_no_row_written(backend, before_write, index):
    def fail(connection):
        raise ZeroDivisionError

    before_write(index, fail)
    several = requests()
    with pytest.raises(ZeroDivisionError):
        backend.acquire_all(several)
    assert all(request.in_doubt for request in several)
    assert locked_names(backend) == []
    assert len(backend.acquire_all(requests())) == 3


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_process_that_stops_in_the_midst_keeps_no_row_from_others(kind, request):
    backend = request.getfixturevalue(f"{kind}_locks")
    with lock("a"):  # its row exists
        pass
    name, statements = row_key(backend, "a"), statements_for(backend)
    stopped = backend.pool.open()
    try:
        with pytest.raises(Error), statements.transaction(stopped):
            row = statements.read(stopped, name)
            state.grant(row, Attempt.of(lock_request("a")))
            assert statements.write(stopped, name, row)
            with lock("a"):
                assert len(backend.look(["a"])[0]) == 1
    finally:
        backend.pool.close(stopped)
    assert locked_names(backend) == []


def test_a_full_disk_is_no_final_error(sqlite_locks, before_write):
    def fill(connection):
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA page_count")
            cursor.execute(f"PRAGMA max_page_count = {cursor.fetchone()[0]}")

    several = requests()
    several[1].holder = several[1].holder._replace(host="x" * 100_000)
    before_write(1, fill)
    with pytest.raises(LockBackendError, match="full") as failure:
        sqlite_locks.acquire_all(several)
    assert not failure.value.is_final
    assert locked_names(sqlite_locks) == []


def test_the_slots_of_each_are_counted(backend):
    first, second = requests(slots=2), requests(slots=2)
    assert [grant.slot for grant in backend.acquire_all(first)] == [1, 1, 1]
    assert [grant.slot for grant in backend.acquire_all(second)] == [2, 2, 2]
    assert [request.slot for request in second] == [2, 2, 2]
    assert backend.acquire_all(requests(slots=2)) is None
    assert [backend.release(request) for request in first + second] == [True] * 6


def test_a_connection_that_a_driver_opens_anew_unasked_counts_as_lost(mariadb_locks, before_write, monkeypatch):
    """As PyMySQL does up to 1.1, when it is asked whether it is usable."""

    def end_session(connection):
        ended = connection.connection.thread_id()
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("KILL %s", [ended])
            eventually(
                lambda: not cursor.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", [ended])
            )

    before_write(2, end_session)
    monkeypatch.setattr(own_class("django.db.backends.mysql"), "is_usable", lambda wrapper: True)
    several = requests()
    assert len(mariadb_locks.acquire_all(several)) == 3
    assert all(request.in_doubt for request in several)


class TestLostReplies:
    """Of PostgreSQL, whose sessions can be ended at any point."""

    def end_session(self, connection):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    def test_a_session_that_ends_before_the_commit_is_repeated(self, postgres_locks, before_write):
        before_write(2, self.end_session)
        several = requests()
        assert len(postgres_locks.acquire_all(several)) == 3
        assert all(request.in_doubt for request in several)
        assert [lease.token for [lease] in postgres_locks.look(NAMES)] == [request.token for request in several]

    def test_an_answer_to_the_commit_that_is_lost_is_repeated(self, postgres_locks, monkeypatch):
        real, lost = Statements.transaction, []

        def transaction(self, connection):
            class Committed:
                def __enter__(self):
                    self.inner = real(statements, connection)
                    self.inner.__enter__()

                def __exit__(self, *error):
                    self.inner.__exit__(*error)
                    if not lost:
                        lost.append(True)
                        with connection.cursor() as cursor:
                            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

            statements = self
            return Committed()

        monkeypatch.setattr(Statements, "transaction", transaction)
        several = requests()
        grants = postgres_locks.acquire_all(several)
        assert lost == [True]
        assert [lease.fence for [lease] in postgres_locks.look(NAMES)] == [grant.fence for grant in grants]
        assert [postgres_locks.release(request) for request in several] == [True] * 3

    def test_where_it_is_lost_for_good_every_token_is_retired(self, postgres_locks, before_write):
        before_write(2, self.end_session)
        before_write(5, self.end_session)
        with pytest.raises(LockBackendError), lock_all(*map(lock, NAMES), wait=0):
            pytest.fail("the body ran")
        eventually(lambda: not renewer_of(postgres_locks).is_cleaning)
        assert locked_names(postgres_locks) == []

    def test_a_token_that_is_retired_stops_all(self, backend):
        several = requests()
        several[1].in_doubt = True
        backend.release(several[1])
        assert backend.acquire_all(several) is None
        assert locked_names(backend) == []
        assert isinstance(backend.acquire(lock_request("b"), queue=False), Grant)
