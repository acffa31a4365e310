"""The session of a process: until when its leases hold while servers, connections and processes fail."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time

import pytest

from django_distlock import LockBackendError, LockLost, State, lock, locks
from django_distlock.types import Grant, LockInfo
from django_distlock.utils.clock import clock
from tests.support.inside import client_of, kazoo_of
from tests.support.leases import deadline_of
from tests.support.programs import FORKS, in_a_fork
from tests.support.tools import PATIENCE, eventually, insist, lock_request, queue_of, renewer_of, threads_of
from tests.support.zookeeper import Server, expire_session, program

pytestmark = [pytest.mark.slow, pytest.mark.seconds(2)]

TIMEOUT = 4.0  # of the sessions of ``proxied``


def waiting(backend):
    """Who waits for its turn here, and so goes on to wait when the store fails."""
    return [request for request in queue_of(backend).queued() if not request.asking]


def broken(*args):
    raise RuntimeError("xids do not match")


class TestAConnectionThatIsLost:
    def test_its_leases_are_unknown_and_then_held_again(self, proxy, root, configured, losses):
        configured(f"{proxy.address}{root}", timeout=60.0)
        with lock("name") as lease:
            assert lease.state is State.HELD
            proxy.refuse()
            eventually(lambda: lease.state is State.UNKNOWN)
            proxy.accept()
            eventually(lambda: lease.state is State.HELD)
            lease.ensure_held()
        assert losses == []

    def test_they_are_lost_at_their_deadline_before_the_servers_free_them(self, proxied, proxy, behind_proxy, losses):
        with pytest.raises(LockLost):
            with lock("name") as lease:
                deleted, session = behind_proxy.deletions(), client_of(proxied).session
                proxy.refuse()
                eventually(lambda: lease.state is State.LOST)
                eventually(lambda: losses)
        assert eventually(lambda: deleted)[0] > session.confirmed_until  # nobody else had it before its holder stopped
        assert losses == [("name", losses[0][1])]

    def test_their_nodes_are_deleted_where_the_session_lived_on(self, zookeeper, proxy, root, configured, behind_proxy):
        """It was lost by the deadline of its TTL: the session is longer."""
        configured(f"{proxy.address}{root}", timeout=60.0)
        with pytest.raises(LockLost):
            with lock("name", ttl=1.0) as lease:
                proxy.refuse()
                eventually(lambda: lease.state is State.LOST)
        assert len(behind_proxy.places()) == 1
        proxy.accept()
        eventually(lambda: not behind_proxy.places(), 4)

    def test_the_servers_may_end_the_session(self, proxied, proxy, behind_proxy, losses):
        with pytest.raises(LockLost):
            with lock("name") as lease:
                proxy.refuse()
                eventually(lambda: not behind_proxy.places())
                assert lease.state is State.LOST
                proxy.accept()
                eventually(lambda: client_of(proxied).is_connected)
                with lock("another"):  # in another session
                    assert len(behind_proxy.places()) == 1
        eventually(lambda: losses)

    def test_one_that_is_ended_from_elsewhere_is_over_at_once(self, zookeeper_locks, behind, losses):
        """As by an operator, who need not wait for its timeout of two minutes."""
        with pytest.raises(LockLost):
            with lock("name") as lease:
                expire_session(zookeeper_locks)
                eventually(lambda: lease.state is State.LOST)
                assert behind.places() == []
                eventually(lambda: losses)
        assert "session" in losses[0][1]
        with lock("name") as later:
            assert later.fence > lease.fence

    def test_one_whose_thread_ends_by_an_error_is_followed_by_another(
        self, zookeeper_locks, losses, caplog, monkeypatch
    ):
        """As kazoo's does where a server mixes up its answers."""
        with pytest.raises(LockLost):
            with lock("name") as lease:
                handler = kazoo_of(zookeeper_locks).handler
                monkeypatch.setattr(handler, "select", broken)
                with lock("another"):
                    assert lease.state is State.LOST
                assert kazoo_of(zookeeper_locks).handler is not handler
                eventually(lambda: losses)
                gc.collect()  # no socket is left of it, which pytest would tell
        assert "is given up: RuntimeError('xids do not match')" in caplog.text

    def test_one_that_is_closed_while_its_thread_ends_by_an_error(self, zookeeper_locks, monkeypatch):
        """Nobody waits in vain for the next connection."""

        class Closing(logging.Handler):
            def emit(self, record):
                if "is given up" in record.getMessage():
                    client_of(zookeeper_locks).close()
                    told.append(record)

        told, closing = [], Closing()
        logging.getLogger("django_distlock").addHandler(closing)
        try:
            with pytest.raises(LockLost), lock("name"):
                monkeypatch.setattr(kazoo_of(zookeeper_locks).handler, "select", broken)
                with lock("another"):
                    eventually(lambda: told)
        finally:
            logging.getLogger("django_distlock").removeHandler(closing)

    def test_who_waits_goes_on_to_wait(self, proxied, proxy, behind_proxy):
        """With its place, if the session lives on."""
        elsewhere = lock_request("name", ttl=60)
        holder = behind_proxy
        entered = threading.Event()
        assert isinstance(proxied.acquire(elsewhere, queue=True), Grant)

        def wait():
            with lock("name", wait=60):
                entered.set()

        thread = threading.Thread(target=wait)
        thread.start()
        before = eventually(lambda: len(places := holder.places()) == 2 and places)
        eventually(lambda: waiting(proxied))
        proxy.refuse()
        time.sleep(0.3)
        proxy.accept()
        eventually(lambda: client_of(proxied).is_connected)
        assert holder.places() == before
        assert proxied.release(elsewhere)
        assert entered.wait(PATIENCE)
        thread.join(PATIENCE)

    def test_whose_session_ended_waits_on_with_another_place(self, proxied, proxy, behind_proxy, zookeeper, root):
        from django_distlock.backends.zookeeper import ZooKeeperBackend

        entry = {"LOCATION": f"{zookeeper.address}{root}", "OPTIONS": {"timeout": 60.0}}
        elsewhere, holder = ZooKeeperBackend("elsewhere", entry), lock_request(ttl=300)
        assert isinstance(elsewhere.acquire(holder, queue=False), Grant)
        entered = threading.Event()

        def wait():
            with lock("name", wait=120):
                entered.set()

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: len(behind_proxy.places()) == 2 and waiting(proxied))
        proxy.refuse()
        eventually(lambda: len(behind_proxy.places()) == 1)
        proxy.accept()
        eventually(lambda: len(behind_proxy.places()) == 2)
        assert elsewhere.release(holder)
        assert entered.wait(PATIENCE)
        thread.join(PATIENCE)
        client_of(elsewhere).close()


