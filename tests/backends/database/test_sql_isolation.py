"""Databases whose transactions see the past by default, and statements that the database undoes for others' sake."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager

import pytest
from django.db import connections

from django_distlock import LockBackendError, locks
from django_distlock.types import Grant
from tests.support.databases import ALIAS, TABLE, known_database, row_key, run_in
from tests.support.postgres import PLACES_OF_BOUNCER, Bouncer
from tests.support.requirements import missing
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, eventually, lock_request

pytestmark = [pytest.mark.slow, pytest.mark.once]

LEVELS = ("repeatable read", "serializable")


def execute(sql, *parameters):
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else None


def defaults_of(backend):
    def read(connection):
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('transaction_isolation')")
            return cursor.fetchone()[0]

    return run_in(backend, read)


@contextmanager
def locks_at(settings, database, timeout=2.0):
    with known_database(database, "set"):
        options = {"timeout": timeout}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "set", "OPTIONS": options}}
        connections["set"].close()
        yield locks["default"]
        locks.close()


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture
def of_role(postgres_database, level):
    """The level is that of the user: sessions that begin from now on have it."""
    execute(f"ALTER ROLE tests SET default_transaction_isolation = '{level}'")
    yield level
    execute("ALTER ROLE tests RESET default_transaction_isolation")


@pytest.fixture(params=["role", "options", "pooler"])
def backend(request, postgres, postgres_database, settings, level):
    """Its sessions are at that level by default, as the user, the settings or those of a pooler are.

    Its calls wait for the test, which may take its time.
    """
    database = postgres.settings()
    if request.param == "options":
        database["OPTIONS"] = {"options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"}
        with locks_at(settings, database, 6 * PATIENCE) as backend:
            yield backend
        return
    request.getfixturevalue("of_role")
    if request.param == "role":
        with locks_at(settings, database, 6 * PATIENCE) as backend:
            yield backend
        return
    if (program := shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)) is None:
        missing("pgbouncer", "install the package pgbouncer")
    with Bouncer(program, postgres) as bouncer, locks_at(settings, bouncer.settings(), 6 * PATIENCE) as backend:
        yield backend


def while_its_row_changes(backend, call):
    """What the call comes to whose statement finds the row changed by another that it has to wait for."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    key = row_key(backend, "name")
    execute("BEGIN")
    try:
        execute(f"UPDATE {TABLE} SET version = version + 1 WHERE name = %s", key)
        thread.start()
        # pg_stat_activity would tell this transaction the same at each look.
        waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        eventually(lambda: execute(waits) == [(True,)], 6 * PATIENCE)
    finally:
        execute("COMMIT")
        thread.join(PATIENCE)
    return answers[0]


class TestLevels:
    """In a row that another one has changed meanwhile, PostgreSQL refuses to change anything at those levels."""

    def test_release(self, backend):
        mine = lock_request(ttl=60)
        backend.acquire(mine, queue=False)
        assert while_its_row_changes(backend, lambda: backend.release(mine)) is True
        assert not mine.in_doubt
        assert backend.look(["name"]) == [[]]

    def test_renewal(self, backend):
        mine = lock_request(ttl=60)
        backend.acquire(mine, queue=False)
        assert while_its_row_changes(backend, lambda: backend.renew([(mine, 120.0)])) == [True]
        assert backend.look(["name"])[0][0].remaining > 60

    @pytest.mark.parametrize("queue", [False, True])
    def test_an_attempt(self, backend, queue):
        mine, other = lock_request(ttl=60), lock_request(ttl=60)
        backend.acquire(mine, queue=False)
        backend.release(mine)
        answer = while_its_row_changes(backend, lambda: backend.acquire(other, queue=queue))
        assert isinstance(answer, Grant)
        assert not other.in_doubt


def test_sessions_of_a_pooler_are_left_as_they_are(postgres, of_role, settings):
    """Others use them, too, and rely on what their user is set to."""
    if (program := shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)) is None:
        missing("pgbouncer", "install the package pgbouncer")
    with Bouncer(program, postgres) as bouncer, locks_at(settings, bouncer.settings()) as backend:
        assert defaults_of(backend) == of_role
    with locks_at(settings, postgres.settings()) as backend:
        assert defaults_of(backend) == "read committed"


UNDONE = {
    "postgres": [
        "DO $$ BEGIN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '40001'; END $$",
        "DO $$ BEGIN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END $$",
    ],
    "mariadb": [
        "BEGIN NOT ATOMIC SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'; END",
        "BEGIN NOT ATOMIC SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1020, MESSAGE_TEXT = 'Record has changed'; END",
    ],
}


@pytest.mark.parametrize(("kind", "sql"), [(kind, sql) for kind, several in UNDONE.items() for sql in several])
class TestUndone:
    def test_it_is_tried_again(self, request, kind, sql):
        backend, times = request.getfixturevalue(f"{kind}_locks"), [3]

        def work(connection):
            if times[0]:
                times[0] -= 1
                with connection.cursor() as cursor:
                    cursor.execute(sql)
            return "done"

        assert backend.calls.run_or_repeat(work) == ("done", False)

    def test_it_is_an_error_at_last_after_which_nothing_may_arrive(self, request, kind, sql):
        backend = request.getfixturevalue(f"{kind}_locks")

        def work(connection):
            with connection.cursor() as cursor:
                cursor.execute(sql)

        with pytest.raises(LockBackendError) as caught:
            backend.calls.run_or_repeat(work, 1.0)
        assert type(caught.value) is LockBackendError  # not one that says that it may have been done
