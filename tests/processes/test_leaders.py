"""Processes of three hosts that want to lead, of which the leader is killed, stopped, or cut off from the store.

Each has a way to the store of its own, and writes down each step of its work: when it was about to look whether it
leads, and when it had done the step. All clocks are the same one.
"""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from itertools import pairwise
from operator import itemgetter

import pytest

from django_distlock.utils.clock import clock
from tests.support.programs import Programs
from tests.support.proxy import Proxy
from tests.support.tools import PATIENCE, eventually

pytestmark = pytest.mark.seconds(3)

TTL = 2.0  # of the programs

WORKS = {
    "thread": """
while True:
    with leader("indexer", on_lost="log") as lease:
        while True:
            at = clock()
            if lease.wait_lost(0):
                break
            time.sleep(0.02)
            step(lease.fence, at)
""",
    "task": """
import asyncio
async def main():
    while True:
        async with leader("indexer", on_lost="log") as lease:
            while True:
                at = clock()
                if await lease.await_lost(0):
                    break
                await asyncio.sleep(0.02)
                step(lease.fence, at)
asyncio.run(main())
""",
}
NOTES = """
import json
from django_distlock.utils.clock import clock
settings.DISTRIBUTED_LOCKS["default"]["OPTIONS"] = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
journal = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def step(fence, at):
    os.write(journal, json.dumps({"fence": fence, "at": at, "done": clock()}).encode() + b"\\n")
"""


class Hosts:
    """Three programs that want to lead, and what they did."""

    def __init__(self, valkey, folder, work, stack):
        self._folder = folder
        self.proxies, self.programs = [], []
        for host in range(3):
            (way := folder / f"{host}").mkdir()
            self.proxies.append(stack.enter_context(Proxy(valkey.socket, way)))
            programs = Programs(self.proxies[-1].url)
            stack.callback(programs.end)
            self.programs.append(programs(NOTES.replace("FILE", repr(f"{way}/steps")) + work))

    def steps(self, host):
        path = self._folder / f"{host}/steps"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def leader(self, above=0):
        """The host that works under a larger number than that, once there is one, and the number."""

        def find():
            found = [(self.steps(host)[-1]["fence"], host) for host in range(3) if self.steps(host)]
            return max((one for one in found if one[0] > above), default=None)

        fence, host = eventually(find, 4 * PATIENCE)
        return host, fence

    def works_on(self, host):
        seen = len(self.steps(host))
        eventually(lambda: len(self.steps(host)) > seen + 3)

    def overtaken(self):
        """The steps that were done after one of a later term had begun, by host.

        Whether it leads it had looked before: not one step began after that.
        """
        late = dict.fromkeys(range(3), 0)
        all_steps = sorted(
            ({**step, "host": host} for host in range(3) for step in self.steps(host)), key=itemgetter("at")
        )
        assert [step["fence"] for step in all_steps] == sorted(step["fence"] for step in all_steps)
        begins = {}
        for step in all_steps:
            begins.setdefault(step["fence"], step["at"])
        for one, other in pairwise(sorted(begins)):
            for step in all_steps:
                if step["fence"] == one and step["done"] > begins[other]:
                    late[step["host"]] += 1
        return late


@pytest.fixture(params=WORKS)
def hosts(request, valkey, store, tmp_path_factory):
    with ExitStack() as stack:
        yield Hosts(valkey, tmp_path_factory.mktemp("h"), WORKS[request.param], stack)


@pytest.mark.parametrize("accident", ["killed", "stopped", "cut off"])
def test_another_one_leads_within_the_ttl_and_two_seconds_and_no_two_at_once(hosts, store, accident):
    first, fence = hosts.leader()
    hosts.works_on(first)
    program, proxy = hosts.programs[first], hosts.proxies[first]
    if accident == "killed":
        program.kill()
    elif accident == "stopped":
        program.send_signal(signal.SIGSTOP)
    else:
        proxy.refuse()
    happened = clock()
    left = store.pttl("lock:indexer") / 1000  # what the store has promised the leader, or the next one already
    assert 0 < left <= TTL
    second, next_fence = hosts.leader(above=fence)
    begun = next(step["at"] for step in hosts.steps(second) if step["fence"] == next_fence)
    assert second != first
    print(f"{accident}: the next one led after {begun - happened:.2f} s")
    if accident == "stopped":
        program.send_signal(signal.SIGCONT)
    elif accident == "cut off":
        proxy.accept()
    if accident != "killed":
        # It stands by again, and follows when the others are gone.
        for host in {0, 1, 2} - {first}:
            hosts.programs[host].kill()
        assert hosts.leader(above=next_fence)[0] == first
        hosts.works_on(first)
    assert begun - happened < TTL + 2 + PATIENCE  # which a busy machine may take
    # A step that was under way when the lease ran out.
    late = hosts.overtaken()
    assert late.pop(first) <= (accident != "killed")
    assert not any(late.values())
