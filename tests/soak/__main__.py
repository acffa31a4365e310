"""Harm a store and its users for some minutes, and judge what they saw.

Half of the time is spent in faults. Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import django
from django.conf import settings

NAMES_OF_STORES = ["redis", "sentinel", "cluster", "quorum", "postgres", "mariadb", "sqlite", "zookeeper"]
WORKERS = 5
NAMES = ["one", "one", "two", "three"]
READY_WITHIN = 60.0
ENDS_WITHIN = 60.0
CLEAN_WITHIN = 60.0
CALM = 0.7  # seconds without a fault per second with one
LONGEST_TTL = 3.0  # of the workers' leases
STUCK = 15.0  # seconds beyond its time after which a call counts as stuck: twice the longest timeout of a store
PROGRESS = 15.0


@dataclass
class Report:
    """What one run saw."""

    store: str
    seed: int
    seconds: float = 0.0
    in_faults: float = 0.0  # share of the time
    faults: dict[str, int] = field(default_factory=dict)
    grants: int = 0
    adoptions: int = 0
    losses: int = 0  # leases that their holders were told they lost
    longest_gap: float = 0.0  # seconds without a grant of any name
    overlaps: int = 0
    longest_overlap: float = 0.0
    numbers_went_back: int = 0
    overtaken: int = 0
    stuck_calls: int = 0
    longest_overrun: float = 0.0  # seconds that a call took beyond its time
    left_behind: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def is_sound(self, store: Any) -> bool:
        allowed = LONGEST_TTL if store.loses_writes else 0.0
        broken = self.numbers_went_back or self.overtaken or self.stuck_calls or self.left_behind or self.failures
        return self.longest_overlap <= allowed and not broken


class Run:
    def __init__(self, store: Any, report: Report, folder: Path) -> None:
        from tests.support.history import Journal

        self._store, self._report, self._folder = store, report, folder
        self._chance = random.Random(report.seed)
        self._journal = Journal(folder)
        self._workers: list[subprocess.Popen[str]] = []
        self._counts: Counter[str] = Counter()
        self._in_faults = 0.0
        self._told_at = 0.0

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        try:
            for _ in range(WORKERS):
                self._start_worker()
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                self._harm_once()
                self._tell_progress(began, seconds)
            self._report.seconds = round(time.monotonic() - began, 1)
            self._report.in_faults = round(self._in_faults / self._report.seconds, 2)
            self._end_workers()
        finally:
            for worker in self._workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
        self._report.faults = dict(self._counts)

    def _harm_once(self) -> None:
        harms = {**self._store.harms(), "worker killed": self._kill_worker, "workers stopped": self._stop_workers}
        kind = self._chance.choice(list(harms))
        self._counts[kind] += 1
        began = time.monotonic()
        with self._disturbed():
            heal = harms[kind](self._chance)
            time.sleep(self._chance.uniform(0.3, 4.0))
            heal()
        took = time.monotonic() - began
        self._in_faults += took
        time.sleep(took * CALM)

    @contextmanager
    def _disturbed(self) -> Iterator[None]:
        """Whoever waits during a fault may be overtaken: a failover drops it until its next look."""
        from tests.support.history import EVERYBODY

        is_over = threading.Event()

        def note() -> None:
            while True:
                self._journal.write("disturbed", pid=EVERYBODY)
                if is_over.wait(1.0):
                    break
            self._journal.write("disturbed", pid=EVERYBODY)

        noting = threading.Thread(target=note)
        noting.start()
        try:
            yield
        finally:
            is_over.set()
            noting.join()

    def _kill_worker(self, chance: random.Random) -> Callable[[], None]:
        victim = chance.choice(self._workers)
        victim.kill()
        victim.wait()
        self._workers.remove(victim)
        return self._start_worker

    def _stop_workers(self, chance: random.Random) -> Callable[[], None]:
        stopped = chance.sample(self._workers, chance.randint(1, 2))
        for worker in stopped:
            worker.send_signal(signal.SIGSTOP)

        def end() -> None:
            for worker in stopped:
                worker.send_signal(signal.SIGCONT)

        return end

    def _start_worker(self) -> None:
        about = {
            "folder": str(self._folder),
            "seed": str(self._chance.random()),
            "names": NAMES,
            "locks": dict(self._store.locks),
            "databases": {alias: dict(entry) for alias, entry in self._store.databases.items()},
        }
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", json.dumps(about)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        self._workers.append(worker)
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            self._report.failures.append("a worker did not start")

    def _end_workers(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        deadline = time.monotonic() + ENDS_WITHIN
        for worker in self._workers:
            try:
                code = worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._report.failures.append(f"a worker did not end within {ENDS_WITHIN:g} s")
            else:
                if code:
                    self._report.failures.append(f"a worker ended with code {code}")

    def _tell_progress(self, began: float, seconds: float) -> None:
        now = time.monotonic()
        if now - self._told_at > PROGRESS:
            self._told_at = now
            grants = sum(path.read_bytes().count(b'"grant"') for path in self._folder.glob("*.jsonl"))
            faults = sum(self._counts.values())
            print(f"{self._report.store}: {now - began:.0f} of {seconds:.0f} s, {grants} grants, {faults} faults",
                  file=sys.stderr, flush=True)  # fmt: skip

    def judge(self) -> None:
        from tests.support.history import faults, overlaps, overruns, read
        from tests.support.tools import eventually

        report, events = self._report, read(self._folder)
        grants = [event.at for event in events if event.kind == "grant"]
        report.grants = len(grants)
        report.adoptions = sum(event.kind == "adoption" for event in events)
        report.losses = sum(event.kind == "loss" for event in events)
        report.longest_gap = round(max((later - earlier for earlier, later in pairwise(grants)), default=0.0), 2)
        found = faults(events)
        both = overlaps(events)
        report.overlaps, report.longest_overlap = len(both), round(max(both, default=0.0), 2)
        report.numbers_went_back = sum("the number" in fault for fault in found)
        report.overtaken = sum("got in" in fault for fault in found)
        beyond = overruns(events)
        report.longest_overrun = round(max(beyond, default=0.0), 2)
        report.stuck_calls = sum(one > STUCK for one in beyond)
        for fault in found[:20]:
            print(fault, file=sys.stderr)
        try:
            eventually(lambda: not self._left_behind(), CLEAN_WITHIN)
        except AssertionError:
            report.left_behind = self._left_behind()[:20]

    def _left_behind(self) -> list[str]:
        """But for what keeps a detached text from being adopted twice, which lasts some minutes."""
        from django_distlock.names import OWN

        return [name for name in self._store.left_behind() if OWN not in name]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--store", action="append", choices=NAMES_OF_STORES, help="default: all, one after another")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each store; default: 10")
    parser.add_argument("--seed", type=int, help="of the dice that choose the faults")
    arguments = parser.parse_args()

    settings.configure(
        INSTALLED_APPS=["django_distlock"], DATABASES={"default": {}}, SECRET_KEY="soak", DISTRIBUTED_LOCKS={}
    )
    django.setup()
    from .stores import STORES

    sound = True
    for name in arguments.store or NAMES_OF_STORES:
        report = Report(name, random.randrange(10**9) if arguments.seed is None else arguments.seed)
        with STORES[name].running() as store, tempfile.TemporaryDirectory(prefix="soak-journals-") as folder:
            settings.DISTRIBUTED_LOCKS = {"default": dict(store.locks)}
            run = Run(store, report, Path(folder))
            run.run(arguments.minutes * 60)
            run.judge()
            sound &= report.is_sound(store)
        print(json.dumps(asdict(report)), flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
