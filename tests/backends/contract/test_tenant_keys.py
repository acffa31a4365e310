"""A callable KEY_PREFIX on every store: equal names of two tenants are two locks, and each sees its own."""

from __future__ import annotations

import gc

import pytest

from django_distlock import lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.optional import RunsBackend
from django_distlock.runs import LastRun
from django_distlock.types import Grant, Holder, LockInfo, LockRequest, Slot
from django_distlock.utils.clock import wall_clock
from tests.support.tenants import asked, of_tenants, tenant
from tests.support.tools import PATIENCE, backend_on, eventually, locked_names, renewer_of

backend = backend_on("redis", "cluster", "redlock", "postgres", "mariadb", "sqlite", "zookeeper", "locmem")


@pytest.fixture
def tenants(backend, settings):
    return of_tenants(settings)


def request_of(prefix, name="order:1"):
    return LockRequest(name, 4 * PATIENCE, Holder.here("test"), prefix=prefix)


def test_equal_names_are_two_locks(tenants, calls):
    backend, (acme, globex) = calls(tenants), (request_of(one) for one in ("acme", "globex"))
    first, second = backend.acquire(acme, queue=False), backend.acquire(globex, queue=False)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    busy = backend.acquire(request_of("acme"), queue=False)
    assert (busy.name, busy.prefix, busy.token) == ("order:1", "acme", acme.token)
    assert backend.renew([(acme, 4 * PATIENCE), (globex, 4 * PATIENCE)]) == [True, True]
    assert backend.release(acme)
    assert not backend.release(acme)
    with tenant("globex"):
        [[info]] = backend.look(["order:1"])
    assert info.token == globex.token
    assert backend.release(globex)
    assert asked == ["globex"]  # by the look alone


def test_each_sees_its_own_locks(tenants, calls):
    backend = calls(tenants)
    held = {(prefix, name): request_of(prefix, name) for prefix in ("acme", "acme2") for name in ("a:1", "a:2", "b")}
    for one in held.values():
        assert isinstance(backend.acquire(one, queue=False), Grant)
    with tenant("acme"):
        assert locked_names(backend) == ["a:1", "a:2", "b"]
        assert locked_names(backend, "a:") == ["a:1", "a:2"]
        asked.clear()
        found = backend.held("a:", step=1)
        assert asked == ["acme"]  # for the list and all of its looks
        assert sorted((info.prefix, info.name, info.token) for info in found) == [
            ("acme", name, held["acme", name].token) for name in ("a:1", "a:2")
        ]
        assert [bool(leases) for leases in backend.look(["b", "c"])] == [True, False]
        assert [bool(holder) for holder in backend.holders([Slot("c"), Slot("b")])] == [False, True]
        assert [left is not None for left in backend.remaining([Slot("c"), Slot("b")])] == [False, True]
        assert backend.look([]) == []
        assert backend.holders([]) == []
    with tenant("initech"):
        assert locked_names(backend) == []
        assert backend.look(["b"]) == [[]]
    for one in held.values():
        assert backend.release(one)


def test_a_list_that_is_read_later_stays_that_of_its_tenant(tenants):
    for prefix in ("acme", "globex"):
        for name in ("1", "2"):
            assert isinstance(tenants.acquire(request_of(prefix, name), queue=False), Grant)
    with tenant("acme"):
        held = tenants.held(step=1)
        seen = [next(held)]
    with tenant("globex"):
        seen += held
    assert sorted((info.prefix, info.name) for info in seen) == [("acme", "1"), ("acme", "2")]


def test_waiters_stand_in_the_line_of_their_tenant(tenants):
    if not tenants.supports_queue:
        pytest.skip("this backend has no queue and says so: supports_queue is False")
    holder, waiter = request_of("acme"), request_of("acme")
    assert isinstance(tenants.acquire(holder, queue=False), Grant)
    assert isinstance(tenants.acquire(waiter, queue=True), LockInfo)
    for prefix, count in (("acme", 1), ("globex", 0)):
        with tenant(prefix):
            assert tenants.count_waiters(["order:1"]) == [count]
    assert isinstance(tenants.acquire(request_of("globex"), queue=False), Grant)
    assert tenants.release(holder)
    assert isinstance(eventually(lambda: granted(tenants, waiter)), Grant)
    assert tenants.release(waiter)


def granted(backend, request):
    answer = backend.acquire(request, queue=True)
    return answer if isinstance(answer, Grant) else None


@pytest.mark.parametrize("backend", ["redis", "cluster"], indirect=True)  # whose messages name the key
def test_a_lock_that_was_handed_to_a_waiter_who_has_gone_is_handed_on(tenants, monkeypatch):
    monkeypatch.setattr(Timing, "grant_ttl", 600.0)
    holder = request_of("a.b-c")
    assert isinstance(tenants.acquire(holder, queue=False), Grant)
    assert isinstance(tenants.acquire(request_of("a.b-c"), queue=True), LockInfo)
    gc.collect()
    assert tenants.release(holder)
    with tenant("a.b-c"), lock("order:1", wait=30):
        assert asked == ["a.b-c"]
    eventually(lambda: not renewer_of(tenants).is_cleaning)


def test_runs_of_beat_are_nobodys(tenants):
    if not isinstance(tenants, RunsBackend):
        pytest.skip("this backend keeps no runs of beat")
    seen = LastRun(round(wall_clock() - 60, 6))
    assert tenants.claim_run("shop:nightly", seen, seen, 3600.0) == seen
    assert tenants.find_runs(["shop:nightly"]) == [seen]
    assert list(tenants.runs()) == [("shop:nightly", seen)]
    assert asked == []


def test_the_store_is_checked_without_a_tenant(tenants, calls):
    results = calls(tenants).check()
    assert [result.message for result in results if result.about == "reachable" and not result.is_error]
    assert asked == []


def test_a_text_and_an_answer_that_are_equal_mean_the_same_locks(backend, settings):
    """So a project can go from one to the other, process by process."""
    mine = request_of("", "order:1")
    assert isinstance(backend.acquire(mine, queue=False), Grant)
    if not backend.supports_processes:
        return
    settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "text": settings.DISTRIBUTED_LOCKS["default"]}
    asks = of_tenants(settings)
    with tenant("lock"):
        assert locked_names(asks) == ["order:1"]
        [[info]] = asks.look(["order:1"])
    assert info.token == mine.token
    assert locks["text"].look(["order:1"])[0][0].token == mine.token
    assert locks["text"].release(mine)
