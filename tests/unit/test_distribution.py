"""What goes into the source distribution that is made of a checkout in use."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.support.programs import ROOT

GRAFTED = ["benchmarks", "docs", "example_project", "requirements", "tests/deeper"]
BY_CHANCE = [
    "db.sqlite3", "db.sqlite3-locks", "db.sqlite3-locks-wal", "db.sqlite3-journal", "dump.rdb", "appendonly.aof",
    "debug.log", ".env", ".env.local", "server.pem", "server.key", "server.crt",
]  # fmt: skip
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "tree"
version = "1"
[tool.setuptools]
packages = []
"""


def test_databases_and_secrets_that_lie_in_the_tree_are_left_out(tmp_path: Path) -> None:
    shutil.copy(ROOT / "MANIFEST.in", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for folder in ("", *GRAFTED):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in ["kept.txt", *BY_CHANCE]:
            (tmp_path / folder / name).touch()
    build = "from setuptools.build_meta import build_sdist; build_sdist('made')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, check=True, timeout=120)
    [made] = (tmp_path / "made").iterdir()
    with tarfile.open(made) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert sorted(name for name in names if name.endswith("kept.txt")) == [f"{folder}/kept.txt" for folder in GRAFTED]
    assert [name for name in names if Path(name).name in BY_CHANCE] == []


def test_each_target_of_make_has_the_requirements_that_it_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {*re.findall(r"requirements/(\w+)\.txt", makefile), *re.findall(r"\.ready-(\w+)", makefile), "lowest"}
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == named
