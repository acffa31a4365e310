"""Servers whose clock is wrong."""

from __future__ import annotations

from pathlib import Path

from tests.support.requirements import missing

LIBRARY = "*/faketime/libfaketimeMT.so.1"


def faked_clock(offset: Path) -> dict[str, str]:
    """The environment of a server whose clock is ahead by the seconds that stand in this file."""
    found = sorted(Path("/usr/lib").glob(LIBRARY))
    if not found:
        missing("libfaketime", "install the package libfaketime")
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
