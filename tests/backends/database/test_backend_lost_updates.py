"""The demonstration of the documentation: what is lost when a lock is released before COMMIT."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.support.forkserver import ROOT, run
from tests.support.postgres import Postgres, programs
from tests.support.requirements import missing

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(7)]

NAIVE = "released before COMMIT"
GUARDED = [
    "@distributed_lock on a view",
    "on dispatch of a class view",
    "on a handler of a class view",
    "on a function the view calls",
    "with lock(...) in the view",
]
REQUESTS = 10  # of each of eight threads
READ_COMMITTED, REPEATABLE_READ = 2, 3  # psycopg.IsolationLevel


@pytest.fixture(scope="module")
def postgres(folder_of_run):
    if (folder := programs()) is None:
        missing("postgresql", "no initdb and postgres found; install PostgreSQL's server package")
    with Postgres(folder, template=folder_of_run / "postgres") as server:
        yield server.settings()


def outcomes(database):
    """Updates that were lost, and requests that the database refused, by what guarded them."""
    program = ["-W", "error", ROOT / "docs" / "lost_updates.py", json.dumps(database), REQUESTS]
    done = run(program, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = re.findall(rf"^(.+?) +(\d+) of {8 * REQUESTS} lost, +(\d+) refused$", done.stdout, re.MULTILINE)
    return {kind: (int(lost), int(refused)) for kind, lost, refused in lines}


def test_at_read_committed(postgres):
    found = outcomes({**postgres, "OPTIONS": {"isolation_level": READ_COMMITTED}})
    lost, refused = found.pop(NAIVE)
    assert lost > 0
    assert refused == 0
    assert found == dict.fromkeys(GUARDED, (0, 0))


@pytest.mark.seconds(21)
def test_at_repeatable_read(postgres):
    """Without a query before the lock, the snapshot of a transaction is taken under the lock."""
    found = outcomes({**postgres, "OPTIONS": {"isolation_level": REPEATABLE_READ}})
    lost, refused = found.pop(NAIVE)
    assert lost == 0
    assert refused > 0
    assert found == dict.fromkeys(GUARDED, (0, 0))


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_on_sqlite(tmp_path, journal):
    name = str(tmp_path / "db.sqlite3")
    options = {"timeout": 60, "init_command": f"PRAGMA journal_mode = {journal}"}
    found = outcomes({"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options})
    lost, refused = found.pop(NAIVE)
    assert lost == 0
    assert refused > 0
    assert found == dict.fromkeys(GUARDED, (0, 0))
