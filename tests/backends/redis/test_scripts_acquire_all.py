"""``acquire_all.lua``: several locks in one step, or none of them and nothing written."""

from __future__ import annotations

import asyncio
import time

import pytest

from django_distlock import LockBackendError, LockNotAcquired, lock, lock_all, locks
from django_distlock.backends.redis.operations import MOST_TOGETHER, acquire_all_script
from django_distlock.testing.tools import locked_names
from django_distlock.types import Grant
from tests.support.history import left_behind
from tests.support.inside import client_of
from tests.support.tools import eventually, lock_request, renewer_of

NAMES = ("a", "b", "c")
SHA = acquire_all_script(3).sha


def requests(names=NAMES, **more):
    return [lock_request(name, **more) for name in names]


def stored(store):
    return {key: store.dump(key) for key in store.keys("*")}


def make_busy(how, backend, store, name="b"):
    match how:
        case "held":
            backend.acquire(lock_request(name), queue=False)
        case "resting":
            backend.acquire(mine := lock_request(name), queue=False)
            backend.release(mine, 50)
        case "another slot":
            backend.acquire(first := lock_request(name, slots=2), queue=False)
            backend.acquire(lock_request(name, slots=2), queue=False)
            backend.release(first)
        case "waited for":
            store.zadd(f"lock|q:{name}", {"1 " + 26 * "0" + " 0001 S|x|": 1})
        case "written by a newer version":
            store.set(f"lock:{name}", "2 whatever it is")
        case "no lock":
            store.set(f"lock:{name}", "something")


BUSY = ["held", "resting", "another slot", "waited for", "written by a newer version", "no lock"]


@pytest.mark.parametrize("busy", NAMES)
@pytest.mark.parametrize("how", BUSY)
def test_where_one_is_busy_nothing_is_written(valkey_locks, store, how, busy):
    make_busy(how, valkey_locks, store, busy)
    before = stored(store)
    several = requests()
    assert valkey_locks.acquire_all(several) is None
    assert stored(store) == before
    assert not any(request.in_doubt for request in several)


def test_they_are_leases_as_any_other(valkey_locks, store):
    before = time.time()
    several = requests(ttl=40)
    grants = valkey_locks.acquire_all(several)
    fences = [grant.fence for grant in grants]
    assert fences == sorted(set(fences))
    assert before - 1 < fences[0] / 1e6 < time.time() + 1
    for request, fence in zip(several, fences, strict=True):
        assert store.get(f"lock:{request.name}") == f"1 {request.token} h {fence:016} {request.holder.to_text()}"
        assert 30_000 < store.pttl(f"lock:{request.name}") <= 40_000
    assert int(store.get("lock|f")) == fences[-1]
    assert valkey_locks.renew([(request, 60.0) for request in several]) == [True] * 3
    assert [valkey_locks.release(request) for request in several] == [True] * 3
    assert valkey_locks.acquire(lock_request("a"), queue=False).fence > fences[-1]


@pytest.mark.parametrize("counter", ["9007199254740000", "9007199254740992", "no number", "5", None])
def test_their_numbers_follow_on_those_of_the_counter(valkey_locks, store, counter):
    if counter:
        store.set("lock|f", counter)
    fences = [grant.fence for grant in valkey_locks.acquire_all(requests())]
    assert fences == sorted(set(fences))
    assert len(str(fences[0])) == 16


def test_a_lease_in_another_slot_that_has_ended_is_in_nobodys_way(valkey_locks):
    valkey_locks.acquire(lock_request("b", slots=2), queue=False)
    valkey_locks.acquire(short := lock_request("b", ttl=0.2, slots=2), queue=False)
    assert short.slot == 2
    [[first, _]] = valkey_locks.look(["b"])
    valkey_locks.release(lock_request("b").copy(token=first.token))
    eventually(lambda: valkey_locks.acquire_all(requests()))


