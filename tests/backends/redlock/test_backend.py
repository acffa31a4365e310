"""Locks on a majority of five real servers: every pattern of answers, dead and hanging nodes, late commands."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import ClassVar

import pytest
import redis

from django_distlock import LockBackendError, LockNotAcquired, State, aadopt, adopt, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.config import Location
from django_distlock.backends.redlock import connections
from django_distlock.backends.redlock.connections import ConnectionSet, Nodes, SelectPoll
from django_distlock.backends.redlock.messages import SCRIPT_LOADS, Limits
from django_distlock.backends.redlock.node_connection import NodeConnection
from django_distlock.backends.redlock.quorum import Votes, fence_of, is_known
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.signals import lock_acquired
from django_distlock.types import Grant, Level, LockInfo, new_token
from django_distlock.utils.clock import clock
from tests.support.inside import client_of, clients_of_loops, nodes_of
from tests.support.leases import lease_of, request_of, wait_for_renewal
from tests.support.programs import ROOT
from tests.support.quorum import Quorum, connect_all, spread
from tests.support.scripted import Scripted
from tests.support.tools import (
    ALLOWANCE,
    PATIENCE,
    ending_within,
    eventually,
    insist,
    lock_request,
    locked_names,
    renewer_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.seconds(1)]

REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
FREE, TAKEN, FAILED, PENDING = "free", "taken", "failed", "pending"
# Of nodes that answer, or refuse at once: on a busy machine, either may take long.
PATIENT = {"node_timeout": 2 * PATIENCE, "socket_connect_timeout": 2 * PATIENCE}
MAJORITY_FAILED = r"\d of 5 nodes failed, a majority must answer"  # or more: others may still be connected
PATTERNS = list(itertools.product((FREE, TAKEN, FAILED), repeat=5))


def outcome(pattern):
    """What the algorithm owes to each pattern: failed nodes count neither as free nor as taken."""
    if pattern.count(FREE) >= 3:
        return "granted"
    if pattern.count(FAILED) >= 3:
        return "down"
    return "busy"


@pytest.fixture
def nodes(five_valkeys, redlock_locks):
    """Clients of the five servers."""
    clients = [redis.Redis.from_url(server.url, decode_responses=True) for server in five_valkeys]
    yield clients
    for client in clients:
        client.close()


@pytest.fixture
def quorum():
    with Quorum() as quorum:
        yield quorum


@pytest.fixture
def configured(settings):
    def configure(urls, **entry):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDLOCK, "LOCATION": urls, **entry}}
        return locks["default"]

    yield configure
    locks.close()


def prepare(nodes, name, pattern):
    """A node that failed has another type of value there, so that it answers by an error."""
    other, holder = new_token(), lock_request().holder.to_text()
    for node, state in zip(nodes, pattern, strict=True):
        if state == TAKEN:
            node.set(f"lock:{name}", f"1 {other} h {7:016} {holder}", px=60_000)
        elif state == FAILED:
            node.rpush(f"lock:{name}", "no lock")
    return other


def stands(node, name):
    """The token under the name, if any; it may be given back between the two commands."""
    value = node.get(f"lock:{name}") if node.type(f"lock:{name}") == "string" else None
    return value[2:28] if value else None


def run_on_nodes(backend, steps, timeout):
    """Take such steps, in this thread."""
    return client_of(backend).run(steps, Limits(timeout, connect_timeout=2.0))


class TestEveryPattern:
    """3^5 patterns of free, taken and failed nodes."""

    @pytest.mark.seconds(4)
    def test_on_real_nodes(self, nodes, redlock_locks, calls):
        backend = calls(redlock_locks)
        connect_all(backend)
        for number, pattern in enumerate(PATTERNS):
            name = f"pattern:{number}"
            other = prepare(nodes, name, pattern)
            mine = lock_request(name, ttl=60)
            expected = outcome(pattern)
            if expected == "down":
                with pytest.raises(LockBackendError, match="of 5 nodes failed, a majority must answer"):
                    backend.acquire(mine, queue=False)
            elif expected == "busy":
                busy = backend.acquire(mine, queue=False)
                assert isinstance(busy, LockInfo), pattern
                assert busy.token == other
                assert 1 <= busy.nodes <= pattern.count(TAKEN)  # those that answered until it was decided
                assert 55 < busy.remaining <= 60
            else:
                assert isinstance(backend.acquire(mine, queue=False), Grant), pattern

            def tokens(name=name):
                return [stands(node, name) for node in nodes]

            own = mine.token if expected == "granted" else None
            wanted = [{FREE: own, TAKEN: other, FAILED: None}[state] for state in pattern]
            eventually(lambda tokens=tokens, wanted=wanted: tokens() == wanted, 3 * PATIENCE)

    def test_as_the_answers_come_in(self):
        """Deciding early, in any order of the answers, is never wrong."""
        decided_early = 0
        for partial in itertools.product((FREE, TAKEN, FAILED, PENDING), repeat=5):
            votes = Votes(5)
            for node, state in enumerate(partial):
                if state == FREE:
                    votes.granted[node] = 1
                elif state == TAKEN:
                    votes.taken[node] = 1, b""
                elif state == FAILED:
                    votes.failed[node] = Exception()
            options = [(FREE, TAKEN, FAILED) if state == PENDING else (state,) for state in partial]
            outcomes = {outcome(whole) for whole in itertools.product(*options)}
            if votes.is_decided:
                decided_early += PENDING in partial
                said = "granted" if votes.is_granted else "down" if votes.is_down else "busy"
                assert outcomes == {said}, partial
            else:
                assert len(outcomes) > 1, partial
        assert decided_early == 225

    @pytest.mark.parametrize("size", [3, 4, 5, 6, 7])
    def test_a_majority_is_more_than_half(self, size):
        votes = Votes(size, granted=dict.fromkeys(range(size // 2), 1))
        assert not votes.is_granted
        votes.granted[size] = 1
        assert votes.is_granted


class TestNumbers:
    def test_the_number_is_the_largest_of_the_majority_that_answered_least(self):
        assert fence_of([10, 30, 20, 50, 40], 3) == 30
        assert fence_of([10, 30, 20], 3) == 30

    def test_all_answers_of_an_odd_quorum_need_no_second_round(self):
        for numbers in itertools.product(range(3), repeat=5):
            assert is_known(fence_of(numbers, 3), numbers, 3)

    def test_three_answers_need_one_unless_they_agree(self):
        assert is_known(fence_of([7, 7, 7], 3), [7, 7, 7], 3)
        assert not is_known(fence_of([7, 7, 8], 3), [7, 7, 8], 3)

    def test_over_any_two_majorities(self, nodes, redlock_locks, calls):
        """Each grant sees another majority, of nodes whose counters are far apart."""
        for number, node in enumerate(nodes):
            node.set("lock|f", f"{(number + 1) * 10**15:016}")
        backend, last = calls(redlock_locks), 0
        for majority in itertools.combinations(range(5), 3):
            for number, node in enumerate(nodes):
                if number not in majority:
                    node.rpush("lock:name", "no lock")
            mine = lock_request()
            fence = backend.acquire(mine, queue=False).fence
            assert fence > last
            assert sum(int(node.get("lock|f")) >= fence for node in nodes) >= 3
            last = fence
            backend.release(mine)
            for node in nodes:
                node.delete("lock:name")


LONG_TIMEOUT = {"TTL": 10 * PATIENCE, "OPTIONS": PATIENT}


class TestOneDeadOneHung:
    @pytest.fixture(params=["dead", "hung"])
    def lame(self, request, quorum):
        """Makes a node dead or hung."""
        return quorum.kill if request.param == "dead" else quorum.stop

    def test_nobody_notices(self, quorum, lame, configured, calls):
        """They have a timeout, which nobody waits for."""
        configured(quorum.urls, **LONG_TIMEOUT)
        handle = calls(lock("name"))

        def fastest(rounds=20):
            times = []
            with ending_within(PATIENCE):
                for _ in range(rounds):
                    began = time.perf_counter()
                    handle.acquire()
                    handle.release()
                    times.append(time.perf_counter() - began)
            return min(times)

        fastest()
        lame(0)
        fastest()  # it is noticed here
        assert fastest() < 0.1
        lame(3)
        fastest()
        assert [info.nodes for info in calls(configured(quorum.urls)).held()] == []

    def test_from_the_start(self, quorum, lame, configured, calls):
        """A process that never saw the node alive is not held up either."""
        lame(1)
        backend = calls(configured(quorum.urls, **LONG_TIMEOUT))
        with ending_within(1):
            assert isinstance(backend.acquire(lock_request(ttl=10 * PATIENCE), queue=False), Grant)

    def test_a_majority_is_an_error_of_the_store(self, quorum, lame, configured, calls):
        # Two must answer in time on a busy machine, too.
        backend = configured(quorum.urls, OPTIONS={"node_timeout": 1.0, "socket_connect_timeout": 2.0})
        held = lock_request("held", ttl=60)
        calls(backend).acquire(held, queue=False)
        for number in range(3):
            lame(number)
        with pytest.raises(LockBackendError, match="3 of 5 nodes failed, a majority must answer") as caught:
            calls(backend).acquire(lock_request(), queue=False)
        assert len(caught.value.__cause__.exceptions) == 3
        for number in range(3):
            assert str(quorum.nodes[number].socket) in str(caught.value)
        for request in (
            lambda: calls(backend).renew([(held, 60.0)]),
            lambda: calls(backend).release(held),
            lambda: calls(backend).look(["held"]),
            lambda: locked_names(calls(backend)),
        ):
            with pytest.raises(LockBackendError, match="3 of 5 nodes failed"):
                request()
        for number in list(quorum.stopped):
            quorum.go_on(number)
        for number in list(quorum.killed):
            quorum.start(number)
        eventually(lambda: _is_granted(calls(backend)))

    def test_it_takes_part_again(self, quorum, lame, configured, calls):
        backend = calls(configured(quorum.urls, OPTIONS={"node_timeout": 0.1}))
        backend.acquire(lock_request("first"), queue=False)
        lame(2)
        for _ in range(3):
            assert _is_granted(backend)
        if quorum.killed:
            quorum.start(2)
        else:
            quorum.go_on(2)

        def everywhere():
            mine = lock_request("again")
            backend.acquire(mine, queue=False)
            [[info]] = backend.look(["again"])
            backend.release(mine)
            return info.nodes == 5

        eventually(everywhere)


def _is_granted(backend):
    mine = lock_request("another")
    try:
        if granted := isinstance(backend.acquire(mine, queue=False), Grant):
            backend.release(mine)
    except LockBackendError:
        return False
    return granted


@pytest.mark.parametrize("size", [3, 7])
def test_less_than_half_may_be_down(size, configured, calls):
    with Quorum(size) as quorum:
        backend = calls(configured(quorum.urls))
        for number in range(size // 2):
            quorum.kill(number)
            assert _is_granted(backend)
        quorum.kill(size // 2)
        with pytest.raises(LockBackendError, match=f"{size // 2 + 1} of {size} nodes failed"):
            backend.acquire(lock_request(), queue=False)


class TestValidity:
    """S1: what the asking took, and the drift, are not the holder's."""

    def test_counts_from_before_the_first_request(self, quorum, configured, calls):
        backend = configured(quorum.urls, OPTIONS={"node_timeout": 5.0})
        calls(backend).acquire(lock_request("first"), queue=False)
        for number in range(3):
            quorum.stop(number)
        went_on_at = []

        def wake():
            went_on_at.append(clock())
            for number in range(3):
                quorum.go_on(number)

        woken = threading.Timer(1, wake)
        woken.start()
        before = clock()
        grant = calls(backend).acquire(lock_request(ttl=10), queue=False)
        assert before <= grant.sent_at < went_on_at[0]
        woken.join()

    def test_a_grant_that_comes_when_it_is_over_is_none(self, quorum, configured, calls):
        configured(quorum.urls, OPTIONS={"node_timeout": 5.0})
        handle, connecting = lock("name", ttl=0.4, wait=PATIENCE), lock("name")
        assert calls(connecting).acquire()
        calls(connecting).release()
        for number in range(3):
            quorum.stop(number)
        woken = threading.Timer(0.8, lambda: [quorum.go_on(number) for number in range(3)])
        woken.start()
        granted = []

        def note(lease, **_):
            granted.append(lease.remaining)

        lock_acquired.connect(note)
        began = clock()
        assert calls(handle).acquire()
        assert clock() - began > 0.7
        lock_acquired.disconnect(note)
        assert granted[0] > 0.1  # granted anew
        calls(handle).release()
        woken.join()