class TestAServerThatHangs:
    def test_leases_are_lost_at_their_deadline(self, proxied, proxy, behind_proxy, losses):
        """The connection stands, and nothing comes over it."""
        with pytest.raises(LockLost):
            with lock("name", renew=False) as lease:
                deleted, session = behind_proxy.deletions(), client_of(proxied).session
                proxy.silence()
                proxy.hang = True
                eventually(lambda: lease.state is State.LOST)
                eventually(lambda: losses)
        assert eventually(lambda: deleted)[0] > session.confirmed_until

    def test_another_connection_is_tried_before_that(self, proxied, proxy, losses):
        with lock("name") as lease:
            accepted = proxy.accepted
            proxy.silence()  # of the connections that are there
            eventually(lambda: proxy.accepted > accepted)
            eventually(lambda: deadline_of(lease) > clock() + TIMEOUT / 2)
            lease.ensure_held()
        assert losses == []


class TestTheDeadline:
    def test_it_counts_from_the_last_but_one_check(self, proxied, proxy):
        """One request after the other is answered, so it goes on; and it is never the whole timeout from now."""
        with lock("name") as lease:
            session = client_of(proxied).session
            connected = session.until
            left = []
            while session.until < connected + TIMEOUT:
                if session.until > connected:
                    left.append(session.until - clock())
                lease.ensure_held()
                time.sleep(0.01)
            assert max(left) < TIMEOUT * 3 / 4
            assert lease.remaining < TIMEOUT * 3 / 4

    def test_a_lease_that_is_not_renewed_lives_for_its_ttl(self, proxied):
        with lock("name", renew=False, ttl=2.5) as lease:
            time.sleep(2.0)
            lease.ensure_held()

    @pytest.mark.seconds(21)
    def test_there_is_one_request_whatever_the_number_of_leases(self, zookeeper, root, configured):
        backend = configured(f"{zookeeper.address}{root}", timeout=24.0)
        requests = [lock_request(f"name:{number}", ttl=60) for number in range(150)]
        for request in requests:
            assert isinstance(backend.acquire(request, queue=True), Grant)
        assert all(backend.renew([(request, 60.0) for request in requests]))
        time.sleep(1.5)  # all are watched by then
        before, began = received(zookeeper), time.monotonic()
        time.sleep(10.0)
        rounds = (time.monotonic() - began) / 8.0
        assert received(zookeeper) - before < 20 * rounds
        for request in requests:
            assert backend.release(request)

    def test_a_request_that_reached_no_server_leaves_nothing_to_release(self, proxied, proxy, calls):
        """Else an outage would gather one for each request."""
        proxy.refuse()
        for name in ("one", "two"):
            with pytest.raises(LockBackendError):
                calls(lock(name, wait=1)).acquire()
            assert not renewer_of(proxied).is_cleaning

    def test_a_session_that_nobody_confirmed_for_long_is_confirmed_before_a_grant(self, proxied, proxy, monkeypatch):
        """As where the process was stopped; by another connection, because two requests would take a second."""
        with lock("warm"):
            pass
        session = client_of(proxied).session
        monkeypatch.setattr(session, "answered", lambda sent_at, answered_at: None)
        eventually(lambda: session.is_about_to_end)
        accepted = proxy.accepted
        with lock("name") as lease:
            assert lease.remaining > 0
        assert proxy.accepted > accepted


