"""Decorated functions keep their types, for mypy and for pyright."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.programs import ROOT
from tests.support.requirements import missing

pytestmark = [pytest.mark.slow, pytest.mark.once]

FILES = ROOT / "tests" / "unit" / "typing"


def run(*command):
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def mypy(tmp_path):
    def check(path):
        """The lines with errors."""
        pytest.importorskip("mypy")
        options = [
            "--config-file",
            "",
            "--strict",
            "--follow-imports=silent",
            "--ignore-missing-imports",
            "--show-error-codes",
        ]
        done = run("mypy", *options, "--cache-dir", str(tmp_path), str(path))
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return {int(line) for line in re.findall(rf"{path.name}:(\d+): error", done.stdout)}

    return check


@pytest.fixture
def pyright():
    def check(path):
        pytest.importorskip("pyright")
        if shutil.which("node") is None:
            missing("node", "pyright runs on Node.js")
        done = run("pyright", "--outputjson", "--pythonpath", sys.executable, str(path))
        if done.returncode not in (0, 1):
            missing("pyright", f"it did not run: {done.stdout}{done.stderr}")
        report = json.loads(done.stdout)
        assert report["summary"]["filesAnalyzed"] == 1, done.stdout
        return {
            each["range"]["start"]["line"] + 1 for each in report["generalDiagnostics"] if each["severity"] == "error"
        }

    return check


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_types_survive(request, checker):
    assert request.getfixturevalue(checker)(FILES / "accepted.py") == set()


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_wrong_calls_are_refused(request, checker):
    path = FILES / "refused.py"
    wanted = {number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# error")}
    assert request.getfixturevalue(checker)(path) == wanted
