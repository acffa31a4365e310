"""How a new format is rolled out: releases that read and write different ones work beside each other, under accidents.

First a release that reads format 2, and writes 1 as before; then one that writes 2. The first release, which reads
1 alone, says what it meets where it stays too long. ``DISTLOCK_SOAK=600`` makes a run last ten minutes.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support.accidents import Accidents
from tests.support.checkouts import copy_that_reads_both
from tests.support.history import faults, left_behind, most_at_once
from tests.support.peers import PROLOGUE, RANDOM_CALLS, Peer
from tests.support.programs import ROOT
from tests.support.tools import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(7)]

SOAK = float(os.environ.get("DISTLOCK_SOAK", "2"))
NEWER = "was written by a newer version of django-distlock; bring all processes to that version"

# Each wait is far longer than it may take, so that one whose end comes was lost. A busy machine may grant in a second.
# Beside the random calls, which are too short for it, each process holds one lease until it was renewed.
WORKER = f"""
folder, seed = order.split(" ")
names, slots, waits, ttls = ("several", "several", "one"), {{"several": [SLOTS]}}, (0, 60), (2, 4)
holds, pause, threads = (0, 0.001, 0.005, 0.02, 0.1), 0.001, 2
def hold_until_renewed():
    try:
        with lock("several", slots=SLOTS, wait=60, ttl=5, on_lost="log") as lease:
            began = time.monotonic()
            while lease.state == "held" and time.monotonic() + lease.remaining < began + 5.5:
                time.sleep(0.01)
    except LockError as error:
        journal.failed(error)
renewing = threading.Thread(target=hold_until_renewed)
def begin():
    say("at work")
    ends = told()
    renewing.start()
    return ends
{RANDOM_CALLS}
renewing.join()
say("out")
"""


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    return {
        "reads 1": ROOT,
        "reads both": copy_that_reads_both(tmp_path_factory.mktemp("both"), writes=1),
        "writes 2": copy_that_reads_both(tmp_path_factory.mktemp("second"), writes=2),
    }


@pytest.fixture
def peers(valkey, store, releases):
    """Starts processes of a release. ``slots``: how many they allow of one of the locks."""
    started = []

    def start(release, slots):
        where = f"import sys; sys.path.insert(0, {str(releases[release])!r})\n"
        is_there = "import django_distlock; assert django_distlock.__file__.startswith(sys.path[0])\n"
        worker = WORKER.replace("SLOTS", str(slots))
        started.append(Peer(valkey.url, worker, 30.0, where + is_there + PROLOGUE, like="libraries"))
        return started[-1]

    yield start
    for peer in started:
        peer.end()


@pytest.mark.parametrize("slots", [(3, 3), (3, 1)])
@pytest.mark.parametrize("deploy", [("reads 1", "reads both"), ("reads both", "writes 2")])
def test_a_deploy(peers, store, tmp_path, deploy, slots):
    """Nobody is told of the other release. Who wants one slot has it alone, beside those that allow three, too."""
    fleet = [peers(*each) for each in [*zip(deploy, slots, strict=True)] * 2]
    events = run(fleet, store, tmp_path, granted=fleet)
    assert failures(events) == {}
    assert {event.slots for event in events if event.kind == "grant" and event.name == "several"} == {*slots}
    assert most_at_once(events) > 1
    for of_a_release in (fleet[::2], fleet[1::2]):
        assert renewing_pids(events) & {peer.process.pid for peer in of_a_release}


def test_a_process_that_missed_the_first_deploy_says_so(peers, store, tmp_path):
    """The others work on. They wait longer, for what it cannot hand on runs out."""
    old = [peers("reads 1", 3) for _ in range(2)]
    newer = [peers(release, 3) for release in ("reads both", "writes 2", "writes 2")]
    told = failures(run([*old, *newer], store, tmp_path, granted=newer))
    assert told
    assert {pid for pid, _ in told} <= {peer.process.pid for peer in old}
    assert all(NEWER in text for _, text in told)


def run(fleet, store, folder, granted):
    """Each of ``granted`` gets a lock, but for one that may be killed."""
    for peer in fleet:
        peer.says("ready", 3 * PATIENCE)
    events = Accidents(fleet, folder, spared=len(fleet) - 1).run(SOAK, grants=30, to=granted)
    assert faults(events) == []
    pids = {event.pid for event in events if event.kind == "grant"}
    assert len(pids & {peer.process.pid for peer in granted}) >= len(granted) - 1
    eventually(lambda: not left_behind(store.keys()), 2 * PATIENCE)
    return events


def failures(events):
    """How often each process was told what."""
    return Counter((event.pid, event.text) for event in events if event.kind == "failure")


def renewing_pids(events):
    """Processes that had a lease for longer than it takes to confirm one that a message handed over."""
    granted_at = {(event.pid, event.fence): event.at for event in events if event.kind == "grant"}
    renewals = [event for event in events if event.kind == "renewal"]
    return {event.pid for event in renewals if event.at > granted_at[event.pid, event.fence] + 0.5}
