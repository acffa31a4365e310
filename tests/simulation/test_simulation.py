"""A run of each world, with a seed that is always the same. ``make simulate`` has fresh ones, and more."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.forkserver import ROOT, run
from tests.support.tools import PATIENCE

from .planted.changes import PROTOCOL, read
from .worlds import WORLDS

RUNS = 1
MOST_RUNS = 150  # in which a broken script is found, from the seed that its entry names
TIME = 20 * PATIENCE  # seconds that they may take where the machine is busy


def simulate(*arguments, like=None, environment=None):
    """The exit code, what was printed, and of each world the line that is for machines."""
    command = ["-m", "tests.simulation", "--jobs", "1", "--json", *arguments]
    done = run(command, like=like, env=environment, cwd=ROOT, timeout=TIME, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return (
        done.returncode,
        done.stdout,
        [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"world"')],
    )


@pytest.mark.slow
def test_promises_are_kept_and_the_same_seed_is_the_same_run():
    """In all worlds, because a process takes longer to start than for a run."""
    with ThreadPoolExecutor() as pool:
        (code, told, outcomes), (_, _, again) = pool.map(lambda _: simulate("--seed", 1, "--runs", RUNS), range(2))
    assert code == 0, told
    assert [outcome["world"] for outcome in outcomes] == [*WORLDS]
    for outcome in outcomes:
        assert outcome["runs"] == RUNS
        assert outcome["virtual_hours"] > RUNS * 60 / 3600, "the runs ended early, and prove little"
    assert [outcome["checksum"] for outcome in outcomes] == [outcome["checksum"] for outcome in again]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [change for change in read(PROTOCOL) if not change.unseen], ids=lambda change: change.name
)
def test_a_broken_script_is_found(change):
    with change.environment() as environment:
        options = ("--world", change.worlds[0], "--seed", change.seed, "--runs", MOST_RUNS, "--as-drawn")
        environment["PYTHONHASHSEED"] = "0"  # as its process begins with
        code, told, [outcome] = simulate(*options, like="simulation", environment=environment)
    assert (code, len(outcome["findings"])) == (1, 1), told
    assert "the simulation itself failed" not in outcome["findings"][0]["kind"], told