def received(server):
    [count] = [line for line in server.ask(b"srvr").splitlines() if line.startswith("Received: ")]
    return int(count.removeprefix("Received: "))


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
class TestForks:
    @pytest.fixture(params=FORKS)
    def fork(self, request):
        return FORKS[request.param]

    def test_a_child_has_a_session_of_its_own(self, zookeeper_locks, behind, fork):
        with lock("name") as lease:
            assert in_a_fork(lambda: lease.state, fork) == "lost"
            busy = in_a_fork(lambda: zookeeper_locks.acquire(lock_request("name"), queue=False).token, fork)
            assert busy == lease.token
            child = in_a_fork(lambda: behave_as_child(zookeeper_locks), fork)
            assert child == "True"
            lease.ensure_held()
            [path] = [path for path in behind.places() if lease.token in path]
            assert behind.stat(path)

    def test_a_child_that_leaves_by_sys_exit_takes_nothing_with_it(self, zookeeper_locks, behind):
        """It calls what is registered with atexit."""
        with lock("name") as lease:
            pid = os.fork()
            if not pid:
                signal.alarm(60)
                try:
                    sys.exit(0)
                finally:
                    import atexit

                    atexit._run_exitfuncs()
                    os._exit(0)
            _, status = os.waitpid(pid, 0)
            assert status == 0
            lease.ensure_held()
            lease.renew()
            assert len(behind.places()) == 1
            assert threads_of("zookeeper")
        assert behind.places() == []


def behave_as_child(backend):
    mine = lock_request("of the child")
    is_granted = isinstance(backend.acquire(mine, queue=False), Grant)
    return is_granted and backend.release(mine)


class TestNobodyAnswers:
    def test_an_error_says_so_in_time(self, configured):
        configured("127.0.0.1:1", options={"request_timeout": 0.5})
        began = time.monotonic()
        with pytest.raises(LockBackendError, match="ZooKeeper at 127.0.0.1:1 did not answer: .*refused"):
            lock("name", wait=0).__enter__()
        assert time.monotonic() - began < PATIENCE

    def test_after_a_while_nobody_waits_for_it(self, configured):
        backend = configured("127.0.0.1:1", options={"request_timeout": 0.5})
        for _ in range(2):
            with pytest.raises(LockBackendError) as refused:
                backend.acquire(lock_request(), queue=False)
        assert not refused.value.was_asked
        [outage] = backend.outages()
        assert outage.server == "127.0.0.1:1"

    def test_it_is_found_when_it_is_back(self, zookeeper, proxy, root, configured):
        proxy.refuse()
        backend = configured(f"{proxy.address}{root}", options={"request_timeout": 1.0})
        with pytest.raises(LockBackendError):
            backend.acquire(lock_request(), queue=False)
        proxy.accept()
        eventually(lambda: client_of(backend).is_connected)
        assert backend.outages() == ()
        insist(lambda: backend.look(["name"]))

    def test_a_server_that_was_killed_and_started_again_keeps_sessions_and_locks(self, configured, root):
        java = program()
        with Server(java) as server:
            backend = configured(f"{server.address}{root}", timeout=30.0)
            with lock("name") as lease:
                server.kill()
                eventually(lambda: lease.state is State.UNKNOWN)
                server.start()
                server.wait()
                eventually(lambda: lease.state is State.HELD, 60)
                [[info]] = backend.look(["name"])
                assert info.token == lease.token
                assert isinstance(backend.acquire(lock_request(), queue=False), LockInfo)
            with lock("name") as later:
                assert later.fence > lease.fence
            client_of(backend).close()
            locks.close()
            eventually(lambda: not threads_of("zookeeper"))
