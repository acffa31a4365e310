"""KEY_PREFIX as a callable: whose lock it is, is asked once, when a handle acquires."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack

import pytest

from django_distlock import (
    InvalidLockBackend,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockReentry,
    adopt,
    assert_locked,
    current_lease,
    distributed_lock,
    lock,
    locks,
)
from django_distlock.core.forced import force_release
from django_distlock.testing import held_elsewhere, held_here, lose
from tests.support.leases import wait_for_renewal
from tests.support.tenants import NoTenant, asked, of_tenants, tenant, tenant_of_task
from tests.support.tools import backend_on, eventually, on_stores, queue_of, renewer_of

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem")


@pytest.fixture
def tenants(backend, settings):
    yield of_tenants(settings)
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)


def is_free(name, prefix):
    with tenant(prefix):
        return not lock(name).locked()


class TestOneAnswer:
    @on_each_store
    def test_it_is_asked_once_by_each_acquisition(self, tenants):
        handle = lock("order:1", ttl=3)
        assert asked == []
        with tenant("acme"), handle as lease:
            assert asked == ["acme"]
            assert lease.prefix == "acme"
            wait_for_renewal(lease)
            lease.renew()
        with tenant("globex"), handle as lease:
            assert lease.prefix == "globex"
        assert asked == ["acme", "globex"]

    @on_each_store
    def test_and_by_who_waits(self, tenants):
        entered = threading.Event()

        def wait():
            with tenant("acme"), lock("order:1", wait=60):
                entered.set()

        with tenant("acme"), lock("order:1"):
            waiter = threading.Thread(target=wait)
            waiter.start()
            eventually(lambda: queue_of(tenants).length("acme:order:1"))
            eventually(lambda: len(asked) == 2)
            with tenant("globex"), lock("order:1", wait=0):  # neither stands before the other
                pass
            assert not entered.is_set()
        waiter.join()
        assert entered.is_set()
        assert asked == ["acme", "acme", "globex"]

    @on_each_store
    def test_of_tasks(self, tenants):
        async def work(prefix):
            with tenant_of_task(prefix):
                async with lock("order:1", wait=0) as lease:
                    await both_inside.wait()
                    assert lease.prefix == prefix
                    assert await lock("order:1").alocked()

        async def work_of_both():
            await asyncio.gather(work("acme"), work("globex"))

        both_inside = asyncio.Barrier(2)
        asyncio.run(work_of_both())
        assert sorted(asked) == ["acme", "acme", "globex", "globex"]

    def test_what_it_raises_is_the_callers_error_and_nothing_is_left(self, tenants):
        for handle in (lock("order:1"), lock("order:1", wait=0)):
            with pytest.raises(NoTenant), handle:
                raise AssertionError("never reached")
            with pytest.raises(NoTenant):
                handle.acquire()
            with pytest.raises(NoTenant):
                handle.locked()
        with pytest.raises(NoTenant):
            asyncio.run(lock("order:1").aacquire())
        assert not [lease for lease in held_here() if lease.name == "order:1"]
        assert queue_of(tenants).queued() == []
        assert is_free("order:1", "acme")

    @pytest.mark.parametrize("answer", ["", 7, b"acme", "a:b", "a|b", "{a}", "a\n", "ä" * 51])
    def test_what_can_be_no_prefix_is_refused_and_names_the_setting(self, tenants, answer):
        told = r"DISTRIBUTED_LOCKS\['default'\]\['KEY_PREFIX'\] was asked and answered"
        with tenant(answer), pytest.raises(InvalidLockBackend, match=told):
            lock("order:1").acquire()

    def test_a_coroutine_is_no_answer(self, backend, settings):
        async def current():
            return "acme"

        made = current()
        of_tenants(settings, lambda: made)
        with pytest.raises(InvalidLockBackend, match="answered <coroutine"):
            lock("order:1").acquire()
        made.close()

    def test_any_callable(self, backend, settings):
        of_tenants(settings, lambda: "Köln-1.eu")
        with lock("order:1") as lease:
            assert lease.prefix == "Köln-1.eu"
            [info] = locks["default"].held()
        assert (info.name, info.prefix) == ("order:1", "Köln-1.eu")


class TestTwoTenantsInOneProcess:
    def test_a_lock_is_entered_again_by_its_tenant_alone(self, tenants):
        with tenant("acme"), lock("order:1", reentrant=True) as outer:
            with lock("order:1", reentrant=True) as lease:
                assert lease is outer
            with tenant("globex"), lock("order:1", reentrant=True, wait=0) as other:
                assert other is not outer
            with pytest.raises(LockReentry), lock("order:1"):
                raise AssertionError("never reached")
        assert is_free("order:1", "acme")

    def test_what_runs_under_a_lock_runs_under_that_of_its_tenant(self, tenants):
        with tenant("acme"), lock("order:1") as lease:
            assert_locked("order:1")
            assert current_lease("order:1") is lease
            with tenant("globex"):
                with pytest.raises(LockNotHeld):
                    assert_locked("order:1")
                with pytest.raises(LockNotHeld):
                    current_lease("order:1")
                assert current_lease() is lease
                with lock("order:1") as other:
                    assert current_lease("order:1") is other
            assert current_lease("order:1") is lease

    @on_each_store
    def test_a_release_wakes_those_of_its_tenant(self, tenants):
        """The local queue and the renewer know each lock by itself."""
        with ExitStack() as stack:
            for prefix in ("acme", "globex"):
                stack.enter_context(tenant(prefix))
                stack.enter_context(lock("order:1"))
            found = [renewer_of(tenants).of_lock(f"{prefix}:order:1") for prefix in ("acme", "globex")]
            assert [[lease.prefix for lease in leases] for leases in found] == [["acme"], ["globex"]]
        assert not renewer_of(tenants).of_lock("acme:order:1")

    def test_a_lease_is_released_as_what_it_is(self, tenants):
        handle = lock("order:1")
        with tenant("acme"):
            handle.acquire()
        with tenant("globex"), lock("order:1", wait=0):
            handle.release()
            assert is_free("order:1", "acme")
            assert not is_free("order:1", "globex")

    def test_a_loss_names_the_tenant(self, tenants, caplog):
        with tenant("acme"), pytest.raises(LockLost, match=r"'order:1' \(default, acme\)"), lock("order:1") as lease:
            lose(lease)
        assert "Lock 'order:1' (default, acme) was lost" in caplog.text

    def test_the_decorator_asks_when_it_is_called(self, tenants):
        @distributed_lock("order:{pk}", wait=0)
        def pay(pk):
            return current_lease().prefix

        with tenant("acme"), held_elsewhere("order:1"), tenant("globex"):
            assert pay(1) == "globex"
            with tenant("acme"), pytest.raises(LockNotAcquired, match=r"'order:1' \(default, acme\) is busy"):
                pay(1)


class TestWhatIsShown:
    @on_each_store
    def test_a_lock_that_was_shown_is_that_of_its_tenant(self, tenants):
        with tenant("acme"), lock("order:1", on_lost="log"):
            [info] = locks["default"].held()
            with tenant("globex"), lock("order:1") as other:
                asked.clear()
                assert lock(info).locked()
                assert lock(info).acquire(blocking=False) is False
                assert lock(info).force_release(by="test")
                assert not lock(info).locked()
                with lock(info, wait=0) as lease:
                    assert lease.prefix == "acme"
                assert not force_release(info, by="test")
                assert asked == []
                assert other.is_held
                assert not is_free("order:1", "globex")

    def test_somebody_elses_lock_in_a_test(self, tenants):
        with tenant("acme"), held_elsewhere("order:1") as info:
            assert info.prefix == "acme"
            with pytest.raises(LockNotAcquired), lock("order:1", wait=0):
                raise AssertionError("never reached")
            with tenant("globex"), lock("order:1", wait=0):
                pass
        assert is_free("order:1", "acme")


class TestHandOver:
    @on_each_store
    def test_an_adopted_lease_is_that_of_its_tenant(self, tenants):
        with tenant("acme"), lock("order:1") as lease:
            text = lease.detach()
        asked.clear()
        with tenant("globex"), adopt(text) as lease, lock("order:1", wait=0):
            assert lease.prefix == "acme"
            with pytest.raises(LockNotHeld, match=r"\(default, acme\) was adopted already"):
                adopt(text)
            lease.renew()
            assert not is_free("order:1", "acme")
        assert is_free("order:1", "acme")

    def test_both_processes_need_a_callable(self, backend, settings):
        with lock("order:1") as lease:
            text = lease.detach()
        of_tenants(settings)
        with pytest.raises(InvalidLockBackend, match="is a callable, but a text where this lease was detached"):
            adopt(text)
