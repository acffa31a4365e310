"""The judge of histories finds locks that are broken on purpose."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest

from django_distlock import lock, locks
from django_distlock import signals as lock_signals
from django_distlock.types import Grant, new_token
from django_distlock.utils.clock import clock
from tests.support.history import (
    EVERYBODY,
    SETTLING,
    Event,
    Journal,
    Recording,
    RecordingBackend,
    faults,
    left_behind,
    most_at_once,
    overlaps,
    overruns,
    read,
)
from tests.support.tools import PATIENCE


def place(at, pid, number):
    return Event("place", at, pid, "name", place=f"{number:016}")


def grant(at, pid, fence, ttl=10.0, number=None, sent=None, **slots):
    """``ttl``: seconds from the grant to the local deadline."""
    text, sent = "" if number is None else f"{number:016}", at - 0.001 if sent is None else sent
    return Event("grant", at, pid, "name", fence, text, sent=sent, deadline=at + ttl, **slots)


def renewal(at, pid, fence, deadline):
    return Event("renewal", at, pid, "name", fence, deadline=deadline)


def release(at, pid, fence):
    return Event("release", at, pid, "name", fence)


def loss(at, pid, fence):
    return Event("loss", at, pid, "name", fence)


def adoption(at, pid, fence, ttl=10.0):
    return Event("adoption", at, pid, "name", fence, deadline=at + ttl)


def call(begin, allowed, end):
    return Event("call", end, 1, "acquire", sent=begin, deadline=begin + allowed)


class TestSound:
    def test_one_after_the_other(self):
        assert faults([grant(1, 1, 5), release(2, 1, 5), grant(2.001, 2, 6), release(3, 2, 6)]) == []

    def test_after_the_local_deadline_of_one_that_died(self):
        assert faults([grant(1, 1, 5, ttl=1), grant(2, 2, 6)]) == []

    def test_a_lease_that_was_detached_and_adopted(self):
        passed_on = [grant(1, 1, 5), release(2, 1, 5), adoption(2.1, 2, 5), release(3, 2, 5)]
        assert faults([*passed_on, grant(3.1, 1, 6)]) == []
        assert faults([*passed_on, grant(2.9, 1, 6)]) != []

    def test_after_a_loss_that_was_told(self):
        assert faults([grant(1, 1, 5), loss(2, 1, 5), grant(2.1, 2, 6)]) == []

    def test_other_names_have_nothing_to_do_with_it(self):
        assert faults([grant(1, 1, 6), Event("grant", 1.1, 2, "other", 5, sent=1.0, deadline=9.0)]) == []

    def test_one_that_woke_up_after_its_deadline_believed_in_nothing(self):
        stopped = Event("grant", 9, 1, "name", 5, sent=1.0, deadline=3.0)
        assert faults([grant(4, 2, 6), stopped, release(10, 2, 6)]) == []

    def test_waiters_in_the_order_of_their_places(self):
        waited = [grant(0, 9, 1), place(1, 1, 10), place(2, 2, 11), release(3, 9, 1)]
        came_in = [grant(3.1, 1, 10, number=10), release(4, 1, 10), grant(4.1, 2, 11, number=11)]
        assert faults([*waited, *came_in]) == []

    def test_a_request_sent_before_the_waiter_had_its_place_overtook_nobody(self):
        assert faults([place(1.5, 1, 10), grant(2, 2, 9, ttl=1, sent=1.4), grant(4, 1, 10, number=10)]) == []

    @pytest.mark.parametrize("pid", [1, EVERYBODY])
    def test_a_waiter_that_was_disturbed_may_be_overtaken(self, pid):
        events = [place(1, 1, 10), grant(2, 2, 11, ttl=1, number=11), grant(4, 1, 12, number=10)]
        assert faults(events) != []
        assert faults([*events, Event("disturbed", 1.5, pid)]) == []
        assert faults([*events, Event("disturbed", 1.5, 2)]) != []
        assert faults([*events, Event("disturbed", 1 - SETTLING - 1, pid)]) != []

    def test_as_many_at_once_as_the_last_one_allows(self):
        of_three = [grant(slot, slot, slot, slot=slot, slots=3) for slot in (1, 2, 3)]
        assert faults(of_three) == []
        assert faults([*of_three, release(3.5, 2, 2), grant(4, 4, 4, slot=2, slots=3)]) == []

    def test_one_that_is_alone_when_it_is_granted_and_has_others_beside_it_later(self):
        """And learns of it after them."""
        assert faults([grant(2.1, 1, 5, sent=1, slots=1), grant(2, 2, 6, slot=2, slots=3)]) == []

    def test_those_that_are_handed_slots_at_once_may_learn_of_it_in_any_order(self):
        waited = [place(1, 1, 10), place(1.1, 2, 11)]
        assert faults([*waited, grant(3, 2, 6, number=11, slot=2, slots=2), grant(3.1, 1, 5, number=10, slots=2)]) == []

    def test_a_clean_store(self):
        assert left_behind(["lock|f", "other:key"]) == []


class TestBroken:
    def test_two_holders_at_once(self):
        [fault] = faults([grant(1, 1, 5), grant(2, 2, 6), release(3, 1, 5), release(4, 2, 6)])
        assert fault.startswith("name: two holders at once: 5 of process 1 from 1.000000 to 3.000000, and 6 of")

    def test_two_at_once_because_of_a_renewal(self):
        events = [grant(1, 1, 5, ttl=1), grant(3, 2, 6)]
        assert faults(events) == []
        assert "two holders at once" in faults([*events, renewal(1.5, 1, 5, deadline=3.5)])[0]

    def test_two_at_once_though_another_was_in_between(self):
        found = faults([grant(1, 1, 5, ttl=9), grant(2, 2, 6, ttl=0.5), grant(4, 3, 7)])
        assert len([fault for fault in found if "two holders at once: 5" in fault]) == 2

    def test_more_at_once_than_the_last_one_allows(self):
        of_two = [grant(1, 1, 5, slots=2), grant(2, 2, 6, slot=2, slots=2)]
        [fault] = faults([*of_two, grant(3, 3, 7, slot=3, slots=2)])
        assert fault.startswith(
            "name: 3 holders at once: 6 of process 2 in slot 2 of 2 from 2.000000 to 12.000000, and 5"
        )
        assert len(faults([*of_two, grant(3, 3, 7, slot=3, slots=3), grant(4, 4, 8, slot=4, slots=2)])) == 1

    def test_two_new_ones_that_would_be_alone_beside_an_old_one_that_would_not(self):
        old = grant(1, 1, 5, slot=2, slots=3)
        [fault] = faults([old, grant(2, 2, 6)])
        assert fault.startswith("name: two holders at once: 5 of process 1 in slot 2 of 3 from 1.000000")
        assert faults([old, release(1.5, 1, 5), grant(2, 2, 6)]) == []

    def test_a_slot_that_two_have_at_once(self):
        [fault] = faults([grant(1, 1, 5, slots=3), grant(2, 2, 6, slots=3)])
        assert "two holders at once: 5 of process 1 in slot 1 of 3" in fault

    def test_a_number_that_goes_back_where_others_have_slots(self):
        events = [grant(1, 1, 6, slots=3), grant(5, 2, 5, slot=2, slots=3)]
        assert faults(events) == ["name: the number 5 was granted after 6"]

    def test_one_that_is_handed_a_slot_past_a_waiter(self):
        waited = [place(1, 1, 10), place(1.1, 2, 11)]
        [fault] = faults([*waited, grant(3, 2, 5, number=11, slots=2), grant(3.1, 1, 6, number=10, slot=2, slots=2)])
        assert "process 2 got in with the place 0000000000000011" in fault

    def test_a_number_granted_twice(self):
        found = faults([grant(1, 1, 5), release(2, 1, 5), grant(3, 2, 5), release(4, 2, 5)])
        assert "name: the number 5 was granted 2 times" in found

    def test_a_number_that_goes_back(self):
        assert faults([grant(1, 1, 6), release(2, 1, 6), grant(3, 2, 5)]) == ["name: the number 5 was granted after 6"]

    def test_a_waiter_overtaken_by_one_that_came_later(self):
        [fault] = faults([place(1, 1, 10), place(2, 2, 11), grant(3, 2, 11, 1, number=11), grant(5, 1, 12, number=10)])
        assert "process 2 got in with the place 0000000000000011 at 3.000000 before process 1" in fault

    def test_a_waiter_overtaken_by_one_that_did_not_wait(self):
        [fault] = faults([place(1, 1, 10), grant(3, 2, 11, ttl=1), grant(5, 1, 12, number=10)])
        assert "process 2 got in without a place" in fault

    @pytest.mark.parametrize("key", ["lock:name", "lock|q:name", "lock|x:name", "lock:f"])
    def test_a_key_left_over(self, key):
        assert left_behind(["lock|f", key]) == [key]


class TestFigures:
    def test_how_long_two_believed_at_once(self):
        assert overlaps([grant(1, 1, 5, ttl=1), grant(3, 2, 6)]) == []
        assert overlaps([grant(1, 1, 5), grant(2, 2, 6), release(4, 1, 5), release(9, 2, 6)]) == [2]

    def test_how_long_too_many_believed_at_once(self):
        of_two = [grant(1, 1, 5, slots=2), grant(2, 2, 6, slot=2, slots=2), release(8, 2, 6)]
        assert overlaps(of_two) == []
        assert overlaps([*of_two, grant(3, 3, 7, slot=3, slots=2)]) == [5]

    def test_how_many_believed_at_once(self):
        assert most_at_once([]) == 0
        assert most_at_once([grant(1, 1, 5), release(2, 1, 5), grant(2.1, 2, 6)]) == 1
        assert most_at_once([grant(1, 1, 5, ttl=2), grant(2, 2, 6, ttl=2), grant(3.5, 3, 7)]) == 2

    def test_how_long_calls_took_beyond_their_time(self):
        assert overruns([call(1, 2, 2.5), call(1, 2, 4.5), grant(9, 1, 5)]) == [1.5]


class TestJournals:
    @pytest.fixture
    def journal(self, tmp_path):
        journal = Journal(tmp_path)
        journal.attach()
        yield journal
        lock_signals.lock_acquired.disconnect(journal.granted)
        lock_signals.lock_lost.disconnect(journal.lost)
        Recording.journal = None

    def test_a_line_torn_by_a_kill_is_left_out(self, tmp_path):
        whole = json.dumps(asdict(grant(1, 1, 5)))
        (tmp_path / "1.jsonl").write_text(f"{whole}\n{whole[:40]}")
        assert read(tmp_path) == [grant(1, 1, 5)]

    def test_they_tell_of_grants_renewals_and_the_end(self, journal, tmp_path, valkey_locks):
        before = clock()
        with lock("name", ttl=20) as lease:
            lease.renew(30)
        granted, renewed, released = read(tmp_path)
        assert (granted.kind, renewed.kind, released.kind) == ("grant", "renewal", "release")
        assert {event.fence for event in (granted, renewed, released)} == {lease.fence}
        assert before <= granted.sent <= granted.at <= renewed.at <= released.at
        assert renewed.deadline == lease.deadline > granted.deadline + 9

    @pytest.mark.parametrize(
        "kind", ["tests.support.history.RecordingBackend", "tests.processes.test_history.Careless"]
    )
    def test_real_threads_and_a_backend_that_ignores_the_holder(self, journal, tmp_path, valkey, store, settings, kind):
        """Two threads for each of three backends, which know nothing of each other."""
        entry = {"BACKEND": kind, "LOCATION": valkey.url}
        settings.DISTRIBUTED_LOCKS = dict.fromkeys("abc", entry)

        def work(alias):
            for _ in range(4):
                with lock("name", using=alias, wait=None, on_lost="log"):
                    time.sleep(0.01)

        threads = [threading.Thread(target=work, args=(alias,)) for alias in "aabbcc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        locks.close()
        events = read(tmp_path)
        assert len([event for event in events if event.kind == "grant"]) == 24
        if kind.endswith("Careless"):
            assert any("two holders at once" in fault for fault in faults(events))
        else:
            assert any(event.kind == "place" for event in events)
            assert faults(events) == []
            assert left_behind(store.keys()) == []


class Careless(RecordingBackend):
    """Says yes though somebody else holds the lock."""

    def acquire(self, lock_request, *, queue):
        answer = super().acquire(lock_request, queue=False)
        if isinstance(answer, Grant):
            return answer
        lock_request.token = new_token()
        return Grant(answer.fence + 1, clock())
