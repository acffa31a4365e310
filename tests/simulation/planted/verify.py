"""Runs tests of the suite with changes that they must notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.where_tests_are import found_for

from .changes import ROOT, Change, to_text

# The unchanged package must not come before the changed one: neither by the configuration nor by tests' folders.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=append", "-n", "0")

LONGEST = 1200.0  # seconds for tests; they hang where a defect makes them do so


def verify(changes: Sequence[Change]) -> bool:
    """Whether all tests that are named fail, as they must."""
    passed = []
    for change in changes:
        if change.test:
            failure = first_failure(change, change.test)
            print(f"{change.name}: {failure or 'nothing failed'}", flush=True)
            passed += [] if failure else [change]
    return not passed


def notice(changes: Sequence[Change], jobs: int) -> list[Change]:
    """Run with each change the tests that should fail. Returns the changes with which all of them pass."""
    with ThreadPoolExecutor(jobs) as pool:
        survivors = []
        for change, failure in zip(changes, pool.map(_noticed_by, changes), strict=True):
            print(f"{change.name}: {failure or 'SURVIVES'}", flush=True)
            if not failure:
                survivors.append(change)
                print(to_text([change]), flush=True)
    print(f"{len(changes)} changes, {len(survivors)} survive", flush=True)
    return survivors


def _noticed_by(change: Change) -> str:
    """By those of its module; else by all of its part of the package."""
    module = change.hunks[0].file.removesuffix(".py").replace("/", ".")
    of_module = [f"tests/{tests}.py" for tests in sorted(found_for(module))]
    return first_failure(change, *of_module) or first_failure(change, f"tests/{module.partition('.')[0]}")


def first_failure(change: Change, *tests: str) -> str:
    """The name of the first of these tests that fails with a change; "" where all pass."""
    with change.environment() as environment:
        path = environment["PYTHONPATH"].replace(os.pathsep, " ")
        command = [*PYTEST, "-o", f"pythonpath={path}", *tests]
        try:
            ended = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            return f"hangs: {' '.join(tests)}"
    if ended.returncode == 0:
        return ""
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return failed[0] if failed else f"status {ended.returncode}: {' '.join(tests)}"
