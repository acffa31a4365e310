"""S1, S4, S7, S10 and S12 of the database backend among real processes that are killed, stopped and cut off.

``DISTLOCK_SOAK=600`` makes the random run last ten minutes.
"""

from __future__ import annotations

import json
import os
import time

import pytest
from django.db import connections

from django_distlock import lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.models import DatabaseLock
from django_distlock.utils.clock import clock
from tests.support.accidents import Accidents
from tests.support.databases import ALIAS, end_sessions, run_in, waiting
from tests.support.history import faults
from tests.support.peers import RANDOM_WORKER, Peer
from tests.support.tools import PATIENCE, ending_within, eventually, locked_names

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(4)]

SOAK = float(os.environ.get("DISTLOCK_SOAK", "3"))
GRANT = 2.0
LOOK = 1.0

PROLOGUE = """
import json, os, signal, sys, threading, time
import django
from django.conf import settings
from tests.support.mysql_driver import is_driver_there
is_driver_there()
settings.configure(
    INSTALLED_APPS=["django_distlock"],
    DATABASES={"default": {}, "locks": json.loads(sys.argv[1])},
    DISTRIBUTED_LOCKS={"default": {
        "BACKEND": "tests.support.history_in_database.RecordingDatabaseBackend", "LOCATION": "locks",
        "OPTIONS": {"timeout": 30.0}}},
)
django.setup()
from django_distlock import *
def say(*words):
    print(*words, flush=True)
def told():
    return sys.stdin.readline().strip()
def get_in_and_out():
    with lock("name", ttl=float(sys.argv[2]), wait=60, on_lost="log"):
        say("in")
        told()
    say("out")
say("ready")
order = told()
"""


@pytest.fixture(params=["postgres", "sqlite", "mariadb"])
def backend(request):
    return request.getfixturevalue(f"{request.param}_locks")


@pytest.fixture
def peers(backend):
    started = []

    def start(number=1, code="get_in_and_out()", ttl=30.0):
        known = connections.settings[ALIAS]
        database = json.dumps({key: known[key] for key in ("ENGINE", "NAME", "USER", "HOST")})
        fresh = [Peer(database, code, ttl, PROLOGUE) for _ in range(number)]
        started.extend(fresh)
        for peer in fresh:
            peer.says("ready", 3 * PATIENCE)
        return fresh

    yield start
    for peer in started:
        peer.end()


def queued(peers, backend):
    """Let them come one after another, each when the one before has its place."""
    before = waiting(backend)
    for number, peer in enumerate(peers, before + 1):
        peer.tell()
        eventually(lambda number=number: waiting(backend) == number)
    return peers


def test_processes_get_in_as_they_came(backend, peers):
    with lock("name", ttl=60):
        waiters = queued(peers(4), backend)
    for waiter in waiters:
        waiter.says("in")
        assert all(other.is_silent() for other in waiters)
        waiter.leaves()


def test_a_killed_holder_blocks_for_its_ttl_and_a_look_at_most(backend, peers):
    [holder] = peers(ttl=5)
    holder.tell()
    holder.says("in")
    [waiter] = queued(peers(), backend)
    holder.kill()
    with ending_within(5 + LOOK):
        waiter.says("in")
    waiter.leaves()


def test_a_killed_waiter_delays_others_by_a_grant_at_most(backend, peers):
    with lock("name", ttl=60):
        dead, waiter = queued(peers(2), backend)
        dead.kill()
    with ending_within(max(GRANT, Timing.waiter_expires_after) + LOOK):
        waiter.says("in")
    waiter.leaves()


def test_a_stopped_waiter_keeps_its_place(backend, peers):
    with lock("name", ttl=60):
        stopped, waiter, last = queued(peers(3), backend)
        stopped.stop()
    waiter.says("in", 2 * PATIENCE)
    stopped.go_on()
    eventually(lambda: waiting(backend) == 2)
    waiter.leaves()
    stopped.says("in")
    assert last.is_silent()
    stopped.leaves()
    last.says("in")
    last.leaves()


def test_random_processes_and_accidents(backend, peers, tmp_path):
    cut = end_sessions if backend.vendor == "postgresql" else None
    events = Accidents(peers(5, RANDOM_WORKER), tmp_path, cut=cut, spared=3).run(SOAK, grants=15)
    assert faults(events) == []
    assert len([event for event in events if event.kind == "grant"]) >= 15
    assert any(event.kind == "place" for event in events)
    eventually(lambda: locked_names(locks["default"]) == [] and not careful(backend), 2 * PATIENCE)
    assert clock() >= events[-1].at


def careful(backend):
    """Rows with living waiters or retired tokens."""

    def count(connection):
        with connection.cursor() as cursor:
            now = time.time_ns() // 1000
            cursor.execute(f"SELECT count(*) FROM {DatabaseLock._meta.db_table} WHERE careful_until > %s", [now])
            return cursor.fetchone()[0]

    return run_in(backend, count)
