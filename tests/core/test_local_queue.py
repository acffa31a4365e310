"""The waiters of one process: they get the lock as they came, and outlast a store that fails."""

from __future__ import annotations

import asyncio
import threading
import time
from math import inf

import pytest

from django_distlock import LockLost, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.core.local_queue import LocalQueue
from django_distlock.types import Grant
from django_distlock.utils.clock import clock
from tests.support.inside import lines_of
from tests.support.interrupts import at_each_point
from tests.support.leases import request_of
from tests.support.tools import PATIENCE, aeventually, backend_on, eventually, lock_request, queue_of

LONG = 60  # seconds that no sound test waits

backend = backend_on("redis", "cluster", "redlock", "locmem", "postgres", "mariadb", "sqlite")


async def get_in(number, order):
    async with lock("name", wait=LONG):
        order.append(number)


@pytest.mark.parametrize("held", [False, True], ids=["free", "busy"])
def test_tasks_that_come_at_one_moment_get_in_as_they_came(backend, held):
    """Also the first one, which nobody stands before, and whose attempt is still on its way when the others come."""

    async def main():
        holder = lock_request(ttl=LONG)
        if held:
            assert isinstance(await backend.aacquire(holder, queue=False), Grant)
        tasks = [asyncio.create_task(get_in(number, order)) for number in range(8)]
        if held:
            await aeventually(lambda: queue_of(backend).length("name") == 8)
            await backend.arelease(holder)
        await asyncio.gather(*tasks)

    order = []
    asyncio.run(main())
    assert order == list(range(8))


def test_threads_get_in_as_they_came_though_the_first_is_not_answered_yet(proxy, valkey_locks, settings):
    def take(number):
        with lock("name", wait=LONG):
            order.append(number)

    settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "LOCATION": proxy.url}}
    with lock("warm"):  # scripts are loaded
        pass
    order, threads = [], []
    proxy.hang = True
    try:
        for number in range(8):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            eventually(lambda number=number: locks.service("default").queue.length("name") == number + 1)
    finally:
        proxy.hang = False
    for thread in threads:
        thread.join(LONG)
    assert order == list(range(8))


def test_a_wait_ends_beside_one_that_hands_its_place_on():
    """The heir's backend may start a thread, in which the garbage collector ends other waits before it goes on."""

    def succeed(request):
        ends = threading.Thread(target=queue.give_up, args=(other,), daemon=True)
        ends.start()
        ends.join(PATIENCE)
        ended.append(not ends.is_alive())

    ended, queue = [], LocalQueue(Timing(), succeed)
    leader, heir, other = lock_request("name"), lock_request("name"), lock_request("other")
    for request in (leader, heir, other):
        queue.join(request, clock())
    leader.inbox, heir.asking = "inbox", False
    queue.give_up(leader)
    assert heir.token == leader.token
    assert ended == [True]


def test_the_heir_is_told_last_where_one_before_it_leaves_as_it_is_told():
    def succeed(request):
        if request is brief and not told:
            told.append(None)
            queue.give_up(brief)
        told.append(request)

    told, queue = [], LocalQueue(Timing(), succeed)
    leader, brief, heir = (lock_request("name") for _ in range(3))
    for request in (leader, brief, heir):
        queue.join(request, clock())
    leader.inbox, brief.asking, heir.asking = "inbox", False, False
    queue.give_up(leader)
    assert heir.token == leader.token
    assert told == [None, heir, brief, heir]


@pytest.mark.parametrize("slots", [(3, 1, 3), (1, 3, 1)])
def test_a_place_goes_to_nobody_behind_one_that_wants_another_number(slots):
    told = []
    queue = LocalQueue(Timing(), told.append)
    leader, following, same = requests = [lock_request(slots=number) for number in slots]
    for request in requests:
        queue.join(request, clock())
    leader.inbox, following.asking, same.asking = "inbox", False, False
    assert not queue.has_successor(leader)
    queue.give_up(leader)
    assert [one for one in requests if one.is_inherited or one.token == leader.token] == [leader]
    assert queue.take_turn(following, clock())
    following.inbox = "inbox"
    queue.give_up(following)
    assert (following.is_inherited, same.inbox, told) == (False, "", [])


