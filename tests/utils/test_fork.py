"""S8: what a parent has is nothing to its child, however the child was forked."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from django_distlock import State, distributed_lock, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.types import LockRequest, new_token
from tests.support.inside import client_of, permits_of
from tests.support.leases import wait_for_renewal
from tests.support.programs import FORKS, ROOT, heard, in_a_fork
from tests.support.tools import PATIENCE, eventually, lock_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.usefixtures("long_calls"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

TTL = 6  # seconds: what is left of it at a renewal is enough for a busy machine
MONKEY = "from gevent import monkey; monkey.patch_all()\n"
FORK = {kind: f"from tests.support.programs import FORKS; fork = FORKS[{kind!r}]\n" for kind in FORKS}


@pytest.fixture(params=[*FORKS, "c without a page that the kernel clears"])
def fork(request, monkeypatch):
    kind, _, without = request.param.partition(" ")
    if without:
        monkeypatch.setattr("django_distlock.utils.fork.mark", bytearray(1))
    return FORKS[kind]


def hand_on(elsewhere):
    """Wait for a lock that somebody else releases."""
    holder = lock_request("handed on", ttl=60)
    elsewhere.acquire(holder, queue=False)
    threading.Timer(0.3, elsewhere.release, [holder]).start()
    with lock("handed on", wait=30):
        pass


def ticket_of(name):
    [[info]] = locks["default"].look([name])
    return LockRequest(name, 10.0, info.holder, token=info.token)


class TestAChild:
    def test_neither_releases_nor_believes(self, valkey_locks, fork):
        handle = lock("name")
        with handle as lease:
            assert in_a_fork(lambda: lease.state, fork) == "lost"
            assert "LockNotHeld" in in_a_fork(handle.release, fork)
            assert "LockNotHeld" in in_a_fork(lease.release, fork)
            refusal = in_a_fork(lease.ensure_held, fork)
            assert "LockLost" in refusal
            assert f"belongs to process {os.getpid()}, which forked this one" in refusal
            assert locks["default"].look(["name"])[0][0].token == lease.token
            lease.ensure_held()

    def test_releases_nothing_at_the_end_of_with(self, valkey_locks, fork):
        handle = lock("name")
        with handle as lease:
            assert in_a_fork(lambda: handle.__exit__(None, None, None), fork) == "None"
            assert locks["default"].look(["name"])[0][0].token == lease.token

    def test_releases_nothing_in_the_background(self, valkey_locks, fork):
        """As the garbage collector does, which does not wait for the store."""

        @distributed_lock("name")
        def rows():
            yield

        def let_go():
            generators.clear()
            gc.collect()
            lock("other").acquire()
            time.sleep(0.3)

        generators = [rows()]
        next(generators[0])
        [[before]] = locks["default"].look(["name"])
        in_a_fork(let_go, fork)
        assert locks["default"].look(["name"])[0][0].token == before.token

    @pytest.mark.parametrize("kind", FORK)
    def test_that_exits_normally_frees_nothing_of_its_parent(self, program, kind):
        parent = program(
            f"{FORK[kind]}with lock('name', ttl=60) as lease:\n"
            "    if not fork():\n"
            "        import atexit; atexit._run_exitfuncs(); os._exit(0)\n"
            "    os.wait(); say(lock('name').locked(), lease.state)",
        )
        assert heard(parent) == "True held"

    @pytest.mark.parametrize("kind", FORK)
    def test_does_not_renew(self, program, kind):
        parent = program(
            f"{FORK[kind]}mutex = lock('name', ttl=1); mutex.acquire()\n"
            "if not fork(): time.sleep(60)\n"
            "say('held'); os.kill(os.getpid(), 9)",
        )
        assert heard(parent) == "held"
        eventually(lambda: not lock("name").locked())

    @pytest.mark.seconds(4)
    @pytest.mark.parametrize("kind", ["valkey", "cluster", "redlock", "postgres", "locmem"])
    def test_takes_and_renews_its_own_at_once(self, request, kind, fork):
        request.getfixturevalue(f"{kind}_locks")

        def work():
            with lock("child's", ttl=TTL) as lease:
                wait_for_renewal(lease)
                return lease.state

        with lock("parent's", ttl=TTL) as lease:
            wait_for_renewal(lease)
            assert in_a_fork(work, fork) == "held"
            lease.ensure_held()

    def test_is_told_that_sqlite_cannot_follow(self, sqlite_locks):
        """Its connections cannot be closed before a fork that nobody tells of."""
        with lock("parent's"):
            assert "--lazy-apps" in in_a_fork(lambda: lock("child's").acquire(), FORKS["c"])

    @pytest.mark.parametrize("kind", ["valkey", "cluster", "postgres"])
    def test_is_woken_when_it_waits(self, request, kind, fork, monkeypatch):
        """What its parent's listener hears does not wake it."""
        backend = request.getfixturevalue(f"{kind}_locks")
        monkeypatch.setattr(Timing, "look_interval", 60)
        elsewhere = type(backend)("elsewhere", backend.settings)
        hand_on(elsewhere)  # so that the parent listens
        assert in_a_fork(lambda: hand_on(elsewhere), fork) == "None"
        hand_on(elsewhere)
        elsewhere.close()

    def test_may_use_a_backend_of_its_parent(self, valkey_locks, store, fork):
        """One that was kept: their answers must not be mixed up."""
        kept, forked = locks["default"], threading.Event()
        with lock("a"):
            names = {False: "a", True: "free"}
            parent, rounds = os.getpid(), 300

            def fork_and_say():
                if pid := fork():
                    forked.set()
                return pid

            def look():
                name = names[os.getpid() != parent]
                return {bool(kept.look([name])[0]) for _ in range(rounds)}

            reader, writer = os.pipe()
            looked = threading.Thread(target=lambda: os.write(writer, in_a_fork(look, fork_and_say).encode()))
            looked.start()
            while not forked.is_set():
                store.client_pause(30)  # so that the fork comes while the parent waits for an answer
                assert kept.look(["a"])[0]
            assert look() == {True}
            looked.join()
            assert os.read(reader, 100) == b"{False}"
            os.close(reader)
            os.close(writer)

    def test_opens_connections_of_its_own(self, valkey_locks, store, fork):
        """And those of its parent stand, whatever it does with its copies of them."""
        kept = locks["default"]
        kept.look(["name"])
        before = store.info("stats")["total_connections_received"]
        assert in_a_fork(lambda: kept.look(["name"]), fork) == "[[]]"
        kept.look(["name"])
        assert store.info("stats")["total_connections_received"] == before + 1

    def test_has_the_connections_to_open_that_its_parent_uses(self, redlock_locks, fork):
        kept = locks["default"]
        permits = permits_of(client_of(kept))
        taken = [permits.get_nowait() for _ in range(permits.qsize())]
        assert in_a_fork(lambda: kept.look(["name"]), fork) == "[[]]"
        for permit in taken:
            permits.put(permit)

    def test_of_a_busy_process_does_not_hang(self, valkey_locks):
        """Other threads are inside the backend at the moment of the fork."""
        done = threading.Event()

        def churn():
            while not done.is_set():
                with lock("churned", wait=None):
                    pass

        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_a_fork(lambda: lock("child's", wait=5).__enter__().state) == "held"
                locks["default"].release(ticket_of("child's"))
        finally:
            done.set()
            for thread in threads:
                thread.join(PATIENCE)

    def test_draws_tokens_of_its_own(self, fork):
        assert in_a_fork(new_token, fork) != new_token()

    def test_does_not_get_what_its_parent_holds(self, valkey_locks, fork):
        with lock("name") as lease:
            assert in_a_fork(lambda: lock("name", wait=0).acquire(), fork) == "False"
            assert lease.state is State.HELD


