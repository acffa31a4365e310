"""Locks on a master that sentinels watch: what a failover does to holders and to those who wait."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from django_distlock import LockBackendError, LockLost, State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.signals import lock_lost
from django_distlock.testing.tools import SyncCalls
from django_distlock.types import Grant, LockInfo
from tests.support import scripted, sentinel
from tests.support.clocks import faked_clock
from tests.support.forkserver import Program
from tests.support.sentinel import SERVICE, Watched, warm_up
from tests.support.stores import REDIS
from tests.support.tools import (
    ALLOWANCE,
    PATIENCE,
    ending_within,
    eventually,
    inbox_of_a_waiter,
    lock_request,
    queue_of,
    take_no_waiter_for_dead,
)

pytestmark = [pytest.mark.once, pytest.mark.seconds(3)]

WAIT = 2 * PATIENCE  # seconds; a failover takes two

WAITER = """
import sys
from django.conf import settings
settings.configure(DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "django_distlock.backends.redis.RedisBackend",
    "OPTIONS": {"sentinels": [("127.0.0.1", int(port)) for port in sys.argv[1:]], "service_name": "mymaster"}}})
from django_distlock import lock, locks
from django_distlock.backends.common.timing import Timing
Timing.unresponsive_after = Timing.grant_ttl = Timing.waiter_expires_after = 60.0
mutex = lock("name", wait=60)
print("waits" if lock("name").locked() else "free", flush=True)
with mutex as lease:
    print(lease.fence, flush=True)
locks.close()
"""


@pytest.fixture
def watched():
    with Watched() as watched:
        yield watched


@pytest.fixture
def use(settings):
    def use(watched, *, location=None, ttl=30, **options):
        entry = {"BACKEND": REDIS, "TTL": ttl, "OPTIONS": {**watched.options, **options}}
        settings.DISTRIBUTED_LOCKS = {"default": {**entry, **({"LOCATION": location} if location else {})}}
        return locks["default"]

    yield use
    with suppress(LockBackendError):
        locks.close()


def end(watched, how):
    """The master, by a way in which masters end; returns the one that takes over."""
    old = watched.master
    watched.wait_for_replicas(old)
    {"kill": old.kill, "stop": old.stop, "operator": watched.fail_over}[how]()
    return old, watched.wait_for_another(old)


@contextmanager
def heard_losses():
    heard = []

    def hear(sender, name, reason, **_):
        heard.append(name)

    lock_lost.connect(hear)
    yield heard
    lock_lost.disconnect(hear)


class TestFailoverWhileHeld:
    @pytest.mark.parametrize("how", ["kill", "stop", "operator"])
    def test_a_replicated_lease_goes_on(self, watched, use, how, caplog):
        use(watched)
        with lock("name", ttl=20) as lease:  # renewed every seven seconds
            old, new = end(watched, how)
            with new.client() as client:
                eventually(lambda: lease.token in (client.get("lock:name") or ""))
                looks = [client.pttl("lock:name")]

                def is_renewed():
                    looks.append(client.pttl("lock:name"))
                    return looks[-1] > looks[-2]

                eventually(is_renewed)
            eventually(lambda: lease.state is State.HELD)
            assert lock("name").locked()
            lease.ensure_held()
        assert not lock("name").locked()
        with lock("name") as successor:
            assert successor.fence > lease.fence
        assert f"The master of '{SERVICE}' is 127.0.0.1:{new.port} now, no longer 127.0.0.1:{old.port}" in caplog.text

    def test_a_lease_that_was_not_replicated_is_told_as_lost(self, watched, use):
        """S12: two hold it until the first one's next renewal; the second has the larger fencing number."""
        use(watched)
        with lock("before"):
            old = watched.master
        watched.cut_off(old)
        with heard_losses() as heard:
            with pytest.raises(LockLost), lock("name", ttl=30) as first:
                old.kill()
                watched.wait_for_another(old)
                second = lock("name")
                assert second.acquire()
                assert first.state is not State.LOST
                [[info]] = locks["default"].look(["name"])
                assert info.fence > first.fence
                eventually(lambda: first.state is State.LOST, 9)
                assert locks["default"].look(["name"]) != [[]]  # the second one's is left alone
                second.release()
            eventually(lambda: heard == ["name"])

    def test_numbers_grow_though_the_next_masters_clock_is_behind(self, use, tmp_path):
        """As far as the last one was replicated. Of what was lost it cannot know."""
        offset = tmp_path / "offset"
        offset.write_text("-3600")
        with Watched(environment_of_replicas=faked_clock(offset)) as watched:
            use(watched)
            with lock("name") as first:
                pass
            _, new = end(watched, "kill")
            with new.client() as client:
                assert client.time()[0] < time.time() - 3000
            with lock("name") as second:
                assert second.fence > first.fence

    def test_a_lock_taken_while_the_master_hangs_is_granted_by_the_next_one(self, watched, use, calls):
        use(watched)
        warm_up(calls)
        old = watched.master
        old.stop()
        handle = lock("name", wait=WAIT)
        assert calls(handle).acquire()
        assert locks["default"].location.sentinels.master.port != old.port
        calls(handle).release()

    def test_a_release_in_the_midst_of_it_is_made_up_for(self, watched, use):
        use(watched, socket_timeout=0.3, socket_connect_timeout=0.3)
        handle = lock("name", ttl=20)
        handle.acquire()
        old = watched.master
        old.kill()
        with pytest.raises(LockBackendError, match="there is no master now|does not answer"):
            handle.release()
        watched.wait_for_another(old)
        eventually(lambda: not lock("name").locked())

    def test_without_a_wait_nobody_is_kept_for_long(self, watched, use, calls):
        use(watched)
        warm_up(calls)
        watched.master.stop()
        with ending_within(3), pytest.raises(LockBackendError):
            calls(lock("name", wait=0, ttl=2)).acquire()

    def test_an_end_that_lasts_longer_than_the_patience_is_an_error(self, use, calls):
        """Nothing can take over: nobody hangs, though they would wait for ever."""
        with Watched(replicas=0) as watched:
            use(watched, failover_timeout=2)
            warm_up(calls)
            watched.master.kill()
            began = time.monotonic()
            with pytest.raises(LockBackendError, match="DISTRIBUTED_LOCKS|no replica can take over"):
                calls(lock("name", wait=None, ttl=2)).acquire()
            assert 1.5 < time.monotonic() - began < 8 + ALLOWANCE


