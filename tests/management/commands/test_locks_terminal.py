"""``manage.py locks`` in a real terminal: questions, Ctrl-C, and screens of any size."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from django_distlock.monitoring import formatting
from tests.support.admin_pages import hold
from tests.support.terminal import PYTHON, ROOT
from tests.support.tools import eventually

pytestmark = [pytest.mark.slow, pytest.mark.once]

CLEARED = "\033[H\033[2J"
QUESTION = "[yes/no] "


def locks(*arguments: str) -> list[str]:
    return [PYTHON, "example_project/manage.py", "locks", *arguments]


@pytest.mark.parametrize(("answer", "code"), [("yes", 0), ("no", 1), ("", 1)])
def test_release_asks(terminal, valkey_locks, answer, code):
    hold(valkey_locks, "order:1", label="POST /pay")
    terminal.start(*locks("release", "order:1"))
    eventually(lambda: terminal.shows(QUESTION))
    assert "POST /pay" in terminal.text
    terminal.type(answer)
    assert terminal.ended() == code
    assert (valkey_locks.look(["order:1"]) == [[]]) == (code == 0)


def test_ctrl_c_answers_no(terminal, valkey_locks):
    hold(valkey_locks, "order:1")
    terminal.start(*locks("release", "order:1"))
    eventually(lambda: terminal.shows(QUESTION))
    terminal.press("C")
    assert terminal.ended() == 1
    assert terminal.lines[-1] == "CommandError: Nothing was freed."
    assert "Traceback" not in terminal.text
    assert valkey_locks.look(["order:1"]) != [[]]


def test_watch_redraws_what_fits_until_ctrl_c(terminal, valkey_locks):
    """12 lines of 70 columns: only what fits is looked at and shown."""
    for number in range(40):
        hold(valkey_locks, f"order:{number:02}", label="POST /orders/" + "9" * 60)
    terminal.resize(70, 12)
    terminal.start(*locks("list", "--watch", "0.1"))
    eventually(lambda: terminal.shows(CLEARED) and terminal.text.count(CLEARED) >= 3)
    terminal.press("C")
    assert terminal.ended() == 0
    assert "Traceback" not in terminal.text
    terminal.text = terminal.text.split(CLEARED)[1]
    screen = terminal.lines
    assert screen[0].startswith("NAME")
    assert screen[1].startswith("order:00")
    assert max(map(len, screen)) <= 70
    assert len(screen) <= 12
    assert screen[-1].startswith("40 held, 33 of them not shown, at ")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_table_fits_the_terminal(terminal, valkey_locks, columns):
    hold(valkey_locks, "order:" + "1" * 60, label="POST /orders/" + "9" * 60, host="web-3.example.com", ago=100_000)
    terminal.resize(columns, 24)
    terminal.start(*locks())
    assert terminal.ended() == 0
    heading, row, count = terminal.lines
    assert max(map(len, (heading, row))) <= columns
    assert row.startswith("order:1")
    assert heading.split()[:1] == ["NAME"]
    assert {"HOLDER", "LEFT"} <= set(heading.split())
    assert count == "1 held"


def test_columns_that_have_no_room_are_left_out():
    heading = ("NAME", "BACKEND", "LABEL", "HOLDER", "HELD", "LEFT", "WAITING")
    rows = [heading, ("n" * 30, "default", "l" * 30, "h" * 30, "12 min 34 s", "29 s", "3")]
    for most in range(26, 130):
        lines = formatting.table(rows, most, (0, 2, 3), (6, 1, 4, 2))
        assert max(map(len, lines)) <= most
        assert {"NAME", "HOLDER", "LEFT"} <= set(lines[0].split())
    assert formatting.table(rows, 130, (0, 2, 3), (6, 1, 4, 2))[0].split() == list(heading)


def test_who_reads_only_the_beginning_is_no_error(valkey, valkey_locks):
    for number in range(3000):
        hold(valkey_locks, f"order:{number:05}")
    shell = subprocess.run(
        ["bash", "-c", f"{shlex.join(locks('list'))} | head -1; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "SHOP_LOCKS": valkey.url, "DJANGO_SETTINGS_MODULE": "example_project.settings"},
    )  # fmt: skip
    assert shell.stdout.startswith("NAME")
    assert (shell.returncode, shell.stderr) == (0, "")
