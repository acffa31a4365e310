"""S16: what a server that answers nobody costs its callers, once its circuit breaker is open."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from itertools import pairwise

import pytest

from django_distlock import LockBackendError, State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.config import Location
from django_distlock.testing.tools import WAYS, calling, locked_names
from django_distlock.utils import threads
from tests.support.inside import clients_of_loops
from tests.support.scripted import Scripted
from tests.support.stores import REDIS, REDIS_CLUSTER, REDLOCK
from tests.support.tools import PATIENCE, eventually, insist, renewer_of

pytestmark = pytest.mark.seconds(1)

TIMEOUT = 0.3  # seconds
BRIEF = 5.0  # seconds, far below PATIENCE, for what would wait as long as it is allowed to


@pytest.fixture(scope="module")
def three():
    with Scripted() as one, Scripted() as two, Scripted() as three:
        yield one, two, three


@pytest.fixture
def server(three):
    return three[0]


@pytest.fixture
def use(three, settings, monkeypatch):
    """``use(store)`` is the backend on the servers, whose breakers are probed quickly."""
    monkeypatch.setattr(Timing, "probe_pause_shortest", 0.02)
    monkeypatch.setattr(Timing, "probe_pause_longest", 0.05)
    for one in three:
        one.heal()

    def use(store="server", **options):
        timeouts = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT, **options}
        urls = [one.url for one in three]
        entry = {
            "server": {"BACKEND": REDIS, "LOCATION": urls[0], "OPTIONS": timeouts},
            "cluster": {
                "BACKEND": REDIS_CLUSTER, "LOCATION": urls[0], "OPTIONS": {"failover_timeout": 0.6, **timeouts},
            },
            "quorum": {
                "BACKEND": REDLOCK, "LOCATION": urls,
                "OPTIONS": {"node_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT},
            },
        }[store]  # fmt: skip
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        return locks["default"]

    yield use
    for one in three:
        one.heal()
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    locks.close()
    eventually(lambda: not probes(three))


def hang(*servers):
    for server in servers:
        server.answer = lambda words: Scripted.SILENCE


def opened(backend, calls=None):
    """What callers meet until the breaker is open."""

    def is_open():
        with pytest.raises(LockBackendError):
            (calls or (lambda target: target))(lock("opening", wait=None)).acquire()
        return backend.outages()

    eventually(is_open)


def is_probe(thread, servers):
    """Whether it asks one of these: threads of other tests may still ask servers that are gone."""
    name = thread.name
    return name.startswith("distlock-probe-") and any(f":{one.port}/" in name for one in servers)


def probes(servers):
    return [thread for thread in threading.enumerate() if is_probe(thread, servers)]


@pytest.mark.parametrize("store", ["server", "cluster", "quorum"])
@pytest.mark.parametrize("fault", ["refuses", "hangs"])
def test_callers_fail_at_once_without_a_question(use, three, calls, monkeypatch, store, fault):
    monkeypatch.setattr(Timing, "probe_idle", 600.0)  # so that only an answer ends the outage
    backend = use(store)
    if fault == "hangs":
        hang(*three)
    else:
        for server in three:
            server.refuse()
    opened(backend, calls)
    began = time.monotonic()
    for server in three:
        server.seen.clear()
    for wait in (0, 10, None):
        for call in (
            lambda wait=wait: calls(lock("name", wait=wait)).acquire(),
            lambda: calls(backend).look(["name"]),
            lambda: locked_names(calls(backend)),
        ):
            with pytest.raises(LockBackendError, match="does not answer") as caught:
                call()
            assert not caught.value.was_asked
            assert not caught.value.is_final
    assert time.monotonic() - began < BRIEF
    assert {word for server in three for word in server.seen} <= {b"PING", b"SCRIPT"}
    for server in three:
        server.heal()
    eventually(lambda: not backend.outages())
    handle = calls(lock("name"))
    assert insist(handle.acquire)
    handle.release()


def test_threads_and_tasks_share_it(use, server):
    backend = use()
    server.refuse()
    with pytest.raises(LockBackendError):
        lock("name").acquire()
    for way in WAYS:
        with calling(way) as calls, pytest.raises(LockBackendError) as caught:
            calls(lock("name")).acquire()
        assert not caught.value.was_asked
    assert [outage.server for outage in backend.outages()] == [backend.location.text]


@pytest.mark.parametrize("answer", ["LOADING not now", "READONLY not here", "NOREPLICAS not now", "OOM no memory"])
def test_a_server_that_says_why_is_there(use, server, calls, answer):
    backend = use()
    server.fail(answer, on=(b"EVALSHA",))
    for _ in range(3):
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name")).acquire()
        assert caught.value.was_asked
    assert not backend.outages()


def test_a_caller_in_a_hurry_does_not_open_it(use, server, calls):
    """Each of its attempts is over before the timeout of the socket."""
    backend = use(socket_timeout=20.0, socket_connect_timeout=20.0)
    insist(calls(lock("warm")).locked)
    hang(server)
    with pytest.raises(LockBackendError):
        calls(lock("name", wait=0)).acquire()
    assert not backend.outages()


@pytest.mark.seconds(4)
def test_a_slow_server_is_there_however_many_are_in_a_hurry(use, server, calls, monkeypatch):
    """It answers within the timeout of the socket, for which none of them waits; who waits is granted the lock."""
    slow = 0.4
    monkeypatch.setattr(Timing, "shortest_call", slow / 4)
    backend = use(socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE)
    server.delay = slow
    for _ in range(20):
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=0)).acquire()
        assert caught.value.was_asked
        assert not backend.outages()
    handle = calls(lock("name"))
    assert handle.acquire()
    handle.release()
    eventually(lambda: not probes([server]))


def test_those_in_a_hurry_find_out_by_probes_that_it_hangs(use, server, calls, monkeypatch, probed_at):
    monkeypatch.setattr(Timing, "shortest_call", 0.05)
    monkeypatch.setattr(Timing, "call_grace", 0.05)
    backend = use(socket_timeout=1.0, socket_connect_timeout=1.0)
    hang(server)  # before anything is sent that would have to be taken back in the background

    def is_open():
        with pytest.raises(LockBackendError):
            calls(lock("name", wait=0)).acquire()
        return backend.outages()

    eventually(is_open)
    assert len(probed_at) >= 2


def test_idle_connections_that_died_do_not_open_it(use, server, calls, monkeypatch):
    monkeypatch.setattr(Timing, "idle_trusted", 0.0)
    backend = use()
    insist(calls(lock("warm")).locked)
    server.forget()
    handle = calls(lock("name"))
    assert handle.acquire()
    assert not backend.outages()
    handle.release()


@pytest.mark.parametrize("store", ["server", "cluster", "quorum"])
def test_a_release_goes_to_the_background_and_its_caller_goes_on(use, three, calls, store, caplog):
    backend = use(store)
    handles = [lock(f"name{number}") for number in range(3)]
    for handle in handles:
        assert insist(calls(handle).acquire)
    for server in three:
        server.refuse()
    opened(backend, calls)
    for handle in handles:
        calls(handle).release()
        assert handle.lease is None
    assert renewer_of(backend).is_cleaning
    assert "could not be released" not in caplog.text
    for server in three:
        server.heal()
    eventually(lambda: not renewer_of(backend).is_cleaning)
    assert any(b"EVALSHA" in server.seen for server in three)


@pytest.mark.seconds(4)
def test_renewals_are_not_held_back(use, server, calls, monkeypatch):
    """So a lease is kept by a server that answers before the next probe, and such an answer closes the breaker."""
    monkeypatch.setattr(Timing, "probe_pause_shortest", BRIEF)
    monkeypatch.setattr(Timing, "probe_pause_longest", BRIEF)
    backend = use()
    with lock("name", ttl=3.0) as lease:
        server.refuse()
        opened(backend, calls)
        eventually(lambda: lease.state is State.UNKNOWN)
        assert backend.outages()
        server.heal()
        eventually(lambda: lease.state is State.HELD)
        assert not backend.outages()
        calls(lease).renew()


def test_the_server_is_asked_again_over_new_connections_and_by_the_background_alone(use, three):
    server, backend = three[0], use()
    hang(server)
    opened(backend)
    server.seen.clear()
    eventually(lambda: server.seen.count(b"PING") + server.failed >= 3)
    assert [thread.name for thread in probes(three)] == [f"distlock-probe-{backend.location.text}"]
    server.answer = lambda words: None
    eventually(lambda: not backend.outages())
    eventually(lambda: not probes(three))


@pytest.fixture
def probed_at(server, monkeypatch):
    """When the server was asked by probes, on ``time.monotonic()``."""
    moments, connected = [], Location.connected

    def connect(location, **arguments):
        if is_probe(threading.current_thread(), [server]):
            moments.append(time.monotonic())
        return connected(location, **arguments)

    monkeypatch.setattr(Location, "connected", connect)
    return moments


def test_the_server_is_asked_after_a_pause(use, server, monkeypatch, probed_at):
    monkeypatch.setattr(Timing, "probe_pause_shortest", 0.3)
    monkeypatch.setattr(Timing, "probe_pause_longest", 0.4)
    backend = use()
    server.refuse()
    began = time.monotonic()
    opened(backend)
    eventually(lambda: len(probed_at) >= 4)
    assert all(later - earlier >= 0.3 for earlier, later in pairwise([began, *probed_at]))


def test_one_line_in_the_log_for_each_change(use, server, calls, caplog):
    caplog.set_level(logging.INFO, "django_distlock")
    backend = use()
    server.refuse()
    opened(backend, calls)
    for _ in range(20):
        with pytest.raises(LockBackendError):
            calls(lock("name", wait=1)).acquire()
    server.heal()
    eventually(lambda: "answers again" in caplog.text)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"Lock backend 'default': {backend.location.text} does not answer (")
    assert second == f"Lock backend 'default': {backend.location.text} answers again."


def test_a_check_asks_the_server_itself(proxied, proxy, calls, monkeypatch):
    monkeypatch.setattr(Timing, "probe_pause_shortest", PATIENCE)
    monkeypatch.setattr(Timing, "probe_pause_longest", PATIENCE)
    proxy.refuse()
    opened(proxied)
    assert any(result.is_error for result in calls(proxied).check())
    proxy.accept()
    assert proxied.outages()
    assert not any(result.is_error for result in calls(proxied).check())
    assert not proxied.outages()


@pytest.mark.seconds(10)
@pytest.mark.parametrize("store", ["cluster", "quorum"])
def test_a_check_asks_whatever_the_breaker_says(use, three, calls, store, monkeypatch):
    monkeypatch.setattr(Timing, "probe_pause_shortest", 2 * BRIEF)
    monkeypatch.setattr(Timing, "probe_pause_longest", 2 * BRIEF)
    backend = use(store)
    for server in three:
        server.refuse()
    opened(backend, calls)
    for server in three:
        server.heal()
    assert backend.outages()
    calls(backend).check()
    # A quorum does not wait for the last of its nodes, which a loop hears while it runs: here, for the look.
    eventually(lambda: calls(backend).look(["name"]) == [[]] and not backend.outages(), BRIEF)


def test_without_a_thread_each_caller_asks(use, server, calls, monkeypatch):
    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    backend = use()
    server.refuse()
    monkeypatch.setattr(threads, "new_thread", lambda *_: Refused())
    for _ in range(2):
        with pytest.raises(LockBackendError) as caught:
            calls(backend).look(["name"])
        assert caught.value.was_asked
    assert not backend.outages()


def test_a_backend_that_is_closed_is_not_asked_for(use, three, caplog):
    backend = use()
    three[0].refuse()
    opened(backend)
    eventually(lambda: probes(three))
    backend.close()
    assert not backend.outages()
    eventually(lambda: not probes(three))
    assert "answers again" not in caplog.text


def test_a_server_of_which_nobody_wants_anything_is_asked_no_more(use, three, monkeypatch, caplog):
    monkeypatch.setattr(Timing, "probe_idle", 0.3)
    backend = use()
    three[0].refuse()
    opened(backend)
    for _ in range(4):
        time.sleep(0.1)
        with pytest.raises(LockBackendError):
            backend.look(["name"])
    assert probes(three)
    eventually(lambda: not probes(three))
    assert not backend.outages()
    assert "answers again" not in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_begins_with_closed_ones(use, server):
    backend = use()
    server.refuse()
    opened(backend)
    child = os.fork()
    if not child:
        os._exit(len(locks["default"].outages()) + len(backend.outages()))
    assert os.waitpid(child, 0)[1] == 0
    assert backend.outages()


def test_a_waiter_stays_in_the_queue(proxied, proxy, monkeypatch, calls, caplog):
    monkeypatch.setattr(Timing, "look_interval", 0.1)
    monkeypatch.setattr(Timing, "probe_pause_shortest", 0.02)
    monkeypatch.setattr(Timing, "probe_pause_longest", 0.05)
    granted = threading.Event()

    def wait():
        with lock("name", wait=PATIENCE):
            granted.set()

    with lock("name", ttl=60):
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        eventually(lambda: proxied.count_waiters(["name"]) == [1])
        proxy.refuse()
        opened(proxied, calls)
        time.sleep(0.5)  # in which it looks
        proxy.accept()
        eventually(lambda: not proxied.outages())
    assert granted.wait(PATIENCE)
    waiter.join()


def test_clients_that_queue_for_a_connection_fail_with_it(use, server):
    """Of one loop: they are woken."""
    backend = use(max_connections=1)

    async def main():
        hang(server)
        began = time.monotonic()
        results = await asyncio.gather(
            *(lock("name:{}", number, wait=None).aacquire() for number in range(20)), return_exceptions=True
        )
        assert all(isinstance(result, LockBackendError) for result in results)
        assert time.monotonic() - began < 20 * TIMEOUT
        assert clients_of_loops(backend)

    asyncio.run(main())
