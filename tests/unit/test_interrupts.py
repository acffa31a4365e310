"""Who interrupts the package at its points leaves who traces the rest of the tests as it was."""

from __future__ import annotations

import sys

from django_distlock.names import check_name
from tests.support.interrupts import at_each_point


def test_who_measures_coverage_goes_on_afterwards():
    def trace(*_):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        points = list(at_each_point(check_name))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert points
