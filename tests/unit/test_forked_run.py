"""Tests in several processes: each runs once, whatever becomes of the process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path

import pytest

from tests.support import forked_run

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os
from pathlib import Path
import pytest

def noted(event):
    with Path("events").open("a") as file:
        file.write(f"{event}\\n")

@pytest.fixture(scope="session")
def server(tmp_path_factory):
    noted(f"started at {tmp_path_factory.getbasetemp()}")
    yield
    noted("ended")

@pytest.mark.parametrize("number", range(40))
def test_passes(number, server, tmp_path):
    (tmp_path / "passed").touch()
    noted(f"test {number}")

def test_fails(server, tmp_path):
    (tmp_path / "failed").touch()
    assert 1 + 1 == 3

def test_dies():
    os._exit(7)
"""


@pytest.fixture
def run(tmp_path):
    def run(*arguments: str) -> tuple[str, Counter[str]]:
        command = "pytest", "-p", "tests.support.forked_run", "-p", "no:randomly", "--processes", "3", *arguments
        (tmp_path / "test_it.py").write_text(TESTS)
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
            env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout, Counter((tmp_path / "events").read_text().splitlines())

    return run


def test_each_runs_once_and_fixtures_of_the_session_end_in_each_process(run):
    told, events = run()
    assert "2 failed, 40 passed" in told
    assert "assert (1 + 1) == 3" in told
    assert "Its process ended, with 7." in told
    assert [count for event, count in events.items() if event.startswith("test ")] == [1] * 40
    folders = {event for event in events if event.startswith("started")}
    assert len(folders) == events.total() - 40 - events["ended"]  # each process has its own
    assert 2 <= events["ended"] <= len(folders) <= 4


def test_files_of_tests_that_failed_are_kept(run, tmp_path):
    run("-o", "tmp_path_retention_policy=failed")
    assert len([*tmp_path.rglob("failed")]) == 1
    assert not [*tmp_path.rglob("passed")]


def test_after_a_failure_no_other_is_begun_where_that_is_wanted(run):
    told, events = run("-x", "--deselect", "test_it.py::test_dies")
    assert "stopping after 1 failures" in told
    assert int(re.search(r"(\d+) passed", told)[1]) == events.total() - 2 * events["ended"]


class Item:
    """As far as a test is dealt by it."""

    def __init__(self, module: str, number: int, seconds: float | None, fixture: str) -> None:
        self.nodeid, self.path, self.fixturenames = f"{module}::{number}", module, [fixture]
        self._marks = {"seconds": pytest.mark.seconds(seconds).mark} if seconds else {}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def test_shares_take_as_long_and_begin_with_the_longest_or_with_quick_ones():
    of_module = {"a": [60, *[1] * 30], "b": [None] * 400, "c": [2] * 30, "d": [None] * 100, "e": [3] * 20, "f": [9, 9]}
    items = [
        Item(module, number, seconds, "zookeeper_locks" if module in "cd" else "")
        for module, tests in of_module.items()
        for number, seconds in enumerate(tests)
    ]
    shares = forked_run.dealt(items, 4)
    assert sorted(item.nodeid for share in shares for item in share) == sorted(item.nodeid for item in items)
    loads, longest = [forked_run.load(share) for share in shares], max(map(forked_run.seconds, items))
    assert max(loads) - min(loads) <= longest
    others = [share for share in shares if not any("zookeeper_locks" in item.fixturenames for item in share)]
    assert len(others) >= 2
    for share in shares:
        longest_first = sorted(map(forked_run.precedence, share), reverse=True)
        quicker_half = longest_first[len(share) // 2 :]
        begins_with_quick_ones = [*quicker_half, *longest_first[: len(share) // 2]]
        order = [forked_run.precedence(item) for item in share]
        assert order == (begins_with_quick_ones if share in others[::2] else longest_first)
    assert any(forked_run.precedence(share[0]) < max(map(forked_run.precedence, share)) for share in others[::2])


def test_what_takes_long_is_begun_first_and_then_what_few_processes_can_take_over():
    long, dear, other = Item("a", 0, 6, ""), Item("a", 1, 1, "zookeeper_locks"), Item("a", 2, 2, "")
    assert sorted([other, dear, long], key=forked_run.precedence, reverse=True) == [long, dear, other]


def test_shares_are_balanced_by_seconds_and_not_by_number():
    modules = {"long": (1, 30), **{f"quick{n}": (30, 1) for n in range(3)}, **{f"other{n}": (5, 2) for n in range(6)}}
    items = [Item(module, n, seconds, "") for module, (number, seconds) in modules.items() for n in range(number)]
    assert [forked_run.load(share) for share in forked_run.dealt(items, 2)] == [90, 90]


def test_the_tests_of_a_dear_server_are_parted_by_seconds_and_not_by_number():
    tests = [Item("a", number, 10 if number < 10 else 1, "zookeeper_locks") for number in range(110)]
    assert [forked_run.load(part) for part in forked_run.parts(tests, 150)] == [100, 100]
    assert [forked_run.load(part) for part in forked_run.parts(tests, 200)] == [200]
    assert forked_run.parts([], 150) == []


def test_who_has_done_its_share_is_given_half_of_what_needs_no_dear_server_that_it_lacks():
    items = [Item("a", number, 2, "zookeeper_locks" if number % 2 else "") for number in range(20)]
    share = deque(items)
    assert forked_run.given_away(share, {""}) == items[10::2]
    assert list(share) == [*items[:10], *items[11::2]]
    assert forked_run.given_away(deque(items[1::2]), {"", "mariadb"}) == []
    assert forked_run.given_away(deque(items), {"", "zookeeper"}) == items[10:]


def test_it_is_given_first_what_needs_a_dear_server_that_it_has():
    dear, others = ([Item("a", n, 2, of) for n in range(size)] for size, of in ((4, "zookeeper_locks"), (20, "")))
    shares = [deque(others), deque(dear)]
    assert forked_run.taken_over(shares, {"", "zookeeper"}) == dear[2:]
    assert forked_run.taken_over(shares, {"", "mariadb"}) == others[10:]
    assert forked_run.taken_over([deque(), deque(dear)], {""}) == []


def test_a_module_that_starts_its_own_servers_needs_none_of_the_process():
    assert forked_run.dear_server(Item("tests/backends/zookeeper/test_tls.py", 0, 2, "certificates")) == ""
    assert forked_run.dear_server(Item("tests/core/test_lease.py", 0, 2, "zookeeper_locks")) == "zookeeper"


def test_a_quarter_of_each_share_can_be_taken_over_by_all():
    dear = [Item("a", number, 1, "mariadb") for number in range(100)]
    items = [*dear, *(Item(f"b{number // 10}", number, 1, "") for number in range(100))]
    assert all(sum(not forked_run.dear_server(test) for test in share) >= 25 for share in forked_run.dealt(items, 2))