def test_a_place_goes_to_the_next_one_that_wants_the_same_number():
    told = []
    queue = LocalQueue(Timing(), told.append)
    leader, following, other = requests = [lock_request(slots=number) for number in (3, 3, 1)]
    for request in requests:
        queue.join(request, clock())
    leader.inbox, following.asking, other.asking = "inbox", False, False
    assert queue.has_successor(leader)
    queue.give_up(leader)
    assert following.token == leader.token
    assert told == [following]


def test_waiters_look_less_often_each_where_they_are_many():
    timing = Timing()
    timing.look_interval_longest = 8.0
    queue, requests = LocalQueue(timing, succeed=str), [lock_request(f"name {number}") for number in range(5000)]
    alone = [queue.schedule_look(requests[0], inf) for _ in range(10)]
    assert max(alone) <= timing.look_interval < min(alone) + 0.11
    assert len({*alone}) > 1
    for request in requests:
        queue.join(request, clock())
    crowded = queue.schedule_look(requests[0], inf)
    assert 3 < crowded <= 5000 / timing.looks_per_second
    assert requests[0].last_active_at > clock() + 2  # nobody passes it over meanwhile


def test_a_leader_that_was_to_look_sooner_than_a_crowd_does_and_is_stuck_is_passed_over():
    """It looks when the lease in its way ends, and its event loop is stuck by then."""
    timing = Timing()
    timing.look_interval_longest, timing.looks_per_second = 8.0, 0.1
    queue, stuck, other = LocalQueue(timing, succeed=str), lock_request("name"), lock_request("name")
    assert queue.join(stuck, clock())
    assert not queue.join(other, clock())
    assert queue.schedule_look(stuck, 0.1) == 0.1
    timing.unresponsive_after = 0.2
    time.sleep(0.3)
    assert queue.take_turn(other, clock())


class TestTheEndOfALease:
    """Who waits in the same process is woken by it, and does not find out at its next look."""

    @pytest.fixture
    def held(self, locmem_locks):
        """A lease that one waits for who does not respond, and one who does."""
        queue, waiters = queue_of(locmem_locks), [lock_request(), lock_request()]
        with lock("name", on_lost="log") as lease:
            for waiter in waiters:
                queue.join(waiter, clock())
            waiters[0].last_active_at = clock() - LONG
            yield lease, *waiters
            for waiter in waiters:
                queue.leave(waiter)

    @staticmethod
    def was_woken(request):
        return request.event.wait(0)

    def test_by_a_release_wakes_the_first_who_responds(self, held):
        lease, stuck, waiter = held
        lease.release()
        assert self.was_woken(waiter)
        assert not self.was_woken(stuck)

    def test_by_its_loss_wakes_the_first_who_responds(self, held, locmem_locks):
        lease, stuck, waiter = held
        assert locmem_locks.release(request_of(lease), force=True)
        with pytest.raises(LockLost):
            lease.renew()
        assert self.was_woken(waiter)
        assert not self.was_woken(stuck)


def test_those_with_a_place_are_listed_while_others_come():
    """A lock's first waiter puts in its line without waiting for anybody."""

    class Line(list):
        def __iter__(self):
            queue.join(lock_request(f"of {id(self)}"), clock())
            return super().__iter__()

    queue = LocalQueue(Timing(), lambda request: None)
    waiting = [lock_request("name"), lock_request("other")]
    for request in waiting:
        queue.join(request, clock())
        request.inbox = "inbox"
        lines_of(queue)[request.key] = Line([request])
    assert queue.queued() == waiting


@pytest.mark.parametrize("leaves", [LocalQueue.leave, LocalQueue.give_up])
def test_a_finalizer_may_end_the_only_other_waiter_at_each_point(locmem_locks, leaves):
    def run(name):
        first, other = lock_request(name, LONG), lock_request(name, LONG)
        others[:] = [other]
        for request in (first, other):
            queue.join(request, clock())
        leaves(queue, first)

    def end_other():
        queue.give_up(others[0], again=True)

    others, queue = [], LocalQueue(locmem_locks.timing, lambda _: None)
    for name, where in at_each_point(run, "core/local_queue.py", meanwhile=end_other):
        assert [one for one in queue.line(name) if one not in others] == [], where
        if others[0] in queue.line(name):  # its end came before it stood there
            queue.give_up(others[0])
        assert queue.length(name) == 0, where
