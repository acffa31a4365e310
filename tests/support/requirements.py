"""Programs that some tests need, and that may be missing."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable

import pytest

REQUIRED = os.environ.get("DISTLOCK_REQUIRE", "").split()


def missing(what: str, how: str) -> None:
    """Skip for want of a program; a failure where DISTLOCK_REQUIRE names it."""
    if what in REQUIRED:
        pytest.fail(f"DISTLOCK_REQUIRE asks for {what}, which is missing: {how}")
    pytest.skip(f"{what} is missing: {how}")


def left_out(reasons: Iterable[str]) -> str:
    """What was skipped for want of programs, and how to have them, in one line; "" for nothing."""
    found = (re.search(r"(\S+) is missing: (.+)", reason) for reason in reasons)
    counts = Counter((match[1], match[2]) for match in found if match)
    programs = (f"{what} (tests: {count}; {how})" for (what, how), count in sorted(counts.items()))
    return ", ".join(programs)
