"""Locks on a Cluster: slots, hand-offs over sharded pub/sub, listing, settings, operation."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from redis.crc import key_slot

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import keys
from django_distlock.backends.redis.cluster import pubsub as listening
from django_distlock.backends.redis.cluster.routing import Address
from django_distlock.backends.redis.keys import ClusterKeys, slot_of
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.types import Grant, Level
from tests.support import servers
from tests.support.admin_pages import LIST, hold
from tests.support.cluster import Cluster, names_on, subscribed
from tests.support.commands import said
from tests.support.inside import clients_of_loops, listener_of, nodes_of
from tests.support.leases import wait_for_renewal
from tests.support.ports import free_port
from tests.support.programs import ROOT, in_a_fork
from tests.support.servers import program_of
from tests.support.stores import REDIS, REDIS_CLUSTER
from tests.support.tools import PATIENCE, eventually, inbox_of_a_waiter, lock_request, locked_names

pytestmark = pytest.mark.seconds(1)

HAND_OFFS = 30


def entry(location, **options):
    return {"BACKEND": REDIS_CLUSTER, "LOCATION": location, "OPTIONS": options}


@pytest.fixture
def two(cluster_locks, valkey_cluster, settings):
    """Two aliases wait for the same locks as two processes do."""
    settings.DISTRIBUTED_LOCKS = {alias: entry(valkey_cluster.urls[0]) for alias in ("default", "other")}
    yield locks
    locks.close()


class TestSlots:
    @pytest.mark.parametrize("name", ["order:1", "", "{curly}", "a}b{c", "ä/ß", "x" * 300])
    @pytest.mark.parametrize("shards", [1, 64, 16384])
    def test_all_keys_of_a_name_are_in_the_slot_of_its_shard(self, name, shards):
        keys = ClusterKeys("my prefix", shards)
        shard = keys.shard_of(name)
        of_name = [*keys.of_lock(name), keys.lease(name), keys.queue(name), keys.shard_inbox("p", shard)]
        assert {key_slot(key.encode()) for key in of_name} == {slot_of(keys.lease(name))} == {keys.slot_of_shard(shard)}
        assert len({key_slot(key.encode()) for key in (*keys.of_run(name), keys.run(name))}) == 1
        assert keys.locked_by(keys.lease(name)) == ("", name)
        assert keys.slot_of_shard(shard) in keys.slots()

    def test_names_are_shared_out_by_their_checksum(self):
        """The form that every version and every process must use alike."""
        keys = ClusterKeys("lock", 64)
        assert keys.of_lock("order:1") == (
            "lock:{57}:order:1", "lock|q:{57}:order:1", "lock|x:{57}:order:1", "lock|f:{57}", "lock|l:{57}:order:1",
        )  # fmt: skip
        assert len({keys.shard_of(f"order:{number}") for number in range(1000)}) == 64

    def test_all_primaries_get_their_share(self, cluster_locks, valkey_cluster):
        for number in range(100):
            assert isinstance(cluster_locks.acquire(lock_request(f"order:{number}"), queue=False), Grant)
        shares = [len(node.client.keys("lock:*")) for node in valkey_cluster.primaries]
        assert sum(shares) == 100
        assert min(shares) > 10

    def test_what_is_left_is_one_number_per_shard(self, two, valkey_cluster):
        with lock("name"):
            assert not lock("name", using="other").acquire(timeout=0.1)
        eventually(lambda: valkey_cluster.all_keys() == [])


class TestHandOff:
    def test_a_message_alone_is_not_enough(self, cluster_locks):
        """It may come from a former primary."""
        assert inbox_of_a_waiter(cluster_locks)[0] in "SP"

    """Nobody looks, so who gets in was told so."""

    @pytest.fixture(autouse=True)
    def no_looks(self, monkeypatch):
        monkeypatch.setattr(Timing, "look_interval", 60.0)

    @pytest.fixture(params=["sharded", "plain"])
    def kind(self, request, monkeypatch):
        """Redis 6.2 has no sharded pub/sub: there a command is unknown."""
        if request.param == "plain":
            monkeypatch.setattr(listening, "KINDS", (("SSUBSCRIBE62", "S"), ("SUBSCRIBE", "P")))
        return request.param

    def test_threads_hand_on_through_the_store(self, kind, two, valkey_cluster):
        began, entered = time.monotonic(), Counter()

        def work(name, using):
            for _ in range(HAND_OFFS // 2):
                with lock(name, using=using, wait=PATIENCE):
                    entered[using] += 1
                    time.sleep(0.001)

        names = [names[0] for names in names_on(valkey_cluster, two["default"]).values()]
        threads = [threading.Thread(target=work, args=(name, using)) for name in names for using in two]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        assert sum(entered.values()) == HAND_OFFS * len(names)
        assert time.monotonic() - began < 2 * PATIENCE
        assert {listener.kind for listener in (listener_of(two[alias]) for alias in two)} == {kind[0].upper()}

    def test_tasks_hand_on_through_the_store(self, two, valkey_cluster):
        names = [names[0] for names in names_on(valkey_cluster, two["default"]).values()]
        entered = []

        async def work(name, using):
            for _ in range(HAND_OFFS // 2):
                async with lock(name, using=using, wait=PATIENCE):
                    entered.append(name)
                    await asyncio.sleep(0.001)

        async def main():
            async with asyncio.TaskGroup() as group:
                for name in names:
                    for using in two:
                        group.create_task(work(name, using))

        asyncio.run(main())
        assert Counter(entered) == dict.fromkeys(names, HAND_OFFS)

    def test_one_connection_per_primary_with_waiters_serves_all_its_shards(self, two, valkey_cluster):
        backend = two["default"]

        def wait_for(name):
            assert isinstance(two["other"].acquire(lock_request(name), queue=False), Grant)
            assert not isinstance(backend.acquire(lock_request(name), queue=True), Grant)

        eventually(lambda: not subscribed(valkey_cluster))  # those of tests before
        [busy, *others] = names_on(valkey_cluster, backend, each=5).items()
        for name in busy[1]:
            wait_for(name)
        assert subscribed(valkey_cluster) == {busy[0]: 1}
        for number, (_, [name, *_]) in enumerate(others, 2):
            wait_for(name)
            assert len(subscribed(valkey_cluster)) == number

    def test_each_look_sends_an_echo_because_a_node_hears_several_inboxes(self, two, valkey_cluster, monkeypatch):
        monkeypatch.setattr(Timing, "echo_interval", 600.0)
        waiter = lock_request()
        assert isinstance(two["other"].acquire(lock_request(), queue=False), Grant)

        def echoes():
            found = [node.client.info("commandstats") for node in valkey_cluster.primaries]
            return sum(calls.get("cmdstat_spublish", {"calls": 0})["calls"] for calls in found)

        def look():
            before = echoes()
            assert not isinstance(two["default"].acquire(waiter, queue=True), Grant)
            return echoes() - before

        look()  # takes the place, when it listens
        assert [look(), look(), look()] == [1, 1, 1]

    def test_a_node_that_left_is_heard_no_more(self, two, valkey_cluster):
        backend, nodes = two["default"], valkey_cluster.primaries
        names = [names[0] for names in names_on(valkey_cluster, backend).values()]
        nowhere = Address("127.0.0.1", 1)
        nodes_of(listener_of(backend))[nowhere] = listening.NodeListener(listener_of(backend), nowhere)
        for name in names:
            assert not backend.is_listening(name)
            backend.acquire(lock_request(name), queue=True)
        assert {address.port for address in nodes_of(listener_of(backend))} == {node.port for node in nodes}

    def test_a_subscription_that_was_cut_is_made_again(self, two, valkey_cluster, monkeypatch):
        monkeypatch.setattr(Timing, "look_interval", 1.0)
        inside = threading.Event()

        def wait():
            with lock("name", using="other", wait=PATIENCE):
                inside.set()

        with lock("name"):
            thread = threading.Thread(target=wait)
            thread.start()
            eventually(lambda: subscribed(valkey_cluster))
            for node in valkey_cluster.primaries:
                for one in node.client.client_list(_type="pubsub"):
                    node.client.client_kill_filter(_id=one["id"])
            eventually(lambda: subscribed(valkey_cluster))
        assert inside.wait(5)
        thread.join(PATIENCE)


class TestManyLocks:
    @pytest.mark.seconds(6)
    def test_all_are_renewed(self, cluster_locks):
        handles = [lock(f"n{number}", ttl=5, on_lost="raise") for number in range(300)]
        for handle in handles:
            assert handle.acquire()
        time.sleep(6)
        held = list(cluster_locks.held())
        assert len(held) == 300
        assert min(info.remaining for info in held) > 0.2
        for handle in handles:
            handle.release()
        assert locked_names(cluster_locks) == []

    def test_all_primaries_are_listed_in_more_than_one_step(self, cluster_locks, calls, monkeypatch):
        monkeypatch.setattr(keys, "SCAN_STEP", 10)
        names = [f"order:{number}" for number in range(200)] + ["other", "order}:{1}:order:1", "{1}:order:"]
        for name in names:
            cluster_locks.acquire(lock_request(name), queue=False)
        assert locked_names(calls(cluster_locks)) == sorted(names)
        assert locked_names(calls(cluster_locks), "order:") == sorted(names[:200])
        assert len(list(calls(cluster_locks).held("order:"))) == 200

    def test_keys_of_another_number_of_shards_are_no_locks(self, cluster_locks, valkey_cluster, settings):
        settings.DISTRIBUTED_LOCKS = {"default": entry(valkey_cluster.urls[0], shards=7)}
        for number in range(20):
            locks["default"].acquire(lock_request(f"n{number}"), queue=False)
        settings.DISTRIBUTED_LOCKS = {"default": entry(valkey_cluster.urls[0])}
        found = locked_names(locks["default"])
        assert len(found) < 20
        assert {lock(name).locked() for name in found} <= {True}


class TestConnections:
    def test_every_loop_has_its_own_and_closes_them(self, cluster_locks):
        async def work():
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(one(f"n{number}"))

        async def one(name):
            async with lock(name):
                await asyncio.sleep(0)

        for _ in range(3):
            asyncio.run(work())
        assert len(clients_of_loops(cluster_locks)) == 0

    def test_a_cancelled_task_leaves_nothing(self, two, valkey_cluster):
        async def work():
            async with lock("name"):
                waiters = [asyncio.create_task(lock("name", using="other", wait=60).aacquire()) for _ in range(5)]
                for delay, waiter in enumerate(waiters):
                    await asyncio.sleep(0.02 * delay)
                    waiter.cancel()
                results = await asyncio.gather(*waiters, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)

        asyncio.run(work())
        eventually(lambda: [key for key in valkey_cluster.all_keys() if not key.startswith("lock|x:")] == [])

    @pytest.mark.seconds(15)
    def test_many_more_tasks_than_connections(self, cluster_locks, valkey_cluster, settings):
        """To each node. Who waits for one, or holds a lock, waits while the nodes answer others."""
        options = {"max_connections": 1, "socket_timeout": 1.0}
        settings.DISTRIBUTED_LOCKS = {"default": entry(valkey_cluster.urls, **options)}

        async def one(number):
            async with lock("name:{}", number, wait=120) as lease:
                if number % 400 == 0:
                    time.sleep(0.5)  # noqa: ASYNC251
                await lease.arenew()

        async def main():
            await asyncio.gather(*(one(number) for number in range(1200)))

        asyncio.run(main())
        assert locked_names(locks["default"]) == []

    def test_a_forked_child_takes_its_own(self, cluster_locks):
        with lock("parents"):
            assert not lock("parents").acquire(blocking=False)

            def in_child():
                with lock("childs"):
                    return lock("parents").acquire(blocking=False), len(list(locks["default"].held()))

            assert in_a_fork(in_child) == "(False, 2)"
            assert lock("parents").locked()
        assert locked_names(cluster_locks) == []

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_both_protocols(self, cluster_locks, valkey_cluster, settings, protocol):
        url = f"{valkey_cluster.urls[0]}?protocol={protocol}"
        settings.DISTRIBUTED_LOCKS = {alias: entry(url) for alias in ("default", "other")}
        with lock("name") as lease:
            assert not lock("name", using="other").acquire(timeout=0.2)
            assert locks["other"].look(["name"])[0][0].fence == lease.fence
        with lock("name", using="other", wait=0.2):
            assert lock("name").locked()

    def test_the_server_of_a_cache_is_a_seed(self, cluster_locks, valkey_cluster, settings):
        settings.CACHES = {"shared": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": valkey_cluster.urls[0]}}
        settings.DISTRIBUTED_LOCKS = {"default": entry("cache:shared")}
        for name in "abc":
            with lock(name):
                assert lock(name).locked()

    def test_a_seed_that_is_down_is_passed_over(self, cluster_locks, valkey_cluster, settings):
        settings.DISTRIBUTED_LOCKS = {"default": entry(["redis://127.0.0.1:1/0", valkey_cluster.urls[-1]])}
        with lock("name"):
            assert lock("name").locked()


class TestAnnouncedAddresses:
    """Nodes tell clients names; among themselves they go on by IP."""

    @pytest.fixture
    def announce(self, valkey_cluster):
        def announce(hostname):
            nodes = [node.client for node in valkey_cluster.nodes]
            for node in nodes:
                node.config_set("cluster-announce-hostname", hostname)
                node.config_set("cluster-preferred-endpoint-type", "hostname")
            for node in nodes:  # they tell each other now and then
                eventually(lambda: {told["hostname"] for told in node.cluster("nodes").values()} == {hostname})  # noqa: B023

        yield announce
        for node in valkey_cluster.nodes:
            node.client.config_set("cluster-preferred-endpoint-type", "ip")
            node.client.config_set("cluster-announce-hostname", "")

    @pytest.mark.seconds(4)
    @pytest.mark.parametrize("hostname", ["inside.invalid", ""])
    def test_that_are_not_reached_from_here(self, cluster_locks, valkey_cluster, settings, calls, announce, hostname):
        """As behind NAT; or where a name is preferred and none is known yet."""
        remap = {"inside.invalid": "127.0.0.1"}
        url, options = valkey_cluster.urls[0], {"socket_timeout": 1.0}
        if hostname:
            options["address_remap"] = lambda address: (remap.get(address[0], address[0]), address[1])
        announce(hostname)
        settings.DISTRIBUTED_LOCKS = {alias: entry(url, **options) for alias in ("default", "other")}
        names = [name for [name] in names_on(valkey_cluster, locks["default"]).values()]
        primary = valkey_cluster.owner(slot_of(locks["default"].keys.lease(names[0])))
        with lock(names[0]), lock(names[1]), lock(names[2]):
            assert locked_names(calls(locks["other"])) == sorted(names)
            for name in names:
                assert not lock(name, using="other").acquire(timeout=0.3)  # a place, and a listener there
        slot = slot_of(locks["default"].keys.lease(names[0]))
        to = next(node for node in valkey_cluster.primaries if node is not primary)
        valkey_cluster.move(slot, to)
        try:
            for using in ("default", "other"):
                handle = lock(names[0], using=using)
                assert calls(handle).acquire()  # redirected
                calls(handle).release()
        finally:
            valkey_cluster.move(slot, primary)

    def test_that_lead_to_another_node(self, cluster_locks, valkey_cluster, settings, calls):
        """As where forwarded ports were mixed up: that node redirects what it does not own, to itself."""
        found = names_on(valkey_cluster, locks["default"])
        wrong, other, *_ = found
        options = {"socket_timeout": 3.0, "address_remap": lambda address: (address[0], wrong)}
        settings.DISTRIBUTED_LOCKS = {"default": entry(valkey_cluster.at(wrong).url, **options)}
        with pytest.raises(LockBackendError, match="nodes redirect these locks to each other.*'address_remap'"):
            calls(lock(found[other][0], wait=2)).acquire()


class TestUser:
    """Who may no more than the page allows."""

    @pytest.fixture
    def user(self, cluster_locks, valkey_cluster, settings):
        page = (ROOT / "docs" / "topologies" / "cluster.md").read_text(encoding="utf-8")
        [rule] = re.findall(r"^user (distlock .*?)^```", page, re.MULTILINE | re.DOTALL)
        for node in valkey_cluster.nodes:
            node.client.execute_command("ACL", "SETUSER", *rule.split())
        url = valkey_cluster.urls[0].replace("//", "//distlock:password@")
        settings.DISTRIBUTED_LOCKS = {alias: entry(url) for alias in ("default", "other")}
        yield
        locks.close()
        for node in valkey_cluster.nodes:
            node.client.execute_command("ACL", "DELUSER", "distlock")

    def test_what_locks_do_is_allowed(self, user, valkey_cluster, calls):
        with lock("name", ttl=4, min_hold=0.1) as lease:
            assert not lock("name", using="other").acquire(timeout=0.2)
            wait_for_renewal(lease)
        name = "name"
        slot = slot_of(locks["default"].keys.lease(name))
        held = lock_request(name)
        assert isinstance(eventually(lambda: granted(calls(locks["default"]), held)), Grant)
        waiter = lock_request(name)
        assert not isinstance(calls(locks["other"]).acquire(waiter, queue=True), Grant)
        assert calls(locks["other"]).count_waiters([name]) == [1]
        source = valkey_cluster.owner(slot)
        to = next(node for node in valkey_cluster.primaries if node is not source)
        to.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", to.id)
        try:
            lease = locks["default"].keys.lease(name)
            source.client.execute_command("MIGRATE", "127.0.0.1", to.port, lease, 0, 5000)
            assert calls(locks["default"]).renew([(held, 30.0)]) == [True]
        finally:
            valkey_cluster.move(slot, to)
        assert locked_names(calls(locks["default"])) == [name]
        assert calls(locks["default"]).release(held)
        eventually(lambda: granted(calls(locks["other"]), waiter))
        assert calls(locks["other"]).release(waiter)
        assert not [finding for finding in calls(locks["default"]).check() if finding.is_error]

    def test_a_wrong_password_is_told_at_once(self, user, valkey_cluster, settings, calls):
        url = valkey_cluster.urls[0].replace("//", "//distlock:wrong@")
        settings.DISTRIBUTED_LOCKS = {"default": entry(url)}
        with pytest.raises(LockBackendError, match="the server refused the user or password"):
            calls(locks["default"]).acquire(lock_request(), queue=False)
        assert "wrong" not in repr(locks["default"])


def granted(backend, wanted):
    answer = backend.acquire(wanted, queue=False)
    return answer if isinstance(answer, Grant) else None


class TestSettings:
    @pytest.mark.parametrize(
        ("location", "options", "message"),
        [
            ("redis://h/1", {}, "names database 1. A Cluster has database 0 alone"),
            ("unix:///s", {}, "is a unix socket. The nodes of a Cluster"),
            ([], {}, "is empty. It is the URL of a node"),
            (["redis://a", "redis://:secret@b"], {}, "differ in more than host and port"),
            (["redis://a", "rediss://b"], {}, "differ in more than host and port"),
            ("redis://a", {"shards": 0}, "['shards'] is 0; it is a whole number from 1 to 16384"),
            ("redis://a", {"shards": 16385}, "['shards'] is 16385; it is a whole number"),
            ("redis://a", {"shards": True}, "['shards'] is True; it is a whole number"),
            ("redis://a", {"cluster": True}, "unknown option 'cluster'. This backend is always for a Cluster"),
            ("redis://a", {"sentinels": [("s", 1)]}, "unknown option 'sentinels'. A Cluster has no sentinels"),
            ("redis://a", {"address_remap": {"a": "b"}}, "['address_remap'] is {'a': 'b'}; it is a function that"),
        ],
    )
    def test_say_what_to_change(self, settings, location, options, message):
        settings.DISTRIBUTED_LOCKS = {"default": entry(location, **options)}
        with pytest.raises(InvalidLockBackend) as caught:
            locks["default"]
        assert message in str(caught.value)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("option", ["cluster", "shards", "address_remap"])
    def test_the_backend_of_one_server_names_the_one_of_a_cluster(self, settings, option):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "OPTIONS": {option: True}}}
        with pytest.raises(InvalidLockBackend, match=f"unknown option '{option}'.*'{REDIS_CLUSTER}'"):
            locks["default"]

    def test_aliases_of_one_cluster_keep_the_same_locks(self, settings):
        urls = ["redis://a:7001/0", "redis://b:7002"]
        settings.DISTRIBUTED_LOCKS = {"a": entry(urls), "b": entry(urls[::-1]), "c": entry(urls, shards=8)}
        assert locks["a"].keyspace == locks["b"].keyspace != locks["c"].keyspace
        locks.close()

    def test_a_cluster_met_by_the_backend_of_one_server(self, valkey_cluster, settings, calls):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": valkey_cluster.urls[0]}}
        with pytest.raises(
            LockBackendError, match=rf"name '{REDIS_CLUSTER}' in DISTRIBUTED_LOCKS\['default'\]\['BACKEND'\]"
        ):
            calls(locks["default"]).acquire(lock_request(), queue=False)
        found = {finding.about: finding for finding in calls(locks["default"]).check()}
        assert found["cluster"].level is Level.ERROR
        locks.close()

    def test_one_server_met_by_the_backend_of_a_cluster(self, own_valkey, settings, calls):
        port = free_port()
        own_valkey("--port", str(port), "--bind", "127.0.0.1")
        settings.DISTRIBUTED_LOCKS = {"default": entry(f"redis://127.0.0.1:{port}")}
        with pytest.raises(LockBackendError, match=rf"this server is no Cluster; name '{REDIS}' in"):
            calls(locks["default"]).acquire(lock_request(), queue=False)
        locks.close()

    def test_no_node_answers(self, settings, calls):
        nodes = ["redis://127.0.0.1:1", "redis://127.0.0.1:2"]
        settings.DISTRIBUTED_LOCKS = {"default": entry(nodes, failover_timeout=0.5, socket_timeout=0.5)}
        for wait in (0, None):
            with pytest.raises(LockBackendError, match="does not answer; check that it runs"):
                calls(lock("name", wait=wait)).acquire()
        locks.close()


class TestOperation:
    def test_a_check_of_all_primaries(self, cluster_locks, calls):
        found = {finding.about: finding for finding in calls(cluster_locks).check()}
        assert not any(finding.is_error for finding in found.values())
        assert found["version"].message.startswith("All 3 primaries: Valkey")
        assert found["replicas"].message.startswith("All 3 primaries: 1.")
        assert found["shards"].level is Level.OK

    def test_another_number_of_shards_is_found(self, cluster_locks, valkey_cluster, settings, calls):
        calls(cluster_locks).check()
        settings.DISTRIBUTED_LOCKS = {"default": entry(valkey_cluster.urls[0], shards=32)}
        [found] = [finding for finding in calls(locks["default"]).check() if finding.about == "shards"]
        assert found.level is Level.ERROR
        assert "['shards'] is 32 here, and was 64" in found.message
        assert "lock|s:{shards}" in found.hint

    @pytest.mark.parametrize(
        ("refuse", "mend", "told", "hint"),
        [
            (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "maxmemory", "takes new keys"),
            (("ACL", "SETUSER", "default", "-set"), ("ACL", "SETUSER", "default", "+set"), "'set'", "Allow the user"),
        ],
        ids=["memory", "ACL"],
    )
    def test_a_number_of_shards_that_cannot_be_kept(
        self, cluster_locks, valkey_cluster, calls, refuse, mend, told, hint
    ):
        nodes = valkey_cluster.primaries
        try:
            for node in nodes:
                node.client.execute_command(*refuse)
            [found] = [finding for finding in calls(cluster_locks).check() if finding.about == "shards"]
        finally:
            for node in nodes:
                node.client.execute_command(*mend)
        assert found.level is Level.WARNING
        assert "cannot be compared" in found.message
        assert told in found.message
        assert hint in found.hint

    def test_commands(self, cluster_locks):
        for number in range(5):
            hold(cluster_locks, f"order:{number}")

        assert {row["name"] for row in json.loads(said("list", "--json"))} == {f"order:{n}" for n in range(5)}
        assert "order:3" in said("show", "order:3")
        assert "freed  order:3" in said("release", "order:3", "--no-input")
        assert not lock("order:3").locked()
        assert "shards" in said("check")
        with pytest.raises(CommandError) as caught:
            call_command("runlocked", "order:2", "--", "true", stderr=StringIO())
        assert caught.value.returncode == 75
        call_command("runlocked", "order:3", "--", "true")

    @pytest.mark.django_db
    def test_the_admin_lists_and_counts(self, cluster_locks, operator):
        for number in range(30):
            hold(cluster_locks, f"order:{number}")
        page = operator.get(LIST, {"q": "order:1"}).content.decode()
        assert page.count("order:1") >= 11
        assert "order:25" not in page


@pytest.mark.parametrize("kind", servers.KINDS)
def test_other_servers(settings, kind):
    """Redis 6.2 has no sharded pub/sub: there the primary of the slot counts those who hear a plain message."""
    with Cluster(program_of(kind), replicas=0) as cluster:
        settings.DISTRIBUTED_LOCKS = {alias: entry(cluster.urls[0]) for alias in ("default", "other")}
        entered, began = Counter(), time.monotonic()

        def work(using):
            for number in range(10):
                with lock(f"n{number % 3}", using=using, wait=PATIENCE):
                    entered[using] += 1
                    time.sleep(0.001)

        threads = [threading.Thread(target=work, args=(using,)) for using in locks for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        assert sum(entered.values()) == 40
        assert time.monotonic() - began < PATIENCE
        assert listener_of(locks["default"]).kind == ("P" if kind == "redis-6.2" else "S")
        found = {finding.about: finding for finding in locks["default"].check()}
        assert not any(finding.is_error for finding in found.values())
        assert found["replicas"].level is Level.WARNING
        assert found["version"].message.startswith("All 3 primaries: Redis ")
        locks.close()