class TestFailoverWhileWaiting:
    @pytest.mark.parametrize("how", ["kill", "stop"])
    def test_all_get_their_turn_on_the_new_master(self, watched, use, how, monkeypatch):
        """Threads, tasks and processes; the order of places is kept as far as it was replicated."""
        take_no_waiter_for_dead(monkeypatch)
        use(watched)
        held, fences = lock("name", ttl=WAIT), []
        held.acquire()

        def wait():
            with lock("name", wait=WAIT) as lease:
                fences.append(lease.fence)

        async def await_two():
            async def one():
                async with lock("name", wait=WAIT) as lease:
                    fences.append(lease.fence)

            await asyncio.gather(one(), one())

        ports = [str(port) for _, port in watched.addresses]
        processes = [Program(["-c", WAITER, *ports], stdout=subprocess.PIPE, text=True) for _ in range(2)]
        threads = [threading.Thread(target=wait) for _ in range(2)]
        threads.append(threading.Thread(target=asyncio.run, args=(await_two(),)))
        try:
            for thread in threads:
                thread.start()
            for process in processes:
                assert process.stdout.readline() == "waits\n"
            with watched.master.client() as client:
                eventually(lambda: client.zcard("lock|q:name") == 3)
            _, new = end(watched, how)
            with new.client() as client:
                eventually(lambda: client.zcard("lock|q:name") == 3)
                eventually(lambda: len(client.pubsub_shardchannels("lock|in:*")) == 3)
            with ending_within(3):  # woken, none has to wait for the end of a grant
                held.release()
                for thread in threads:
                    thread.join(WAIT)
                fences += [int(process.stdout.readline()) for process in processes]
            assert len(set(fences)) == 6
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdout.close()

    def test_who_comes_while_there_is_no_master_waits_for_one(self, watched, use):
        use(watched)
        watched.master.kill()
        taken = []

        def take(number):
            with lock("name", wait=WAIT):
                taken.append(number)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert sorted(taken) == [0, 1, 2]

    def test_who_gives_up_takes_nobody_along(self, use):
        def wait(seconds):
            try:
                with lock("name", wait=seconds):
                    return "in"
            except LockBackendError:
                return "failed"

        with Watched(replicas=0, sentinels=1) as watched, ThreadPoolExecutor() as pool:
            backend = use(watched)
            backend.acquire(lock_request(ttl=60), queue=False)
            hasty = pool.submit(wait, 2.0)  # longer than to its next look
            eventually(lambda: queue_of(backend).length("name") == 1)
            patient = pool.submit(wait, 3 * WAIT)
            eventually(lambda: queue_of(backend).length("name") == 2)
            [master] = watched.servers
            master.kill()
            assert hasty.result(WAIT) == "failed"
            master.start()
            assert patient.result(3 * WAIT) == "in"

    @pytest.mark.parametrize("way", ["threads", "tasks"])
    def test_many_more_than_connections_wait_for_it(self, watched, use, way):
        use(watched, max_connections=1, socket_timeout=0.3, socket_connect_timeout=0.3)
        with lock("before"):
            pass
        watched.master.stop()
        numbers = range(12)

        def one(number):
            with lock("name:{}", number, wait=WAIT) as lease:
                return lease.fence

        async def one_task(number):
            async with lock("name:{}", number, wait=WAIT) as lease:
                return lease.fence

        async def tasks():
            return await asyncio.gather(*map(one_task, numbers))

        if way == "tasks":
            assert all(asyncio.run(tasks()))
        else:
            with ThreadPoolExecutor(len(numbers)) as threads:
                assert all(threads.map(one, numbers))

    @pytest.mark.parametrize("is_warm", [True, False])
    def test_nobody_waits_longer_than_wanted_for_one_that_hangs(self, use, calls, is_warm, monkeypatch):
        monkeypatch.setattr(sentinel, "DOWN_AFTER", 60)
        with Watched(replicas=0, sentinels=1) as watched:
            use(watched, socket_timeout=40, socket_connect_timeout=40)
            if is_warm:
                warm_up(calls)
            watched.master.stop()
            with ending_within(2), pytest.raises(LockBackendError):
                calls(lock("name", wait=2)).acquire()

    def test_the_place_of_a_waiter_is_kept(self, watched, use):
        """Also where the new master never heard of the queue."""
        backend = use(watched)
        holder, first, second = lock_request(ttl=30), lock_request(), lock_request()
        backend.acquire(holder, queue=False)
        watched.cut_off(watched.master)
        for waiter in (first, second):
            assert isinstance(backend.acquire(waiter, queue=True), LockInfo)
        old = watched.master
        old.kill()
        new = watched.wait_for_another(old)
        for waiter in (second, first):
            assert isinstance(backend.acquire(waiter, queue=True), LockInfo)
        with new.client() as client:
            waiting = [member.split()[1] for member in client.zrange("lock|q:name", 0, -1)]
        assert waiting == [first.token, second.token]
        backend.release(holder)
        assert isinstance(eventually(lambda: granted(backend.acquire(first, queue=True))), Grant)
        backend.release(first)
        assert isinstance(eventually(lambda: granted(backend.acquire(second, queue=True))), Grant)
        backend.release(second)


