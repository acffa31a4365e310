"""Lengths of time on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from django_distlock.management.durations import Duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0), ("0.5", 0.5), ("1e3", 1000.0), ("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0),
        ("1h1s", 3601.0), ("1.5h", 5400.0), ("2d", 172_800.0), ("1d2h3m4s", 93_784.0), ("0s", 0.0),
    ],
)  # fmt: skip
def test_what_a_length_of_time_is(text, seconds):
    assert Duration()(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "5x", "m", "30m1h", "5 m", "500ms", "1..5s", "-1", "-5m", "nan", "inf", "forever", "1m5"]
)
def test_what_is_none(text):
    with pytest.raises(ArgumentTypeError, match="is no length of time: write seconds, or .* such as 90, .* or 1h30m.$"):
        Duration()(text)


def test_forever():
    assert Duration(or_forever=True)("forever") is None
    with pytest.raises(ArgumentTypeError, match="1h30m, or 'forever'.$"):
        Duration(or_forever=True)("for ever")


def test_bounds_are_told():
    between = Duration("0.01s", "1d")
    assert [between("0.01"), between("24h")] == [0.01, 86_400.0]
    for text in ("0", "25h"):
        with pytest.raises(ArgumentTypeError, match=f"'{text}' is no length of time from 0.01s to 1d: write"):
            between(text)
