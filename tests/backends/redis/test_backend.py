"""The Redis backend when the network, the server, or its data fails."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from weakref import ref

import pytest
import redis

from django_distlock import LockBackendError, LockLost, State, __version__, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import pubsub
from django_distlock.backends.redis.config import Location
from django_distlock.backends.redis.keys import Listing
from django_distlock.backends.redis.operations import ACQUIRE, EXCHANGE, RELEASE, RENEW, RENEW_SLOT, Operations
from django_distlock.monitoring.inventory import Inventory
from django_distlock.runs import LastRun
from django_distlock.types import Grant, LockInfo, Slot
from django_distlock.utils.clock import safe_deadline
from django_distlock.utils.wakeup import WakeEvent
from tests.support.inside import clients_of_loops
from tests.support.leases import wait_for_renewal
from tests.support.tools import GIVES_UP_SOON, PATIENCE, ending_within, eventually, lock_request, locked_names

pytestmark = pytest.mark.slow

REDIS = "django_distlock.backends.redis.RedisBackend"


def point_at(settings, location, **options):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": location, "OPTIONS": options}}
    return locks["default"]


@pytest.fixture(autouse=True)
def _close():
    yield
    locks.close()


class LateEvent(WakeEvent):
    """Whoever it wakes goes on a moment later."""

    def wait(self, timeout):
        was_set = super().wait(timeout)
        time.sleep(0.1)
        return was_set

    async def await_set(self, timeout):
        was_set = await super().await_set(timeout)
        await asyncio.sleep(0.1)
        return was_set


@pytest.mark.parametrize("wait", [0, 10])
def test_replies_may_come_in_pieces(proxied, proxy, calls, store, wait):
    proxy.drips = True
    for _ in range(3):
        handle = calls(lock("name", wait=wait))
        assert handle.acquire()
        assert isinstance(calls(locks["default"]).acquire(lock_request(), queue=False), LockInfo)
        store.script_flush()
        handle.release()
    assert store.get("lock:name") is None


class TestLostReplies:
    """S3: what the server did, though nobody heard of it, counts."""

    def test_of_acquire(self, proxied, proxy, calls, store):
        proxy.cut_reply(ACQUIRE.sha)
        handle = lock("name")
        assert calls(handle).acquire() is True
        assert proxy.cuts == 1
        assert store.keys("lock:*") == ["lock:name"]
        calls(handle).release()
        assert store.keys("lock:*") == []

    @pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "by the renewer"])
    def test_of_acquire_before_the_lease_was_lost(self, proxied, proxy, calls, store, by_hand):
        """S4: the first command may still arrive, and the lock is free by then."""
        handle = lock("name", ttl=60 if by_hand else 3)
        proxy.cut_reply(ACQUIRE.sha)
        assert calls(handle).acquire()
        lease = handle.lease
        assert lock("name").force_release()
        if by_hand:
            with pytest.raises(LockLost):
                calls(lease).renew()
        assert lease.wait_lost(PATIENCE)
        eventually(lambda: store.zscore("lock|x:name", lease.token))  # it is retired

    def test_of_release(self, proxied, proxy, calls, store):
        handle = lock("name")
        calls(handle).acquire()
        proxy.cut_reply(RELEASE.sha)
        calls(handle).release()
        assert proxy.cuts == 1
        assert store.keys("lock:*") == []

    def test_of_renewal(self, proxied, proxy, calls):
        with lock("name", ttl=5) as lease:
            proxy.cut_reply(RENEW.sha)
            calls(lease).renew(60)
            assert proxy.cuts == 1
            assert lease.remaining > 50
            assert lease.state is State.HELD

    def test_of_an_exchange(self, proxied, proxy):
        old, new = lock_request(ttl=60), lock_request(ttl=60)
        proxied.exchange(lock_request("other"), lock_request("other"))  # the server knows the script then
        proxied.acquire(old, queue=False)
        proxy.cut_reply(EXCHANGE.sha)
        granted = proxied.exchange(old, new)
        assert proxy.cuts == 1
        [[lease]] = proxied.look(["name"])
        assert (lease.token, lease.fence) == (new.token, granted.fence)
        assert new.in_doubt

    def test_of_an_exchange_twice(self, proxied, proxy):
        """S4: what was granted unseen can be given back, and comes not back with a late command."""
        old, new = lock_request(ttl=60), lock_request(ttl=60)
        proxied.exchange(lock_request("other"), lock_request("other"))  # the server knows the script then
        proxied.acquire(old, queue=False)
        proxy.cut_reply(EXCHANGE.sha, times=2)
        with pytest.raises(LockBackendError):
            proxied.exchange(old, new)
        assert proxied.release(new) is True
        assert proxied.look(["name"]) == [[]]
        proxied.acquire(old, queue=False)
        assert proxied.exchange(old, new).token == old.token
        assert proxied.look(["name"])[0][0].token == old.token

    def test_of_the_old_token_before_it_was_exchanged(self, proxied):
        old, new = lock_request(ttl=60), lock_request(ttl=60)
        proxied.acquire(old, queue=False)
        old.in_doubt = True  # it was asked twice, and the first command may still arrive
        proxied.exchange(old, new)
        proxied.release(new)
        with pytest.raises(LockBackendError, match="given back"):
            proxied.acquire(old, queue=False)
        assert proxied.look(["name"]) == [[]]

    def test_of_a_background_renewal(self, proxied, proxy):
        with lock("name", ttl=6) as lease:
            proxy.cut_reply(RENEW.sha, times=2)
            eventually(lambda: proxy.cuts == 2)
            wait_for_renewal(lease)
            lease.ensure_held()

    @pytest.mark.parametrize("taken", [0, 1, 2])
    def test_in_any_slot(self, proxied, proxy, calls, taken):
        def slots():
            return [info.slot for info in proxied.look(["name"])[0]]

        with ExitStack() as stack:
            for _ in range(taken):
                stack.enter_context(lock("name", slots=3))
            proxy.cut_reply(ACQUIRE.sha)
            handle = lock("name", slots=3, ttl=5)
            assert calls(handle).acquire() is True
            assert (handle.lease.slot, slots()) == (taken + 1, [*range(1, taken + 2)])
            proxy.cut_reply(RENEW_SLOT.sha if taken else RENEW.sha)
            calls(handle.lease).renew(60)
            assert handle.lease.remaining > 50
            proxy.cut_reply(RELEASE.sha)
            calls(handle).release()
            assert proxy.cuts == 3
            assert slots() == [*range(1, taken + 1)]

    @pytest.mark.parametrize("slots", [1, 2])
    def test_of_who_has_left_get_no_place_which_would_stop_all_others(self, proxied, slots):
        late = lock_request(ttl=60, slots=slots)
        for _ in range(2):
            proxied.acquire(lock_request(slots=5), queue=False)
        late.in_doubt = True
        assert proxied.release(late) is False
        late.in_doubt = False  # as the command says that was sent first
        with pytest.raises(LockBackendError):
            proxied.acquire(late, queue=True)
        assert isinstance(proxied.acquire(lock_request(slots=5), queue=False), Grant)

    @pytest.mark.parametrize("taken", [0, 1, 2])
    def test_a_slot_that_was_granted_unseen_is_given_back(self, proxied, proxy, calls, taken):
        """S4: by who does not know which one."""
        with ExitStack() as stack:
            for _ in range(taken):
                stack.enter_context(lock("name", slots=3))
            proxy.cut_reply(ACQUIRE.sha, times=2)
            with pytest.raises(LockBackendError):
                calls(lock("name", slots=3, ttl=60)).acquire()
            eventually(lambda: len(proxied.look(["name"])[0]) == taken)

    def test_twice_is_an_error_and_what_was_granted_unseen_is_given_back(self, proxied, proxy, calls, store):
        """S4: no lease that nobody knows of."""
        proxy.cut_reply(ACQUIRE.sha, times=2)
        with pytest.raises(LockBackendError):
            calls(lock("name", ttl=60)).acquire()
        eventually(lambda: store.keys("lock:*") == [])

    def test_a_command_that_arrives_after_its_lock_was_given_up_makes_no_ghost(self, proxied, proxy, calls, store):
        """The network delivers the first attempt after its retry was granted and released."""
        proxy.delay(ACQUIRE.sha)
        handle = lock("name", ttl=60)
        assert calls(handle).acquire() is True
        calls(handle).release()
        proxy.deliver()
        assert store.keys("lock:*") == []

    def test_a_command_that_arrives_after_its_caller_gave_up_makes_no_ghost(self, proxied, proxy, calls, store):
        proxy.delay(ACQUIRE.sha)
        proxy.delay(ACQUIRE.sha)
        with pytest.raises(LockBackendError):
            calls(lock("name", ttl=60)).acquire()
        eventually(lambda: store.exists("lock|x:name"))
        proxy.deliver()
        assert store.keys("lock:*") == []

    def test_a_retired_token_is_forgotten_after_the_ttl(self, valkey_locks, store, calls):
        mine = lock_request(ttl=0.2)
        mine.in_doubt = True
        calls(valkey_locks).release(mine)
        assert 0 < store.pttl("lock|x:name") <= 200
        eventually(lambda: not store.exists("lock|x:name"), 3)

    def test_retired_tokens_do_not_pile_up_under_a_name_with_many_faults(self, valkey_locks, store, calls):
        def give_up(ttl):
            mine = lock_request(ttl=ttl)
            mine.in_doubt = True
            calls(valkey_locks).release(mine)
            return mine.token

        long = give_up(60)
        short = give_up(0.05)
        assert set(store.zrange("lock|x:name", 0, -1)) == {long, short}

        def pruned():
            give_up(0.01)
            return short not in store.zrange("lock|x:name", 0, -1)

        eventually(pruned)
        assert store.zscore("lock|x:name", long)
        assert store.pttl("lock|x:name") > 50_000

    def test_a_late_duplicate_of_renewal_shortens_nothing(self, valkey_locks):
        mine = lock_request(ttl=60)
        valkey_locks.acquire(mine, queue=False)
        valkey_locks.renew([(mine, 5.0)])
        assert valkey_locks.look(["name"])[0][0].remaining > 50

    def test_a_late_duplicate_of_acquire_does_not_wake_a_resting_lock(self, valkey_locks):
        mine = lock_request(ttl=60)
        valkey_locks.acquire(mine, queue=False)
        valkey_locks.release(mine, 5.0)
        with pytest.raises(LockBackendError, match="was given back before it was answered"):
            valkey_locks.acquire(mine, queue=False)
        assert valkey_locks.look(["name"])[0][0].resting

    def test_a_repeated_release_with_rest_is_no_error(self, proxied, proxy, calls):
        handle = lock("name", min_hold=0.5)
        calls(handle).acquire()
        proxy.cut_reply(RELEASE.sha)
        calls(handle).release()
        assert locks["default"].look(["name"])[0][0].resting


class TestStoreDown:
    """S16: LockBackendError within the timeouts, and the body never runs."""

    def test_refused(self, proxied, proxy, calls):
        proxy.refuse()
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=None)).acquire()
        message = str(caught.value)
        assert message.startswith(f"Lock backend 'default' at unix://{proxy.socket}?db=0: the server does not answer")
        assert "DISTRIBUTED_LOCKS['default']['LOCATION']" in message
        assert isinstance(caught.value.__cause__, redis.ConnectionError)
        proxy.accept()

    @GIVES_UP_SOON
    def test_hung(self, proxied, proxy, calls):
        proxy.hang = True
        with ending_within(1), pytest.raises(LockBackendError, match="does not answer"):
            calls(lock("name", wait=None)).acquire()

    def test_the_body_does_not_run(self, proxied, proxy):
        proxy.refuse()
        with pytest.raises(LockBackendError), lock("name"):
            pytest.fail("the body ran")

        async def main():
            async with lock("name"):
                pytest.fail("the body ran")

        with pytest.raises(LockBackendError):
            asyncio.run(main())
        proxy.accept()

    def test_every_call_says_so(self, proxied, proxy, calls):
        backend = calls(proxied)
        proxy.refuse()
        for call in (
            lambda: backend.acquire(lock_request(), queue=False),
            lambda: backend.release(lock_request()),
            lambda: backend.renew([(lock_request(), 5.0)]),
            lambda: backend.look(["name"]),
            lambda: locked_names(backend),
            lambda: backend.held(),
        ):
            with pytest.raises(LockBackendError):
                call()
        proxy.accept()

    @pytest.mark.parametrize("is_task", [False, True], ids=["sync", "async"])
    def test_it_leaves_nothing_to_the_garbage_collector(self, proxied, proxy, is_task):
        """The frames that a traceback keeps may have a connection, and the right to use one."""

        def failure():
            try:
                proxied.acquire(lock_request(), queue=False)
            except LockBackendError as error:
                return ref(error)

        async def afailure():
            try:
                await proxied.aacquire(lock_request(), queue=False)
            except LockBackendError as error:
                return ref(error)

        proxy.refuse()
        gc.collect()
        gc.disable()
        try:
            failed = asyncio.run(afailure()) if is_task else failure()
            assert failed() is None
        finally:
            gc.enable()
            proxy.accept()

    def test_connections_cut_while_idle_are_replaced_unnoticed(self, proxied, proxy, calls):
        handle = lock("name")
        for _ in range(3):
            assert calls(handle).acquire()
            calls(handle).release()
            proxy.refuse()
            proxy.accept()

    def test_a_connection_cut_while_it_is_opened_is_replaced_unnoticed(self, proxied, proxy, calls):
        proxy.cut_reply("SETINFO")
        handle = lock("name", wait=5)
        assert calls(handle).acquire()
        assert proxy.cuts == 1
        calls(handle).release()

    def test_a_subscription_cut_as_soon_as_it_stands_is_made_again(self, valkey_locks, store, calls, monkeypatch):
        subscribe, subscribed = pubsub.RedisListener.subscribe, []

        def subscribe_and_lose(listener, connection):
            subscribe(listener, connection)
            subscribed.append(connection)
            if len(subscribed) == 1:
                store.client_kill_filter(_type="pubsub")

        monkeypatch.setattr(pubsub.RedisListener, "subscribe", subscribe_and_lose)
        monkeypatch.setattr(pubsub, "WakeEvent", LateEvent)
        first, waiting = lock("name", ttl=60), lock("name", wait=10)
        first.acquire()
        timer = threading.Timer(1.0, first.release)
        timer.start()
        assert calls(waiting).acquire()
        assert len(subscribed) == 2
        timer.join()
        calls(waiting).release()

    def test_all_connections_cut_at_once_are_no_error(self, valkey_locks, store):
        async def main():
            await asyncio.gather(*(valkey_locks.alook(["name"]) for _ in range(3)))
            store.client_kill_filter(_type="normal", skipme=True)
            handle = lock("name")
            assert await handle.aacquire()
            await handle.arelease()

        asyncio.run(main())
        gate = threading.Barrier(3)
        threads = [threading.Thread(target=lambda: (gate.wait(10), valkey_locks.look(["name"]))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        store.client_kill_filter(_type="normal", skipme=True)
        with lock("name"):
            pass

    def test_a_hung_store_costs_no_lease_whose_renewal_can_still_succeed(self, proxy, settings):
        """The answer to a renewal is waited for a third of what the lease has left, whatever the timeout says."""
        point_at(settings, proxy.url, socket_timeout=5)
        with lock("name", ttl=3) as lease:
            time.sleep(0.7)
            proxy.hang = True
            time.sleep(1.2)
            proxy.hang = False
            eventually(lambda: lease.state is State.HELD and lease.remaining > 1.5)

    def test_a_caller_with_little_time_waits_little_for_a_hung_store(self, proxy, settings, calls):
        point_at(settings, proxy.url, socket_timeout=30)
        warm = lock("other")
        calls(warm).acquire()
        calls(warm).release()
        proxy.hang = True
        with ending_within(0.1), pytest.raises(LockBackendError):
            calls(lock("name")).acquire(timeout=0.1)
        proxy.hang = False

    def test_a_new_connection_is_waited_for_no_longer(self, proxy, settings, calls):
        """Nor is the server's part in its handshake."""
        point_at(settings, proxy.url, socket_timeout=30, socket_connect_timeout=30)
        proxy.hang = True
        with ending_within(0.1), pytest.raises(LockBackendError):
            calls(lock("name")).acquire(timeout=0.1)
        proxy.hang = False

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_a_connection_made_in_a_hurry_waits_as_long_as_any_other_afterwards(
        self, proxy, settings, store, monkeypatch, protocol
    ):
        connections, connected = [], Location.connected

        def noted(*arguments, **limits):
            connections.append(connected(*arguments, **limits))
            return connections[-1]

        monkeypatch.setattr(Location, "connected", noted)
        point_at(settings, f"{proxy.url}&protocol={protocol}", socket_timeout=10)
        with lock("name", wait=0):
            made = store.info("stats")["total_connections_received"]
            [connection] = connections
            assert connection.socket_timeout == connection.sock.gettimeout() == 10
            proxy.hang = True
            timer = threading.Timer(0.8, setattr, (proxy, "hang", False))
            timer.start()
            assert lock("name").locked()
            timer.join()
            assert connection.sock.gettimeout() == 10
        assert store.info("stats")["total_connections_received"] == made

    @pytest.mark.seconds(4)
    def test_a_wait_whose_store_dies_ends_at_its_deadline_and_leaves_nothing(self, proxied, proxy, store, calls):
        def refuse_when_it_waits():
            eventually(lambda: store.zcard("lock|q:name") == 1)
            proxy.refuse()

        other = lock_request(ttl=60)
        store.set("lock:name", f"1 {other.token} h {1:016d} {other.holder.to_text()}", px=60_000)
        with ThreadPoolExecutor(1) as threads:
            refused = threads.submit(refuse_when_it_waits)
            with pytest.raises(LockBackendError, match="does not answer"):
                calls(lock("name", wait=3)).acquire()
            refused.result()
        proxy.accept()
        eventually(lambda: not store.exists("lock|q:name"))
        store.delete("lock:name")
        assert calls(lock("name")).locked() is False

    def test_release_with_a_dead_store_is_an_error_and_is_made_up_for(self, proxied, proxy, store, calls):
        handle = lock("name", ttl=60)
        calls(handle).acquire()
        proxy.refuse()
        with pytest.raises(LockBackendError):
            calls(handle).release()
        assert store.keys("lock:*") == ["lock:name"]
        proxy.accept()
        eventually(lambda: store.keys("lock:*") == [])

    def test_the_bodys_exception_survives_a_dead_store(self, proxied, proxy):
        with pytest.raises(ZeroDivisionError), lock("name"):
            proxy.refuse()
            _ = 1 / 0
        proxy.accept()


