"""What store and journal tell is put together."""

from __future__ import annotations

import pytest

from django_distlock.journal import NOT_RENEWED, Event, JournalEntry, QueuedWaiter
from django_distlock.monitoring import explain, situation
from django_distlock.monitoring.situation import Waiting, from_journal, gather, waits_in
from django_distlock.types import Holder, LockInfo

NOW = 1_795_700_000.0


def thread(number, pid=1):
    return Holder("web-1", pid, f"Thread-{number}", "pay", NOW)


def process(pid=1):
    return Holder("web-1", pid, "", "", NOW)


def waits(holder, lease="", ago=5.0, seconds=30.0, name="a"):
    return JournalEntry(NOW - ago, Event.WAITS, name, lease or holder.thread, holder, seconds=seconds)


def told(holder, *behind):
    """As the entry of ``waits()`` tells it: it has no lease."""
    return Waiting(holder, NOW - 5, behind, ())


class Store:
    """What a backend would say."""

    alias, long_held, supports_processes, journal_length = "default", None, True, 0

    def __init__(self, queue):
        self.queue = queue

    def waited_for(self):
        return ["a"]

    def look(self, names):
        return [[] for _ in names]

    def waiters(self, names):
        return [self.queue for _ in names]


@pytest.fixture
def waiting(monkeypatch):
    """Who waits for "a", of a store's queue and the entries of a journal."""

    def found(queue, *entries):
        monkeypatch.setattr(situation, "wall_clock", lambda: NOW)
        monkeypatch.setattr(situation, "read_entries", lambda backend: list(entries))
        return gather(Store(queue), "a").waiting

    return found


class TestQueues:
    def test_a_place_is_that_of_the_thread_with_its_token(self, waiting):
        one, other = thread(1), thread(2, pid=2)
        places = [QueuedWaiter("Thread-2", NOW - 4), QueuedWaiter("Thread-1", NOW - 3)]
        assert waiting(places, waits(one), waits(other)) == [told(other), told(one)]

    def test_a_token_that_another_thread_of_the_process_goes_on_with(self, waiting):
        assert waiting([QueuedWaiter("inherited", NOW, process())], waits(thread(1))) == [told(thread(1))]

    def test_those_behind_a_place_are_told_once(self, waiting):
        places = [QueuedWaiter("Thread-1", NOW, process()), QueuedWaiter("Thread-3", NOW, process())]
        first, second = waiting(places, *(waits(thread(number)) for number in range(1, 5)))
        assert first == told(thread(1), told(thread(2)), told(thread(4)))
        assert second == told(thread(3))

    def test_a_place_of_which_no_journal_tells(self, waiting):
        assert waiting([QueuedWaiter("x", NOW - 3, process(7))], waits(thread(1))) == [Waiting(process(7), NOW - 3)]
        assert waiting([QueuedWaiter("x", NOW - 3)]) == [Waiting(None, NOW - 3)]

    def test_who_has_no_place_and_no_other_of_its_process_waits_no_more(self, waiting):
        """It was interrupted, or killed, and nothing tells of it."""
        assert waiting([], waits(thread(1))) == []

    def test_a_store_without_a_queue(self, waiting):
        assert waiting(None, waits(thread(1))) == [told(thread(1))]
        assert waiting(None) is None


class TestWaits:
    @pytest.mark.parametrize("end", [Event.GRANTED, Event.TIMED_OUT, Event.WAIT_ENDED, Event.WAITS])
    def test_what_a_thread_does_next_ends_its_wait(self, end):
        told = [waits(thread(1)), JournalEntry(NOW - 1, end, "b", "other", thread(1), seconds=30.0)]
        assert [*waits_in(told, NOW)] == (["b"] if end is Event.WAITS else [])

    @pytest.mark.parametrize(("seconds", "expected"), [(None, ["a"]), (5.0, ["a"]), (3.0, [])])
    def test_nobody_waits_for_longer_than_it_said(self, seconds, expected):
        assert [*waits_in([waits(thread(1), seconds=seconds)], NOW)] == expected

    def test_in_the_order_in_which_they_began(self):
        told = [waits(thread(2), ago=3), waits(thread(1), ago=4)]
        assert [entry.holder for entry in waits_in(told, NOW)["a"]] == [thread(1), thread(2)]