class TestContendingChildren:
    """Of a parent that has used locks and waited for one, as the master of a server that loads its application."""

    @pytest.mark.parametrize("kind", FORK)
    def test_never_hold_a_lock_together(self, program, store, kind):
        parent = program(
            f"{FORK[kind]}from tests.support.contention import contend\n"
            "contend(sys.argv[1], threads=2, seconds=0.3)\n"
            "children = [fork() or (say(dict(contend(sys.argv[1], threads=4))), os._exit(0)) for _ in range(2)]\n"
            "for child in children: os.waitpid(child, 0)\n",
        )
        for found in (ast.literal_eval(heard(parent)) for _ in range(2)):
            assert found.keys() == {"held"}
        assert parent.wait(PATIENCE) == 0


class TestGreenlets:
    """A fork copies them, and with them what its parent has in the place of threads."""

    def test_of_a_child_leave_the_leases_of_its_parent_alone(self, program):
        parent = program(
            "import logging; logging.basicConfig(stream=sys.stdout, level=logging.ERROR)\n"
            "with lock('name', ttl=6) as lease:\n"
            "    if not (child := os.fork()):\n"
            "        time.sleep(2.5); say(lease.state); os._exit(0)\n"
            "    os.waitpid(child, 0); say(lease.state, lock('name').locked())\n",
            first=MONKEY,
            stderr=subprocess.STDOUT,
        )
        assert heard(parent) == "lost"  # in the child, which says no more of it
        assert heard(parent) == "held True"

    @pytest.mark.seconds(6)
    def test_of_a_child_ask_for_nothing_in_the_name_of_its_parent(self, program, store):
        """They are inside of lock() when their parent forks."""
        parent = program(
            "import threading\n"
            "def work():\n"
            "    try:\n"
            "        with lock('name', wait=60): say('held', os.getpid() == parent)\n"
            "    except LockBackendError as error: say('forked' in str(error), os.getpid() == parent)\n"
            "parent = os.getpid()\n"
            "first = lock('name', ttl=60); first.acquire()\n"
            "worker = threading.Thread(target=work); worker.start(); time.sleep(0.5)\n"
            "child = os.fork()\n"
            "if not child: time.sleep(5); os._exit(0)\n"
            "time.sleep(2); first.release(); worker.join(); os.waitpid(child, 0)\n",
            first=MONKEY,
        )
        assert sorted([heard(parent), heard(parent)]) == ["True False", "held True"]
        assert parent.wait(PATIENCE) == 0
        assert store.keys("lock*:name") == []

    def test_of_a_child_do_not_hand_back_what_its_parent_is_granted(self, program, store):
        parent = program(
            "from tests.support.contention import contend\n"
            "contend(sys.argv[1], threads=2, seconds=0.3)\n"
            "if not os.fork(): time.sleep(2); os._exit(0)\n"
            "say('forked'); say(dict(contend(sys.argv[1], threads=4, seconds=1.0)))\n",
            first=MONKEY,
        )
        assert heard(parent) == "forked"
        other = program("from tests.support.contention import contend\nsay(dict(contend(sys.argv[1], threads=4)))")
        assert ast.literal_eval(heard(parent)).keys() == {"held"}
        assert ast.literal_eval(heard(other)).keys() == {"held"}

    @pytest.mark.seconds(6)
    @pytest.mark.parametrize("kind", ["redlock", "redis"])
    def test_of_a_child_do_not_hear_what_its_parent_is_answered(self, kind):
        """They wait for answers, and for connections, of servers that go on when the parent has forked."""
        pytest.importorskip("gevent")
        told = subprocess.run(
            [sys.executable, "-c", MONKEY + ASKS_WHEN_FORKED, kind],
            cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE,
        )  # fmt: skip
        lines = sorted(told.stdout.splitlines())
        assert lines == ["child: forked"] * 4 + ["parent: held"] * 4, told.stdout + told.stderr


