"""Runs, with each change, the test of the suite that was written for what it breaks: it must fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from .changes import ROOT, Change

# The unchanged package must not come before the changed one: neither by the configuration nor by tests' folders.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=append", "-n", "0")

LONGEST = 300.0  # seconds for a test; it hangs where a defect makes it do so


def verify(changes: Sequence[Change]) -> bool:
    """Whether all tests that are named fail, as they must."""
    passed = [change for change in changes if change.test and not _fails(change)]
    return not passed


def _fails(change: Change) -> bool:
    with change.environment() as environment:
        path = environment["PYTHONPATH"].replace(os.pathsep, " ")
        command = [*PYTEST, "-o", f"pythonpath={path}", change.test]
        try:
            ended = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{change.name}: {change.test} hangs", flush=True)
            return True
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    print(f"{change.name}: {failed[0] if failed else f'status {ended.returncode}, nothing failed'}", flush=True)
    return ended.returncode == 1
