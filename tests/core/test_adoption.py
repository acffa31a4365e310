"""Leases that go from one process to another."""

from __future__ import annotations

import asyncio
import html
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta

import pytest
from django.core import signing
from django.core.exceptions import SynchronousOnlyOperation
from django.views.debug import ExceptionReporter

from django_distlock import (
    LockBackendDoesNotExist,
    LockBackendError,
    LockError,
    LockLost,
    LockNotHeld,
    State,
    aadopt,
    adopt,
    lock,
    locks,
)
from django_distlock.core.detached import SALT, Detached
from django_distlock.signals import lock_lost
from django_distlock.testing import held_here, lose
from django_distlock.testing.tools import AsyncCalls, locked_names
from django_distlock.utils.clock import clock
from tests.support.forkserver import Program, run
from tests.support.leases import deadline_of, lease_of, request_of, terms_of_detached, wait_for_renewal
from tests.support.programs import ROOT
from tests.support.tools import PATIENCE, eventually, on_stores, renewer_of

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.slow


class SyncAdoption:
    adopt = staticmethod(adopt)

    @staticmethod
    def inside(lease, body=lambda: None):
        with lease:
            return body()

    @staticmethod
    def release(lease):
        lease.release()


class AsyncAdoption:
    def __init__(self, runner):
        self._runner = runner

    def adopt(self, text):
        return self._runner.run(aadopt(text))

    def inside(self, lease, body=lambda: None):
        async def entered():
            async with lease:
                return await asyncio.to_thread(body)  # it asks stores synchronously

        return self._runner.run(entered())

    def release(self, lease):
        self._runner.run(lease.arelease())


@pytest.fixture
def worker(calls):
    """Adopts by the plain methods, and by their twins."""
    if isinstance(calls(None), AsyncCalls):
        with asyncio.Runner() as runner:
            yield AsyncAdoption(runner)
    else:
        yield SyncAdoption()


@pytest.fixture(autouse=True)
def clean(backend):
    yield
    eventually(lambda: not renewer_of(backend).is_cleaning)


def detached(name="name", **options):
    """What a view that has returned left behind."""
    with lock(name, **options) as lease:
        return lease.detach()


def names(backend, prefix="n"):
    return locked_names(backend, prefix)


class TestDetaching:
    @on_each_store
    def test_the_lock_stays_taken_when_its_with_ends(self, backend):
        detached()
        assert names(backend) == ["name"]
        assert not lock("name", wait=0).acquire()

    @pytest.mark.seconds(3)
    @on_each_store
    def test_it_is_renewed_no_more_and_free_after_its_ttl(self, backend):
        detached(ttl=2)
        with lock("name", wait=PATIENCE):
            pass

    def test_the_lease_is_over_here_and_says_why(self, backend):
        with lock("name") as lease:
            lease.detach()
            assert lease.state is State.RELEASED
            assert lease.remaining == 0.0
            for further in (lease.release, lease.detach, lease.ensure_held, lease.renew):
                with pytest.raises(LockNotHeld, match="was detached: another process may adopt it"):
                    further()

    def test_a_lease_taken_by_acquire_can_be_detached_too(self, backend):
        mutex = lock("name")
        mutex.acquire()
        lease = lease_of(mutex)
        lease.detach()
        with pytest.raises(LockNotHeld, match="detached"):
            mutex.release()

    def test_a_released_or_lost_lease_cannot_be_detached(self, backend):
        with lock("name") as lease:
            pass
        with pytest.raises(LockNotHeld, match="released already"):
            lease.detach()
        with lock("name", on_lost="log") as lease:
            lose(lease)
            with pytest.raises(LockLost):
                lease.detach()

    def test_without_a_secret_key_the_lease_stays_here(self, backend, settings):
        settings.SECRET_KEY = ""
        with lock("name") as lease:
            with pytest.raises(Exception, match="SECRET_KEY"):
                lease.detach()
            lease.ensure_held()

    def test_nothing_is_asked_of_the_store(self, backend, monkeypatch):
        with lock("name") as lease:
            for method in ("acquire", "release", "renew", "look"):
                monkeypatch.setattr(backend, method, lambda *_, **__: pytest.fail("asked"))
            lease.detach()
            monkeypatch.undo()

    def test_the_text_is_made_of_characters_that_any_broker_carries(self, backend):
        text = detached("naïve { } %", label="schön")
        assert text.isascii()
        assert json.loads(json.dumps(text)) == text
        assert adopt(text).name == "naïve { } %"
        lose_all(backend)


