"""``manage.py locks prune``: rows go by their age, other backends are named, and the code it ends with."""

from __future__ import annotations

import json
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from django_distlock import locks
from django_distlock.journal import Event, JournalEntry
from django_distlock.models import DatabaseLock
from django_distlock.runs import LastRun
from tests.support.commands import said
from tests.support.databases import ALIAS
from tests.support.stores import DATABASE, LOCMEM, REDIS
from tests.support.tools import lock_request, locked_names

TABLE = DatabaseLock._meta.db_table
MOMENTS = ("expires", "fence", "careful_until")
DAY = 86_400


def released(backend, *names: str) -> None:
    for name in names:
        taken = lock_request(name)
        backend.acquire(taken, queue=False)
        backend.release(taken)


def execute(backend, sql: str):
    with backend.pool.connection(1) as opened:
        return opened.connection.execute(sql)


def days_pass(backend, days: float) -> None:
    """All that is in the table happened so much earlier."""
    past = int(days * DAY * 1e6)
    execute(backend, f"UPDATE {TABLE} SET {', '.join(f'{column} = {column} - {past}' for column in MOMENTS)}")


def rows(backend) -> int:
    return execute(backend, f"SELECT count(*) FROM {TABLE}").fetchone()[0]


@pytest.fixture(params=["postgres", "sqlite"])
def database(request):
    return request.getfixturevalue(f"{request.param}_locks")


def test_rows_older_than_thirty_days_go(database):
    released(database, "old")
    days_pass(database, 2)
    released(database, "young")
    days_pass(database, 29)
    database.acquire(lock_request("held", ttl=60), queue=False)
    text = said("prune")
    assert text == (
        "default: 1 row deleted, of locks that nobody has held for 30 d 00 h, and of runs of beat and journals as"
        " old.\n"
    )
    assert rows(database) == 2
    assert "default: 0 rows deleted" in said("prune")


def test_the_age_is_said(database):
    released(database, "old")
    days_pass(database, 2)
    released(database, "young")
    days_pass(database, 0.5)
    assert "0 rows deleted, of locks that nobody has held for 3 d 00 h" in said("prune", "--older-than", "3d")
    assert "1 row deleted" in said("prune", "--older-than", str(DAY))
    assert "1 row deleted" in said("prune", "--older-than", "0")
    assert rows(database) == 0


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def any_database(request):
    return request.getfixturevalue(f"{request.param}_locks")


def test_rows_are_deleted_page_by_page(any_database):
    """Whatever stands between them and at the end of a page."""
    any_database.batch_size = 4
    old = [f"{number:03}" for number in range(30) if number % 7 not in (3, 4) and number // 4 != 2]
    kept = [f"{number:03}" for number in range(30) if f"{number:03}" not in old]
    released(any_database, *old)
    for name in kept:
        any_database.acquire(lock_request(name, ttl=60), queue=False)
    for number in range(9):
        any_database.claim_run(f"entry {number}", LastRun(100.0), LastRun(100.0), 0.001)
    time.sleep(0.05)
    assert any_database.prune(0) == len(old) + 9
    assert locked_names(any_database) == kept
    assert any_database.prune(0) == 0


def test_a_journal_to_which_nobody_writes_any_more_goes(any_database, settings):
    """Because JOURNAL is not set now, or KEY_PREFIX has changed."""

    def keep_a_journal(prefix, age):
        entry = {**settings.DISTRIBUTED_LOCKS["default"], "JOURNAL": 100, "KEY_PREFIX": prefix}
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        told = JournalEntry(time.time() - age, Event.RELEASED, "a", "lease", None).to_text()
        locks["default"].write_journal([told] * 7)

    keep_a_journal("left", 2 * DAY)
    keep_a_journal("in use", 2 * DAY)
    keep_a_journal("in use", DAY / 2)
    backend = locks["default"]
    backend.batch_size = 4
    assert backend.prune(3 * DAY) == 0
    assert backend.prune(DAY) == 7
    assert len(backend.read_journal()) == 14
    assert backend.prune(DAY) == 0


def test_as_many_as_there_are(postgres_locks, settings):
    """No statement takes longer than others wait for an answer, though all together do."""
    entry = settings.DISTRIBUTED_LOCKS["default"]
    settings.DISTRIBUTED_LOCKS = {"default": {**entry, "OPTIONS": {"timeout": 1.0}}}
    backend = locks["default"]
    backend.batch_size = 5
    released(backend, *map(str, range(60)))
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql"
            " AS 'BEGIN PERFORM pg_sleep(0.05); RETURN OLD; END';"
            f" CREATE TRIGGER slowly BEFORE DELETE ON {TABLE} FOR EACH ROW EXECUTE FUNCTION slowly()"
        )
        try:
            assert backend.prune(0) == 60
        finally:
            cursor.execute("DROP FUNCTION slowly CASCADE")