class TestRenewalAndLoss:
    """S5: one failed renewal loses nothing, a loss is told."""

    def test_it_is_packed_once_for_a_ttl_and_a_token(self, valkey_locks):
        mine = lock_request(ttl=5)
        valkey_locks.acquire(mine, queue=False)
        assert valkey_locks.renew([(mine, 5.0)]) == [True]
        packed = mine.renewal
        assert valkey_locks.renew([(mine, 5.0)]) == [True]
        assert mine.renewal is packed
        assert valkey_locks.renew([(mine, 60.0)]) == [True]
        assert valkey_locks.look(["name"])[0][0].remaining > 50
        assert valkey_locks.renew([(mine.copy(token="another"), 60.0)]) == [False]
        assert mine.copy(prefix="another").renewal is None
        mine.slot = 2
        assert valkey_locks.renew([(mine, 60.0)]) == [False]
        mine.slot = 1
        assert valkey_locks.renew([(mine, 60.0)]) == [True]
        mine.inherit(lock_request())
        assert valkey_locks.renew([(mine, 60.0)]) == [False]

    def test_it_is_packed_anew_once_the_lease_is_confirmed(self, valkey_locks):
        mine = lock_request(ttl=5)
        valkey_locks.acquire(mine, queue=False)
        mine.is_unconfirmed = True
        assert valkey_locks.renew([(mine, 5.0)]) == [True]
        unconfirmed = mine.renewal
        mine.is_unconfirmed = False
        assert valkey_locks.renew([(mine, 5.0)]) == [True]
        told = [mine.holder.to_text().encode() in renewal[-1].packed for renewal in (unconfirmed, mine.renewal)]
        assert told == [True, False]

    def test_an_outage_shorter_than_the_lease_loses_nothing(self, proxied, proxy, caplog):
        with lock("name", ttl=3) as lease:
            proxy.refuse()
            eventually(lambda: lease.state is State.UNKNOWN)
            lease.ensure_held()
            proxy.accept()
            eventually(lambda: lease.state is State.HELD)
            time.sleep(2)
            lease.ensure_held()
        assert "Renewal of lock 'name' failed; it is lost in" in caplog.text

    def test_an_outage_longer_than_the_lease_is_told_as_loss(self, proxied, proxy, caplog):
        with pytest.raises(LockLost), lock("name", ttl=0.5) as lease:
            proxy.refuse()
            eventually(lambda: "was lost: its renewal did not succeed in time" in caplog.text)
            assert lease.state is State.LOST
        proxy.accept()

    def test_a_hung_store_cannot_hide_the_loss(self, proxy, settings):
        point_at(settings, proxy.url, socket_timeout=2 * PATIENCE)
        with pytest.raises(LockLost), lock("name", ttl=0.5) as lease:
            proxy.hang = True
            eventually(lambda: lease.state is State.LOST)
            proxy.hang = False

    def test_a_renewal_that_succeeded_too_late_undoes_no_loss(self, valkey_locks, store, monkeypatch, caplog):
        with pytest.raises(LockLost), lock("name", ttl=0.5) as lease:
            renew = valkey_locks.renew

            def late(wanted, **_):
                renewed = renew([(lock_request, 60.0) for lock_request, _ in wanted])
                eventually(lambda: lease.state is State.LOST)
                return renewed

            monkeypatch.setattr(valkey_locks, "renew", late)
            eventually(lambda: "was lost: its renewal did not succeed in time" in caplog.text)
            assert lease.state is State.LOST
            eventually(lambda: not store.exists("lock:name"))

    def test_a_renewal_by_hand_that_succeeded_too_late_neither(self, valkey_locks, store, monkeypatch, caplog, calls):
        renewed = Operations.renewed

        def late(self, answer):
            eventually(lambda: lease.state is State.LOST)
            return renewed(self, answer)

        with pytest.raises(LockLost), lock("name", ttl=0.5, renew=False) as lease:
            monkeypatch.setattr(Operations, "renewed", late)
            with pytest.raises(LockLost):
                calls(lease).renew(60)
            assert lease.state is State.LOST
            eventually(lambda: not store.exists("lock:name"))
        assert caplog.text.count("was lost: ") == 1

    def test_a_store_emptied_is_told_as_loss(self, valkey_locks, store, caplog):
        with pytest.raises(LockLost), lock("name", ttl=0.5) as lease:
            store.flushall()
            eventually(lambda: lease.state is State.LOST, 3)
        eventually(lambda: "the store no longer knows it" in caplog.text)  # by the thread that renews

    def test_a_store_emptied_just_before_release_is_told(self, valkey_locks, store):
        with pytest.raises(LockLost), lock("name"):
            store.flushall()

    def test_a_grant_that_took_too_long_to_hear_of_is_given_back(self, valkey_locks, monkeypatch):
        """A process stopped between the grant and its reply must not believe in a lease that may be over."""
        given_back = []
        answer = valkey_locks.acquire

        def late(lock_request, *, queue):
            grant = answer(lock_request, queue=queue)
            if not given_back:
                given_back.append(lock_request.token)
                return Grant(grant.fence, grant.sent_at - lock_request.ttl)
            return grant

        monkeypatch.setattr(valkey_locks, "acquire", late)
        with lock("name", ttl=5) as lease:
            assert [lease.token] != given_back
            assert valkey_locks.look(["name"])[0][0].token == lease.token

    def test_the_deadline_counts_from_before_the_request(self, valkey_locks):
        from django_distlock.utils.clock import clock

        before = clock()
        with lock("name", ttl=10) as lease:
            deadline = lease.remaining + clock()
            assert before <= deadline - 10 * 0.99 + 0.002 <= clock()
        assert safe_deadline(100.0, 10.0) == pytest.approx(109.898)


