"""The example shop: its views on PostgreSQL, the front page of ``make serve``, and what its demonstration says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from urllib.request import urlopen

import pytest

from django_distlock.types import new_token
from example_project.beats import Watch, complaints, table
from tests.support import forkserver
from tests.support.programs import ROOT
from tests.support.shop_on_postgres import PIECES
from tests.support.tools import PATIENCE


@pytest.fixture
def shop_url():
    """The shop as ``make serve`` runs it, but with one worker of gunicorn."""
    process = subprocess.Popen(
        [sys.executable, "-m", "example_project.serve"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PORT": "0",
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "GUNICORN_CMD_ARGS": "--workers 1",
        },
    )
    said = []
    for line in process.stdout:
        said.append(line)
        if address := re.search(r"The shop: (http://\S+)", line):
            yield address[1]
            break
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=4 * PATIENCE)[0]
    assert process.returncode == 0, "".join(said)


@pytest.fixture
def shop_database(postgres):
    """A new one, which is left to the server's end."""
    name = f"shop_{new_token()}"
    create = [
        postgres.programs / "psql",
        "-q",
        "-h",
        postgres.folder,
        "-U",
        "tests",
        "-c",
        f"CREATE DATABASE {name}",
        "postgres",
    ]
    subprocess.run(create, check=True)
    return {**postgres.settings(), "NAME": name}


@pytest.mark.seconds(7)
@pytest.mark.parametrize("backend", ["redis", "database"])
def test_on_postgresql_nothing_is_oversold_under_the_lock_and_much_without(shop_database, valkey, store, backend):
    program = ["-m", "tests.support.shop_on_postgres", valkey.url, json.dumps(shop_database)]
    done = forkserver.run(program, cwd=ROOT, timeout=6 * PATIENCE, env={**os.environ, "SHOP_BACKEND": backend})
    report = json.loads(done.stdout)
    assert report["buy-unlocked"]["sold"] > PIECES
    assert 0 < report["buy"]["sold"] <= PIECES
    assert set(report["buy"]["answers"]) <= {302, 409, 410}
    assert 409 in report["buy"]["answers"]
    assert bool(store.keys("lock*")) == (backend == "redis")


@pytest.mark.seconds(18)
def test_the_front_page(shop_url):
    """It has no scripts, so what is served is what a browser shows."""
    with urlopen(shop_url, timeout=4 * PATIENCE) as answer:
        page = answer.read().decode()
    assert "Darjeeling" in page
    assert page.count(">Buy</button>") == 10
    assert "csrfmiddlewaretoken" in page


def ticks(*seconds):
    return [datetime(2026, 11, 21, 12) + timedelta(seconds=one) for one in seconds]


@pytest.mark.parametrize(
    ("sent", "ran", "complaint"),
    [
        ({1: ticks(0, 2), 2: ticks(4, 8), 3: ticks(6)}, "abcde", None),
        ({1: ticks(0, 2), 2: ticks(4, 8), 3: ticks(6, 6.1)}, "abcdef", "Beats sent a run twice."),
        ({1: ticks(0, 2), 2: ticks(4, 10), 3: ticks(6)}, "abcde", "Of 6 runs that were due 5 were sent."),
        ({1: ticks(0, 2), 2: ticks(4, 8), 3: ticks(6)}, "abcd", "Of 5 runs that were sent 4 ran."),
        ({1: ticks(0, 2), 2: ticks(4, 8), 3: ticks(6)}, "abcdd", "Of 5 runs that were sent 5 ran."),
        ({1: [], 2: ticks(0, 2, 4, 8), 3: ticks(6)}, "abcde", "The beat that was killed had sent nothing."),
        ({1: [], 2: [], 3: []}, "", "Of 0 runs that were due 0 were sent."),
    ],
)
def test_the_demonstration_of_beats_complains_of_what_is_doubled_missed_or_lost(sent, ran, complaint):
    """Its exit code is 1 then."""
    seen = Watch(sent, list(ran), killed=1)
    assert (complaint in complaints(seen)) if complaint else (complaints(seen) == [])
    rows = dict(re.findall(r"^(ticks|sends|runs|duplicates)\b.*?(\d+)$", table(seen), re.MULTILINE))
    assert rows["runs"] == str(len(ran))
    assert rows["duplicates"] == str(int(complaint == "Beats sent a run twice."))
