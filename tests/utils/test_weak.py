from __future__ import annotations

import sys

from django_distlock.utils.weak import WeakList


class Thing:
    pass


def test_who_goes_through_it_is_not_disturbed_by_what_is_added_meanwhile():
    kept = [Thing() for _ in range(3)]
    things = WeakList()
    for thing in kept:
        things.add(thing)
    later = []

    def add_one(*_):
        later.append(Thing())
        things.add(later[-1])
        return add_one

    before = sys.gettrace()
    sys.settrace(add_one)
    try:
        found = list(things)
    finally:
        sys.settrace(before)
    assert found[:3] == kept
    assert later
    assert list(things) == [*kept, *later]


def test_it_keeps_nothing_alive():
    kept, dropped = Thing(), Thing()
    things = WeakList()
    things.add(dropped)
    things.add(kept)
    del dropped
    assert list(things) == [kept]
    things.clear()
    assert list(things) == []
