"""Who is first in the queue looks when the lease of the holder, or its cooldown, ends by itself."""

from __future__ import annotations

import threading
import time

import pytest

from django_distlock import lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.types import Grant, Slot
from tests.support.stores import DATABASE, REDIS
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request

pytestmark = [pytest.mark.slow, pytest.mark.once]

LONG = 60  # seconds that no sound test waits

backend = backend_on("redis", "cluster", "redlock", "locmem", "postgres", "sqlite", "zookeeper")


@pytest.fixture(autouse=True)
def no_other_looks(monkeypatch):
    """Waiters look when they know that they should, and not each second; they are taken for living all the same."""
    monkeypatch.setattr(Timing, "look_interval", LONG)
    monkeypatch.setattr(Timing, "waiter_expires_after", 2 * LONG)


@pytest.fixture
def gets_in():
    """Starts a thread that takes the lock, and then waits until it has it."""
    threads = []

    def start(using="default"):
        def take():
            with lock("name", using=using, wait=LONG):
                granted.set()

        granted = threading.Event()
        threads.append(threading.Thread(target=take))
        threads[-1].start()
        return lambda: granted.wait(LONG / 2)

    yield start
    for thread in threads:
        thread.join(2 * LONG)


@pytest.fixture(params=["redis", "postgres"])
def fleet(request, settings):
    """Backends that know nothing of each other, as those of several processes, by their aliases."""
    if request.param == "redis":
        request.getfixturevalue("store")
        entry = {"BACKEND": REDIS, "LOCATION": request.getfixturevalue("valkey").url}
    else:
        request.getfixturevalue("postgres_database")
        entry = {"BACKEND": DATABASE, "LOCATION": "locks"}
    settings.DISTRIBUTED_LOCKS = dict.fromkeys(("default", "a", "b"), entry)
    yield locks
    locks.close()


def granted(backend, mine, *, queue=False):
    assert isinstance(backend.acquire(mine, queue=queue), Grant)


def waits(count):
    return eventually(lambda: locks["default"].count_waiters(["name"]) == [count])


def test_a_lease_that_runs_out_soon(backend, gets_in):
    granted(backend, lock_request(ttl=0.3))
    assert gets_in()()


def test_a_rest(backend, gets_in):
    if not backend.supports_queue:
        pytest.skip("this backend has no queue: who waits looks several times a second by itself")
    holder = lock_request(ttl=LONG)
    granted(backend, holder)
    second = gets_in()
    waits(1)
    backend.release(holder, cooldown=0.3)
    assert second()


def test_whoever_becomes_the_first_when_another_one_is_granted_the_lock(fleet, gets_in):
    holder, first = lock_request(ttl=LONG), lock_request(ttl=0.3)
    granted(fleet["default"], holder)
    fleet["a"].acquire(first, queue=True)
    second = gets_in("b")
    waits(2)
    fleet["default"].release(holder)
    granted(fleet["a"], first, queue=True)
    assert second()


def test_whoever_becomes_the_first_when_another_one_takes_a_free_lock(fleet, gets_in):
    holder, first = lock_request(ttl=1.5), lock_request(ttl=0.3)
    granted(fleet["default"], holder)
    fleet["a"].acquire(first, queue=True)
    second = gets_in("b")
    waits(2)
    eventually(lambda: fleet["default"].look(["name"]) == [[]])
    granted(fleet["a"], first, queue=True)
    assert second()


@pytest.mark.parametrize("how", ["late", "cancelled"])
def test_whoever_becomes_the_first_when_another_one_leaves(fleet, gets_in, how):
    holder, first = lock_request(ttl=1.5), lock_request()
    granted(fleet["default"], holder)
    fleet["a"].acquire(first, queue=True)
    second = gets_in("b")
    waits(2)
    eventually(lambda: fleet["default"].look(["name"])[0][0].remaining < 0.9)
    if how == "late":
        fleet["a"].acquire(first, queue=False)
    else:
        fleet["a"].release(first)
    assert second()


def test_one_after_the_other_in_a_process(backend, gets_in):
    """Each of which takes the lock and keeps it until it runs out."""
    began = time.monotonic()
    holders = [lock("name", ttl=0.2, renew=False, wait=LONG) for _ in range(3)]
    threads = [threading.Thread(target=holder.acquire) for holder in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
    assert gets_in()()
    assert time.monotonic() - began < PATIENCE + LONG / 2


@pytest.mark.parametrize("ttl", [0.3, 1.2])
def test_whoever_was_handed_the_lock_has_it_for_its_ttl(backend, ttl):
    """However long it was kept for it before."""
    if not backend.supports_queue:
        pytest.skip("this backend has no queue, so it hands nothing over")
    holder, waiter = lock_request(ttl=LONG), lock_request(ttl=ttl)
    granted(backend, holder)
    backend.acquire(waiter, queue=True)
    backend.release(holder)
    granted(backend, waiter, queue=True)
    [left] = backend.remaining([Slot("name")])
    assert left <= ttl


def test_a_min_hold_above_the_ttl_outlasts_a_lease_that_is_dropped(backend):
    """As if the holder were killed: nobody renews or releases."""
    handle = lock("name", ttl=0.2, min_hold=LONG, renew=False)
    assert handle.acquire()
    time.sleep(0.3)
    [left] = backend.remaining([Slot("name")])
    assert LONG / 2 < left <= LONG
    handle.release()
    [left] = backend.remaining([Slot("name")])
    assert LONG / 2 < left <= LONG