ASKS_WHEN_FORKED = """
import os, signal, sys, time
import gevent
from django.conf import settings
from tests.support.quorum import Quorum
with Quorum(3 if sys.argv[1] == "redlock" else 1) as quorum:
    kind = {"redlock": "redlock.RedlockBackend", "redis": "redis.RedisBackend"}[sys.argv[1]]
    location = quorum.urls if len(quorum.urls) > 1 else quorum.urls[0]
    timeout = {"node_timeout": 20.0} if len(quorum.urls) > 1 else {"socket_timeout": 20.0}
    settings.configure(DISTRIBUTED_LOCKS={"default": {
        "BACKEND": "django_distlock.backends." + kind, "LOCATION": location, "TTL": 60,
        "OPTIONS": {"socket_connect_timeout": 20.0, **timeout}}})
    from django_distlock import LockBackendError, lock
    parent = os.getpid()
    def ask(name):
        try:
            with lock(name, wait=30) as lease:
                gevent.sleep(1.0)
                lease.ensure_held()
            outcome = "held"
        except LockBackendError as error:
            outcome = "forked" if "was forked" in str(error) else str(error)
        except BaseException as error:
            outcome = repr(error)
        # One write each, because the child's must not be mixed with its parent's.
        os.write(1, f"{'parent' if os.getpid() == parent else 'child'}: {outcome}\\n".encode())
    with lock("connects"):
        pass
    for number in range(len(quorum.urls)):
        quorum.stop(number)
    asking = [gevent.spawn(ask, str(number)) for number in range(4)]
    gevent.sleep(0.3)
    child = os.fork()
    if not child:
        gevent.joinall(asking, timeout=50)
        os._exit(0)
    gevent.sleep(0.3)
    for number in range(len(quorum.urls)):
        quorum.go_on(number)
    gevent.joinall(asking, timeout=50)
    os.waitpid(child, 0)
"""


def test_copies_of_one_memory_never_hold_a_lock_together(program, store):
    """Restored from one image, both wait under one name: each hears what the other one is granted."""
    code = (
        "from django_distlock.backends.redis import topology\n"
        "drawn, topology.new_process = topology.new_process, lambda: '0' * 26\n"
        "locks['default']; topology.new_process = drawn\n"
        "from tests.support.contention import contend\n"
        "say(dict(contend(sys.argv[1], threads=4))); time.sleep(60)"
    )
    copies = [program(code), program(code)]
    assert [ast.literal_eval(heard(copy)).keys() for copy in copies] == [{"held"}, {"held"}]
    assert len(store.pubsub_shardchannels()) == 1


def test_a_copy_that_closes_its_locks_waits_under_a_name_of_its_own(valkey_locks, store):
    with lock("name"):
        assert not lock("name", wait=0.1).acquire()
    before = set(store.pubsub_shardchannels())
    locks.close()
    with lock("name"):
        assert not lock("name", wait=0.1).acquire()
    assert set(store.pubsub_shardchannels()) - before
