"""What the data of nodes says, and what becomes of data that nobody can read."""

from __future__ import annotations

import pytest

from django_distlock import LockBackendError, lock
from django_distlock.backends.zookeeper.values import Held, Rest, Unreadable
from django_distlock.exceptions import NewerRun, UnreadableRun
from django_distlock.runs import LastRun
from django_distlock.types import Grant, Holder, Slot
from tests.support.tools import lock_request

HOLDER = Holder("host", 5, "thread", 'a "label" ]', 12.5)


def test_a_holder_comes_back():
    assert Held.from_bytes(Held(2.5, HOLDER).to_bytes(), "/x") == Held(2.5, HOLDER)


def test_so_does_a_rest():
    rest = Rest("f" * 26, 2**40, 0.25, HOLDER)
    assert Rest.from_bytes(rest.to_bytes(), "/x") == rest


@pytest.mark.parametrize("data", [b"", b"1 ", b"1 x y", b"\xff\xfe", b"1 [1]", b"[" * 100_000])
def test_strange_data(data):
    assert Held.from_bytes(data, "/x").holder is None
    with pytest.raises(Unreadable, match="The node /x is no rest of a lock"):
        Rest.from_bytes(data, "/x")


@pytest.mark.parametrize("kind", [Held, Rest])
def test_data_of_a_newer_version(kind):
    with pytest.raises(Unreadable, match="The node /x was written by a newer version") as refused:
        kind.from_bytes(b"2 whatever", "/x")
    assert refused.value.is_final


def set_data(behind, path, data):
    behind.client.set(f"{behind.root}{path}", data)


def test_a_lock_whose_holder_cannot_be_read_is_held(zookeeper_locks, behind):
    mine = lock_request(ttl=60)
    assert isinstance(zookeeper_locks.acquire(mine, queue=False), Grant)
    [path] = behind.places()
    set_data(behind, path, b"???")
    busy = zookeeper_locks.acquire(lock_request(), queue=False)
    assert (busy.token, busy.holder) == (mine.token, None)
    assert zookeeper_locks.holders([Slot("name")]) == [None]


def test_a_lock_of_a_newer_version_is_left_as_it_is(zookeeper_locks, behind, caplog):
    mine, other = lock_request(ttl=60), lock_request("other", ttl=60)
    for request in (mine, other):
        assert isinstance(zookeeper_locks.acquire(request, queue=False), Grant)
    [path] = [path for path in behind.places() if mine.token in path]
    set_data(behind, path, b"2 something")
    with pytest.raises(LockBackendError, match="newer version") as refused:
        lock("name", wait=0).acquire()
    assert refused.value.is_final
    assert [info.name for info in zookeeper_locks.held()] == ["other"]
    assert "newer version" in caplog.text


def test_a_rest_that_cannot_be_read_is_told(zookeeper_locks, behind, caplog):
    mine = lock_request(ttl=60)
    assert isinstance(zookeeper_locks.acquire(mine, queue=False), Grant)
    zookeeper_locks.release(mine, 50)
    [path] = behind.rests()
    set_data(behind, path, b"???")
    with pytest.raises(LockBackendError, match="is no rest of a lock. Delete it"):
        lock("name", wait=0).acquire()
    assert zookeeper_locks.look(["name"]) == [[]]
    assert zookeeper_locks.prune(0) == 0
    assert "is no rest of a lock" in caplog.text


def test_runs_that_cannot_be_read_are_told(zookeeper_locks, behind, caplog):
    run = LastRun(100.0)
    for name in ("old", "newer", "good"):
        assert zookeeper_locks.claim_run(name, run, run, 60) == run
    paths = {path.rpartition(":")[2].removesuffix("~run"): path for path in behind.paths("/runs")}
    set_data(behind, paths["old"], b"???")
    set_data(behind, paths["newer"], b"2 x")
    with pytest.raises(NewerRun, match="newer version"):
        zookeeper_locks.claim_run("newer", run, run, 60)
    with pytest.raises(UnreadableRun, match="is no run of beat"):
        zookeeper_locks.claim_run("old", run, run, 60)
    assert dict(zookeeper_locks.runs()) == {"good": run}
    assert zookeeper_locks.find_runs(["old", "newer", "good"]) == [None, None, run]
    assert caplog.text.count("holds something that is no run") == 1


def test_runs_that_have_expired_are_pruned(zookeeper_locks, behind):
    run = LastRun(100.0)
    zookeeper_locks.claim_run("over", run, run, 0.001)
    zookeeper_locks.claim_run("kept", run, run, 600)
    assert zookeeper_locks.find_runs(["kept"]) == [run]
    assert zookeeper_locks.prune(60) == 0
    assert zookeeper_locks.prune(0) == 1
    assert [path.rpartition("/")[2] for path in behind.paths("/runs")] == ["lock:kept~run"]