def lose_all(backend):
    for lease in list(renewer_of(backend).leases()):
        lease.release()


class TestAdopting:
    @on_each_store
    def test_the_lease_goes_on_with_its_number_and_its_terms(self, backend, worker):
        with lock("name", ttl=20, max_hold=100, label="POST /export") as first:
            text = first.detach()
        lease = worker.adopt(text)
        assert (lease.name, lease.using, lease.fence, lease.token) == ("name", "default", first.fence, first.token)
        assert (lease.ttl, lease.state) == (20, State.HELD)
        assert 19 < lease.remaining <= 20
        assert abs(lease.granted_at - first.granted_at) < timedelta(milliseconds=2)
        again = lease.detach()
        assert terms_of_detached(again) == terms_of_detached(text)
        assert terms_of_detached(text).max_hold == 100
        worker.release(worker.adopt(again))
        assert names(backend) == []

    @on_each_store
    def test_with_releases_it_at_its_end(self, backend, worker):
        lease = worker.adopt(detached())
        assert worker.inside(lease, lambda: names(backend)) == ["name"]
        assert names(backend) == []
        assert lease.state is State.RELEASED

    @on_each_store
    def test_the_body_does_not_run_once_the_lease_is_over(self, backend, worker):
        lease = worker.adopt(detached())
        worker.release(lease)
        with pytest.raises(LockNotHeld, match="released already"):
            worker.inside(lease, lambda: pytest.fail("ran"))

    def test_with_tells_of_a_loss_but_never_in_place_of_the_bodys_error(self, backend, worker):
        lease = worker.adopt(detached())
        with pytest.raises(LockLost):
            worker.inside(lease, lambda: lose(lease))

        lease = worker.adopt(detached())

        def body():
            lose(lease)
            raise KeyError("the body's")

        with pytest.raises(KeyError):
            worker.inside(lease, body)

    def test_on_lost_log_goes_with_it(self, backend, worker):
        lease = worker.adopt(detached(on_lost="log"))
        worker.inside(lease, lambda: lose(lease))

    @on_each_store
    def test_the_store_shows_the_new_holder_and_what_for(self, backend, worker):
        with lock("name", label="POST /export") as first:
            text = first.detach()
        with ThreadPoolExecutor(1, "worker") as pool:
            lease = pool.submit(worker.adopt, text).result()
        [[info]] = backend.look(["name"])
        assert info.holder.thread != first.holder.thread
        assert info.holder.label == "POST /export"
        assert info.holder.since == first.holder.since
        assert info.fence == first.fence
        worker.release(lease)

    def test_it_is_renewed(self, backend, worker):
        lease = worker.adopt(detached(ttl=6))
        wait_for_renewal(lease)
        lease.ensure_held()
        worker.release(lease)

    def test_it_is_renewed_in_time_also_where_it_had_long_for_its_way(self, backend, worker):
        with lock("name", ttl=0.9) as first:
            first.renew(ttl=3)
            passed = Detached.from_text(first.detach())
        time.sleep(0.6)  # nothing else is due in this process then
        lease = worker.adopt(replace(passed, remaining=60, until=time.time()).to_text())
        time.sleep(1.2)
        lease.ensure_held()
        worker.release(lease)

    def test_max_hold_counts_from_the_grant(self, backend, worker, caplog):
        with lock("name", ttl=2, max_hold=61) as first:
            detached = Detached.from_text(first.detach())
        after_a_minute = replace(detached, granted_at=detached.granted_at - 60)
        lease = worker.adopt(after_a_minute.to_text())
        eventually(lambda: lease.state is State.LOST)
        assert "reaches its max_hold of 61 s and is no longer renewed" in caplog.text

    def test_it_is_not_renewed_beyond_its_max_hold(self, backend, worker):
        with lock("name", ttl=4, max_hold=60, renew=False) as first:
            time.sleep(2.5)
            detached = Detached.from_text(first.detach())
        lease = worker.adopt(replace(detached, granted_at=detached.granted_at - 55.5).to_text())
        [[info]] = backend.look(["name"])
        assert info.remaining < 3  # two seconds are left of its max_hold
        worker.release(lease)

    @pytest.mark.parametrize("seconds", [-60, 60])
    def test_clocks_that_differ_change_nothing(self, backend, worker, seconds):
        passed = Detached.from_text(detached(ttl=5))
        lease = worker.adopt(replace(passed, until=passed.until + seconds).to_text())
        [[info]] = backend.look(["name"])
        assert 0 < lease.remaining <= info.remaining <= 5
        worker.release(lease)

    @on_each_store
    def test_of_what_the_text_and_the_store_say_the_store_is_right(self, backend, worker):
        passed = Detached.from_text(detached(ttl=5))
        lease = worker.adopt(replace(passed, remaining=60, until=passed.until - 60).to_text())
        [[info]] = backend.look(["name"])
        assert 0 < lease.remaining <= info.remaining <= 5
        worker.release(lease)

    def test_what_it_was_given_for_its_way_is_left(self, backend, worker):
        with lock("name", ttl=5, renew=False) as first:
            first.renew(ttl=60)
            text = first.detach()
        lease = worker.adopt(text)
        assert 5 < lease.remaining < 60
        worker.release(lease)

    def test_what_is_left_is_kept_beyond_its_max_hold(self, backend, worker):
        with lock("name", ttl=60, max_hold=0.1) as first:
            time.sleep(0.2)
            text = first.detach()
        lease = worker.adopt(text)
        assert lease.remaining > 50
        worker.release(lease)

    def test_min_hold_counts_from_the_grant_also_where_the_store_was_slow(self, backend, monkeypatch):
        granted_at, acquire = [], backend.acquire

        def slow(request, queue):
            time.sleep(0.2)
            granted_at.append(clock())
            return acquire(request, queue=queue)

        monkeypatch.setattr(backend, "acquire", slow)
        with lock("name", min_hold=30) as lease:
            text = lease.detach()
        with adopt(text):
            pass
        [[info]] = backend.look(["name"])
        assert clock() + info.remaining > granted_at[0] + 30 - 0.01

    @on_each_store
    def test_min_hold_counts_from_the_grant(self, backend, worker):
        with lock("name", min_hold=30) as first:
            time.sleep(0.3)
            text = first.detach()
        worker.release(worker.adopt(text))
        [[info]] = backend.look(["name"])
        assert info.resting
        assert 28 < info.remaining < 29.8

    def test_the_text_is_good_for_as_long_as_the_lease_was_made_to_last(self, backend, worker):
        with lock("name", ttl=3) as first:
            first.renew(ttl=60)
            text = first.detach()
        time.sleep(3.2)
        worker.release(worker.adopt(text))

    def test_it_can_be_passed_on_again(self, backend, worker):
        lease = worker.adopt(worker.adopt(detached()).detach())
        worker.release(lease)
        assert names(backend) == []

    def test_the_thread_or_task_that_adopted_is_the_owner(self, backend):
        with adopt(detached(reentrant=True)) as lease:
            with lock("name", reentrant=True) as again:
                assert again is lease
            lease.ensure_held()
        assert names(backend) == []

    @on_each_store
    def test_nothing_is_left_behind(self, backend, worker):
        worker.release(worker.adopt(detached()))
        eventually(lambda: locked_names(backend) == [])

    @pytest.mark.parametrize("backend", ["redis"], indirect=True)
    def test_a_failed_one_leaves_nothing_that_takes_the_lock_after_its_release(self, backend, worker, monkeypatch):
        text, late = detached(), []
        acquire, aacquire = backend.acquire, backend.aacquire

        def delay(asked):
            if asked.name == "name":
                late.append(copy(asked))
                raise LockBackendError("no answer")

        async def adelay(asked, *, queue):
            return delay(asked) or await aacquire(asked, queue=queue)

        monkeypatch.setattr(backend, "acquire", lambda asked, *, queue: delay(asked) or acquire(asked, queue=queue))
        monkeypatch.setattr(backend, "aacquire", adelay)
        with pytest.raises(LockBackendError):
            worker.adopt(text)
        monkeypatch.undo()
        eventually(lambda: not renewer_of(backend).is_cleaning)
        worker.release(worker.adopt(text))
        with pytest.raises(LockBackendError, match="given back before it was answered"):
            backend.acquire(late[0], queue=False)
        assert names(backend) == []

    @on_each_store
    def test_waiters_are_granted_it_after_its_release(self, backend, worker):
        text = detached()
        mutex = lock("name")
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(mutex.acquire, timeout=PATIENCE)
            lease = worker.adopt(text)
            worker.release(lease)
            assert waiter.result() is True
        mutex.release()