class TestNothingIsLeftBehind:
    """S4, on each node."""

    def test_after_a_hung_node_wakes_up(self, quorum, configured, calls):
        """It finds the request and its end in the same connection, in this order."""
        configured(quorum.urls, OPTIONS={"node_timeout": 0.1})
        handle = calls(lock("name"))
        handle.acquire()
        handle.release()
        quorum.stop(4)
        for _ in range(3):
            handle.acquire()
            handle.release()
        quorum.go_on(4)
        eventually(lambda: not any(_locks(quorum)))

    def test_when_the_connection_was_given_up_before_the_release(self, quorum, configured, calls, monkeypatch):
        monkeypatch.setattr(Timing, "node_unresponsive_after", 0.2)
        configured(quorum.urls, OPTIONS={"node_timeout": 0.05, "socket_connect_timeout": 0.3})
        handle, other = calls(lock("name", ttl=60)), calls(lock("other"))
        other.acquire()
        other.release()
        quorum.stop(0)
        handle.acquire()
        time.sleep(0.3)
        for _ in range(5):  # somebody notices that the connection is dead
            other.acquire()
            other.release()
        quorum.go_on(0)
        handle.release()
        eventually(lambda: not any(_locks(quorum)))

    def test_where_connections_broke_before_the_release(self, nodes, redlock_locks, calls):
        handle = lock("name", ttl=60)
        calls(handle).acquire()
        spread(calls(redlock_locks), request_of(lease_of(handle)))
        for node in nodes[:2]:
            node.client_kill_filter(skipme=True, _type="normal")
        calls(handle).release()
        eventually(lambda: not any(stands(node, "name") for node in nodes))

    def test_on_a_node_that_has_forgotten_its_scripts(self, nodes, redlock_locks, calls):
        handle, other = lock("name", ttl=60), lock("other")
        calls(handle).acquire()
        spread(calls(redlock_locks), request_of(lease_of(handle)))
        nodes[0].script_flush()
        calls(handle).release()
        eventually(lambda: calls(other).locked() or not any(stands(node, "name") for node in nodes))

    def test_where_a_connection_broke_after_a_repair(self, nodes, redlock_locks, calls):
        """A node that could not be asked for the lock was given it by the renewal."""
        nodes[0].config_set("requirepass", "another")
        nodes[0].client_kill_filter(skipme=True, _type="normal")
        handle = lock("name", ttl=60)
        try:
            assert calls(handle).acquire()
        finally:
            nodes[0].config_set("requirepass", "")

        def is_repaired():
            calls(lease_of(handle)).renew()
            return stands(nodes[0], "name")

        eventually(is_repaired)
        nodes[0].client_kill_filter(skipme=True, _type="normal")
        calls(handle).release()
        eventually(lambda: not any(stands(node, "name") for node in nodes))

    def test_after_a_majority_failed(self, quorum, configured, calls):
        backend = configured(quorum.urls, OPTIONS={"node_timeout": 0.1, "socket_connect_timeout": 0.2})
        calls(backend).acquire(lock_request("first", ttl=60), queue=False)
        for number in range(3):
            quorum.stop(number)
        with pytest.raises(LockBackendError):
            calls(lock("name", wait=0.1)).acquire()
        for number in range(3):
            quorum.go_on(number)
        eventually(lambda: not renewer_of(backend).is_cleaning)
        eventually(lambda: not any("lock:name" in keys for keys in _locks(quorum)))
        assert sum("lock:first" in keys for keys in _locks(quorum)) >= 3

    def test_after_a_split_vote(self, nodes, redlock_locks, calls):
        connect_all(calls(redlock_locks))
        prepare(nodes, "name", (TAKEN, TAKEN, FREE, FREE, FAILED))
        prepare(nodes, "split", (TAKEN, TAKEN, TAKEN, FREE, FREE))
        for name in ("name", "split"):
            assert calls(lock(name, wait=0)).acquire() is False
            eventually(lambda name=name: stands(nodes[3], name) is None)

    def test_a_request_that_arrives_after_its_end_gets_nothing(self, nodes, redlock_locks, calls):
        late = lock_request(ttl=60)
        late.in_doubt = True
        calls(redlock_locks).release(late)
        eventually(lambda: all(node.zscore("lock|x:name", late.token) for node in nodes))
        with pytest.raises(LockBackendError, match="the request was given back before it was answered") as caught:
            calls(redlock_locks).acquire(late, queue=False)
        assert not caught.value.is_final  # another token may get it
        assert not any(node.exists("lock:name") for node in nodes)

    def test_retired_tokens_do_not_pile_up_under_a_name_with_many_faults(self, nodes, redlock_locks, calls):
        def give_up(ttl):
            mine = lock_request(ttl=ttl)
            mine.in_doubt = True
            calls(redlock_locks).release(mine)
            return mine.token

        def kept():
            return [set(node.zrange("lock|x:name", 0, -1)) for node in nodes]

        long, short = give_up(60), give_up(0.05)

        def pruned():
            give_up(0.01)
            return all(long in tokens and short not in tokens for tokens in kept())

        eventually(pruned)
        assert all(node.pttl("lock|x:name") > 50_000 for node in nodes)

    def test_who_finds_it_busy_is_told_on_how_many_nodes_and_how_many_failed(self, nodes, redlock_locks):
        connect_all(redlock_locks)
        prepare(nodes, "name", (TAKEN, FREE, FREE, FAILED, FAILED))
        with pytest.raises(LockNotAcquired, match=r"MainThread\) on 1 node while 2 failed since"):
            lock("name", wait=0).__enter__()
        prepare(nodes, "taken", [TAKEN] * 5)
        with pytest.raises(LockNotAcquired, match=r"on [345] nodes since"):
            lock("taken", wait=0).__enter__()

    def test_after_a_cancelled_task(self, quorum, configured):
        async def main():
            backend = configured(quorum.urls)
            await backend.aacquire(lock_request("first", ttl=60), queue=False)
            quorum.stop(0)
            quorum.stop(1)
            quorum.stop(2)
            task = asyncio.create_task(lock("name", wait=5).aacquire())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for number in range(3):
                quorum.go_on(number)
            return backend

        backend = asyncio.run(main())
        eventually(lambda: not renewer_of(backend).is_cleaning)
        eventually(lambda: not any("lock:name" in keys for keys in _locks(quorum)))
        assert sum("lock:first" in keys for keys in _locks(quorum)) >= 3


