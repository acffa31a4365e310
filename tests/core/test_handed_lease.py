"""Waiters that go on by the message which hands them the lock, before the store has confirmed it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from django_distlock import LockBackendError, LockLost, State, adopt, distributed_lock, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.backend import RedisBackend
from django_distlock.backends.redis.client import AsyncClient, Client
from django_distlock.core.handed_lease import HandedLease
from django_distlock.core.holds import ResponseRetainer
from django_distlock.core.lease import Lease
from django_distlock.signals import lock_lost
from django_distlock.types import Grant, LockInfo
from django_distlock.utils.clock import clock
from tests.support.inside import listener_of
from tests.support.leases import lease_of
from tests.support.tools import PATIENCE, eventually, lock_request, queue_of, renewer_of
from tests.support.waiting import waiters_of

REDIS = "django_distlock.backends.redis.RedisBackend"


@pytest.fixture
def backends(valkey, store, settings):
    """Two that know nothing of each other: ``default`` waits for what ``other`` has. The server knows no script."""
    settings.DISTRIBUTED_LOCKS = {alias: {"BACKEND": REDIS, "LOCATION": valkey.url} for alias in ("default", "other")}
    store.script_flush()
    yield locks
    locks.close()


@pytest.fixture
def unconfirmed(monkeypatch):
    """Nothing is sent after the message, and the renewer asks for nothing."""
    for kind in ("Client", "AsyncClient"):
        monkeypatch.setattr(f"django_distlock.backends.redis.client.{kind}.post", lambda *_: True)
    monkeypatch.setattr(Timing, "confirmed_after", 3600.0)


@pytest.fixture(params=["sync", "async"])
def waiting(request, backends):
    """Starts waiters. They end with the test."""
    yield from waiters_of(request.param)


def handed(store, waiting, **options):
    """A waiter that has taken its lease by the message, and the lease. A busy machine may need more than one."""

    def taken():
        waiter, lease = hand_over(store, waiting, **options)
        if isinstance(lease, HandedLease):
            return waiter, lease
        return waiter.leaves()

    return eventually(taken)


def hand_over(store, waiting, **options):
    """A waiter that got the lock when ``other`` released it, and its lease."""
    slots = {"slots": options["slots"]} if "slots" in options else {}
    others = [lock("name", using="other", **slots) for _ in range(options.get("slots", 1))]
    for other in others:
        assert other.acquire(blocking=False)
    waiter = waiting(**options)
    eventually(lambda: store.zcard("lock|q:name") == 1)
    others[-1].release()
    lease = waiter.gets_in()
    for other in others[:-1]:
        other.release()
    return waiter, lease


def in_store(store):
    return (store.get("lock:name") or "").split(" ", 4)


class TestTaken:
    def test_without_a_look(self, store, waiting):
        waiter, lease = handed(store, waiting)
        assert lease.is_held
        assert lease.state is State.HELD
        eventually(lambda: in_store(store)[2] == "h")
        _, token, _, fence, holder = in_store(store)
        assert (token, int(fence)) == (lease.token, lease.fence)
        assert holder == lease.holder.to_text()
        assert store.pttl("lock:name") > 1000 * Timing.grant_ttl
        eventually(lambda: lease.remaining > Timing.grant_ttl)  # the renewer has asked for the whole TTL
        waiter.leaves()
        assert waiter.error is None
        assert not store.exists("lock:name")

    def test_of_another_slot(self, store, waiting):
        _, lease = handed(store, waiting, slots=3)
        assert lease.slot == 3

        def confirmed():
            return [value for value in store.zrange("lock|l:name", 0, -1) if value.startswith(f"1 {lease.token} h ")]

        [value] = eventually(confirmed)
        assert value == f"1 {lease.token} h {lease.fence} 0003 {lease.holder.to_text()}"
        eventually(lambda: lease.remaining > Timing.grant_ttl)

    @pytest.mark.parametrize(
        "options", [{"renew": False}, {"min_hold": 0.1}, {"max_hold": 60}, {"ttl": Timing.grant_ttl / 2}], ids=str
    )
    def test_by_a_look_where_less_than_the_whole_ttl_would_not_do(self, store, waiting, options):
        _, lease = hand_over(store, waiting, **options)
        assert type(lease) is Lease

    def test_by_a_look_by_who_acquires_it_for_itself(self, store, backends):
        """It may pass the lease on at once, and that lasts for its TTL."""
        with lock("name", using="other"):
            handle, leases = lock("name", wait=PATIENCE), []
            thread = threading.Thread(target=lambda: leases.append(handle.acquire() and lease_of(handle)))
            thread.start()
            eventually(lambda: store.zcard("lock|q:name") == 1)
        thread.join(PATIENCE)
        assert type(leases[0]) is Lease
        leases[0].release()

    @pytest.mark.parametrize("way", ["sync", "async"])
    def test_by_the_decorator(self, store, backends, way):
        @distributed_lock("name", wait=PATIENCE)
        def work(): ...

        @distributed_lock("name", wait=PATIENCE)
        async def awork(): ...

        with lock("name", using="other"):
            thread = threading.Thread(target=work if way == "sync" else lambda: asyncio.run(awork()))
            thread.start()
            eventually(lambda: store.zcard("lock|q:name") == 1)
            [request] = queue_of(locks["default"]).line("name")
            assert request.takes_by_message
            assert request.inbox[0] in "TQ"
        thread.join(PATIENCE)
        assert not thread.is_alive()

    def test_by_a_look_of_a_message_that_comes_late(self, store, waiting, monkeypatch):
        monkeypatch.setattr(Timing, "message_trusted", 0.0)
        _, lease = hand_over(store, waiting)
        assert type(lease) is Lease

    def test_by_a_look_once_it_has_looked(self, store, waiting):
        """What the message tells of may have been handed over before that look, and be over."""
        other = lock("name", using="other")
        assert other.acquire(blocking=False)
        waiter = waiting()
        eventually(lambda: store.zcard("lock|q:name") == 1)
        [request] = queue_of(locks["default"]).line("name")
        eventually(lambda: request.place)  # before, it has not asked yet either
        request.event.set()
        eventually(lambda: request.placed_at < 0)
        other.release()
        assert type(waiter.gets_in()) is Lease

    def test_by_a_look_where_no_connection_is_at_hand(self, store, waiting, monkeypatch):
        for kind in ("Client", "AsyncClient"):
            monkeypatch.setattr(f"django_distlock.backends.redis.client.{kind}.post", lambda *_: False)
        _, lease = hand_over(store, waiting)
        assert type(lease) is Lease

    def test_one_after_the_other(self, store, waiting):
        waiters = [waiting(using=alias) for alias in ("default", "other") * 3]
        fences = []
        for _ in waiters:
            inside = eventually(lambda: [one for one in waiters if one.lease and one.lease.state is not State.RELEASED])
            assert len(inside) == 1
            fences.append(inside[0].lease.fence)
            inside[0].leaves()
        assert fences == sorted(set(fences))


class TestBelief:
    """What was handed over is believed for as long as the store certainly keeps it."""

    def test_ends_where_nothing_confirms_it(self, store, waiting, unconfirmed, monkeypatch):
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        waiter, lease = handed(store, waiting)
        assert 0 < lease.remaining <= 0.3
        assert lease.wait_lost(PATIENCE)
        assert not lease.is_held
        with pytest.raises(LockLost):
            lease.ensure_held()
        eventually(lambda: not store.exists("lock:name"))
        waiter.leaves()
        assert isinstance(waiter.error, LockLost)

    def test_that_is_over_is_a_loss_also_where_the_release_was_repeated(self, store, waiting, unconfirmed, monkeypatch):
        """The first attempt got no reply, and has not freed what was another's by then."""
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        waiter, _ = handed(store, waiting)
        send, asend = Client.send, AsyncClient.asend

        def repeated(*arguments, **options):
            reply = send(*arguments, **options)
            reply.in_doubt = True
            return reply

        async def arepeated(*arguments, **options):
            reply = await asend(*arguments, **options)
            reply.in_doubt = True
            return reply

        with lock("name", using="other", wait=PATIENCE):
            monkeypatch.setattr(Client, "send", repeated)
            monkeypatch.setattr(AsyncClient, "asend", arepeated)
            waiter.leaves()
        assert isinstance(waiter.error, LockLost)

    def test_ends_before_the_store_gives_it_to_another(self, store, waiting, unconfirmed, monkeypatch):
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        waiter, lease = handed(store, waiting)
        with lock("name", using="other", wait=PATIENCE) as next_one:
            assert not lease.is_held
            assert next_one.fence > lease.fence
        waiter.leaves()
        assert isinstance(waiter.error, LockLost)

    def test_that_is_over_is_no_loss_where_the_store_keeps_the_lease(self, store, waiting, monkeypatch):
        """Its process did not get to run, and the store was asked to keep it meanwhile."""
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        monkeypatch.setattr(Timing, "confirmed_after", 3600.0)
        waiter, lease = handed(store, waiting)
        eventually(lambda: store.pttl("lock:name") > 1000)
        eventually(lambda: not lease.is_held)
        waiter.leaves()
        assert waiter.error is None
        assert not store.exists("lock:name")

    def test_that_is_over_is_renewed_where_the_store_keeps_the_lease(self, store, waiting, monkeypatch):
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        monkeypatch.setattr(Timing, "confirmed_after", 0.5)
        _, lease = handed(store, waiting)
        eventually(lambda: not lease.is_held)
        eventually(lambda: lease.is_held)
        assert lease.remaining > 1

    def test_of_what_a_response_keeps_is_for_the_ttl_that_the_store_was_asked_for(self, store, waiting, monkeypatch):
        """Else the store would keep it beyond its end. Only later renewals are bounded by RESPONSE_MAX_HOLD."""
        monkeypatch.setattr(Timing, "confirmed_after", 0.5)
        monkeypatch.setattr(locks["default"], "response_max_hold", 5.0)
        waiter, lease = handed(store, waiting, ttl=60)
        retainer = ResponseRetainer(lease)
        waiter.leaves()
        eventually(lambda: lease.remaining > 50)
        retainer.release()
        assert not store.exists("lock:name")

    def test_of_what_somebody_freed_ends_soon(self, store, waiting):
        told = []

        def tell(lease, **_):
            told.append(lease)

        lock_lost.connect(tell)
        try:
            waiter, lease = handed(store, waiting, on_lost="log")
            assert lock("name", using="other").force_release()
            began = clock()
            assert lease.wait_lost(PATIENCE)
            assert clock() - began < PATIENCE  # at the first renewal, which a TTL of 60 s has after 20 s otherwise
            eventually(lambda: told == [lease])
        finally:
            lock_lost.disconnect(tell)
        waiter.leaves()

    def test_that_is_not_confirmed_goes_to_another_process_for_the_ttl(self, store, waiting, unconfirmed):
        """Without a question to the store: who adopts it asks."""
        waiter, lease = handed(store, waiting, ttl=60, on_lost="log")
        assert lease.remaining < Timing.grant_ttl
        with adopt(lease.detach()) as adopted:
            assert adopted.remaining > 50
            assert in_store(store)[1:3] == [adopted.token, "h"]
        waiter.leaves()

    @pytest.mark.parametrize("slots", [1, 3])
    def test_that_is_detached_at_once_is_confirmed(self, store, waiting, slots, monkeypatch):
        """Also by a server that has confirmed none before. Nobody asks once more."""
        monkeypatch.setattr(Timing, "confirmed_after", 3600.0)
        waiter, lease = handed(store, waiting, slots=slots, ttl=60, on_lost="log")
        lease.detach()

        def confirmed():
            values = [store.get("lock:name") or "", *store.zrange("lock|l:name", 0, -1)]
            return any(value.startswith(f"1 {lease.token} h ") for value in values)

        eventually(confirmed)
        waiter.leaves()

    def test_is_confirmed_by_a_renewal(self, store, waiting, unconfirmed):
        _, lease = handed(store, waiting)
        lease.renew(ttl=40)
        assert lease.remaining > 30
        assert in_store(store)[2] == "h"

    def test_survives_a_store_that_forgets_its_scripts(self, store, waiting):
        with lock("name", using="other"):
            waiter = waiting()
            eventually(lambda: store.zcard("lock|q:name") == 1)
            store.script_flush()
        lease = waiter.gets_in()
        eventually(lambda: lease.remaining > Timing.grant_ttl)
        assert in_store(store)[2] == "h"

    def test_takes_nothing_that_was_handed_to_another_meanwhile(self, store, waiting, unconfirmed, monkeypatch):
        """Else the next one would be granted, in the name of the former holder, what it may not have heard of."""
        for name in ("grant_ttl", "message_trusted"):
            monkeypatch.setattr(Timing, name, 2 * PATIENCE)

        def is_refused_before_the_next_one_took_it():
            former, lease = handed(store, waiting, ttl=60, on_lost="log")
            following = waiting(using="other", ttl=60)
            eventually(lambda: store.zcard("lock|q:name") == 1)
            assert lock("name").force_release()
            following.gets_in()
            before = in_store(store)
            with pytest.raises(LockLost):
                lease.renew()
            assert in_store(store) == before
            for waiter in (former, following):
                waiter.leaves()
            return before[2] == "c"

        eventually(is_refused_before_the_next_one_took_it)

    @pytest.mark.parametrize("slots", [1, 3])
    def test_is_not_shortened_by_a_renewal(self, store, waiting, unconfirmed, slots):
        _, lease = handed(store, waiting, slots=slots)
        lease.renew(ttl=0.1)
        assert lease.remaining > 0.1
        [info] = [info for info in locks["default"].look(["name"])[0] if info.token == lease.token]
        assert info.remaining > lease.remaining

    def test_is_confirmed_in_time_for_another_attempt(self, store, waiting, monkeypatch):
        waits, renew = [], RedisBackend.renew

        def note(backend, wanted, *, timeout=None):
            waits.append(timeout)
            return renew(backend, wanted, timeout=timeout)

        monkeypatch.setattr(RedisBackend, "renew", note)
        handed(store, waiting, ttl=60)
        assert eventually(lambda: waits)[0] < Timing.grant_ttl / 2


