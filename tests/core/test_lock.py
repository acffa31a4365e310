"""The handle: threading.Lock's protocol, ``with``, what a lease tells, and how it ends. On each kind of store."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import re
import threading
import time
import traceback
import weakref
from contextlib import suppress
from datetime import timedelta

import pytest
from django.core.exceptions import SynchronousOnlyOperation

from django_distlock import (
    LockBackendError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockReentry,
    LockTimeout,
    State,
    lock,
    locks,
)
from django_distlock import signals as lock_signals
from django_distlock.core.acquire import Acquisition
from django_distlock.types import current_execution
from django_distlock.utils.other_words import OF_LEASES
from tests.support.leases import hold_elsewhere, lease_of, request_of
from tests.support.tools import ALLOWANCE, backend_on, ending_within, eventually, lock_request, on_stores, renewer_of

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "postgres", "sqlite")

pytestmark = pytest.mark.usefixtures("backend")


def in_a_thread(work):
    """Run in another thread and return what the function returned or raised."""
    result = []

    def run():
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return result[0]


class TestTheProtocolOfThreadingLock:
    @on_each_store
    def test_acquire_and_release(self, calls):
        handle = lock("name")
        mutex = calls(handle)
        assert mutex.locked() is False
        assert mutex.acquire() is True
        assert mutex.locked() is True
        mutex.release()
        assert mutex.locked() is False

    def test_a_busy_lock_is_not_acquired(self, calls):
        hold_elsewhere()
        mutex = calls(lock("name"))
        assert mutex.acquire(blocking=False) is False
        assert mutex.acquire(timeout=0.05) is False

    def test_locked_tells_of_any_holder(self, calls):
        hold_elsewhere()
        assert calls(lock("name")).locked() is True

    def test_the_locks_own_wait_counts_unless_a_timeout_is_given(self, calls):
        hold_elsewhere()
        began = time.monotonic()
        assert calls(lock("name", wait=0.2)).acquire() is False
        assert 0.2 <= time.monotonic() - began < 0.2 + ALLOWANCE
        assert calls(lock("name", wait=60)).acquire(timeout=0.05) is False

    @on_each_store
    def test_waits_until_the_holder_releases(self, calls):
        other = hold_elsewhere()
        timer = threading.Timer(0.15, locks["default"].release, [other])
        timer.start()
        handle = lock("name", wait=None)
        assert calls(handle).acquire() is True
        timer.join()
        calls(handle).release()

    @on_each_store
    def test_waits_until_the_holders_lease_runs_out(self, calls):
        hold_elsewhere(ttl=0.2)
        handle = lock("name", wait=10)
        assert calls(handle).acquire() is True
        calls(handle).release()

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"blocking": False, "timeout": 1}, ValueError),
            ({"timeout": -2}, ValueError),
            ({"timeout": float("nan")}, ValueError),
            ({"timeout": 1e100}, OverflowError),
        ],
    )
    def test_arguments_that_threading_refuses(self, calls, arguments, error):
        with pytest.raises(error):
            calls(lock("name")).acquire(**arguments)

    def test_release_of_what_is_not_held(self, calls):
        with pytest.raises(LockNotHeld, match="not held by this handle .*acquire.. .* returned False") as caught:
            calls(lock("name")).release()
        assert isinstance(caught.value, RuntimeError)

    def test_release_by_another_thread(self):
        handle = lock("name")
        handle.acquire()
        assert in_a_thread(handle.release) is None
        assert not handle.locked()

    @on_each_store
    def test_one_handle_serves_many_threads(self):
        handle, inside, most = lock("name", wait=20), [], []

        def work():
            for _ in range(5):
                with handle:
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert (len(most), set(most)) == (30, {1})

    @on_each_store
    def test_one_handle_serves_many_tasks(self):
        async def main():
            handle, inside, most = lock("name", wait=20), [], []

            async def work():
                async with handle:
                    inside.append(1)
                    most.append(len(inside))
                    await asyncio.sleep(0.001)
                    inside.pop()

            await asyncio.gather(*(work() for _ in range(12)))
            assert (len(most), set(most)) == (12, {1})

        asyncio.run(main())

    @on_each_store
    def test_a_handle_works_in_one_event_loop_after_another(self):
        handle = lock("name")

        async def once():
            async with handle:
                return await handle.alocked()

        assert [asyncio.run(once()) for _ in range(3)] == [True, True, True]


class TestWith:
    @on_each_store
    def test_gives_a_lease_and_frees_the_lock(self):
        began, began_at = time.monotonic(), time.time()
        with lock("order:{}", 42, label="billing") as lease:
            assert (lease.name, lease.using, lease.ttl, lease.state) == ("order:42", "default", 30.0, State.HELD)
            assert 29 - (time.monotonic() - began) < lease.remaining <= 30
            assert lease.fence > 0
            assert lease.holder.label == "billing"
            assert began_at - 1 < lease.granted_at.timestamp() < time.time() + 1
            lease.ensure_held()
            [info] = locks["default"].held()
            assert (info.fence, info.token, info.holder) == (lease.fence, lease.token, lease.holder)
        assert lease.state is State.RELEASED
        assert lease.remaining == 0
        assert list(locks["default"].held()) == []
        with pytest.raises(LockNotHeld):
            lease.ensure_held()

    @on_each_store
    def test_async_with_gives_the_same(self):
        async def main():
            async with lock("order:{}", 42) as lease:
                lease.ensure_held()
                assert [info.fence async for info in locks["default"].aheld()] == [lease.fence]
            assert lease.state is State.RELEASED
            assert [info async for info in locks["default"].aheld()] == []

        asyncio.run(main())

    def test_a_busy_lock_raises_at_once_when_it_does_not_wait(self):
        hold_elsewhere(label="the nightly import")
        with (
            pytest.raises(LockNotAcquired, match="'name' .* is busy: held by the nightly import") as caught,
            lock("name", wait=0),
        ):
            pytest.fail("the body ran")
        assert not isinstance(caught.value, LockTimeout)
        assert 59 < caught.value.retry_after <= 60
        assert (caught.value.name, caught.value.using) == ("name", "default")
        assert caught.value.holder.label == "the nightly import"

    def test_a_lock_that_stays_busy_raises_lock_timeout(self):
        hold_elsewhere()
        with pytest.raises(LockTimeout, match=r"stayed busy for 0\.\d s: held by") as caught, lock("name", wait=0.1):
            pytest.fail("the body ran")
        assert not isinstance(caught.value, TimeoutError)

    def test_async_with_raises_the_same(self):
        hold_elsewhere()

        async def enter(wait):
            async with lock("name", wait=wait):
                pytest.fail("the body ran")

        with pytest.raises(LockNotAcquired):
            asyncio.run(enter(0))
        with pytest.raises(LockTimeout):
            asyncio.run(enter(0.05))

    def test_a_handle_is_copied_as_one_that_holds_nothing(self):
        for copied in (copy.deepcopy(lock("name", wait=0)), pickle.loads(pickle.dumps(lock("name", wait=0)))):
            with lock("name"):
                assert (copied.lease, in_a_thread(copied.acquire)) == (None, False)
            with copied as lease:
                lease.ensure_held()

    def test_errors_survive_pickling(self):
        hold_elsewhere()
        with pytest.raises(LockNotAcquired) as caught, lock("name", wait=0):
            pass
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), copy.holder) == (LockNotAcquired, str(caught.value), caught.value.holder)

    def test_the_bodys_exception_comes_out_and_the_lock_is_freed(self):
        with pytest.raises(ZeroDivisionError), lock("name"):
            _ = 1 / 0
        assert not lock("name").locked()

    def test_the_bodys_exception_is_never_replaced(self, caplog):
        """S6, also when the lease was lost meanwhile."""
        with pytest.raises(ZeroDivisionError), lock("name") as lease:
            locks["default"].release(request_of(lease))
            _ = 1 / 0
        assert "was lost" in caplog.text

        async def main():
            async with lock("name") as lease:
                await locks["default"].arelease(request_of(lease))
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            asyncio.run(main())

    def test_leaving_after_the_lease_was_lost_raises(self):
        with pytest.raises(LockLost, match="'name' .* somebody else may have held it"), lock("name") as lease:
            locks["default"].release(request_of(lease))
        assert lease.state is State.LOST

        async def main():
            async with lock("name") as lease:
                await locks["default"].arelease(request_of(lease))

        with pytest.raises(LockLost):
            asyncio.run(main())

    def test_on_lost_log_does_not_raise(self, caplog):
        with lock("name", on_lost="log") as lease:
            locks["default"].release(request_of(lease))
        assert lease.state is State.LOST
        assert "was lost" in caplog.text

    def test_the_body_may_release(self):
        with lock("name") as lease:
            lease.release()
            assert not lock("name").locked()
        with pytest.raises(LockNotHeld, match="released already"):
            lease.release()

    @on_each_store
    def test_a_lost_lease_never_frees_its_successor(self):
        with pytest.raises(LockLost), lock("name") as lease:
            locks["default"].release(request_of(lease))
            successor = hold_elsewhere()
        assert locks["default"].look(["name"])[0][0].token == successor.token

    def test_a_late_release_by_a_shared_handle_never_frees_the_successor(self):
        """The handle's owner lost it; another thread holds it by the same handle."""
        handle = lock("name", wait=5)
        handle.acquire()
        [[info]] = locks["default"].look(["name"])
        locks["default"].release(request_of(lease_of(handle)))
        taken, leave = threading.Event(), threading.Event()

        def successor():
            with handle:
                taken.set()
                leave.wait(10)

        thread = threading.Thread(target=successor)
        thread.start()
        assert taken.wait(10)
        with pytest.raises(LockLost):
            handle.release()
        assert locks["default"].look(["name"])[0][0].token != info.token
        leave.set()
        thread.join(10)

    def test_with_never_frees_what_another_thread_took_after_its_body_released(self):
        handle = lock("name")
        there, leave = threading.Event(), threading.Event()

        def successor():
            with handle as lease:
                there.set()
                leave.wait(10)
                return lease.state

        states = []
        thread = threading.Thread(target=lambda: states.append(successor()))
        with pytest.raises(LockNotHeld), handle:
            handle.release()
            thread.start()
            assert there.wait(10)
        leave.set()
        thread.join(10)
        assert states == [State.HELD]

    def test_a_loss_is_announced_to_async_receivers_too(self):
        heard, told = [], threading.Event()

        async def receiver(*, name, **_):
            heard.append(name)
            told.set()

        async def main():
            async with lock("name") as lease:
                await locks["default"].arelease(request_of(lease))
                _ = 1 / 0

        lock_signals.lock_lost.connect(receiver)
        try:
            with pytest.raises(ZeroDivisionError):
                asyncio.run(main())
            assert told.wait(10)
        finally:
            lock_signals.lock_lost.disconnect(receiver)
        assert heard == ["name"]

    def test_lock_in_an_event_loop_is_refused(self, monkeypatch):
        async def main():
            with pytest.raises(SynchronousOnlyOperation, match="async with lock"), lock("name"):
                pytest.fail("the body ran")
            for call in (lock("name").acquire, lock("name").release, lock("name").locked):
                with pytest.raises(SynchronousOnlyOperation):
                    call()
            monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
            with lock("name"):
                return "allowed"

        assert asyncio.run(main()) == "allowed"


