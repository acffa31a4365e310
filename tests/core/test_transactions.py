"""Locks and transactions: held to the end of the outermost one on every way out, and entered again meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import threading
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.core.signals import request_finished
from django.db import DatabaseError, IntegrityError, InterfaceError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase

from django_distlock import (
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockReentry,
    LockTimeout,
    current_lease,
    distributed_lock,
    lock,
    locks,
)
from django_distlock.backends.common.timing import Timing
from django_distlock.core.forced import force_release
from django_distlock.signals import lock_released
from django_distlock.testing import lose
from tests.support.leases import wait_for_renewal
from tests.support.tools import PATIENCE, aeventually, eventually, in_a_thread, on_stores, queue_of

on_each_store = on_stores("redis", "locmem")

LONG = 60  # seconds that no sound test waits


def real_transactions(tests):
    """On each kind of store, in transactions that are committed."""
    committed = pytest.mark.django_db(transaction=True, databases=["default", "other"])
    return pytest.mark.usefixtures("backend")(committed(tests))


def is_held(name="name"):
    return bool(list(locks["default"].held(name)))


def by_with(work, **options):
    with lock("name", **options):
        work()


def by_async_with(work, **options):
    async def body():
        async with lock("name", **options):
            await sync_to_async(work)()

    async_to_sync(body)()


def by_decorator(work, **options):
    distributed_lock("name", **options)(work)()


def by_async_decorator(work, **options):
    async def body():
        await sync_to_async(work)()

    async_to_sync(distributed_lock("name", **options)(body))()


@pytest.fixture
def closable(monkeypatch):
    """A connection whose ``close()`` does close it: Django does not close those to databases in memory."""
    other = connections["other"]
    with contextlib.closing(sqlite3.connect(other.settings_dict["NAME"], uri=True)):  # keeps the tables
        monkeypatch.setattr(other, "is_in_memory_db", lambda: False)
        yield other
        other.close()


@pytest.fixture(params=[by_with, by_async_with, by_decorator, by_async_decorator])
def guarded(request):
    """Runs its argument under the lock "name"."""
    return request.param


def nothing():
    pass


@real_transactions
class TestTheEndOfTheTransaction:
    @on_each_store
    def test_commit(self, guarded):
        with transaction.atomic():
            guarded(nothing)
            assert is_held()
        assert not is_held()

    @on_each_store
    def test_an_exception(self, guarded):
        with pytest.raises(ZeroDivisionError):
            with transaction.atomic():
                guarded(nothing)
                assert is_held()
                raise ZeroDivisionError
        assert not is_held()

    def test_an_exception_in_the_body(self, guarded):
        def fail():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            with transaction.atomic():
                try:
                    guarded(fail)
                finally:
                    assert is_held()
        assert not is_held()

    def test_set_rollback(self, guarded):
        with transaction.atomic():
            guarded(nothing)
            transaction.set_rollback(True)
            assert is_held()
        assert not is_held()

    def test_set_rollback_in_the_body(self, guarded):
        with transaction.atomic():
            guarded(lambda: transaction.set_rollback(True))
            assert is_held()
        assert not is_held()

    @pytest.mark.parametrize("savepoint", [True, False])
    def test_an_inner_block_is_not_the_end(self, guarded, savepoint):
        with transaction.atomic():
            with transaction.atomic(savepoint=savepoint):
                guarded(nothing)
            assert is_held()
        assert not is_held()

    @pytest.mark.parametrize("savepoint", [True, False])
    def test_the_rollback_of_an_inner_block_is_not_the_end(self, guarded, savepoint):
        with transaction.atomic():
            with contextlib.suppress(ZeroDivisionError), transaction.atomic(savepoint=savepoint):
                guarded(nothing)
                raise ZeroDivisionError
            assert is_held()
        assert not is_held()

    def test_nor_is_that_of_a_savepoint_by_hand(self, guarded):
        with transaction.atomic():
            savepoint = connection.savepoint()
            guarded(nothing)
            transaction.savepoint_rollback(savepoint)
            assert is_held()
        assert not is_held()

    def test_a_block_inside_the_body_is_not_around_it(self, guarded):
        def work():
            with transaction.atomic():
                pass

        guarded(work)
        assert not is_held()

    def test_a_durable_block(self, guarded):
        with transaction.atomic(durable=True):
            guarded(nothing)
            assert is_held()
        assert not is_held()

    def test_a_commit_that_fails(self, guarded, monkeypatch):
        with pytest.raises(IntegrityError):
            with transaction.atomic():
                guarded(nothing)
                monkeypatch.setattr(connection, "_commit", fail_with(IntegrityError("a deferred constraint")))
        assert not is_held()

    def test_a_rollback_that_fails(self, guarded, closable, monkeypatch):
        with pytest.raises(ZeroDivisionError):
            with transaction.atomic(using="other"):
                guarded(nothing)
                monkeypatch.setattr(closable, "_rollback", fail_with(DatabaseError("gone")))
                raise ZeroDivisionError
        assert not is_held()

    def test_a_commit_that_fails_without_rollback_ends_with_the_request(self, guarded, monkeypatch):
        """Django rolls back on DatabaseError only."""
        with pytest.raises(InterfaceError):
            with transaction.atomic():
                guarded(nothing)
                monkeypatch.setattr(connection, "_commit", fail_with(InterfaceError("closed")))
        assert is_held()
        request_finished.send(sender=None)
        assert not is_held()

    def test_other_hooks_stay_when_leftovers_are_dropped(self, monkeypatch):
        with transaction.atomic():
            transaction.on_commit(nothing)
            by_with(nothing)
            request_finished.send(sender=None)
            assert is_held()
            assert len(connection.run_on_commit) == 2
        assert not is_held()

    def test_each_of_several_locks(self, guarded):
        with transaction.atomic():
            guarded(nothing)
            with lock("name:2"):
                pass
            assert {info.name for info in locks["default"].held()} == {"name", "name:2"}
        assert not is_held()

    def test_manual_transactions_have_no_end_that_could_be_seen(self, guarded):
        transaction.set_autocommit(False)
        try:
            guarded(nothing)
            assert not is_held()
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)

    @pytest.mark.parametrize("end", [transaction.commit, transaction.rollback])
    def test_nor_have_blocks_inside_of_them(self, guarded, end):
        """The end of the block is no COMMIT, and Django runs no hooks at the COMMIT that follows."""
        transaction.set_autocommit(False)
        try:
            with transaction.atomic():
                guarded(nothing)
                assert not is_held()
                guarded(nothing)
            assert not is_held()
            end()
            assert connection.run_on_commit == []
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)

    def test_a_manual_transaction_beside_one_that_has_an_end(self, guarded):
        transaction.set_autocommit(False, using="other")
        try:
            with transaction.atomic(using="other"), transaction.atomic():
                guarded(nothing)
                assert is_held()
            assert not is_held()
        finally:
            transaction.rollback(using="other")
            transaction.set_autocommit(True, using="other")

    def test_the_signal_is_sent_once_and_then(self, guarded):
        seen = []

        def note(name, **_):
            seen.append(name)

        lock_released.connect(note)
        try:
            with transaction.atomic():
                guarded(nothing)
                assert seen == []
            assert seen == ["name"]
        finally:
            lock_released.disconnect(note)


def fail_with(error):
    def fail():
        raise error

    return fail


@real_transactions
class TestConnections:
    def test_a_closed_connection_has_no_transaction_left(self, guarded, closable):
        with transaction.atomic(using="other"):
            guarded(nothing)
            assert is_held()
            closable.close()
            assert not is_held()

    def test_closed_in_the_body(self, guarded, closable):
        with transaction.atomic(using="other"):
            guarded(closable.close)
            assert not is_held()

    @pytest.mark.parametrize("aliases", [("default", "other"), ("other", "default")])
    def test_of_several_databases_the_last_to_end_counts(self, guarded, aliases):
        with transaction.atomic(using=aliases[0]):
            with transaction.atomic(using=aliases[1]):
                guarded(nothing)
            assert is_held()
        assert not is_held()

    def test_only_those_that_were_open_at_the_end_of_the_body_count(self, guarded):
        with transaction.atomic(using="other"):
            guarded(nothing)
            with transaction.atomic():
                pass
            assert is_held()
        assert not is_held()

    def test_a_database_opened_inside_the_body_and_still_open_after_it(self):
        with contextlib.ExitStack() as later:
            with lock("name"):
                later.enter_context(transaction.atomic())
            assert is_held()
        assert not is_held()

    @on_each_store
    def test_a_thread_that_ends_inside_a_transaction(self):
        """Its connection is collected with it."""

        def work():
            transaction.atomic(using="other").__enter__()
            by_with(nothing)
            connections["other"].connection.close()  # SQLite warns of connections that are collected open

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        gc.collect()
        eventually(lambda: not is_held())


@real_transactions
class TestThreadsAndTasks:
    @on_each_store
    def test_async_code_of_a_transaction_in_a_thread_of_an_event_loop(self, guarded):
        """As plain views under ASGI."""

        def work():
            with transaction.atomic():
                guarded(nothing)
                guarded(nothing)
                held.append(is_held())
            held.append(is_held())

        held = []
        asyncio.run(sync_to_async(work)())
        assert held == [True, False]

    @on_each_store
    def test_a_task_that_outlives_the_call_that_began_it(self):
        async def later():
            await over.wait()
            async with lock("name"):
                return is_held()

        async def begin():
            return asyncio.create_task(later())

        async def main():
            nonlocal over
            over = asyncio.Event()
            task = await sync_to_async(async_to_sync(begin))()
            over.set()
            return await task

        over = None
        assert asyncio.run(main())
        assert not is_held()

    @on_each_store
    def test_an_async_body_that_is_cancelled(self):
        async def body():
            async with lock("name"):
                raise asyncio.CancelledError

        with transaction.atomic():
            with pytest.raises(asyncio.CancelledError):
                async_to_sync(body)()
            assert is_held()
        assert not is_held()


@real_transactions
class TestCancelledAtTheEndOfTheBody:
    """While the thread that has the transaction is busy, so that it cannot hold the lock for that yet."""

    @staticmethod
    async def leave(is_over=None):
        """Returns when the body has ended and its task was cancelled."""
        left, busy, done = asyncio.Event(), threading.Event(), threading.Event()

        async def body():
            async with lock("name"):
                other = asyncio.create_task(sync_to_async(lambda: (busy.set(), done.wait(PATIENCE)))())
                await aeventually(busy.is_set)
                left.set()
            pytest.fail("the thread was not busy")
            return other

        task = asyncio.create_task(body())
        await left.wait()
        task.cancel()
        if is_over is None:
            with pytest.raises(asyncio.CancelledError):
                await task
        done.set()

    @on_each_store
    def test_it_is_held_to_the_commit(self):
        with transaction.atomic():
            async_to_sync(self.leave)()
            time.sleep(0.2)
            assert is_held()
        assert not is_held()

    @on_each_store
    def test_it_is_held_to_the_rollback(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            async_to_sync(self.leave)()
            time.sleep(0.2)
            assert is_held()
            raise ZeroDivisionError
        assert not is_held()

    @on_each_store
    def test_a_task_that_is_cancelled_with_its_loop(self):
        with transaction.atomic():
            async_to_sync(self.leave)(is_over=True)
            time.sleep(0.2)
            assert is_held()
        assert not is_held()

    @on_each_store
    def test_outside_of_transactions_it_is_freed(self):
        async_to_sync(self.leave)()
        eventually(lambda: not is_held())


@real_transactions
class TestHooks:
    def test_run_after_the_lock_is_free(self, guarded):
        seen = []
        with transaction.atomic():
            transaction.on_commit(lambda: seen.append(is_held()))
            guarded(nothing)
            transaction.on_commit(lambda: seen.append(is_held()))
        assert seen == [False, False]

    @pytest.mark.parametrize("using", ["default", "other"])
    @pytest.mark.parametrize("options", [{}, {"durable": True}], ids=["plain", "durable"])
    def test_also_those_of_inner_blocks(self, guarded, using, options):
        seen = []

        def hook():
            transaction.on_commit(lambda: seen.append(is_held()), using=using)

        with transaction.atomic(using=using, **options):
            savepoint = connections[using].savepoint()
            with transaction.atomic(using=using):
                hook()
                guarded(hook)
            transaction.savepoint_commit(savepoint, using=using)
            with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=using):
                hook()
                guarded(hook)
                raise ZeroDivisionError
            with transaction.atomic(using=using, savepoint=False):
                guarded(hook)
                hook()
        assert seen == [False] * 4

    def test_of_several_databases_those_of_the_last_to_end(self, guarded):
        """The lock is held for that one when the others run theirs."""
        seen = []
        with transaction.atomic():
            transaction.on_commit(lambda: seen.append(is_held()))
            with transaction.atomic(using="other"):
                transaction.on_commit(lambda: seen.append(is_held()), using="other")
                guarded(nothing)
        assert seen == [True, False]

    def test_also_when_the_lock_was_lost(self, guarded, caplog):
        seen = []
        with transaction.atomic():
            guarded(nothing)
            [info] = locks["default"].held()
            assert force_release(info, by="the test")
            transaction.on_commit(lambda: seen.append(is_held()))
        assert seen == [False]
        assert "was lost" in caplog.text

    def test_also_when_the_release_fails(self, valkey_locks, store, caplog):
        seen = []
        try:
            with transaction.atomic():
                by_with(nothing)
                store.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
                transaction.on_commit(lambda: seen.append("has run"))
        finally:
            store.execute_command("ACL", "SETUSER", "default", "+@all")
        assert seen == ["has run"]
        assert "no permissions" in caplog.text
        eventually(lambda: not is_held())

    def test_one_that_raises_does_not_keep_it(self, guarded):
        with pytest.raises(ZeroDivisionError) as kept:
            with transaction.atomic():
                transaction.on_commit(fail_with(ZeroDivisionError()))
                guarded(nothing)
        assert not is_held()
        assert kept.value.__traceback__  # with the frames that had the hooks

    def test_they_may_take_the_lock_themselves(self, guarded):
        with transaction.atomic():
            guarded(nothing)
            transaction.on_commit(lambda: guarded(nothing))
        assert not is_held()


@real_transactions
class TestWhilePending:
    @on_each_store
    def test_others_wait_for_the_commit(self, guarded):
        order = []

        def other():
            with lock("name", wait=20):
                order.append("other")

        with transaction.atomic():
            guarded(nothing)
            thread = threading.Thread(target=other)
            thread.start()
            with pytest.raises(LockNotAcquired):
                in_a_thread(lambda: lock("name", wait=0).__enter__())
            order.append("commit")
        thread.join()
        assert order == ["commit", "other"]

    def test_the_same_transaction_enters_again(self, guarded):
        fences = []

        def note():
            fences.append(next(iter(locks["default"].held())).fence)

        with transaction.atomic():
            guarded(note)
            with transaction.atomic():
                guarded(note)
            guarded(note)
            assert is_held()
        assert len(fences) == 3
        assert len(set(fences)) == 1
        assert not is_held()

    @on_each_store
    @pytest.mark.parametrize("stranger_comes_first", [False, True])
    def test_its_tasks_enter_one_after_the_other(self, backend, monkeypatch, stranger_comes_first):
        """Each when the one before has left, whoever else waits for the end of the transaction."""
        monkeypatch.setattr(Timing, "look_interval", LONG)
        inside = asyncio.Event()
        others = []

        def other():
            with lock("name", wait=LONG):
                others.append(is_open)

        async def work(position):
            if position:
                await inside.wait()
            async with lock("name", wait=LONG):
                inside.set()
                if position == 0:
                    if stranger_comes_first:
                        stranger.start()
                    await aeventually(lambda: queue_of(backend).length("name") == 2 + stranger_comes_first)

        async def body():
            await asyncio.gather(*map(work, range(3)))

        stranger = threading.Thread(target=other)
        began = time.monotonic()
        with transaction.atomic():
            is_open = True
            async_to_sync(body)()
            is_open = False
        if stranger_comes_first:
            stranger.join(LONG)
            assert others == [False]
        assert time.monotonic() - began < LONG / 2

    def test_explicit_acquire_and_release_give_back_no_more_than_they_took(self, guarded):
        mutex = lock("name")
        with transaction.atomic():
            guarded(nothing)
            assert mutex.acquire()
            mutex.release()
            assert is_held()
        assert not is_held()

    def test_entered_again_it_is_not_entered_twice(self, guarded):
        """While a body runs it is the body's, as outside of transactions."""

        async def twice():
            async with lock("name"), lock("name"):
                pass

        with transaction.atomic():
            guarded(nothing)
            with pytest.raises(LockReentry), lock("name"), lock("name"):
                pass
            with pytest.raises(LockReentry):
                async_to_sync(twice)()
            assert is_held()
        assert not is_held()

    def test_reentrant_locks(self):
        with transaction.atomic():
            with lock("name", reentrant=True), lock("name", reentrant=True):
                pass
            assert is_held()
        assert not is_held()

    def test_a_body_that_outlives_the_transaction_keeps_the_lock(self):
        with contextlib.ExitStack() as later:
            with transaction.atomic():
                by_with(nothing)
                later.enter_context(lock("name"))
            assert is_held()
        assert not is_held()

    def test_a_later_transaction_is_another_one(self, guarded):
        for _ in range(3):
            with transaction.atomic():
                guarded(nothing)
            assert not is_held()
        assert connection.run_on_commit == []

    def test_it_is_renewed(self, guarded):
        with transaction.atomic():
            guarded(nothing, ttl=6)
            [lease] = locks.leases()
            wait_for_renewal(lease)
            assert is_held()
        assert not is_held()

    def test_an_explicit_release_of_the_lease_is_immediate(self):
        with transaction.atomic():
            with lock("name") as lease:
                pass
            lease.release()
            assert not is_held()
            with lock("name") as other:
                pass
            assert other.fence > lease.fence
            assert is_held()
        assert not is_held()
        with pytest.raises(LockNotHeld):
            lease.release()

    def test_an_explicit_release_of_the_lock_is_immediate(self):
        mutex = lock("name")
        with transaction.atomic():
            assert mutex.acquire()
            mutex.release()
            assert not is_held()

    def test_lost_before_the_end_of_the_body_it_rolls_back(self, guarded):
        with pytest.raises(LockLost):
            with transaction.atomic():
                guarded(lambda: (Group.objects.create(name="lost"), lose(current_lease())))
        assert not Group.objects.exists()

    def test_lost_while_pending_it_is_logged(self, guarded, caplog):
        with transaction.atomic():
            guarded(nothing, ttl=1, renew=False)
            eventually(lambda: "was lost: its TTL ran out" in caplog.text)

    def test_freed_by_others_while_pending_it_is_logged(self, guarded, caplog):
        with transaction.atomic():
            guarded(nothing, renew=False)
            lock("name").force_release(by="an operator")
        assert "was lost" in caplog.text

    def test_min_hold_counts_from_the_grant(self, guarded):
        with transaction.atomic():
            guarded(nothing, min_hold=0.4)
        assert is_held()
        eventually(lambda: not is_held())


