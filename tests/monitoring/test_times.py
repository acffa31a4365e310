"""Moments and lengths of time in several languages."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.utils import timezone, translation

from django_distlock.monitoring.times import format_duration, moment, to_the_second

NOW = datetime(2026, 11, 26, 15, 35, 19, 990_000, UTC)


@pytest.fixture(autouse=True)
def in_utc():
    with timezone.override("UTC"):
        yield


@pytest.mark.parametrize(
    ("language", "lengths"),
    [
        ("en", ["0 s", "59 s", "1 min 00 s", "12 min 34 s", "1 h 06 min", "2 d 03 h"]),
        ("de", ["0 s", "59 s", "1 min 00 s", "12 min 34 s", "1 h 06 min", "2 d 03 h"]),
        ("zh-hans", ["0 秒", "59 秒", "1 分 00 秒", "12 分 34 秒", "1 小时 06 分", "2 天 03 小时"]),
    ],
)
def test_a_length_has_its_two_largest_units(language, lengths):
    with translation.override(language):
        assert [format_duration(one) for one in (0.9, 59.99, 60, 754, 3960, 183_600)] == lengths


@pytest.mark.parametrize(
    ("language", "day", "short"),
    [
        (None, "2026-11-26 15:35:19", "15:35:19"),
        ("en", "2026-11-26 15:35:19", "15:35:19"),
        ("de", "26.11.2026 15:35:19", "15:35:19"),
        ("zh-hans", "2026/11/26 15:35:19", "15:35:19"),
    ],
)
def test_a_moment_has_seconds_in_every_language(language, day, short):
    at = NOW.timestamp()
    with translation.override(language):
        assert moment(at, at + 60) == short
        assert moment(at, at + 86_400) == day


def test_each_language_of_django_has_a_format_with_seconds(settings):
    for language, _ in settings.LANGUAGES:
        with translation.override(language):
            assert "19" in to_the_second(NOW)
            assert "19" in to_the_second(NOW.time())
