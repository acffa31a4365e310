"""``slots``: as many hold a lock at once as its callers allow, over all threads, tasks and processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.http import StreamingHttpResponse
from django.test import RequestFactory

from django_distlock import (
    InvalidLockBackend,
    LockNotAcquired,
    LockReentry,
    LockTimeout,
    State,
    adopt,
    current_lease,
    distributed_lock,
    lock,
    locks,
)
from django_distlock.backends.dummy import DummyBackend
from django_distlock.core.forced import force_release
from django_distlock.signals import lock_lost
from django_distlock.testing import held_elsewhere, override_locks, store_down
from tests.support.leases import wait_for_renewal
from tests.support.tools import (
    PATIENCE,
    backend_on,
    eventually,
    lock_request,
    on_stores,
    queue_of,
    renewer_of,
    take_no_waiter_for_dead,
)

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "postgres", "mariadb", "sqlite")

pytestmark = pytest.mark.usefixtures("backend")


def taken(name="name"):
    """The slots of a lock that are, as the store says."""
    [leases] = locks["default"].look([name])
    return [info.slot for info in leases]


class Holders:
    """Threads that hold a lock until they are told to go."""

    def __init__(self):
        self._granted = []  # the numbers of the leases with the labels
        self._go = {}
        self._threads = []

    def start(self, label, **options):
        """Another one. Returns when it stands in the line of its process, or holds the lock."""
        self._go[label] = go = threading.Event()

        def hold():
            with lock("name", wait=PATIENCE, **options) as lease:
                self._granted.append((lease.fence, label))
                go.wait(PATIENCE)

        before = self._known()
        thread = threading.Thread(target=hold)
        thread.start()
        self._threads.append(thread)
        eventually(lambda: self._known() > before)

    @property
    def order(self):
        """Of those who were granted it."""
        return [label for _, label in sorted(self._granted)]

    def _known(self):
        return len(self._granted) + queue_of(locks["default"]).length("name")

    def have(self, *labels):
        """These were granted it, in this order, and nobody else is for a while."""
        eventually(lambda: len(self.order) >= len(labels))
        time.sleep(0.1)
        assert self.order == list(labels)

    def let_go(self, label):
        self._go[label].set()

    def end(self):
        for go in self._go.values():
            go.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def holders(monkeypatch):
    take_no_waiter_for_dead(monkeypatch)
    holders = Holders()
    yield holders
    holders.end()


class TestHowMany:
    @on_each_store
    def test_as_many_leases_at_once(self):
        with ExitStack() as stack:
            leases = [stack.enter_context(lock("name", slots=3, wait=0)) for _ in range(3)]
            assert [lease.slot for lease in leases] == taken() == [1, 2, 3]
            assert [lease.fence for lease in leases] == sorted({lease.fence for lease in leases})
            with pytest.raises(LockReentry, match="All 3 slots"):
                lock("name", slots=3, wait=0).__enter__()
        assert taken() == []

    def test_one_more_finds_it_busy(self):
        with held_elsewhere("name", label="first", ttl=50, slots=2), held_elsewhere("name", ttl=70, slots=2):
            with pytest.raises(LockNotAcquired, match="none of its 2 slots is free.*slot 1: .*first") as caught:
                lock("name", slots=2, wait=0).__enter__()
            assert caught.value.holder.label == "first"
            assert 40 < caught.value.retry_after <= 50
            with pytest.raises(LockTimeout, match="none of its 2 slots is free"):
                lock("name", slots=2, wait=0.1).__enter__()

    def test_of_one_name_alone(self):
        with lock("name", slots=2), lock("other", slots=2) as other:
            assert other.slot == 1

    def test_one_slot_is_the_lock_without_slots(self):
        with lock("name", slots=1) as lease:
            assert lease.slot == 1
            assert lock("name").locked()
            with lock("name", reentrant=True, wait=0) as again:
                assert again is lease

    @pytest.mark.parametrize("slots", [0, -1, 1001, True, 1.5, "3", None])
    def test_from_1_to_1000(self, slots):
        with pytest.raises(ValueError, match="slots is .*a whole number from 1 to 1000"):
            lock("name", slots=slots)

    def test_a_thousand(self):
        with lock("name", slots=1000) as lease:
            assert lease.slot == 1

    def test_no_one_enters_one_of_several_again(self):
        with pytest.raises(ValueError, match="reentrant=True is for locks with one slot"):
            lock("name", slots=2, reentrant=True)

    def test_who_allows_fewer_does_not_enter_its_own_lease_beside_others(self):
        with lock("name", slots=3), held_elsewhere("name", slots=3):
            with pytest.raises(LockReentry), lock("name", reentrant=True):
                pass

    @pytest.mark.parametrize(("mine", "other"), [(60, 30), (30, 60)])
    def test_no_one_waits_for_itself_whichever_lease_is_shown(self, mine, other):
        def nested():
            with lock("name", slots=3, ttl=mine), lock("name", slots=3, ttl=mine):
                assert taken() == [1, 2, 3]
                for slots in (1, 2):
                    with pytest.raises(LockReentry):
                        lock("name", slots=slots).__enter__()
                with pytest.raises(LockTimeout):
                    lock("name", slots=3, wait=0.1).__enter__()

        with lock("name", slots=3, ttl=other):
            in_another_thread(nested)

    def test_nor_does_a_task(self):
        async def main():
            async with lock("name", slots=3, ttl=60):
                assert taken() == [1, 2]
                with pytest.raises(LockReentry):
                    await lock("name").__aenter__()

        with held_elsewhere("name", slots=3, ttl=30):
            asyncio.run(main())

    @pytest.mark.parametrize(("mine", "other"), [(60, 30), (30, 60)])
    def test_a_reentrant_lock_is_entered_again_whichever_lease_is_shown(self, mine, other):
        async def main():
            async with lock("name", ttl=mine, reentrant=True) as outer:
                with held_elsewhere("name", slots=2, ttl=other):
                    async with lock("name", reentrant=True) as inner:
                        assert inner is outer

        with lock("name", ttl=mine, reentrant=True) as outer:
            with held_elsewhere("name", slots=2, ttl=other), lock("name", reentrant=True) as inner:
                assert inner is outer
            assert taken() == [1]
        asyncio.run(main())
        assert taken() == []

    @on_each_store
    def test_in_tasks(self):
        async def main():
            async with lock("name", slots=2) as first, lock("name", slots=2) as second:
                assert (first.slot, second.slot) == (1, 2)
                assert await lock("name", slots=2).alocked()
                assert (await lock("name", slots=3).ausage()).held == 2
            assert not await lock("name", slots=2).alocked()

        asyncio.run(main())

    @on_each_store
    def test_many_threads_and_tasks(self):
        """Never more at once than the smallest number of those that are inside, but for those that came before."""
        inside, seen, guard = Counter(), [], threading.Lock()

        def note(label, step):
            with guard:
                inside[label] += step
                seen.append(sum(inside.values()))

        def in_a_thread():
            for _ in range(5):
                with lock("name", slots=3, wait=PATIENCE):
                    note("threads", 1)
                    time.sleep(0.001)
                    note("threads", -1)

        async def in_a_task():
            async with lock("name", slots=3, wait=PATIENCE):
                note("tasks", 1)
                await asyncio.sleep(0.001)
                note("tasks", -1)

        async def in_tasks():
            await asyncio.gather(*(in_a_task() for _ in range(10)))

        threads = [threading.Thread(target=in_a_thread) for _ in range(5)]
        threads.append(threading.Thread(target=async_to_sync(in_tasks)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(seen) == 2 * (5 * 5 + 10)
        assert max(seen) <= 3
        assert taken() == []


class TestDifferentNumbers:
    def test_each_counts_all_leases(self):
        with held_elsewhere("name", slots=5), held_elsewhere("name", slots=5):
            assert not lock("name", wait=0).acquire()
            assert not lock("name", slots=2, wait=0).acquire()
            with lock("name", slots=5, wait=0) as lease:
                assert lease.slot == 3

    @on_each_store
    def test_the_first_waits_until_its_own_condition_holds_and_nobody_passes_it(self, holders):
        for number in (1, 2):
            holders.start(f"of five {number}", slots=5)
            holders.have(*(f"of five {one}" for one in range(1, number + 1)))
        holders.start("alone", slots=1)
        holders.start("of two", slots=2)
        holders.start("of five 3", slots=5)
        eventually(lambda: locks["default"].count_waiters(["name"])[0])  # until it has a place, wait=0 overtakes it
        assert not lock("name", slots=5, wait=0).acquire()
        holders.let_go("of five 1")
        holders.have("of five 1", "of five 2")
        holders.let_go("of five 2")
        holders.have("of five 1", "of five 2", "alone", "of two", "of five 3")

    @on_each_store
    def test_who_gives_up_takes_nobody_past_one_that_stands_before_it(self, holders):
        for number in (1, 2, 3):
            holders.start(f"of three {number}", slots=3)
            holders.have(*(f"of three {one}" for one in range(1, number + 1)))
        leaves = threading.Thread(target=lock("name", slots=3, wait=2).acquire)
        leaves.start()
        eventually(lambda: locks["default"].count_waiters(["name"])[0])
        holders.start("alone", slots=1)
        holders.start("of three 4", slots=3)
        leaves.join(PATIENCE)
        eventually(lambda: locks["default"].count_waiters(["name"])[0])
        holders.let_go("of three 1")
        holders.have("of three 1", "of three 2", "of three 3")
        holders.let_go("of three 2")
        holders.let_go("of three 3")
        holders.have("of three 1", "of three 2", "of three 3", "alone", "of three 4")

    def test_fewer_slots_let_no_two_of_the_new_ones_in_beside_an_old_one(self, holders):
        """As in a deploy that changes 3 to 1."""
        holders.start("old", slots=3)
        holders.have("old")
        holders.start("new 1", slots=1)
        holders.start("new 2", slots=1)
        holders.have("old")
        holders.let_go("old")
        holders.have("old", "new 1")
        holders.let_go("new 1")
        holders.have("old", "new 1", "new 2")


class TestHandOffs:
    def test_who_leaves_hands_its_own_slot_to_the_first(self, holders):
        for label in ("a", "b"):
            holders.start(label, slots=2)
            eventually(lambda label=label: label in holders.order)
        holders.start("c", slots=2)
        holders.start("d", slots=2)
        holders.let_go("b")
        holders.have("a", "b", "c")
        assert taken() == [1, 2]
        holders.let_go("a")
        holders.have("a", "b", "c", "d")

    @on_each_store
    def test_all_that_end_at_once_are_handed_on(self, holders, backend):
        gone = [lock_request(ttl=0.5, slots=3) for _ in range(3)]
        for one in gone:
            backend.acquire(one, queue=False)
        for number in range(4):
            holders.start(number, slots=3)
        eventually(lambda: sorted(holders.order) == [0, 1, 2])
        assert taken() == [1, 2, 3]

    def test_min_hold_of_a_slot_counts(self):
        with lock("name", slots=2, min_hold=30):
            pass
        usage = lock("name", slots=2).usage()
        assert [(info.slot, info.resting) for info in usage.leases] == [(1, True)]
        with lock("name", slots=2, wait=0) as second:
            assert second.slot == 2
            busy = lock("name", slots=2, wait=0)
            with pytest.raises(LockNotAcquired):
                in_another_thread(busy.__enter__)

    @on_each_store
    def test_min_hold_of_a_slot_counts_for_each_number(self):
        with lock("name", slots=3, min_hold=30), lock("name", slots=3, min_hold=60):
            pass
        for slots in (1, 2):
            with pytest.raises(LockNotAcquired) as caught:
                lock("name", slots=slots, wait=0).__enter__()
            assert caught.value.resting
            assert caught.value.retry_after <= 30
        with lock("name", slots=3, wait=0) as third:
            assert third.slot == 3
        assert lock("name").force_release(slot=1)
        with lock("name", slots=2, wait=0) as first:
            assert first.slot == 1
        assert lock("name").force_release(slot=2)
        with lock("name", wait=0) as alone:
            assert alone.slot == 1

    @on_each_store
    def test_who_wants_it_alone_waits_for_the_end_of_each_min_hold_and_nobody_passes_it(self, holders):
        with lock("name", slots=3, min_hold=1), lock("name", slots=3, min_hold=2):
            holders.start("alone", slots=1)
            holders.start("of three", slots=3)
        holders.have("alone", "of three")
        assert taken() == [1, 2]  # and no slot that rests


def in_another_thread(work):
    result = []

    def run():
        try:
            result.append((work(), None))
        except Exception as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    value, error = result[0]
    if error:
        raise error
    return value


class TestUnavailable:
    """``on_unavailable="run"``"""

    def test_who_goes_on_without_it_takes_no_slot(self, calls):
        handles = [lock("name", slots=2, on_unavailable="run") for _ in range(3)]
        with lock("name", slots=2) as held:
            with store_down():
                for handle in handles:
                    assert calls(handle).acquire()
                    assert handle.lease.state is State.UNAVAILABLE
                for handle in handles:
                    calls(handle).release()
            eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
            held.ensure_held()
            assert taken() == [1]
            assert calls(handles[0]).acquire(blocking=False)
            assert (handles[0].lease.is_held, handles[0].lease.slot) == (True, 2)
            calls(handles[0]).release()
        assert taken() == []

    def test_of_several_leases_the_one_is_entered_that_may_be(self):
        with lock("name", reentrant=True) as outer, held_elsewhere("name", slots=2), store_down():
            with lock("name", reentrant=True, on_unavailable="run") as inner:
                assert inner is outer


class TestLeases:
    @pytest.mark.seconds(4)
    def test_each_is_renewed(self):
        with lock("name", slots=2, ttl=4) as first, lock("name", slots=2, ttl=4) as second:
            for lease in (first, second):
                wait_for_renewal(lease)
                wait_for_renewal(lease)
            first.ensure_held()
            second.ensure_held()
            assert taken() == [1, 2]

    def test_one_is_lost_by_itself(self):
        lost = []

        def receiver(**about):
            lost.append(about["lease"])

        lock_lost.connect(receiver)
        try:
            with lock("name", slots=2, ttl=3) as first, lock("name", slots=2, ttl=3, on_lost="log") as second:
                [_, info] = locks["default"].look(["name"])[0]
                force_release(info, by="somebody")
                eventually(lambda: second.state is State.LOST)
                assert first.state is State.HELD
                assert taken() == [1]
                eventually(lambda: lost)
        finally:
            lock_lost.disconnect(receiver)
        assert lost == [second]

    @on_each_store
    def test_it_is_detached_and_adopted_with_its_slot(self):
        with held_elsewhere("name", slots=2):
            with lock("name", slots=2, ttl=60) as lease:
                text = lease.detach()
            assert taken() == [1, 2]
            with adopt(text) as adopted:
                assert (adopted.slot, adopted.holder.slots) == (2, 2)
                adopted.renew()
            assert taken() == [1]

    def test_the_last_one_of_a_name_is_the_current_one(self):
        with lock("name", slots=2) as first:
            with lock("name", slots=2) as second, lock("other"):
                assert current_lease("name") is second
            assert current_lease() is current_lease("name") is first

    def test_a_handle_knows_its_own(self):
        handle = lock("name", slots=2)
        with handle as first, handle as second:
            assert handle.lease is second
            assert first is not second


class TestWhatIsAsked:
    @on_each_store
    def test_usage(self):
        handle = lock("name", slots=3)
        assert handle.usage() == (3, ())
        with held_elsewhere("name", label="a", slots=3), held_elsewhere("name", label="b", slots=3):
            usage = handle.usage()
            assert (usage.held, usage.slots, usage.is_full) == (2, 3, False)
            assert [info.holder.label for info in usage.leases] == ["a", "b"]
            assert [info.slot_text for info in usage.leases] == [", slot 1 of 3", ", slot 2 of 3"]
            assert not handle.locked()
            assert lock("name", slots=2).locked()
            assert lock("name").usage().held == 2

    @on_each_store
    def test_it_is_locked_behind_who_waits_for_more_slots(self, calls):
        """As another attempt finds it: nobody passes who allows fewer, and waits."""
        waiter = lock_request("name", slots=1)
        handle = lock("name", slots=3)
        with held_elsewhere("name", slots=3):
            assert not calls(handle).locked()
            locks["default"].acquire(waiter, queue=True)
            assert calls(handle).locked()
            assert not calls(handle).acquire(blocking=False)
            locks["default"].release(waiter)
            assert not calls(handle).locked()

    @on_each_store
    def test_a_release_by_force_frees_one_slot(self):
        with held_elsewhere("name", slots=3), held_elsewhere("name", slots=3), held_elsewhere("name", slots=3):
            assert lock("name").force_release(slot=2) is True
            assert taken() == [1, 3]
            assert lock("name").force_release(slot=2) is False
            assert lock("name").force_release() is True
            assert taken() == []

    def test_and_in_tasks(self):
        async def main():
            async with lock("name", slots=2, on_lost="log"), lock("name", slots=2, on_lost="log"):
                assert await lock("name").aforce_release(slot=1) is True
                assert [info.slot for info in (await lock("name").ausage()).leases] == [2]

        asyncio.run(main())


class TestTransactions:
    pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

    def test_a_loop_enters_the_lease_that_its_transaction_keeps(self):
        with transaction.atomic():
            leases = []
            for _ in range(4):
                with lock("name", slots=2, wait=0) as lease:
                    leases.append(lease)
            assert len(set(map(id, leases))) == 1
            assert taken() == [1]
        assert taken() == []

    @pytest.mark.parametrize("slots", [1, 2])
    def test_who_allows_fewer_does_not_enter_what_its_transaction_keeps_beside_others(self, slots):
        with held_elsewhere("name", slots=3), held_elsewhere("name", slots=3), transaction.atomic():
            with lock("name", slots=3, wait=0):
                pass
            with pytest.raises(LockNotAcquired), lock("name", slots=slots, wait=0):
                pass

    def test_who_allows_fewer_does_not_wait_for_its_own_transaction(self):
        kept = r"kept by the open transaction of this very thread.* slots=3, and slots=1 does not"

        async def enter():
            async with lock("name", wait=PATIENCE):
                pytest.fail("the body ran")

        with transaction.atomic():
            with lock("name", slots=3):
                pass
            with pytest.raises(LockReentry, match=kept), lock("name", wait=PATIENCE):
                pytest.fail("the body ran")
            with pytest.raises(LockReentry, match=kept.replace("thread", "task")):
                async_to_sync(enter)()
            with pytest.raises(LockNotAcquired), lock("name", wait=0):
                pytest.fail("the body ran")
            assert not lock("name").acquire(timeout=0.1)
            with lock("name", slots=2) as beside, pytest.raises(LockReentry, match="All 2 slots"):
                assert beside.slot == 2
                lock("name", slots=2, wait=PATIENCE).__enter__()
        eventually(lambda: not taken())  # the places of those who were refused are given up in the background

    @pytest.mark.parametrize(("mine", "other"), [(60, 30), (30, 60)])
    def test_who_allows_fewer_does_not_wait_for_it_beside_others(self, mine, other):
        with transaction.atomic():
            with lock("name", slots=3, ttl=mine):
                pass
            with held_elsewhere("name", slots=3, ttl=other):
                with pytest.raises(LockReentry), lock("name", wait=PATIENCE):
                    pytest.fail("the body ran")
                with pytest.raises(LockTimeout), lock("name", slots=2, wait=0.1):  # the other one may end
                    pytest.fail("the body ran")

    @pytest.mark.parametrize(("mine", "other"), [(60, 30), (30, 60)])
    def test_what_it_keeps_is_entered_whichever_lease_is_shown(self, mine, other):
        with transaction.atomic():
            with lock("name", ttl=mine) as first:
                pass
            with held_elsewhere("name", slots=2, ttl=other):
                with lock("name", wait=0) as again:
                    assert again is first
                assert taken() == [1, 2]
        assert taken() == []

    def test_what_it_keeps_is_entered_while_the_store_is_down(self):
        with transaction.atomic():
            with lock("name", slots=2) as first:
                pass
            with store_down(), lock("name", slots=2, on_unavailable="run") as again:
                assert again is first
                again.ensure_held()

    def test_each_turn_takes_its_own_outside_of_one(self):
        fences = set()
        for _ in range(3):
            with lock("name", slots=2, wait=0) as lease:
                fences.add(lease.fence)
        assert len(fences) == 3

    def test_in_tasks(self):
        async def main():
            @async_to_sync
            async def enter():
                async with lock("name", slots=2, wait=0) as lease:
                    return lease

            def both():
                with transaction.atomic():
                    first, second = enter(), enter()
                    assert first is second
                    assert taken() == [1]
                connection.connection.close()  # Django keeps those to databases in memory

            await asyncio.to_thread(both)

        asyncio.run(main())


class TestDecorator:
    def test_so_many_calls_at_once(self):
        @distributed_lock("name", slots=2, on_busy=lambda busy, *_: "busy")
        def call(depth):
            return call(depth - 1) if depth else "inside"

        assert call(1) == "inside"
        with held_elsewhere("name", slots=2):
            assert call(0) == "inside"
            with held_elsewhere("name", slots=2):
                assert call(0) == "busy"

    @pytest.mark.usefixtures("keep_connections")
    @pytest.mark.parametrize("is_async", [False, True])
    def test_open_responses(self, holders, is_async):
        @distributed_lock("name", slots=2, wait=0, on_busy="raise")
        def view(request):
            return StreamingHttpResponse(["text"])

        @distributed_lock("name", slots=2, wait=0, on_busy="raise")
        async def aview(request):
            return view.__wrapped__(request)

        def respond():
            request = RequestFactory().get("/")
            return asyncio.run(aview(request)) if is_async else view(request)

        first, second = respond(), respond()
        assert taken() == [1, 2]
        with pytest.raises(LockNotAcquired):
            respond()
        first.close()
        assert taken() == [2]
        third = respond()
        assert taken() == [1, 2]
        holders.start("behind them", slots=2)
        second.close()
        holders.have("behind them")
        assert taken() == [1, 2]
        third.close()
        assert taken() == [2]

    def test_a_number_of_the_arguments(self):
        @distributed_lock("export:{tenant}", slots=lambda tenant, **_: {"small": 1, "large": 3}[tenant], on_busy="skip")
        def export(tenant, what="all"):
            return len(locks["default"].look([f"export:{tenant}"])[0])

        for tenant, most in (("small", 1), ("large", 3)):
            with ExitStack() as stack:
                for held in range(most):
                    assert export(tenant, what="part") == held + 1
                    stack.enter_context(held_elsewhere(f"export:{tenant}", slots=most))
                assert not isinstance(export(tenant), int)

    def test_coroutine_functions(self):
        async def main():
            @distributed_lock("name", slots=lambda number: number)
            async def call(number):
                return current_lease().slot

            with held_elsewhere("name", slots=2):
                assert await call(2) == 2
                with pytest.raises(LockNotAcquired):
                    await call(1)

        asyncio.run(main())

    @pytest.mark.parametrize("wrong", [0, 1001, None, "2"])
    def test_a_number_that_is_none(self, wrong):
        @distributed_lock("name", slots=lambda: wrong)
        def call():
            raise AssertionError

        with pytest.raises(ValueError, match="slots is .*a whole number from 1 to 1000"):
            call()

    def test_what_is_wrong_for_each_call_is_told_at_once(self):
        for options in ({"slots": 0}, {"slots": 2, "reentrant": True}, {"slots": lambda: 2, "reentrant": True}):
            with pytest.raises(ValueError, match=r"slots|reentrant"):
                distributed_lock("name", **options)(print)


class TestTheStore:
    def test_one_without_slots_refuses(self, monkeypatch, backend):
        monkeypatch.setattr(type(backend), "supports_slots", False)
        with pytest.raises(InvalidLockBackend, match=r"slots=2.*lets one at a time"):
            lock("name", slots=2).__enter__()
        with lock("name", slots=1):
            pass

    def test_one_that_excludes_nobody_counts_nobody(self):
        with override_locks(f"{DummyBackend.__module__}.{DummyBackend.__qualname__}"):
            with lock("name", slots=1), lock("name", slots=1) as lease:
                assert lease.slot == 1

    @on_each_store
    def test_nothing_is_left(self, backend):
        with lock("name", slots=2), lock("name", slots=2):
            pass
        eventually(lambda: not renewer_of(backend).is_cleaning)
        assert list(locks["default"].held()) == []
