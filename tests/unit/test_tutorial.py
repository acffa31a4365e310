"""The tutorial, followed to the letter: its files, its commands in terminals, and what it shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import celery
import pytest

from tests.support.ports import free_ports
from tests.support.programs import ROOT
from tests.support.tutorial import Reader

pytestmark = pytest.mark.slow

BEATS = "## Two beats"  # which need a newer Celery than the rest


def page() -> str:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert BEATS in text
    return text if celery.VERSION[:2] >= (5, 7) else text.partition(BEATS)[0]


@pytest.mark.seconds(52)
def test_a_reader_comes_to_the_end(tmp_path: Path) -> None:
    """With the packages that are installed, and with ports that are free in the place of those of the page."""
    text = page()
    for port, free in zip(("8000", "6379"), free_ports(2), strict=True):
        text = text.replace(port, str(free))
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",  # what the page installs is there
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONUNBUFFERED": "1",  # as in a terminal
        "TMPDIR": str(tmp_path),
    }
    with Reader(tmp_path, environment) as reader:
        reader.follow(text)


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("In terminal 1:\n\n```console\n$ echo one\ntwo\n```\n", "is to print"),
        ("In terminal 1:\n\n```console\n$ echo one\n…\ntwo\n```\n", "is to print"),
        ("In terminal 1:\n\n```console\n$ echo one\none\ntwo\n```\n", "is to print"),
        ("In terminal 1:\n\n```console\n$ echo one; false\none\n```\n", "ended with 1"),
        ("In terminal 1:\n\n```console\n$ true\n```\n\nPress Ctrl-C in terminal 1.", "nothing is there"),
        ("In terminal 1:\n\nCreate `file`:\n\n```py\npass\n```\n", "has no block"),
        ("Make a file:\n\n```py\npass\n```\n", "no sentence says"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(tmp_path: Path, page: str, complaint: str) -> None:
    with Reader(tmp_path, {**os.environ}) as reader:
        with pytest.raises(AssertionError, match=complaint):
            reader.follow(page)


def test_shown_lines_may_leave_out_what_changes(tmp_path: Path) -> None:
    page = "In terminal 1:\n\n```console\n$ echo; echo 'pid  12 of'; echo the end\n…\npid  … of\nthe end\n```\n"
    with Reader(tmp_path, {**os.environ}) as reader:
        reader.follow(page)
