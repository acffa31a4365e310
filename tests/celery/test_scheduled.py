"""What messages tell of the run of beat for which they were sent."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from django_distlock.celery.scheduled import HEADER, ScheduledRun, header_of, scheduled_run


@pytest.mark.parametrize("entry", ["nightly", "half of a pair \ud800", "new\nline", 1])
def test_a_header_tells_entry_and_time(entry):
    header = header_of(entry, 1705305600.25)
    assert header.isascii()
    expected = ScheduledRun(str(entry), datetime(2024, 1, 15, 8, 0, 0, 250_000, tzinfo=UTC))
    assert scheduled_run(SimpleNamespace(headers={HEADER: header})) == expected


@pytest.mark.parametrize("header", ["", "x", "[]", "[1, 2]", '["a", "b"]', '["a", NaN]', '["a", 1e300]', 7, None, [1]])
def test_a_message_of_another_sender_has_no_run(header):
    assert scheduled_run(SimpleNamespace(headers={HEADER: header})) is None
    assert scheduled_run(SimpleNamespace(headers={})) is None
    assert scheduled_run(SimpleNamespace(headers=None)) is None