class TestTheServerRefuses:
    def test_a_wrong_password(self, own_valkey, settings, calls):
        server = own_valkey("--requirepass", "right")
        point_at(settings, f"unix://:wrong@{server.socket}")
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name")).acquire()
        assert "the server refused the user or password; correct DISTRIBUTED_LOCKS['default']" in str(caught.value)
        assert "wrong" not in str(caught.value).replace("wrong number", "")
        point_at(settings, f"unix://:right@{server.socket}")
        handle = lock("name")
        assert calls(handle).acquire()
        calls(handle).release()

    def test_a_read_only_replica(self, own_valkey, settings, calls):
        server = own_valkey("--replicaof", "127.0.0.1", "1")
        point_at(settings, server.url)
        with pytest.raises(LockBackendError, match="this server is a read-only replica; point .*LOCATION"):
            calls(lock("name", wait=0)).acquire()

    @pytest.mark.parametrize("refuses", [["--replicaof", "127.0.0.1", "1"], ["--min-replicas-to-write", "1"]])
    def test_the_chain_of_its_causes_ends(self, own_valkey, settings, calls, refuses):
        """What reports errors walks it."""
        point_at(settings, own_valkey(*refuses).url)
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=0)).acquire()
        chain, link = [], caught.value
        while link is not None:
            assert link not in chain
            chain.append(link)
            link = link.__cause__ or link.__context__
        assert any(isinstance(link, redis.ResponseError) for link in chain)

    def test_out_of_memory(self, own_valkey, settings, calls):
        server = own_valkey()
        point_at(settings, server.url)
        with redis.Redis.from_url(server.url) as client:
            holder = lock("held before")
            calls(holder).acquire()
            client.config_set("maxmemory", 1)
            with pytest.raises(LockBackendError, match="the server is out of memory.*raise its maxmemory"):
                calls(lock("name")).acquire()
            calls(holder).release()

    def test_a_user_without_rights(self, own_valkey, settings, calls):
        server = own_valkey("--user", "small", "on", ">pw", "~other:*", "+@all")
        point_at(settings, f"unix://small:pw@{server.socket}")
        with pytest.raises(LockBackendError, match="may not run this command or use this key; widen its ACL rule"):
            calls(lock("name")).acquire()

    @pytest.mark.parametrize("write", [lambda s: s.set("lock:name", "foreign"), lambda s: s.lpush("lock:name", "x")])
    def test_a_foreign_value_under_our_key(self, valkey_locks, store, calls, write, caplog):
        write(store)
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name")).acquire()
        message = str(caught.value).lower()
        assert "delete" in message
        assert "DISTRIBUTED_LOCKS['default']['KEY_PREFIX']".lower() in message
        other = lock("other")
        calls(other).acquire()
        assert [info.name for info in calls(valkey_locks).held()] == ["other"]
        assert "'lock:name'" in caplog.text
        nobody, holder = calls(valkey_locks).holders([Slot("name"), Slot("other")])
        assert (nobody, holder is None) == (None, False)
        assert 0 < calls(valkey_locks).remaining([Slot("name"), Slot("other")])[1] <= 30
        calls(other).release()
        assert store.exists("lock:name")

    def test_a_foreign_value_under_one_key_hides_nothing_of_the_others(self, valkey_locks, store):
        with lock("healthy", ttl=6) as healthy, pytest.raises(LockLost), lock("spoilt", ttl=6) as spoilt:
            store.delete("lock:spoilt")
            store.lpush("lock:spoilt", "foreign")
            eventually(lambda: spoilt.state is State.LOST)
            healthy.ensure_held()
            eventually(lambda: store.pttl("lock:healthy") > 5000)
            store.delete("lock:spoilt")

    def test_scripts_forgotten_by_the_server_are_loaded_again(self, valkey_locks, store, calls):
        for _ in range(2):
            store.script_flush()
            handle = lock("name")
            assert calls(handle).acquire()
            store.script_flush()
            with_another = lock_request("other")
            valkey_locks.acquire(with_another, queue=False)
            store.script_flush()
            assert calls(valkey_locks).renew([(with_another, 5.0), (lock_request("none"), 5.0)]) == [True, False]
            store.script_flush()
            assert calls(valkey_locks).release(with_another) is True
            calls(handle).release()

    @pytest.mark.parametrize(
        ("fault", "advice"),
        [
            ("slow", r"raise DISTRIBUTED_LOCKS\['default'\]\['OPTIONS'\]\['max_connections'\]"),
            # Whoever waits for the only connection hears of it first, or of the breaker that has opened meanwhile.
            (
                "hang",
                "the server does not answer; check that it runs .*(all 1 connections wait|asked in the background)",
            ),
        ],
    )
    def test_a_pool_that_is_exhausted_says_why(self, proxy, settings, fault, advice):
        """Raising the number of connections is of no use where the server does not answer on those that are there."""
        backend = point_at(settings, proxy.url, socket_timeout=0.6, max_connections=1)
        backend.look(["name"])
        setattr(proxy, fault, 0.1)

        def ask(number):
            time.sleep(number / 100)  # so that some still wait when the first one has failed
            try:
                backend.look(["name"])
            except LockBackendError as error:
                return str(error)

        with ThreadPoolExecutor(40) as threads:
            errors = list(threads.map(ask, range(40)))
        setattr(proxy, fault, 0)
        assert any(re.search(advice, error) for error in errors if error), errors

    @pytest.mark.seconds(14)
    def test_many_more_tasks_than_connections(self, valkey, store, settings):
        """However long the event loop is busy, that is no silence of the server."""
        point_at(settings, valkey.url, max_connections=2, socket_timeout=2.0)

        async def one(number):
            async with lock("name:{}", number, wait=120):
                if number % 400 == 0:
                    time.sleep(2.0)  # noqa: ASYNC251 - the loop is to be busy

        async def main():
            await asyncio.gather(*(one(number) for number in range(2000)))

        asyncio.run(main())
        assert store.keys("lock:*") == []

    @pytest.mark.seconds(11)
    def test_a_connection_that_breaks_costs_those_who_queue_nothing(self, valkey, store, settings):
        """However long they have queued: it is replaced at once, so the server was not silent."""
        point_at(settings, valkey.url, max_connections=1, socket_timeout=1.0)

        async def one(number):
            async with lock("name:{}", number, wait=None, ttl=600):
                pass

        async def main():
            tasks = [asyncio.create_task(one(number)) for number in range(4000)]
            await asyncio.wait(tasks, timeout=3.0)
            for client in await asyncio.to_thread(store.client_list):  # by number: none that comes in their place
                await asyncio.to_thread(store.client_kill_filter, _id=client["id"], skipme=True)
            await asyncio.gather(*tasks)

        asyncio.run(main())

    def test_a_connection_that_comes_back_is_taken_by_who_was_woken(self, proxy, settings):
        """All who wait were woken to see that the server is silent, when it was not any more."""
        backend = point_at(settings, proxy.url, max_connections=1, socket_timeout=2.0)
        outcomes = []

        async def ask(number):
            try:
                outcomes.append(await backend.aacquire(lock_request(f"{number}"), queue=False))
            except LockBackendError as error:
                outcomes.append(error)
                proxy.hang = False

        async def main():
            proxy.hang = True
            await asyncio.gather(*map(ask, range(20)))

        asyncio.run(main())
        assert isinstance(outcomes[0], LockBackendError)
        assert [type(outcome) for outcome in outcomes[1:]] == [Grant] * 19

    def test_who_gives_up_waiting_for_a_connection_keeps_none(self, proxy, settings):
        backend = point_at(settings, proxy.url, max_connections=1, socket_timeout=5)

        async def main():
            await backend.alook(["name"])
            proxy.slow = 0.3
            asking = [asyncio.create_task(backend.alook(["name"])) for _ in range(4)]
            await asyncio.sleep(0.1)
            proxy.slow = 0
            asking[1].cancel()
            asking[2].cancel()
            assert await asking[0] == await asking[3] == [[]]
            assert await asyncio.gather(asking[1], return_exceptions=True) != [[[]]]
            assert await backend.alook(["name"]) == [[]]

        asyncio.run(main())

    @pytest.mark.parametrize("call", ["release", "renew"])
    @pytest.mark.parametrize("way", ["threads", "tasks"])
    def test_who_holds_a_lock_waits_for_a_connection_while_the_server_answers_others(self, proxy, settings, call, way):
        """Two timeouts are for the server; the others who ask are not its fault."""
        point_at(settings, proxy.url, max_connections=1, socket_timeout=0.5)
        handles = [lock("name:{}", number, ttl=120) for number in range(30)]
        held = [handle.__enter__() for handle in handles]

        async def each_by_a_task():
            await asyncio.gather(*(getattr(lease, f"a{call}")() for lease in held))

        proxy.slow = 0.05  # for each, one after another
        if way == "tasks":
            asyncio.run(each_by_a_task())
        else:
            with ThreadPoolExecutor(len(held)) as threads:
                assert len(list(threads.map(lambda lease: getattr(lease, call)(), held))) == len(held)
        proxy.slow = 0
        for handle, lease in zip(handles, held, strict=True):
            assert lease.state is (State.HELD if call == "renew" else State.RELEASED)
            if call == "renew":
                handle.release()


