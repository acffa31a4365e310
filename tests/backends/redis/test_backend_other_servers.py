"""The Redis backend on other servers than Valkey: Redis 6.2, that of the operating system, Redis 8; RESP2 and RESP3."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import redis

from django_distlock import LockBackendError, LockLost, State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.operations import POLLS
from django_distlock.testing.contract import LockBackendContract
from django_distlock.testing.runs_contract import RunsContract
from django_distlock.testing.tools import calling
from django_distlock.types import Grant, Level, LockInfo
from example_project.valkey import Valkey
from tests.support import servers
from tests.support.servers import program_of
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, eventually, insist, lock_request, queue_of

pytestmark = [pytest.mark.slow, pytest.mark.once]

# The way is that of the contract, which runs both ways on Valkey: each protocol and each kind of server meets one.
ON = [
    ("redis-server", 2, "sync"),
    ("redis-server", 3, "async"),
    ("redis-6.2", 2, "async"),
    ("redis-8", 3, "sync"),
    ("valkey", 3, "async"),
]


@pytest.fixture(scope="module", params=ON, ids=lambda on: f"{on[0]}-resp{on[1]}")
def server(request):
    """A server and the version of the protocol in which to talk to it."""
    kind, protocol, _ = request.param
    if kind == "valkey":
        yield request.getfixturevalue("valkey"), protocol
        return
    with Valkey(program=program_of(kind)) as other:
        yield other, protocol


@pytest.fixture
def client(server):
    with redis.Redis.from_url(server[0].url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def on_server(server, client, settings):
    """``locks["default"]`` is that server, emptied."""
    location = f"{server[0].url}&protocol={server[1]}"
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": location}}
    yield locks["default"]
    locks.close()


class TestContract(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, on_server):
        return on_server

    @pytest.fixture
    def locks(self, request, backend):
        """In one way, which the server has."""
        _, _, way = request.node.callspec.params["server"]
        with calling(way) as wrap:
            yield wrap(backend)


class TestQueue:
    def test_waiters_are_woken_in_their_order(self, on_server, monkeypatch):
        """Threads and tasks; told by a message: none of them looks before its wait is over."""
        monkeypatch.setattr(Timing, "look_interval", 4 * PATIENCE)
        holder, order = lock("name", ttl=4 * PATIENCE), []
        holder.acquire()

        def wait(number):
            with lock("name", wait=PATIENCE):
                order.append(number)

        async def await_for_turn(number):
            async with lock("name", wait=PATIENCE):
                order.append(number)

        threads = []
        for number, target in enumerate((wait, lambda number: asyncio.run(await_for_turn(number))) * 2):
            threads.append(threading.Thread(target=target, args=(number,)))
            threads[-1].start()
            eventually(lambda: queue_of(on_server).length("name") == len(threads))
        time.sleep(0.1)
        holder.release()
        for thread in threads:
            thread.join()
        assert order == [0, 1, 2, 3]

    def test_waiters_that_poll_go_first_and_leave_nothing(self, on_server, client, calls):
        wrapped = calls(on_server)
        first, second, newcomer = (lock_request("name") for _ in range(3))
        first.inbox = second.inbox = POLLS
        with lock("name"):
            for waiter in (first, second):
                assert isinstance(wrapped.acquire(waiter, queue=True), LockInfo)
        assert client.get("lock:name") is None
        for waiter, queue in ((newcomer, False), (second, True)):
            assert isinstance(wrapped.acquire(waiter, queue=queue), LockInfo)
        for waiter in (first, second):
            assert isinstance(wrapped.acquire(waiter, queue=True), Grant)
            assert wrapped.release(waiter)
        assert client.keys() == ["lock|f"]

    def test_scripts_that_the_server_forgot_are_loaded_again(self, on_server, client, calls):
        for _ in range(2):
            client.script_flush()
            handle = lock("name")
            assert calls(handle).acquire()
            client.script_flush()
            calls(handle).release()
        assert client.keys() == ["lock|f"]

    def test_locks_check_finds_nothing_wrong_with_it(self, on_server, calls):
        found = {finding.about: finding for finding in calls(on_server).check()}
        assert not [finding for finding in found.values() if finding.is_error]
        assert found["version"].level is Level.OK


@pytest.fixture
def own(settings):
    """Starts one of the system's Redis for a test that spoils it; ``locks["default"]`` is there."""
    started = []

    def start(kind, *arguments, **options):
        server = Valkey(*arguments, program=program_of(kind)).start()
        started.append(server)
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": options}}
        return server

    yield start
    locks.close()
    for server in started:
        server.stop()


@pytest.mark.parametrize("kind", servers.KINDS)
class TestFaults:
    def test_a_restart_without_data_is_told_as_loss(self, own, kind):
        server = own(kind)
        with pytest.raises(LockLost), lock("name", ttl=1) as lease:
            server.process.kill()
            server.process.wait()
            server.start()
            eventually(lambda: lease.state is State.LOST)
        handle = lock("name", wait=1)
        assert insist(handle.acquire)
        handle.release()

    def test_a_replica_is_named_as_what_it_is(self, own, kind, calls):
        own(kind, "--replicaof", "127.0.0.1", "1")
        with pytest.raises(LockBackendError, match="this server is a read-only replica; point .*LOCATION"):
            calls(lock("name", wait=0)).acquire()

    def test_too_few_replicas_are_named(self, own, kind, calls):
        own(kind, "--min-replicas-to-write", "1")
        with pytest.raises(LockBackendError, match="too few replicas follow this server.*min-replicas-to-write"):
            calls(lock("name", wait=0)).acquire()

    def test_without_memory_held_locks_are_kept_and_released(self, own, kind, calls):
        server = own(kind)
        with redis.Redis.from_url(server.url) as client, lock("held", ttl=3) as lease:
            client.config_set("maxmemory", 1)
            with pytest.raises(LockBackendError, match="the server is out of memory.*raise its maxmemory"):
                calls(lock("name")).acquire()
            lease.renew(60)
        assert list(locks["default"].held()) == []
