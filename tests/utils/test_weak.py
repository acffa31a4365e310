from __future__ import annotations

from django_distlock.utils.weak import WeakList


class Thing:
    pass


def test_who_goes_through_it_is_not_disturbed_by_what_is_added_meanwhile():
    kept, later = [Thing() for _ in range(3)], Thing()
    things = WeakList()
    for thing in kept:
        things.add(thing)
    found = []
    for thing in things:
        things.add(later)
        found.append(thing)
    assert found == kept
    assert list(things) == [*kept, later]


def test_it_keeps_nothing_alive():
    kept, dropped = Thing(), Thing()
    things = WeakList()
    things.add(dropped)
    things.add(kept)
    del dropped
    assert list(things) == [kept]
    things.clear()
    assert list(things) == []
