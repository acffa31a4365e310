"""What a newer version of the package wrote is left as it is, and the caller is told to bring all to that version."""

from __future__ import annotations

import time

import pytest
import redis

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.redis.codec import with_ends
from django_distlock.exceptions import NewerRun
from django_distlock.formats import is_newer
from django_distlock.runs import LastRun
from django_distlock.types import Holder, new_token
from tests.support.tools import lock_request

TOLD = "was written by a newer version of django-distlock; bring all processes to that version"
LEASE = f"2 {new_token()} h {1:016} more {Holder.here().to_text()}"
ENTRY = f"2 {new_token()} of another kind"


@pytest.mark.parametrize("value", ["2 more", b"2 more", "9 ", b"3 \xff"])
def test_newer(value):
    assert is_newer(value)


@pytest.mark.parametrize("value", ["1 [", b"1 [", "0 ", "2", "", b"", "2x", "21 ", "a ", ": ", b"\xff "])
def test_not_newer(value):
    assert not is_newer(value)


@pytest.fixture(params=["redis", "redlock"])
def nodes(request):
    if request.param == "redis":
        request.getfixturevalue("valkey_locks")
        urls = [request.getfixturevalue("valkey").url]
    else:
        request.getfixturevalue("redlock_locks")
        urls = [server.url for server in request.getfixturevalue("five_valkeys")]
    clients = [redis.Redis.from_url(url, decode_responses=True) for url in urls]
    yield clients
    for client in clients:
        client.close()


def contents(client):
    """All keys but the counter, and until when each is kept."""
    keys = sorted(set(client.keys()) - {"lock|f"})
    return {key: (client.dump(key), client.pexpiretime(key)) for key in keys}


def refusal_of(call):
    with pytest.raises(LockBackendError, match=TOLD) as caught:
        call()
    assert caught.value.is_final
    return caught.value


def test_a_newer_lease(nodes):
    for node in nodes:
        node.set("lock:name", LEASE, px=60_000)
    before = [contents(node) for node in nodes]
    backend, request = locks["default"], lock_request("name")
    refusal_of(lambda: backend.acquire(request, queue=False))
    refusal_of(lambda: lock("name", wait=60).acquire())
    request.in_doubt = True  # so that the release retires its token
    refusal_of(lambda: backend.release(request))
    refusal_of(lambda: backend.renew([(request, 10.0)]))
    assert backend.look(["name"]) == [[]]
    assert [contents(node) for node in nodes] == before


@pytest.mark.parametrize("mode", ["try", "wait", "look", "last", "release", "leave"])
def test_a_newer_entry_stands_first(valkey_locks, store, mode):
    backend, holder, waiter = locks["default"], lock_request("name"), lock_request("name")
    if mode in ("release", "leave"):
        backend.acquire(holder, queue=False)
    store.zadd("lock|q:name", {ENTRY: 1})
    store.pexpire("lock|q:name", 60_000)
    before = contents(store)
    if mode in ("look", "last"):
        waiter.inbox, waiter.place = "Plock|in:process", f"{2:016}"
    if mode in ("release", "leave"):
        waiter.inbox = "Plock|in:process"
        refusal_of(lambda: backend.release(holder if mode == "release" else waiter))
    else:
        refusal_of(lambda: backend.acquire(waiter, queue=mode in ("wait", "look")))
    assert contents(store) == before


def test_a_newer_entry_further_behind(valkey_locks, store):
    """It waits until those before it had the lock."""
    backend, holder, waiter = locks["default"], lock_request("name"), lock_request("name")
    backend.acquire(holder, queue=False)
    backend.acquire(waiter, queue=True)
    store.zadd("lock|q:name", {ENTRY: 2**53})
    assert backend.release(holder)
    assert backend.acquire(waiter, queue=True).fence
    before = contents(store)
    refusal_of(lambda: backend.release(waiter))
    assert contents(store) == before


