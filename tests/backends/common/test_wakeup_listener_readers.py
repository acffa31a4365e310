"""A thread that waits reads what the server tells, if nobody else does."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_distlock import lock
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.common.wakeup_listener import Waiters
from django_distlock.backends.redis.backend import RedisBackend
from django_distlock.types import new_token
from django_distlock.utils.threads import end_all
from tests.support.databases import Waiter, end_sessions
from tests.support.inside import listener_of
from tests.support.tools import PATIENCE, eventually, lock_request

pytestmark = pytest.mark.slow


@pytest.fixture(params=["postgres_locks", "valkey_locks"])
def backend(request):
    return request.getfixturevalue(request.param)


def cut_listeners(backend, store):
    """End their connections at the server."""
    if isinstance(backend, RedisBackend):
        store.client_kill_filter(_type="pubsub")
    else:
        end_sessions()


@pytest.fixture
def no_looks(monkeypatch):
    """Who waits is woken, or waits for a long time."""
    monkeypatch.setattr(Timing, "look_interval", 4 * PATIENCE)
    monkeypatch.setattr(Timing, "waiter_expires_after", 8 * PATIENCE)


def wait_until_queued(backend, *names):
    eventually(lambda: listener_of(backend).is_ready and backend.count_waiters(names) == [1] * len(names))


@pytest.fixture
def readers(monkeypatch):
    """The names of the threads that have read messages."""
    readers, wake = [], Waiters.wake

    def recorded(waiters, token, *handed):
        readers.append(threading.current_thread().name)
        return wake(waiters, token, *handed)

    monkeypatch.setattr(Waiters, "wake", recorded)
    return readers


def is_waiter(reader):
    return not reader.startswith("distlock-listener")


def test_who_comes_again_reads_itself(backend, no_looks, readers, monkeypatch):
    monkeypatch.setattr(Timing, "listener_nap", 1.0)

    def it_read_itself():
        with lock("name", ttl=60):
            waiter = Waiter()
            wait_until_queued(backend, "name")
        assert waiter.got_in.wait(PATIENCE)
        waiter.end()
        return bool(readers) and is_waiter(readers[-1])  # it may have come to look just when the lock was handed to it

    eventually(it_read_itself)  # on a busy machine the listener's nap may be over before it comes again


def test_those_who_do_not_read_are_woken_too(backend, no_looks):
    for _ in range(3):
        held = {name: lock(name, ttl=60) for name in ("a", "b", "c")}
        for handle in held.values():
            handle.acquire()
        waiters = {name: Waiter(name) for name in held}
        wait_until_queued(backend, *held)
        for name, handle in held.items():
            handle.release()
            assert waiters[name].got_in.wait(PATIENCE)
        for waiter in waiters.values():
            waiter.end()


@pytest.mark.parametrize("backend", ["postgres_locks", "valkey_locks", "cluster_locks"], indirect=True)
def test_a_task_is_woken_though_a_thread_has_just_read(backend, no_looks, monkeypatch):
    """The listener's thread rests then, and has to read for the task."""
    earlier = set(threading.enumerate())
    monkeypatch.setattr(Timing, "listener_nap", 4 * PATIENCE)

    async def wait():
        async with lock("name", wait=4 * PATIENCE):  # who has waited in vain looks for a last time
            pass

    try:
        for _ in range(2):  # the first one may come before there is something to read
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: backend.count_waiters(["name"]) == [1])
            assert waiter.got_in.wait(PATIENCE)
            waiter.end()
        holder = lock_request(ttl=60)  # of no handle, whose release wakes the task without a message
        backend.acquire(holder, queue=False)
        with ThreadPoolExecutor(1) as threads:
            task = threads.submit(asyncio.run, wait())
            eventually(lambda: backend.count_waiters(["name"]) == [1])
            backend.release(holder)
            task.result(PATIENCE)
    finally:
        end_all(0.0)  # it would rest for as long as that; threads of earlier tests may ask a store that is gone
        for thread in set(threading.enumerate()) - earlier:
            if thread.name.startswith("distlock-listener"):
                thread.join(PATIENCE)


@pytest.mark.parametrize("kind", [BaseException, Exception])
def test_one_that_is_interrupted_leaves_it_to_others(backend, no_looks, kind):
    class Interrupted(kind):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            other = Waiter()
            assert other.got_in.wait(PATIENCE)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Interrupted), lock("name", wait=PATIENCE):
                pass
            waiter = Waiter()
            eventually(lambda: backend.count_waiters(["name"]) == [1])
            other.end()
            assert waiter.got_in.wait(PATIENCE)
            waiter.end()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_one_whose_connection_is_cut_waits_on(backend, store):
    for _ in range(2):
        with lock("name", ttl=60):
            waiter = Waiter()
            wait_until_queued(backend, "name")
            cut_listeners(backend, store)
            eventually(lambda: not listener_of(backend).is_ready)
            eventually(lambda: listener_of(backend).is_ready)
        assert waiter.got_in.wait(PATIENCE)
        waiter.end()


@pytest.mark.parametrize("backend", ["valkey_locks", "cluster_locks"], indirect=True)
@pytest.mark.parametrize("key", [b"\xff", b"", b"}{", b"{1", b"name"])
def test_what_others_publish_fails_nobody_who_reads_it(request, backend, no_looks, readers, key):
    if request.node.callspec.params["backend"] == "valkey_locks":
        clients = [request.getfixturevalue("store")]
    else:
        clients = [primary.client for primary in request.getfixturevalue("valkey_cluster").primaries]

    def a_waiter_has_read():
        for client in clients:
            for channel in client.pubsub_shardchannels():
                client.execute_command("SPUBLISH", channel, b"%s 1 0 %s" % (new_token().encode(), key))
        return any(map(is_waiter, readers))

    with lock("name", ttl=60):
        waiter = Waiter()
        eventually(lambda: backend.count_waiters(["name"]) == [1])
        eventually(a_waiter_has_read)
    assert waiter.got_in.wait(PATIENCE)
    waiter.end()
