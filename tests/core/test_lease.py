"""A lease: how long it is kept, how it is renewed meanwhile, and how its end is told. On each kind of store."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import pickle
import threading
import time

import pytest

from django_distlock import (
    LockBackendError,
    LockLost,
    LockNotAcquired,
    State,
    adopt,
    lock,
    locks,
)
from django_distlock.testing import alose, lose
from tests.support.leases import hold_elsewhere, request_of, wait_for_renewal
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request, on_stores, renewer_of

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "postgres", "sqlite")

pytestmark = pytest.mark.usefixtures("backend")


class TestTimes:
    @on_each_store
    def test_a_lease_is_renewed_while_it_is_held(self):
        with lock("name", ttl=6) as lease:
            wait_for_renewal(lease)
            lease.ensure_held()
            assert lock("name").locked()
        assert not lock("name").locked()

    def test_a_blocked_event_loop_loses_no_lease(self):
        async def main():
            async with lock("name", ttl=6) as lease:
                wait_for_renewal(lease)  # meanwhile the loop is blocked
                lease.ensure_held()

        asyncio.run(main())

    @on_each_store
    def test_without_renewal_the_ttl_is_all_there_is(self, heard, caplog):
        with pytest.raises(LockLost), lock("heard", ttl=0.5, renew=False) as lease:
            eventually(lambda: lease.state is State.LOST)
            assert lease.remaining == 0
            with pytest.raises(LockLost) as caught:
                lease.ensure_held()
            assert caught.value.lease is lease
            elsewhere = pickle.loads(pickle.dumps(caught.value))
            assert (str(elsewhere), elsewhere.lease) == (str(caught.value), None)
            eventually(lambda: len(heard) == 2)
        name, about = heard[-1]
        assert (name, about["name"], about["lease"], about["reason"]) == (
            "lock_lost",
            "heard",
            lease,
            "its TTL ran out",
        )
        eventually(lambda: "was lost: its TTL ran out" in caplog.text)

    @on_each_store
    def test_the_local_deadline_comes_before_the_stores(self):
        """S1: the holder stops believing before anybody else can be granted the lock."""
        with lock("name", ttl=10) as lease:
            assert lease.remaining < locks["default"].look(["name"])[0][0].remaining

    def test_max_hold_does_not_bound_what_the_holder_asks_for(self):
        with lock("name", ttl=5, max_hold=6) as lease:
            lease.renew(ttl=60)
            assert lease.remaining > 30
            assert locks["default"].look(["name"])[0][0].remaining > 30

    def test_max_hold_ends_renewal_with_a_warning(self, caplog):
        began = time.monotonic()
        with pytest.raises(LockLost), lock("name", ttl=1, max_hold=1.5) as lease:
            eventually(lambda: lease.state is State.LOST)
            took = time.monotonic() - began
        assert took > 1.2
        assert "reaches its max_hold of 1.5 s" in caplog.text
        eventually(lambda: not lock("name").locked())

    @on_each_store
    def test_min_hold_keeps_the_lock_taken_after_its_release(self):
        with lock("name", min_hold=1.5):
            pass
        assert lock("name").locked()
        assert lock("name").acquire(blocking=False) is False
        with pytest.raises(LockNotAcquired, match=r"rests for the min_hold of .*, which took it at .*; \d\.\d s left$"):
            lock("name", wait=0).__enter__()
        eventually(lambda: not lock("name").locked())

    def test_min_hold_that_has_passed_frees_at_once(self):
        with lock("name", min_hold=0.05):
            time.sleep(0.06)
        assert not lock("name").locked()

    @on_each_store
    def test_a_lease_is_renewed_by_hand(self, calls):
        with lock("name", ttl=5, renew=False) as lease:
            calls(lease).renew(60)
            assert 58 < lease.remaining <= 60
            calls(lease).renew(1)
            assert lease.remaining > 50
            with pytest.raises(ValueError, match="ttl is 0"):
                calls(lease).renew(0)

    @on_each_store
    def test_renewing_a_lost_lease_by_hand_says_so(self, calls):
        with pytest.raises(LockLost), lock("name") as lease:
            locks["default"].release(request_of(lease))
            with pytest.raises(LockLost):
                calls(lease).renew()
            assert lease.state is State.LOST

    @on_each_store
    def test_a_lease_that_another_freed_is_told_lost_by_its_renewal(self, caplog):
        with pytest.raises(LockLost), lock("name", ttl=2) as lease:
            locks["default"].release(request_of(lease))
            eventually(lambda: lease.state is State.LOST)
        eventually(lambda: "the store no longer knows it" in caplog.text)


def hold_elsewhere_or_busy():
    """The lock is taken, by the lost lease still or by another owner."""
    other = lock_request(ttl=60)
    locks["default"].acquire(other, queue=False)
    return other


class TestRenewalOnItsWay:
    """A renewal whose answer comes after the lease has ended changes nothing."""

    @pytest.fixture
    def renewal(self, monkeypatch):
        """The next renewal stops until told to go on; then it is answered, or fails."""
        backend, inside, go_on = locks["default"], threading.Event(), threading.Event()
        ask = backend.renew

        def slow(wanted, *, timeout=None):
            answer = ask(wanted)
            if not inside.is_set():
                inside.set()
                go_on.wait(10)
                if slow.fails:
                    raise LockBackendError("cut")
            return answer

        slow.fails, slow.inside, slow.go_on = False, inside, go_on
        monkeypatch.setattr(backend, "renew", slow)
        yield slow
        go_on.set()

    @pytest.mark.parametrize("fails", [True, False])
    def test_a_released_lease_stays_released(self, renewal, fails):
        renewal.fails = fails
        with lock("name", ttl=6) as lease:
            assert renewal.inside.wait(PATIENCE)
            lease.release()
            renewal.go_on.set()
            other = lock("name", wait=0)
            assert other.acquire()
            time.sleep(0.05)
            assert lease.state is State.RELEASED
            other.release()

    def test_a_dropped_handle_is_renewed_no_more(self, renewal):
        handle = lock("name", ttl=0.6)
        handle.acquire()
        assert renewal.inside.wait(10)
        with pytest.warns(ResourceWarning):
            del handle
            gc.collect()
        renewal.go_on.set()
        eventually(lambda: not lock("name").locked(), 5)

    def test_a_lease_lost_by_the_local_clock_is_not_entered_again(self, renewal):
        with pytest.raises(LockLost), lock("name", ttl=0.6, reentrant=True) as lease:
            assert renewal.inside.wait(10)
            eventually(lambda: lease.state is State.LOST)
            renewer_of(locks["default"])  # still keeps the lease: its thread waits for the answer
            other = hold_elsewhere_or_busy()
            with pytest.raises(LockNotAcquired), lock("name", wait=0, reentrant=True):
                pytest.fail("the body ran")
            locks["default"].release(other)
            renewal.go_on.set()


class TestLateRenewal:
    def test_of_a_slow_store_is_told(self, monkeypatch, caplog):
        ask = locks["default"].renew

        def slow(wanted, *, timeout=None):
            time.sleep(0.4)
            return ask(wanted)

        monkeypatch.setattr(locks["default"], "renew", slow)
        with lock("name", ttl=2):
            eventually(lambda: "took 0." in caplog.text)
        assert "to renew 1 lock(s), much of the TTL of 2 s of 'name'" in caplog.text

    def test_of_a_thread_that_did_not_run_is_told(self, caplog):
        with lock("name", ttl=3, on_lost="log"):
            ctypes.PyDLL(None).sleep(2)  # keeps Python's lock, so that no other thread runs
            eventually(lambda: "begins late, that of 'name' by" in caplog.text)


class TestABackendThatMisbehaves:
    def test_renewal_ends_a_lease_also_where_a_backend_changed_the_token_of_its_request(self, monkeypatch):
        def draw_another(wanted, *, timeout=None):
            for one, _ in wanted:
                one.replace_token()
            return [False] * len(wanted)

        monkeypatch.setattr(locks["default"], "renew", draw_another)
        with lock("name", ttl=0.3, on_lost="log") as lease:
            eventually(lambda: lease not in renewer_of(locks["default"]).leases())
            assert lease.state is State.LOST

    def test_renewal_survives_errors_that_no_backend_should_raise(self, monkeypatch, caplog):
        asked = []

        def broken(wanted, *, timeout=None):
            asked.append(wanted)
            raise ZeroDivisionError

        monkeypatch.setattr(locks["default"], "renew", broken)
        with pytest.raises(LockLost), lock("name", ttl=1) as lease:
            eventually(lambda: lease.state is State.LOST)
        assert 1 <= len(asked) < 10
        assert "it tries again" in caplog.text

    def test_one_request_that_cannot_be_given_back_keeps_no_other_waiting(self, monkeypatch):
        give_back = locks["default"].release

        def refusing(lock_request, cooldown=0.0):
            if lock_request.name == "refused":
                raise LockBackendError("no")
            return give_back(lock_request, cooldown)

        refused, other = hold_elsewhere("refused", ttl=2), hold_elsewhere("other")
        monkeypatch.setattr(locks["default"], "release", refusing)
        renewer = renewer_of(locks["default"])
        renewer.release_in_background(refused)
        renewer.release_in_background(other)
        eventually(lambda: not lock("other").locked(), 5)
        monkeypatch.undo()
        eventually(lambda: not renewer.is_cleaning)

    def test_min_hold_counts_also_when_the_release_is_finished_later(self, monkeypatch):
        give_back, failures = locks["default"].release, [LockBackendError("blip")]

        def flaky(lock_request, cooldown=0.0):
            if failures:
                raise failures.pop()
            return give_back(lock_request, cooldown)

        handle = lock("name", ttl=60, min_hold=30)
        handle.acquire()
        monkeypatch.setattr(locks["default"], "release", flaky)
        with pytest.raises(LockBackendError):
            handle.release()
        eventually(lambda: locks["default"].look(["name"])[0][0].resting)
        assert 20 < locks["default"].look(["name"])[0][0].remaining <= 30

    def test_a_store_slower_than_the_ttl_is_an_error_and_no_endless_loop(self, monkeypatch):
        ask = locks["default"].acquire

        def slow(lock_request, *, queue):
            answer = ask(lock_request, queue=queue)
            time.sleep(0.06)
            return answer

        monkeypatch.setattr(locks["default"], "acquire", slow)
        with pytest.raises(LockBackendError, match="so slowly that its TTL of 0.05 s has passed"):
            lock("name", ttl=0.05).acquire(blocking=False)
        monkeypatch.undo()
        assert not lock("name").locked()

    def test_without_a_thread_for_renewal_the_lease_still_ends(self, monkeypatch, caplog):
        start = threading.Thread.start

        def failing(thread):
            if thread.name.startswith("distlock-renewal"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", failing)
        with pytest.raises(LockLost), lock("name", ttl=0.3) as lease:
            eventually(lambda: lease.state is State.LOST)
            monkeypatch.undo()
        assert "distlock-renewal-default cannot be started" in caplog.text


class TestACallableForTheLoss:
    @pytest.fixture
    def told(self):
        return []

    def test_gets_the_error_at_the_end_of_with(self, told):
        with lock("name", on_lost=told.append) as lease:
            lose(lease)
            assert told == []
        [problem] = told
        assert isinstance(problem, LockLost)

    def test_of_async_with(self, told):
        async def main():
            async with lock("name", on_lost=told.append) as lease:
                await alose(lease)

        asyncio.run(main())
        assert len(told) == 1

    def test_also_if_the_body_raised(self, told):
        with pytest.raises(ZeroDivisionError), lock("name", on_lost=told.append) as lease:
            lose(lease)
            raise ZeroDivisionError
        assert len(told) == 1

    def test_is_not_asked_for_what_was_not_lost(self, told):
        with lock("name", on_lost=told.append):
            pass
        assert told == []

    def test_stays_behind_when_the_lease_goes_to_another_process(self, told):
        handle = lock("name", on_lost=told.append)
        handle.acquire()
        text = handle.lease.detach()
        with pytest.raises(LockLost), adopt(text) as adopted:
            lose(adopted)
        assert told == []
