"""``assert_locked()``, and what a context remembers: who counts as holding a lock."""

from __future__ import annotations

import asyncio
import statistics
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_distlock import (
    InvalidLockName,
    LockLost,
    LockNotHeld,
    aadopt,
    adopt,
    assert_locked,
    current_lease,
    distributed_lock,
    lock,
)
from django_distlock.core.holds import remember, remembers
from django_distlock.testing import assume_locked, held_elsewhere, lose
from tests.support.tools import on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.usefixtures("backend")


def guarded():
    assert_locked("order:{}", 42)
    return True


def refused(call=guarded):
    with pytest.raises(LockNotHeld, match=r"must run under the lock 'order:42' \(default\).*assume_locked"):
        call()
    return True


@on_each_store
def test_under_the_lock_it_passes_and_before_and_after_it_does_not():
    refused()
    with lock("order:{}", 42):
        assert guarded()
        with lock("other"):
            assert guarded()
    refused()


def test_under_the_decorator():
    assert distributed_lock("order:{pk}")(lambda pk: guarded())(pk=42)


def test_by_acquire_and_release():
    mutex = lock("order:42")
    mutex.acquire()
    assert guarded()
    mutex.release()
    refused()


def test_values_are_escaped_as_those_of_locks():
    with lock("user:{}", "a:b"):
        assert_locked("user:{}", "a:b")
        with pytest.raises(LockNotHeld):
            assert_locked("user:a:b")


def test_another_name_or_another_backend_is_another_lock(settings):
    with lock("order:43"):
        refused()
    settings.DISTRIBUTED_LOCKS = {
        alias: {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"} for alias in ("default", "other")
    }
    with lock("order:42", using="other"):
        refused()
        assert_locked("order:42", using="other")


def test_somebody_elses_lock_does_not_count():
    with held_elsewhere("order:42"):
        refused()
    with lock("order:42"), ThreadPoolExecutor() as pool:
        assert pool.submit(refused).result()


@on_each_store
def test_a_lost_lock_is_lost():
    with lock("order:42", on_lost="log") as lease:
        lose(lease)
        with pytest.raises(LockLost):
            guarded()
    with lock("order:42"):
        assert guarded()


def test_after_many_other_locks():
    with lock("order:42"):
        for number in range(40):
            with lock("other:{}", number):
                pass
        assert guarded()


def test_an_adopted_lease_counts_and_a_detached_one_does_not():
    with lock("order:42") as lease:
        text = lease.detach()
        refused()
    with adopt(text):
        assert guarded()
    refused()


def test_in_tasks():
    async def main():
        async with lock("order:42") as lease:
            assert guarded()
            async with asyncio.TaskGroup() as children:
                children.create_task(asyncio.to_thread(guarded))
            text = lease.detach()
            refused()
        async with await aadopt(text):
            assert guarded()
        refused()

    asyncio.run(main())


def test_a_child_task_that_outlives_the_lock_is_told():
    async def main():
        released = asyncio.Event()

        async def child():
            assert guarded()
            await released.wait()
            return refused()

        async with lock("order:42"):
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        released.set()
        assert await task

    asyncio.run(main())


def test_it_reaches_through_the_bridges_between_sync_and_async():
    @sync_to_async
    def sync_part():
        return guarded()

    @async_to_sync
    async def async_part():
        return guarded() and await sync_part()

    with lock("order:42"):
        assert async_part()
    refused()


def test_it_does_not_reach_into_new_threads():
    seen = []
    with lock("order:42"):
        thread = threading.Thread(target=lambda: seen.append(refused()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_a_name_that_is_none_is_told():
    with pytest.raises(InvalidLockName):
        assert_locked("")


class TestTheSwitch:
    def test_inside_everything_is_taken_for_locked_in_all_threads(self):
        with assume_locked(), ThreadPoolExecutor() as pool:
            assert guarded()
            assert pool.submit(guarded).result()
            with assume_locked():
                pass
            assert guarded()
        refused()

    @assume_locked()
    def test_as_a_decorator(self):
        assert guarded()


class TestTheCurrentLease:
    def test_is_that_of_the_innermost_lock(self):
        with lock("outer") as outer:
            assert current_lease() is outer
            with lock("order:{}", 7) as inner:
                assert current_lease() is inner
                assert current_lease("outer") is outer
                assert current_lease("order:{}", 7) is inner
            assert current_lease() is outer
        with pytest.raises(LockNotHeld, match="This code holds no lock"):
            current_lease()

    def test_of_another_name_is_none(self):
        with lock("order:{}", 7), pytest.raises(LockNotHeld, match=r"not the lock 'order:8' \(default\)"):
            current_lease("order:{}", 8)
        with lock("name"), pytest.raises(LockNotHeld, match=r"not the lock 'name' \(other\)"):
            current_lease("name", using="other")

    def test_of_a_decorated_function(self):
        assert distributed_lock("order:{pk}")(lambda pk: current_lease().name)(7) == "order:7"

    def test_is_seen_by_tasks_and_threads_that_have_the_context(self):
        async def child():
            return current_lease()

        async def main():
            async with lock("name") as lease:
                found = [await child(), await asyncio.create_task(child()), await sync_to_async(current_lease)()]
                assert found == [lease] * 3
            with pytest.raises(LockNotHeld):
                current_lease()

        asyncio.run(main())
        with lock("name") as lease, ThreadPoolExecutor() as pool:
            assert pool.submit(copy_context().run, current_lease).result() is lease
            with pytest.raises(LockNotHeld, match="A new thread holds what it acquires itself"):
                pool.submit(current_lease).result()

    def test_that_was_lost_says_so_until_it_is_left(self):
        with pytest.raises(LockLost), lock("name") as lease:
            lose(lease)
            assert current_lease() is lease
            assert not lease.is_held
            with pytest.raises(LockLost):
                current_lease().ensure_held()
        with pytest.raises(LockNotHeld):
            current_lease()

    def test_in_a_generator(self):
        @distributed_lock("name")
        def rows():
            for _ in range(3):
                yield current_lease().name

        assert list(rows()) == ["name"] * 3
        with pytest.raises(LockNotHeld):
            current_lease()


class TestTheLeaseOfAHandle:
    def test_is_there_from_acquire_to_release(self, calls):
        handle = lock("name")
        assert handle.lease is None
        calls(handle).acquire()
        assert handle.lease.is_held
        assert handle.lease.name == "name"
        calls(handle).release()
        assert handle.lease is None

    def test_of_another_thread_is_seen_where_this_one_has_none(self):
        handle = lock("name")
        with handle as lease, ThreadPoolExecutor() as pool:
            assert pool.submit(lambda: handle.lease).result() is lease

    def test_that_was_lost_is_none(self):
        handle = lock("name", on_lost="log")
        with handle as lease:
            lose(lease)
            assert handle.lease is None


class Held:
    """Of a lease."""

    is_held = True
    _ended = None


def test_a_context_takes_in_one_more_at_the_same_price_whatever_it_holds():
    """Nothing is copied that grows with what is held."""

    def largest(held):
        for one in held:
            remember(one)
        sizes = []
        for _ in range(21):
            tracemalloc.start()
            remember(held[0])
            sizes.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert remembers(held[0])
        assert not remembers(Held())
        return statistics.median(sizes)

    few, many = (copy_context().run(largest, [Held() for _ in range(number)]) for number in (20, 2000))
    assert many <= few + 500  # bytes