class TestAnOldMasterThatAnswers:
    def test_hands_no_lock_over_by_its_message_alone(self, watched, use):
        assert inbox_of_a_waiter(use(watched))[0] in "SP"

    def test_is_left_by_connections_that_stood_before(self, watched, use, settings, calls):
        """It hung until another one was elected, and does not know of that yet: for ten seconds it takes writes."""
        entry = {"BACKEND": REDIS, "OPTIONS": watched.options}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
        for alias in ("default", "other"):
            warm_up(calls, alias)
        old, _ = end(watched, "stop")
        locks["default"].look(["name"])  # by now on the new master
        with lock("name") as lease:
            eventually(lambda: locks["other"].location.sentinels.master.port != old.port)
            old.go_on()
            with old.client() as client:
                assert client.role()[0] == "master"
                assert not client.exists("lock:name")
                other = lock("name", wait=0, using="other")
                assert calls(other).acquire() is False
                assert client.role()[0] == "master"
            lease.ensure_held()

    def test_is_not_believed_what_it_answers_to_a_command_of_before(self, watched, use, settings, calls):
        """It was asked, hung, and grants the lock when another one has granted it to somebody else."""
        entry = {"BACKEND": REDIS, "OPTIONS": {**watched.options, "socket_timeout": PATIENCE}}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
        for alias in ("default", "other"):
            warm_up(calls, alias)
        old = watched.master
        watched.wait_for_replicas(old)
        other = lock("name", wait=PATIENCE, using="other")
        with ThreadPoolExecutor() as threads, old.client() as client:
            old.stop()
            asked = threads.submit(calls(other).acquire)
            watched.wait_for_another(old)
            with lock("name") as lease:
                eventually(lambda: locks["other"].location.sentinels.master.port != old.port)
                assert not asked.done()
                old.go_on()
                eventually(lambda: client.exists("lock:name"))
                eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
                assert not asked.done()
                lease.ensure_held()
            assert asked.result(PATIENCE)
            calls(other).release()

    def test_is_left_by_those_who_are_cut_off_together_with_it(self, watched, use, calls):
        """The sentinels lost it, its clients did not: these learn of the new one from the sentinels."""
        backend = use(watched)
        old = watched.master
        waiting = lock_request("other")
        with lock("other", ttl=30):
            backend.acquire(waiting, queue=True)
        watched.cut_off(old)
        with pytest.raises(LockLost), lock("name", ttl=6) as first:
            watched.cut_from_sentinels(old)
            new = watched.wait_for_another(old)
            eventually(lambda: backend.location.sentinels.master.port == new.port)
            second = lock("name")
            assert calls(second).acquire()  # two holders, until the first one's next renewal
            eventually(lambda: first.state is State.LOST, 4)
            assert backend.look(["name"])[0][0].fence > first.fence
            calls(second).release()
        with new.client() as client:
            eventually(lambda: client.pubsub_shardchannels("lock|in:*"))
        backend.release(waiting)

    def test_is_left_when_the_sentinels_are_set_up_anew(self, watched, use, monkeypatch, calls):
        """For another server, by hand: their epochs begin at 0 again."""
        monkeypatch.setattr(Timing, "sentinel_interval", 0.1)
        backend = use(watched)
        old, new = watched.servers
        watched.fail_over()
        watched.wait_for_another(old)
        warm_up(calls)  # in epoch 1
        assert backend.location.sentinels.master[1:3] == (new.port, 1)
        watched.set_up_anew(old)

        def is_left():
            with suppress(LockLost):  # acquired there, and sought here when it was released
                warm_up(calls)
            return backend.location.sentinels.master.port == old.port

        eventually(is_left)
        handle = lock("name")
        calls(handle).acquire()
        with old.client() as client:
            assert client.exists("lock:name")
        calls(handle).release()

    def test_is_left_by_the_listener(self, watched, use):
        backend = use(watched)
        holder, waiting = lock_request(ttl=30), lock_request()
        backend.acquire(holder, queue=False)
        backend.acquire(waiting, queue=True)
        old, new = end(watched, "stop")
        old.go_on()
        with new.client() as client:
            eventually(lambda: client.pubsub_shardchannels("lock|in:*"))
        with old.client() as client:
            assert client.role()[0] == "master"
            eventually(lambda: not client.pubsub_shardchannels("lock|in:*"))
        assert isinstance(backend.acquire(waiting, queue=True), LockInfo)
        backend.release(holder)
        assert waiting.event.wait(1.0) is not False
        assert isinstance(backend.acquire(waiting, queue=True), Grant)
        backend.release(waiting)


