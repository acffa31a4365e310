"""``max_waiters``: one more caller than may wait is refused at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from django_distlock import (
    InvalidLockBackend,
    LockNotAcquired,
    LockTimeout,
    distributed_lock,
    lock,
    lock_all,
    locks,
)
from django_distlock.core.leader import unbounded
from django_distlock.core.local_queue import LocalQueue
from django_distlock.signals import lock_busy
from django_distlock.testing import override_locks
from django_distlock.types import Grant
from tests.support.programs import heard
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request, queue_of

ALL = ("redis", "cluster", "locmem", "postgres", "mariadb", "sqlite", "zookeeper")

backend = backend_on(*ALL)


@pytest.fixture
def held(backend):
    """By another process, as far as those who come next can tell."""
    holder = lock_request(ttl=60, label="the holder")
    assert isinstance(backend.acquire(holder, queue=False), Grant)
    yield holder
    backend.release(holder)


class Crowd:
    """Threads, or tasks of one event loop, that all want a lock, and what became of each."""

    def __init__(self, number, way, name="name", **options):
        self.got_in, self.refused = [], []
        self._may_leave = threading.Event()
        self._handle = lock(name, **{"wait": PATIENCE, **options})
        work = [self._get_in] * number if way == "threads" else [lambda: asyncio.run(self._tasks(number))]
        self._threads = [threading.Thread(target=one) for one in work]
        for thread in self._threads:
            thread.start()

    def _get_in(self):
        try:
            with self._handle as lease:
                self.got_in.append(lease.fence)
                self._may_leave.wait(PATIENCE)
        except LockNotAcquired as error:
            self.refused.append(error)

    async def _tasks(self, number):
        await asyncio.gather(*(self._aget_in() for _ in range(number)))

    async def _aget_in(self):
        try:
            async with self._handle as lease:
                self.got_in.append(lease.fence)
                while not self._may_leave.is_set():
                    await asyncio.sleep(0.005)
        except LockNotAcquired as error:
            self.refused.append(error)

    def ends(self):
        self._may_leave.set()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.mark.parametrize("way", ["threads", "tasks"])
class TestOneProcess:
    def test_as_many_wait_as_may_and_the_others_are_refused(self, backend, held, way):
        """Also where they come at one moment, and the first of them is not answered yet."""
        crowd = Crowd(7, way, max_waiters=3)
        eventually(lambda: len(crowd.refused) == 4)
        assert queue_of(backend).length("name") == 3
        eventually(lambda: backend.count_waiters(["name"]) == [1])
        assert {type(error) for error in crowd.refused} == {LockNotAcquired}
        assert {(error.reason, error.name, error.using) for error in crowd.refused} == {("crowded", "name", "default")}
        backend.release(held)
        crowd.ends()
        assert len(crowd.got_in) == 3
        assert len(crowd.refused) == 4

    def test_they_that_come_to_a_free_lock_wait_for_each_other(self, backend, way):
        crowd = Crowd(2, way, max_waiters=1)
        eventually(lambda: crowd.got_in and queue_of(backend).length("name") == 1)
        crowd.ends()
        assert len(crowd.got_in) == 2
        assert not crowd.refused

    def test_who_waits_is_not_turned_away_by_who_comes_later(self, backend, held, way):
        """Each is granted the lock in its turn, also those who had no place in the store until then."""
        patient = Crowd(4, way, max_waiters=4)
        eventually(lambda: queue_of(backend).length("name") == 4 and backend.count_waiters(["name"]) == [1])
        others = [lock_request() for _ in range(3)]
        for other in others:
            backend.acquire(other, queue=True)
        backend.release(held)
        patient._may_leave.set()
        eventually(lambda: patient.got_in)
        for other in others:
            eventually(lambda other=other: isinstance(backend.acquire(other, queue=True), Grant))
            backend.release(other)
        patient.ends()
        assert len(patient.got_in) == 4
        assert not patient.refused


def test_the_first_of_a_process_is_refused_where_other_processes_wait(backend, held):
    others = [lock_request() for _ in range(2)]
    for other in others:
        backend.acquire(other, queue=True)
    with pytest.raises(LockNotAcquired, match=r"crowded.*max_waiters.*held by the holder") as caught:
        lock("name", max_waiters=2).__enter__()
    error = caught.value
    assert (type(error), error.reason, error.holder.label) == (LockNotAcquired, "crowded", "the holder")
    assert 30 < error.retry_after <= 60
    assert lock("name", max_waiters=1).acquire() is False
    assert backend.count_waiters(["name"]) == [2]
    assert queue_of(backend).length("name") == 0
    crowd = Crowd(5, "threads", max_waiters=2)
    eventually(lambda: len(crowd.refused) == 5)
    assert backend.count_waiters(["name"]) == [2]
    eventually(lambda: not locks.service("default").renewer.is_cleaning)


def test_who_does_not_wait_is_not_concerned(backend, held):
    crowd = Crowd(1, "threads", max_waiters=1)
    eventually(lambda: backend.count_waiters(["name"]) == [1])
    with pytest.raises(LockNotAcquired) as caught:
        lock("name", wait=0, max_waiters=1).__enter__()
    assert caught.value.reason == "busy"
    assert lock("name", max_waiters=1).acquire(blocking=False) is False
    backend.release(held)
    crowd.ends()
    with lock("name", wait=0, max_waiters=1):
        pass


def test_a_timeout_has_the_reason_of_a_busy_lock(backend, held):
    with pytest.raises(LockTimeout) as caught:
        lock("name", wait=0.1, max_waiters=1).__enter__()
    assert caught.value.reason == "busy"


def test_its_holder_may_enter_it_again_beside_a_crowd(backend):
    with lock("name", reentrant=True):
        crowd = Crowd(1, "threads", max_waiters=1)
        eventually(lambda: queue_of(backend).length("name") == 1)
        with lock("name", reentrant=True, max_waiters=1):
            pass
    crowd.ends()


@pytest.mark.parametrize("way", ["thread", "task"])
def test_the_signal_says_why(locmem_locks, way):
    reasons = []

    def note(sender, reason, holder, **about):
        reasons.append((reason, holder and holder.label))

    async def refused():
        assert not await lock("name", max_waiters=1).aacquire()
        assert not await lock("name", wait=0).aacquire()

    holder, other = lock_request(ttl=60, label="the holder"), lock_request()
    locmem_locks.acquire(holder, queue=False)
    locmem_locks.acquire(other, queue=True)
    lock_busy.connect(note)
    try:
        if way == "thread":
            assert not lock("name", max_waiters=1).acquire()
            assert not lock("name", wait=0).acquire()
        else:
            asyncio.run(refused())
    finally:
        lock_busy.disconnect(note)
    assert reasons == [("crowded", "the holder"), ("busy", "the holder")]


class TestDeadPlaces:
    """They do not count for long."""

    def test_of_killed_processes(self, valkey_locks, program):
        with lock("name"):
            waiters = [program("say('on'); lock('name', wait=60).acquire()") for _ in range(3)]
            for waiter in waiters:
                assert heard(waiter) == "on"
            eventually(lambda: valkey_locks.count_waiters(["name"]) == [3])
            for waiter in waiters[:2]:
                waiter.kill()
                waiter.wait()
            living = [lock_request(max_waiters=3) for _ in range(2)]
            for one in living:
                eventually(lambda one=one: type(valkey_locks.acquire(one, queue=True)).__name__ == "LockInfo")
            assert valkey_locks.count_waiters(["name"]) == [3]
            refused = lock_request(max_waiters=3)
            answers = {type(valkey_locks.acquire(refused, queue=True)).__name__ for _ in range(20)}
            assert answers == {"Crowded"}

    def test_of_the_first_one_the_next_learns_when_the_lease_ends(self, valkey_locks, program):
        holder = lock_request(ttl=60)
        valkey_locks.acquire(holder, queue=False)
        waiter = program("say('on'); lock('name', wait=60).acquire()")
        assert heard(waiter) == "on"
        eventually(lambda: valkey_locks.count_waiters(["name"]) == [1])
        waiter.kill()
        waiter.wait()
        crowd = Crowd(1, "threads", max_waiters=1)
        assert not crowd.refused
        valkey_locks.release(holder)
        crowd.ends()
        assert len(crowd.got_in) == 1

    def test_of_those_who_do_not_look(self, sqlite_locks, monkeypatch):
        monkeypatch.setattr(sqlite_locks.timing, "waiter_expires_after", 0.3)
        sqlite_locks.acquire(lock_request(ttl=60), queue=False)
        sqlite_locks.acquire(lock_request(), queue=True)
        mine = lock_request(max_waiters=1)
        assert type(sqlite_locks.acquire(mine, queue=True)).__name__ == "Crowded"
        eventually(lambda: type(sqlite_locks.acquire(mine, queue=True)).__name__ == "LockInfo")
        assert sqlite_locks.count_waiters(["name"]) == [1]


class TestTheLineOfAProcess:
    """While its leader asks for the first time, nobody knows whether that will wait."""

    @pytest.fixture
    def queue(self, locmem_locks):
        return LocalQueue(locmem_locks.timing, lambda request: None)

    def joined(self, queue, number, most=2):
        line = [lock_request(max_waiters=most) for _ in range(number)]
        for request in line:
            queue.join(request, 0.0)
            request.last_active_at = float("inf")
        return line

    def test_the_leader_that_asks_counts_only_when_it_waits(self, queue):
        leader, *others = self.joined(queue, 4)
        assert [queue.admit(one) for one in others] == [True, True, False]
        assert queue.line("name") == [leader, *others[:2]]
        others.pop()
        queue.begin_to_wait(leader)
        assert [one.event.wait(0) for one in others] == [True, True]
        assert [queue.admit(one) for one in others] == [True, False]

    @pytest.mark.parametrize("end", ["leave", "give_up"])
    def test_who_came_meanwhile_is_counted_anew_when_it_ends(self, queue, end):
        leader, first, second = self.joined(queue, 3)
        assert queue.admit(first)
        assert queue.admit(second)
        getattr(queue, end)(leader)
        assert first.event.wait(0)
        assert second.event.wait(0)
        assert not first.waits
        assert queue.admit(first)  # it asks the store
        assert not first.waits
        assert queue.admit(second)

    def test_who_is_behind_one_that_waits_is_not_counted_anew(self, queue):
        leader, first = self.joined(queue, 2)
        queue.begin_to_wait(leader)
        assert queue.admit(first)
        queue.leave(leader)
        assert first.waits


class TestTheOption:
    @pytest.mark.parametrize("value", [0, -1, 2.0, "3", True])
    def test_it_is_a_whole_number_from_1_on(self, value):
        with pytest.raises(ValueError, match=r"max_waiters is .*from 1 on, or None .*wait=0"):
            lock("name", max_waiters=value)

    def test_of_an_alias(self, settings):
        with override_locks(MAX_WAITERS=1):
            backend = locks["default"]
            backend.acquire(lock_request(ttl=60), queue=False)
            backend.acquire(other := lock_request(), queue=True)
            with pytest.raises(LockNotAcquired) as caught:
                lock("name").__enter__()
            assert caught.value.reason == "crowded"
            with pytest.raises(LockTimeout):
                lock("name", max_waiters=None, wait=0.01).__enter__()
            with pytest.raises(LockTimeout):
                lock("name", max_waiters=2, wait=0.01).__enter__()
            assert backend.terms.max_waiters == 1
            assert unbounded().terms(backend.terms).max_waiters is None  # of leader()
            del other

    def test_of_the_decorator(self, locmem_locks):
        @distributed_lock("name", wait=PATIENCE, max_waiters=1)
        def work():
            raise AssertionError

        locmem_locks.acquire(lock_request(ttl=60), queue=False)
        locmem_locks.acquire(other := lock_request(), queue=True)
        with pytest.raises(LockNotAcquired) as caught:
            work()
        assert caught.value.reason == "crowded"
        del other

    def test_of_one_of_several_locks(self, locmem_locks):
        locmem_locks.acquire(lock_request(ttl=60), queue=False)
        locmem_locks.acquire(other := lock_request(), queue=True)
        with pytest.raises(LockNotAcquired) as caught:
            lock_all(lock("free"), lock("name", max_waiters=1)).__enter__()
        assert (caught.value.name, caught.value.reason) == ("name", "crowded")
        assert not lock("free").locked()
        del other

    def test_a_quorum_counts_nobody(self, redlock_locks):
        with pytest.raises(InvalidLockBackend, match=r"max_waiters=3, and a RedlockBackend counts no waiters"):
            lock("name", max_waiters=3).__enter__()
        with pytest.raises(InvalidLockBackend, match=r"\['MAX_WAITERS'\]: RedlockBackend counts no waiters"):
            type(redlock_locks)("default", {**redlock_locks.settings, "MAX_WAITERS": 3})
