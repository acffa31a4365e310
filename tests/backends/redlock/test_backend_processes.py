"""Processes and nodes that are killed, stopped and started again; and what one early restart breaks.

``DISTLOCK_SOAK=600`` makes the random run last ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack

import pytest

from django_distlock import State, lock, locks
from django_distlock.types import Grant, LockInfo
from django_distlock.utils.clock import clock
from tests.support.forkserver import Program
from tests.support.history import Event, faults, grants_in, read
from tests.support.leases import deadline_of
from tests.support.peers import RANDOM_CALLS
from tests.support.quorum import Quorum
from tests.support.tools import PATIENCE, eventually, lock_request

pytestmark = [pytest.mark.slow, pytest.mark.seconds(3)]

REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
LONGEST_TTL = 0.8
SOAK = float(os.environ.get("DISTLOCK_SOAK", "6"))

WORKER = f"""
import sys
from django.conf import settings
folder, seed, ends, *urls = sys.argv[1:]
settings.configure(DISTRIBUTED_LOCKS={{"default": {{
    "BACKEND": "django_distlock.backends.redlock.RedlockBackend", "LOCATION": urls,
    "OPTIONS": {{"retry_delay": (0.005, 0.05), "socket_connect_timeout": 0.2}}}}}})
from django_distlock import LockError, lock
names, slots, waits, ttls = ("one", "two"), {{}}, (0, 0.3, 2), (0.4, 0.6, 0.8)
holds, pause, threads = (0, 0.001, 0.01, 0.1, 0.5), 0.01, 1
def begin():
    return ends
{RANDOM_CALLS}
"""


@pytest.fixture
def quorum():
    with Quorum() as quorum:
        yield quorum


class Accidents:
    """What happens to nodes: never to more than two at once, and a node that lost its data stays away long enough."""

    def __init__(self, quorum, dice):
        self.quorum, self.dice = quorum, dice
        self.back_at = {}  # node -> when it goes on, or is started again
        self.counts = {"kill": 0, "stop": 0}

    def befall(self):
        healthy = [node for node in range(5) if node not in self.back_at]
        if len(self.back_at) < 2 and self.dice.random() < 0.5:
            node, kind = self.dice.choice(healthy), self.dice.choice(("kill", "stop"))
            self.counts[kind] += 1
            if kind == "kill":
                self.quorum.kill(node)
                self.back_at[node] = time.monotonic() + LONGEST_TTL
            else:
                self.quorum.stop(node)
                self.back_at[node] = time.monotonic() + self.dice.choice((0.05, 0.4, 1.5))

    def end(self, *, all_of_them=False):
        for node, back_at in list(self.back_at.items()):
            if all_of_them or time.monotonic() >= back_at:
                time.sleep(max(0.0, back_at - time.monotonic()))
                if node in self.quorum.killed:
                    self.quorum.start(node)
                else:
                    self.quorum.go_on(node)
                del self.back_at[node]


def test_random_processes_nodes_and_accidents(quorum, tmp_path):
    """S1, S4 and S12 while nodes are killed, stopped and, after the longest TTL, started again without data."""
    seed = random.randrange(10**9)
    dice = random.Random(seed)
    print(f"seed {seed}")
    ends = time.monotonic() + SOAK - 1
    latest = ends + 10 * PATIENCE
    accidents = Accidents(quorum, dice)
    with ExitStack() as stack:
        workers = []

        def start():
            arguments = [tmp_path, dice.random(), latest, *quorum.urls]
            process = Program(["-W", "error", "-c", WORKER, *arguments])
            workers.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)

        for _ in range(3):
            start()
        killed = 0
        while (now := time.monotonic()) < ends or (
            now < latest and (len(grants_in(tmp_path)) < 30 or not all(accidents.counts.values()))
        ):
            time.sleep(dice.random() * 0.3)
            accidents.befall()
            accidents.end()
            if dice.random() < 0.05 and killed < 3:
                workers.pop(dice.randrange(3)).kill()
                killed += 1
                start()
        accidents.end(all_of_them=True)
        time.sleep(1)  # with all nodes
        (tmp_path / "over").touch()
        for worker in workers:
            assert worker.wait(3 * PATIENCE) == 0
    events = read(tmp_path)
    grants = [event for event in events if event.kind == "grant"]
    print(f"{len(grants)} grants, {accidents.counts}, {killed} processes killed")
    assert faults(events) == []
    assert len(grants) >= 30
    assert min(accidents.counts.values()) >= 1
    eventually(lambda: not any(quorum.all_keys()))


class TestRestart:
    """The one rule that Redlock leaves to those who run the nodes: stay away for the longest TTL after a crash."""

    @pytest.fixture
    def two_clients(self, quorum, settings):
        entry = {
            "BACKEND": REDLOCK,
            "LOCATION": quorum.urls,
            "TTL": 5,
            "OPTIONS": {"node_timeout": 0.5, "socket_connect_timeout": 0.5},
        }
        settings.DISTRIBUTED_LOCKS = {"first": entry, "second": entry}
        yield
        locks.close()

    @pytest.fixture
    def held_by_three(self, quorum, two_clients):
        """A lease on nodes 0, 1 and 2, because 3 and 4 are down just then; renewal is off, so it stays like that."""
        quorum.kill(3)
        quorum.kill(4)
        handle = lock("name", using="first", renew=False, on_lost="log")
        with handle as lease:
            quorum.start(3)
            quorum.start(4)
            yield lease

    def test_at_once_lets_two_hold_the_lock(self, quorum, held_by_three):
        first = held_by_three
        quorum.kill(2)
        quorum.start(2)
        with lock("name", using="second", wait=1) as second:
            assert (first.state, second.state) == (State.HELD, State.HELD)
            history = [
                Event("grant", clock() - 0.1, 1, "name", first.fence, deadline=deadline_of(first)),
                Event("grant", clock(), 2, "name", second.fence, deadline=deadline_of(second)),
            ]
            [fault] = faults(history)
            assert "two holders at once" in fault
            assert second.fence > first.fence  # so that a resource that compares numbers is safe even now

    def test_at_once_is_warned_of(self, quorum, held_by_three):
        quorum.kill(2)
        quorum.start(2)
        young = [
            finding.message
            for finding in locks["second"].check()
            if "less than the longest TTL of 5 s" in finding.message
        ]
        assert any(str(quorum.nodes[2].socket) in text for text in young)

    def test_after_the_longest_ttl_does_not(self, quorum, held_by_three):
        first = held_by_three
        quorum.kill(2)
        assert isinstance(locks["second"].acquire(lock_request("name"), queue=False), LockInfo)
        time.sleep(first.ttl)
        assert first.state is State.LOST  # by its own clock, before anybody else can have it
        quorum.start(2)
        assert isinstance(locks["second"].acquire(lock_request("name"), queue=False), Grant)