class TestAMasterThatRefuses:
    """By NOREPLICAS: what ``min-replicas-to-write`` makes of a master without replicas, and of each one at first."""

    def test_costs_its_callers_their_time_and_no_more(self, use, calls):
        with Watched(replicas=0, sentinels=1) as watched:
            use(watched)
            with lock("held", ttl=30) as lease, watched.master.client() as client:
                warm_up(calls)
                client.config_set("min-replicas-to-write", 1)
                with spending(0.2), pytest.raises(LockBackendError, match="too few replicas follow this server"):
                    calls(lock("name", wait=0)).acquire()
                with spending(0.2), pytest.raises(LockBackendError, match="too few replicas follow this server"):
                    calls(lock("name", wait=1)).acquire()
                with spending(0.2), pytest.raises(LockBackendError, match="too few replicas follow this server"):
                    calls(lease).renew()
                assert lease.state is State.HELD
                client.config_set("min-replicas-to-write", 0)
                calls(lease).renew()
                warm_up(calls)

    @pytest.mark.seconds(11)
    def test_is_waited_for_until_it_has_a_replica(self, use):
        with Watched(server=["min-replicas-to-write 1"]) as watched, ThreadPoolExecutor() as threads:
            use(watched)

            def take(name):
                with lock(name, wait=60) as lease:
                    return lease.fence

            async def atake(name):
                async with lock(name, wait=60) as lease:
                    return lease.fence

            with lock("held", ttl=60) as held, spending(2):
                old, new = end(watched, "kill")
                waiters = [threads.submit(take, "new"), threads.submit(take, "held")]
                waiters.append(threads.submit(asyncio.run, atake("held")))
                eventually(lambda: "too few replicas follow this server" in refusal())
                with new.client() as client:
                    refused = client.info("errorstats")["errorstat_NOREPLICAS"]["count"]
                    eventually(lambda: client.info("errorstats")["errorstat_NOREPLICAS"]["count"] > refused + 1)
                old.start()
                assert waiters[0].result(60)
                held.release()
                assert all(waiter.result(60) > held.fence for waiter in waiters[1:])


