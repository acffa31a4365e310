"""TLS, on the Redis of the operating system: whom each side trusts, and what is said when it does not."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from django_redis.pool import ConnectionFactory
from redis.exceptions import ConnectionError

from django_distlock import LockBackendError, State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.connection import hang_up
from django_distlock.backends.redis.errors import is_about_certificates
from django_distlock.backends.redis.scripts import pack
from django_distlock.testing.tools import WAYS, calling
from example_project.valkey import Valkey
from tests.support.ports import free_port
from tests.support.sentinel import SERVICE, Watched, warm_up
from tests.support.servers import program_of
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.once]

WRONG = "TLS failed: check the certificates that DISTRIBUTED_LOCKS['default']['LOCATION'] names"


@pytest.fixture(scope="module")
def port(pki):
    """Of a server that lets only those in who show a certificate."""
    port = free_port()
    with Valkey("--tls-port", str(port), *pki.of_server, program=program_of("redis-server")):
        yield port


@pytest.fixture
def use(settings, monkeypatch):
    monkeypatch.setattr(ConnectionFactory, "_pools", {})  # of the process, by URL

    def use(location, **options):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": location, "OPTIONS": options}}
        return locks["default"]

    yield use
    locks.close()


def url(port, pki, *, host="127.0.0.1", authority=None, client=True):
    files = {"ssl_ca_certs": (authority or pki.authority).certificate}
    if client:
        files |= {"ssl_certfile": pki.client.certificate, "ssl_keyfile": pki.client.key}
    return f"rediss://{host}:{port}/0?" + "&".join(f"{key}={path}" for key, path in files.items())


def test_a_lock_is_taken_waited_for_renewed_and_released(port, pki, use, calls, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "django_distlock")
    monkeypatch.setattr(Timing, "look_interval", 4 * PATIENCE)  # who waits is woken, or waits in vain
    use(url(port, pki))
    held, waiting = lock("name", ttl=6), lock("name", wait=PATIENCE)
    held.acquire()
    eventually(lambda: locks["default"].look(["name"])[0][0].remaining < 5)
    eventually(lambda: locks["default"].look(["name"])[0][0].remaining > 5)
    timer = threading.Timer(0.3, held.release)
    timer.start()
    assert calls(waiting).acquire()
    timer.join()
    calls(waiting).release()
    assert "lost its connection" not in caplog.text


@pytest.mark.parametrize("cache", ["django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache"])
def test_the_certificates_of_a_cache(port, pki, use, calls, settings, cache):
    options = {
        "ssl_ca_certs": str(pki.authority.certificate),
        "ssl_certfile": str(pki.client.certificate),
        "ssl_keyfile": str(pki.client.key),
    }
    if cache.startswith("django_redis"):
        options = {"CONNECTION_POOL_KWARGS": options}
    entry = {"BACKEND": cache, "LOCATION": f"rediss://127.0.0.1:{port}/1", "OPTIONS": options}
    settings.CACHES = {"default": entry}
    assert use("cache:default").location.text == f"rediss://127.0.0.1:{port}/1"
    warm_up(calls)


def test_a_reply_may_be_longer_than_what_tls_sends_as_one(port, pki, use):
    location, text = use(url(port, pki)).location, b"".join(b"%d " % number for number in range(20_000))

    async def main():
        connection = await location.aconnected()
        try:
            return await connection.exchange(pack("ECHO", text), 1, PATIENCE)
        finally:
            await hang_up(connection)

    assert asyncio.run(main()) == [text]
    connection = location.connected()
    try:
        assert connection.exchange(pack("ECHO", text), 1, PATIENCE) == [text]
    finally:
        connection.disconnect()


class TestNoTrust:
    def test_in_the_authority_of_the_server(self, port, pki, use, calls):
        use(url(port, pki, authority=pki.stranger))
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=None, ttl=1)).acquire()
        assert WRONG in str(caught.value)
        assert "certificate verify failed" in str(caught.value)

    def test_in_the_name_of_the_server(self, port, pki, use, calls):
        use(url(port, pki, host="localhost"))
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=None, ttl=1)).acquire()
        assert WRONG in str(caught.value)
        assert "certificate is not valid for 'localhost'" in str(caught.value)

    @pytest.mark.parametrize("shown", ["none", "of a stranger"])
    def test_of_the_server_in_the_certificate_of_a_client(self, port, pki, use, calls, shown):
        """TLS 1.3 lets the client begin before the server refuses it: then all that some hear is that it went away."""
        location = url(port, pki, client=False)
        if shown != "none":
            location += f"&ssl_certfile={pki.stranger.certificate}&ssl_keyfile={pki.stranger.key}"
        use(location)
        for _ in range(5):
            with pytest.raises(LockBackendError, match="TLS failed|or it refuses our certificate") as caught:
                calls(lock("name", wait=None, ttl=1)).acquire()
            assert "LOCATION" in str(caught.value)

    def test_without_tls(self, port, use, calls):
        use(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(
            LockBackendError, match="the server does not answer; check that it runs and that .*LOCATION"
        ):
            calls(lock("name", wait=None, ttl=1)).acquire()


@contextmanager
def hanging_up(goodbye):
    """The port of a server that says so much and goes away in the handshake, like a balancer without a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):  # the test is over
                while True:
                    peer, _ = server.accept()
                    with peer:
                        peer.recv(16384)
                        peer.sendall(goodbye)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("goodbye", "is_meant"), [(b"", False), (b"\x15\x03\x03\x00\x02\x02\x30", True)], ids=["nothing", "unknown_ca"]
)
def test_who_goes_away_in_the_handshake_says_nothing_about_certificates(use, goodbye, is_meant):
    """An alert does. Both are told alike to threads and tasks: behind sentinels the first is tried again."""
    with hanging_up(goodbye) as port:
        location = use(f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=none").location
        with pytest.raises(ConnectionError) as caught:
            location.connected()
        assert is_about_certificates(caught.value) is is_meant
        with pytest.raises(ConnectionError) as caught:
            asyncio.run(location.aconnected())
        assert is_about_certificates(caught.value) is is_meant


class TestSentinels:
    @pytest.fixture
    def watched(self, pki):
        files = {"cert": pki.server.certificate, "key": pki.server.key, "ca-cert": pki.authority.certificate}
        lines = [f"tls-{kind}-file {path}" for kind, path in files.items()]
        lines += ["tls-replication yes", "tls-auth-clients optional"]
        auth = {"ssl": True, "ssl_ca_certs": str(pki.authority.certificate)}
        with Watched(
            program=program_of("redis-server"),
            port="tls-port",
            server=lines,
            sentinel=lines,
            auth=auth,
            sentinel_auth=auth,
        ) as watched:
            yield watched

    @pytest.mark.seconds(4)
    def test_over_tls_through_a_failover(self, watched, pki, use):
        trusted = {"ssl": True, "ssl_ca_certs": str(pki.authority.certificate)}
        location = f"rediss://{SERVICE}/0?ssl_ca_certs={pki.authority.certificate}"
        use(location, **watched.options, sentinel_kwargs=trusted)
        with lock("name", ttl=10) as lease:
            old = watched.master
            watched.wait_for_replicas(old)
            old.kill()
            watched.wait_for_another(old)
            for way in WAYS:
                with calling(way) as calls:
                    assert calls(lock("name")).locked()
            assert lease.state is not State.LOST
        for way in WAYS:
            with calling(way) as calls:
                warm_up(calls)

    def test_no_trust_in_the_sentinels_is_no_failover(self, watched, pki, use, calls):
        use(
            f"rediss://{SERVICE}/0?ssl_ca_certs={pki.authority.certificate}",
            **watched.options,
            sentinel_kwargs={"ssl": True, "ssl_ca_certs": str(pki.stranger.certificate)},
        )
        with pytest.raises(LockBackendError, match="no sentinel answers.*certificate verify failed"):
            calls(lock("name", wait=None, ttl=1)).acquire()
        use(
            f"rediss://{SERVICE}/0?ssl_ca_certs={pki.stranger.certificate}",
            **watched.options,
            sentinel_kwargs={"ssl": True, "ssl_ca_certs": str(pki.authority.certificate)},
        )
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=None, ttl=1)).acquire()
        assert WRONG in str(caught.value)
