"""What ``backend.check()`` finds out about real servers."""

from __future__ import annotations

import pytest
import redis

from django_distlock import locks
from django_distlock.backends.redis import diagnostics
from django_distlock.backends.redis.config import read_location
from django_distlock.options import Terms
from django_distlock.types import Level
from example_project.valkey import Valkey
from tests.support.stores import REDIS
from tests.support.tools import eventually


@pytest.fixture
def checked(settings, calls):
    """By the subject, what is found of a server, by the method and by its twin."""

    def check(location, **entry):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": location, **entry}}
        return {finding.about: finding for finding in calls(locks["default"]).check()}

    yield check
    locks.close()


def levels(found):
    return {about: str(finding.level) for about, finding in found.items()}


def test_a_server_that_is_fine(checked, own_valkey, settings):
    server = own_valkey("--appendonly", "yes")
    assert set(levels(checked(server.url)).values()) == {"ok"}
    assert set(checked(server.url)) == {
        "reachable", "latency", "clock", "version", "eviction", "memory", "persistence", "replicas", "cache",
        "waiting",
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_locks(checked, own_valkey, policy):
    """volatile-* too: every lock has a TTL."""
    server = own_valkey("--maxmemory", "100mb", "--maxmemory-policy", policy)
    found = checked(server.url)["eviction"]
    assert found.level is Level.ERROR
    assert policy in found.message


def test_a_server_that_may_have_forgotten(checked, own_valkey):
    found = checked(own_valkey().url, TTL=600)
    assert found["uptime"].level is Level.WARNING
    assert found["persistence"].level is Level.INFO


def test_a_server_that_may_have_forgotten_what_rests(checked, own_valkey):
    """A nightly job that ended is kept from running again by its lock, for hours."""
    server = own_valkey()
    with redis.Redis.from_url(server.url) as client:
        eventually(lambda: client.info("server")["uptime_in_seconds"] > 1)
    assert "uptime" not in checked(server.url, TTL=1)
    found = checked(server.url, TTL=1, MIN_HOLD=3600)
    assert "less than the MIN_HOLD of 3600 s" in found["uptime"].message


def test_a_server_with_little_memory_left(checked, own_valkey):
    server = own_valkey()
    with redis.Redis.from_url(server.url) as client:
        client.set("filler", "x" * 20_000_000)
        eventually(lambda: client.info("memory")["used_memory"] < 25_000_000)  # the buffer it came through is gone
        client.config_set("maxmemory", 25_000_000)
    assert checked(server.url)["memory"].level is Level.WARNING


def test_a_user_who_may_not_run_info(checked, own_valkey):
    server = own_valkey()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL SETUSER distlock on >secret ~* &* +@all -info")
    found = checked(f"unix://distlock:secret@{server.socket}")
    assert found["permissions"].level is Level.WARNING
    assert "+info" in found["permissions"].hint
    assert found["reachable"].level is Level.OK


def test_a_user_who_may_not_run_scripts(checked, own_valkey):
    server = own_valkey()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL SETUSER distlock on >secret ~* &* +@all -evalsha")
    found = checked(f"unix://distlock:secret@{server.socket}")
    assert found["reachable"].level is Level.ERROR
    assert "widen its ACL rule" in found["reachable"].message


def test_a_replica(checked, own_valkey):
    replica = own_valkey()
    with redis.Redis.from_url(replica.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        eventually(lambda: client.info("replication")["role"] == "slave")
    found = checked(replica.url)
    assert found["reachable"].level is Level.ERROR
    assert found["replicas"].level is Level.ERROR


def test_a_database_shared_with_a_cache(checked, valkey, store, settings):
    settings.CACHES = {"pages": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": valkey.url}}
    found = checked(valkey.url)["cache"]
    assert found.level is Level.WARNING
    assert "CACHES['pages']" in found.message


def test_a_server_that_is_gone(checked, own_valkey):
    server: Valkey = own_valkey()
    server.process.kill()
    server.process.wait()
    found = checked(server.url)
    assert levels(found) == {"reachable": "error"}


@pytest.mark.parametrize(("ahead", "level"), [(0.2, Level.OK), (30.0, Level.WARNING), (-30.0, Level.WARNING)])
def test_clocks_that_differ(ahead, level):
    location = read_location("redis://nowhere.invalid/0", "LOCATION", {})
    seconds = 1_700_000_000 + ahead
    reply = [b"%d" % int(seconds), b"%d" % int(seconds % 1 * 1_000_000)]
    found = diagnostics.server_results(b"redis_version:7.2.0\r\n", reply, 1_700_000_000.0, Terms(), location)
    assert [finding.level for finding in found if finding.about == "clock"] == [level]


def test_a_server_that_is_too_old():
    location = read_location("redis://nowhere.invalid/0", "LOCATION", {})
    found = diagnostics.server_results(b"redis_version:6.0.9\r\n", [b"1", b"0"], 1.0, Terms(), location)
    assert [finding.level for finding in found if finding.about == "version"] == [Level.ERROR]
