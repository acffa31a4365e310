"""A run of some worlds, with a seed that is always the same. ``make simulate`` has fresh ones, of all."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.forkserver import ROOT, run
from tests.support.tools import PATIENCE

from .planted.changes import PROTOCOL, read
from .planted.run import MOST_RUNS, first_finding

pytestmark = pytest.mark.seconds(10)

RUNS = 1
WORLDS = "interrupts", "sentinel", "postgresql", "sqlite"  # by lines, messages, statements and files; CI has all
TIME = 20 * PATIENCE  # seconds that they may take where the machine is busy

# They break a script and what databases are told, and two judges find them. `python -m tests.simulation.mutants rules`
# has all.
RULES = [
    "postgresql/one of the slots that ended is handed on",
    "redis/the last fencing number is forgotten where the clock went back",
]


def simulate(environment):
    """The exit code, what was printed, and of each world the line that is for machines."""
    command = ["-m", "tests.simulation", "--jobs", "1", "--json", "--seed", 1, "--runs", RUNS, "--world", *WORLDS]
    done = run(command, like="simulation", cwd=ROOT, env=environment, timeout=TIME, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"world"')]
    return done.returncode, done.stdout, {outcome["world"]: outcome for outcome in lines}


@pytest.mark.seconds(15)
@pytest.mark.slow
def test_promises_are_kept_and_the_same_seed_is_the_same_run():
    """The order of sets, which differs from process to process, changes nothing."""
    ordered = {**os.environ, "PYTHONHASHSEED": "0"}
    with ThreadPoolExecutor() as pool:
        (code, told, outcomes), (_, _, again) = pool.map(simulate, (None, ordered))
    assert code == 0, told
    assert [*outcomes] == [*WORLDS]
    for outcome in outcomes.values():
        assert outcome["runs"] == RUNS
        assert outcome["virtual_hours"] > RUNS * 60 / 3600, "the runs ended early, and prove little"
    first, second = ({world: outcome["checksum"] for world, outcome in found.items()} for found in (outcomes, again))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_found(name):
    [change] = [change for change in read(PROTOCOL) if change.name == name]
    assert first_finding(change, "--runs", str(MOST_RUNS))