class TestReentry:
    def test_waiting_for_oneself_is_told_at_once(self):
        with lock("name"):
            message = "this very thread already.*without the lock; or give reentrant=True to .* entered again\\.$"
            with ending_within(1), pytest.raises(LockReentry, match=message), lock("name", wait=60):
                pytest.fail("the body ran")
            assert lock("name").acquire(blocking=False) is False
        assert not lock("name").locked()

    def test_a_task_that_waits_for_itself_is_told(self):
        async def main():
            async with lock("name"):
                with pytest.raises(LockReentry, match="this very task"):
                    async with lock("name", wait=60):
                        pytest.fail("the body ran")
            assert not await lock("name").alocked()

        asyncio.run(main())

    @pytest.mark.parametrize("of", [lambda handle: handle, lambda handle: lock("name", wait=60)], ids=["same", "other"])
    def test_acquire_waits_for_another_thread_to_release_what_its_own_holds_and_says_so(self, caplog, of):
        """As threading.Lock does."""
        handle = lock("name")
        assert handle.acquire()
        assert of(handle).acquire(blocking=False) is False
        assert not caplog.messages
        assert of(handle).acquire(timeout=1) is False
        told = "The lock 'name' (default) is held by this very thread, which now waits for it in acquire()."
        assert [message for message in caplog.messages if message.startswith(told)]
        releasing = threading.Timer(0.1, handle.release)
        releasing.start()
        again = of(handle)
        assert again.acquire(timeout=60)
        releasing.join()
        again.release()

    def test_a_task_that_waits_by_acquire_is_warned(self, caplog):
        async def main():
            async with lock("name"):
                assert await lock("name").aacquire(timeout=1) is False

        asyncio.run(main())
        assert "by this very task, which now waits for it" in caplog.text

    def test_the_inner_lock_is_the_one_that_is_reentrant(self):
        with lock("name", reentrant=True):
            with pytest.raises(LockReentry, match="entered again, as to the one that is held"), lock("name"):
                pytest.fail("the body ran")
        with lock("name"), lock("name", reentrant=True):
            pass

    def test_another_thread_is_no_reentry(self):
        with lock("name"):
            assert isinstance(in_a_thread(lambda: lock("name", wait=0).__enter__()), LockNotAcquired)

    def test_a_child_task_is_no_reentry_though_it_inherits_the_context(self):
        async def main():
            async with lock("name", reentrant=True):

                async def child():
                    async with lock("name", wait=0, reentrant=True):
                        pytest.fail("two at once")

                with pytest.raises(LockNotAcquired):
                    await asyncio.create_task(child())

        asyncio.run(main())

    def test_tasks_that_share_a_thread_by_sync_to_async_are_no_reentry(self):
        from asgiref.sync import sync_to_async

        async def main():
            first, second = lock("name", wait=0, reentrant=True), lock("name", wait=0, reentrant=True)
            acquired, done = asyncio.Event(), asyncio.Event()

            async def one():
                assert await sync_to_async(first.acquire)()
                acquired.set()
                await done.wait()
                await sync_to_async(first.release)()

            async def two():
                await acquired.wait()
                try:
                    return await sync_to_async(second.acquire)()
                finally:
                    done.set()

            _, entered = await asyncio.gather(one(), two())
            assert entered is False

        asyncio.run(main())

    def test_a_reentrant_lock_is_entered_again_with_the_same_number_and_freed_by_the_last(self):
        with lock("name", reentrant=True) as outer:
            with lock("name", reentrant=True) as inner:
                assert inner.fence == outer.fence
            outer.ensure_held()
            assert lock("name").locked()
        assert not lock("name").locked()

    def test_a_reentrant_lock_in_a_task(self):
        async def main():
            handle = lock("name", reentrant=True)
            async with handle as outer, handle as inner:
                assert inner.fence == outer.fence
            assert not await handle.alocked()

        asyncio.run(main())

    def test_only_the_owner_leaves_a_reentrant_lock(self):
        handle = lock("name", reentrant=True)
        with handle:
            assert isinstance(in_a_thread(handle.release), LockNotHeld)
            assert handle.locked()

    @on_each_store
    def test_a_lost_lease_is_not_entered_again(self):
        """The store decides, not what this process remembers."""
        with pytest.raises(LockLost), lock("name", reentrant=True) as lease:
            locks["default"].release(request_of(lease))
            hold_elsewhere()
            with pytest.raises(LockNotAcquired), lock("name", wait=0, reentrant=True):
                pytest.fail("the body ran")


