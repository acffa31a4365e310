"""Which server is connected next."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from kazoo.exceptions import ConnectionDropped

from django_distlock.backends.zookeeper.handler import Handler
from tests.support.tools import must_not_run


@pytest.fixture
def address():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()


def test_a_server_that_did_not_answer_is_passed_over_once(address):
    """Kazoo may choose it again, by chance, and would lose a good part of the session's time with that."""
    handler = Handler("default", 5.0, must_not_run)
    handler.left = address
    with pytest.raises(ConnectionDropped, match="did not answer just now"):
        handler.create_connection(address)
    handler.create_connection(address).close()


def test_others_are_not(address):
    handler = Handler("default", 5.0, must_not_run)
    handler.left = ("127.0.0.1", 1)
    handler.create_connection(address).close()
    assert handler.left is None
