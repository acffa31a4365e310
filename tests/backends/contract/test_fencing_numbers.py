"""Fencing numbers: later grants have larger ones, whoever grants them."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from django_distlock import lock, locks
from django_distlock.types import Grant
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request

backend = backend_on("redis", "redlock", "locmem", "postgres", "mariadb", "sqlite")


def test_a_number_is_as_new_as_its_grant(backend):
    """A waiter's is no older, though it came before: all stores of these tests have our clock."""
    holder, waiter = lock_request(), lock_request()
    assert isinstance(backend.acquire(holder, queue=False), Grant)
    backend.acquire(waiter, queue=True)
    granted_at = time.time_ns() // 1000
    backend.release(holder)
    assert backend.acquire(waiter, queue=True).fence >= granted_at


@pytest.fixture
def two_sides(own_valkey, tmp_path, settings):
    """The alias ``here`` moves to the promoted replica when ``split()`` is called; ``there`` stays."""
    port = free_port()
    old = own_valkey("--port", str(port), "--repl-diskless-sync-delay", "0")
    new = own_valkey("--replicaof", "127.0.0.1", str(port))
    with Proxy(old.socket, tmp_path) as proxy, redis.Redis.from_url(new.url, decode_responses=True) as replica:
        entry = {"BACKEND": REDIS, "LOCATION": proxy.url}
        there = {"BACKEND": REDIS, "LOCATION": old.url}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "here": entry, "there": there}

        def split():
            replica.execute_command("REPLICAOF", "NO", "ONE")
            proxy.refuse()
            proxy.server = new.socket
            proxy.accept()

        yield split, replica
        locks.close()


def test_numbers_grow_over_a_split_brain(two_sides):
    split, replica = two_sides
    numbers = []

    def wait():
        with lock("name", using="here", wait=6 * PATIENCE) as lease:
            numbers.append(lease.fence)

    waiter = threading.Thread(target=wait)
    with lock("name"):
        waiter.start()
        eventually(lambda: replica.zcard("lock|q:name") == 1)
        split()
        with redis.Redis.from_url(locks["there"].location.text) as master:
            master.delete("lock:name")  # its time is over there
        with lock("name", using="there") as other:
            numbers.append(other.fence)
        eventually(lambda: replica.zcard("lock|q:name") == 1 and replica.execute_command("PUBSUB", "SHARDCHANNELS"))
    waiter.join(6 * PATIENCE)
    assert numbers[1] > numbers[0]
