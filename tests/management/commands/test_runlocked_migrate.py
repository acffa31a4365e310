"""``manage.py runlocked migrate -- manage.py migrate`` on an empty database that is to keep the locks, too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from django_distlock.backends.database.tables import ADVISORY_KEY, mysql_lock_name
from tests.support.databases import known_wrong
from tests.support.forkserver import ROOT, Program, end_all
from tests.support.postgres import PLACES_OF_BOUNCER, Bouncer
from tests.support.requirements import missing
from tests.support.tools import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(2)]

MIGRATE = [sys.executable, "-m", "django", "migrate"]


@contextmanager
def reached(alias, database):
    """The alias leads there."""
    with known_wrong(database, alias):
        try:
            yield database
        finally:
            connections[alias].close()
            del connections[alias]


@contextmanager
def empty(server):
    """A new database on the server."""
    with reached("server", server.settings()), connections["server"].cursor() as cursor:
        even_in_use = (
            "WITH (FORCE)" if connections["server"].vendor == "postgresql" else ""
        )  # by a pool that was killed
        cursor.execute(f"DROP DATABASE IF EXISTS empty {even_in_use}")
        cursor.execute("CREATE DATABASE empty")
        yield {**server.settings(), "NAME": "empty"}


def bouncer_before(server):
    """pgbouncer in transaction mode."""
    program = shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)
    if not program:
        missing("pgbouncer", "install the package pgbouncer")
    return Bouncer(program, server)


@pytest.fixture(params=["postgres", "pgbouncer", "mariadb", "sqlite"])
def database(request, tmp_path, django_db_blocker):
    """Empty, as an entry of DATABASES; and the alias ``migrated`` leads there."""
    with django_db_blocker.unblock(), ExitStack() as stack:
        if request.param == "sqlite":
            there = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.sqlite3")}
        elif request.param == "pgbouncer":
            server = request.getfixturevalue("postgres")
            there = stack.enter_context(empty(server))
            there = {**stack.enter_context(bouncer_before(server)).settings(), "NAME": there["NAME"]}
        else:
            there = stack.enter_context(empty(request.getfixturevalue(request.param)))
        yield stack.enter_context(reached("migrated", there))


@pytest.fixture
def start(database):
    """Starts ``runlocked`` with arguments, on that database; none is left at the end."""
    processes = []

    def start(*arguments):
        process = Program(
            ["-m", "django", "runlocked", *arguments], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "MIGRATED": json.dumps(database), "DJANGO_SETTINGS_MODULE": "tests.support.migrating"},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    end_all(processes)


def outcome(process):
    out, errors = process.communicate(timeout=12 * PATIENCE)
    return process.returncode, out, errors


def test_of_two_at_once_one_migrates_and_both_succeed(start, database):
    processes = [start("migrate", "--wait", "600", "--", *MIGRATE) for _ in range(2)]
    outcomes = [outcome(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    applied = Counter(name for _, out, _ in outcomes for name in re.findall(r"Applying (\S+)\.\.\. OK", out))
    assert set(applied.values()) == {1}
    assert sum("No migrations to apply" in out for _, out, _ in outcomes) == 1
    recorded = [f"{app}.{name}" for app, name in recorded_in("migrated")]
    made_first = set(recorded) - set(applied)
    if "sqlite" in database["ENGINE"]:  # where the locks have a file of their own, with their tables in it
        assert not made_first
    else:
        assert made_first == {name for name in recorded if name.startswith("distlock.")}
    assert len(recorded) == len(set(recorded)) == len(applied) + len(made_first)
    assert {"distlock_lock", "distlock_run"} <= set(connections["migrated"].introspection.table_names())


WAITING = {  # take what who makes the tables takes; count who waits for it; give it back
    "postgresql": (
        f"SELECT pg_advisory_lock({ADVISORY_KEY})",
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted",
        f"SELECT pg_advisory_unlock({ADVISORY_KEY})",
    ),
    "mysql": (
        f"SELECT GET_LOCK('{mysql_lock_name('empty')}', 0)",
        "SELECT count(*) FROM information_schema.processlist WHERE state = 'User lock'",
        f"SELECT RELEASE_LOCK('{mysql_lock_name('empty')}')",
    ),
}


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_who_finds_no_tables_while_another_one_makes_them_waits_for_that(start, database):
    def ask(statement):
        with connections["migrated"].cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0]

    take, waiting, give_back = WAITING[connections["migrated"].vendor]
    if connections["migrated"].vendor == "postgresql":
        with connections["migrated"].cursor() as cursor:  # by which a transaction sees what was there when it began
            cursor.execute("ALTER DATABASE empty SET default_transaction_isolation TO 'repeatable read'")
    ask(take)
    processes = [start("report", "--wait", "600", "--", "echo", "ran") for _ in range(3)]
    eventually(lambda: ask(waiting) == 3, 4 * PATIENCE)
    ask(give_back)
    for process in processes:
        code, out, errors = outcome(process)
        assert (code, out) == (0, "ran\n"), errors
    recorded = list(recorded_in("migrated"))
    assert {app for app, _ in recorded} == {"distlock"}
    assert len(recorded) == len(set(recorded))


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_tables_that_no_migration_of_this_version_makes_are_told(start, database):
    assert outcome(start("report", "--", "true"))[0] == 0
    with connections["migrated"].cursor() as cursor:
        cursor.execute("ALTER TABLE distlock_lock DROP COLUMN careful_until")
    code, _, errors = outcome(start("report", "--", "true"))
    assert code == 69
    assert "careful_until" in errors


def recorded_in(alias):
    return MigrationRecorder(connections[alias]).migration_qs.values_list("app", "name")


def test_any_program_may_be_the_first_to_need_them(start):
    code, out, errors = outcome(start("report", "--", "echo", "ran"))
    assert (code, out) == (0, "ran\n"), errors


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_who_may_not_make_them_is_told(start, database):
    with connections["migrated"].cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS reader")
        cursor.execute("CREATE ROLE reader LOGIN")
    database["USER"] = "reader"
    code, out, errors = outcome(start("migrate", "--", "echo", "ran"))
    assert (code, out) == (69, "")
    assert "The tables of the locks cannot be made in the database 'default'" in errors
    assert "permission denied for schema public" in errors