def _locks(quorum):
    return [[key for key in keys if key.startswith("lock:")] for keys in quorum.all_keys()]


@pytest.mark.parametrize("adopt", [adopt, lambda text: asyncio.run(aadopt(text))], ids=["in a thread", "in a task"])
def test_an_adoption_whose_majority_hangs_leaves_the_lease_to_the_next(quorum, configured, monkeypatch, adopt):
    backend = configured(quorum.urls, OPTIONS={"node_timeout": 0.1, "socket_connect_timeout": 0.2})
    handle = lock("name", ttl=120)
    assert handle.acquire()
    first = lease_of(handle)
    spread(backend, request_of(first))
    text = first.detach()

    def hang(name):
        if name == "name":
            for number in range(3):
                quorum.stop(number)

    acquire, aacquire = backend.acquire, backend.aacquire

    async def ahang(lock_request, *, queue):
        hang(lock_request.name)
        return await aacquire(lock_request, queue=queue)

    monkeypatch.setattr(
        backend, "acquire", lambda lock_request, *, queue: hang(lock_request.name) or acquire(lock_request, queue=queue)
    )
    monkeypatch.setattr(backend, "aacquire", ahang)
    with pytest.raises(LockBackendError):
        adopt(text)
    monkeypatch.undo()
    assert not renewer_of(backend).leases()
    for number in range(3):
        quorum.go_on(number)
    eventually(lambda: not renewer_of(backend).is_cleaning)
    [info] = eventually(lambda: [found for found in backend.look(["name"])[0] if not found.failed_nodes])
    assert (info.token, info.nodes) == (first.token, 5)
    lease = adopt(text)
    assert lease.fence == first.fence
    lease.release()
    eventually(lambda: not any("lock:name" in keys for keys in _locks(quorum)))


@pytest.mark.parametrize("adopt", [adopt, lambda text: asyncio.run(aadopt(text))], ids=["in a thread", "in a task"])
def test_an_adoption_knows_its_lease_by_whatever_numbers_the_nodes_have_for_it(nodes, redlock_locks, adopt):
    handle = lock("name", ttl=60)
    assert handle.acquire()
    first = lease_of(handle)
    spread(locks["default"], request_of(first))
    prepare(nodes[:2], "name", [TAKEN, TAKEN])
    for node in nodes[3:]:  # where the lease was granted late, after a larger number
        number, token, state, fence, holder = node.get("lock:name").split(" ", 4)
        node.set("lock:name", f"{number} {token} {state} {int(fence) + 1:016} {holder}", keepttl=True)
    lease = adopt(first.detach())
    assert lease.fence == first.fence
    lease.release()


class TestRenewal:
    def test_needs_a_majority_and_is_lost_at_the_deadline_without(self, quorum, configured, calls):
        configured(quorum.urls, OPTIONS={"node_timeout": 0.05, "socket_connect_timeout": 0.1})
        handle = lock("name", ttl=1.2, on_lost="log")
        assert calls(handle).acquire()
        lease = lease_of(handle)
        for number in range(3):
            quorum.kill(number)
        assert lease.state is State.HELD
        eventually(lambda: lease.state is State.UNKNOWN)
        eventually(lambda: lease.state is State.LOST, 5)

    def test_goes_on_while_two_nodes_are_down(self, quorum, configured):
        configured(quorum.urls)
        with lock("name", ttl=6) as lease:
            quorum.kill(0)
            quorum.stop(1)
            wait_for_renewal(lease)
            lease.ensure_held()

    @pytest.mark.seconds(15)
    def test_gives_the_lease_back_to_nodes_that_lost_it(self, quorum, configured):
        """So it outlives restarts of all nodes, one after another."""
        backend = configured(quorum.urls)
        with lock("name", ttl=3) as lease:
            for number in range(5):
                quorum.kill(number)
                time.sleep(3.1)  # the longest TTL
                quorum.start(number)
                eventually(lambda: [info.nodes for info in backend.look(["name"])[0]] == [5])
            [[info]] = backend.look(["name"])
            assert (info.token, info.fence) == (lease.token, lease.fence)

    def test_does_not_bring_back_what_was_freed(self, redlock_locks, nodes, calls):
        mine = lock_request()
        spread(calls(redlock_locks), mine)
        for node in nodes[:3]:
            node.delete("lock:name")
        assert calls(redlock_locks).renew([(mine, 10.0)]) == [False]
        assert [stands(node, "name") for node in nodes[:3]] == [None] * 3

    def test_tells_no_loss_while_a_majority_may_have_it(self, redlock_locks, nodes, calls):
        mine, other = lock_request(), lock_request("other")
        for one in (mine, other):
            spread(calls(redlock_locks), one)
        for node, state in zip(nodes, (FAILED, TAKEN, TAKEN), strict=False):
            node.delete("lock:name")
            prepare([node], "name", [state])
        assert calls(redlock_locks).renew([(mine, 10.0), (other, 10.0)]) == [None, True]

    def test_more_leases_than_go_in_one_round(self, redlock_locks):
        lock_requests = [lock_request(f"n:{number}", ttl=60) for number in range(600)]
        for one in lock_requests:
            redlock_locks.acquire(one, queue=False)
        assert redlock_locks.renew([(one, 60.0) for one in lock_requests]) == [True] * 600