class TestRenewalOnItsWay:
    """Its answer finds that the lease was ended meanwhile, and leaves it alone."""

    @pytest.fixture
    def meanwhile(self, backend, monkeypatch):
        """Let something happen, once, between the store's answer to a renewal and who asked for it."""
        to_do, done = [], []
        renew, arenew = backend.renew, backend.arenew

        def happen():
            if to_do:
                with ThreadPoolExecutor(1) as pool:
                    done.append(pool.submit(to_do.pop()).result())

        def slowly(wanted, *, timeout=None):
            answer = renew(wanted, timeout=timeout)
            happen()
            return answer

        async def aslowly(wanted, *, timeout=None):
            answer = await arenew(wanted, timeout=timeout)
            happen()
            return answer

        monkeypatch.setattr(backend, "renew", slowly)
        monkeypatch.setattr(backend, "arenew", aslowly)

        def will(act):
            to_do.append(act)
            return done

        return will

    def is_held(self, backend, lease):
        eventually(lambda: not renewer_of(backend).is_cleaning)
        lease.renew()
        assert renewer_of(backend).get(lease.token) is lease
        assert not lock("name", wait=0).acquire()
        lease.release()

    def test_the_lease_is_left_to_who_adopts_it(self, backend, meanwhile, calls):
        with lock("name") as lease:
            texts = meanwhile(lease.detach)
            with pytest.raises(LockNotHeld, match="was detached"):
                calls(lease).renew()
        self.is_held(backend, adopt(texts[0]))

    def test_the_lease_is_left_to_who_has_adopted_it_here(self, backend, meanwhile, calls):
        with lock("name") as lease:
            adopted = meanwhile(lambda: adopt(lease.detach()))
            with pytest.raises(LockNotHeld, match="was detached"):
                calls(lease).renew()
        self.is_held(backend, adopted[0])

    def test_so_does_the_thread_that_renews(self, backend, meanwhile):
        with lock("name", ttl=3) as lease:
            ends = deadline_of(lease)

            def adopt_and_wait_until_it_is_too_late():
                adopted = adopt(lease.detach())
                adopted.renew(60)
                eventually(lambda: clock() > ends)
                return adopted

            adopted = meanwhile(adopt_and_wait_until_it_is_too_late)
            [of_another] = eventually(lambda: adopted)
        self.is_held(backend, of_another)

    def test_a_release_is_no_loss(self, backend, meanwhile, calls):
        told = []
        lock_lost.connect(lambda **about: told.append(about), weak=False, dispatch_uid="told")
        mutex = lock("name")
        mutex.acquire()
        lease = lease_of(mutex)
        meanwhile(mutex.release)
        with pytest.raises(LockNotHeld, match="was released already"):
            calls(lease).renew()
        lock_lost.disconnect(dispatch_uid="told")
        assert told == []
        assert lease.state is State.RELEASED

    def test_nor_is_it_a_failure_where_nodes_disagree_meanwhile(self, backend, calls, monkeypatch):
        mutex = lock("name")
        mutex.acquire()
        lease = lease_of(mutex)

        def renew(wanted):
            mutex.release()
            return [None]

        async def arenew(wanted):
            await mutex.arelease()
            return [None]

        monkeypatch.setattr(backend, "renew", renew)
        monkeypatch.setattr(backend, "arenew", arenew)
        with pytest.raises(LockNotHeld, match="was released already"):
            calls(lease).renew()


