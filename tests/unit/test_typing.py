"""Decorated functions keep their types, for mypy and for pyright."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.requirements import missing

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(3)]

FILES = ROOT / "tests" / "unit" / "typing"


def run(*command):
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)


def lines_by_mypy(paths):
    options = ["--config-file", "", "--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    done = run("mypy", *options, "--show-error-codes", "--cache-dir", ".mypy_cache/of_tests", *map(str, paths))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+): error", done.stdout)]


def lines_by_pyright(paths):
    if shutil.which("node") is None:
        missing("node", "pyright runs on Node.js")
    done = run("pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, paths))
    if done.returncode not in (0, 1):
        missing("pyright", f"it did not run: {done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(paths), done.stdout
    errors = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    return [(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in errors]


@pytest.fixture(params=[lines_by_mypy, lines_by_pyright], ids=["mypy", "pyright"], scope="module")
def errors(request):
    """The lines with errors, by the name of the file. The checker reads the package once for all files."""
    found = {path.name: set() for path in FILES.glob("*.py")}
    for name, line in request.param(sorted(FILES.glob("*.py"))):
        found[name].add(line)
    return found


def test_types_survive(errors):
    assert errors["accepted.py"] == set()


def test_wrong_calls_are_refused(errors):
    lines = (FILES / "refused.py").read_text().splitlines()
    assert errors["refused.py"] == {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