class TestTheServerRestarts:
    def test_with_its_data(self, own_valkey, settings):
        server = own_valkey("--appendonly", "yes", "--appendfsync", "always")
        point_at(settings, server.url)
        with lock("name", ttl=60) as lease:
            server.process.kill()
            server.process.wait()
            server.start()
            lease.renew()
            assert not lock("name").acquire(blocking=False)
        with lock("name", wait=0) as successor:
            assert successor.fence > lease.fence

    def test_empty(self, own_valkey, settings):
        server = own_valkey()
        point_at(settings, server.url)
        with pytest.raises(LockLost), lock("name", ttl=1) as lease:
            server.process.kill()
            server.process.wait()
            server.start()
            eventually(lambda: lease.state is State.LOST, 5)
        with lock("name") as lease:
            assert lease.state is State.HELD


class TestWhatIsStored:
    def test_one_key_per_lock_with_its_ttl_and_one_counter(self, valkey_locks, store):
        with lock("a", ttl=20), lock("b"):
            assert sorted(store.keys()) == ["lock:a", "lock:b", "lock|f"]
            assert 19_000 < store.pttl("lock:a") <= 20_000
        assert store.keys() == ["lock|f"]

    def test_nothing_is_left_of_many_names(self, valkey_locks, store):
        for number in range(2000):
            with lock("n:{}", number):
                pass
        assert store.keys() == ["lock|f"]

    def test_fencing_numbers_grow_though_the_stores_clock_steps_back(self, valkey_locks, store):
        ahead = (int(time.time()) + 3600) * 1_000_000
        store.set("lock|f", ahead)
        with lock("name") as first:
            pass
        with lock("name") as second:
            pass
        assert (first.fence, second.fence) == (ahead + 1, ahead + 2)

    def test_fencing_numbers_grow_though_the_store_lost_everything(self, valkey_locks, store):
        with lock("name") as first:
            pass
        store.flushall()
        with lock("name") as second:
            pass
        assert second.fence > first.fence

    def test_prefixes_keep_locks_apart(self, valkey, store, settings):
        entry = {"BACKEND": REDIS, "LOCATION": valkey.url}
        settings.DISTRIBUTED_LOCKS = {
            "default": {**entry, "KEY_PREFIX": "shop"},
            "other": {**entry, "KEY_PREFIX": "shop2"},
        }
        with lock("name"), lock("name", using="other"):
            assert sorted(store.keys()) == ["shop2:name", "shop2|f", "shop:name", "shop|f"]
            assert [info.name for info in locks["default"].held()] == ["name"]

    def test_listing_among_many_foreign_keys(self, valkey_locks, store):
        store.mset({f"other:{number}": "x" for number in range(20_000)})
        with lock("one"), lock("two"):
            assert locked_names(valkey_locks) == ["one", "two"]

    def test_each_lease_is_listed_once_though_the_server_tells_of_its_key_twice(self, valkey_locks, calls, monkeypatch):
        """As SCAN may while the server moves its keys to another table."""
        names = Listing.names
        monkeypatch.setattr(Listing, "names", lambda *args: {kind: found * 2 for kind, found in names(*args).items()})
        now = LastRun(at=2.0, host="here", token="t")
        assert valkey_locks.claim_run("entry", now, now, 10.0) == now
        with lock("one"), lock("two", slots=2), lock("two", slots=2):
            assert isinstance(valkey_locks.acquire(lock_request("one"), queue=True), LockInfo)
            once = [("one", 1), ("two", 1), ("two", 2)]
            assert list(valkey_locks.waited_for()) == ["one"]
            assert list(valkey_locks.runs()) == [("entry", now)]
            assert sorted(calls(valkey_locks).list_slots()) == once
            assert sorted((info.name, info.slot) for info in calls(valkey_locks).held(step=2)) == once
            keys = Inventory().keys()
            assert [(key.name, key.slot) for key in keys] == once

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_with_either_protocol(self, valkey, store, settings, calls, protocol):
        point_at(settings, f"{valkey.url}&protocol={protocol}")
        handle = lock("name")
        assert calls(handle).acquire()
        assert isinstance(calls(locks["default"]).acquire(lock_request(), queue=False), LockInfo)
        calls(handle).release()