class TestLengthsOfTime:
    def test_may_be_timedeltas(self, calls, settings):
        with lock("name", ttl=timedelta(minutes=1), max_hold=timedelta(hours=1), wait=timedelta(seconds=9)) as lease:
            assert 58 < lease.remaining <= 60
            lease.renew(ttl=timedelta(minutes=2))
            assert 110 < lease.remaining <= 120
            assert calls(lock("name")).acquire(timeout=timedelta(milliseconds=1)) is False
        with pytest.raises(ValueError, match="ttl is datetime.timedelta"):
            lock("name", ttl=timedelta(-1))

    def test_may_be_timedeltas_in_settings(self, settings):
        entry = {
            **settings.DISTRIBUTED_LOCKS["default"],
            "TTL": timedelta(minutes=1),
            "LONG_HELD": timedelta(seconds=5),
        }
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        assert locks["default"].terms.ttl == 60.0
        assert locks["default"].long_held == 5.0


class TestWordsOfOtherLibraries:
    """Are answered by those of this one."""

    @pytest.mark.parametrize(
        ("word", "answer"),
        [
            ("extend", r"lease\.renew\(ttl=60\)"),
            ("reacquire", r"lease\.renew\(\)"),
            ("owned", r"lease\.is_held"),
            ("remainTimeToLive", r"lease\.remaining"),
            ("tryLock", r"acquire\(timeout=0\)"),
            ("force_unlock", r"lock\.force_release\(\)"),
            ("lock", r"lock\.acquire\(\)"),
            ("reset_all", r"manage\.py locks release --prefix ''"),
        ],
    )
    def test_on_handles_and_leases(self, word, answer):
        handle = lock("name")
        with handle as lease:
            for thing in (handle, lease):
                with pytest.raises(AttributeError, match=f"has no attribute '{word}': .*{answer}") as caught:
                    getattr(thing, word)
                assert not hasattr(thing, word)
                # Nor are they offered, in a shell or by Python.
                assert word not in dir(thing)
                assert "Did you mean" not in "".join(traceback.format_exception(caught.value))
                assert {"release", "name", "__class__"} <= {*dir(thing)}

    def test_what_a_lease_has_is_asked_of_its_handle(self):
        handle = lock("name")
        with handle as lease:
            for word in OF_LEASES:
                assert hasattr(lease, word)
                with pytest.raises(AttributeError, match=rf"its lease has it: lock\.lease\.{word}, or 'with lock"):
                    getattr(handle, word)
            for word, answer in (
                ("acquired", r"lease\.is_held"),
                ("locked", r"lock\.locked"),
                ("acquire", "makes a lease"),
            ):
                with pytest.raises(AttributeError, match=answer):
                    getattr(lease, word)

    def test_one_answer_is_given_to_an_option(self):
        """Not a second one, of how it was handled."""
        with pytest.raises(TypeError, match="ttl or wait") as caught:
            lock("name", timeout=3)
        assert caught.value.__context__ is None

    def test_others_are_no_words_of_anybody(self):
        with pytest.raises(AttributeError, match="'Lock' object has no attribute 'nothing'$"):
            lock("name").nothing  # noqa: B018 - it raises

    def test_a_lock_is_neither_awaited_nor_a_decorator(self):
        async def main():
            await lock("name")

        with pytest.raises(TypeError, match=r"'async with lock\(\.\.\.\)', or taken by 'await lock"):
            asyncio.run(main())
        with pytest.raises(TypeError, match=r"The decorator is @distributed_lock"):

            @lock("name")
            def work():
                pass


