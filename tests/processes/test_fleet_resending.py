"""Real beats that die, freeze or lose their broker between the claim of a run and its mark, and who sends it then.

The rules are proved in ``test_beat_resending.py``, on a clock that the test moves; here processes do the same. Some of
them take long and are done where ``DISTLOCK_SOAK`` is set, as in ``test_fleet.py``.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import Counter

import celery
import pytest

from example_project.valkey import Valkey
from tests.support import rabbitmq
from tests.support.brokers import broker_that_restarts
from tests.support.fleet.harness import Fleet
from tests.support.proxy import Proxy
from tests.support.tools import eventually

pytestmark = pytest.mark.seconds(5)

if celery.VERSION[:2] < (5, 7):
    pytest.skip("beat's schedulers need Celery 5.7", allow_module_level=True)

slow = pytest.mark.skipif("DISTLOCK_SOAK" not in os.environ, reason="a long fleet: DISTLOCK_SOAK=600 runs it")
PERIOD = 3.0
RESEND_AFTER = 4.0
SETTING = {"AT_LEAST_ONCE": ["wall"], "RESEND_AFTER": RESEND_AFTER}
BEATS = ["b1", "b2", "b3"]
ENTRIES = {"wall": ("wall", PERIOD), "plain": ("wall", PERIOD)}


@pytest.fixture
def fleets(valkey, own_valkey, tmp_path):
    started = []

    def start(entries=ENTRIES, **options):
        started.append(Fleet(tmp_path, valkey, own_valkey(), entries, beat=SETTING, **options))
        return started[-1].__enter__()

    yield start
    for fleet in started:
        fleet.__exit__(AssertionError, None, None)


@pytest.fixture
def broker(request):
    """None: it is where the journal is."""
    return None if request.param == "redis" else request.getfixturevalue("rabbitmq").url


def windows(fleet, entry="wall"):
    """How often each run was sent, by the window in which it was due."""
    return Counter(int(at // PERIOD) for at in fleet.scheduled(entry))


def wait_for_a_send(fleet, entry="wall", more=1):
    before = len(fleet.scheduled(entry))
    eventually(lambda: len(fleet.scheduled(entry)) >= before + more, 60)


def check_all_sent(fleet, begin, end=None):
    """No run between two windows is missing; those that were sent twice are returned."""
    counts = windows(fleet)
    assert [window for window in range(begin, end or max(counts)) if window not in counts] == []
    return [window for window, count in counts.items() if count > 1]


def is_sent_what_was_claimed(fleet):
    """Whether each claim of a run led to a message; no two claims are of one run."""
    claims = [claim for claim in fleet.witness.claims if claim.entry == "wall" and claim.by]
    return len(claims) == len(set(fleet.scheduled("wall")))


def worked(fleet):
    return fleet.journal.llen("worked")


@pytest.mark.parametrize(
    ("moment", "broker"),
    [
        ("before", "redis"),
        ("after", "rabbitmq"),
        pytest.param("after", "redis", marks=slow),
        pytest.param("before", "rabbitmq", marks=slow),
    ],
    indirect=["broker"],
)
def test_a_beat_is_killed_before_it_sends_or_before_its_mark(moment, fleets, broker):
    fleet = fleets({"wall": ("wall", PERIOD)}, broker=broker)
    fleet.start(beats=3, workers=1)
    wait_for_a_send(fleet, more=2)
    begin = min(windows(fleet))
    by, due = fleet.strike_next(moment, signal.SIGKILL)
    fleet.processes[by].wait(30)
    times = 1 if moment == "before" else 2
    eventually(lambda: fleet.scheduled("wall").count(due) == times, 60)
    wait_for_a_send(fleet)
    assert check_all_sent(fleet, begin) == ([] if moment == "before" else [int(due // PERIOD)])
    # What was sent ran; a run that was sent twice was done once.
    done = len(windows(fleet))
    eventually(lambda: worked(fleet) >= done, 30)
    assert worked(fleet) <= len(windows(fleet))


@pytest.mark.seconds(15)
def test_a_beat_is_frozen_between_claim_and_message(fleets):
    fleet = fleets({"wall": ("wall", PERIOD)})
    fleet.start(beats=3, workers=1)
    wait_for_a_send(fleet, more=2)
    begin = min(windows(fleet))
    by, due = fleet.strike_next("before", signal.SIGSTOP)
    eventually(lambda: fleet.scheduled("wall").count(due) == 1, 60)
    assert check_all_sent(fleet, begin) == []
    fleet.send_signal(by, signal.SIGCONT)
    eventually(lambda: fleet.scheduled("wall").count(due) == 2, 60)
    eventually(lambda: fleet.journal.llen("refused") == 1, 60)
    wait_for_a_send(fleet, more=2)
    assert check_all_sent(fleet, begin) == [int(due // PERIOD)]


@pytest.mark.seconds(18)
def test_all_beats_die_before_they_send_and_others_start(fleets):
    fleet = fleets({"wall": ("wall", 10.0)})
    fleet.start(beats=2)
    wait_for_a_send(fleet)
    _, struck = fleet.strike_next("before", signal.SIGKILL)
    for name in ("b1", "b2"):
        fleet.end(name)
    assert struck not in fleet.scheduled("wall")
    for name in ("b3", "b4"):
        fleet.beat(name)
    eventually(lambda: struck in fleet.scheduled("wall"), 60)
    wait_for_a_send(fleet)
    assert fleet.scheduled("wall").count(struck) == 1


@pytest.mark.seconds(18)
def test_a_beat_that_loses_its_broker_leaves_the_runs_to_the_others(fleets, own_valkey, tmp_path_factory):
    server = own_valkey()
    with Proxy(server.socket, tmp_path_factory.mktemp("p")) as proxy:
        fleet = fleets(broker=f"redis+socket://{server.socket}?virtual_host=1")
        fleet.beat("b1", broker=f"redis+socket://{proxy.socket}?virtual_host=1")
        fleet.beat("b2")
        fleet.wait_for(2)
        wait_for_a_send(fleet)
        eventually(lambda: [one for one in fleet.sends() if one.by == "b1"], 120)
        begin = min(windows(fleet))
        proxy.refuse()
        wait_for_a_send(fleet, more=6)
        lost = sorted(set(range(begin, max(windows(fleet, "plain")))) - set(windows(fleet, "plain")))
        assert len(lost) <= 1
        proxy.accept()
        since = time.time()
        eventually(lambda: [one for one in fleet.sends(begin=since) if one.by == "b1"], 120)
        eventually(lambda: is_sent_what_was_claimed(fleet), 60)
        check_all_sent(fleet, begin)
        assert fleet.is_alive("b1")
        assert "leaves all runs to others" in fleet.log("b1") or not lost


@pytest.fixture
def server_that_stops(tmp_path_factory):
    server = Valkey(folder=tmp_path_factory.mktemp("v")).start()
    yield server
    server.stop()


@slow
def test_a_broker_that_is_down_for_all_beats(fleets, server_that_stops):
    server = server_that_stops
    fleet = fleets(broker=f"redis+socket://{server.socket}?virtual_host=1")
    fleet.start(beats=3)
    wait_for_a_send(fleet, more=2)
    server.stop()
    down = time.time()
    eventually(lambda: any("leaves all runs to others" in fleet.log(name) for name in BEATS), 60)
    time.sleep(max(0.0, down + 2 * PERIOD - time.time()))
    server.start()
    wait_for_a_send(fleet, more=3)
    assert all(fleet.is_alive(name) for name in BEATS)
    # Runs that nobody could claim are merged into one, as ever.
    eventually(lambda: is_sent_what_was_claimed(fleet), 60)


@pytest.fixture
def restarting(request, tmp_path_factory):
    with broker_that_restarts(request.param, request, tmp_path_factory.mktemp("b")) as broker:
        yield broker


@pytest.mark.parametrize(
    ("restarting", "queue_type"),
    [
        ("redis", None),
        pytest.param("rabbitmq", "classic", marks=slow),
        pytest.param("rabbitmq", "quorum", marks=slow),
    ],
    indirect=["restarting"],
)
def test_a_broker_that_restarts_with_runs_in_its_queue(fleets, restarting, queue_type):
    """Those are done once, and so is what is sent later."""
    of_its_own = {"task_default_queue": uuid.uuid4().hex, "task_default_queue_type": queue_type, **rabbitmq.CONF}
    conf = of_its_own if queue_type else {}  # others have the same RabbitMQ
    fleet = fleets({"wall": ("wall", PERIOD)}, broker=restarting.url, conf=conf)
    fleet.start(beats=2)
    wait_for_a_send(fleet, more=2)
    restarting.stop()
    restarting.start()
    wait_for_a_send(fleet, more=2)
    assert all(fleet.is_alive(name) for name in ("b1", "b2"))
    fleet.worker("w1")
    wait_for_a_send(fleet)
    eventually(lambda: is_sent_what_was_claimed(fleet), 60)
    for name in ("b1", "b2"):
        fleet.end(name, signal.SIGTERM)
    sent = len(set(fleet.scheduled("wall")))
    eventually(lambda: worked(fleet) >= sent, 60)
    assert worked(fleet) == sent == len(set(fleet.scheduled("wall")))