class TestANewerLeaseInAnotherSlot:
    """It stops nobody from ending its own lease or wait. Which slots are free beside it, nobody can tell."""

    @pytest.fixture
    def backend(self, valkey_locks):
        return locks["default"]

    @pytest.fixture(params=[f"2 {'a' * 26} h {1:016} 0004 more", "2 of another kind"])
    def newer(self, request, store):
        """Puts it before the other leases in their order."""

        def put():
            store.zadd("lock|l:name", {request.param: (time.time() + 60) * 1000})
            store.pexpire("lock|l:name", 60_000)
            return request.param

        return put

    @staticmethod
    def acquired(backend, number, ttl=100.0):
        granted = [lock_request("name", ttl=ttl, slots=number) for _ in range(number)]
        assert [backend.acquire(one, queue=False).slot for one in granted] == [*range(1, number + 1)]
        return granted

    def test_leases_are_renewed_and_end(self, backend, store, newer):
        first, second, third = self.acquired(backend, 3)
        kept = newer()
        assert backend.renew([(one, 200.0) for one in (first, second, third)]) == [True, True, True]
        assert backend.acquire(second, queue=False).slot == 2
        for one in (third, first, second):
            assert backend.release(one) is True
        assert store.zrange("lock|l:name", 0, -1) == [kept]
        assert not store.exists("lock:name")
        refusal_of(lambda: backend.renew([(second, 200.0)]))

    def test_leases_are_exchanged(self, backend, store, newer):
        held = self.acquired(backend, 2)
        newer()
        for slot, old in enumerate(held, 1):
            new = lock_request("name", slots=2)
            assert backend.exchange(old, new).slot == slot
            assert backend.release(new) is True
        refusal_of(lambda: backend.exchange(held[0], lock_request("name", slots=2)))

    @pytest.mark.parametrize("slot", [1, 2])
    def test_a_release_hands_nothing_on(self, backend, store, newer, slot):
        held = self.acquired(backend, 2)
        waiter = lock_request("name", slots=2)
        backend.acquire(waiter, queue=True)
        newer()
        queue, others = contents(store)["lock|q:name"], store.zrange("lock|l:name", 0, -1)
        assert backend.release(held[slot - 1]) is True
        assert contents(store)["lock|q:name"] == queue
        assert [value for value in others if held[slot - 1].token not in value] == store.zrange("lock|l:name", 0, -1)
        assert store.exists("lock:name") == (slot == 2)

    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize("by_last", [True, False])
    def test_who_leaves_the_queue_hands_nothing_on(self, backend, store, newer, slots, by_last):
        self.acquired(backend, 1)
        first, second = lock_request("name", slots=1), lock_request("name", slots=5)
        backend.acquire(first, queue=True)
        backend.acquire(second, queue=True)
        newer()
        before = contents(store)
        if by_last:
            refusal_of(lambda: backend.acquire(first, queue=False))
            assert contents(store) == before
        refusal_of(lambda: backend.release(first))
        [entry] = store.zrange("lock|q:name", 0, -1)
        assert second.token in entry
        assert contents(store) == before | {"lock|q:name": contents(store)["lock|q:name"]}

    @pytest.mark.parametrize("slots", [1, 2, 9])
    def test_it_is_in_the_way_of_all_others(self, backend, store, newer, slots):
        self.acquired(backend, 1)
        newer()
        before = contents(store)
        for queue in (False, True):
            refusal_of(lambda queue=queue: backend.acquire(lock_request("name", slots=slots), queue=queue))
        refusal_of(lambda: backend.release(lock_request("name", slots=slots)))
        assert contents(store) == before

    def test_in_the_first_slot_it_leaves_the_others_alone(self, backend, store):
        first, second = self.acquired(backend, 2)
        backend.release(first)
        store.set("lock:name", LEASE, px=60_000)
        assert backend.acquire(second, queue=False).slot == 2
        assert backend.release(second) is True
        assert [*contents(store)] == ["lock:name"]


def test_each_lease_in_another_slot_has_what_its_own_end_says():
    """Also where the last of them ended between the two questions."""
    time, ends = [b"1", b"500000"], [(b"live", 3500.0), (b"gone", 28500.0)]
    assert with_ends([b"live", b"5000", b"gone", b"30000"], time) == ends
    assert with_ends([[b"live", 5000.0], [b"gone", 30000.0]], time) == ends
    assert with_ends([], time) == []


def test_the_leases_in_other_slots_are_kept_until_the_last_of_them_ends(valkey_locks, store):
    def last_end():
        [(_, last)] = store.zrange("lock|l:name", -1, -1, withscores=True)
        assert store.pexpiretime("lock|l:name") == last
        return last

    backend, granted = locks["default"], [lock_request("name", ttl=ttl, slots=9) for ttl in (90.0, 10.0, 50.0, 30.0)]
    for request in granted:
        backend.acquire(request, queue=False)
    _, second, third, fourth = granted
    ends = [last_end()]
    for change in (
        lambda: backend.renew([(second, 20.0)]),
        lambda: backend.renew([(fourth, 70.0)]),
        lambda: backend.release(third),
        lambda: backend.release(fourth, 60.0),
        lambda: backend.release(fourth, force=True),
    ):
        change()
        ends.append(last_end())
    assert ends[0] == ends[1] < ends[2] == ends[3] > ends[4] > ends[5]
    assert backend.release(second)
    assert not store.exists("lock|l:name")


def test_also_when_the_only_one_is_made_anew(valkey_locks, store):
    """The key is gone then, for as long as the script runs."""

    def only():
        [(lease, ends)] = store.zrange("lock|l:name", 0, -1, withscores=True)
        assert store.pexpiretime("lock|l:name") == ends
        return lease[29:30], ends

    backend, (first, second, waiter) = locks["default"], [lock_request("name", slots=2, ttl=60.0) for _ in range(3)]
    for request in (first, second):
        backend.acquire(request, queue=False)
    granted = only()
    backend.acquire(second.copy(ttl=10.0), queue=False)  # late, so that it ends when it did before
    assert only() == granted
    backend.acquire(waiter, queue=True)
    backend.release(second)
    state, _ = only()
    assert state == "c"
    backend.acquire(waiter, queue=True)
    assert only() >= granted
    for request in (waiter, first):
        assert backend.release(request)


def test_a_newer_run(valkey_locks, store):
    backend = locks["default"]
    run = LastRun(1.0, "web-1", None, new_token())
    store.set("lock|r:entry", "2 more", px=60_000)
    store.set("lock|r:other", run.to_text(), px=60_000)
    before = contents(store)
    with pytest.raises(NewerRun, match=TOLD):
        backend.claim_run("entry", run, run._replace(at=2.0), 60.0)
    assert backend.find_runs(["entry", "other"]) == [None, run]
    assert [*backend.runs()] == [("other", run)]
    assert contents(store) == before


def test_the_entry_of_a_waiter(valkey_locks, store):
    """It has room for a number of slots and for a thread, which scripts leave aside."""
    backend, holder, waiter = locks["default"], lock_request("name"), lock_request("name")
    backend.acquire(holder, queue=False)
    backend.acquire(waiter, queue=True)
    [(entry, place)] = store.zrange("lock|q:name", 0, -1, withscores=True)
    assert entry == f"1 {waiter.token} 0001 {waiter.inbox}|"
    store.delete("lock|q:name")
    store.zadd("lock|q:name", {f"1 {waiter.token} 0005 {waiter.inbox}|MainThread: a|b c": place})
    assert backend.release(holder)
    assert store.get("lock:name").startswith(f"1 {waiter.token} c ")
