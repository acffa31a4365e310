"""Waiters among others who are hasty, stuck, interrupted or refused."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from math import inf

import pytest

from django_distlock import LockBackendError, LockNotAcquired, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import pubsub as listening
from django_distlock.core.acquire import Acquisition
from django_distlock.core.lease import Lease
from django_distlock.testing.tools import WAYS, calling
from django_distlock.types import Grant, Holder, new_token
from django_distlock.utils.clock import clock
from tests.support.leases import deadline_of
from tests.support.stores import LOCMEM, REDIS
from tests.support.tools import PATIENCE, eventually, lock_request, on_stores, queue_of, renewer_of

pytestmark = pytest.mark.slow

HELD = "lock:name"
QUEUE = "lock|q:name"


@pytest.fixture
def held_elsewhere(store):
    """The lock ``name`` is held by another process."""
    store.set(HELD, f"1 {new_token()} h {1:016d} {Holder.here('other').to_text()}", px=60_000)


class TimeLimit(Exception):
    """As Celery raises from a handler of a signal."""


@contextmanager
def time_limit(seconds):
    def out(*_):
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, out)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TestTimeLimits:
    """What the handler of a signal raises is no failure of the store."""

    def test_while_acquiring(self, proxied, proxy, store):
        proxy.hang = True
        with pytest.raises(TimeLimit), time_limit(0.1):
            lock("name").acquire()
        proxy.hang = False
        eventually(lambda: not renewer_of(proxied).is_cleaning)
        assert not store.exists(HELD)

    @pytest.mark.parametrize("on_lost", ["raise", "log"])
    def test_while_releasing(self, proxied, proxy, store, on_lost):
        handle = lock("name", on_lost=on_lost)
        handle.__enter__()
        proxy.hang = True
        with pytest.raises(TimeLimit), time_limit(0.1):
            handle.__exit__(None, None, None)
        proxy.hang = False
        eventually(lambda: not store.exists(HELD))


class TestInterrupts:
    """Wherever an interrupt strikes, the lock is free in the end, and nothing renews it for ever."""

    @on_stores("redis", "locmem")
    def test_between_the_grant_and_the_lease(self, backend, monkeypatch):
        strike(monkeypatch, Acquisition, "conclude")
        with pytest.raises(KeyboardInterrupt):
            lock("name", ttl=60).acquire()
        eventually(lambda: not lock("name").locked())

    @pytest.mark.parametrize("method", ["_begin_release", "_mark_released"])
    def test_at_the_beginning_of_a_release(self, backend, monkeypatch, method):
        handle = lock("name", ttl=60)
        assert handle.acquire()
        strike(monkeypatch, Lease, method)
        with pytest.raises(KeyboardInterrupt):
            handle.release()
        eventually(lambda: not lock("name").locked())
        assert not renewer_of(backend).leases()

    def test_between_the_handle_and_its_lease_it_runs_out(self, backend, monkeypatch):
        handle = lock("name", ttl=0.6)
        assert handle.acquire()
        strike(monkeypatch, Lease, "release")
        with pytest.raises(KeyboardInterrupt):
            handle.release()
        eventually(lambda: not lock("name").locked() and not renewer_of(backend).leases())


def strike(monkeypatch, owner, method):
    """The next call of the method is interrupted."""
    original = getattr(owner, method)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(owner, method, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, method, interrupted)


class TestListener:
    def test_it_outlives_any_error(self, valkey_locks, store, held_elsewhere, monkeypatch):
        read, faults = listening.RedisListener.read, [RuntimeError("dictionary changed size during iteration")]

        def failing(*arguments):
            if faults:
                raise faults.pop()
            read(*arguments)

        monkeypatch.setattr(listening.RedisListener, "read", failing)
        assert lock("name", wait=1.0).acquire() is False
        assert not faults
        store.delete(HELD)
        with lock("name", wait=PATIENCE):
            assert lock("name", wait=0).acquire() is False

    def test_a_refused_subscription_is_told_at_once(self, valkey, store, settings, held_elsewhere):
        rules = ("on", ">word", "~lock:*", "~lock|*", "resetchannels", "+@all")
        store.execute_command("ACL", "SETUSER", "deaf", *rules)
        url = f"unix://deaf:word@{valkey.socket}?db=0"
        settings.DISTRIBUTED_LOCKS = {
            "default": {**settings.DISTRIBUTED_LOCKS["default"], "LOCATION": url, "OPTIONS": {"socket_timeout": 20}}
        }
        try:
            began = time.monotonic()
            with pytest.raises(LockBackendError, match="widen its ACL rule"):
                lock("name", wait=30).acquire()
            assert time.monotonic() - began < PATIENCE
        finally:
            locks.close()
            store.execute_command("ACL", "DELUSER", "deaf")

    @pytest.fixture(autouse=True)
    def backend(self, valkey_locks):
        return valkey_locks

    def test_a_busy_default_executor_does_not_prolong_the_wait(self, held_elsewhere):
        async def wait():
            free = threading.Event()
            jobs = [asyncio.create_task(asyncio.to_thread(free.wait, 2 * PATIENCE)) for _ in range(40)]
            await asyncio.sleep(0)
            began = time.monotonic()
            assert await lock("name", wait=0.2).aacquire() is False
            took = time.monotonic() - began
            free.set()
            await asyncio.gather(*jobs)
            return took

        assert asyncio.run(wait()) < PATIENCE


class TestOthers:
    def test_a_hasty_caller_does_not_fail_a_patient_one(self, proxied, proxy, store, held_elsewhere, monkeypatch):
        outcomes = []

        def patient():
            try:
                with lock("name", wait=30):
                    outcomes.append("in")
            except LockBackendError as error:
                outcomes.append(error)

        waiter = threading.Thread(target=patient)
        waiter.start()
        eventually(lambda: store.zcard(QUEUE) == 1)
        proxy.hang = True  # for less than the timeout of the backend, for more than the hasty caller has
        monkeypatch.setattr(Timing, "shortest_call", 0.3)
        try:
            with pytest.raises(LockBackendError):
                lock("name", wait=0.01).acquire()
        finally:
            proxy.hang = False
        assert outcomes == []
        store.delete(HELD)
        waiter.join(2 * PATIENCE)
        assert outcomes == ["in"]

    def test_a_waiting_task_whose_loop_rests_stops_nobody(self, valkey_locks, store):
        """Its event loop may run again, or never."""
        holder = lock("name")
        assert holder.acquire()
        with asyncio.Runner() as runner:

            async def begin():
                task = asyncio.create_task(lock("name", wait=None).aacquire())
                while store.zcard(QUEUE) == 0:
                    await asyncio.sleep(0.01)
                return task

            waiter = runner.run(begin())
            valkey_locks.timing.unresponsive_after = 1.0
            time.sleep(1.1)
            holder.release()
            began, passed = time.monotonic(), []

            def work():
                for _ in range(10):
                    with lock("name", wait=60):
                        passed.append(None)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(passed) == 20
            assert time.monotonic() - began < PATIENCE / 2  # else each takes a second
            waiter.cancel()

    def test_waiters_that_never_asked_the_store_leave_without_asking(self, valkey_locks, store, held_elsewhere):
        def asked():
            return store.info("commandstats")["cmdstat_evalsha"]["calls"]

        async def come_and_go():
            tasks = [asyncio.create_task(lock("name", wait=None).aacquire()) for _ in range(200)]
            while not store.zcard(QUEUE):
                await asyncio.sleep(0.01)
            before = asked()
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return before

        before = asyncio.run(come_and_go())
        eventually(lambda: not renewer_of(valkey_locks).is_cleaning)
        assert asked() - before < 20
        assert not store.exists(QUEUE)

    def test_what_cannot_be_given_back_keeps_no_lease_from_being_renewed(self, valkey_locks, monkeypatch):
        stuck, release = threading.Event(), valkey_locks.release

        def slow(lock_request, cooldown=0.0):
            stuck.wait(PATIENCE)
            return release(lock_request, cooldown)

        with lock("name", ttl=3) as lease:
            monkeypatch.setattr(valkey_locks, "release", slow)
            renewer_of(valkey_locks).release_in_background(lock_request("other"))
            before = deadline_of(lease)
            eventually(lambda: lease.remaining and deadline_of(lease) > before + 0.6)
            assert renewer_of(valkey_locks).is_cleaning
            stuck.set()

    def test_a_caller_whose_own_late_grant_is_in_the_way_is_told_that_the_store_is_slow(self, settings, monkeypatch):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        backend, acquire = locks["default"], locks["default"].acquire

        def late(request, queue):
            answer = acquire(request, queue=queue)
            return Grant(answer.fence, answer.sent_at - request.ttl) if isinstance(answer, Grant) else answer

        monkeypatch.setattr(backend, "acquire", late)
        monkeypatch.setattr(backend, "release", lambda *_, **__: True)  # has not arrived yet
        with pytest.raises(LockBackendError, match="Give it a longer ttl"):
            lock("name", wait=0.05).acquire()

    def test_waits_that_fail_one_after_the_other_are_told_once(self, settings, monkeypatch, caplog):
        """Where the store answers attempts, but not who waits for a turn."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        pauses = []

        def fail(request, timeout):
            raise LockBackendError("no")

        def pause(request, timeout):
            pauses.append(timeout)
            if len(pauses) == 4:
                locks["default"].release(held)

        held = lock_request()
        locks["default"].acquire(held, queue=False)
        monkeypatch.setattr(locks["default"], "wait_for_turn", fail)
        monkeypatch.setattr(locks["default"], "pause", pause)
        with lock("name", wait=600):
            pass
        assert pauses == [0.2, 0.4, 0.8, 1.0]
        assert caplog.text.count("continues to wait") == 1

    @pytest.mark.parametrize("way", WAYS)
    def test_an_attempt_that_fails_after_the_wait_is_the_last(self, settings, monkeypatch, way):
        """Else a call would last for its wait and two attempts, of which each may take a second more."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        backend, attempts, wait = locks["default"], [], 0.05
        acquire = backend.acquire

        def slow(request, queue):
            attempts.append(request)
            if len(attempts) == 1:
                return acquire(request, queue=queue)
            time.sleep(2 * wait)
            raise LockBackendError("no")

        async def aslow(request, queue):
            return slow(request, queue)

        backend.acquire(lock_request(), queue=False)
        monkeypatch.setattr(backend.timing, "look_interval", 0.01)
        monkeypatch.setattr(backend, "acquire", slow)
        monkeypatch.setattr(backend, "aacquire", aslow)
        with calling(way) as wrapped, pytest.raises(LockBackendError):
            wrapped(lock("name", wait=wait)).acquire()
        assert len(attempts) == 2

    def test_a_request_that_takes_another_token_is_woken_by_the_same_event(self):
        request = lock_request()
        assert request.with_new_token().event is request.event
        assert request.copy().event is not request.event

    @pytest.mark.parametrize("way", WAYS)
    def test_a_wait_for_a_turn_that_fails_late_is_followed_by_no_attempt(self, settings, monkeypatch, way):
        """The same where it is the wait that asks the store."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        backend, waits = locks["default"], []

        def slow(request, timeout):
            waits.append(request)
            time.sleep(timeout + 2 * backend.timing.prompt_failure)
            raise LockBackendError("no")

        async def aslow(request, timeout):
            slow(request, timeout)

        backend.acquire(lock_request(), queue=False)
        monkeypatch.setattr(backend, "wait_for_turn", slow)
        monkeypatch.setattr(backend, "await_for_turn", aslow)
        with calling(way) as wrapped, pytest.raises(LockBackendError, match="no"):
            wrapped(lock("name", wait=0.05)).acquire()
        assert len(waits) == 1

    def test_a_ttl_that_no_answer_keeps_is_told_however_long_the_wait(self, valkey_locks, monkeypatch):
        grants = []

        def over(sent_at, ttl):
            grants.append(sent_at)
            return sent_at if len(grants) < 20 else inf  # it would be asked for without an end

        monkeypatch.setattr("django_distlock.core.lease.safe_deadline", over)
        with pytest.raises(LockBackendError, match="Give it a longer ttl"):
            lock("name", ttl=0.01, wait=None).acquire()
        assert len(grants) == 3

    def test_each_late_grant_is_given_back_once(self, locmem_locks, monkeypatch):
        given_back = []
        monkeypatch.setattr("django_distlock.core.lease.safe_deadline", lambda sent_at, ttl: sent_at)
        monkeypatch.setattr(renewer_of(locmem_locks), "release_in_background", lambda one: given_back.append(one.token))
        monkeypatch.setattr(locmem_locks, "acquire", lambda *_, **__: Grant(1, clock()))
        with pytest.raises(LockBackendError, match="Give it a longer ttl"):
            lock("name").acquire()
        assert len(given_back) == len(set(given_back)) == 3

    def test_a_late_grant_is_given_back_while_its_caller_goes_on(self, valkey_locks, monkeypatch):
        told, release = threading.Event(), valkey_locks.release

        def slow(lock_request, cooldown=0.0):
            assert told.wait(PATIENCE)
            return release(lock_request, cooldown)

        monkeypatch.setattr("django_distlock.core.lease.safe_deadline", lambda sent_at, ttl: sent_at)
        monkeypatch.setattr(valkey_locks, "release", slow)
        with pytest.raises(LockBackendError, match="Give it a longer ttl"):
            lock("name", ttl=5).acquire(blocking=False)
        told.set()
        eventually(lambda: not lock("name").locked())


