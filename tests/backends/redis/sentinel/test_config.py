"""Sentinels as the settings name them: what works, and what is said when something is wrong with them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from django_redis.pool import ConnectionFactory

import django_distlock
from django_distlock import InvalidLockBackend, LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.types import Level
from tests.support.sentinel import SERVICE, Watched, warm_up
from tests.support.stores import REDIS
from tests.support.tools import ending_within, eventually, lock_request

PROVIDER = "redis.credentials.UsernamePasswordCredentialProvider"
ONE = {"sentinels": [("127.0.0.1", 26379)]}


@pytest.fixture(scope="module")
def watched():
    with Watched() as watched:
        yield watched


@pytest.fixture
def use(settings, monkeypatch):
    monkeypatch.setattr(ConnectionFactory, "_pools", {})  # of the process, by URL

    def use(location=None, caches=None, **options):
        if caches:
            settings.CACHES = caches
        entry = {"BACKEND": REDIS, "OPTIONS": options, **({"LOCATION": location} if location else {})}
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        return locks["default"]

    yield use
    with suppress(LockBackendError):
        locks.close()


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        (None, {"sentinels": [], "service_name": "m"}, "['sentinels'] is []; it is a list of (host, port)"),
        (None, {"sentinels": "h:26379", "service_name": "m"}, "is 'h:26379'; it is a list of (host, port)"),
        (None, {"sentinels": [("h", "26379")], "service_name": "m"}, "it is a list of (host, port)"),
        (None, {"sentinels": [("h", 1), "h"], "service_name": "m"}, "it is a list of (host, port)"),
        (None, ONE, "has 'sentinels' but no 'service_name': under which name do they watch the master?"),
        (None, {**ONE, "service_name": ""}, "['service_name'] is ''; it is the name under which"),
        (None, {"service_name": "m"}, "['OPTIONS'] has 'service_name' but no 'sentinels'"),
        (None, {"sentinel_kwargs": {}}, "['OPTIONS'] has 'sentinel_kwargs' but no 'sentinels'"),
        (None, {**ONE, "service_name": "m", "sentinel_kwargs": 5}, "is 5; it is a dict of keywords"),
        (None, {**ONE, "service_name": "m", "sentinel_kwargs": {"fast": 1}}, "['sentinel_kwargs'] has an unknown key"),
        (
            None,
            {**ONE, "service_name": "m", "sentinel_kwargs": {"socket_timeout": None}},
            "['sentinel_kwargs']['socket_timeout'] is None; it is a number of seconds above 0",
        ),
        (
            None,
            {**ONE, "service_name": "m", "sentinel_kwargs": {"credential_provider": "nowhere.Provider"}},
            "['sentinel_kwargs']['credential_provider'] is 'nowhere.Provider'; no provider can be made of it",
        ),
        (
            None,
            {**ONE, "service_name": "m", "sentinel_kwargs": {"password": "p", "credential_provider": PROVIDER}},
            "['sentinel_kwargs'] has a user or a password, and a 'credential_provider', which names others",
        ),
        (
            "redis://:p@m/0",
            {**ONE, "credential_provider": PROVIDER},
            "['LOCATION'] names a user or a password, and OPTIONS has a 'credential_provider', which names others",
        ),
        (None, {**ONE, "service_name": "m", "failover_timeout": 0}, "is 0; it is a number of seconds above 0"),
        ("redis://127.0.0.1:6379/0", {**ONE, "service_name": "m"}, "names the server 127.0.0.1:6379, but"),
        ("redis://other/0", {**ONE, "service_name": "m"}, "names the server other, but the sentinels tell where it is"),
        ("redis:///0", ONE, "names no service; write it there, as in redis://:password@mymaster/0"),
        ("unix:///tmp/s", {**ONE, "service_name": "m"}, "With sentinels it is a URL such as redis://:password@m/0"),
        ("cache:default", {**ONE, "service_name": "m"}, "so that cache says where the sentinels are"),
    ],
)  # fmt: skip
def test_wrong_settings_say_what_to_change(use, location, options, message):
    with pytest.raises(InvalidLockBackend) as caught:
        use(location, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("location", [None, f"redis://{SERVICE}/3", "redis:///3?protocol=3"])
def test_a_location_says_who_and_which_database(watched, use, location, calls):
    use(location, **watched.options)
    handle = lock("name")
    calls(handle).acquire()
    with watched.servers[0].client(db=3 if location else 0) as client:
        assert client.exists("lock:name")
    calls(handle).release()


def test_the_service_may_stand_in_the_url_alone(watched, use):
    backend = use(f"redis://{SERVICE}/0", sentinels=watched.addresses)
    with lock("name"):
        assert backend.location.text.startswith(f"{SERVICE}/0 of the sentinels 127.0.0.1:")


def cache(watched, **options):
    sentinel = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": watched.addresses,
    }
    location = f"redis://{SERVICE}/2"
    entry = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": {**sentinel, **options}}
    return {"default": entry}


@pytest.mark.parametrize("options", [{}, {"SENTINEL_KWARGS": {"socket_timeout": 0.2}, "SOCKET_TIMEOUT": 0.2}])
def test_the_sentinels_of_a_cache(watched, use, calls, options):
    backend = use("cache:default", caches=cache(watched, **options))
    handle = lock("name")
    calls(handle).acquire()
    with watched.servers[0].client(db=2) as client:
        assert client.exists("lock:name")
    calls(handle).release()
    assert [one.text for one in backend.location.sentinels.locations] == [
        f"127.0.0.1:{port}" for _, port in watched.addresses
    ]


def test_a_cache_in_the_same_database_of_the_same_master_is_told(watched, use):
    use(f"redis://{SERVICE}/2", sentinels=watched.addresses, caches=cache(watched))
    found = {finding.about: finding for finding in locks["default"].check()}
    assert found["cache"].level is Level.WARNING
    assert found["reachable"].level is Level.OK


def test_two_aliases_at_the_same_master_are_known_as_such(watched, settings):
    entry = {"BACKEND": REDIS, "OPTIONS": watched.options}
    turned = {"BACKEND": REDIS, "OPTIONS": {**watched.options, "sentinels": watched.addresses[::-1]}}
    settings.DISTRIBUTED_LOCKS = {"default": entry, "turned": turned, "other": {**entry, "LOCATION": "redis:///1"}}
    assert locks["default"].keyspace == locks["turned"].keyspace != locks["other"].keyspace
    locks.close()


class TestSentinelsThatDoNotHelp:
    def test_an_unknown_service(self, watched, use, calls):
        use(sentinels=watched.addresses, service_name="nobody")
        with ending_within(1), pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=None, ttl=1)).acquire()
        message = str(caught.value)
        assert (
            "the sentinels watch no such master; correct DISTRIBUTED_LOCKS['default']['OPTIONS']['service_name']"
            in message
        )
        assert "watches no master 'nobody'" in message

    def test_one_knows_no_master_and_the_others_are_dead(self, use, calls):
        """It may have lost its memory, so this may pass."""
        with Watched(replicas=0) as watched:
            with watched.sentinels[0].client() as client:
                client.execute_command("SENTINEL", "REMOVE", SERVICE)
            for sentinel in watched.sentinels[1:]:
                sentinel.kill()
            use(**watched.options)
            with pytest.raises(LockBackendError, match="watches no master") as caught:
                calls(lock("name", wait=0)).acquire()
            assert not caught.value.is_final

    def test_one_is_dead_and_one_hangs(self, use, calls):
        """They cost the first connection a moment, the next ones nothing."""
        with Watched(replicas=0) as watched:
            watched.sentinels[0].kill()
            watched.sentinels[1].stop()
            use(**watched.options)
            with ending_within(2):
                warm_up(calls)
            with ending_within(1):
                for _ in range(10):
                    locks["default"].close()
                    warm_up(calls)

    def test_all_are_dead(self, use, calls):
        """Who is connected works on; who is not waits for one of them as for a new master, then gets an error."""
        with Watched(replicas=0) as watched:
            use(**watched.options)
            warm_up(calls)
            for sentinel in watched.sentinels:
                sentinel.kill()
            handle = lock("name")
            calls(handle).acquire()
            time.sleep(Timing.sentinel_interval * 1.5)
            calls(handle).release()
            use(**watched.options, failover_timeout=1, socket_timeout=0.5)
            with pytest.raises(LockBackendError) as caught:
                calls(lock("name", wait=None, ttl=2)).acquire()
            assert (
                "no sentinel answers; check that they run and that DISTRIBUTED_LOCKS['default']['OPTIONS']['sentinels']"
                in str(caught.value)
            )

    def test_all_are_dead_and_a_lease_is_adopted(self, use, calls):
        """Who adopts does not wait for a lock: each of its requests has two timeouts, whatever a failover may take."""
        with Watched(replicas=0) as watched:
            use(**watched.options, socket_timeout=0.5, socket_connect_timeout=0.5)
            with lock("name", ttl=60) as lease:
                text = lease.detach()
            for process in [*watched.servers, *watched.sentinels]:
                process.kill()
            with ending_within(5), pytest.raises(LockBackendError, match="no sentinel answers"):
                calls(django_distlock).adopt(text)

    def test_all_are_away_for_a_moment(self, use, calls):
        """With the master, as for a host whose own network is away."""
        with Watched(replicas=0) as watched, ThreadPoolExecutor() as threads:
            use(**watched.options)
            everybody = [*watched.servers, *watched.sentinels]
            for process in everybody:
                process.kill()
            with pytest.raises(LockBackendError, match="no sentinel answers"):
                calls(lock("name", wait=0, ttl=5)).acquire()
            handle = lock("name", wait=60)
            waiting = threads.submit(calls(handle).acquire)
            time.sleep(1)
            assert not waiting.done()
            for process in everybody:
                process.start()
            assert waiting.result(60) is True
            calls(handle).release()

    def test_all_are_dead_and_the_lock_is_held(self, use, calls, monkeypatch):
        """Who may wait for long, but cannot listen for its turn, waits no longer than for a new master."""
        monkeypatch.setattr(Timing, "search_kept", 0)
        with Watched(replicas=0, sentinels=1) as watched:
            use(**watched.options, failover_timeout=2, socket_timeout=0.5).acquire(lock_request(ttl=60), queue=False)
            watched.sentinels[0].kill()
            with ending_within(10), pytest.raises(LockBackendError, match="no sentinel answers"):
                calls(lock("name", wait=60)).acquire()

    def test_they_want_a_password(self, use, calls):
        with Watched(
            replicas=0, sentinels=1, sentinel=("requirepass quiet",), sentinel_auth={"password": "quiet"}
        ) as watched:
            for wrong in ({}, {"sentinel_kwargs": {"password": "loud"}}):
                use(**watched.options, **wrong)
                with pytest.raises(LockBackendError) as caught:
                    calls(lock("name", wait=None, ttl=1)).acquire()
                assert "correct DISTRIBUTED_LOCKS['default']['OPTIONS']['sentinel_kwargs']" in str(caught.value)
                assert "loud" not in str(caught.value)
            use(**watched.options, sentinel_kwargs={"password": "quiet"})
            warm_up(calls)
            use("cache:default", caches=cache(watched, SENTINEL_KWARGS={"password": "quiet"}))
            warm_up(calls)

    def test_the_master_wants_a_password(self, use, calls):
        auth = ("requirepass hush", "masterauth hush")
        with Watched(
            replicas=0,
            sentinels=1,
            server=auth,
            sentinel=(f"sentinel auth-pass {SERVICE} hush",),
            auth={"password": "hush"},
        ) as watched:
            use(**watched.options)
            with pytest.raises(LockBackendError, match="the server refused the user or password; correct .*LOCATION"):
                calls(lock("name", wait=None, ttl=1)).acquire()
            use(f"redis://:hush@{SERVICE}/0", **watched.options)
            warm_up(calls)
            assert "hush" not in locks["default"].location.text


def test_what_was_found_out_is_forgotten_when_nobody_uses_it(watched, use, calls, monkeypatch, caplog):
    """Nobody asks the sentinels for a process that holds and wants nothing."""
    monkeypatch.setattr(Timing, "sentinel_idle", 0.5)
    monkeypatch.setattr(Timing, "sentinel_interval", 0.1)
    backend = use(**watched.options)
    warm_up(calls)
    eventually(lambda: backend.location.sentinels.master is None)
    with caplog.at_level(logging.WARNING), lock("name"):
        assert backend.location.sentinels.master.port == watched.servers[0].port
    assert "The master of" not in caplog.text  # as of one that has moved
