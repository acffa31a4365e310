"""What a newer version of the package wrote is left as it is, and the caller is told to bring all to that version."""

from __future__ import annotations

import pytest
import redis

from django_distlock import LockBackendError, lock, locks
from django_distlock.exceptions import NewerRun
from django_distlock.formats import is_newer
from django_distlock.types import Holder, LastRun, new_token
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
