"""Connections that died unnoticed, names that are not resolved, addresses that swallow packets, and crowds."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import redis

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import connection
from django_distlock.utils.clock import clock
from tests.support import network
from tests.support.interrupts import at_each_point
from tests.support.network import lookups, resolving, swallowing
from tests.support.ports import free_port
from tests.support.scripted import Scripted
from tests.support.stores import REDIS, REDIS_CLUSTER
from tests.support.tools import PATIENCE, ending_within, eventually, renewer_of

pytestmark = pytest.mark.seconds(1)


@pytest.fixture(autouse=True)
def _close():
    yield
    locks.close()


class TestIdle:
    """A load balancer, or a firewall, forgets connections on which nothing was said for long, and tells nobody."""

    @pytest.fixture
    def backend(self, proxy, settings, monkeypatch):
        monkeypatch.setattr(Timing, "idle_trusted", 0.0)
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": proxy.url}}
        yield locks["default"]
        proxy.hang = False
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)

    @pytest.mark.parametrize("wait", [0, 1, 10])
    def test_who_wants_a_lock_gets_it_over_another_connection(self, backend, proxy, calls, wait):
        with lock("warm"):
            pass
        calls(lock("warm")).locked()
        proxy.silence()
        handle = lock("name", wait=wait)
        assert calls(handle).acquire()
        calls(handle).release()

    def test_who_has_one_gives_it_back(self, backend, proxy, calls):
        handle = lock("name", renew=False)
        calls(handle).acquire()
        proxy.silence()
        calls(handle).release()
        assert not lock("name").locked()

    def test_a_server_that_hangs_is_no_such_case(self, backend, proxy, calls):
        calls(lock("warm")).locked()
        proxy.hang = True
        with ending_within(1), pytest.raises(LockBackendError, match="does not answer"):
            calls(lock("name", wait=0)).acquire()

    def test_after_a_minute_they_are_closed(self, backend, store, calls, monkeypatch):
        others = {about["id"] for about in store.client_list()}

        def connected():
            return len({about["id"] for about in store.client_list()} - others)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: lock("name:{}", number).locked(), range(8)))
        many = connected()
        assert many > 1
        monkeypatch.setattr(Timing, "idle_kept", 0.0)
        lock("name").locked()
        lock("name").locked()
        eventually(lambda: connected() <= 2)


@pytest.fixture
def resolver():
    with resolving() as (names, asked):
        yield SimpleNamespace(names=names, asked=asked)
    eventually(lambda: not lookups())


class TestNames:
    @pytest.fixture
    def silent(self, resolver):
        resolver.names["redis.test"] = threading.Event()
        return resolver.names["redis.test"]

    @pytest.mark.parametrize("wait", [0, 1])
    @pytest.mark.parametrize(
        "entry",
        [
            {"LOCATION": "redis://redis.test:6379/0"},
            {"BACKEND": REDIS_CLUSTER, "LOCATION": "redis://redis.test:6379/0"},
            {"OPTIONS": {"sentinels": [("redis.test", 26379)], "service_name": "mymaster"}},
        ],
        ids=["server", "cluster", "master"],
    )
    def test_that_nobody_resolves(self, silent, settings, calls, entry, wait):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, **entry}}
        with ending_within(wait + 1), pytest.raises(LockBackendError, match="The name redis.test was not resolved in"):
            calls(lock("name", wait=wait)).acquire()

    def test_are_asked_for_once_by_all(self, resolver, settings):
        resolver.names["crowd.test"] = threading.Event()  # which no client of another test still asks for
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "redis://crowd.test:6379/0"}}

        def ask(number):
            with pytest.raises(LockBackendError):
                lock("name:{}", number, wait=0).acquire()

        async def ask_all():
            handles = [lock("name:{}", number, wait=0) for number in range(10)]
            return await asyncio.gather(*(handle.aacquire() for handle in handles), return_exceptions=True)

        with ThreadPoolExecutor(10) as threads:
            told = threads.submit(asyncio.run, ask_all())
            list(threads.map(ask, range(10)))
            assert all(isinstance(one, LockBackendError) for one in told.result())
        assert resolver.asked == ["crowd.test"]

    def test_are_asked_for_again_after_an_interrupt(self, resolver):
        """At any point, also where it is unknown whether a thread will ask."""
        resolver.names["redis.test"] = ["127.0.0.1"]
        port = free_port()

        def connect(_):
            opened = connection.TcpConnection(host="redis.test", port=port)
            opened.connect_deadline = clock() + PATIENCE
            with pytest.raises(redis.ConnectionError) as caught:
                opened.connect()
            return str(caught.value)

        files = "backends/redis/connection.py", "utils/shared_answer.py", "utils/threads.py"
        points = [point for _, point in at_each_point(connect, *files) if "refused" not in connect("")]
        assert points == []

    def test_that_do_not_exist_are_an_error_at_once(self, settings, calls, monkeypatch):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "redis://no..such.name:6379/0"}}
        with pytest.raises(LockBackendError, match="does not answer; check that it runs"):
            calls(lock("name")).acquire()

    def test_of_tests_are_never_looked_up_in_the_network(self, monkeypatch):
        """Neither during the test nor later, by what outlives it."""
        asked, system = [], network.GETADDRINFO

        def note(host, *arguments, **options):
            asked.append(host)
            return system(host, *arguments, **options)

        monkeypatch.setattr(network, "GETADDRINFO", note)
        with resolving() as (names, _):
            names["redis.test"] = ["127.0.0.1"]
            assert socket.getaddrinfo("redis.test", 6379)
            with pytest.raises(socket.gaierror):
                socket.getaddrinfo("unknown.test", 6379)
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo("redis.test", 6379, type=socket.SOCK_STREAM)
        assert not [host for host in asked if str(host).endswith(".test")]

    def test_whose_address_changes(self, resolver, settings, own_valkey, calls):
        """As that of a managed server when it fails over: nothing is remembered of them."""
        port = free_port()
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": f"redis://redis.test:{port}/0"}}
        for address in ("127.0.0.2", "127.0.0.3"):
            resolver.names["redis.test"] = [address]
            server = own_valkey("--port", str(port), "--bind", address)
            handle = lock("name")
            calls(handle).acquire()
            with redis.Redis.from_url(server.url) as client:
                assert client.exists("lock:name")
            calls(handle).release()
            server.process.kill()
            server.process.wait()


@pytest.fixture
def many(resolver, own_valkey):
    """A server of which the name has four more addresses, before its own, that swallow packets."""
    port = free_port()
    own_valkey("--port", str(port), "--bind", "127.0.0.1")
    with ExitStack() as stack:
        for number in range(2, 6):
            stack.enter_context(swallowing(f"127.0.0.{number}", port))
        resolver.names["redis.test"] = [*(f"127.0.0.{number}" for number in range(2, 6)), "127.0.0.1"]
        yield f"redis://redis.test:{port}/0"


class TestAddresses:
    @pytest.mark.parametrize("wait", [0, 1, 10])
    def test_all_get_their_share_of_the_time(self, many, settings, calls, wait):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": many}}
        handle = lock("name", wait=wait)
        with ending_within(wait + 1):
            assert calls(handle).acquire()
        calls(handle).release()

    @pytest.mark.parametrize("way", ["sync", "async"])
    def test_that_failed_are_tried_last(self, many, settings, monkeypatch, way):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": many}}
        location, connect_socket, tried = locks["default"].location, socket.socket.connect, []
        port = urlsplit(many).port

        def noted(opened, address):
            if address[1] == port:
                tried.append(address[0])
            return connect_socket(opened, address)

        async def connect():
            await connection.hang_up(await location.aconnected())

        monkeypatch.setattr(socket.socket, "connect", noted)
        for _ in range(2):
            if way == "sync":
                location.connected().disconnect()
            else:
                asyncio.run(connect())
        assert tried == [*(f"127.0.0.{number}" for number in range(2, 6)), "127.0.0.1", "127.0.0.1"]

    def test_none_of_which_answers(self, many, resolver, settings, calls):
        resolver.names["redis.test"].pop()
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": many}}
        for wait in (0, 1):
            with ending_within(wait + 1), pytest.raises(LockBackendError, match="does not answer"):
                calls(lock("name", wait=wait)).acquire()


@pytest.mark.parametrize("way", ["sync", "async"])
def test_replies_to_a_handshake_that_come_one_by_one_have_the_time_of_all(settings, way):
    def late(words):
        time.sleep(0.3)

    with Scripted() as server:
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": server.url.replace("/0", "/1")}}
        location, server.answer = locks["default"].location, late
        with pytest.raises(redis.TimeoutError):
            if way == "sync":
                location.connected(timeout=0.5)
            else:
                asyncio.run(location.aconnected(timeout=0.5))


class TestCrowds:
    """A server on a unix socket takes in as many at a time as its backlog is long; the others are to come again."""

    @pytest.mark.parametrize("way", ["threads", "tasks"])
    def test_at_a_short_backlog(self, settings, own_valkey, way):
        server = own_valkey("--tcp-backlog", "1")
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": {"max_connections": 100}}
        }

        async def tasks():
            return await asyncio.gather(*(lock("name:{}", number).alocked() for number in range(100)))

        if way == "tasks":
            assert asyncio.run(tasks()) == [False] * 100
        else:
            ready = threading.Barrier(100)
            with ThreadPoolExecutor(100) as threads:
                assert list(threads.map(lambda n: (ready.wait() and False) or lock("name:{}", n).locked(), range(100)))

    def test_a_full_one_that_stays_full(self, settings, tmp_path, calls):
        with closing(socket.socket(socket.AF_UNIX)) as listener, ExitStack() as stack:
            listener.bind(str(tmp_path / "s"))
            listener.listen(0)
            for _ in range(4):
                filler = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
                filler.setblocking(False)
                filler.connect_ex(str(tmp_path / "s"))
            settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": f"unix://{tmp_path}/s"}}
            with ending_within(1), pytest.raises(LockBackendError, match="does not answer"):
                calls(lock("name", wait=0)).acquire()
