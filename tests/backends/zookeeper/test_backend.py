"""Locks on a real ZooKeeper: what is stored, who is next, and what becomes of what nobody has any more."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import suppress

import pytest

from django_distlock import LockBackendError, LockLost, LockNotAcquired, State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.types import Grant, LockInfo
from django_distlock.utils.clock import clock
from tests.support.inside import client_of
from tests.support.leases import deadline_of, request_of
from tests.support.tools import PATIENCE, eventually, insist, lock_request, locked_names, renewer_of, threads_of

pytestmark = pytest.mark.seconds(1)

GONE = 2.0  # seconds in which the node of a lock that nobody has is deleted


@pytest.fixture
def here(zookeeper_locks, zookeeper_entry, settings):
    """One of two sessions of the store, as of two processes."""
    settings.DISTRIBUTED_LOCKS = {"default": zookeeper_entry, "other": zookeeper_entry}
    yield locks["default"]
    for backend in (locks["default"], locks["other"]):
        client_of(backend).close()


@pytest.fixture
def elsewhere(here):
    """The other one."""
    return locks["other"]


def granted(backend, request, *, queue=True):
    answer = backend.acquire(request, queue=queue)
    assert isinstance(answer, Grant)
    return answer


class TestWhatIsStored:
    def test_a_holder_is_an_ephemeral_node_and_nothing_is_left_of_it(self, zookeeper_locks, behind):
        with lock("order:{}", "a/b") as lease:
            [path] = behind.places()
            assert path.rpartition("/")[2].startswith(f"lock:order:a%2Fb~{lease.token}-")
            assert behind.stat(path).ephemeralOwner
            assert str(lease.holder.pid).encode() in behind.data(path)
        assert behind.places() == behind.rests() == []

    def test_the_number_is_that_of_the_creation_of_the_node(self, zookeeper_locks, behind):
        numbers = []
        for _ in range(3):
            with lock("name") as lease:
                [path] = behind.places()
                assert lease.fence == behind.stat(path).czxid
                numbers.append(lease.fence)
        assert numbers == sorted(set(numbers))

    def test_the_holder_is_written_when_a_waiter_is_granted_the_lock(self, zookeeper_locks, behind):
        holder, waiter = lock_request(ttl=60), lock_request(ttl=60)
        granted(zookeeper_locks, holder)
        zookeeper_locks.acquire(waiter, queue=True)
        waiter.holder = waiter.holder._replace(label="granted now")
        zookeeper_locks.release(holder)
        granted(zookeeper_locks, waiter)
        [path] = behind.places()
        eventually(lambda: b"granted now" in behind.data(path))

    @pytest.mark.seconds(12)
    def test_many_names_lie_in_256_folders(self, zookeeper_locks, behind):
        requests = [lock_request(f"order:{number}", ttl=6 * PATIENCE) for number in range(300)]
        for request in requests:
            granted(zookeeper_locks, request)
        folders = {path.split("/")[2] for path in behind.places()}
        assert 100 < len(folders) <= 256
        assert locked_names(zookeeper_locks, "order:") == sorted(request.name for request in requests)
        for request in requests:
            assert zookeeper_locks.release(request)

    def test_a_path_is_made_where_it_is_missing(self, zookeeper, configured, root):
        backend = configured(f"{zookeeper.address}{root}/a/b/c")
        with lock("name"):
            assert locked_names(backend) == ["name"]

    def test_without_a_path_all_lies_at_the_top(self, zookeeper, configured):
        backend = configured(zookeeper.address, KEY_PREFIX="of this test")
        with lock("name"):
            assert locked_names(backend) == ["name"]

    def test_prefixes_share_a_path(self, zookeeper, configured, root):
        configured(f"{zookeeper.address}{root}", KEY_PREFIX="one")
        with lock("name"):
            other = configured(f"{zookeeper.address}{root}", KEY_PREFIX="other")
            assert locked_names(other) == []
            with lock("name", wait=0):
                assert locked_names(other) == ["name"]


class TestTheLine:
    def test_each_waiter_watches_the_one_before_it(self, zookeeper_locks, zookeeper, behind):
        requests = [lock_request(ttl=60) for _ in range(4)]
        granted(zookeeper_locks, requests[0])
        for request in requests[1:]:
            assert isinstance(zookeeper_locks.acquire(request, queue=True), LockInfo)
        watched = [line.strip() for line in zookeeper.ask(b"wchp").splitlines() if line.startswith(behind.root)]
        places = [f"{behind.root}{path}" for path in behind.places()]
        waiting = sorted(places, key=lambda path: path[-10:])[:-1]
        assert set(waiting) <= set(watched)
        for request in requests:
            zookeeper_locks.release(request)

    def test_a_waiter_asks_nothing_while_what_it_watches_is_there(self, zookeeper_locks, zookeeper):
        granted(zookeeper_locks, lock_request(ttl=60))
        waiter = lock_request(ttl=60)
        first = zookeeper_locks.acquire(waiter, queue=True)
        before = received(zookeeper)
        for _ in range(50):
            assert zookeeper_locks.acquire(waiter, queue=True).token == first.token
        assert received(zookeeper) - before < 25
        zookeeper_locks.release(waiter)

    def test_who_was_in_the_middle_and_leaves_wakes_nobody_for_nothing(self, zookeeper_locks):
        holder, middle, last = (lock_request(ttl=60) for _ in range(3))
        granted(zookeeper_locks, holder)
        for waiter in (middle, last):
            zookeeper_locks.acquire(waiter, queue=True)
        zookeeper_locks.release(middle)
        busy = zookeeper_locks.acquire(last, queue=True)
        assert busy.token == holder.token
        zookeeper_locks.release(holder)
        granted(zookeeper_locks, last)

    def test_a_release_wakes_the_waiter_of_another_process(self, here, elsewhere, monkeypatch):
        monkeypatch.setattr(Timing, "look_interval", 60.0)
        entered = threading.Event()

        def wait():
            with lock("name", using="other", wait=120):
                entered.set()

        thread = threading.Thread(target=wait)
        with lock("name"):
            thread.start()
            eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
            assert not entered.is_set()
        assert entered.wait(PATIENCE)
        thread.join(PATIENCE)

    def test_a_waiter_whose_node_went_comes_back_behind_all(self, zookeeper_locks, behind):
        holder, lost, next_one = (lock_request(ttl=60) for _ in range(3))
        granted(zookeeper_locks, holder)
        for waiter in (lost, next_one):
            zookeeper_locks.acquire(waiter, queue=True)
        [path] = [path for path in behind.places() if lost.token in path]
        behind.client.delete(f"{behind.root}{path}")
        eventually(lambda: zookeeper_locks.count_waiters(["name"]) == [1])
        next_one.event.wait(0)
        zookeeper_locks.release(holder)
        assert isinstance(zookeeper_locks.acquire(lost, queue=True), LockInfo)
        first = granted(zookeeper_locks, next_one)
        zookeeper_locks.release(next_one)
        second = eventually(lambda: isinstance(answer := zookeeper_locks.acquire(lost, queue=True), Grant) and answer)
        assert second.fence > first.fence

    def test_an_attempt_that_does_not_wait_leaves_no_node(self, zookeeper_locks, behind):
        with lock("name"):
            [place] = behind.places()
            assert isinstance(zookeeper_locks.acquire(lock_request(), queue=False), LockInfo)
            assert behind.places() == [place]
            assert behind.stat(place[: place.rindex("/")]).cversion == 1  # none came and went

    def test_many_tasks_wait_without_threads_of_their_own(self, zookeeper_locks):
        holders = [lock_request(f"name:{number}", ttl=60) for number in range(200)]

        async def take(number):
            async with lock(f"name:{number}", wait=120):
                return number

        async def main():
            for holder in holders:
                await zookeeper_locks.aacquire(holder, queue=False)
            tasks = [asyncio.create_task(take(number)) for number in range(200)]
            while sum(await zookeeper_locks.acount_waiters([holder.name for holder in holders])) < 200:
                await asyncio.sleep(0.05)
            threads = {thread.name for thread in threading.enumerate()}
            for holder in holders:
                await zookeeper_locks.arelease(holder)
            return threads, await asyncio.gather(*tasks)

        before = {thread.name for thread in threading.enumerate()}
        threads, taken = asyncio.run(main())
        assert taken == list(range(200))
        of_earlier_tests = {name for name in threads if name.endswith("-other")}
        assert threads - before - of_earlier_tests <= {
            "distlock-zookeeper-default", "distlock-session-default", "distlock-renewal-default",
            "distlock-cleaning-default",
        }  # fmt: skip


def received(server):
    """Packets that a server got."""
    [count] = [line for line in server.ask(b"srvr").splitlines() if line.startswith("Received: ")]
    return int(count.removeprefix("Received: "))


class TestLostAnswers:
    def test_a_node_whose_creation_was_not_answered_is_found_by_its_token(self, proxied, proxy, behind_proxy):
        with lock("warm"):
            pass
        mine = lock_request(ttl=60)
        proxy.cut_reply(mine.token)
        grant = granted(proxied, mine)
        assert proxy.cuts == 1
        [path] = behind_proxy.places()
        assert behind_proxy.stat(path).czxid == grant.fence
        assert proxied.release(mine) is True
        assert behind_proxy.places() == []

    def test_so_is_that_of_a_waiter(self, proxied, proxy, behind_proxy):
        holder, waiter = lock_request(ttl=60), lock_request(ttl=60)
        granted(proxied, holder)
        proxy.cut_reply(waiter.token)
        assert isinstance(proxied.acquire(waiter, queue=True), LockInfo)
        assert proxy.cuts == 1
        assert len(behind_proxy.places()) == 2
        proxied.release(holder)
        eventually(lambda: isinstance(proxied.acquire(waiter, queue=True), Grant))
        assert proxied.release(waiter)
        assert behind_proxy.places() == []

    def test_a_release_whose_answer_was_lost_has_succeeded(self, proxied, proxy, behind_proxy):
        mine = lock_request(ttl=60)
        granted(proxied, mine)
        proxy.cut_reply(mine.token)
        assert proxied.release(mine) is True
        assert proxy.cuts == 1
        assert behind_proxy.places() == []

    def test_a_grant_with_a_rest_whose_answer_was_lost_leaves_none_when_it_is_given_up(
        self, proxied, proxy, behind_proxy
    ):
        mine = lock_request(ttl=60)
        mine.min_hold = 60.0
        granted(proxied, mine)
        assert behind_proxy.rests()
        mine.in_doubt = True
        proxied.release(mine)
        assert behind_proxy.paths() == []


class TestWhatNobodyHasAnyMore:
    """In Redis its TTL frees it. Here the session lives on, so it must be deleted."""

    def test_a_lease_that_is_not_renewed(self, zookeeper_locks, behind):
        handle = lock("name", ttl=0.5, renew=False)
        assert handle.acquire()
        eventually(lambda: not behind.places(), 0.5 + GONE)
        with pytest.raises(LockLost):
            handle.release()

    def test_a_handle_that_was_dropped(self, zookeeper_locks, behind):
        handle = lock("name", ttl=0.5)
        assert handle.acquire()
        with pytest.warns(ResourceWarning):
            del handle
            gc.collect()
        eventually(lambda: not behind.places(), 0.5 + GONE)

    def test_a_release_that_failed(self, proxy, root, configured, behind_proxy):
        configured(f"{proxy.address}{root}", timeout=60.0, options={"request_timeout": 1.0})
        handle = lock("name", ttl=60)
        assert insist(handle.acquire)
        proxy.refuse()
        with suppress(LockBackendError):  # where it was known that nobody answers, it is left to the background at once
            handle.release()
        assert len(behind_proxy.places()) == 1
        proxy.accept()
        eventually(lambda: not behind_proxy.places(), 1 + GONE)

    def test_a_task_that_was_cancelled_while_its_node_was_made(self, proxied, proxy, behind_proxy):
        async def cancel():
            proxy.slow = 0.3
            task = asyncio.create_task(lock("name").aacquire())
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        with lock("warm"):
            pass
        asyncio.run(cancel())
        eventually(lambda: not renewer_of(proxied).is_cleaning)
        proxy.slow = 0.0
        assert behind_proxy.places() == []

    def test_a_waiter_that_gave_up(self, zookeeper_locks, behind):
        holder = lock_request(ttl=60)
        granted(zookeeper_locks, holder)
        with pytest.raises(LockNotAcquired):
            lock("name", wait=0.3).__enter__()
        eventually(lambda: len(behind.places()) == 1, GONE)

    def test_a_waiter_that_nothing_refers_to(self, zookeeper_locks, behind):
        granted(zookeeper_locks, lock_request(ttl=60))
        zookeeper_locks.acquire(lock_request(ttl=60), queue=True)
        gc.collect()
        eventually(lambda: len(behind.places()) == 1, GONE)

    def test_a_lease_that_was_lost_here_while_its_session_lives(self, zookeeper_locks, behind, monkeypatch):
        """As where the process was stopped for longer than the TTL, and for less than the timeout of the session."""
        handle = lock("name", ttl=1.0)
        assert handle.acquire()
        monkeypatch.setattr(type(zookeeper_locks), "renew", refuse)
        eventually(lambda: not behind.places(), 1.0 + GONE)
        with pytest.raises(LockLost):
            handle.release()

    def test_a_backend_outside_of_locks_gives_up_by_itself(self, zookeeper_entry, behind):
        from django_distlock.backends.zookeeper import ZooKeeperBackend

        backend = ZooKeeperBackend("alone", zookeeper_entry)
        granted(backend, lock_request(ttl=0.3))
        eventually(lambda: not behind.places(), 0.3 + GONE)
        backend.close()


def refuse(*args, **options):
    raise LockBackendError("not now")


class TestReleasedByForce:
    @pytest.mark.parametrize("renew", [True, False])
    def test_its_holder_learns_that_at_once(self, here, elsewhere, losses, renew):
        """By a watch on its own node: its next renewal is far away."""
        handle = lock("name", ttl=100, renew=renew)
        assert handle.acquire()
        [[info]] = elsewhere.look(["name"])
        assert elsewhere.release(lock_request("name").copy(token=info.token))
        lease = locks.leases()[0] if locks.leases() else None
        eventually(lambda: losses)
        assert lease is None or lease.state is State.LOST
        assert losses == [("name", losses[0][1])]
        assert "somebody freed the lock" in losses[0][1]
        with pytest.raises(LockLost):
            handle.release()

    def test_also_where_that_is_done_in_its_own_process(self, zookeeper_locks, losses):
        with pytest.raises(LockLost):
            with lock("name", ttl=100) as lease:
                assert zookeeper_locks.release(request_of(lease))
                assert lease.state is State.LOST
        eventually(lambda: losses)

    def test_and_where_its_node_was_deleted_by_hand(self, zookeeper_locks, behind, losses):
        with pytest.raises(LockLost):
            with lock("name", ttl=100) as lease:
                [path] = behind.places()
                behind.client.delete(f"{behind.root}{path}")
                eventually(lambda: lease.state is State.LOST)


class TestMinHold:
    def test_a_rest_is_written_with_the_grant_and_outlives_its_holder(self, zookeeper_locks, behind):
        mine = lock_request(ttl=60)
        mine.min_hold = 60.0
        granted(zookeeper_locks, mine)
        [rest], [place] = behind.rests(), behind.places()
        assert not behind.stat(rest).ephemeralOwner
        assert behind.stat(rest).mzxid == behind.stat(place).mzxid  # in one step
        behind.client.delete(f"{behind.root}{place}")  # as when its process is killed
        busy = zookeeper_locks.acquire(lock_request(), queue=False)
        assert busy.resting
        assert 30 < busy.remaining <= 60
        assert busy.token == mine.token

    def test_a_release_lets_it_stand_until_it_is_over(self, zookeeper_locks, behind):
        with lock("name", min_hold=1.5):
            [before] = [behind.stat(path) for path in behind.rests()]
        [after] = [behind.stat(path) for path in behind.rests()]
        assert after.mtime == before.mtime
        with pytest.raises(LockNotAcquired) as refused:
            lock("name", wait=0).__enter__()
        assert refused.value.resting
        with lock("name", wait=PATIENCE):
            pass
        assert behind.rests() == []

    def test_one_that_is_over_goes_with_the_release(self, zookeeper_locks, behind):
        with lock("name", min_hold=0.2):
            assert behind.rests()
            eventually(lambda: behind.client.exists(behind.root).mtime is not None and slept(0.3))
        assert behind.paths() == []

    def test_the_process_that_left_it_deletes_it(self, zookeeper_locks, behind):
        with lock("name", min_hold=0.5):
            pass
        assert behind.rests()
        eventually(lambda: not behind.rests())

    def test_whoever_finds_it_over_deletes_it(self, here, elsewhere, behind):
        mine = lock_request(ttl=60)
        mine.min_hold = 0.3
        granted(elsewhere, mine)
        [place] = behind.places()
        behind.client.delete(f"{behind.root}{place}")
        slept(0.4)
        assert here.look(["name"]) == [[]]
        assert behind.rests() == []

    def test_what_is_left_is_pruned(self, here, elsewhere, behind):
        mine, kept = lock_request("over", ttl=60), lock_request("kept", ttl=60)
        mine.min_hold, kept.min_hold = 0.3, 60.0
        for request in (mine, kept):
            granted(elsewhere, request)
        for place in behind.places():
            behind.client.delete(f"{behind.root}{place}")
        slept(0.4)
        assert here.prune(60) == 0
        assert here.prune(0) == 1
        assert [path.rpartition("/")[2] for path in behind.rests()] == ["lock:kept~rest"]

    def test_a_waiter_takes_the_lock_when_the_rest_is_over(self, here, elsewhere):
        holder = lock_request(ttl=60)
        granted(elsewhere, holder)
        waiter = lock_request(ttl=60)
        here.acquire(waiter, queue=True)
        elsewhere.release(holder, 0.5)
        busy = eventually(lambda: (info := here.acquire(waiter, queue=True)).resting and info)
        assert 0 < busy.remaining <= 0.5
        eventually(lambda: isinstance(here.acquire(waiter, queue=True), Grant))

    def test_others_see_that_it_rests_though_somebody_waits(self, here, elsewhere):
        holder, waiter = lock_request(ttl=60), lock_request(ttl=60)
        granted(elsewhere, holder)
        elsewhere.release(holder, 50)
        here.acquire(waiter, queue=True)
        [[info]] = elsewhere.look(["name"])
        assert info.resting
        assert info.token == holder.token
        assert elsewhere.acquire(lock_request(), queue=False).resting

    def test_a_rest_that_is_ended_by_force_wakes_who_waits(self, here, elsewhere, monkeypatch):
        monkeypatch.setattr(Timing, "look_interval", 60.0)
        holder = lock_request(ttl=60)
        granted(elsewhere, holder)
        elsewhere.release(holder, 50)
        entered = threading.Event()

        def wait():
            with lock("name", wait=120):
                entered.set()

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: isinstance(elsewhere.acquire(lock_request(), queue=False), LockInfo))
        slept(0.2)
        assert elsewhere.release(holder, force=True)
        assert entered.wait(PATIENCE)
        thread.join(PATIENCE)


def slept(seconds):
    return not threading.Event().wait(seconds)


class TestTtl:
    def test_one_above_the_timeout_of_the_session_is_rounded_down(self, zookeeper, configured, root, caplog):
        configured(f"{zookeeper.address}{root}", timeout=5.0)
        with lock("name", ttl=60) as lease:
            assert lease.ttl == 5.0
            assert lease.remaining <= 5.0
        with lock("name", ttl=60):
            pass
        [told] = [record.message for record in caplog.records if "a TTL of 60 s" in record.message]
        assert told == (
            "Lock 'name' has a TTL of 60 s, but the servers of 'default' keep a session for 5 s after its process was"
            " last heard of, so its lease has that. This is told once."
        )

    def test_one_below_it_stays_as_it_is(self, zookeeper_locks, caplog):
        with lock("name", ttl=60) as lease:
            assert lease.ttl == 60.0
        assert not caplog.records

    @pytest.mark.seconds(4)
    def test_a_renewed_lease_outlives_its_ttl(self, zookeeper_locks, behind):
        with lock("name", ttl=5.0) as lease:
            first = deadline_of(lease)
            eventually(lambda: clock() > first)
            lease.ensure_held()
            assert len(behind.places()) == 1

    def test_max_hold_ends_it(self, zookeeper_locks, behind):
        handle = lock("name", ttl=0.6, max_hold=1.0)
        assert handle.acquire()
        eventually(lambda: not behind.places(), 1.0 + GONE)
        with pytest.raises(LockLost):
            handle.release()


class TestHandover:
    def test_a_lease_cannot_be_detached(self, zookeeper_locks):
        with lock("name") as lease:
            with pytest.raises(LockBackendError, match="cannot be detached: ZooKeeperBackend keeps it for the session"):
                lease.detach()
            lease.ensure_held()


def test_sessions_of_idle_processes_end(zookeeper_locks, zookeeper, monkeypatch):
    monkeypatch.setattr(Timing, "idle_kept", 0.3)
    with lock("name"):
        assert threads_of("zookeeper")
        slept(0.6)  # a lease keeps it
        assert threads_of("zookeeper")
    eventually(lambda: not threads_of("zookeeper"))
    with lock("name") as lease:
        lease.ensure_held()
