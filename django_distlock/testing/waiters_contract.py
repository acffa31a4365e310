"""The promises of a backend with ``supports_max_waiters``, as tests. Inherit them beside ``LockBackendContract``."""

from __future__ import annotations

from typing import Any

import pytest

from ..backends.base import BaseLockBackend
from ..types import Crowded, Grant, LockInfo, LockRequest
from .tools import lock_request


class MaxWaitersContract:
    """A request with ``max_waiters`` gets no place if so many others already have one."""

    @pytest.fixture(autouse=True)
    def max_waiters_are_supported(self, backend: BaseLockBackend) -> None:
        assert backend.supports_max_waiters

    @pytest.fixture
    def holder(self, locks: Any) -> LockRequest:
        holder = lock_request(ttl=60, label="the holder")
        locks.acquire(holder, queue=False)
        return holder

    def test_one_more_than_may_wait_is_told_so_and_leaves_nothing(self, locks: Any, holder: LockRequest) -> None:
        waiters = [lock_request(max_waiters=2) for _ in range(2)]
        assert [type(locks.acquire(waiter, queue=True)) for waiter in waiters] == [LockInfo, LockInfo]
        refused = lock_request(max_waiters=2)
        answer = locks.acquire(refused, queue=True)
        assert type(answer) is Crowded
        assert (answer.name, answer.token, answer.holder) == ("name", holder.token, holder.holder)
        assert 30 < answer.remaining <= 60
        assert (refused.place, refused.inbox, refused.in_doubt) == ("", "", False)
        assert locks.count_waiters(["name"]) == [2]
        for one in (holder, *waiters):
            assert isinstance(locks.acquire(one, queue=True), Grant)
            assert locks.release(one) is True
        assert locks.look(["name"]) == [[]]

    def test_there_is_room_again_when_one_leaves(self, locks: Any, holder: LockRequest) -> None:
        waiters = [lock_request(max_waiters=2) for _ in range(2)]
        for waiter in waiters:
            locks.acquire(waiter, queue=True)
        late = lock_request(max_waiters=2)
        assert type(locks.acquire(late, queue=True)) is Crowded
        locks.release(waiters[0])
        assert type(locks.acquire(late, queue=True)) is LockInfo
        locks.release(holder)
        assert isinstance(locks.acquire(waiters[1], queue=True), Grant)
        assert type(locks.acquire(late, queue=True)) is LockInfo

    def test_each_goes_by_its_own_number(self, locks: Any, holder: LockRequest) -> None:
        requests = [lock_request(max_waiters=number) for number in (1, 1, 2, 2, 0, 3, 4)]
        answers = [type(locks.acquire(request, queue=True)) for request in requests]
        assert answers == [LockInfo, Crowded, LockInfo, Crowded, LockInfo, Crowded, LockInfo]

    def test_who_waits_already_goes_on(self, locks: Any, holder: LockRequest) -> None:
        mine = lock_request(max_waiters=1)
        locks.acquire(mine, queue=True)
        others = [lock_request() for _ in range(2)]
        for other in others:
            locks.acquire(other, queue=True)
        assert type(locks.acquire(mine, queue=True)) is LockInfo
        mine.in_doubt = True  # its attempt got no answer
        mine.place = ""
        assert type(locks.acquire(mine, queue=True)) is LockInfo
        in_its_process = lock_request(max_waiters=1)
        in_its_process.waits = True  # it waited behind others until now
        assert type(locks.acquire(in_its_process, queue=True)) is LockInfo
        locks.release(holder)
        assert isinstance(locks.acquire(mine, queue=True), Grant)

    def test_who_would_not_wait_is_not_concerned(self, locks: Any, holder: LockRequest) -> None:
        waiter, passing = lock_request(max_waiters=1), lock_request(max_waiters=1)
        locks.acquire(waiter, queue=True)
        assert type(locks.acquire(passing, queue=False)) is LockInfo
        for one in (holder, waiter):
            locks.release(one)
        assert isinstance(locks.acquire(lock_request(max_waiters=1), queue=True), Grant)

    def test_waiters_for_several_slots_are_counted_together(self, backend: BaseLockBackend, locks: Any) -> None:
        if not backend.supports_slots:
            pytest.skip("this backend lets one at a time hold a lock and says so: supports_slots is False")
        for _ in range(2):
            locks.acquire(lock_request(slots=2), queue=False)
        numbers = [(2, 0), (1, 0), (2, 2), (2, 3)]
        requests = [lock_request(slots=slots, max_waiters=most) for slots, most in numbers]
        answers = [type(locks.acquire(request, queue=True)) for request in requests]
        assert answers == [LockInfo, LockInfo, Crowded, LockInfo]
