"""Waiters where scripts are not told who receives a message: each looks by itself, and nobody is handed a lock.

Each alias stands for a process; a look counts for so long that a busy machine drops nobody, where a test does not say
otherwise.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress

import pytest

from django_distlock import LockBackendError, LockTimeout, lock, locks, signals
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.pubsub import RedisListener
from django_distlock.types import Grant, Level, LockInfo
from tests.support.accidents import Accidents
from tests.support.history import SETTLING, Journal, Recording, faults, grants_in, left_behind, read
from tests.support.peers import PROLOGUE, RANDOM_WORKER, Peer
from tests.support.strict_proxy import StrictProxy
from tests.support.tools import PATIENCE, eventually, lock_request

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(1)]

# What scripts have in the place of a call of PUBLISH; see StrictProxy
UNTRUE = {
    "none": "({} and 0)",
    "none, and lost": "0",
    "one": "({} and 1)",
    "one, and lost": "1",
    "refused": "redis.call('PUBLISH')",
}
# The truth about every other process, by the last letter of its channel; of the others none
OF_SOME = "({} * (string.byte(channel, -1) % 2))"
ALIASES = ("first", "second", "third", "fourth")
RECORDING = "tests.support.history.RecordingBackend"
POLLS = "polls"
SOAK = float(os.environ.get("DISTLOCK_SOAK", "4"))
# A look counts for as long as the judge gives a waiter that was disturbed to come back.
COUNTS = f"from django_distlock.backends.common.timing import Timing; Timing.grant_ttl = {SETTLING}"
BEHIND_PROXY = PROLOGUE.replace('"LOCATION": ', '"KEY_PREFIX": "{lock}", "LOCATION": ').replace(
    "from django_distlock import *", f"from django_distlock import *\n{COUNTS}"
)


@pytest.fixture(autouse=True)
def look_counts_for_long(monkeypatch):
    monkeypatch.setattr(Timing, "grant_ttl", 60.0)


@pytest.fixture
def start(valkey, store, settings, tmp_path_factory):
    """Makes the aliases, whose scripts are told that, and returns the proxy that does so."""
    with StrictProxy(valkey.socket, tmp_path_factory.mktemp("p")) as proxy:

        def start(publishes):
            proxy.publishes = publishes
            entry = {"BACKEND": RECORDING, "LOCATION": proxy.url, "KEY_PREFIX": "{lock}"}
            settings.DISTRIBUTED_LOCKS = dict.fromkeys(("default", *ALIASES), entry)
            return proxy

        yield start
        locks.close()


@pytest.fixture
def journal(tmp_path):
    """Of this process, with its threads under all aliases."""
    journal = Journal(tmp_path)
    journal.attach()
    yield tmp_path
    signals.lock_acquired.disconnect(journal.granted)
    signals.lock_lost.disconnect(journal.lost)
    Recording.journal = None


def entries(store):
    """The inboxes of those who wait, as they stand in the queue."""
    return [entry.split(" ", 3)[3].rpartition("|")[0] for entry in store.zrange("{lock}|q:name", 0, -1)]


def nothing_is_left(store):
    eventually(lambda: not left_behind(store.keys("*"), "{lock}"))


class TestOrder:
    """S10. Judged by what was asked and answered."""

    @pytest.mark.usefixtures("long_calls")
    @pytest.mark.parametrize("publishes", [*UNTRUE.values(), OF_SOME], ids=[*UNTRUE, "of some"])
    def test_nobody_overtakes_a_waiter(self, start, store, journal, publishes):
        """Also where others are handed the lock."""
        start(publishes)
        over, inside = threading.Event(), threading.Semaphore()

        def work(alias, seed):
            chance = random.Random(seed)
            while not over.is_set():
                with suppress(LockTimeout), lock("name", wait=chance.choice((0.2, PATIENCE)), using=alias):
                    assert inside.acquire(blocking=False)
                    over.wait(chance.choice((0.0, 0.001, 0.05)))
                    inside.release()

        threads = [threading.Thread(target=work, args=(alias, alias)) for alias in ALIASES]
        for thread in threads:
            thread.start()
        eventually(lambda: len(grants_in(journal)) >= 20, PATIENCE)
        over.set()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert faults(read(journal)) == []
        nothing_is_left(store)

    @pytest.mark.parametrize("publishes", UNTRUE.values(), ids=UNTRUE)
    def test_waiters_poll_and_are_granted_the_lock_as_they_came(self, start, store, callers, publishes):
        start(publishes)
        holder = lock("name")
        holder.acquire()
        waiters = []
        for alias in ALIASES:
            waiters.append(callers(alias, wait=PATIENCE, as_task=alias in ("second", "third")))
            eventually(lambda: len(entries(store)) == len(waiters))
        assert entries(store) == [POLLS] * 4
        holder.release()
        for waiter in waiters:
            waiter.gets_in()
            waiter.leaves()
        nothing_is_left(store)

    @pytest.mark.seconds(6)
    def test_random_processes_and_accidents(self, start, store, tmp_path):
        """S1, S4, S10, S12 of everything at once, whatever happens to processes."""
        proxy, peers = start(UNTRUE["none"]), []
        try:
            peers += [Peer(proxy.url, RANDOM_WORKER, 30.0, BEHIND_PROXY) for _ in range(6)]
            for peer in peers:
                peer.says("ready", 3 * PATIENCE)
            events = Accidents(peers, tmp_path, spared=4).run(SOAK, grants=30)
        finally:
            for peer in peers:
                peer.end()
        assert faults(events) == []
        assert len([event for event in events if event.kind == "grant"]) >= 30
        nothing_is_left(store)

    def test_newcomers_do_not_overtake_the_first_that_polls(self, start, store):
        """Though the lock is free until that one looks, which it may do for as long as its last look counts."""
        start(UNTRUE["none"])
        first, second = (locks[alias] for alias in ("first", "second"))
        waiter, later = lock_request("name"), lock_request("name")
        with lock("name"):
            assert isinstance(first.acquire(waiter, queue=True), LockInfo)
        assert store.get("{lock}:name") is None
        for queue in (False, True):
            busy = second.acquire(later, queue=queue)
            assert (busy.holder, busy.fence, busy.resting) == (None, 0, False)
            assert (0 < busy.remaining <= Timing.grant_ttl) is not queue
        assert store.get("{lock}:name") is None
        assert isinstance(first.acquire(waiter, queue=True), Grant)
        assert first.release(waiter)
        assert isinstance(second.acquire(later, queue=True), Grant)
        assert second.release(later)
        nothing_is_left(store)

    def test_a_lock_whose_holder_died_goes_to_the_first(self, start, store):
        start(UNTRUE["none"])
        dead, first, second = (lock_request("name", ttl=60) for _ in range(3))
        assert isinstance(locks["first"].acquire(dead, queue=False), Grant)
        for alias, waiter in (("first", first), ("second", second)):
            assert isinstance(locks[alias].acquire(waiter, queue=True), LockInfo)
        store.pexpire("{lock}:name", 1)  # as if it had not been renewed
        eventually(lambda: store.get("{lock}:name") is None)
        assert isinstance(locks["second"].acquire(second, queue=True), LockInfo)
        assert isinstance(locks["first"].acquire(first, queue=True), Grant)


class TestWaitersThatDie:
    """S7."""

    def test_they_are_passed_when_their_look_counts_no_more(self, start, store, monkeypatch):
        """All of them at the same time."""
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        start(UNTRUE["none"])
        with lock("name"):
            for alias in ("first", "second", "third"):
                assert isinstance(locks[alias].acquire(lock_request("name"), queue=True), LockInfo)
        with lock("name", wait=PATIENCE, using="fourth"):
            assert entries(store) == []
        nothing_is_left(store)

    def test_others_that_listen_are_handed_the_lock_then(self, start, store, monkeypatch, callers):
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        start("")
        dead = lock_request("name")
        dead.inbox = POLLS
        with lock("name"):
            assert isinstance(locks["first"].acquire(dead, queue=True), LockInfo)
            waiter = callers("second", wait=PATIENCE)
            eventually(lambda: len(entries(store)) == 2)
        waiter.gets_in()
        waiter.leaves()

    def test_who_comes_back_has_its_place(self, start, store, monkeypatch):
        monkeypatch.setattr(Timing, "grant_ttl", 0.1)
        start(UNTRUE["none"])
        late, other = lock_request("name"), lock_request("name")
        with lock("name"):
            for alias, waiter in (("first", late), ("second", other)):
                assert isinstance(locks[alias].acquire(waiter, queue=True), LockInfo)
            place = late.place
            eventually(lambda: not store.exists("{lock}|x:name"))
        eventually(lambda: isinstance(locks["second"].acquire(other, queue=True), Grant))
        assert isinstance(locks["first"].acquire(late, queue=True), LockInfo)
        assert late.place == place
        assert locks["second"].release(other)
        assert isinstance(locks["first"].acquire(late, queue=True), Grant)


class TestLeaving:
    """S4."""

    def test_who_gives_up_leaves_nothing_and_lets_the_next_one_go_first(self, start, store, callers):
        start(UNTRUE["none"])
        with lock("name"):
            assert not lock("name", wait=0.3, using="first").acquire()
            eventually(lambda: entries(store) == [])
            eventually(lambda: left_behind(store.keys("*"), "{lock}") == ["{lock}:name"])
            impatient = callers("first", wait=2)
            eventually(lambda: entries(store))
            waiter = callers("second", wait=PATIENCE)
            assert eventually(lambda: impatient.outcome) == "late"
        waiter.gets_in()
        waiter.leaves()
        nothing_is_left(store)

    def test_the_place_goes_to_the_next_one_of_the_process(self, start, store, callers):
        start(UNTRUE["none"])
        with lock("name"):
            impatient = callers("first", wait=0.6)
            eventually(lambda: entries(store))
            successor = callers("first", wait=PATIENCE)
            other = callers("second", wait=PATIENCE)
            eventually(lambda: len(entries(store)) == 2)
            assert eventually(lambda: impatient.outcome) == "late"
        successor.gets_in()
        assert other.outcome is None
        successor.leaves()
        other.gets_in()
        other.leaves()
        nothing_is_left(store)

    def test_a_command_that_comes_late_leaves_no_place(self, start, store):
        start(UNTRUE["none"])
        with lock("name"):
            request = lock_request("name")
            backend = locks["first"]
            assert isinstance(backend.acquire(request, queue=True), LockInfo)
            late = request.copy(place="")
            request.in_doubt = True
            backend.release(request)
            for place in ("", request.place):
                late.place = place
                with pytest.raises(LockBackendError, match="given back"):
                    backend.acquire(late, queue=True)
        assert entries(store) == []


class TestFindingOut:
    """Whether scripts are told who receives a message, by each process for its own subscription."""

    @pytest.mark.parametrize("publishes", ["", "({} + 1)"], ids=["alone", "with somebody who hears everything"])
    def test_where_they_are_told_the_lock_is_handed_on(self, start, store, callers, publishes):
        start(publishes)
        with lock("name"):
            waiter = callers("first", wait=PATIENCE)
            eventually(lambda: entries(store))
            assert entries(store)[0].startswith("S{lock}|in:")
        waiter.gets_in()
        waiter.leaves()

    def test_one_silence_is_believed_of_two_subscriptions_only(self, start, monkeypatch):
        """The first one may have ended. Meanwhile a waiter polls."""
        proxy, backend = start(UNTRUE["none"]), locks["first"]
        real, stood = RedisListener.subscribe, []
        monkeypatch.setattr(RedisListener, "subscribe", lambda *of: stood.append(real(*of)))

        def inbox():
            request = lock_request("name")
            backend.acquire(request, queue=True)
            backend.release(request)
            return request.inbox

        with lock("name"):
            assert inbox() == POLLS
            proxy.publishes = ""
            eventually(lambda: len(stood) == 2)
            assert inbox().startswith("S{lock}|in:")

    def test_what_was_found_out_is_not_asked_again_by_each(self, start, store):
        proxy = start(UNTRUE["none"])
        backend = locks["first"]

        def wait():
            request = lock_request("name")
            backend.acquire(request, queue=True)
            backend.release(request)

        with lock("name"):
            wait()
            eventually(lambda: not backend.is_listening("name"))
            wait()
            opened = proxy.accepted
            for _ in range(3):
                wait()
        assert proxy.accepted == opened

    @pytest.mark.parametrize("mode", ["one", "refused"])
    def test_what_is_known_is_asked_again_after_a_while(self, start, store, monkeypatch, mode):
        monkeypatch.setattr(Timing, "deaf_for", 0.2)
        proxy = start(UNTRUE[mode])
        with lock("name"):
            request = lock_request("name")
            locks["first"].acquire(request, queue=True)
            assert request.inbox == POLLS
            proxy.publishes = ""

            def is_told():
                other = lock_request("name")
                locks["first"].acquire(other, queue=True)
                locks["first"].release(other)
                return other.inbox != POLLS

            eventually(is_told)
            locks["first"].acquire(request, queue=True)
            assert request.inbox == POLLS
            locks["first"].release(request)

    def test_it_is_logged_once(self, start, store, monkeypatch, caplog):
        monkeypatch.setattr(Timing, "deaf_for", 0.0)
        start(UNTRUE["one"])
        with lock("name"):
            for _ in range(2):
                assert not lock("name", wait=0.2, using="first").acquire()
        told = [record.message for record in caplog.records if "not told who receives a message" in record.message]
        assert len(told) == 1
        assert "'first'" in told[0]

    @pytest.mark.parametrize(("mode", "message"), [("none", "look every 0.1 to 1 s"), ("", "woken by messages")])
    def test_locks_check_tells(self, start, calls, mode, message):
        start(mode and UNTRUE[mode])
        [waiting] = [one for one in calls(locks["default"]).check() if one.about == "waiting"]
        assert waiting.level is (Level.INFO if mode else Level.OK)
        assert message in waiting.message


class TestPace:
    def test_the_first_looks_ten_times_a_second_and_others_less_often(self, start):
        start(UNTRUE["none"])
        backend, waited = locks["default"], []
        backend.pause = lambda request, timeout: waited.append(timeout)
        requests = [lock_request("name") for _ in range(12)]
        with lock("name"):
            for request in requests:
                backend.acquire(request, queue=True)
                backend.wait_for_turn(request, 1.0)
            backend.wait_for_turn(requests[1], 0.05)
            for request in requests:
                backend.release(request)
        assert waited == pytest.approx([*[0.1 * place for place in range(1, 11)], 1.0, 1.0, 0.05])