class TestWaiting:
    def test_says_that_there_is_no_queue(self, redlock_locks):
        assert redlock_locks.supports_queue is False

    def test_tries_again_after_a_random_delay(self, redlock_locks, calls):
        redlock_locks.option["retry_delay"] = (0.01, 0.03)
        waiting = lock_request()
        began = time.monotonic()
        for _ in range(10):
            calls(redlock_locks).wait_for_turn(waiting, 5.0)
        assert 0.1 <= time.monotonic() - began < 4 + ALLOWANCE

    def test_waits_as_long_as_nobody_else(self, redlock_locks, monkeypatch):
        """Those who took the lock from each other must not meet again."""
        redlock_locks.option["retry_delay"] = (0.01, 0.03)
        waiting, delays = lock_request(), []
        monkeypatch.setattr(type(waiting), "event", SimpleNamespace(wait=delays.append))
        for _ in range(50):
            redlock_locks.wait_for_turn(waiting, 5.0)
        assert len(set(delays)) > 40
        assert 0.01 <= min(delays) < 0.015 < 0.025 < max(delays) <= 0.03
        redlock_locks.wait_for_turn(waiting, 0.001)
        assert delays[-1] == 0.001

    def test_gets_in_when_the_lock_is_free(self, redlock_locks, calls):
        holder, waiter = lock_request(ttl=60), calls(lock("name", wait=PATIENCE))
        redlock_locks.acquire(holder, queue=False)
        freed = threading.Timer(0.2, redlock_locks.release, [holder])
        freed.start()
        assert waiter.acquire()
        freed.join()
        waiter.release()

    def test_many_take_turns(self, redlock_locks):
        redlock_locks.option["retry_delay"] = (0.005, 0.03)
        inside, most = [], []

        def work():
            with lock("name", wait=30):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

        threads = [threading.Thread(target=work) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert most == [1] * 10


class TestListing:
    def test_a_lock_is_listed_once_with_the_number_of_its_nodes(self, redlock_locks, nodes, calls):
        mine = lock_request()
        spread(calls(redlock_locks), mine)
        assert [(info.name, info.nodes) for info in calls(redlock_locks).held()] == [("name", 5)]
        nodes[0].delete("lock:name")
        nodes[1].delete("lock:name")
        assert [info.nodes for info in calls(redlock_locks).held()] == [3]
        nodes[2].delete("lock:name")
        assert calls(redlock_locks).held() == []
        assert locked_names(calls(redlock_locks)) == []

    def test_a_lock_rests_if_one_of_its_nodes_says_so(self, redlock_locks, nodes, calls):
        """The release has not reached the others yet."""
        mine = lock_request(ttl=60)
        spread(calls(redlock_locks), mine)
        held = nodes[0].get("lock:name")
        calls(redlock_locks).release(mine, 60)
        eventually(lambda: all(node.get("lock:name") != held for node in nodes))
        for node in nodes[:4]:
            node.set("lock:name", held, px=60_000)
        assert [(info.nodes, info.resting) for info in calls(redlock_locks).held()] == [(5, True)]

    def test_with_two_nodes_down(self, quorum, configured, calls):
        backend = configured(quorum.urls, OPTIONS={"node_timeout": 0.1})
        spread(calls(backend), lock_request(ttl=60))
        quorum.kill(0)
        quorum.stop(1)
        assert locked_names(calls(backend)) == ["name"]
        assert [info.nodes for info in calls(backend).held()] == [3]

    def test_a_value_that_is_no_lock_is_said(self, redlock_locks, nodes, caplog):
        for node in nodes:
            node.set("lock:name", "no lock")
        assert redlock_locks.look(["name"]) == [[]]
        assert "holds something that is no lock" in caplog.text
        with pytest.raises(LockBackendError, match="holds something that is no lock"):
            lock("name", wait=0).acquire()


class TestConnections:
    def test_that_died_while_idle_are_opened_anew(self, redlock_locks, nodes, calls):
        handle = calls(lock("name"))
        handle.acquire()
        handle.release()
        for node in nodes:
            node.client_kill_filter(skipme=True, _type="normal")
        assert handle.acquire()
        handle.release()

    def test_that_died_before_anybody_used_them_are_opened_anew(self, redlock_locks, nodes, monkeypatch):
        monkeypatch.setattr(redlock_locks.timing, "idle_trusted", 0.0)
        for node in nodes_of(client_of(redlock_locks)):
            for _ in range(3):
                node.spare.append(NodeConnection(node.location.connected()))
        for node in nodes:
            node.client_kill_filter(skipme=True, _type="normal")
        taken = lock_request()
        assert isinstance(redlock_locks.acquire(taken, queue=False), Grant)
        assert redlock_locks.release(taken)

    def test_after_the_servers_forgot_their_scripts(self, redlock_locks, nodes, calls):
        handle = calls(lock("name"))
        handle.acquire()
        for node in nodes:
            node.script_flush()
        handle.release()
        assert handle.acquire()
        handle.release()

    def test_no_thread_takes_part_in_a_round(self, redlock_locks, monkeypatch):
        with lock("name", renew=False):
            pass
        eventually(lambda: not [thread for thread in threading.enumerate() if "connect" in thread.name])
        here, started, start = threading.current_thread(), [], threading.Thread.start

        def note(thread):
            # Others end and begin what earlier tests left, and one reads replies that came late.
            if threading.current_thread() is here and not thread.name.startswith("distlock-replies"):
                started.append(thread.name)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", note)
        monkeypatch.setattr(redlock_locks.timing, "retry_delay", 0.0)  # late replies are read at once
        for _ in range(50):
            with lock("name", renew=False):
                pass
        assert started == []

    def test_nobody_waits_for_late_replies_that_do_not_end(self, redlock_locks, monkeypatch):
        """They are read from the only connections, on which a node hangs in the middle of one."""
        drop_dead, reads, goes_on = ConnectionSet.drop_dead, threading.Event(), threading.Event()

        def hang(connections):
            if threading.current_thread().name.startswith("distlock-replies"):
                reads.set()
                goes_on.wait(PATIENCE)
            return drop_dead(connections)

        monkeypatch.setattr(ConnectionSet, "drop_dead", hang)
        monkeypatch.setattr(ConnectionSet, "awaits_release", True)
        monkeypatch.setattr(redlock_locks.timing, "retry_delay", 0.0)
        with lock("name", renew=False):
            pass
        assert reads.wait(PATIENCE)
        try:
            with lock("name", renew=False):
                assert not goes_on.is_set()
        finally:
            monkeypatch.setattr(ConnectionSet, "awaits_release", False)
            goes_on.set()

    def test_a_forked_child_has_connections_of_its_own(self, redlock_locks):
        redlock_locks.acquire(lock_request("parent"), queue=False)
        pid = os.fork()
        if not pid:
            try:
                with lock("child"):
                    is_free = lock("parent", wait=0).acquire()
                os._exit(3 if is_free else 0)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with lock("child", wait=0):
            pass

    def test_one_per_node_serves_all_tasks(self, nodes, five_valkeys, configured):
        configured([f"{node.url}&client_name=tasks" for node in five_valkeys], OPTIONS={"node_timeout": PATIENCE})

        async def work(number):
            async with lock(f"n:{number}", renew=False, wait=PATIENCE):
                await asyncio.sleep(0.01)

        async def main():
            await asyncio.gather(*(work(number) for number in range(100)))
            return [[client["name"] for client in node.client_list()].count("tasks") for node in nodes]

        assert asyncio.run(main()) == [1] * 5

    def test_more_threads_than_connections_wait_for_one(self, five_valkeys, configured):
        backend = configured([node.url for node in five_valkeys], OPTIONS={"max_connections": 1})
        inside = threading.Barrier(2)

        def steps():
            inside.wait(PATIENCE)
            inside.wait(PATIENCE)
            return
            yield

        busy = threading.Thread(target=run_on_nodes, args=(backend, steps(), 1.0))
        busy.start()
        inside.wait(PATIENCE)
        short = lock_request()
        short.deadline = clock()
        with pytest.raises(
            LockBackendError, match=r"raise DISTRIBUTED_LOCKS\['default'\]\['OPTIONS'\]\['max_connections"
        ):
            backend.acquire(short, queue=False)
        threading.Timer(0.05, inside.wait).start()
        # On a busy machine nodes may answer too late, and what undoes that comes later still.
        eventually(lambda: isinstance(insist(lambda: backend.acquire(lock_request(), queue=False)), Grant))
        busy.join()

    def test_who_waits_for_a_lock_waits_as_long_for_a_connection(self, five_valkeys, configured):
        backend = configured(
            [node.url for node in five_valkeys], OPTIONS={"max_connections": 1, "socket_connect_timeout": 0.05}
        )
        ends = threading.Event()

        def steps():
            ends.wait(PATIENCE)
            return
            yield

        busy = threading.Thread(target=run_on_nodes, args=(backend, steps(), 1.0))
        busy.start()
        threading.Timer(3 * (0.05 + Timing.handshake), ends.set).start()
        patient = lock_request("queued for")
        patient.deadline = clock() + PATIENCE
        assert isinstance(backend.acquire(patient, queue=False), Grant)
        busy.join()

    def test_who_finds_all_in_use_is_told_what_the_others_failed_with(self, quorum, configured):
        backend = configured(quorum.urls, OPTIONS={"max_connections": 1, "node_timeout": 0.1})
        inside, ends = threading.Event(), threading.Event()

        def steps():
            inside.set()
            ends.wait(PATIENCE)
            return
            yield

        for number in range(5):
            quorum.kill(number)
        hasty = lock_request()
        hasty.deadline = clock()
        with pytest.raises(LockBackendError, match="of 5 nodes failed"):
            backend.acquire(hasty, queue=False)
        busy = threading.Thread(target=run_on_nodes, args=(backend, steps(), 0.1))
        busy.start()
        inside.wait(PATIENCE)
        try:
            with pytest.raises(LockBackendError, match="of 5 nodes failed"):
                backend.acquire(hasty, queue=False)
        finally:
            ends.set()
            busy.join()

    def test_who_waits_for_a_connection_is_not_failed_by_who_had_less_time(self, quorum, configured):
        backend = configured(quorum.urls, OPTIONS={"max_connections": 1, "socket_connect_timeout": 0.05})
        inside, ends, hasty = threading.Event(), threading.Event(), lock_request()

        def steps():
            inside.set()
            ends.wait(PATIENCE)
            return
            yield

        spread(backend, hasty)
        for number in range(5):
            quorum.stop(number)
        with pytest.raises(LockBackendError, match="of 5 nodes failed"):
            backend.renew([(hasty, 10.0)], timeout=0.01)
        for number in range(5):
            quorum.go_on(number)
        busy = threading.Thread(target=run_on_nodes, args=(backend, steps(), 1.0))
        busy.start()
        inside.wait(PATIENCE)
        threading.Timer(3 * (0.05 + Timing.handshake), ends.set).start()
        patient = lock_request("queued for")
        patient.deadline = clock() + PATIENCE
        assert isinstance(backend.acquire(patient, queue=False), Grant)
        busy.join()

    @pytest.mark.parametrize("busy_for", [0.0, 0.5])
    def test_the_time_to_wait_for_connections_is_spent_once(self, five_valkeys, configured, monkeypatch, busy_for):
        """First while all are in use, then until they are opened."""
        backend = configured([node.url for node in five_valkeys], OPTIONS={"max_connections": 1})
        inside, ends, left = threading.Event(), threading.Event(), []

        class Noted(connections.ConnectWait):
            def __init__(self, majority, timeout, *arguments, **options):
                super().__init__(majority, timeout, *arguments, **options)
                if threading.current_thread() is waiting:
                    left.append(timeout)

        def steps():
            inside.set()
            ends.wait(PATIENCE)
            raise InterruptedError  # which closes the connections
            yield

        def interrupted():
            with suppress(InterruptedError):
                run_on_nodes(backend, steps(), 1.0)

        def read_clock():
            moment = clock()
            if threading.current_thread() is waiting and timer.ident is None:
                timer.start()  # at its first look, from which its time counts
            return moment

        busy = threading.Thread(target=interrupted)
        busy.start()
        assert inside.wait(PATIENCE)
        waiting, timer = threading.current_thread(), threading.Timer(busy_for, ends.set)
        monkeypatch.setattr(connections, "ConnectWait", Noted)
        monkeypatch.setattr(connections, "clock", read_clock)
        backend.renew([(lock_request(), 10.0)], timeout=PATIENCE)
        busy.join()
        assert left
        assert left[0] <= PATIENCE - busy_for

    def test_where_no_thread_can_be_started(self, five_valkeys, configured, monkeypatch):
        def refuse(thread):
            raise RuntimeError("can't start new thread")

        backend = configured([node.url for node in five_valkeys], OPTIONS={"node_timeout": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(LockBackendError, match="can't start new thread"):
                backend.acquire(lock_request(), queue=False)
        assert isinstance(backend.acquire(lock_request(), queue=False), Grant)

    def test_without_poll(self, redlock_locks, monkeypatch, calls):
        monkeypatch.setattr("django_distlock.backends.redlock.connections.Poll", SelectPoll)
        for _ in range(3):
            with lock("name") as lease:
                assert redlock_locks.look(["name"])[0][0].token == lease.token

    def test_an_interrupt_leaves_nothing_behind(self, quorum, configured):
        """A handler of a signal, such as a time limit, that raises while nodes are asked."""
        backend = configured(quorum.urls)
        with lock("first"):
            pass

        def limit(*_):
            raise InterruptedError("time is up")

        before = signal.signal(signal.SIGALRM, limit)
        try:
            for number in range(3):
                quorum.stop(number)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptedError, match="time is up"):
                lock("name", wait=5).acquire()
        finally:
            signal.signal(signal.SIGALRM, before)
        for number in range(3):
            quorum.go_on(number)
        eventually(lambda: not renewer_of(backend).is_cleaning)
        eventually(lambda: not any(_locks(quorum)))
        with lock("name", wait=PATIENCE):
            pass
        eventually(lambda: not renewer_of(backend).is_cleaning)


def at_a_pace_of(pause, tried):
    """So many connections at most: to three nodes with that pause, and now and then to all."""
    return 3 * ((tried[-1] - tried[0]) / pause + 2) + 4 * 5


class TestOpeningConnections:
    @pytest.fixture
    def slow_to_open(self, monkeypatch):
        """Each connection takes a while, as to a distant server. How many at most were opened together, by node."""
        connected, guard = Location.connected, threading.Lock()
        opening, most = Counter(), Counter()

        def open_slowly(location, *arguments, **limits):
            node = location.text
            with guard:
                opening[node] += 1
                most[node] = max(most[node], opening[node])
            time.sleep(0.2)
            with guard:
                opening[node] -= 1
            return connected(location, *arguments, **limits)

        monkeypatch.setattr(Location, "connected", open_slowly)
        return most

    def test_a_crowd_of_threads_that_comes_cold_does_not_wait_in_a_row(self, redlock_locks, slow_to_open):
        def hold(number):
            with lock(f"n:{number}", wait=3):
                pass

        with ThreadPoolExecutor(30) as pool:
            assert list(pool.map(hold, range(30))) == [None] * 30
        assert max(slow_to_open.values()) > 1

    def test_threads_that_open_them_may_end_while_others_count_them(self, redlock_locks, monkeypatch):
        node, is_counted, over = nodes_of(client_of(redlock_locks))[0], threading.Event(), threading.Event()
        is_alive = threading.Thread.is_alive

        def end():
            is_counted.wait(PATIENCE)
            node.connecting_ended()

        def ends_meanwhile(thread):
            is_counted.set()
            ending.join(PATIENCE)
            return is_alive(thread)

        ending, *others = (threading.Thread(target=target) for target in (end, over.wait, over.wait))
        for thread in (ending, *others):
            node.connect_in(thread)
        try:
            with monkeypatch.context() as patches:
                patches.setattr(threading.Thread, "is_alive", ends_meanwhile)
                assert node.connecting_count == len(others)
        finally:
            over.set()
            for thread in others:
                thread.join(PATIENCE)

    @pytest.mark.parametrize("is_begun", [False, True], ids=["before it began", "after it began"])
    def test_an_interrupted_start_of_a_thread_is_not_under_way_for_ever(self, redlock_locks, monkeypatch, is_begun):
        """As by a time limit that a handler of a signal raises."""
        start, to_interrupt = threading.Thread.start, {location.text for location in redlock_locks.locations}

        def interrupted(thread):
            node = thread.name.removeprefix("distlock-connect-")
            if is_interrupted := node in to_interrupt:
                to_interrupt.remove(node)
            if is_begun or not is_interrupted:
                start(thread)
            if is_interrupted:
                raise InterruptedError("time is up")

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        while to_interrupt:
            with pytest.raises(InterruptedError):
                redlock_locks.look(["name"])
        spread(redlock_locks, lock_request())

    @pytest.mark.parametrize("is_begun", [False, True], ids=["before it began", "after it began"])
    def test_nor_is_that_of_a_task(self, redlock_locks, monkeypatch, is_begun):
        create, to_interrupt = asyncio.create_task, {location.text for location in redlock_locks.locations}

        def interrupted(coroutine, *, name):
            node = name.removeprefix("distlock-connect-")
            if node not in to_interrupt:
                return create(coroutine, name=name)
            to_interrupt.remove(node)
            if is_begun:
                create(coroutine, name=name)
            else:
                coroutine.close()
            raise InterruptedError("time is up")

        async def main():
            monkeypatch.setattr(asyncio, "create_task", interrupted)
            while to_interrupt:
                with pytest.raises(InterruptedError):
                    await redlock_locks.alook(["name"])
            taken, until = lock_request(), clock() + PATIENCE
            while clock() < until:
                assert isinstance(await redlock_locks.aacquire(taken, queue=False), Grant)
                [[info]] = await redlock_locks.alook(["name"])
                if info.nodes == 5:
                    break
            assert info.nodes == 5
            await redlock_locks.arelease(taken)

        asyncio.run(main())

    @pytest.fixture
    def tried(self, monkeypatch):
        """``tried(backend)``: when it tried a connection. Others may still release what tests before had acquired."""
        moments = []
        for name in ("connected", "aconnected"):
            connect = getattr(Location, name)

            def count(location, *arguments, connect=connect, **keywords):
                moments.append((location, clock()))
                return connect(location, *arguments, **keywords)

            monkeypatch.setattr(Location, name, count)
        return lambda backend: [at for location, at in moments if any(location is own for own in backend.locations)]

    @pytest.fixture
    def refusing(self, quorum, configured, long_calls):
        """Three of its five nodes refuse connections."""
        for number in range(3):
            quorum.kill(number)
        return configured(quorum.urls, OPTIONS=PATIENT)

    def test_a_majority_that_refuses_is_asked_again_in_the_background_at_a_pace(self, quorum, tried, refusing, calls):
        with pytest.raises(LockBackendError, match=MAJORITY_FAILED):
            calls(lock("name", wait=PATIENCE)).acquire()
        eventually(lambda: len(tried(refusing)) >= 5 + 3 * 2)
        assert len(tried(refusing)) <= at_a_pace_of(Timing.probe_pause_shortest, tried(refusing))
        for number in range(3):
            quorum.start(number)
        eventually(lambda: not refusing.outages())
        handle = calls(lock("name", wait=PATIENCE))
        assert handle.acquire()
        handle.release()

    def test_a_majority_that_refuses_is_an_answer_for_who_does_not_wait(self, tried, refusing, calls):
        for _ in range(20):
            with pytest.raises(LockBackendError, match=MAJORITY_FAILED):
                calls(refusing).look(["name"])
            with pytest.raises(LockBackendError, match=MAJORITY_FAILED):
                calls(lock("name", wait=0)).acquire()
        tried = tried(refusing)
        assert len(tried) <= at_a_pace_of(Timing.reconnect_pause_without_majority, tried)

    def test_a_wrong_password_is_not_sent_as_often_as_a_connection_is_tried(self, five_valkeys, configured, tried):
        urls = [node.url for node in five_valkeys]
        refused = configured([*urls[:2], *(f"unix://somebody:wrong@{node.socket}" for node in five_valkeys[2:])])
        with pytest.raises(LockBackendError, match="refused the user or password"):
            lock("name", wait=1.2).acquire()
        tried = tried(refused)
        assert len(tried) <= at_a_pace_of(Timing.reconnect_pause, tried)

    def test_a_holder_whose_majority_refuses_keeps_quiet(self, quorum, configured, tried):
        backend = configured(quorum.urls)
        with lock("name", ttl=3, on_lost="log") as lease:
            before = len(tried(backend))
            for number in range(3):
                quorum.kill(number)
            eventually(lambda: lease.state is State.LOST)
        assert len(tried(backend)) - before <= 3 * 3 / Timing.reconnect_pause_without_majority


class TestWhatNodesAnswer:
    """By scripted nodes, for answers that real ones give in rare moments."""

    @pytest.fixture
    def scripted(self):
        with Scripted() as one, Scripted() as two, Scripted() as three:
            yield one, two, three

    @pytest.fixture
    def backend(self, scripted, configured):
        options = {"node_timeout": 0.3, "socket_connect_timeout": 1.0}
        return configured([server.url for server in scripted], OPTIONS=options)

    @pytest.mark.parametrize("refusal", ["LOADING not yet", "NOPERM no", "MASTERDOWN Link with MASTER is down"])
    def test_who_refuses_to_tell_does_not_say_that_it_is_free(self, scripted, backend, calls, refusal):
        assert calls(lock("name")).locked() is False
        for server in scripted[:2]:
            server.fail(refusal, on=(b"GET", b"PTTL", b"SCAN"))
        with pytest.raises(LockBackendError, match="2 of 3 nodes failed"):
            calls(lock("name")).locked()
        with pytest.raises(LockBackendError, match="2 of 3 nodes failed"):
            calls(backend).held()
        scripted[0].answer = lambda words: None
        assert calls(lock("name")).locked() is False
        assert calls(backend).held() == []

    def test_a_renewal_that_a_majority_refuses_says_why(self, scripted, backend, calls):
        taken = lock_request()
        calls(backend).acquire(taken, queue=False)
        for server in scripted[:2]:
            server.fail("NOPERM no", on=(b"EVALSHA",))
        with pytest.raises(LockBackendError, match="widen its ACL rule"):
            calls(backend).renew([(taken, 10.0)])
        scripted[0].answer = lambda words: None
        assert calls(backend).renew([(taken, 10.0)]) == [True]

    ANSWERS: ClassVar = {
        "right": ((), None),
        "down": ((b"AUTH",), Scripted.CLOSE),
        "refused": ((b"AUTH",), "WRONGPASS invalid username-password pair"),
        "foreign": ((b"EVALSHA",), "WRONGTYPE Operation against a key"),
    }

    @pytest.mark.parametrize(
        ("answers", "is_final"),
        [
            ("refused refused right", True),
            ("refused foreign right", True),
            ("refused down down", False),
            ("right down down", False),
            ("refused refused right right", True),
            ("refused down right right", False),
            ("refused refused down right right", False),
            ("refused refused foreign right right", True),
        ],
    )
    def test_where_the_nodes_that_may_come_back_are_no_majority_waiting_is_no_use(
        self, configured, calls, answers, is_final
    ):
        with ExitStack() as servers:
            scripted = [servers.enter_context(Scripted()) for _ in answers.split()]
            for server, answer in zip(scripted, answers.split(), strict=True):
                commands, reply = self.ANSWERS[answer]
                server.fail(reply, on=commands)
            options = {"node_timeout": 0.3, "socket_connect_timeout": 0.5}
            configured([server.url for server in scripted], OPTIONS=options)
            began = clock()
            with pytest.raises(LockBackendError, match=f"of {len(scripted)} nodes failed") as caught:
                calls(lock("name", wait=60)).acquire()
            assert caught.value.is_final is is_final
            assert clock() - began < 50
            for server in scripted:
                server.heal()
            eventually(lambda: not renewer_of(locks["default"]).is_cleaning)

    @pytest.mark.parametrize("other", [None, "MASTERDOWN Link with MASTER is down", Scripted.CLOSE])
    def test_what_nodes_answer_late_or_refuse_keeps_no_request_in_memory(self, configured, calls, other):
        """A lease that was detached, or ran out, is not released by its request."""

        def leave_lease():
            request = lock_request()
            assert isinstance(calls(backend).acquire(request, queue=False), Grant)
            calls(backend).look(["name"])  # reads what came meanwhile
            return weakref.ref(request)

        with ExitStack() as servers:
            scripted = [servers.enter_context(Scripted()) for _ in range(5)]
            patience = {"node_timeout": 1.0, "socket_connect_timeout": 10.0}  # three must answer on a busy machine
            backend = configured([server.url for server in scripted], OPTIONS=patience)
            calls(backend).look(["name"])
            scripted[0].fail(Scripted.SILENCE, on=(b"EVALSHA",))
            if other:
                scripted[1].fail(other, on=(b"EVALSHA",))
            request = leave_lease()
            gc.collect()
            assert request() is None

    def test_values_that_are_no_locks_are_final_where_they_leave_no_majority(self, nodes, redlock_locks, calls):
        for name, count in (("two", 2), ("three", 3)):
            for node in nodes[:count]:
                node.set(f"lock:{name}", "no lock")
            for node in nodes[count:4]:
                node.rpush(f"lock:{name}", "no lock")

        def refusal(name):
            with pytest.raises(LockBackendError) as caught:
                calls(redlock_locks).acquire(lock_request(name), queue=False)
            return caught.value if caught.value.is_final else None

        for name in ("two", "three"):
            error = eventually(lambda name=name: refusal(name))  # by then all nodes are connected
            assert "holds something that is no lock" in str(error)

    def test_connections_that_died_unnoticed_are_replaced(self, scripted, backend, calls):
        taken = lock_request()
        for call, answer in (
            (lambda: isinstance(calls(backend).acquire(taken, queue=False), Grant), True),
            (lambda: calls(backend).renew([(taken, 10.0)]), [True]),
            (lambda: calls(backend).look(["name"]), [[]]),
            (lambda: calls(backend).held(), []),
            (lambda: calls(backend).release(taken), True),
        ):
            calls(backend).look(["name"])
            for server in scripted:
                server.forget()
            assert call() == answer

    def test_connections_that_end_once_as_they_are_opened_fail_no_call(self, scripted, backend, calls):
        for server in scripted:
            server.fail(Scripted.CLOSE, on=(b"AUTH",), times=1)
        handle = calls(lock("name", wait=0))
        assert handle.acquire()
        handle.release()

    def test_connections_that_end_again_and_again_as_they_are_opened_are_an_answer(self, scripted, backend, calls):
        for server in scripted:
            server.fail(Scripted.CLOSE, on=(b"AUTH",))
        with pytest.raises(LockBackendError, match="of 3 nodes failed"):
            calls(lock("name", wait=0)).acquire()

    @staticmethod
    def granted_by_all(backend):
        taken = lock_request(ttl=60)
        assert isinstance(backend.acquire(taken, queue=False), Grant)
        backend.look(["name"])  # all have answered
        return taken

    def test_a_node_that_is_long_in_connecting_is_not_released_again_without_a_pause(self, scripted, backend, calls):
        eventually(lambda: calls(backend).look(["name"]) and scripted[2].seen)  # else it is not asked for it
        taken = self.granted_by_all(calls(backend))
        scripted[2].fail(Scripted.SILENCE, on=(b"AUTH",))
        scripted[2].disconnect()
        assert calls(backend).release(taken)
        scripted[0].seen.clear()
        time.sleep(2 * Timing.retry_delay)
        assert scripted[0].seen.count(b"EVALSHA") < 10
        scripted[2].heal()
        eventually(lambda: b"EVALSHA" in scripted[2].seen and not renewer_of(backend).is_cleaning)
        assert scripted[2].seen.count(b"EVALSHA") < 10

    @staticmethod
    def wait_until_released(backend, node):
        """Again, after its connection has ended."""
        node.seen.clear()
        node.fail(Scripted.CLOSE, on=(b"GET",), times=1)

        def is_released():
            backend.look(["name"])  # reads what came meanwhile
            return b"EVALSHA" in node.seen

        eventually(is_released)
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)

    def test_a_release_on_a_connection_that_breaks_later_is_repeated(self, scripted, backend, calls):
        taken = lock_request(ttl=60)
        assert isinstance(calls(backend).acquire(taken, queue=False), Grant)
        scripted[2].fail(Scripted.SILENCE, on=(b"EVALSHA",))
        assert calls(backend).release(taken)
        self.wait_until_released(calls(backend), scripted[2])

    def test_so_is_one_after_which_no_thread_asks_any_more(self, scripted, backend):
        def end_late(words):
            if words[0] == b"EVALSHA" and scripted[2].seen.count(b"EVALSHA") == 2:
                time.sleep(0.2)
                return Scripted.CLOSE
            return None

        taken = lock_request(ttl=60)
        eventually(lambda: backend.look(["name"]) and scripted[2].seen)  # all are connected
        assert isinstance(backend.acquire(taken, queue=False), Grant)
        scripted[2].answer = end_late
        assert backend.release(taken)
        eventually(lambda: scripted[2].seen.count(b"EVALSHA") == 3)

    def test_so_is_what_undoes_a_grant_of_a_minority(self, scripted, backend, calls):
        calls(backend).look(["name"])
        for server in scripted[:2]:
            server.fail("NOREPLICAS not yet", on=(b"EVALSHA",))
        scripted[2].answer = lambda words: Scripted.SILENCE if scripted[2].seen.count(b"EVALSHA") > 1 else None
        with pytest.raises(LockBackendError, match="2 of 3 nodes failed"):
            calls(backend).acquire(lock_request(ttl=60), queue=False)
        eventually(lambda: scripted[2].seen.count(b"EVALSHA") == 2)
        for server in scripted[:2]:
            server.answer = lambda words: None
        self.wait_until_released(calls(backend), scripted[2])

    def test_so_is_one_where_a_connection_breaks_as_it_is_opened(self, scripted, backend, calls):
        taken = self.granted_by_all(calls(backend))
        scripted[2].fail(Scripted.CLOSE, on=(b"AUTH",))
        scripted[2].disconnect()
        assert calls(backend).release(taken)
        calls(backend).look(["name"])
        time.sleep(Timing.retry_delay)
        self.wait_until_released(calls(backend), scripted[2])

    @pytest.mark.seconds(5)
    def test_it_is_repeated_for_as_long_as_a_renewal_made_the_lease_last(self, scripted, backend, calls):
        handle = lock("name", ttl=2, renew=False)
        calls(handle).acquire()
        calls(lease_of(handle)).renew(ttl=60)
        scripted[2].fail(Scripted.CLOSE, on=(b"AUTH",))
        scripted[2].disconnect()
        calls(handle).release()
        calls(backend).look(["name"])
        time.sleep(2 + 2 * Timing.retry_delay)
        self.wait_until_released(calls(backend), scripted[2])

    def test_who_waits_for_the_lock_waits_for_nodes_that_end_each_connection(self, scripted, configured, calls):
        """Until they keep one. A breaker opens when they refuse; then nobody waits for them."""
        configured([server.url for server in scripted], OPTIONS=PATIENT)
        for server in scripted:
            server.fail(Scripted.CLOSE, on=(b"AUTH",), times=4)
        handle = calls(lock("name", wait=PATIENCE))
        assert handle.acquire()
        handle.release()
        assert [server.failed for server in scripted].count(4) >= 2

    def test_who_comes_when_nodes_are_back_is_not_told_what_others_met(self, scripted, backend, calls):
        taken = lock_request()
        calls(backend).acquire(taken, queue=False)
        for server in scripted:
            server.refuse()
        with pytest.raises(LockBackendError, match="of 3 nodes failed"):
            calls(lock("other", wait=0)).acquire()
        for server in scripted:
            server.heal()
        eventually(lambda: not backend.outages())
        assert calls(backend).release(taken)


def test_a_repair_that_a_release_overtook_gives_nobody_the_lock(redlock_locks, nodes, monkeypatch):
    """A node had lost the lease; the renewal gives it back there while the holder releases it elsewhere."""
    taken, run = lock_request(), Nodes.run
    spread(redlock_locks, taken)
    nodes[0].delete("lock:name")

    def released_meanwhile(steps):
        exchanges = yield next(steps)
        repair = steps.send(exchanges)
        assert redlock_locks.release(taken)
        exchanges = yield repair
        try:
            steps.send(exchanges)
        except StopIteration as end:
            return end.value

    def run_and_release(of_backend, steps, limits):
        monkeypatch.setattr(Nodes, "run", run)
        return run(of_backend, released_meanwhile(steps), limits)

    with lock("other"):  # so that somebody cleans up
        monkeypatch.setattr(Nodes, "run", run_and_release)
        redlock_locks.renew([(taken, 10 * PATIENCE)])  # nor does its end free it
        eventually(lambda: not any(node.exists("lock:name") for node in nodes))


def test_a_release_that_is_overtaken_by_what_undoes_a_repair_is_no_loss(redlock_locks, nodes, monkeypatch):
    taken, run, begun, overtaken, told = lock_request(), Nodes.run, threading.Event(), threading.Event(), []
    spread(redlock_locks, taken)
    nodes[0].delete("lock:name")
    releasing = threading.Thread(target=lambda: told.append(redlock_locks.release(taken)))

    def goes_on(steps, exchanges):
        while True:
            try:
                exchanges = yield steps.send(exchanges)
            except StopIteration as end:
                return end.value

    def late(steps):
        fan_out = next(steps)
        begun.set()
        overtaken.wait(PATIENCE)
        return (yield from goes_on(steps, (yield fan_out)))

    def released_meanwhile(steps):
        repair = steps.send((yield next(steps)))
        exchanges = yield repair
        releasing.start()
        assert begun.wait(PATIENCE)
        return (yield from goes_on(steps, exchanges))

    def run_each(of_backend, steps, limits):
        if threading.current_thread() is releasing:
            steps = late(steps)
        elif not releasing.ident and not begun.is_set():
            steps = released_meanwhile(steps)
        return run(of_backend, steps, limits)

    with lock("other"):  # so that somebody cleans up
        monkeypatch.setattr(Nodes, "run", run_each)
        redlock_locks.renew([(taken, 10 * PATIENCE)])
        eventually(lambda: not any(node.exists("lock:name") for node in nodes))
        overtaken.set()
        releasing.join(PATIENCE)
        monkeypatch.setattr(Nodes, "run", run)
    assert told == [True]


class TestEventLoops:
    def test_connections_are_closed_with_their_loop(self, quorum, configured):
        backend = configured(quorum.urls)

        async def main():
            async with lock("name"):
                return _clients(nodes.values())

        with quorum.clients() as nodes:
            before = _clients(nodes.values())
            for _ in range(3):
                during = asyncio.run(main())
                assert sum(len(now - then) for now, then in zip(during, before, strict=True)) >= 3
                eventually(lambda: all(now <= then for now, then in zip(_clients(nodes.values()), before, strict=True)))
        assert len(clients_of_loops(backend)) == 0

    def test_the_impatient_end_no_connection_on_which_others_wait(self, quorum, configured, monkeypatch):
        """The tasks of a loop share their connections, and the timeout of a node follows the TTL."""
        backend = configured(quorum.urls)
        monkeypatch.setattr(Timing, "node_unresponsive_after", PATIENCE)
        patient, hasty = lock_request("patient", ttl=60), lock_request("hasty", ttl=1)
        hasty.deadline = clock()

        async def main():
            assert isinstance(await backend.aacquire(lock_request("connects", ttl=60), queue=False), Grant)
            for number in range(5):
                quorum.stop(number)
            backend.option["node_timeout"] = PATIENCE
            waiting = asyncio.create_task(backend.aacquire(patient, queue=False))
            await asyncio.sleep(0)  # it has asked
            backend.option["node_timeout"] = 0.05
            with pytest.raises(LockBackendError, match="does not answer"):
                await backend.aacquire(hasty, queue=False)
            for number in range(5):
                quorum.go_on(number)
            return await waiting

        assert isinstance(asyncio.run(main()), Grant)
        assert not patient.in_doubt  # it was asked for once

    def test_what_ends_with_the_loop_leaves_no_connection(self, quorum, configured):
        """Generators that were left over are closed at the same time as the connections."""
        left_over = []

        async def guarded():
            async with lock("name"):
                yield

        async def main():
            left_over.append(guarded())
            await anext(left_over[0])

        backend = configured(quorum.urls)
        with quorum.clients() as nodes:
            before = _clients(nodes.values())
            asyncio.run(main())
            assert backend.look(["name"]) == [[]]
            backend.close()  # what was given back in the background, was so by a thread
            eventually(lambda: all(now <= then for now, then in zip(_clients(nodes.values()), before, strict=True)))

    def test_tasks_that_are_cancelled_at_the_end_give_back_at_once(self, redlock_locks):
        """asyncio.run() cancels them together with those that read from the nodes."""

        async def hold():
            async with lock("name"):
                await asyncio.sleep(3600)

        async def main():
            task = asyncio.create_task(hold())
            while not await lock("name").alocked():
                await asyncio.sleep(0.01)
            return task  # held, so that it is not collected before the loop ends

        with ending_within(4):
            asyncio.run(main())
        assert redlock_locks.look(["name"]) == [[]]

    def test_what_connects_as_the_loop_ends_leaves_no_connection(self, redlock_locks):
        """asyncio.run() cancels all tasks, also those that are to read from a connection and have not begun."""

        def make(loop, coroutine, **options):
            task = asyncio.Task(coroutine, loop=loop, **options)
            if getattr(coroutine, "__qualname__", "") == "AsyncNode._read":
                for each in (task, *asyncio.all_tasks(loop)):
                    each.cancel()
            return task

        async def main():
            asyncio.get_running_loop().set_task_factory(make)
            await lock("name").alocked()

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
        locks.close()
        gc.collect()  # pytest tells of what was not closed

    def test_a_connection_that_ends_at_once_says_why(self, redlock_locks, monkeypatch):
        connected = Location.aconnected

        async def ending(location):
            """After the answers to what connects."""
            connection = await connected(location)
            read, replies = connection.read_response, itertools.count(1)

            async def read_response(**options):
                if next(replies) > len(SCRIPT_LOADS):
                    raise redis.ConnectionError("Connection closed by server.")
                return await read(**options)

            connection.read_response = read_response
            return connection

        monkeypatch.setattr(Location, "aconnected", ending)
        with pytest.raises(LockBackendError, match=r"Connection closed by server\."):
            asyncio.run(lock("name").alocked())


def _clients(nodes):
    return [{one["id"] for one in node.client_list()} for node in nodes]


class TestSettings:
    def refused(self, configured, location, match, **entry):
        with pytest.raises(InvalidLockBackend, match=match):
            configured(location, **entry)

    def test_locations(self, configured):
        three = [f"redis://host-{number}:6379/0" for number in range(3)]
        self.refused(configured, "redis://one", r"\['LOCATION'\] is 'redis://…'. RedlockBackend needs a list of at")
        self.refused(configured, three[:2], "at least 3 servers")
        twice = "one server more than once: redis://host-0:6379/0 and redis://"
        self.refused(configured, [*three, "redis://host-0/0"], twice)
        self.refused(configured, [*three, "redis://HOST-0:6379/1"], twice)
        self.refused(configured, [*three, "host"], r"\['LOCATION'\]\[3\] is 'host'")
        assert configured(three).check_settings() == []

    def test_options(self, configured):
        three = [f"redis://host-{number}" for number in range(3)]
        for option, value, match in (
            ("node_timeout", 0, "twentieth of the TTL"),
            ("retry_delay", 5, "two numbers of seconds"),
            ("retry_delay", (2, 1), "two numbers of seconds"),
            ("max_connections", 0, "whole number"),
            ("socket_timeout", 1, "unknown option 'socket_timeout'"),
        ):
            self.refused(configured, three, match, OPTIONS={option: value})

    def test_the_timeout_of_a_node_follows_the_ttl(self, configured, monkeypatch):
        backend, timeouts = configured([f"redis://host-{number}" for number in range(3)]), []
        monkeypatch.setattr(Nodes, "run", lambda nodes, steps, limits: timeouts.append(limits.timeout) or [True])
        for ttl in (0.1, 10, 100):
            assert backend.renew([(lock_request(), ttl)]) == [True]
        assert timeouts == [0.05, 0.5, 1.0]

    def test_a_timeout_of_half_the_ttl_is_doubtful(self, configured):
        three = [f"redis://host-{number}" for number in range(3)]
        [finding] = configured(three, TTL=4, OPTIONS={"node_timeout": 2}).check_settings()
        assert finding.id == "distlock.W011"
        assert "lower OPTIONS['node_timeout']" in finding.hint

    def test_an_even_number_of_nodes_is_doubtful(self, configured):
        [finding] = configured([f"redis://host-{number}" for number in range(4)]).check_settings()
        assert finding.id == "distlock.W030"
        assert "names 4 nodes. With 3 as many may fail" in finding.msg

    def test_a_cache_in_the_database_of_a_node_is_doubtful(self, configured, settings):
        settings.CACHES = {
            "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://host-1/2"},
            "other": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://host-2/1"},
        }
        [finding] = configured([f"redis://host-{number}/2" for number in range(3)]).check_settings()
        assert finding.id == "distlock.W010"
        assert "['LOCATION'][1]: CACHES['default'] is in the same database" in finding.msg