class TestRefusing:
    @on_each_store
    def test_a_text_is_adopted_once(self, backend, worker):
        text = detached()
        lease = worker.adopt(text)
        with pytest.raises(LockNotHeld, match=r"adopted already, by has adopted name \(pid"):
            worker.adopt(text)
        lease.ensure_held()
        worker.release(lease)

    def test_it_is_not_adopted_again_while_its_release_is_being_repeated(self, backend, worker, monkeypatch):
        """The release could end the lease of the second one, whenever it comes through."""
        text = detached()
        lease = worker.adopt(text)

        def unanswered(request, *arguments, **options):
            if request.name == "name":
                raise LockBackendError("no answer")
            return release(request, *arguments, **options)

        async def aunanswered(request, *arguments, **options):
            return unanswered(request, *arguments, **options)

        with monkeypatch.context() as patch:
            release = backend.release
            patch.setattr(backend, "release", unanswered)
            patch.setattr(backend, "arelease", aunanswered)
            with pytest.raises(LockBackendError):
                worker.release(lease)
            with pytest.raises(LockNotHeld, match="adopted already"):
                worker.adopt(text)
        eventually(lambda: backend.look(["name"]) == [[]])

    @on_each_store
    def test_of_many_that_adopt_at_once_one_does(self, backend):
        text = detached()

        def adopted():
            with suppress(LockNotHeld):
                return adopt(text)

        with ThreadPoolExecutor(8) as pool:
            leases = [found for found in pool.map(lambda _: adopted(), range(8)) if found]
        assert len(leases) == 1
        leases[0].release()

    def test_while_the_store_is_slow_to_tell_nobody_looks_again_and_again(self, backend, monkeypatch):
        """What its min_hold leaves of a lease that nobody renews may be longer than its TTL."""
        text, renewer, looked = detached(ttl=0.1, min_hold=60, renew=False), renewer_of(backend), []
        leases, renew = renewer.leases, backend.renew
        monkeypatch.setattr(renewer, "leases", lambda: looked.append(1) or leases())
        monkeypatch.setattr(backend, "renew", lambda *asked: time.sleep(0.4) or renew(*asked))
        adopt(text)
        monkeypatch.undo()
        assert len(looked) < 100
        lose_all(backend)

    def test_a_released_one_is_lost(self, backend, worker):
        text = detached()
        worker.release(worker.adopt(text))
        eventually(lambda: locked_names(backend) == [])
        with pytest.raises(LockLost):
            worker.adopt(text)
        assert names(backend) == []

    @on_each_store
    def test_one_that_somebody_freed_is_lost_also_while_another_holds_the_lock(self, backend, worker):
        with lock("name") as first:
            text = first.detach()
        assert backend.release(request_of(first))
        with lock("name") as successor:
            with pytest.raises(LockLost, match="'name'"):
                worker.adopt(text)
            assert backend.look(["name"])[0][0].token == successor.token

    def test_the_loss_is_signalled(self, backend, worker):
        with lock("name") as first:
            text = first.detach()
        backend.release(request_of(first))
        heard = []

        def hear(sender, **news):
            heard.append(news)

        lock_lost.connect(hear)
        try:
            with pytest.raises(LockLost):
                worker.adopt(text)
            [news] = eventually(lambda: heard)
        finally:
            lock_lost.disconnect(hear)
        assert news["name"] == "name"

    @pytest.mark.seconds(3)
    @on_each_store
    def test_one_that_ran_out_on_its_way_is_lost_and_the_message_says_what_to_do(self, backend, worker):
        text = detached(ttl=2)
        time.sleep(2.1)
        with pytest.raises(LockLost, match=r"ran out \d+\.\d s ago, before it was adopted.*renew\(ttl="):
            worker.adopt(text)

    @on_each_store
    def test_a_resting_one_is_lost(self, backend, worker):
        with lock("name") as first:
            text = first.detach()
        backend.release(request_of(first), 30)
        with pytest.raises(LockLost):
            worker.adopt(text)

    @pytest.mark.parametrize(
        "forge", [lambda t: "", lambda t: "x", lambda t: t[:-1], lambda t: "x" + t, lambda t: t + ":x"]
    )
    def test_a_forged_one_is_refused_and_the_genuine_one_still_good(self, backend, worker, forge):
        text = detached()
        with pytest.raises(LockNotHeld, match="signature is wrong.*SECRET_KEY"):
            worker.adopt(forge(text))
        worker.release(worker.adopt(text))

    def test_what_was_signed_for_another_purpose_is_refused(self, backend, worker):
        with pytest.raises(LockNotHeld, match="signature"):
            worker.adopt(signing.dumps({"name": "name"}))
        with pytest.raises(LockNotHeld, match="another version"):
            worker.adopt(signing.Signer(salt=SALT).sign_object([1, {"name": "name"}]))

    def test_what_a_newer_version_detached_is_refused(self, backend, worker):
        text = signing.Signer(salt=SALT).sign_object([2, "in another way"])
        with pytest.raises(LockBackendError, match="written by a newer version") as caught:
            worker.adopt(text)
        assert caught.value.is_final

    def test_the_keys_must_be_the_same_and_may_be_rotated(self, backend, worker, settings):
        text = detached()
        old, settings.SECRET_KEY = settings.SECRET_KEY, "another"
        with pytest.raises(LockNotHeld, match="same SECRET_KEY"):
            worker.adopt(text)
        settings.SECRET_KEY_FALLBACKS = [old]
        worker.release(worker.adopt(text))

    @on_each_store
    def test_a_task_that_is_cancelled_while_it_adopts_leaves_it_for_another(self, backend, monkeypatch):
        text = detached()

        async def hang(*_, **__):
            await asyncio.sleep(PATIENCE)

        async def main():
            monkeypatch.setattr(backend, "arenew", hang)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(aadopt(text), 0.1)
            monkeypatch.undo()

        asyncio.run(main())
        eventually(lambda: not renewer_of(backend).is_cleaning)
        with adopt(text) as lease:
            lease.ensure_held()

    def test_adopting_synchronously_in_an_event_loop_is_refused(self, backend):
        async def main():
            adopt("text")

        with pytest.raises(SynchronousOnlyOperation):
            asyncio.run(main())

    def test_while_the_store_is_down_it_is_kept_for_later(self, backend, worker, monkeypatch):
        text = detached()

        def down(*_, **__):
            raise LockBackendError("down")

        async def adown(*_, **__):
            raise LockBackendError("down")

        for asked in ("acquire", "renew"):
            monkeypatch.setattr(backend, asked, down)
            monkeypatch.setattr(backend, f"a{asked}", adown)
            with pytest.raises(LockBackendError):
                worker.adopt(text)
            monkeypatch.undo()
            eventually(lambda: not renewer_of(backend).is_cleaning)
        worker.release(worker.adopt(text))


