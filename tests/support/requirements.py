"""Programs that some tests need, and that may be missing."""

from __future__ import annotations

import os

import pytest

REQUIRED = os.environ.get("DISTLOCK_REQUIRE", "").split()


def missing(what: str, how: str) -> None:
    """Skip for want of a program; a failure where DISTLOCK_REQUIRE names it."""
    if what in REQUIRED:
        pytest.fail(f"DISTLOCK_REQUIRE asks for {what}, which is missing: {how}")
    pytest.skip(f"{what} is missing: {how}")
