"""A Cluster that changes under its locks: slots that move, primaries that fail over, hang, or are gone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack
from itertools import chain, count, cycle, repeat
from math import inf

import pytest
import redis

from django_distlock import LockBackendError, LockError, LockLost, State, lock, locks
from django_distlock.backends.common import attempts as policy
from django_distlock.backends.common.attempts import Attempts, InDoubt
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.cluster import routing
from django_distlock.backends.redis.cluster.routing import ASKING, Address, RoutedRequest, SlotMap
from django_distlock.backends.redis.keys import slot_of
from django_distlock.backends.redis.operations import RENEW, RENEW_SLOT
from django_distlock.backends.redis.replies import Reply
from django_distlock.backends.redis.scripts import Command, pack
from django_distlock.types import Grant
from example_project.valkey import binary
from tests.support.cluster import Node, names_on, subscribed
from tests.support.history import EVERYBODY, Journal, beliefs_of, faults, numbers_that_went_back, read
from tests.support.leases import wait_for_renewal
from tests.support.peers import Peer
from tests.support.stores import REDIS_CLUSTER
from tests.support.tools import ALLOWANCE, PATIENCE, ending_within, eventually, lock_request, renewer_of

pytestmark = pytest.mark.seconds(3)

TAKEOVER = 8.0  # seconds within which a replica has taken over, on a busy machine

PROLOGUE = """
import os, sys, threading, time
from django.conf import settings
settings.configure(DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "tests.support.history.RecordingClusterBackend", "LOCATION": sys.argv[1].split()}})
from django_distlock import *
def say(*words):
    print(*words, flush=True)
def told():
    return sys.stdin.readline().strip()
say("ready")
order = told()
"""

LOAD = """
import asyncio, json
from pathlib import Path
from tests.support.history import Journal
import logging
logging.disable(logging.CRITICAL)
folder, names, until = json.loads(order)
Journal(Path(folder)).attach()
errors = []
def goes_on():
    return time.monotonic() < until and not Path(folder, "enough").exists()
def thread(name):
    while goes_on():
        try:
            with lock(name, wait=90, ttl=6, on_lost="log"):
                time.sleep(0.002)
        except LockError as error:
            errors.append(error)
async def task(name):
    while goes_on():
        try:
            async with lock(name, wait=90, ttl=6, on_lost="log"):
                await asyncio.sleep(0.002)
        except LockError as error:
            errors.append(error)
async def tasks():
    await asyncio.gather(*map(task, names))
threads = [threading.Thread(target=thread, args=(name,)) for name in names]
for one in threads:
    one.start()
asyncio.run(tasks())
for one in threads:
    one.join()