class TestAStoreThatIsAway:
    """Since it handed the lock over."""

    @pytest.fixture
    def away(self, monkeypatch, unconfirmed):
        """Renewals fail. Returns when they were tried."""
        tried = []

        def refuse(*_, **__):
            tried.append(clock())
            raise LockBackendError("the store is away")

        monkeypatch.setattr(Timing, "grant_ttl", 0.5)
        monkeypatch.setattr(Timing, "confirmed_after", 0.05)
        monkeypatch.setattr(RedisBackend, "renew", refuse)
        return tried

    def test_the_loss_is_told_when_the_holder_must_stop(self, store, waiting, away):
        told = []

        def tell(lease, **_):
            told.append(lease.wait_lost(0))

        lock_lost.connect(tell)
        try:
            waiter, lease = handed(store, waiting, ttl=300, on_lost="log")
            eventually(lambda: told)  # not after the TTL
        finally:
            lock_lost.disconnect(tell)
        assert told == [True]
        assert lease.state is State.LOST
        waiter.leaves()

    def test_what_the_store_keeps_of_a_lost_lease_is_released(self, store, waiting, monkeypatch):
        """It was asked to keep it for the TTL, and nobody learned that it did."""
        monkeypatch.setattr(Timing, "grant_ttl", 0.5)
        monkeypatch.setattr(Timing, "confirmed_after", 0.05)

        def refuse(*_, **__):
            raise LockBackendError("the store is away")

        monkeypatch.setattr(RedisBackend, "renew", refuse)
        waiter, lease = handed(store, waiting, ttl=300, on_lost="log")
        eventually(lambda: store.pttl("lock:name") > 1000)
        assert lease.wait_lost(PATIENCE)
        eventually(lambda: not store.exists("lock:name"))
        waiter.leaves()

    def test_a_release_does_not_take_the_loss_for_its_own_doing(self, store, waiting, away):
        waiter, lease = handed(store, waiting, ttl=300)
        assert lease.wait_lost(PATIENCE)
        with lock("name", using="other", wait=PATIENCE):
            waiter.leaves()
        assert isinstance(waiter.error, LockLost)

    def test_the_renewer_rests_between_its_attempts(self, store, waiting, away, monkeypatch):
        monkeypatch.setattr(locks["default"], "long_held", 0.3)
        waiter, lease = handed(store, waiting, ttl=3, on_lost="log")
        assert lease.wait_lost(PATIENCE)
        eventually(lambda: not renewer_of(locks["default"]).leases())
        assert len(away) < 20
        waiter.leaves()


