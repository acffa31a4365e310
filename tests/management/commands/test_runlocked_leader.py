"""``manage.py runlocked --leader``: one copy of a program over all hosts, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.admin_pages import hold
from tests.support.forkserver import ROOT, Program
from tests.support.proxy import Proxy
from tests.support.tools import PATIENCE, eventually

pytestmark = pytest.mark.slow

# Writes down when it starts, works, and is told to end. It ends by itself where it finds the file.
WORKER = """
import os, signal, sys, time
fence, journal = os.environ["DISTLOCK_FENCE"], os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(what):
    os.write(journal, f"{fence} {what} {time.clock_gettime(time.CLOCK_BOOTTIME)}\\n".encode())
def end(*_):
    note("told")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
note("begins")
while not os.path.exists(sys.argv[2]):
    note("works")
    time.sleep(0.02)
os.unlink(sys.argv[2])
sys.exit(3)
"""


class Hosts:
    """Hosts that keep one worker running, each with a way to the store of its own, and what the workers did."""

    def __init__(self, valkey, folder, stack):
        self._valkey, self._folder, self._stack = valkey, folder, stack
        self.proxies, self.processes = [], []
        self.crash = folder / "crash"

    def start(self, *options, program=None, reaches_the_store=True):
        host = len(self.processes)
        (way := self._folder / f"{host}").mkdir()
        self.proxies.append(self._stack.enter_context(Proxy(self._valkey.socket, way)))
        if not reaches_the_store:
            self.proxies[-1].refuse()
        program = program or [sys.executable, "-c", WORKER, self._folder / f"{host}/steps", self.crash]
        process = Program(
            ["example_project/manage.py", "runlocked", "--leader", "indexer", "--ttl", "2", *options, "--", *program],
            like="celery", cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={
                **os.environ,
                "SHOP_LOCKS": self.proxies[-1].url,
                "DJANGO_SETTINGS_MODULE": "example_project.settings",
            },
        )  # fmt: skip
        self.processes.append(process)
        self._stack.callback(self._end, process)
        return process

    @staticmethod
    def _end(process):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # with which its worker ends, too
            process.wait(PATIENCE)
        process.stdout.close()
        process.stderr.close()

    def steps(self):
        """In their order: the moment, the host, the fence, what."""
        steps = []
        for host in range(len(self.processes)):
            path = self._folder / f"{host}/steps"
            for line in path.read_text().splitlines() if path.exists() else ():
                fence, what, at = line.split()
                steps.append((float(at), host, int(fence), what))
        return sorted(steps)

    def works(self, above=0):
        """The host of the worker that runs in a later term than that, and its term, once there is one."""

        def find():
            return max(
                ((fence, host) for _, host, fence, what in self.steps() if what == "works" and fence > above),
                default=None,
            )

        fence, host = eventually(find, 4 * PATIENCE)
        return host, fence


@pytest.fixture
def hosts(valkey, store, tmp_path_factory):
    with ExitStack() as stack:
        yield Hosts(valkey, tmp_path_factory.mktemp("h"), stack)


def out_of(process):
    out, errors = process.communicate(timeout=2 * PATIENCE)
    return process.returncode, out, errors


def test_a_host_that_is_cut_off_ends_its_copy_and_another_one_starts_its_own(hosts, store):
    for _ in range(3):
        hosts.start("--grace", "5")
    first, term = hosts.works()
    assert {host for _, host, _, _ in hosts.steps()} == {first}
    hosts.proxies[first].refuse()
    second, next_term = hosts.works(above=term)
    assert second != first
    eventually(lambda: any((host, what) == (first, "told") for _, host, _, what in hosts.steps()))
    begins = [(host, fence) for _, host, fence, what in hosts.steps() if what == "begins"]
    assert begins == [(first, term), (second, next_term)]
    hosts.proxies[first].accept()
    for host in {0, 1, 2} - {first}:
        hosts.processes[host].send_signal(signal.SIGTERM)
        assert hosts.processes[host].wait(2 * PATIENCE) in (0, 128 + signal.SIGTERM)
    eventually(lambda: hosts.works(above=next_term)[0] == first)  # each of the others may lead until it is ended
    assert store.pttl("lock:indexer") > 0


def test_the_one_that_is_told_to_end_does_not_start_its_copy_again(hosts):
    leading = hosts.start()
    _, term = hosts.works()
    hosts.start()
    leading.send_signal(signal.SIGTERM)
    code, _, errors = out_of(leading)
    assert code == 0  # that of the program
    assert f"Leads 'indexer', term {term}." in errors
    assert hosts.works(above=term)[0] == 1
    assert [what for _, host, _, what in hosts.steps() if host == 0][-1] == "told"


def test_a_copy_that_ends_by_itself_is_started_again_after_the_pause(hosts):
    process = hosts.start("--pause", "0.2")
    _, term = hosts.works()
    hosts.crash.touch()
    host, _ = hosts.works(above=term)
    assert host == 0
    last = max(at for at, _, fence, _ in hosts.steps() if fence == term)
    begins = next(at for at, _, fence, what in hosts.steps() if what == "begins" and fence > term)
    assert begins - last >= 0.2
    process.send_signal(signal.SIGTERM)
    assert "ended with exit code 3; standing by again in 0.2 s" in out_of(process)[2]


def test_meanwhile_another_host_may_lead(hosts):
    hosts.start("--pause", "1d")
    _, term = hosts.works()
    hosts.start("--pause", "1d")
    hosts.crash.touch()
    assert hosts.works(above=term)[0] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_one_that_stands_by_or_pauses_and_leaves_nothing_behind(hosts, valkey_locks, number):
    pausing = hosts.start("--pause", "1d")
    hosts.works()
    hosts.crash.touch()
    eventually(lambda: valkey_locks.look(["indexer"]) == [[]])
    hold(valkey_locks, "indexer", label="the other one")
    standing_by = hosts.start()
    eventually(lambda: valkey_locks.count_waiters(["indexer"]) == [1])
    for process in (pausing, standing_by):
        process.send_signal(number)
        assert out_of(process)[0] == 128 + number
    assert valkey_locks.count_waiters(["indexer"]) == [0]


def test_a_signal_that_its_program_does_not_survive_ends_it_too(hosts):
    process = hosts.start(program=["sh", "-c", "kill -HUP $PPID; sleep 60"])
    code, _, errors = out_of(process)
    assert code == 128 + signal.SIGHUP
    assert "was ended by SIGHUP" in errors


@pytest.mark.seconds(4)
def test_one_that_starts_while_the_store_is_down_waits_for_it(hosts):
    hosts.start("-v", "0")
    hosts.works()
    hosts.proxies[0].refuse()
    eventually(lambda: hosts.steps()[-1][-1] == "told")
    _, term = hosts.works()
    late = hosts.start(reaches_the_store=False)
    hosts.proxies[0].accept()
    assert hosts.works(above=term)[0] == 0
    assert late.poll() is None


def test_a_program_that_is_not_there_ends_it(hosts, store):
    assert out_of(hosts.start(program=["/no/such/program"]))[0] == 127
    assert not store.exists("lock:indexer")


@pytest.mark.parametrize(
    "bound",
    [("--wait", "5"), ("--max-hold", "1h"), ("--min-hold", "5"), ("--on-busy", "skip"), ("--busy-exit-code", "3")],
)
def test_it_has_no_bounds(hosts, bound):
    code, _, errors = out_of(hosts.start(*bound, program=["true"]))
    assert code == 2
    assert f"{bound[0]} is not for --leader" in errors