WORKER = """
import sys
from django.conf import settings
settings.configure(SECRET_KEY=sys.argv[2], DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": sys.argv[1]}})
from django_distlock import adopt, locks
locks["default"].look(["name"])
print("ready", flush=True)
with adopt(sys.stdin.readline().strip()) as lease:
    print(lease.fence, flush=True)
    sys.stdin.readline()
"""


class TestProcesses:
    @pytest.fixture
    def backend(self, valkey_locks):
        return valkey_locks

    def test_another_process_goes_on_with_it_and_releases_it(self, backend, valkey, settings):
        with Program(
            ["-W", "error", "-c", WORKER, valkey.url, settings.SECRET_KEY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            assert worker.stdout.readline() == "ready\n"
            with lock("name", ttl=3) as first:
                worker.stdin.write(first.detach() + "\n")
            worker.stdin.flush()
            assert worker.stdout.readline().strip() == str(first.fence)
            [[info]] = backend.look(["name"])
            assert info.holder.pid == worker.pid
            time.sleep(3.5)  # longer than the TTL
            assert not lock("name", wait=0).acquire()
            worker.communicate("done\n", timeout=PATIENCE)
            assert worker.returncode == 0
        assert locks["default"].look(["name"]) == [[]]
        assert locked_names(backend) == []

    @pytest.mark.seconds(4)
    def test_one_that_exits_after_detaching_leaves_the_lock_taken(self, backend, valkey):
        code = WORKER.split("from django_distlock")[0] + (
            "from django_distlock import lock\n"
            "mutex = lock('name', ttl=30)\n"
            "lease = mutex.__enter__()\n"
            "print(lease.detach())\n"
        )
        process = run(["-W", "error", "-c", code, valkey.url, "for tests only"], like=None, timeout=PATIENCE)
        assert process.stderr == ""
        with adopt(process.stdout.strip()):
            assert names(backend) == ["name"]
        assert names(backend) == []


PROJECT = """
import os, sys, time
from celery import Celery
from celery.signals import worker_ready
from django.conf import settings
settings.configure(SECRET_KEY="for tests only", ALLOWED_HOSTS=["testserver"], ROOT_URLCONF="export_project",
    DISTRIBUTED_LOCKS={"default": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": os.environ["LOCKS"], "TTL": 6}})
import django
django.setup()
from django.http import HttpResponse
from django.urls import path
from django_distlock import adopt, lock, LockNotAcquired

app = Celery("export_project", broker=os.environ["BROKER"])
app.conf.broker_connection_retry_on_startup = True

@worker_ready.connect
def note(**kwargs):
    open(os.environ["READY"], "w").close()

@app.task
def build(pk, detached, done):
    with adopt(detached) as lease:
        open(done + ".begun", "w").write(str(os.getpid()))
        while not os.path.exists(done):
            time.sleep(0.02)

def export(request, pk, done):
    try:
        with lock("export:{}", pk, wait=0, label="POST /export") as lease:
            build.delay(pk, lease.detach(), done)
    except LockNotAcquired:
        return HttpResponse(status=409)
    return HttpResponse(status=202)

urlpatterns = [path("<int:pk>/<path:done>", export)]
"""
REQUESTS = """
import sys, export_project
from django.test import Client
print(Client().post(f"/7/{sys.argv[1]}").status_code)
"""


class TestCelery:
    @pytest.fixture
    def backend(self, valkey_locks):
        return valkey_locks

    @pytest.mark.seconds(15)
    def test_a_view_answers_202_and_a_task_in_a_worker_goes_on_with_its_lock(self, backend, valkey, tmp_path):
        (tmp_path / "export_project.py").write_text(PROJECT)
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            "LOCKS": valkey.url,
            "BROKER": f"redis+socket://{valkey.socket}?virtual_host=1",
            "READY": str(tmp_path / "ready"),
        }
        done = tmp_path / "done"

        def post():
            return run(["-c", REQUESTS, done], env=environment, timeout=4 * PATIENCE).stdout.strip()

        command = ["-m", "celery", "-A", "export_project", "worker", "-c", "1", "-l", "WARNING"]
        worker = Program(
            [*command, "--without-gossip", "--without-mingle", "--without-heartbeat"],
            like="celery", env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            eventually((tmp_path / "ready").exists, 4 * PATIENCE)
            begun = tmp_path / "done.begun"
            assert post() == "202"
            pid = eventually(lambda: begun.exists() and begun.read_text(), 2 * PATIENCE)
            time.sleep(7)  # longer than the TTL, in which a busy worker begins
            assert post() == "409"
            [[info]] = backend.look(["export:7"])
            assert info.holder.pid == int(pid)
            assert info.holder.label == "POST /export"
            done.touch()
            eventually(lambda: backend.look(["export:7"]) == [[]])
        finally:
            worker.terminate()
            try:
                worker.wait(20)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def another_key(settings, text):
    settings.SECRET_KEY = "of another process"
    return text


def another_alias(settings, text):
    settings.DISTRIBUTED_LOCKS = {"elsewhere": settings.DISTRIBUTED_LOCKS["default"]}
    return text


def another_version(settings, text):
    signer = signing.Signer(salt=SALT)
    number, fields = signer.unsign_object(text)
    return signer.sign_object([number, {**fields, "terms": {"of": "tomorrow"}}])


def adopted_before(settings, text):
    adopt(text)
    return text


@pytest.mark.parametrize("send", [pickle.dumps, copy])
def test_a_lease_that_is_copied_says_how_it_is_passed_on(backend, send):
    with lock("name") as lease:
        with pytest.raises(TypeError, match=r"lease.detach\(\) elsewhere, and adopt\(\) it there"):
            send(lease)
        text = lease.detach()
    with adopt(text) as adopted, pytest.raises(TypeError, match="belongs to the process that acquired it"):
        send(adopted)


@pytest.fixture
def released_afterwards(backend):
    yield
    for lease in held_here():
        lease.release()


@pytest.mark.usefixtures("released_afterwards")
@pytest.mark.parametrize("prepare", [adopted_before, another_key, another_alias, another_version])
def test_a_text_that_cannot_be_adopted_is_in_no_report_of_the_error(backend, settings, rf, prepare):
    """Reports by mail, and by trackers that ask Django what is sensitive; debug pages show all variables."""
    settings.DEBUG = False
    with lock("name") as lease:
        token, text = lease.token, lease.detach()
    text = prepare(settings, text)
    try:
        adopt(text)
    except (LockError, LockBackendDoesNotExist):
        report = ExceptionReporter(rf.get("/"), *sys.exc_info())
    frames = [frame for frame in report.get_traceback_data()["frames"] if frame["filename"] != __file__]
    assert len(frames) > 1
    for frame in frames:
        for variable, value in frame["vars"]:
            assert token not in str(value), (frame["function"], variable)
            for part in text.split(":"):
                assert part not in html.unescape(str(value)), (frame["function"], variable)
