"""Releases in the background: each is made, whatever comes meanwhile for the same token."""

from __future__ import annotations

import sys
import threading

from django_distlock.backends.common.timing import Timing
from django_distlock.core.cleaning import Cleaner
from django_distlock.core.local_queue import LocalQueue
from tests.support.tools import eventually, lock_request


class Store:
    """``meanwhile`` is called in the first release."""

    alias, has_sessions, timing = "default", False, Timing()

    def __init__(self, meanwhile):
        self.released, self._meanwhile = [], meanwhile

    def release(self, request, cooldown):
        self.released.append(request)
        if len(self.released) == 1:
            self._meanwhile()
        return True


def again(request):
    other = lock_request("name")
    other.token = request.token
    return other


def offer_for(request):
    offer = again(request)
    offer.is_offer = True
    return offer


def test_one_that_replaces_another_is_made_though_offers_come_at_each_step_of_its_end():
    first = lock_request("name")
    second = again(first)

    def note(frame, event, argument):
        if frame.f_code.co_filename.endswith("cleaning.py") and frame.f_code.co_name != "add":
            if second not in store.released:
                cleaner.add(offer_for(first), 0.0, None)
            return note
        return None

    def meanwhile():
        cleaner.add(second, 0.0, None)
        sys.settrace(note)

    store = Store(meanwhile)
    cleaner = Cleaner(store, LocalQueue(store.timing, lambda request: None))
    cleaner.add(first, 0.0, None)
    eventually(lambda: second in store.released)


def test_an_offer_replaces_nothing():
    first, may_end = lock_request("name"), threading.Event()
    second = again(first)

    def meanwhile():
        cleaner.add(second, 0.0, None)
        cleaner.add(offer_for(first), 0.0, None)
        may_end.set()

    store = Store(meanwhile)
    cleaner = Cleaner(store, LocalQueue(store.timing, lambda request: None))
    cleaner.add(first, 0.0, None)
    eventually(lambda: may_end.is_set() and not cleaner.is_busy)
    assert store.released == [first, second]