def test_a_held_lock_stays_held(sqlite_locks):
    sqlite_locks.acquire(lock_request("held", ttl=60), queue=False)
    assert "0 rows deleted" in said("prune", "--older-than", "0")
    assert locked_names(sqlite_locks) == ["held"]


@pytest.mark.parametrize("age", ["-1", "inf", "nan", "soon"])
def test_an_age_that_is_none_is_wrong_usage(sqlite_locks, age):
    released(sqlite_locks, "old")
    days_pass(sqlite_locks, 31)
    with pytest.raises(CommandError, match=f"'{age}' is no length of time"):
        call_command("locks", "prune", f"--older-than={age}")
    assert rows(sqlite_locks) == 1


@pytest.fixture
def several(sqlite_locks, settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}, "rows": {"BACKEND": DATABASE, "LOCATION": ALIAS}}
    released(locks["rows"], "old")
    days_pass(locks["rows"], 31)
    yield settings
    locks.close()


def test_other_backends_are_named(several):
    assert said("prune").splitlines() == [
        "default: LocMemBackend keeps no rows of free locks.",
        "rows: 1 row deleted, of locks that nobody has held for 30 d 00 h, and of runs of beat and journals as old.",
    ]


def test_only_the_backend_that_is_asked_for(several):
    text = said("prune", "--using", "default", code=1)
    assert text.splitlines() == [
        "default: LocMemBackend keeps no rows of free locks.",
        "",
        "There is nothing to prune: only the database backend keeps rows.",
    ]
    assert rows(locks["rows"]) == 1
    assert said("--using", "rows", "prune").startswith("rows: 1 row deleted")
    assert "There is no backend 'nope'" in said("prune", "--using", "nope", code=2)


def test_as_json(several):
    assert json.loads(said("prune", "--json")) == [
        {"using": "default", "deleted": None, "reason": "LocMemBackend keeps no rows of free locks."},
        {"using": "rows", "deleted": 1, "reason": None},
    ]


def test_settings_that_cannot_be_used(several):
    several.DISTRIBUTED_LOCKS = {"wrong": {"BACKEND": "nowhere.Backend"}, **several.DISTRIBUTED_LOCKS}
    text = said("prune", code=3)
    assert "rows: 1 row deleted" in text
    assert text.count("cannot be imported") == 2  # in its line, and why the command failed
    several.DISTRIBUTED_LOCKS = []
    assert "it is a dict of lock backends" in said("prune", code=3)


def test_a_redis_server_is_not_even_asked(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "unix:///no/s"}}
    assert "RedisBackend keeps no rows" in said("prune", code=1)
    locks.close()


def test_a_database_that_fails(postgres_locks):
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
        try:
            [row] = json.loads(said("prune", "--json", code=3).splitlines()[0])
        finally:
            cursor.execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")
    assert (row["using"], row["deleted"]) == ("default", None)
    assert "Run manage.py migrate" in row["reason"]