class TestPlainPubSub:
    def test_waiters_are_woken_where_the_server_has_no_sharded_one(self, valkey_locks, store, monkeypatch, calls):
        """As before Redis 7."""
        monkeypatch.setattr(pubsub, "KINDS", (("NOSUCHCOMMAND", "S"), ("SUBSCRIBE", "P")))
        monkeypatch.setattr(Timing, "look_interval", 4 * PATIENCE)
        first, waiting = lock("name", ttl=4 * PATIENCE), lock("name", wait=PATIENCE)
        first.acquire()
        timer = threading.Timer(0.2, first.release)
        timer.start()
        assert calls(waiting).acquire()  # woken: it does not look before its wait is over
        assert store.pubsub_channels("lock|in:*")
        timer.join()
        calls(waiting).release()


class TestLocations:
    def test_a_tcp_url(self, own_valkey, settings, calls):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = own_valkey("--port", str(port))
        point_at(settings, f"redis://127.0.0.1:{port}/3")
        handle = lock("name")
        calls(handle).acquire()
        assert locks["default"].location.text == f"redis://127.0.0.1:{port}/3"
        with redis.Redis.from_url(server.url.replace("db=0", "db=3")) as client:
            assert client.exists("lock:name")
        calls(handle).release()

    def test_timeouts_are_finite_whatever_the_url_or_the_cache_says(self, valkey, store, settings):
        settings.CACHES = {
            "default": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": valkey.url,
                "OPTIONS": {"SOCKET_TIMEOUT": None, "CONNECTION_POOL_KWARGS": {"max_connections": 1}},
            }
        }
        for location in (f"{valkey.url}&socket_timeout=9999", "cache:default"):
            backend = point_at(settings, location, socket_timeout=1.5)
            assert backend.location.arguments["socket_timeout"] == 1.5
            assert backend.location.arguments["socket_connect_timeout"] == 2.0

    @pytest.mark.parametrize("together", [list, ";".join])
    def test_a_cache_of_django_lends_its_first_server(self, valkey, store, settings, together):
        settings.CACHES = {
            "default": {
                "BACKEND": "django.core.cache.backends.redis.RedisCache",
                "LOCATION": together([valkey.url, "redis://replica.invalid"]),
                "OPTIONS": {"db": 3, "socket_timeout": None},
            }
        }
        backend = point_at(settings, "cache:default")
        assert backend.location.arguments["socket_timeout"] == 2.0
        with lock("name"), redis.Redis.from_url(valkey.url, db=3) as third:
            assert third.exists("lock:name")

    @pytest.mark.filterwarnings("ignore:.*'lib_name':DeprecationWarning")
    @pytest.mark.parametrize("given", [{}, {"lib_name": "ours"}])
    def test_the_server_tells_which_version_is_connected(self, own_valkey, settings, calls, given):
        server = own_valkey()
        point_at(settings, f"{server.url}{''.join(f'&{key}={value}' for key, value in given.items())}")
        handle = calls(lock("name"))
        assert handle.acquire()
        with redis.Redis.from_url(server.url) as store:
            names = {client["lib-name"] for client in store.client_list()}
        assert given.get("lib_name", f"redis-py(django-distlock_v{__version__})") in names
        handle.release()

    def test_no_connection_reads_the_metadata_of_a_package(self, valkey, store, settings, calls, monkeypatch):
        """It takes a millisecond. The first backend of a process reads it."""
        point_at(settings, valkey.url)
        read = []
        monkeypatch.setattr("importlib.metadata.version", lambda name: read.append(name) or "1")
        monkeypatch.setattr("redis.utils.get_lib_version", lambda: read.append("redis") or "1")
        point_at(settings, f"{valkey.url}&socket_timeout=3")
        handle = calls(lock("name"))
        assert handle.acquire()
        handle.release()
        assert read == []

    def test_locks_do_not_go_when_a_cache_is_cleared_that_has_another_database(self, valkey, store, settings):
        from django.core.cache import caches

        settings.CACHES = {
            "c": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"unix://{valkey.socket}?db=1"}
        }
        point_at(settings, valkey.url)
        with lock("name") as lease:
            caches["c"].set("key", "value")
            caches["c"].clear()
            assert locks["default"].look(["name"])[0][0].token == lease.token