@real_transactions
@pytest.mark.parametrize("stands", [False, True], ids=["of_a_new_connection", "of_one_that_stood"])
def test_of_a_task_that_uses_the_database_itself(monkeypatch, stands):
    """Which Django allows in notebooks. Such a connection belongs to the task."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def main():
        if stands:
            Group.objects.count()
            async with lock("name"):
                pass
        with transaction.atomic():
            async with lock("name"):
                pass
            assert is_held()
        assert not is_held()
        connection.connection.close()  # Django keeps those to databases in memory

    asyncio.run(main())


@real_transactions
class TestChoices:
    def test_refuse_raises_before_the_lock_is_asked_for(self, guarded):
        with transaction.atomic(using="other"):
            with pytest.raises(TransactionManagementError, match=r"'name' \(default\).*of the database 'other'"):
                guarded(pytest.fail, in_atomic="refuse")
            assert not is_held()

    def test_refuse_outside_is_no_matter(self, guarded):
        seen = []
        guarded(lambda: seen.append(is_held()), in_atomic="refuse")
        assert seen == [True]

    def test_refuse_counts_for_acquire(self):
        with transaction.atomic(), pytest.raises(TransactionManagementError):
            lock("name", in_atomic="refuse").acquire()

    def test_ignore_frees_at_once(self, guarded):
        with transaction.atomic():
            guarded(nothing, in_atomic="ignore")
            assert not is_held()

    def test_another_word_is_an_error(self):
        with pytest.raises(ValueError, match="in_atomic is 'wait'; choose 'defer'.*'refuse'.*or 'ignore'"):
            lock("name", in_atomic="wait")


class TestInsideTestCase(TestCase):
    """The blocks of TestCase itself are no transaction of the program's."""

    databases = ("default", "other")

    @classmethod
    def setUpTestData(cls):
        by_with(nothing)
        assert not is_held()

    def test_outside_of_the_programs_blocks_it_is_freed_at_once(self):
        for guarded in (by_with, by_async_with):
            guarded(nothing)
            assert not is_held()
            guarded(nothing, in_atomic="refuse")

    def test_inside_them_it_is_held_to_the_end_of_the_outermost(self):
        for guarded in (by_with, by_async_with):
            for savepoint in (True, False):
                with transaction.atomic(savepoint=savepoint):
                    with transaction.atomic():
                        guarded(nothing)
                        guarded(nothing)
                        with pytest.raises(LockNotAcquired):
                            in_a_thread(lambda: lock("name", wait=0).__enter__())
                    assert is_held()
                assert not is_held()

    def test_rolled_back(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            with contextlib.suppress(ZeroDivisionError), transaction.atomic():
                by_with(nothing)
                raise ZeroDivisionError
            assert is_held()
            raise ZeroDivisionError
        assert not is_held()

    def test_durable_blocks_are_still_recognised(self):
        with transaction.atomic(durable=True):
            by_with(nothing)
            with pytest.raises(RuntimeError, match="durable"), transaction.atomic(durable=True):
                pass
            assert is_held()
        assert not is_held()

    def test_several_databases(self):
        with transaction.atomic(), transaction.atomic(using="other"):
            by_with(nothing)
            assert is_held()
        assert not is_held()

    def test_captured_hooks(self):
        with self.captureOnCommitCallbacks() as hooks, transaction.atomic():
            transaction.on_commit(nothing)
            by_with(nothing)
        assert hooks == [nothing]

    async def test_async_tests(self):
        async with lock("name"):
            pass
        assert [info async for info in locks["default"].aheld()] == []


class TestInsideTransactionTestCase(TransactionTestCase):
    def test_it_is_held_to_the_commit(self):
        with transaction.atomic():
            by_with(nothing)
            assert is_held()
        assert not is_held()


@pytest.mark.parametrize("options", [{}, {"in_atomic": "refuse"}])
def test_a_task_does_not_wait_longer_than_told_for_a_busy_thread_that_waits_for_it(locmem_locks, options):
    async def main():
        async def busy():
            await sync_to_async(done.wait)(PATIENCE)

        done, occupied = threading.Event(), asyncio.create_task(busy())
        await asyncio.sleep(0.05)
        try:
            handle = lock("name", **options)
            if taken := await handle.aacquire(blocking=False):
                await handle.arelease()
            return taken
        finally:
            assert not occupied.done()
            done.set()
            await occupied

    if options:
        with pytest.raises(LockTimeout, match="inside a transaction.* is not known"):
            async_to_sync(main)()
    else:
        assert async_to_sync(main)() is True
