"""``on_unavailable="run"``: who goes on without the lock when the store cannot be asked, and what it has then."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import threading

import pytest
from django.db import transaction

from django_distlock import (
    LockBackendError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockReentry,
    State,
    assert_locked,
    current_lease,
    lock,
    locks,
    signals,
)
from django_distlock.backends.redis.operations import ACQUIRE
from django_distlock.core.holds import ResponseRetainer
from django_distlock.testing import held_elsewhere, held_here, lose, store_down
from tests.support.interrupts import at_each_point
from tests.support.tools import GIVES_UP_SOON, backend_on, eventually, must_not_run, queue_of, renewer_of

backend = backend_on("redis", "postgres", "mariadb", "sqlite", "redlock")
queueing = backend_on("redis", "locmem", "postgres", "sqlite")

ALL_SIGNALS = ("lock_acquired", "lock_busy", "lock_released", "lock_lost", "lock_unavailable")


@pytest.fixture
def heard():
    """Names and arguments of all signals."""
    news = []
    receivers = {name: lambda _name=name, **about: news.append((_name, about)) for name in ALL_SIGNALS}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    yield news
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


def running(name="name", **options):
    return lock(name, on_unavailable="run", **options)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.usefixtures("locmem_locks")
class TestTheLease:
    def test_acquire_is_true_and_nothing_is_held(self, calls):
        handle = running("nobody's")
        with store_down():
            assert calls(handle).acquire() is True
            lease = handle.lease
            assert (lease.is_held, lease.fence, lease.remaining) == (False, 0, 0.0)
            assert (lease.name, lease.using, lease.state) == ("nobody's", "default", State.UNAVAILABLE)
            assert repr(lease) == """<Lease "nobody's" using 'default' fence=0 unavailable>"""
            assert repr(handle).startswith("<unlocked ")
            assert "nobody's" not in [held.name for held in held_here()]
            calls(handle).release()
        assert lease.state is State.RELEASED
        assert handle.lease is None

    def test_it_refuses_what_only_a_holder_may_do(self, calls):
        with store_down(), running() as lease:
            for act in (lease.ensure_held, calls(lease).renew, lease.detach):
                with pytest.raises(LockNotHeld, match='not held: its store could not be asked .* on_unavailable="run"'):
                    act()
            with pytest.raises(TypeError, match="belongs to the process that acquired it"):
                pickle.dumps(lease)

    def test_it_is_released_once(self, calls):
        handle = running()
        with store_down():
            calls(handle).acquire()
            lease = handle.lease
            calls(handle).release()
            for act in (calls(handle).release, calls(lease).release, lease.ensure_held):
                with pytest.raises(LockNotHeld):
                    act()

    def test_with_says_nothing_at_its_end(self):
        async def main():
            async with running(on_lost=must_not_run) as lease:
                assert lease.state is State.UNAVAILABLE
            return lease

        with store_down():
            with running(on_lost=must_not_run) as lease:
                assert lease.state is State.UNAVAILABLE
            assert (lease.state, asyncio.run(main()).state) == (State.RELEASED, State.RELEASED)
            with running() as lease:
                lease.release()
            with pytest.raises(ZeroDivisionError), running():
                raise ZeroDivisionError

    def test_the_store_is_asked_anew_each_time(self):
        handle = running(wait=0)
        with store_down(), handle as lease:
            assert not lease.is_held
        with handle as lease:
            assert lease.is_held
            assert lease.fence > 0
        assert not handle.locked()

    def test_a_handle_that_is_dropped_held_nothing(self, recwarn):
        with store_down():
            running().acquire()
            gc.collect()
        assert [warning for warning in recwarn if warning.category is ResourceWarning] == []

    def test_min_hold_keeps_nothing(self):
        with store_down(), running(min_hold=60):
            pass
        assert not lock("name").locked()

    def test_the_signal_and_the_warning(self, heard, caplog, calls):
        handle = running(label="prewarm")
        with store_down():
            calls(handle).acquire()
            lease = handle.lease
            calls(handle).release()
        [(signal, about)] = heard
        assert signal == "lock_unavailable"
        assert (about["sender"], about["name"], about["using"]) == (type(locks["default"]), "name", "default")
        assert about["lease"] is lease
        assert isinstance(about["error"], LockBackendError)
        [line] = [line for line in said(caplog) if "runs without" in line]
        assert line.startswith("prewarm (pid ")
        assert "runs without the lock 'name' (default): Lock backend 'default' does not answer" in line


@pytest.mark.usefixtures("locmem_locks")
class TestOnlyThen:
    def test_a_busy_lock_is_busy(self):
        with held_elsewhere("name"):
            assert running().acquire(blocking=False) is False
            with pytest.raises(LockNotAcquired), running(wait=0):
                must_not_run()

    def test_what_somebody_has_to_correct_is_raised(self, monkeypatch, calls):
        def refuse(*_, **__):
            error = LockBackendError("The password is wrong.")
            error.is_final = True
            raise error

        for method in ("acquire", "aacquire"):
            monkeypatch.setattr(locks["default"], method, refuse)
        with pytest.raises(LockBackendError, match="password"):
            calls(running()).acquire()

    def test_what_happens_to_a_lease_that_was_granted_is_told(self):
        down = store_down()
        try:
            with pytest.raises(LockBackendError), running() as lease:
                down.enable()
        finally:
            down.disable()
        assert lease.state is State.RELEASED
        with pytest.raises(LockLost), running() as lease:
            lose(lease)

    def test_others_are_told_as_ever(self, heard):
        with store_down(), pytest.raises(LockBackendError), lock("name"):
            must_not_run()
        [(signal, about)] = heard
        assert (signal, about["lease"]) == ("lock_unavailable", None)


@pytest.mark.usefixtures("locmem_locks")
class TestWhoHoldsIt:
    def test_code_that_demands_the_lock_is_told_that_it_is_not_held(self):
        with store_down(), running():
            with pytest.raises(LockNotHeld, match='on_unavailable="run"'):
                assert_locked("name")
            assert current_lease("name") is current_lease()
            assert not current_lease().is_held
        with pytest.raises(LockNotHeld, match="no lock"):
            current_lease()

    def test_the_context_reaches_as_far_as_with_a_lock(self):
        async def main():
            async with running() as lease:
                return lease, await asyncio.create_task(asyncio.to_thread(current_lease))

        with store_down():
            lease, found = asyncio.run(main())
        assert found is lease

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_who_is_in_without_the_lock_may_come_in_again(self, reentrant):
        handle = running(reentrant=reentrant)

        async def main():
            assert [await handle.aacquire() for _ in range(3)] == [True] * 3
            for _ in range(3):
                await handle.arelease()
            with pytest.raises(LockNotHeld):
                await handle.arelease()

        with store_down():
            assert [handle.acquire() for _ in range(3)] == [True] * 3
            for _ in range(3):
                handle.release()
            with pytest.raises(LockNotHeld):
                handle.release()
            with handle as outer, handle as inner:
                assert (outer.state, inner.state) == (State.UNAVAILABLE, State.UNAVAILABLE)
            asyncio.run(main())

    def test_a_store_that_is_back_is_asked_for_the_inner_one(self):
        down = store_down()
        down.enable()
        with running() as outer:
            down.disable()
            with running() as inner:
                assert inner.is_held
                assert_locked("name")
            assert not lock("name").locked()
            assert current_lease() is outer

    def test_who_holds_it_enters_again_and_holds_it(self, heard):
        with running(reentrant=True) as outer:
            heard.clear()
            with store_down(), running(reentrant=True) as inner:
                assert inner is outer
                assert_locked("name")
            assert outer.is_held
        assert [signal for signal, _ in heard] == ["lock_unavailable", "lock_released"]
        assert heard[0][1]["lease"] is outer

    def test_others_do_not_enter_what_is_not_theirs(self):
        def other():
            with running(reentrant=True) as lease:
                found.append(lease)

        found = []
        with running(reentrant=True) as mine, store_down():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert found != [mine]
        assert found[0].fence == 0

    def test_condition(self):
        """Its lock is given up while it is waited for, and taken again."""
        condition = threading.Condition(running())
        with store_down(), condition:
            assert condition.wait(0.01) is False


def test_on_each_store(backend, calls):
    handle = running()
    with store_down():
        assert calls(handle).acquire() is True
        assert (handle.lease.state, handle.lease.fence) == (State.UNAVAILABLE, 0)
        calls(handle).release()
    eventually(lambda: not renewer_of(backend).is_cleaning)
    assert not lock("name").locked()
    with running() as lease:
        assert lease.is_held


class TestTransactions:
    pytestmark = pytest.mark.django_db(transaction=True)

    def test_nothing_is_deferred(self, locmem_locks):
        with transaction.atomic():
            with store_down(), running() as lease:
                pass
            assert lease.state is State.RELEASED
            assert not lock("name").locked()

    def test_what_the_transaction_holds_is_entered_again(self, locmem_locks):
        with transaction.atomic():
            with running() as first:
                pass
            with store_down(), running() as again:
                assert again is first
                assert again.is_held
            assert lock("name").locked()
        assert not lock("name").locked()

    def test_refusals_come_first(self, locmem_locks):
        with store_down(), transaction.atomic(), pytest.raises(transaction.TransactionManagementError):
            running(in_atomic="refuse").acquire()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what is raised in a finalizer
@pytest.mark.parametrize("reentrant", [False, True])
def test_who_is_interrupted_is_not_in(locmem_locks, reentrant):
    def acquire(name):
        if reentrant:
            assert outer.acquire()
        with store_down():
            told.append(handle.acquire())

    outer, handle, told, points = lock("name", reentrant=True), running(reentrant=reentrant), [], 0
    for _, where in at_each_point(acquire, "core/lock.py", "core/acquire.py", "core/ungranted.py", "core/holds.py"):
        points += 1
        assert bool(handle.lease) == bool(told), where
        while told:
            told.pop()
            handle.release()
        with pytest.raises(LockNotHeld):
            handle.release()
        while outer.lease:
            outer.release()
    assert points > 20
    handle.release()
    if reentrant:
        outer.release()


def test_a_response_needs_no_lock(locmem_locks):
    with store_down(), running() as lease:
        retainer = ResponseRetainer(lease)
    assert lease.state is State.RELEASED
    retainer.release()


class TestNothingIsLeft:
    """S4: of a request that may have arrived."""

    def test_a_lock_that_was_granted_unheard_is_given_back_while_the_body_runs(self, proxied, proxy, calls, store):
        proxy.cut_reply(ACQUIRE.sha, times=2)
        handle = running(ttl=60)
        assert calls(handle).acquire() is True
        assert handle.lease.state is State.UNAVAILABLE
        eventually(lambda: store.keys("lock:*") == [])
        calls(handle).release()

    def test_a_command_that_arrives_during_the_body_takes_nothing(self, proxied, proxy, calls, store):
        proxy.delay(ACQUIRE.sha)
        proxy.delay(ACQUIRE.sha)
        handle = running(ttl=60)
        assert calls(handle).acquire() is True
        eventually(lambda: store.exists("lock|x:name"))
        proxy.deliver()
        assert store.keys("lock:*") == []
        with lock("name", wait=0) as other:
            assert other.is_held
            calls(handle).release()
            assert other.is_held
            assert lock("name").locked()

    @pytest.mark.seconds(4)
    def test_who_has_waited_leaves_its_place(self, queueing, calls, monkeypatch):
        """It waits on, because the store may be back before its time is over."""
        monkeypatch.setattr(queueing.timing, "retry_delay", 0.05)
        handle, down = running(wait=4), store_down()
        with held_elsewhere("name"):
            timer = threading.Thread(target=self._ends_while_waited_for, args=(down,))
            timer.start()
            try:
                assert calls(handle).acquire() is True
            finally:
                timer.join()
                down.disable()
            assert handle.lease.state is State.UNAVAILABLE
            eventually(lambda: queueing.count_waiters(["name"]) in ([0], [None]))
        calls(handle).release()

    def _ends_while_waited_for(self, down):
        eventually(lambda: queue_of(locks["default"]).length("name"))
        down.enable()


@GIVES_UP_SOON
def test_nothing_of_a_server_that_hangs_is_awaited_at_the_end(proxied, proxy, calls):
    handle = running(wait=0)
    proxy.hang = True
    assert calls(handle).acquire() is True
    calls(handle).release()
    assert handle.lease is None


def test_reentry_is_told_while_the_store_answers(locmem_locks):
    with running(), pytest.raises(LockReentry):
        running().__enter__()
