"""A server that is slow, full, paused or starting: the right error, and nothing thought held that is not."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress

import pytest
import redis
from django.core.cache import caches
from django_redis.pool import ConnectionFactory

from django_distlock import LockBackendError, LockLost, State, lock, locks
from django_distlock.types import Grant
from example_project.valkey import Valkey, binary
from tests.support.proxy import Proxy
from tests.support.servers import program_of
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, ending_within, eventually, lock_request, renewer_of

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(1)]

PAUSE = 2500  # ms


@pytest.fixture
def start(request, settings):
    """Starts a server of its own, with ``locks["default"]`` on it and short timeouts."""
    kind = getattr(request, "param", "valkey")
    program = binary() if kind == "valkey" else program_of(kind)
    started = []

    def start(*arguments, **options):
        server = Valkey(*arguments, program=program).start()
        started.append(server)
        options = {"socket_timeout": 0.5, **options}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": options}}
        return server

    yield start
    for server in started:
        with redis.Redis.from_url(server.url) as client:
            client.ping()  # paused no more
    with suppress(LockBackendError):
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    locks.close()
    for server in started:
        server.stop()


@pytest.fixture
def client():
    clients = []

    def client(server):
        clients.append(redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=10))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


def expect_no_answer(handle):
    with ending_within(4), pytest.raises(LockBackendError, match="the server does not answer"):
        handle.acquire()


class TestPaused:
    @pytest.mark.parametrize("mode", ["WRITE", "ALL"])
    def test_nobody_is_granted_anything_and_leases_outlive_it(self, start, client, mode):
        server = start()
        admin = client(server)
        with lock("held", ttl=9) as lease:
            admin.execute_command("CLIENT", "PAUSE", PAUSE, mode)
            expect_no_answer(lock("name", wait=None, ttl=5))
            with pytest.raises(LockBackendError):
                lease.renew()
            lease.ensure_held()
            admin.set("is", "over")
            lease.renew()
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
        assert admin.keys("lock:*") == []  # what was executed late is no ghost

    def test_longer_than_the_lease_it_is_a_loss(self, start, client):
        server = start()
        with pytest.raises(LockLost), lock("name", ttl=1) as lease:
            client(server).execute_command("CLIENT", "PAUSE", PAUSE, "WRITE")
            eventually(lambda: lease.state is State.LOST, 3)


on_both = pytest.mark.parametrize("start", ["valkey", "redis-server"], indirect=True)


@on_both
class TestBlocked:
    @contextmanager
    def busy(self, server, *command):
        sent = threading.Event()

        def block():
            with redis.Redis.from_url(server.url, socket_timeout=None) as client:
                connection = client.connection_pool.get_connection()
                connection.send_command(*command)
                sent.set()
                with suppress(redis.ResponseError):
                    connection.read_response()

        thread = threading.Thread(target=block)
        thread.start()
        assert sent.wait(PATIENCE)
        try:
            yield
        finally:
            thread.join()

    def test_for_a_moment_it_is_waited_for(self, start, calls):
        server = start("--enable-debug-command", "yes", socket_timeout=3)
        with lock("held"), self.busy(server, "DEBUG", "SLEEP", "0.5"):
            handle = lock("name")
            assert calls(handle).acquire()
            calls(handle).release()

    def test_by_a_script_it_says_so(self, start, client, calls):
        """After a while in which it does not answer at all."""
        server = start("--busy-reply-threshold", "50", socket_timeout=3)
        with lock("held", ttl=9) as lease:
            with self.busy(server, "EVAL", "while true do end", 0):
                try:
                    match = "a script keeps the server busy; end it with SCRIPT KILL"
                    with pytest.raises(LockBackendError, match=match):
                        calls(lock("name", wait=0.5)).acquire()
                finally:
                    client(server).script_kill()
            lease.renew()


@on_both
class TestMemory:
    def test_a_full_server_grants_nothing_and_takes_nothing_away(self, start, client, calls):
        server = start()
        held, resting = lock("held", ttl=9), lock("resting", min_hold=5)
        held.acquire()
        resting.acquire()
        client(server).config_set("maxmemory", 1)
        for busy_or_free in ("name", "held"):
            with pytest.raises(LockBackendError, match="the server is out of memory.*raise its maxmemory"):
                calls(lock(busy_or_free, wait=5)).acquire()
        with pytest.raises(LockBackendError, match="the server is out of memory"):
            resting.release()  # for its cooldown the server would have to write
        client(server).config_set("maxmemory", 0)
        eventually(lambda: locks["default"].look(["resting"])[0][0].resting)
        assert calls(lock("held", wait=0)).acquire() is False
        held.release()
        assert calls(lock("held")).locked() is False

    def test_an_evicted_lock_is_told_as_lost(self, start, client):
        """Which is why ``locks check`` calls such a policy an error."""
        server = start("--maxmemory-policy", "allkeys-random")
        with pytest.raises(LockLost), lock("name", ttl=1) as lease:
            client(server).config_set("maxmemory", 1)
            with suppress(redis.ResponseError):
                client(server).set("another", "key")  # makes room for itself
            eventually(lambda: lease.state is State.LOST, 3)
        client(server).config_set("maxmemory", 0)


class TestStarting:
    def test_while_it_reads_its_data_it_is_waited_for(self, start, client, calls):
        server = start(socket_timeout=8)
        admin = client(server)
        held = lock("name", ttl=30)
        calls(held).acquire()
        with admin.pipeline(transaction=False) as pipeline:
            for number in range(4000):
                pipeline.set(f"filler:{number}", "x")
            pipeline.execute()
        admin.save()
        server.process.kill()
        server.process.wait()
        server._arguments += ("--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024")
        server.start()
        with pytest.raises(redis.BusyLoadingError):
            client(server).get("filler")
        calls(held).release()  # the lease was kept
        assert not lock("name").locked()


class TestDemoted:
    """The address leads to another server now, as after the failover of a managed Redis; connections still stand."""

    @pytest.fixture
    def demote(self, own_valkey, settings, tmp_path_factory):
        before, after = own_valkey(), own_valkey()
        with Proxy(before.socket, tmp_path_factory.mktemp("p")) as proxy:
            settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": proxy.url}}

            def demote():
                with redis.Redis.from_url(before.url) as client:
                    client.replicaof("127.0.0.1", "1")
                proxy.server = after.socket
                return after

            yield demote
            locks.close()

    def test_the_new_primary_is_found_and_nothing_was_unanswered(self, demote, client, calls):
        for name in ("one", "two"):
            handle = lock(name)
            assert calls(handle).acquire()
            calls(handle).release()
        after = demote()
        mine = lock_request()
        assert isinstance(calls(locks["default"]).acquire(mine, queue=False), Grant)
        assert not mine.in_doubt
        assert client(after).exists("lock:name")
        assert calls(locks["default"]).release(mine) is True
        assert client(after).keys() == ["lock|f"]  # and no token had to be retired

    def test_a_release_that_finds_nothing_there_tells_the_loss(self, demote, calls):
        """It was not executed before, so "not the holder" is no success of an earlier attempt."""
        handle = lock("name", ttl=60)
        calls(handle).acquire()
        demote()
        with pytest.raises(LockLost):
            calls(handle).release()

    def test_a_lease_that_is_not_known_there_is_told_as_lost(self, demote):
        with pytest.raises(LockLost), lock("name", ttl=1.5) as lease:
            demote()
            eventually(lambda: lease.state is State.LOST, 3)


class TestPoolsOfCaches:
    @pytest.mark.parametrize("pool", ["redis.connection.ConnectionPool", "redis.connection.BlockingConnectionPool"])
    def test_an_exhausted_one_delays_no_lock(self, start, settings, calls, monkeypatch, pool):
        monkeypatch.setattr(ConnectionFactory, "_pools", {})  # of the process, by URL
        server = start()
        options = {
            "CONNECTION_POOL_CLASS": pool,
            "CONNECTION_POOL_KWARGS": {"max_connections": 1, **({"timeout": 20} if "Blocking" in pool else {})},
        }
        entry = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url, "OPTIONS": options}
        settings.CACHES = {"default": entry}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "cache:default"}}
        caches["default"].set("key", "value")
        taken = caches["default"].client.get_client(write=True).connection_pool
        connection = taken.get_connection()
        began = time.monotonic()
        held, waiting = lock("name", ttl=30), lock("name", wait=10)
        held.acquire()
        timer = threading.Timer(0.1, held.release)
        timer.start()
        assert calls(waiting).acquire()
        calls(waiting).release()
        timer.join()
        assert time.monotonic() - began < 5
        taken.release(connection)
        assert caches["default"].get("key") == "value"
        caches["default"].close()
        taken.disconnect()
