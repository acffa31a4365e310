"""What a run says of programs that are missing."""

from __future__ import annotations

import pytest

from tests.support import requirements

POSTGRESQL = "postgresql", "install PostgreSQL's server package"


def reason_of(what, how):
    with pytest.raises(pytest.skip.Exception) as skipped:
        requirements.missing(what, how)
    return f"Skipped: {skipped.value}"


def test_what_was_left_out_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(requirements, "REQUIRED", [])
    reasons = [reason_of(*POSTGRESQL), reason_of("chromium", "install chromium"), reason_of(*POSTGRESQL)]
    assert requirements.left_out([*reasons, "Skipped: Django 6 has them"]) == (
        "chromium (tests: 1; install chromium), postgresql (tests: 2; install PostgreSQL's server package)"
    )


def test_nothing_is_told_where_all_is_there():
    assert requirements.left_out(["Skipped: Django 6 has them"]) == ""


def test_what_is_asked_for_is_not_skipped(monkeypatch):
    monkeypatch.setattr(requirements, "REQUIRED", ["postgresql"])
    with pytest.raises(pytest.fail.Exception, match="DISTLOCK_REQUIRE asks for postgresql, which is missing: install"):
        requirements.missing(*POSTGRESQL)
