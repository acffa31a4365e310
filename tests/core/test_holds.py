"""What a handle holds: acquisitions that end elsewhere than they began, and those that nobody ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest
from django.http import StreamingHttpResponse

from django_distlock import LockNotHeld, distributed_lock, lock
from django_distlock.signals import lock_lost
from django_distlock.testing import lose
from tests.support.leases import lease_of
from tests.support.tools import eventually, on_stores

on_each_store = on_stores("redis", "locmem")


@pytest.fixture(params=[False, True], ids=["plain", "reentrant"])
def reentrant(request):
    return request.param


@pytest.fixture(autouse=True)
def store(backend):
    return backend


def in_another_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


class TestEndsElsewhere:
    @on_each_store
    def test_an_iterator_that_another_thread_closes(self, reentrant):
        @distributed_lock("rows", reentrant=reentrant)
        def rows():
            yield 1

        iterator = rows()
        next(iterator)
        in_another_thread(iterator.close)
        assert not lock("rows").locked()

    @on_each_store
    def test_an_iterator_that_another_task_closes(self, reentrant):
        @distributed_lock("rows", reentrant=reentrant)
        async def rows():
            yield 1

        async def main():
            iterator = rows()
            await asyncio.create_task(anext(iterator))
            await iterator.aclose()
            assert not await lock("rows").alocked()

        asyncio.run(main())

    @on_each_store
    def test_a_with_over_two_tasks(self, reentrant):
        handle = lock("name", reentrant=reentrant)

        async def main():
            await asyncio.create_task(handle.__aenter__())
            await asyncio.create_task(handle.__aexit__(None, None, None))
            assert not await handle.alocked()

        asyncio.run(main())


class TestReleasedInsideOfWith:
    def test_and_acquired_again_it_is_released_at_the_end(self, reentrant):
        handle = lock("name", reentrant=reentrant)
        with handle:
            handle.release()
            assert not handle.locked()
            handle.acquire()
        assert not handle.locked()

    def test_by_a_task(self, reentrant):
        handle = lock("name", reentrant=reentrant)

        async def main():
            async with handle:
                await handle.arelease()
                await handle.aacquire()
            assert not await handle.alocked()

        asyncio.run(main())

    def test_and_not_acquired_again_is_told(self, reentrant):
        handle = lock("name", reentrant=reentrant)
        with pytest.raises(LockNotHeld), handle:
            handle.release()

    def test_a_condition_waits_in_it(self):
        condition, waits = threading.Condition(lock("name", reentrant=True)), threading.Event()

        def wait():
            with condition, condition:
                waits.set()
                return condition.wait(10)

        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(wait)
            assert waits.wait(10)
            with condition:
                condition.notify()
            assert waiter.result()
        assert not lock("name").locked()


class TestNothingGrows:
    def test_where_a_lock_is_taken_once_per_ttl(self):
        handle, leases = lock("name", ttl=60, renew=False), WeakSet()
        for _ in range(10):
            assert handle.acquire()
            leases.add(lease_of(handle))
            lose(lease_of(handle))
        eventually(lambda: len(leases) == 1)

    @on_each_store
    def test_by_threads_that_have_ended(self):
        handle, leases = lock("name", ttl=60, renew=False), WeakSet()
        for _ in range(10):
            assert in_another_thread(handle.acquire)
            leases.add(lease_of(handle))
            lose(lease_of(handle))
        eventually(lambda: len(leases) == 1)


def test_a_receiver_that_exits_does_not_end_what_others_are_told():
    told = []

    def receive(lease, **about):
        told.append(lease.name)
        raise SystemExit

    lock_lost.connect(receive)
    handles = [lock(name) for name in "abc"]
    for handle in handles:
        handle.acquire()
        lose(lease_of(handle))
    eventually(lambda: sorted(told) == ["a", "b", "c"])
    lock_lost.disconnect(receive)


def test_a_lock_that_only_a_response_holds_is_busy_for_its_own_thread(rf, keep_connections):
    @distributed_lock("export")
    def export(request):
        return StreamingHttpResponse(["a"])

    first = export(rf.get("/"))
    assert export(rf.get("/")).status_code == 409
    first.close()
    export(rf.get("/")).close()


def test_an_option_of_any_type_is_refused_by_what_it_is():
    with pytest.raises(ValueError, match=r"ttl is \[\]"):
        lock("name", ttl=[])
