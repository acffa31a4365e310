"""What ``locks check`` says of a session and its ensemble."""

from __future__ import annotations

import pytest

from django_distlock.backends.zookeeper.diagnostics import ensemble_result
from django_distlock.types import Level

THREE = """\
server.1=zk1:2888:3888:participant;0.0.0.0:2181
server.2=zk2:2888:3888:participant
server.3=zk3:2888:3888
version=0"""


def found(backend):
    return {result.about: result for result in backend.check()}


def test_a_single_server_is_told(zookeeper_locks):
    results = found(zookeeper_locks)
    assert results["ensemble"].level is Level.WARNING
    assert results["ensemble"].message == "There is one server. Its loss costs all locks."
    assert results["session"].level is Level.OK
    assert "ends 120 s after its process was last heard of" in results["session"].message
    assert results["clock"].level is Level.OK
    assert "TTL" not in results


@pytest.mark.seconds(7)
def test_a_ttl_above_the_timeout_is_told(zookeeper, configured, root):
    backend = configured(f"{zookeeper.address}{root}", timeout=5.0, TTL=60)
    results = found(backend)
    assert results["TTL"].level is Level.WARNING
    assert "leases have that: 5 s" in results["TTL"].message
    assert "DISTRIBUTED_LOCKS['default']['OPTIONS']['timeout']" in results["TTL"].hint


def test_so_is_one_above_what_the_servers_agree_to(zookeeper, configured, root):
    """They have a longest and a shortest timeout of their own."""
    backend = configured(f"{zookeeper.address}{root}", timeout=700.0, TTL=700)
    assert "leases have that: 600 s" in found(backend)["TTL"].message


def test_nobody_there_is_an_error(configured):
    [result] = configured("127.0.0.1:1", options={"request_timeout": 0.5}).check()
    assert result.is_error
    assert "did not answer" in result.message


@pytest.mark.parametrize(
    ("config", "level", "message"),
    [
        (THREE, Level.OK, "There are 3 servers that vote; 1 may be lost."),
        (THREE + "\nserver.4=zk4:2888:3888:observer", Level.OK, "There are 3 servers that vote; 1 may be lost."),
        (THREE + "\nserver.4=zk4:2888:3888", Level.WARNING, "There are 4 servers that vote; 1 may be lost."),
        ("", Level.WARNING, "There is one server. Its loss costs all locks."),
        ("server.1=zk1:2888:3888", Level.WARNING, "There is one server. Its loss costs all locks."),
    ],
)
def test_servers_that_vote_are_counted(config, level, message):
    result = ensemble_result(config)
    assert (result.level, result.message) == (level, message)
