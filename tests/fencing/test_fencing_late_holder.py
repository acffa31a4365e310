"""The demonstration of the documentation: a holder that SIGSTOP stops between its read and its first write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import psycopg
import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def empty_database(postgres):
    settings = {**postgres.settings(), "NAME": "late_holder"}
    with psycopg.connect(host=settings["HOST"], user=settings["USER"], dbname="postgres", autocommit=True) as session:
        session.execute("CREATE DATABASE late_holder")
        yield settings
        session.execute("DROP DATABASE late_holder WITH (FORCE)")


@pytest.mark.seconds(8)
def test_the_late_write_wins_without_the_field_and_is_refused_with_it(empty_database):
    program = [sys.executable, "-W", "error", ROOT / "docs" / "late_holder.py", json.dumps(empty_database)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = done.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)  # a stopped holder among them
        done.wait()
    assert printed.splitlines() == [
        "Account: the successor leaves 50; the late holder is told LockLost, after its write; 70 is left",
        "FencedAccount: the successor leaves 50; the late holder is told StaleLease, refused=1; 50 is left",
    ]
    assert printed in (ROOT / "docs" / "fencing.md").read_text(encoding="utf-8")
