"""The promises of a backend with ``supports_slots``, as tests. Inherit them beside ``LockBackendContract``."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ..backends.base import BaseLockBackend
from ..types import Grant, LockInfo, Slot
from .tools import eventually, lock_request


class SlotsContract:
    """As many callers hold a lock at once as each of them allows in its own request."""

    @pytest.fixture(autouse=True)
    def slots_are_supported(self, backend: BaseLockBackend) -> None:
        assert backend.supports_slots

    def test_as_many_are_granted_a_lock_as_it_has_slots(self, locks: Any) -> None:
        granted = [locks.acquire(lock_request(slots=3), queue=False) for _ in range(3)]
        assert [grant.slot for grant in granted] == [1, 2, 3]
        fences = [grant.fence for grant in granted]
        assert fences == sorted(set(fences))
        assert isinstance(locks.acquire(lock_request(slots=3), queue=False), LockInfo)

    def test_each_lease_is_shown_with_its_slot(self, locks: Any) -> None:
        for number in range(3):
            locks.acquire(lock_request(ttl=60, label=f"holder {number}", slots=3), queue=False)
        locks.acquire(lock_request("other", ttl=60, label="alone"), queue=False)
        [alone], free, leases = locks.look(["other", "free", "name"])
        assert [(info.name, info.slot, info.slots, info.holder.label) for info in leases] == [
            ("name", number + 1, 3, f"holder {number}") for number in range(3)
        ]
        assert len({info.token for info in leases}) == len({info.fence for info in leases}) == 3
        assert (alone.slot, alone.slots, free) == (1, 1, [])
        slots = [Slot("name", 1), Slot("name", 2), Slot("name", 3), Slot("other")]
        assert sorted(locks.list_slots()) == slots
        assert sorted(locks.list_slots("na")) == slots[:3]
        assert sorted((info.name, info.slot) for info in locks.held(step=2)) == slots
        asked = [*slots, Slot("name", 4), Slot("free")]
        assert locks.holders(asked) == [*(info.holder for info in leases), alone.holder, None, None]
        left = locks.remaining(asked)
        assert all(30 < one <= 60 for one in left[:4])
        assert left[4:] == [None, None]

    def test_a_lease_in_another_slot_than_the_first_may_stand_alone(self, locks: Any) -> None:
        first, second = lock_request(slots=2), lock_request(slots=2, label="second")
        locks.acquire(first, queue=False)
        locks.acquire(second, queue=False)
        assert locks.release(first) is True
        assert locks.list_slots() == [Slot("name", 2)]
        assert [(info.slot, info.holder.label) for [info] in locks.look(["name"])] == [(2, "second")]
        assert isinstance(locks.acquire(lock_request(), queue=False), LockInfo)
        assert locks.acquire(lock_request(slots=2), queue=False).slot == 1

    def test_a_release_frees_its_own_slot_alone(self, locks: Any) -> None:
        mine = [lock_request(slots=3) for _ in range(3)]
        for one in mine:
            locks.acquire(one, queue=False)
        assert locks.release(mine[1]) is True
        assert locks.release(mine[1]) is False
        assert [info.token for info in locks.look(["name"])[0]] == [mine[0].token, mine[2].token]
        assert locks.acquire(lock_request(slots=3), queue=False).slot == 2

    def test_whoever_asks_counts_all_leases_by_its_own_number(self, locks: Any) -> None:
        for _ in range(2):
            locks.acquire(lock_request(slots=5), queue=False)
        assert isinstance(locks.acquire(lock_request(slots=1), queue=False), LockInfo)
        assert isinstance(locks.acquire(lock_request(slots=2), queue=False), LockInfo)
        assert isinstance(locks.acquire(lock_request(slots=3), queue=False), Grant)
        assert isinstance(locks.acquire(lock_request(slots=3), queue=False), LockInfo)

    def test_one_alone_counts_for_those_who_allow_more(self, locks: Any) -> None:
        locks.acquire(alone := lock_request(), queue=False)
        assert locks.acquire(lock_request(slots=2), queue=False).slot == 2
        assert isinstance(locks.acquire(lock_request(slots=2), queue=False), LockInfo)
        assert locks.release(alone) is True
        assert isinstance(locks.acquire(lock_request(), queue=False), LockInfo)

    def test_a_repeat_takes_no_second_slot(self, locks: Any) -> None:
        mine = [lock_request(slots=3) for _ in range(2)]
        granted = [locks.acquire(one, queue=False) for one in mine]
        for one, grant in zip(mine, granted, strict=True):
            for queue in (False, True):
                again = locks.acquire(one, queue=queue)
                assert (again.fence, again.slot) == (grant.fence, grant.slot)
        assert len(locks.look(["name"])[0]) == 2

    def test_who_does_not_know_its_slot_gives_it_up(self, locks: Any) -> None:
        """For example, a caller whose request got no answer."""
        mine = [lock_request(slots=3) for _ in range(3)]
        for one in mine:
            locks.acquire(one, queue=False)
        unknown = mine[2].copy(slot=1, slots=1)
        assert locks.release(unknown) is True
        assert [info.slot for info in locks.look(["name"])[0]] == [1, 2]

    def test_each_lease_is_renewed_and_ends_for_itself(self, locks: Any) -> None:
        first, *others = (lock_request(ttl=20, slots=3) for _ in range(3))
        for one in (first, *others):
            locks.acquire(one, queue=False)
        locks.release(first)
        short, gone = lock_request(ttl=0.3, slots=3), lock_request(slots=3)
        assert locks.acquire(short, queue=False).slot == 1
        assert locks.renew([(others[0], 60.0), (gone, 60.0), (others[1], 40.0)]) == [True, False, True]
        eventually(lambda: [info.slot for info in locks.look(["name"])[0]] == [2, 3])
        assert sorted(locks.list_slots()) == [Slot("name", 2), Slot("name", 3)]
        left = locks.remaining([Slot("name", 1), Slot("name", 2), Slot("name", 3)])
        assert left[0] is None
        assert 30 < left[1] <= 60
        assert 20 < left[2] <= 40
        assert locks.renew([(one, 1.0) for one in (short, *others)]) == [False, True, True]
        assert locks.remaining([Slot("name", 2)])[0] > 30
        assert locks.acquire(lock_request(slots=3), queue=False).slot == 1

    def test_a_slot_that_rests_counts(self, locks: Any) -> None:
        mine = [lock_request(slots=2) for _ in range(2)]
        for one in mine:
            locks.acquire(one, queue=False)
        for one in mine:
            assert locks.release(one, 50) is True
        busy = locks.acquire(lock_request(slots=2), queue=False)
        assert isinstance(busy, LockInfo)
        assert busy.resting
        assert [info.resting for info in locks.look(["name"])[0]] == [True, True]
        assert locks.renew([(one, 60.0) for one in mine]) == [False, False]
        assert locks.release(mine[1], force=True) is True
        assert locks.acquire(lock_request(slots=2), queue=False).slot == 2

    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_a_busy_lock_tells_the_lease_that_ends_first(self, locks: Any, slots: int) -> None:
        for ttl in (40, 20, 30):
            locks.acquire(lock_request(ttl=ttl, label=f"for {ttl}", slots=3), queue=False)
        for queue in (False, True):
            busy = locks.acquire(lock_request(slots=slots), queue=queue)
            assert isinstance(busy, LockInfo)
            assert busy.holder is not None
            assert (busy.holder.label, busy.slot) == ("for 20", 2)
            assert 10 < busy.remaining <= 20

    def test_all_slots_that_ended_are_handed_on_in_one_step(self, backend: BaseLockBackend, locks: Any) -> None:
        self.needs_queue(backend)
        for _ in range(3):
            locks.acquire(lock_request(ttl=2, slots=3), queue=False)
        waiters = [lock_request(ttl=60, slots=3) for _ in range(4)]
        for waiter in waiters:
            assert isinstance(locks.acquire(waiter, queue=True), LockInfo)
        eventually(lambda: locks.look(["name"]) == [[]])
        assert isinstance(locks.acquire(waiters[0], queue=True), Grant)
        assert [info.token for info in locks.look(["name"])[0]] == [waiter.token for waiter in waiters[:3]]
        assert isinstance(locks.acquire(waiters[3], queue=True), LockInfo)
        for waiter in waiters[1:3]:
            assert isinstance(locks.acquire(waiter, queue=True), Grant)

    def test_released_slots_go_to_the_waiters_in_their_order(self, backend: BaseLockBackend, locks: Any) -> None:
        self.needs_queue(backend)
        holders, waiters = ([lock_request(ttl=60, slots=3) for _ in range(3)] for _ in range(2))
        for holder in holders:
            locks.acquire(holder, queue=False)
        for waiter in waiters:
            locks.acquire(waiter, queue=True)
        for number in (1, 0, 2):
            locks.release(holders[number])
        shown = {info.slot: info.token for info in locks.look(["name"])[0]}
        assert shown == {2: waiters[0].token, 1: waiters[1].token, 3: waiters[2].token}
        for waiter in waiters:
            assert isinstance(locks.acquire(waiter, queue=True), Grant)

    def test_nobody_passes_a_waiter_for_whom_too_many_are_taken(self, backend: BaseLockBackend, locks: Any) -> None:
        self.needs_queue(backend)
        holders = [lock_request(ttl=60, slots=5) for _ in range(2)]
        for holder in holders:
            locks.acquire(holder, queue=False)
        alone, more = lock_request(ttl=60), lock_request(ttl=60, slots=5)
        locks.acquire(alone, queue=True)
        assert isinstance(locks.acquire(more, queue=True), LockInfo)
        assert isinstance(locks.acquire(lock_request(slots=5), queue=False), LockInfo)
        locks.release(holders[0])
        assert isinstance(locks.acquire(alone, queue=True), LockInfo)
        locks.release(holders[1])
        assert isinstance(locks.acquire(alone, queue=True), Grant)
        assert isinstance(locks.acquire(more, queue=True), Grant)

    def test_who_leaves_was_in_the_way_of_nobody(self, backend: BaseLockBackend, locks: Any) -> None:
        self.needs_queue(backend)
        locks.acquire(lock_request(ttl=60, slots=5), queue=False)
        alone, waiters = lock_request(ttl=60), [lock_request(ttl=60, slots=5) for _ in range(2)]
        for waiter in (alone, *waiters):
            assert isinstance(locks.acquire(waiter, queue=True), LockInfo)
        locks.release(alone)
        assert {waiter.token for waiter in waiters} < {info.token for info in locks.look(["name"])[0]}

    def test_what_is_handed_over_counts(self, backend: BaseLockBackend, locks: Any) -> None:
        self.needs_queue(backend)
        holder, waiter = lock_request(ttl=60, slots=1), lock_request(ttl=60, slots=1)
        locks.acquire(holder, queue=False)
        locks.acquire(waiter, queue=True)
        locks.release(holder)
        assert isinstance(locks.acquire(lock_request(slots=1), queue=False), LockInfo)
        assert isinstance(locks.acquire(waiter, queue=True), Grant)

    def test_threads_are_granted_as_many_at_a_time(self, backend: BaseLockBackend) -> None:
        inside: list[int] = []
        most: list[int] = []
        done: list[int] = []
        meet = threading.Barrier(3)

        def work(number: int) -> None:
            mine = lock_request(ttl=30, slots=3)
            while not isinstance(backend.acquire(mine, queue=True), Grant):
                backend.wait_for_turn(mine, 1.0)
            inside.append(number)
            most.append(len(inside))
            if number < 3:
                meet.wait(30)  # three are inside at once
            time.sleep(0.001)
            inside.remove(number)
            backend.release(mine)
            done.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads[:3]:
            thread.start()
        eventually(lambda: len(done) == 3)
        for thread in threads[3:]:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(done) == list(range(8))
        assert max(most) == 3

    def needs_queue(self, backend: BaseLockBackend) -> None:
        if not backend.supports_queue:
            pytest.skip("this backend has no queue and says so: supports_queue is False")