def refusal(calls=SyncCalls):
    """Of a lock for which nobody waits: on a busy machine, another part of the way may fail first."""
    with pytest.raises(LockBackendError) as caught:
        calls(lock("other", wait=0)).acquire()
    return str(caught.value)


@contextmanager
def spending(most):
    """The block takes no more than so many seconds of the processor, in all threads."""
    began = time.process_time()
    yield
    assert time.process_time() - began < most


def granted(answer):
    return answer if isinstance(answer, Grant) else None


class TestAMasterThatIsSilent:
    """It takes connections, and does not say whether it is the master."""

    @pytest.fixture
    def silent(self, settings):
        """A server that its own sentinel takes for the master; the sentinel of another one does not."""
        with scripted.Scripted() as silent, scripted.Scripted() as other:
            silent.fail(scripted.Scripted.SILENCE, on=[b"ROLE"])
            sentinels = [("127.0.0.1", one.port) for one in (silent, other)]
            options = {"sentinels": sentinels, "socket_timeout": 1.0, "socket_connect_timeout": 1.0}
            location = f"redis://:pw@{SERVICE}/0?protocol=2"
            settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": location, "OPTIONS": options}}
            yield silent
            locks.close()

    def test_is_left_for_the_one_that_another_sentinel_names(self, silent, calls):
        handle = calls(lock("name", wait=WAIT))
        assert handle.acquire()
        handle.release()
        assert b"ROLE" in silent.seen

    def test_is_told_by_its_address(self, silent, calls, settings):
        options = settings.DISTRIBUTED_LOCKS["default"]["OPTIONS"]
        del options["sentinels"][1:]
        message = f"127.0.0.1:{silent.port}, which the sentinels name as the master, does not answer"
        eventually(lambda: message in refusal(calls))