def test_without_a_journal_nothing_is_known_of_the_past():
    found = from_journal(None, "a", "default", NOW, None)
    assert (found.held, found.waiting, found.history, found.entries) == ((), (), [], None)


@pytest.mark.parametrize("event", [Event.DETACHED, Event.BOUND_REACHED])
def test_a_lease_that_is_renewed_no_more(monkeypatch, event):
    """Its end says nothing of its holder."""
    holder = thread(1)
    info = LockInfo("a", "default", holder, 17, 5.0, token="token")
    told = [
        JournalEntry(NOW - 25, Event.GRANTED, "a", info.digest, holder, ttl=30.0),
        JournalEntry(NOW - 20, event, "a", info.digest, holder, ttl=30.0),
    ]
    store = Store([])
    monkeypatch.setattr(store, "look", lambda names: [[info] for _ in names])
    for entries, ttl in ((told[:1], 30.0), (told, None)):
        monkeypatch.setattr(situation, "read_entries", lambda backend, entries=entries: entries)
        found = gather(store, "a")
        [lease] = found.held
        assert (lease.since, lease.ttl, lease.remaining) == (NOW - 25, ttl, 5.0)
        assert (", 5 s left and not renewed. " if ttl is None else ", 5 s left unless renewed. ") in explain.holders(
            found
        )[0]


class TestAdopted:
    """A lease that another process goes on with, and renews."""

    @pytest.mark.parametrize(("text", "ttl"), [("", 30.0), (NOT_RENEWED, None)])
    @pytest.mark.parametrize("first", [0, 2])
    def test_it_is_renewed_again(self, monkeypatch, first, text, ttl):
        holder = thread(2, pid=2)
        info = LockInfo("a", "default", holder, 17, 5.0, token="token")
        told = [
            JournalEntry(NOW - 25, Event.GRANTED, "a", info.digest, thread(1), ttl=30.0, text=text),
            JournalEntry(NOW - 22, Event.DETACHED, "a", info.digest, thread(1), ttl=30.0, seconds=3.0),
            JournalEntry(NOW - 20, Event.ADOPTED, "a", info.digest, holder, ttl=30.0, seconds=5.0, text=text),
        ]
        store = Store([])
        monkeypatch.setattr(store, "look", lambda names: [[info] for _ in names])
        monkeypatch.setattr(situation, "read_entries", lambda backend: told[first:])
        [lease] = gather(store, "a").held
        assert (lease.since, lease.ttl, lease.holder) == (NOW - 25, ttl, holder)


class TestWhatAJournalDoesNotTell:
    def past(self, *told, at=NOW):
        return from_journal(told, "a", "default", at, None)

    def told(self, event, ago, **about):
        return JournalEntry(NOW - ago, event, "a", "lease", thread(1), ttl=30.0, **about)

    def test_who_held_it_where_its_grant_is_no_longer_there(self):
        found = self.past(waits(thread(2)))
        assert not found.is_holder_known
        assert explain.holders(found)[0].startswith("Who held it then is not known: the journal begins at ")
        assert explain.as_data(found)["holders"] is None

    def test_that_it_is_free_is_told_by_an_end(self):
        found = self.past(self.told(Event.RELEASED, 9), waits(thread(2)))
        assert explain.holders(found) == ["Nobody holds it."]

    def test_a_lease_that_is_not_renewed_is_over_with_its_ttl(self):
        granted = self.told(Event.GRANTED, 100, text=NOT_RENEWED)
        assert self.past(granted, at=NOW - 80).held
        assert not self.past(granted).held
        assert not self.past(granted, self.told(Event.LOST, -5)).held

    def test_unless_its_release_is_told(self):
        """Somebody renewed it by hand."""
        granted, released = self.told(Event.GRANTED, 100, text=NOT_RENEWED), self.told(Event.RELEASED, -5)
        assert self.past(granted, released).held