class TestSignals:
    def test_acquired_and_released(self, calls, heard, backend):
        handle = lock("heard")
        calls(handle).acquire()
        calls(handle).release()
        assert [name for name, _ in heard] == ["lock_acquired", "lock_released"]
        for _, about in heard:
            assert (about["sender"], about["name"], about["using"]) == (type(backend), "heard", "default")
            assert about["lease"].name == "heard"

    def test_busy(self, calls, heard):
        hold_elsewhere("heard", label="somebody")
        calls(lock("heard")).acquire(timeout=0.05)
        [(name, about)] = heard
        assert name == "lock_busy"
        assert about["holder"].label == "somebody"
        assert 0.05 <= about["waited"] < 5

    def test_nothing_is_made_for_signals_that_nobody_receives(self, calls, monkeypatch):
        monkeypatch.delattr(Acquisition, "about")
        with lock("name"):
            assert calls(lock("name")).acquire(timeout=0) is False
        assert lock_signals.send_signal(lock_signals.lock_busy, object) is None

    def test_a_failing_receiver_does_not_matter(self, calls, caplog):
        def broken(**_):
            raise ZeroDivisionError

        lock_signals.lock_acquired.connect(broken)
        try:
            handle = lock("name")
            assert calls(handle).acquire() is True
            calls(handle).release()
        finally:
            lock_signals.lock_acquired.disconnect(broken)
        assert "ZeroDivisionError" in caplog.text


