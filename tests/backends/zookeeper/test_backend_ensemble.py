"""An ensemble of three, whose leader is killed, and whose followers hang or are cut off."""

from __future__ import annotations

import threading
import time

import pytest

from django_distlock import LockLost, State, lock, locks
from django_distlock.backends.zookeeper import ZooKeeperBackend
from django_distlock.types import Grant, Level
from django_distlock.utils.clock import clock
from tests.support.inside import client_of
from tests.support.leases import deadline_of
from tests.support.tools import PATIENCE, eventually, insist, lock_request
from tests.support.zookeeper import Ensemble, needed_program

pytestmark = [pytest.mark.slow, pytest.mark.seconds(6)]

TIMEOUT = 10.0  # which tests wait for, and long enough for a busy machine


@pytest.fixture(scope="module")
def three_servers():
    # A follower that is cut off serves its clients for six seconds.
    with Ensemble(needed_program(), syncLimit=30) as ensemble:
        yield ensemble


@pytest.fixture
def ensemble(three_servers):
    yield three_servers
    three_servers.heal()


@pytest.fixture
def backend(ensemble, root, configured):
    return configured(f"{ensemble.location}{root}", timeout=TIMEOUT, options={"request_timeout": 20.0})


@pytest.fixture
def elsewhere(ensemble, root):
    """Another process, with all servers in reach."""
    entry = {"LOCATION": f"{ensemble.location}{root}", "OPTIONS": {"timeout": 90.0, "request_timeout": 20.0}}
    backend = ZooKeeperBackend("elsewhere", entry)
    yield backend
    client_of(backend).close()


def test_no_lock_is_lost_with_the_leader(ensemble, root, configured, elsewhere):
    """Who holds one goes on to hold it, who waits keeps its place, and numbers grow."""
    configured(
        f"{ensemble.location}{root}", timeout=90.0, options={"request_timeout": 20.0}
    )  # elections take long here
    entered, fences = threading.Event(), []

    def wait():
        with lock("name", wait=120) as lease:
            fences.append(lease.fence)
            entered.set()

    holder = lock_request(ttl=300)
    fences.append(elsewhere.acquire(holder, queue=True).fence)
    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: elsewhere.count_waiters(["name"]) == [1])
    with lock("held here") as lease:
        ensemble.leader.kill()
        with lock("another", wait=60):  # as soon as there is another leader
            pass
        eventually(lambda: lease.state is State.HELD)
        insist(lease.renew)
        [[info]] = insist(lambda: elsewhere.look(["held here"]))
        assert info.token == lease.token
    assert not entered.is_set()
    assert insist(lambda: elsewhere.release(holder))
    assert entered.wait(PATIENCE)
    thread.join(PATIENCE)
    assert fences == sorted(set(fences))
    assert fences[1] >> 32 == fences[0] >> 32  # its place is from before the failover
    with lock("name") as later:
        assert later.fence > fences[1]
        assert later.fence >> 32 > fences[1] >> 32


def test_a_lease_over_a_follower_that_is_cut_off_is_lost_before_others_are_granted_the_lock(
    ensemble, root, configured, elsewhere
):
    """It goes on to answer what is read, so a holder that asked only that would believe in its lease."""
    follower = ensemble.linked_follower()
    backend = configured(f"{follower.address}{root}", timeout=2.0)
    handle = lock("name", renew=False, ttl=60)
    assert handle.acquire()
    lease = locks.leases()[0]
    reader = client_of(backend)
    assert reader.is_connected
    waiter = lock_request(ttl=300)
    elsewhere.acquire(waiter, queue=True)
    ensemble.cut()
    eventually(lambda: lease.state is State.LOST)
    lost_at = clock()
    assert follower.mode == "follower"
    assert follower.ask(b"ruok") == "imok"
    granted = eventually(lambda: isinstance(answer := elsewhere.acquire(waiter, queue=True), Grant) and answer)
    assert lost_at < granted.sent_at
    with pytest.raises(LockLost):
        handle.release()
    ensemble.heal()


def test_a_holder_leaves_a_follower_that_is_cut_off_in_time(ensemble, root, configured, elsewhere):
    """All servers are named, so another one confirms its session."""
    follower = ensemble.linked_follower()
    backend = configured(f"{ensemble.location}{root}", timeout=TIMEOUT)
    with lock("name") as lease:
        connect(backend, [follower])
        eventually(lambda: deadline_of(lease) > clock() + TIMEOUT / 2)
        ensemble.cut()
        began = clock()
        eventually(lambda: deadline_of(lease) > began + TIMEOUT + 1)
        assert follower.port != port_of(backend)
        lease.ensure_held()
        [[info]] = elsewhere.look(["name"])
        assert info.token == lease.token


def connect(backend, servers):
    """Lose connections until the session is connected to one of these. Returns it."""
    while not (found := [server for server in servers if server.port == port_of(backend)]):
        client_of(backend).reconnect()
        time.sleep(0.1)
    return found[0]


def port_of(backend):
    """Of the server that a session is connected to."""
    return eventually(lambda: client_of(backend).connected_to)[1]


def test_a_follower_that_hangs_costs_no_lease(ensemble, backend, elsewhere):
    with lock("name") as lease:
        connected = connect(backend, ensemble.followers)
        began = clock()
        connected.stop()
        eventually(lambda: deadline_of(lease) > began + TIMEOUT + 1)
        lease.ensure_held()
        connected.go_on()
        assert insist(lambda: elsewhere.look(["name"]))[0][0].token == lease.token


def test_the_ensemble_is_checked(ensemble, backend):
    found = {result.about: result for result in backend.check()}
    assert found["ensemble"].level is Level.OK
    assert found["ensemble"].message == "There are 3 servers that vote; 1 may be lost."
