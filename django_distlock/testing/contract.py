"""The promises of every backend, as tests. The test class of a backend inherits them:

    class TestMyBackend(LockBackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend("default", {"BACKEND": "shop.locks.MyBackend"})

The fixture gives a new, empty store to each test. In the tests, ``locks`` is the backend: once with its methods, and
once with their ``a`` twins.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ..backends.base import BaseLockBackend
from ..exceptions import LockBackendError
from ..types import Grant, LockInfo, LockRequest, Slot
from ..utils.clock import clock
from .tools import PATIENCE, WAYS, calling, eventually, in_threads, lock_request, locked_names


class LockBackendContract:
    """Inherit it and provide the fixture ``backend``."""

    @pytest.fixture
    def backend(self) -> BaseLockBackend:
        raise NotImplementedError("Give the test class a fixture 'backend' that returns an empty backend of its kind.")

    @pytest.fixture(autouse=True)
    def no_waiter_is_taken_for_dead(self, backend: BaseLockBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long a busy machine takes from one step of a test to the next."""
        for name in ("grant_ttl", "waiter_expires_after"):
            monkeypatch.setattr(backend.timing, name, 2 * PATIENCE)

    @pytest.fixture(params=WAYS)
    def locks(self, backend: BaseLockBackend, request: pytest.FixtureRequest) -> Iterator[Any]:
        with calling(request.param) as wrap:
            yield wrap(backend)

    def test_a_free_lock_is_granted(self, locks: Any) -> None:
        assert isinstance(locks.acquire(lock_request(), queue=False), Grant)

    def test_a_busy_lock_tells_who_has_it_and_for_how_long(self, locks: Any, backend: BaseLockBackend) -> None:
        began = clock()
        granted = locks.acquire(lock_request(ttl=20, label="the holder"), queue=False)
        busy = locks.acquire(lock_request(), queue=False)
        assert isinstance(busy, LockInfo)
        assert busy.holder is not None
        assert busy.holder.label == "the holder"
        assert (busy.name, busy.using, busy.fence) == ("name", backend.alias, granted.fence)
        assert 19 - (clock() - began) < busy.remaining <= 20
        assert not busy.resting

    def test_other_names_are_other_locks(self, locks: Any) -> None:
        locks.acquire(lock_request("a"), queue=False)
        assert isinstance(locks.acquire(lock_request("b"), queue=False), Grant)

    def test_an_attempt_repeated_with_its_token_is_granted_again_with_its_number(self, locks: Any) -> None:
        mine = lock_request()
        first = locks.acquire(mine, queue=False)
        assert locks.acquire(mine, queue=False).fence == first.fence

    def test_a_repeated_attempt_shows_the_holder_that_it_carries_now(self, locks: Any) -> None:
        mine = lock_request(label="before")
        locks.acquire(mine, queue=False)
        mine.holder = lock_request(label="now").holder
        assert isinstance(locks.acquire(mine, queue=False), Grant)
        assert locks.look(["name"])[0][0].holder.label == "now"

    def test_a_grant_tells_a_moment_before_the_store_was_asked(self, locks: Any) -> None:
        """The holder counts its deadline from it. With another clock, or a later moment, two would hold the lock."""
        before = clock()
        granted = locks.acquire(lock_request(), queue=False)
        assert before <= granted.sent_at <= clock()

    def test_several_are_granted_in_one_step_or_none_is(self, locks: Any) -> None:
        several = [lock_request("a"), lock_request("b")]
        granted = locks.acquire_all(several)
        if granted is None:  # the store has no such step
            assert locked_names(locks) == []
            return
        assert [lease.token for [lease] in locks.look(["a", "b"])] == [request.token for request in several]
        assert [grant.fence for grant in locks.acquire_all(several)] == [grant.fence for grant in granted]
        assert locks.acquire_all([lock_request("c"), lock_request("b")]) is None
        assert locked_names(locks) == ["a", "b"]
        for request in several:
            assert locks.release(request) is True
        assert locked_names(locks) == []

    def test_several_in_one_step_pass_nobody_who_waits(self, locks: Any) -> None:
        holder, waiter = lock_request("b"), lock_request("b")
        locks.acquire(holder, queue=False)
        locks.acquire(waiter, queue=True)
        locks.release(holder)
        assert locks.acquire_all([lock_request("a"), lock_request("b")]) is None
        assert isinstance(locks.acquire(waiter, queue=True), Grant)
        assert locked_names(locks) == ["b"]

    def test_several_in_one_step_are_one_more_of_each_lock(self, locks: Any) -> None:
        """Each grant has its own number, TTL and holder. A resting lock is busy."""
        resting = lock_request("a", ttl=60)
        locks.acquire(resting, queue=False)
        locks.release(resting, 50)
        several = [lock_request("a", ttl=40), lock_request("b", ttl=20, label="second")]
        assert locks.acquire_all(several) is None
        locks.release(resting, force=True)
        if (granted := locks.acquire_all(several)) is None:
            return
        [[first], [second]] = locks.look(["a", "b"])
        assert [first.fence, second.fence] == [grant.fence for grant in granted]
        assert (second.holder.label, second.slot) == ("second", 1)
        assert 30 < first.remaining <= 40
        assert 10 < second.remaining <= 20
        several[1].ttl = 5
        locks.acquire_all(several)
        assert locks.look(["b"])[0][0].remaining > 10  # a late command shortens no lease
        assert locks.renew([(several[1], 60.0)]) == [True]
        locks.release(several[0])
        [grant] = locks.acquire_all([lock_request("a")])
        assert grant.fence > max(first.fence, 0)

    def test_a_released_lock_is_free(self, locks: Any) -> None:
        mine = lock_request()
        locks.acquire(mine, queue=False)
        assert locks.release(mine) is True
        assert isinstance(locks.acquire(lock_request(), queue=False), Grant)

    def test_only_the_owner_releases(self, locks: Any) -> None:
        mine = lock_request()
        locks.acquire(mine, queue=False)
        assert locks.release(lock_request()) is False
        assert locks.look(["name"])[0][0].token == mine.token

    def test_a_late_release_does_not_free_the_successor(self, locks: Any) -> None:
        late, successor = lock_request(), lock_request()
        locks.acquire(late, queue=False)
        locks.release(late)
        locks.acquire(successor, queue=False)
        assert locks.release(late) is False
        assert locks.look(["name"])[0][0].token == successor.token

    def test_a_renewal_and_a_repeated_request_do_not_shorten_a_lease(self, locks: Any) -> None:
        mine = lock_request(ttl=20.0)
        locks.acquire(mine, queue=False)
        assert locks.renew([(mine, 0.1)]) == [True]
        assert locks.acquire(mine, queue=False)
        time.sleep(0.2)
        assert 10 < locks.look(["name"])[0][0].remaining <= 20

    def test_a_repeated_request_does_not_shorten_what_renewal_made_longer(self, locks: Any) -> None:
        mine = lock_request(ttl=20)
        locks.acquire(mine, queue=False)
        assert locks.renew([(mine, 60.0)]) == [True]
        assert isinstance(locks.acquire(mine, queue=False), Grant)
        assert 30 < locks.look(["name"])[0][0].remaining <= 60

    def test_a_waiter_that_was_handed_the_lock_has_it_for_its_own_ttl(self, locks: Any) -> None:
        holder, waiter = lock_request(ttl=0.1), lock_request(ttl=20.0)
        locks.acquire(holder, queue=False)
        locks.acquire(waiter, queue=True)
        locks.release(holder)
        assert isinstance(locks.acquire(waiter, queue=True), Grant)
        assert 10 < locks.look(["name"])[0][0].remaining <= 20

    def test_only_the_owner_renews(self, locks: Any) -> None:
        locks.acquire(lock_request(ttl=20), queue=False)
        assert locks.renew([(lock_request(), 60.0)]) == [False]
        assert locks.look(["name"])[0][0].remaining <= 20

    def test_renewal_extends_each_lease_and_tells_which_are_gone(self, locks: Any) -> None:
        first, second, gone = (lock_request(name, 20) for name in ("first", "second", "gone"))
        locks.acquire(first, queue=False)
        locks.acquire(second, queue=False)
        began = clock()
        assert locks.renew([(first, 40.0), (gone, 40.0), (second, 60.0)]) == [True, False, True]
        for name, ttl in (("first", 40.0), ("second", 60.0)):
            remaining = locks.look([name])[0][0].remaining
            assert ttl - 1 - (clock() - began) < remaining <= ttl
        assert locks.look(["gone"]) == [[]]

    def test_renewal_never_shortens(self, locks: Any) -> None:
        mine = lock_request(ttl=60)
        locks.acquire(mine, queue=False)
        assert locks.renew([(mine, 1.0)]) == [True]
        assert locks.look(["name"])[0][0].remaining > 50

    def test_a_lease_ends_with_its_ttl(self, locks: Any) -> None:
        mine, other = lock_request(ttl=0.1), lock_request(ttl=0.1)
        began = clock()
        locks.acquire(mine, queue=False)
        assert isinstance(locks.acquire(other, queue=False), LockInfo) or clock() - began > 0.1
        eventually(lambda: locks.look(["name"]) == [[]])
        assert locks.renew([(mine, 10.0)]) == [False]
        assert locks.release(mine) is False
        assert isinstance(locks.acquire(lock_request(), queue=False), Grant)

    def test_fencing_numbers_grow_over_release_and_expiry(self, locks: Any) -> None:
        numbers = []
        for _ in range(3):
            mine = lock_request()
            numbers.append(locks.acquire(mine, queue=False).fence)
            locks.release(mine)
        numbers.append(locks.acquire(lock_request(ttl=0.05), queue=False).fence)
        eventually(lambda: locks.look(["name"]) == [[]])
        numbers.append(locks.acquire(lock_request(), queue=False).fence)
        assert numbers == sorted(set(numbers))

    def test_renewal_may_be_told_how_long_an_answer_is_of_use(self, locks: Any) -> None:
        mine = lock_request(ttl=20)
        locks.acquire(mine, queue=False)
        assert locks.renew([(mine, 60.0), (lock_request("gone"), 60.0)], timeout=PATIENCE) == [True, False]
        assert locks.look(["name"])[0][0].remaining > 30

    def test_renewal_keeps_the_number(self, locks: Any) -> None:
        mine = lock_request()
        granted = locks.acquire(mine, queue=False)
        locks.renew([(mine, 60.0)])
        assert locks.look(["name"])[0][0].fence == granted.fence

    def test_a_resting_lock_stays_taken_and_is_nobodys_any_more(self, locks: Any) -> None:
        mine = lock_request(ttl=60)
        locks.acquire(mine, queue=False)
        assert locks.release(mine, 50) is True
        busy = locks.acquire(lock_request(), queue=False)
        assert isinstance(busy, LockInfo)
        assert busy.resting
        assert 30 < busy.remaining <= 50
        assert locks.renew([(mine, 60.0)]) == [False]

    def test_a_rest_ends(self, locks: Any) -> None:
        mine = lock_request(ttl=60)
        locks.acquire(mine, queue=False)
        assert locks.release(mine, 0.3) is True
        eventually(lambda: locks.look(["name"]) == [[]])

    def test_a_second_release_keeps_the_cooldown(self, locks: Any) -> None:
        mine = lock_request(ttl=60)
        locks.acquire(mine, queue=False)
        locks.release(mine, 50)
        locks.release(mine)
        assert locks.look(["name"])[0][0].resting
        assert 30 < locks.look(["name"])[0][0].remaining <= 50

    def test_a_resting_lock_is_not_granted_to_its_old_token(self, locks: Any) -> None:
        mine = lock_request(ttl=60)
        locks.acquire(mine, queue=False)
        locks.release(mine, 50)
        with suppress(LockBackendError):
            assert isinstance(locks.acquire(mine, queue=False), LockInfo)
        assert locks.look(["name"])[0][0].resting

    def test_force_frees_a_resting_lock_for_its_token_alone(self, locks: Any) -> None:
        mine = lock_request(ttl=60)
        locks.acquire(mine, queue=False)
        locks.release(mine, 50)
        locks.release(lock_request(), force=True)
        assert locks.look(["name"])[0][0].resting
        assert locks.release(mine, force=True) is True
        assert locks.look(["name"]) == [[]]
        locks.acquire(mine := lock_request(), queue=False)
        assert locks.release(mine, force=True) is True
        assert locks.look(["name"]) == [[]]

    def test_who_waits_is_counted(self, locks: Any) -> None:
        locks.acquire(lock_request("busy"), queue=False)
        waiters = [lock_request("busy"), lock_request("busy")]
        for waiter in waiters:
            locks.acquire(waiter, queue=True)
        assert locks.count_waiters(["busy", "free"]) in ([2, 0], [None, None])
        assert locks.count_waiters([]) == []
        for waiter in waiters:
            locks.release(waiter)
        assert locks.count_waiters(["busy"]) in ([0], [None])

    def test_a_check_finds_no_error_and_leaves_nothing(self, locks: Any) -> None:
        found = locks.check()
        assert [result for result in found if result.is_error] == []
        assert {"reachable", "latency"} <= {result.about for result in found}
        assert locked_names(locks) == []

    def test_any_text_is_a_name(self, locks: Any) -> None:
        names = ["a b", "ä/ß/日本", "x:y|z", "{curly}", "new\nline", "nul\0", "a*b?[c]\\d", "q", "f", "'quote\""]
        for name in names:
            assert isinstance(locks.acquire(lock_request(name), queue=False), Grant)
        assert locked_names(locks) == sorted(names)
        assert [[info.name for info in leases] for leases in locks.look(names)] == [[name] for name in names]

    def test_names_are_listed_by_prefix_literally(self, locks: Any) -> None:
        for name in ("order:1", "order:2", "order*", "invoice:1", "or", "ord[e]r"):
            locks.acquire(lock_request(name), queue=False)
        assert locked_names(locks, "order:") == ["order:1", "order:2"]
        assert locked_names(locks, "order*") == ["order*"]
        assert locked_names(locks, "ord[e]") == ["ord[e]r"]
        assert locked_names(locks, "nothing") == []

    def test_held_lists_every_lock_once_with_its_holder(self, locks: Any) -> None:
        for number in range(25):
            locks.acquire(lock_request(f"n:{number}", label=f"holder {number}"), queue=False)
        infos = locks.held("n:", step=10)
        assert sorted((info.name, info.holder.label) for info in infos) == sorted(
            (f"n:{number}", f"holder {number}") for number in range(25)
        )
        assert all(info.granted_at is not None for info in infos)

    def test_looking_at_free_locks_says_none(self, locks: Any) -> None:
        locks.acquire(lock_request("taken"), queue=False)
        free, taken, other = locks.look(["free", "taken", "other"])
        assert (free, other) == ([], [])
        assert [(info.name, info.slot) for info in taken] == [("taken", 1)]
        assert locks.look([]) == []

    def test_holders_and_the_time_left_can_be_asked_for_alone(self, locks: Any) -> None:
        resting = lock_request("resting", ttl=60, label="the last one")
        locks.acquire(resting, queue=False)
        locks.release(resting, 50)
        locks.acquire(lock_request("taken", ttl=20, label="the holder"), queue=False)
        slots = [Slot("free"), Slot("taken"), Slot("resting"), Slot("other"), Slot("taken", 2)]
        [[held], [rests]] = locks.look(["taken", "resting"])
        assert locks.holders(slots) == [None, held.holder, rests.holder, None, None]
        assert held.holder.label == "the holder"
        free, taken, cooldown, *others = locks.remaining(slots)
        assert (free, *others) == (None, None, None)
        assert 19 < taken <= 20
        assert 49 < cooldown <= 50
        assert locks.holders([]) == locks.remaining([]) == []

    def test_the_token_is_never_shown(self, locks: Any) -> None:
        mine = lock_request()
        locks.acquire(mine, queue=False)
        [[info]] = locks.look(["name"])
        assert info.token == mine.token
        assert mine.token not in repr(info) + repr(mine) + info.digest

    def test_giving_up_a_request_that_was_never_granted_leaves_nothing(self, locks: Any) -> None:
        locks.acquire(lock_request(ttl=60), queue=False)
        waiting = lock_request()
        locks.acquire(waiting, queue=True)
        assert locks.release(waiting) is False
        assert locks.look(["name"])[0][0].token != waiting.token

    def test_an_attempt_whose_task_was_cancelled_leaves_nothing(
        self, backend: BaseLockBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if a thread continues with it after the release."""
        mine, asked, may_go_on = lock_request(), backend.acquire, threading.Event()

        async def cancel_and_release() -> None:
            loop, loop_thread = asyncio.get_running_loop(), threading.current_thread()
            begun, done = asyncio.Event(), asyncio.Event()

            def acquire(request: LockRequest, *, queue: bool) -> Grant | LockInfo:
                loop.call_soon_threadsafe(begun.set)
                if threading.current_thread() is not loop_thread:
                    may_go_on.wait(PATIENCE)
                try:
                    return asked(request, queue=queue)
                finally:
                    loop.call_soon_threadsafe(done.set)

            monkeypatch.setattr(backend, "acquire", acquire)
            attempt, is_begun = asyncio.create_task(backend.aacquire(mine, queue=False)), loop.create_task(begun.wait())
            await asyncio.wait({attempt, is_begun}, return_when=asyncio.FIRST_COMPLETED)
            attempt.cancel()
            with suppress(asyncio.CancelledError):
                await attempt
            await backend.arelease(mine)
            may_go_on.set()
            if begun.is_set():
                await done.wait()
            is_begun.cancel()
            assert await backend.alook(["name"]) == [[]]

        asyncio.run(cancel_and_release())

    def test_a_wait_for_a_turn_ends_by_its_timeout(self, locks: Any) -> None:
        locks.acquire(lock_request(ttl=60), queue=False)
        waiting = lock_request()
        locks.acquire(waiting, queue=True)
        began = time.monotonic()
        locks.wait_for_turn(waiting, 0.05)
        assert time.monotonic() - began < 5

    def test_threads_are_granted_one_at_a_time(self, backend: BaseLockBackend) -> None:
        inside: list[int] = []
        most: list[int] = []
        done: list[int] = []

        def work(number: int) -> None:
            mine = lock_request(ttl=30)
            while not isinstance(backend.acquire(mine, queue=True), Grant):
                backend.wait_for_turn(mine, 1.0)
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.001)
            inside.remove(number)
            backend.release(mine)
            done.append(number)

        in_threads(8, work)
        assert sorted(done) == list(range(8))
        assert set(most) == {1}

    def test_waiters_are_granted_in_the_order_they_came(self, backend: BaseLockBackend, locks: Any) -> None:
        if not backend.supports_queue:
            pytest.skip("this backend has no queue and says so: supports_queue is False")
        holder, waiters = lock_request(ttl=60), [lock_request(ttl=60) for _ in range(4)]
        locks.acquire(holder, queue=False)
        for waiter in waiters:
            locks.acquire(waiter, queue=True)
        locks.release(holder)
        order = []
        while waiters:
            (granted,) = [w for w in waiters if isinstance(locks.acquire(w, queue=True), Grant)]
            order.append(granted)
            waiters.remove(granted)
            locks.release(granted)
        assert order == sorted(order, key=lambda waiter: waiter.holder.since)