class TestRepeats:
    def test_one_is_granted_what_it_has(self, valkey_locks, store):
        several = requests(ttl=40)
        first = valkey_locks.acquire_all(several)
        for request in several:
            request.ttl = 5
        assert [grant.fence for grant in valkey_locks.acquire_all(several)] == [grant.fence for grant in first]
        assert store.pttl("lock:b") > 30_000

    def test_what_was_freed_meanwhile_is_taken_again(self, valkey_locks):
        several = requests()
        first = valkey_locks.acquire_all(several)
        valkey_locks.release(several[1])
        again = valkey_locks.acquire_all(several)
        assert again[1].fence > first[1].fence
        assert (again[0].fence, again[2].fence) == (first[0].fence, first[2].fence)

    @pytest.mark.parametrize("retired", NAMES)
    def test_a_token_that_is_retired_stops_all(self, valkey_locks, retired):
        """A late attempt, of which the others are not retired yet."""
        several = requests()
        [request] = [request for request in several if request.name == retired]
        request.in_doubt = True
        valkey_locks.release(request)
        assert valkey_locks.acquire_all(several) is None
        assert locked_names(valkey_locks) == []

    def test_a_reply_that_is_lost_once_is_asked_for_again(self, proxied, proxy):
        with lock("warm"):
            pass
        assert proxied.acquire_all(requests())  # the script is loaded
        several = requests(("d", "e", "f"))
        proxy.cut_reply(SHA)
        grants = proxied.acquire_all(several)
        assert proxy.cuts == 1
        assert [lease.fence for [lease] in proxied.look(["d", "e", "f"])] == [grant.fence for grant in grants]
        assert all(request.in_doubt for request in several)

    @pytest.mark.parametrize("way", ["thread", "task"])
    def test_where_it_is_lost_for_good_every_token_is_retired(self, proxied, proxy, store, way):
        def group():
            return lock_all(*map(lock, NAMES), wait=0)

        async def enter():
            async with group():
                pass

        with group():  # the script is loaded
            pass
        proxy.cut_reply(SHA, 2)
        with pytest.raises(LockBackendError):
            if way == "thread":
                group().__enter__()
            else:
                asyncio.run(enter())
        assert proxy.cuts == 2
        eventually(lambda: not renewer_of(proxied).is_cleaning)
        assert locked_names(proxied) == []
        assert [store.zcard(f"lock|x:{name}") for name in NAMES] == [1, 1, 1]

    def test_one_that_comes_after_its_caller_has_left_gets_nothing(self, proxied, proxy, store):
        with lock_all(*map(lock, NAMES), wait=0):
            pass
        proxy.delay(SHA)
        with lock_all(*map(lock, NAMES), wait=0):  # by the repeat
            pass
        proxy.deliver()
        eventually(lambda: not renewer_of(proxied).is_cleaning)
        assert locked_names(proxied) == []
        assert not [key for key in left_behind(store.keys()) if not key.startswith("lock|x:")]


class TestWhatHasNoStep:
    def test_very_many(self, valkey_locks):
        assert valkey_locks.acquire_all(requests(map(str, range(MOST_TOGETHER)))) is not None
        assert valkey_locks.acquire_all(requests([f"more {number}" for number in range(MOST_TOGETHER + 1)])) is None

    def test_several_leases_of_a_lock(self, valkey_locks):
        assert valkey_locks.acquire_all(requests(slots=2)) is None

    def test_several_slots_of_a_cluster(self, cluster_locks):
        by_shard = {}
        for number in range(2000):
            by_shard.setdefault(cluster_locks.keys.shard_of(str(number)), []).append(str(number))
        together = next(names for names in by_shard.values() if len(names) > 1)[:2]
        apart = [names[0] for names in list(by_shard.values())[:2]]
        assert cluster_locks.acquire_all(requests(apart)) is None
        assert locked_names(cluster_locks) == []
        with lock_all(*map(lock, apart)):
            assert locked_names(cluster_locks) == sorted(apart)
        assert len(cluster_locks.acquire_all(requests(together))) == 2
        assert locked_names(cluster_locks) == sorted(together)

    def test_what_the_server_refuses_is_asked_for_one_by_one(self, valkey_locks, store):
        """As the proxies of some services refuse scripts."""
        store.lpush("lock|x:b", "no set of tokens")
        several = requests()
        assert valkey_locks.acquire_all(several) is None
        assert all(request.in_doubt for request in several)
        assert locked_names(valkey_locks) == []


def test_a_group_costs_one_command(valkey_locks, monkeypatch):
    with lock_all(*map(lock, NAMES)):  # the script is loaded
        pass
    sent = []
    client = client_of(valkey_locks)
    real = type(client).send

    def send(self, commands, *args, **options):
        sent.append(len(commands))
        return real(self, commands, *args, **options)

    monkeypatch.setattr(type(client), "send", send)
    with lock_all(*map(lock, NAMES)):
        assert sent == [1]


def test_under_one_busy_name_others_stay_free_for_who_does_not_wait(valkey_locks):
    assert isinstance(valkey_locks.acquire(lock_request("c"), queue=False), Grant)
    with pytest.raises(LockNotAcquired), lock_all(*map(lock, NAMES), wait=0):
        pytest.fail("the body ran")
    assert locked_names(valkey_locks) == ["c"]
    assert locks["default"] is valkey_locks
