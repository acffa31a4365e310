"""A server that speaks TLS alone, and asks clients for a certificate of theirs."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import closing

import pytest

from django_distlock import LockBackendError, lock, locks
from tests.support.ports import free_port
from tests.support.tools import PATIENCE, eventually, renewer_of
from tests.support.zookeeper import Server, needed_program

pytestmark = [pytest.mark.slow, pytest.mark.seconds(5)]


def is_open(port):
    with closing(socket.socket()) as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(pki, tmp_path_factory):
    key = tmp_path_factory.mktemp("keys") / "server.pem"
    key.write_text(pki.server.key.read_text() + pki.server.certificate.read_text())
    settings = {
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "secureClientPort": free_port(),
        "secureClientPortAddress": "127.0.0.1",
        "ssl.keyStore.location": key,
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": pki.authority.certificate,
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "need",
        "ssl.hostnameVerification": "false",
    }
    with Server(needed_program(), **settings) as server:
        server.secure_port = settings["secureClientPort"]
        eventually(lambda: is_open(server.secure_port))  # after the port without TLS
        yield server


@pytest.fixture
def secured(configured, server, pki, root):
    """``secured(**options)`` is a backend that trusts the authority, with a certificate of its own."""

    def secure(host="127.0.0.1", **options):
        trusted = {
            "use_ssl": True,
            "ca": pki.authority.certificate,
            "certfile": pki.client.certificate,
            "keyfile": pki.client.key,
            **options,
        }
        return configured(f"{host}:{server.secure_port}{root}", options=trusted)

    return secure


def test_a_lock_is_taken_waited_for_and_released(secured, calls):
    secured()
    held, waiting = lock("name"), lock("name", wait=60)
    assert held.acquire()
    first = held.lease
    timer = threading.Timer(0.3, held.release)
    timer.start()
    assert calls(waiting).acquire()
    timer.join()
    assert waiting.lease.fence > first.fence
    calls(waiting).release()


@pytest.mark.seconds(21)
def test_a_long_answer_arrives_whole(secured):
    """It comes in several records of TLS, of which a poll of the socket sees the first one only."""
    backend = secured()
    held = [lock(f"{number:04}" * 50, ttl=6 * PATIENCE) for number in range(120)]  # kept on a busy machine, too
    for one in held:
        one.acquire()
    assert len(list(backend.held())) == 120
    for one in held:
        one.release()


@pytest.mark.parametrize(
    ("options", "host", "told"),
    [
        ({"ca": "stranger"}, "127.0.0.1", "certificate verify failed"),
        ({}, "localhost", "mismatch"),
        ({"certfile": None, "keyfile": None}, "127.0.0.1", "bad certificate|certificate required|handshake failure"),
        ({"use_ssl": False, "ca": None, "certfile": None, "keyfile": None}, "127.0.0.1", "no connection"),
    ],
    ids=["nobody vouches for the server", "another host", "no certificate", "no TLS"],
)
def test_who_is_not_trusted_is_told_so(secured, pki, options, host, told):
    if options.get("ca"):
        options = {**options, "ca": pki.stranger.certificate}
    secured(host=host, request_timeout=2.0 if told == "no connection" else 10.0, **options)

    def tells():
        with pytest.raises(LockBackendError) as caught:
            lock("name").acquire()
        return re.search(told, str(caught.value))

    if host == "localhost":  # which may have two addresses: then it may be told of the other one
        eventually(tells)
    else:
        assert tells()
    assert not renewer_of(locks["default"]).is_cleaning