class TestNothingIsLeftBehind:
    @on_each_store
    def test_by_a_task_cancelled_while_it_waits(self):
        other = hold_elsewhere()

        async def main():
            waiting = asyncio.create_task(lock("name", wait=None).aacquire())
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(main())
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)  # a cancelled task does not wait for the store
        locks["default"].release(other)
        assert not lock("name").locked()
        with lock("name", wait=0):
            pass

    @on_each_store
    def test_by_a_task_cancelled_while_it_holds(self):
        async def main():
            async def work():
                async with lock("name"):
                    inside.set()
                    await asyncio.sleep(60)

            inside = asyncio.Event()
            task = asyncio.create_task(work())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await lock("name").alocked()

        asyncio.run(main())

    @on_each_store
    def test_by_tasks_cancelled_at_any_moment(self):
        """A cancellation lands before, in, or after each step of acquire and release."""

        async def main():
            async def work():
                async with lock("name", wait=None, ttl=60):
                    await asyncio.sleep(0)

            for steps in range(60):
                task = asyncio.create_task(work())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            free = lock("name", wait=10)
            assert await free.aacquire()
            await free.arelease()

        asyncio.run(main())

    @on_each_store
    def test_by_a_cancelled_receiver_of_lock_acquired(self):
        async def main():
            async def slow(**_):
                reached.set()
                await asyncio.sleep(60)

            reached = asyncio.Event()
            lock_signals.lock_acquired.connect(slow)
            try:
                task = asyncio.create_task(lock("name").aacquire())
                await reached.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            finally:
                lock_signals.lock_acquired.disconnect(slow)
            await asyncio.to_thread(eventually, lambda: locks["default"].look(["name"]) == [[]])

        asyncio.run(main())

    def test_by_an_interrupted_thread(self, monkeypatch):
        hold_elsewhere(ttl=60)

        def interrupted(lock_request, timeout):
            raise KeyboardInterrupt

        monkeypatch.setattr(locks["default"], "wait_for_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock("name").acquire()
        monkeypatch.undo()
        assert len(list(locks["default"].held())) == 1

    def test_a_handle_dropped_while_it_holds_stops_renewing_and_warns(self, caplog):
        handle = lock("name", ttl=0.3)
        handle.acquire()
        with pytest.warns(ResourceWarning, match="'name' .* was dropped while it held the lock"):
            del handle
            gc.collect()
        told = "was dropped while it held the lock, which now runs out by its TTL. Write 'with lock"
        # Where the machine is busy, late renewals are logged, too.
        eventually(lambda: [message for message in caplog.messages if told in message])
        assert caplog.text.count(told) == 1
        eventually(lambda: not lock("name").locked())

    def test_a_handle_may_be_dropped_inside_of_a_handler_of_logs(self, caplog, monkeypatch):
        """Whose locks need not be reentrant, as those of a queue are not; the garbage collector comes at any point."""
        guard = threading.Lock()

        def emit(record):
            with guard:
                emitted.append(record)

        emitted, handle = [], lock("name", ttl=0.3)
        monkeypatch.setattr(caplog.handler, "emit", emit)
        handle.acquire()
        with guard, pytest.warns(ResourceWarning, match="was dropped"):
            del handle
            gc.collect()
        eventually(lambda: emitted)
        eventually(lambda: not locks.leases())  # of which other tests would be told

    def test_a_handle_that_is_made_by_a_statement_locks_nothing_and_warns(self, caplog):
        def work(number):
            lock("order:{}", number)
            lock("order:8", ttl=3)

        async def awork():
            lock("order:9")

        with pytest.warns(ResourceWarning) as warned:
            work(7)
            asyncio.run(awork())
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        for name, line, message, warning in zip(("7", "8", "9"), (1, 2, 1), caplog.messages, warned, strict=True):
            function = awork if name == "9" else work
            first = function.__code__.co_firstlineno
            assert message.startswith(f"lock('order:{name}') at {__file__}:{first + line} locks nothing")
            assert "Write 'with lock(...)'" in message
            assert str(warning.message) == message

    def test_other_handles_that_lock_nothing_are_nobodys_mistake(self, caplog):
        lock("name").locked()
        handles = [lock(f"name:{number}", wait=0) for number in range(3)]
        for handle in handles:
            if handle.acquire():
                break
        handles.pop()
        handle.release()
        handle = lock("name")
        handle = handles = None
        with lock("name"), suppress(ZeroDivisionError), lock("other"):
            raise ZeroDivisionError
        [lock("name")].clear()
        assert (lambda: lock("name"))()
        assert "locks nothing" not in caplog.text

    @on_each_store
    def test_handles_and_leases_are_garbage_when_they_are_done(self):
        handle = lock("name")
        with handle as lease:
            pass
        handles, leases = weakref.ref(handle), weakref.ref(lease)
        del handle, lease
        with lock("other"):
            pass
        gc.collect()
        assert handles() is None
        assert leases() is None


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ttl": 0}, "ttl is 0. It is the number of seconds"),
            ({"ttl": -1}, "ttl is -1"),
            ({"ttl": None}, "ttl is None"),
            ({"ttl": "30"}, "ttl is '30'"),
            ({"ttl": True}, "ttl is True"),
            ({"ttl": float("inf")}, "ttl is inf"),
            ({"ttl": float("nan")}, "ttl is nan"),
            ({"wait": -1}, "wait is -1. It is the number of seconds to wait"),
            ({"wait": "5"}, "wait is '5'"),
            ({"max_hold": 0}, "max_hold is 0"),
            ({"min_hold": -1}, "min_hold is -1"),
            ({"min_hold": None}, "min_hold is None"),
            ({"on_lost": "explode"}, "on_lost is 'explode'; choose 'raise', 'log' or something to call"),
            ({"renew": "yes"}, "renew is 'yes'; choose True or False"),
            ({"on_unavailable": "retry"}, "on_unavailable is 'retry'; choose 'raise' (LockBackendError) or 'run'"),
            ({"label": 5}, "label is 5"),
        ],
    )
    def test_values_out_of_range_are_told_at_once(self, options, message):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            lock("name", **options)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("timeout", "has no option 'timeout': ttl or wait?"),
            ("blocking_timeout", "has no option 'blocking_timeout': ttl or wait?"),
            ("lock_timeout", "has no option 'lock_timeout': ttl=30 is"),
            ("on_busy", "has no option 'on_busy': it is one of @distributed_lock"),
            ("alias", "has no option 'alias': using="),
            ("tll", "has no option 'tll': The options are ttl, wait, max_waiters, renew"),
        ],
    )
    def test_unknown_options_are_told_with_advice(self, option, message):
        with pytest.raises(TypeError) as caught:
            lock("name", **{option: 5})
        assert message in str(caught.value)

    def test_errors_of_each_kind_are_told_apart(self):
        kinds = [LockNotAcquired, LockLost, LockBackendError, LockNotHeld, LockReentry]
        for kind in kinds:
            assert not any(issubclass(kind, other) for other in kinds if other is not kind)

    def test_repr_says_locked_or_not_without_asking_the_store(self, monkeypatch):
        handle = lock("name")
        assert repr(handle).startswith("<unlocked django_distlock.core.lock.Lock object 'name' using 'default' at 0x")
        with handle as lease:
            monkeypatch.setattr(locks["default"], "look", None)
            assert repr(handle).startswith("<locked ")
            assert lease.token not in repr(lease)
            assert "held" in repr(lease)

    def test_the_logger_is_named_after_the_package(self):
        from django_distlock.core.lease import logger

        assert logger is logging.getLogger("django_distlock")
        assert current_execution() is threading.current_thread()


def test_a_request_refuses_what_it_has_no_attribute_for():
    with pytest.raises(TypeError, match="has no speed"):
        lock_request().copy(speed=2)