class TestEventLoops:
    def test_connections_are_closed_with_their_loop(self, own_valkey, settings):
        server = own_valkey()
        backend = point_at(settings, server.url)

        async def main():
            async with lock("name"):
                return connected()

        with redis.Redis.from_url(server.url) as store:

            def connected():
                return int(store.info("clients")["connected_clients"])

            before = connected()
            for _ in range(3):
                assert asyncio.run(main()) > before
                eventually(lambda: connected() == before)
        assert len(clients_of_loops(backend)) == 0

    def test_what_ends_with_the_loop_leaves_no_connection(self, own_valkey, settings):
        """Generators that were left over are closed at the same time as the connections."""
        left_over = []

        async def guarded():
            async with lock("name"):
                yield

        async def main():
            left_over.append(guarded())
            await anext(left_over[0])

        server = own_valkey()
        point_at(settings, server.url)
        with redis.Redis.from_url(server.url) as store:
            before = len(store.client_list())
            asyncio.run(main())
            assert not store.exists("lock:name")
            eventually(lambda: len(store.client_list()) == before)

    def test_a_loop_closed_without_shutdown_leaves_the_backend_usable(self, valkey_locks):
        loop = asyncio.new_event_loop()
        handle = lock("name")
        assert loop.run_until_complete(handle.aacquire())
        loop.run_until_complete(handle.arelease())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        assert asyncio.run(handle.aacquire())
        asyncio.run(handle.arelease())

    def test_a_cancelled_command_breaks_no_connection_for_others(self, proxied, proxy):
        async def main():
            async with lock("other"):
                proxy.hang = True
                task = asyncio.create_task(lock("name", ttl=60).aacquire())
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                proxy.hang = False
            assert not await lock("other").alocked()
            free = lock("name", wait=5)
            assert await free.aacquire()
            await free.arelease()

        asyncio.run(main())