def test_the_acl_of_the_documentation_suffices(nodes, redlock_locks, five_valkeys, configured, calls):
    page = ROOT.joinpath("docs", "redlock.md").read_text()
    _, _, rule = page.partition("user distlock ")
    rule = rule.partition("```")[0].replace(">password", "nopass").split()
    for node in nodes:
        node.execute_command("ACL", "SETUSER", "distlock", "reset", *rule)
    try:
        urls = [server.url + "&username=distlock&password=any" for server in five_valkeys]
        backend = calls(configured(urls, OPTIONS={"node_timeout": PATIENCE}))
        mine = lock_request()
        assert isinstance(backend.acquire(mine, queue=False), Grant)
        assert isinstance(backend.acquire(lock_request(), queue=False), LockInfo)
        assert backend.renew([(mine, 60.0)]) == [True]
        assert locked_names(backend) == ["name"]
        assert backend.look(["name"])[0][0].token == mine.token
        mine.in_doubt = True
        assert backend.release(mine, 0.001) is True
        assert not any("does not answer" in finding.message for finding in backend.check())
        locks.close()
    finally:
        for node in nodes:
            node.execute_command("ACL", "DELUSER", "distlock")


class TestCheck:
    @pytest.fixture
    def patient(self, configured, calls):
        """Its nodes are connected, and have all the time to answer."""

        def patient(urls, connected, **entry):
            backend = calls(configured(urls, OPTIONS=PATIENT, **entry))
            connect_all(backend, connected)
            return backend

        return patient

    def test_nodes_that_are_old_enough(self, five_valkeys, configured, calls):
        backend = configured([server.url for server in five_valkeys], TTL=1, OPTIONS=PATIENT)
        eventually(lambda: {finding.level for finding in calls(backend).check()} == {Level.OK})

    def test_the_lock_of_a_check_makes_no_ttl_longer_for_a_later_one(self, five_valkeys, patient):
        backend = patient([server.url for server in five_valkeys], 5, TTL=3600)
        for _ in range(2):
            found = [finding.message for finding in backend.check() if finding.about == "uptime"]
            assert ["less than the longest TTL of 3600 s" in message for message in found] == [True] * 5

    def test_a_node_younger_than_the_longest_ttl(self, quorum, patient):
        findings = [finding for finding in patient(quorum.urls, 5, TTL=3600).check() if finding.about == "uptime"]
        assert len(findings) == 5
        for node, finding in zip(quorum.nodes, findings, strict=True):
            assert not finding.is_error
            assert str(node.socket) in finding.message
            assert "less than the longest TTL of 3600 s" in finding.message

    def test_one_server_under_two_names(self, five_valkeys, patient, tmp_path):
        urls = [server.url for server in five_valkeys[:3]]
        other_name = tmp_path / "s"
        other_name.symlink_to(five_valkeys[0].socket)
        backend = patient([*urls, f"unix://{other_name}?db=1"], 4)
        [finding] = [finding for finding in backend.check() if finding.is_error]
        assert "are one server, which then has 2 votes" in finding.message

    def test_a_node_that_does_not_answer_and_one_that_evicts(self, quorum, patient):
        quorum.kill(0)
        with redis.Redis.from_url(quorum.urls[1]) as client:
            client.config_set("maxmemory", 10**9)
            client.config_set("maxmemory-policy", "allkeys-lru")
        errors = [finding.message for finding in patient(quorum.urls, 4).check() if finding.is_error]
        assert len(errors) == 2
        assert "does not answer" in errors[0]
        assert "may evict locks" in errors[1]


def test_no_key_is_left_but_the_counters(redlock_locks, nodes, calls):
    for number in range(50):
        handle = calls(lock("n:{}", number))
        handle.acquire()
        handle.release()
    eventually(lambda: all(set(node.keys("lock:*")) == set() for node in nodes))
    assert all(not node.keys("lock|x:*") or node.ttl(node.keys("lock|x:*")[0]) > 0 for node in nodes)
