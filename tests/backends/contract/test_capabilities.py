"""What backends keep, and that the documentation says the same."""

from __future__ import annotations

import pytest

from django_distlock import locks
from django_distlock.backends.base import BaseLockBackend
from django_distlock.monitoring.diagnostics import BASES, CAPABILITIES, capabilities_of
from tests.support.programs import ROOT

PAGE = ROOT / "docs" / "backends.md"

FIXTURES = {
    "Redis": "valkey_locks",
    "Redlock": "redlock_locks",
    "PostgreSQL": "postgres_locks",
    "MySQL, MariaDB": "mariadb_locks",
    "SQLite": "sqlite_locks",
    "ZooKeeper": "zookeeper_locks",
    "local memory": "locmem_locks",
    "dummy": "dummy_locks",
}


@pytest.fixture
def dummy_locks(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}
    return locks["default"]


def documented():
    """The rows of the table of flags, the heading first."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| flag |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        if not line.startswith("|-"):
            rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_the_table_has_all_flags_and_all_backends():
    heading, *rows = documented()
    assert {flag: words for flag, words, *_ in rows} == CAPABILITIES
    assert heading[2:] == list(FIXTURES)


@pytest.mark.parametrize("backend", FIXTURES)
def test_the_table_says_what_the_backend_says(backend, request):
    heading, *rows = documented()
    column = heading.index(backend)
    said = {row[0]: {"yes": True, "no": False}[row[column]] for row in rows}
    assert capabilities_of(request.getfixturevalue(FIXTURES[backend])) == said


def test_all_flags_of_the_base_are_told():
    flags = {name for name in dir(BaseLockBackend) if name.startswith("supports_")}
    assert set(CAPABILITIES) == {*flags, *BASES}