@pytest.fixture
def no_more_threads(monkeypatch):
    """None that listens or does the work of tasks can be started, as at the limit of a container."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith(("distlock-listener", "distlock-async")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


class TestWithoutThreads:
    @pytest.mark.parametrize("way", ["sync", "async"])
    @pytest.mark.parametrize("kind", ["valkey", "cluster"])
    def test_waiters_look(self, request, kind, way, no_more_threads, caplog):
        request.getfixturevalue(f"{kind}_locks")
        first = lock("name")
        assert first.acquire()
        threading.Timer(0.5, first.release).start()
        second = lock("name", wait=60)
        if way == "sync":
            assert second.acquire()
            second.release()
        else:
            asyncio.run(_hold(second))
        assert "cannot be started: can't start new thread" in caplog.text

    def test_waiters_of_redis_keep_their_order(self, valkey, store, settings, no_more_threads, callers, monkeypatch):
        """They poll."""
        monkeypatch.setattr(Timing, "grant_ttl", 60.0)  # for which a look counts
        aliases = ("default", "first", "second")
        settings.DISTRIBUTED_LOCKS = {alias: {"BACKEND": REDIS, "LOCATION": valkey.url} for alias in aliases}
        waiters = []
        with lock("name"):
            for alias in aliases[1:]:
                waiters.append(callers(alias))
                eventually(lambda: store.zcard(QUEUE) == len(waiters))
            assert all(entry.endswith(" polls|") for entry in store.zrange(QUEUE, 0, -1))
        for waiter in waiters:
            waiter.gets_in()
            waiter.leaves()
        locks.close()

    def test_tasks_are_told_by_a_database(self, sqlite_locks, no_more_threads):
        with pytest.raises(LockBackendError, match="can't start new thread"):
            asyncio.run(_hold(lock("name")))


async def _hold(handle):
    assert await handle.aacquire()
    await handle.arelease()


class TestFinalErrors:
    """What does not pass by itself is told at once to whoever waits, however long the wait."""

    @pytest.mark.parametrize("way", ["sync", "async"])
    @pytest.mark.parametrize("fault", ["type", "value", "password"])
    def test_are_told_to_waiters(self, valkey_locks, store, held_elsewhere, fault, way):
        told = []

        def wait():
            handle = lock("name", wait=None)
            try:
                handle.acquire() if way == "sync" else asyncio.run(handle.aacquire())
            except LockBackendError as error:
                told.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        eventually(lambda: store.exists(QUEUE))
        try:
            if fault == "password":
                store.execute_command("ACL", "SETUSER", "default", "resetpass", ">changed")
                store.execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", "normal")
            elif fault == "type":
                with store.pipeline() as at_once:  # else the waiter may take the lock in between
                    at_once.delete(HELD).rpush(HELD, "foreign").execute()
            else:
                store.set(HELD, "foreign", px=60_000)
            eventually(lambda: told)
        finally:
            if fault == "password":
                store.execute_command("ACL", "SETUSER", "default", "nopass")
            store.delete(HELD)
        waiter.join(PATIENCE)
        assert told[0].is_final


def test_a_place_is_given_back_in_the_background_once_the_time_is_over(valkey_locks, held_elsewhere, monkeypatch):
    """The answer came late, and the store may be as slow when it is given back."""
    backend, releasing = valkey_locks, []
    acquire, release = backend.acquire, backend.release

    def slow_acquire(request, *, queue):
        answer = acquire(request, queue=queue)
        if queue:
            eventually(lambda: clock() > request.deadline)
        return answer

    def noted_release(request, *arguments, **options):
        releasing.append((request.name, threading.current_thread()))
        return release(request, *arguments, **options)

    monkeypatch.setattr(backend, "acquire", slow_acquire)
    monkeypatch.setattr(backend, "release", noted_release)
    with pytest.raises(LockNotAcquired), lock("name", wait=1):
        pytest.fail("it is held")
    eventually(lambda: releasing)
    assert [name for name, thread in releasing if thread is threading.current_thread()] == []
    eventually(lambda: backend.count_waiters(["name"]) == [0])


def test_the_next_of_a_process_asks_when_the_lock_is_released_and_not_before(monkeypatch):
    """While one of its own process has the lock, the store would only say so."""
    backend, asked, got_in = locks["default"], [], []
    acquire = type(backend).acquire

    def counted(self, request, *, queue):
        asked.append(request.token)
        return acquire(self, request, queue=queue)

    def wait():
        with lock("name", wait=PATIENCE):
            got_in.append(time.monotonic())
            time.sleep(0.05)

    holder = lock("name")
    assert holder.acquire()
    waiting = [threading.Thread(target=wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    eventually(lambda: queue_of(backend).length("name") == 5)
    time.sleep(0.1)  # until the first of them has asked
    monkeypatch.setattr(type(backend), "acquire", counted)
    holder.release()
    for thread in waiting:
        thread.join(PATIENCE)
    assert len(got_in) == len(asked) == 5  # each once, when its predecessor had left
    assert max(after - before for before, after in pairwise(got_in)) < 0.5  # a second if it had to look by itself


def test_a_grant_of_a_class_of_another_store_has_an_ordinary_lease(locmem_locks, calls, monkeypatch):
    class OwnGrant(Grant):
        pass

    for name in ("acquire", "aacquire"):
        monkeypatch.setattr(locmem_locks, name, as_own(getattr(locmem_locks, name), OwnGrant))
    handle = lock("name")
    assert calls(handle).acquire()
    try:
        assert [type(lease) for lease in locks.leases()] == [Lease]
    finally:
        calls(handle).release()


def as_own(acquire, kind):
    def asked(request, *, queue):
        answer = acquire(request, queue=queue)
        return aown(answer) if asyncio.iscoroutine(answer) else own(answer)

    def own(answer):
        return kind(*answer) if isinstance(answer, Grant) else answer

    async def aown(answer):
        return own(await answer)

    return asked