say("out", len(errors), *errors[:1])
"""


@pytest.fixture
def cluster(valkey_cluster, settings):
    """To be broken: it is healed afterwards. Two aliases wait as two processes do."""
    valkey_cluster.flush()
    settings.DISTRIBUTED_LOCKS = {
        alias: {"BACKEND": REDIS_CLUSTER, "LOCATION": valkey_cluster.urls} for alias in ("default", "other")
    }
    with valkey_cluster.failing_over():
        yield valkey_cluster
        valkey_cluster.heal()
    eventually(lambda: not any(renewer_of(backend).is_cleaning for backend in locks.all()), 2 * PATIENCE)
    locks.close()


@pytest.fixture
def peers(cluster):
    started = []

    def start(number, names, folder, ends):
        urls = " ".join(cluster.urls)  # one may be killed before the last of them begins
        fresh = [Peer(urls, LOAD, 30.0, PROLOGUE) for _ in range(number)]
        started.extend(fresh)
        for peer in fresh:
            peer.says("ready", 3 * PATIENCE)
        for peer in fresh:
            peer.tell(json.dumps([str(folder), names, ends]))
        return fresh

    yield start
    for peer in started:
        peer.end()


class Waiter:
    """A thread, or a task in a loop of its own, that waits for a lock and tells what became of it."""

    def __init__(self, name, way, using="other"):
        self.handle = lock(name, using=using, wait=3 * PATIENCE, ttl=10, on_lost="log")
        self.outcome = None
        self.thread = threading.Thread(target=self.in_thread if way == "thread" else self.in_task)
        self.thread.start()

    def in_thread(self):
        try:
            with self.handle as lease:
                self.outcome = lease.fence
        except LockError as error:
            self.outcome = error

    def in_task(self):
        async def main():
            async with self.handle as lease:
                self.outcome = lease.fence

        try:
            asyncio.run(main())
        except LockError as error:
            self.outcome = error

    def gets_in(self, within=PATIENCE):
        self.thread.join(within)
        assert isinstance(self.outcome, int), self.outcome
        return self.outcome


def node_of(cluster, name):
    return cluster.owner(slot_of(locks["default"].keys.lease(name)))


def one_per_primary(cluster):
    return [names[0] for names in names_on(cluster, locks["default"]).values()]


class TestMovingSlots:
    @pytest.mark.parametrize("way", ["key by key", "at once"])
    def test_processes_share_a_lock_whose_slot_moves(self, cluster, peers, tmp_path, way):
        name = "name"
        slot = slot_of(locks["default"].keys.lease(name))
        journal = Journal(tmp_path)
        running = peers(3, [name], tmp_path, time.monotonic() + 12 * PATIENCE)
        for _ in range(2):
            grants = count_grants(tmp_path)
            eventually(lambda grants=grants: count_grants(tmp_path) >= grants + 20, 2 * PATIENCE)
            to = next(node for node in cluster.primaries if node is not cluster.owner(slot))
            journal.write("disturbed", pid=EVERYBODY)
            if way == "at once":
                cluster.move_at_once(slot, to)
            else:
                cluster.move(slot, to, pause=0.05)
            journal.write("disturbed", pid=EVERYBODY)
        grants = count_grants(tmp_path)
        eventually(lambda: count_grants(tmp_path) >= grants + 20, 2 * PATIENCE)
        (tmp_path / "enough").touch()
        for peer in running:
            peer.says("out 0", 3 * PATIENCE)
        assert faults(read(tmp_path)) == []
        eventually(lambda: cluster.all_keys() == [])

    @pytest.mark.seconds(11)
    def test_while_a_slot_is_between_two_nodes_its_leases_are_renewed_and_seen(self, cluster):
        source = node_of(cluster, "name")
        to = next(node for node in cluster.primaries if node is not source)
        slot = slot_of(locks["default"].keys.lease("name"))
        beside = next(one for one in map(str, count()) if slot_of(locks["default"].keys.lease(one)) == slot)
        with lock("name", ttl=6) as lease:
            keeps = threading.Thread(target=cluster.move, args=(slot, to, 3.0))
            keeps.start()
            wait_for_renewal(lease)
            assert keeps.is_alive()
            [[seen], free] = locks["other"].look(["name", beside])
            assert (seen.fence, free) == (lease.fence, [])
            assert keeps.is_alive()
            keeps.join(PATIENCE)
            time.sleep(1)
            assert lease.state is State.HELD
        assert not lock("name").locked()

    @pytest.mark.parametrize("way", ["thread", "task"])
    def test_waiters_hear_of_a_lock_at_the_new_owner_of_its_slot(self, cluster, way):
        slot = slot_of(locks["default"].keys.lease("name"))
        source = cluster.owner(slot)
        to = next(node for node in cluster.primaries if node is not source)
        with lock("name") as lease:
            waiter = Waiter("name", way)
            eventually(lambda: subscribed(cluster).get(source.port))
            cluster.move(slot, to)
            eventually(lambda: subscribed(cluster).get(to.port))
            eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
        assert waiter.gets_in() > lease.fence

    @pytest.mark.parametrize("way", ["thread", "task"])
    def test_waiters_renew_nothing(self, cluster, way):
        """As they do at one server. From a slot on its way, one renewal would go to the next owner."""
        source = node_of(cluster, "name")
        with lock("name", ttl=3600) as lease:
            source.client.script_flush()
            waiter = Waiter("name", way)
            eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
            assert source.client.script_exists(RENEW.sha, RENEW_SLOT.sha) == [False, False]
        assert waiter.gets_in() > lease.fence

    def test_the_subscription_to_a_slot_on_its_way_stands(self, cluster, monkeypatch):
        """The next owner answers looks, once it has all keys, and nobody listens there yet."""
        monkeypatch.setattr(Timing, "look_interval", 0.5)
        slot = slot_of(locks["default"].keys.lease("name"))
        source = cluster.owner(slot)
        to = next(node for node in cluster.primaries if node is not source)
        eventually(lambda: not subscribed(cluster))  # those of tests before
        _, _, retired, *_ = locks["default"].keys.of_lock("name")
        source.client.zadd(retired, {"token": inf})  # somebody has given up: now all keys of the lock are there
        with lock("name") as lease:
            waiter = Waiter("name", "thread")
            eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
            listening = [one["id"] for one in source.client.client_list(_type="pubsub")]
            to.cluster("SETSLOT", slot, "IMPORTING", source.id)
            source.cluster("SETSLOT", slot, "MIGRATING", to.id)
            keys = source.cluster("GETKEYSINSLOT", slot, 100)
            source.client.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)
            time.sleep(2)
            assert [one["id"] for one in source.client.client_list(_type="pubsub")] == listening
            cluster.move(slot, to)
        assert waiter.gets_in() > lease.fence
        to.client.delete(retired)


def count_grants(folder):
    return sum(path.read_bytes().count(b'"grant"') for path in folder.glob("*.jsonl"))


class TestFailover:
    @pytest.mark.parametrize(("end", "way"), [("by command", "thread"), ("killed", "task"), ("hangs", "thread")])
    def test_a_lease_goes_on_and_the_waiter_gets_it_at_the_new_primary(self, cluster, end, way):
        primary = node_of(cluster, "name")
        elsewhere = next(name for name in one_per_primary(cluster) if node_of(cluster, name) is not primary)
        replica = cluster.replica_of(primary)
        with lock("name", ttl=2 * TAKEOVER) as lease, lock(elsewhere, ttl=2 * TAKEOVER) as other:
            waiter = Waiter("name", way)
            eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
            if end == "killed":
                assert primary.client.wait(1, 1000) == 1
                primary.kill()
            elif end == "hangs":
                primary.stop()
            else:
                cluster.fail_over(primary)
            eventually(lambda: replica.is_primary, TAKEOVER)
            wait_for_renewal(lease)
            assert (lease.state, other.state) == (State.HELD, State.HELD)
            assert waiter.outcome is None
        assert waiter.gets_in() > lease.fence

    @pytest.mark.parametrize("way", ["thread", "task"])
    def test_more_waiters_than_connections_live_through_it(self, cluster, settings, way):
        options = {"socket_timeout": 0.5, "max_connections": 1}
        entry = {"BACKEND": REDIS_CLUSTER, "LOCATION": cluster.urls, "OPTIONS": options}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
        primary = node_of(cluster, "name")
        shard = locks["default"].keys.shard_of("name")
        names = [name for name in map(str, range(999)) if locks["default"].keys.shard_of(name) == shard][:6]
        primary.stop()

        async def tasks():
            await asyncio.gather(*map(task, names))

        async def task(name):
            async with lock(name, wait=3 * PATIENCE):
                pass

        if way == "task":
            asyncio.run(tasks())
        else:
            for waiter in [Waiter(name, "thread", using="default") for name in names]:
                waiter.gets_in()

    def test_a_lock_whose_grant_was_lost_is_told_and_the_next_has_a_larger_number(self, cluster):
        primary = node_of(cluster, "name")
        replica = cluster.replica_of(primary)
        handle = lock("name", ttl=6, on_lost="raise")
        replica.stop()
        assert primary.client.execute_command("CLIENT", "KILL", "TYPE", "replica") == 1
        lease = handle.__enter__()
        primary.kill()
        replica.go_on()
        eventually(lambda: replica.is_primary, 2 * TAKEOVER)
        with lock("name", using="other", wait=5) as second:
            assert second.fence > lease.fence
            eventually(lambda: lease.state is State.LOST)
        with pytest.raises(LockLost):
            handle.__exit__(None, None, None)

    def test_numbers_grow_over_a_primary_that_is_killed_under_load(self, cluster, peers, tmp_path):
        """A write that was not replicated yet is lost, so two may hold it at once for one TTL; S12 holds."""
        names = ["name"]
        running = peers(2, names, tmp_path, time.monotonic() + 12 * PATIENCE)
        eventually(lambda: count_grants(tmp_path) > 20)
        primary = node_of(cluster, "name")
        replica = cluster.replica_of(primary)
        primary.kill()
        eventually(lambda: replica.is_primary, TAKEOVER)
        grants = count_grants(tmp_path)
        eventually(lambda: count_grants(tmp_path) > grants + 20, 2 * PATIENCE)
        (tmp_path / "enough").touch()
        for peer in running:
            peer.says("out 0", 3 * PATIENCE)
        assert (
            list(numbers_that_went_back(beliefs_of([event for event in read(tmp_path) if event.name == "name"]))) == []
        )

    def test_primaries_that_change_places_under_load(self, cluster, peers, tmp_path):
        names, journal = one_per_primary(cluster), Journal(tmp_path)
        running = peers(2, names, tmp_path, time.monotonic() + 12 * PATIENCE)
        for primary in cluster.primaries:
            grants = count_grants(tmp_path)
            eventually(lambda grants=grants: count_grants(tmp_path) > grants + 50)
            journal.write("disturbed", pid=EVERYBODY)
            cluster.fail_over(primary)
            journal.write("disturbed", pid=EVERYBODY)
        (tmp_path / "enough").touch()
        for peer in running:
            peer.says("out 0", 3 * PATIENCE)
        assert faults(read(tmp_path)) == []


class TestHangingPrimary:
    @pytest.fixture
    def hanging(self, cluster, settings):
        """A primary and its replica hang, so nobody takes over. Returns a name there and one elsewhere."""
        entry = {
            "BACKEND": REDIS_CLUSTER,
            "LOCATION": cluster.urls,
            "OPTIONS": {"socket_timeout": 1.5, "failover_timeout": 1.5},
        }
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
        there, elsewhere, *_ = one_per_primary(cluster)
        primary = node_of(cluster, there)
        replica = cluster.replica_of(primary)
        for name in (there, elsewhere):
            with lock(name):
                pass

        def hang():
            replica.stop()
            primary.stop()
            return primary

        return there, elsewhere, hang

    def test_only_its_shards_fail_and_in_time(self, hanging, calls):
        there, elsewhere, hang = hanging
        primary = hang()
        for wait in (True, False):
            with ending_within(5), pytest.raises(LockBackendError, match=str(primary.port)):
                calls(locks["default"]).acquire(lock_request(there), queue=wait)
            began = time.monotonic()
            mine = lock_request(elsewhere)
            assert isinstance(calls(locks["default"]).acquire(mine, queue=wait), Grant)
            assert calls(locks["default"]).release(mine)
            assert time.monotonic() - began < 1.4  # less than the timeout of the other one

    def test_who_waits_is_told_when_the_wait_is_over(self, hanging, cluster, settings, calls):
        there, _, hang = hanging
        options = {"socket_timeout": 2.0}
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": REDIS_CLUSTER, "LOCATION": cluster.urls, "OPTIONS": options}
        }
        with lock(there):
            pass
        primary, began = hang(), time.monotonic()
        with pytest.raises(LockBackendError, match=str(primary.port)):
            calls(lock(there, wait=2.2)).acquire()
        assert time.monotonic() - began < 3.5 + ALLOWANCE

    @pytest.mark.seconds(9)
    def test_leases_elsewhere_are_renewed_and_handed_on(self, hanging):
        there, elsewhere, hang = hanging
        with lock(there, ttl=6, on_lost="log") as lost, lock(elsewhere, ttl=6) as kept:
            hang()
            waiter = Waiter(elsewhere, "thread")
            eventually(lambda: lost.state is State.LOST)
            wait_for_renewal(kept)
            kept.ensure_held()
            kept.release()
            waiter.gets_in()

    @pytest.mark.seconds(8)
    def test_what_is_asked_of_all_nodes_names_the_one_that_failed(self, hanging, calls):
        there, elsewhere, hang = hanging
        held = [lock_request(there), lock_request(elsewhere)]
        for one in held:
            locks["default"].acquire(one, queue=False)
        primary = hang()
        backend = calls(locks["default"])
        assert backend.renew([(one, 20.0) for one in held]) == [None, True]
        for ask in (lambda: backend.look([elsewhere, there]), backend.slots):
            with pytest.raises(LockBackendError, match=str(primary.port)):
                ask()
        found = [finding for finding in backend.check() if finding.is_error]
        assert any(str(primary.port) in finding.message for finding in found)

    def test_a_request_that_arrives_after_its_caller_has_left_leaves_nothing(self, hanging, cluster):
        """S4. The node hangs for less than the others need to notice."""
        there, _, hang = hanging
        primary = hang()
        with pytest.raises(LockBackendError):
            lock(there).acquire(blocking=False)
        primary.go_on()
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
        eventually(lambda: [key for key in primary.client.keys("lock*") if "|f:" not in key and "|x:" not in key] == [])


class TestHangingSeeds:
    """Nodes that take connections and answer nothing."""

    @pytest.fixture
    def hanging_urls(self):
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            yield [f"redis://127.0.0.1:{one.getsockname()[1]}" for one in sockets]

    def test_all_of_them_take_no_longer_than_one(self, hanging_urls, settings, calls):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS_CLUSTER, "LOCATION": hanging_urls}}
        began = time.monotonic()
        with pytest.raises(LockBackendError, match="does not answer"):
            calls(lock("name", wait=0)).acquire()
        assert time.monotonic() - began < 1.9
        locks.close()

    def test_a_fresh_process_soon_asks_the_next(self, cluster, hanging_urls, settings, calls):
        urls = [hanging_urls[0], cluster.urls[0]]
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS_CLUSTER, "LOCATION": urls}}
        began = time.monotonic()
        assert isinstance(calls(locks["default"]).acquire(lock_request(), queue=False), Grant)
        assert time.monotonic() - began < 1.9


class TestRefusingPrimary:
    @pytest.fixture
    def refuse(self, cluster):
        """Makes a primary refuse what locks ask of it, which it says at once."""
        refusing = []

        def start(node):
            refusing.append(node)
            node.client.execute_command("ACL", "SETUSER", "default", "-evalsha")

        yield start
        for node in refusing:
            node.client.execute_command("ACL", "SETUSER", "default", "+evalsha")

    def test_leases_elsewhere_are_renewed(self, cluster, refuse, caplog):
        there, elsewhere, _ = one_per_primary(cluster)
        with lock(there, ttl=4, on_lost="log") as lost, lock(elsewhere, ttl=4, on_lost="log") as kept:
            refuse(node_of(cluster, there))
            eventually(lambda: lost.state is State.LOST)
            assert kept.state is State.HELD
            assert "Some leases are not renewed now" in caplog.text
            assert "widen its ACL rule" in caplog.text

    def test_nothing_is_learned_of_leases_there(self, cluster, refuse, calls):
        there, elsewhere, _ = one_per_primary(cluster)
        held = [lock_request(there), lock_request(elsewhere)]
        for one in held:
            locks["default"].acquire(one, queue=False)
        refuse(node_of(cluster, there))
        backend = calls(locks["default"])
        assert backend.renew([(one, 20.0) for one in held]) == [None, True]
        with pytest.raises(LockBackendError, match="widen its ACL rule"):
            backend.renew([(held[0], 20.0)])


class TestNobodyServes:
    def test_a_cluster_that_stops_as_a_whole(self, cluster, settings):
        """With cluster-require-full-coverage yes, which is the default of servers."""
        entry = {
            "BACKEND": REDIS_CLUSTER,
            "LOCATION": cluster.urls,
            "OPTIONS": {"socket_timeout": 0.4, "failover_timeout": 0.4},
        }
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
        there, elsewhere, *_ = one_per_primary(cluster)
        primary = node_of(cluster, there)
        for node in cluster.nodes:
            node.client.config_set("cluster-require-full-coverage", "yes")
        try:
            cluster.replica_of(primary).stop()
            primary.stop()
            eventually(lambda: "the Cluster is down" in failing_to_lock(elsewhere))
        finally:
            cluster.heal()
            for node in cluster.nodes:
                node.client.config_set("cluster-require-full-coverage", "no")
        with lock(elsewhere):
            pass

    def test_who_waits_for_a_slot_without_an_owner_asks_for_it_in_turn(self, tmp_path, settings):
        node = Node(tmp_path, binary())
        try:
            entry = {"BACKEND": REDIS_CLUSTER, "OPTIONS": {"socket_timeout": 0.5}}
            settings.DISTRIBUTED_LOCKS = {"default": {**entry, "LOCATION": node.url}}
            node.cluster("ADDSLOTSRANGE", 0, 8191)
            eventually(lambda: "cluster_state:ok" in node.cluster("INFO"))
            lacking = [name for name in map(str, range(99)) if slot_of(locks["default"].keys.lease(name)) >= 8192]

            async def tasks():
                outcomes = await asyncio.gather(
                    *(lock(name, wait=1).aacquire() for name in lacking[10:20]), return_exceptions=True
                )
                assert {type(outcome) for outcome in outcomes} == {LockBackendError}

            threads = [threading.Thread(target=failing_to_lock, args=(name, 1)) for name in lacking[:10]]
            for thread in threads:
                thread.start()
            asyncio.run(tasks())
            for thread in threads:
                thread.join(PATIENCE)
            # Once when each begins; then every 0.2 seconds, one for all.
            assert node.client.info("commandstats")["cmdstat_cluster|slots"]["calls"] < 20 + 15
        finally:
            locks.close()
            node.end()

    def test_slots_without_an_owner(self, tmp_path, settings, calls):
        entry = {"BACKEND": REDIS_CLUSTER, "OPTIONS": {"socket_timeout": 0.2, "failover_timeout": 0.2}}
        node = Node(tmp_path, binary())
        try:
            settings.DISTRIBUTED_LOCKS = {"default": {**entry, "LOCATION": node.url}}
            backend = calls(locks["default"])
            with pytest.raises(LockBackendError, match="is a member of no Cluster"):
                backend.acquire(lock_request(), queue=False)
            node.cluster("ADDSLOTSRANGE", 0, 8191)
            eventually(lambda: "cluster_state:ok" in node.cluster("INFO"))
            served, lacking = [
                next(
                    name for name in map(str, range(99)) if (slot_of(locks["default"].keys.lease(name)) < 8192) is there
                )
                for there in (True, False)
            ]
            assert isinstance(backend.acquire(lock_request(served), queue=False), Grant)
            with pytest.raises(LockBackendError, match="the Cluster is down for these locks"):
                backend.acquire(lock_request(lacking), queue=False)
            with pytest.raises(LockBackendError, match="of the slots that locks use have no primary"):
                backend.slots()
            assert any(finding.is_error for finding in backend.check())
        finally:
            locks.close()
            node.end()


def failing_to_lock(name, wait=0):
    try:
        with lock(name, wait=wait):
            return ""
    except LockError as error:
        return str(error)


def contents(reply):
    return reply.values, reply.sent_at, reply.in_doubt, reply.is_by_next_owner


class TestRoutedRequest:
    """What a lock must know of its command: whether it may have been executed more than once."""

    A, B = Address("a", 1), Address("b", 2)
    COMMAND = Command(pack("GET", "x"), key="x")

    def drive(self, outcomes, *, has_map=True, began=0.0):
        """Answer the batches of one command one after another; return where they went and what came out."""
        slots = SlotMap([slot_of("x")], [self.A, self.B], Timing())
        if has_map:
            slots.moved(slot_of("x"), self.A)
        attempts = Attempts(Timing(), 1.0, 1.0, inf, began or policy.clock())
        steps, went, outcomes = RoutedRequest([self.COMMAND], slots, attempts).steps(), [], iter(outcomes)
        try:
            step = next(steps)
            while True:
                if step.method == "pause":
                    step = steps.send(None)
                    continue
                [[batch]] = step.arguments
                went.append((batch.node, [command.packed for command in batch.commands]))
                step = steps.send([next(outcomes)])
        except StopIteration as end:
            return went, end.value
        except (InDoubt, redis.RedisError) as error:
            return went, error

    def answered(self, *values, in_doubt=False):
        reply = Reply(list(values), 7.0)
        reply.in_doubt = in_doubt
        return reply

    def slots(self, owner):
        return self.answered([[0, 16383, [owner.host.encode(), owner.port, b"id"]]])

    def test_a_redirected_command_was_not_executed(self):
        moved = redis.exceptions.MovedError(f"{slot_of('x')} b:2")
        went, answer = self.drive([self.answered(moved), self.answered(b"yes")])
        assert [to for to, _ in went] == [self.A, self.B]
        assert contents(answer) == (
            [b"yes"],
            7.0,
            False,
            False,
        )

    def test_who_knows_no_node_asks_for_them_though_the_time_is_over(self):
        late = policy.clock() - 60.0
        went, answer = self.drive([self.slots(self.A), self.answered(b"yes")], has_map=False, began=late)
        assert (went[-1][0], answer.values) == (self.A, [b"yes"])
        refused = redis.ConnectionError("refused")
        went, error = self.drive([refused, refused], has_map=False, began=late)
        assert {to for to, _ in went} == {self.A, self.B}
        assert "refused" in str(error)
        none_owns_it = self.answered([[0, 0, [b"a", 1, b"id"]]])
        _, answer = self.drive([none_owns_it], has_map=False, began=late)
        assert "no primary serves slot" in str(answer.values[0])

    def test_a_slot_in_between_is_asked_for_at_its_next_owner(self):
        ask = redis.exceptions.AskError(f"{slot_of('x')} b:2")
        again = redis.exceptions.TryAgainError("not yet")
        went, answer = self.drive(
            [self.answered(ask), self.answered(b"OK", again), self.answered(ask), self.answered(b"OK", b"yes")]
        )
        assert [to for to, _ in went] == [self.A, self.B, self.A, self.B]
        assert went[1][1] == [ASKING.packed, self.COMMAND.packed]
        assert contents(answer) == ([b"yes"], 7.0, False, True)

    def test_a_slot_that_has_arrived_is_asked_for_as_ever(self):
        ask = redis.exceptions.AskError(f"{slot_of('x')} b:2")
        moved = redis.exceptions.MovedError(f"{slot_of('x')} b:2")
        _, answer = self.drive([self.answered(ask), self.answered(b"OK", moved), self.answered(b"yes")])
        assert contents(answer) == (
            [b"yes"],
            7.0,
            False,
            False,
        )

    def test_one_that_went_unanswered_may_have_been(self):
        lost = InDoubt.because_of(redis.TimeoutError("no answer"))
        went, answer = self.drive([lost, self.slots(self.B), self.answered(b"yes")])
        assert [to for to, _ in went] == [self.A, self.B, self.B]
        assert contents(answer) == ([b"yes"], 7.0, True, False)

    def test_one_that_was_never_sent_was_not(self):
        refused = redis.ConnectionError("refused")
        _, answer = self.drive([refused, self.slots(self.B), self.answered(b"yes")])
        assert not answer.in_doubt

    def test_the_end_of_all_attempts_tells_whether_one_was_sent(self, quick_clock):
        lost, refused = InDoubt.because_of(redis.TimeoutError("no answer")), redis.ConnectionError("refused")
        _, error = self.drive(chain([lost], repeat(refused)))
        assert isinstance(error, InDoubt)
        _, error = self.drive(repeat(refused))
        assert isinstance(error, redis.ConnectionError)
        assert "a:1" in str(error)

    def test_nobody_who_tells_of_the_slots_is_waited_for(self, quick_clock):
        refused = redis.ConnectionError("refused")
        _, answer = self.drive([*[refused] * 4, self.slots(self.B), self.answered(b"yes")])
        assert contents(answer) == (
            [b"yes"],
            7.0,
            False,
            False,
        )

    def test_one_that_found_no_free_connection_waits_for_one(self):
        busy = redis.exceptions.MaxConnectionsError("all are busy")
        went, answer = self.drive([busy, busy, self.answered(b"yes")])
        assert [to for to, _ in went] == [self.A, self.A, self.A]
        assert contents(answer) == (
            [b"yes"],
            7.0,
            False,
            False,
        )

    @pytest.fixture
    def quick_clock(self, monkeypatch):
        moments = iter(range(10**6))
        for module in (routing, policy):
            monkeypatch.setattr(module, "clock", lambda: next(moments) / 20)

    def test_no_free_connection_in_all_the_time_is_told_as_such(self, quick_clock):
        went, error = self.drive(repeat(redis.exceptions.MaxConnectionsError("all are busy")))
        assert isinstance(error, redis.exceptions.MaxConnectionsError)
        assert len(went) > 1

    @pytest.mark.parametrize(("queued_for", "lasts"), [(0.0, 1.0), (3.0, 2.0)], ids=["for_the_node", "in_the_queue"])
    def test_time_that_a_node_was_waited_for_is_the_calls_own(self, quick_clock, queued_for, lasts):
        """The wait for a free connection is not, and adds up to a whole call to its time."""
        down = Reply([redis.exceptions.ClusterDownError("down")], 1.0)
        down.queued_for = queued_for
        _, answer = self.drive(chain([redis.ConnectionError("refused")], cycle([self.slots(self.A), down])))
        assert answer.values == down.values
        assert lasts <= policy.clock() < lasts + 0.7

    def test_a_host_that_is_not_told_is_the_one_that_was_asked(self):
        moved = redis.exceptions.MovedError(f"{slot_of('x')} :9")
        went, _ = self.drive([self.answered(moved), self.answered(b"yes")])
        assert went[1][0] == Address("a", 9)
        slots = SlotMap([1, 5], [self.A], Timing())
        assert slots.update([[0, 3, [None, 7, b"id"]], [4, 9, [b"?", 8, b"id"], [b"r", 9, b"id"]]], self.A)
        assert dict(slots.owners) == {1: Address("a", 7), 5: Address("a", 8)}
        slots.update([[0, 9, [b"?", 8, b"id", [b"ip", b"10.0.0.8"]]]], self.A)
        assert dict(slots.owners) == {1: Address("10.0.0.8", 8), 5: Address("10.0.0.8", 8)}
        assert not slots.update([], self.A)

    def test_one_that_redirects_without_a_name_is_no_guide(self):
        """Where hostnames are preferred and that of the owner is not known yet."""
        moved = redis.exceptions.MovedError(f"{slot_of('x')} ?:2")
        went, answer = self.drive([self.answered(moved), self.slots(self.B), self.answered(b"yes")])
        assert [to for to, _ in went] == [self.A, went[1][0], self.B]
        assert went[1][1] == [routing.CLUSTER_SLOTS.packed]
        assert contents(answer) == (
            [b"yes"],
            7.0,
            False,
            False,
        )

    def test_addresses_are_those_that_are_reached_from_here(self):
        slots = SlotMap([1], [self.A], Timing(), lambda address: (f"out.{address[0]}", address[1] + 1000))
        slots.update([[0, 16383, [b"in", 1, b"id"]]], self.A)
        assert slots.owners[1] == Address("out.in", 1001)
        moved = redis.exceptions.MovedError("1 in:2")
        assert slots.follow(moved, self.A) == Address("out.in", 1002)

    @pytest.mark.parametrize("error", [redis.exceptions.MovedError, redis.exceptions.AskError])
    def test_a_node_that_a_redirection_names_has_not_left(self, error):
        """CLUSTER SLOTS does not name one that is only given its first slot."""
        slots = SlotMap([1], [self.A], Timing())
        slots.update([[0, 16383, [b"a", 1, b"id"]]], self.A)
        assert not slots.knows(Address("new", 2))
        assert slots.follow(error("1 new:2"), self.A) == Address("new", 2)
        slots.update([[0, 16383, [b"a", 1, b"id"]]], self.A)
        assert slots.knows(Address("new", 2))
        slots.timing.idle_kept = 0.0  # nothing names it any more
        assert not slots.knows(Address("new", 2))

    def test_nodes_that_left_are_forgotten(self):
        gone, seed = Address("gone", 1), self.B
        slots = SlotMap([1], [seed], Timing())
        slots.unresponsive |= {gone, seed, self.A}
        slots.update([[0, 16383, [b"a", 1, b"id"]]], self.A)
        assert slots.unresponsive == {seed, self.A}