def test_who_inherits_an_inbox_goes_by_the_message_only_if_it_may(store, backends):
    """The first question of the one before it was refused by the store, so that no place came with the inbox."""
    backend, before, after, first = backends["default"], lock_request(), lock_request(), lock_request()
    assert isinstance(backend.acquire(before, queue=True), Grant)
    listener_of(backend).start("name", PATIENCE)
    first.takes_by_message = True
    listener_of(backend).expect(first)
    after.inherit(first)
    backend.succeed(after)
    assert after.inbox[0] in "TQ"
    assert isinstance(backend.acquire(after, queue=True), LockInfo)
    assert after.place
    assert after.placed_at < 0
    backend.release(before)
    assert after.event.wait(PATIENCE)
    assert type(backend.acquire(after, queue=True)) is Grant


def test_what_may_be_taken_by_the_message_is_not_handed_back(store, backends):
    """The process exits, and one of its threads runs on."""
    backend, before, after = backends["default"], lock_request(), lock_request()
    listener_of(backend).start("name", PATIENCE)
    after.takes_by_message = True
    assert isinstance(backend.acquire(before, queue=True), Grant)
    assert isinstance(backend.acquire(after, queue=True), LockInfo)
    assert backend.release(before)
    [place] = backend.places([after])
    assert not backend.release(place)
    assert in_store(store)[1:3] == [after.token, "c"]


def test_a_message_with_an_older_number_than_the_place_grants_nothing(store, backends):
    backend, before, after = backends["default"], lock_request(), lock_request()
    listener_of(backend).start("name", PATIENCE)
    after.takes_by_message = True
    assert isinstance(backend.acquire(before, queue=True), Grant)
    assert isinstance(backend.acquire(after, queue=True), LockInfo)
    after.handed = 1, int(after.place)
    assert isinstance(backend.acquire(after, queue=True), LockInfo)
    backend.release(after)
    backend.release(before)
