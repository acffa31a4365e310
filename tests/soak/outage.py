"""Stop the server of some busy processes, let it go on, and tell what that cost them.

    python -m tests.soak.outage --seconds 20

Exit code 1: a lease was lost that need not be, or a process was not served soon after.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import django
from django.conf import settings

WARM_UP = 2.0  # seconds before the server stops
AFTERWARDS = 3.0  # seconds for which all go on when it is back
FIRST = 1.0  # seconds of the outage that are not counted: somebody has to find out
LEASES = 5  # that each process holds all the while
RENEWED_WITHIN = 1.0  # seconds that a lease must have left when the server is back
PAUSE = 0.02  # seconds between two calls of a thread
READY_WITHIN = 60.0


class Timed(NamedTuple):
    """One call. ``outcome``: what became of it, or the name of the error."""

    kind: str
    began: float
    took: float
    outcome: str
    was_asked: bool = True


@dataclass
class Report:
    processes: int
    threads: int
    calls: int  # that began during the outage, but for its first second
    unasked: int  # of them, failed without a question to the server
    median_ms: float
    longest_ms: float
    grants_before: int
    first_grants: list[float]  # seconds after the outage, by process
    lost: int  # leases
    lost_without_need: int

    def is_sound(self, within: float) -> bool:
        served = len(self.first_grants) == self.processes and max(self.first_grants) <= within
        return served and not self.lost_without_need


def measure(
    url: str,
    server: int,
    seconds: float,
    *,
    processes: int = 4,
    threads: int = 100,
    ttl: float = 30.0,
    options: dict[str, Any] | None = None,
) -> Report:
    """``server``: the number of its process. ``threads``: of all processes together."""
    about = json.dumps({"url": url, "threads": threads // processes, "ttl": ttl, "options": options or {}})
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.soak.outage", "--worker", about],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        for _ in range(processes)
    ]  # fmt: skip
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        time.sleep(WARM_UP)
        stopped_at = time.monotonic()
        os.kill(server, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            back_at = time.monotonic()
            os.kill(server, signal.SIGCONT)
        time.sleep(AFTERWARDS)
        told = [json.loads(worker.communicate(timeout=READY_WITHIN)[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return _judge(told, threads, stopped_at, back_at)


def _judge(told: Sequence[Any], threads: int, stopped_at: float, back_at: float) -> Report:
    by_process = [[Timed(*call) for call in process["calls"]] for process in told]
    calls = [call for calls in by_process for call in calls]
    during = [call for call in calls if stopped_at + FIRST <= call.began < back_at]
    took = [1000 * call.took for call in during]
    ended_at = [ended_at for process in told for ended_at in process["lost"]]
    grants = [[call.began + call.took for call in calls if call.outcome == "granted"] for calls in by_process]
    return Report(
        processes=len(told),
        threads=threads,
        calls=len(during),
        unasked=sum(not call.was_asked for call in during),
        median_ms=round(statistics.median(took), 3) if took else 0.0,
        longest_ms=round(max(took, default=0.0), 1),
        grants_before=sum(at < stopped_at for moments in grants for at in moments),
        first_grants=[
            round(min(later) - back_at, 3) for moments in grants if (later := [at for at in moments if at >= back_at])
        ],
        lost=len(ended_at),
        lost_without_need=sum(at > back_at + RENEWED_WITHIN for at in ended_at),
    )


class Worker:
    """Its threads ask for locks of their own, and now and then for one that all want, until the input is closed."""

    def __init__(self, threads: int, ttl: float) -> None:
        self._threads, self._ttl = threads, ttl
        self._ends = threading.Event()
        self._calls: list[Timed] = []

    def run(self) -> None:
        held = [lock(f"held:{os.getpid()}:{number}", ttl=self._ttl, on_lost="log") for number in range(LEASES)]
        leases = [handle.__enter__() for handle in held]
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self._threads)]
        for thread in threads:
            thread.start()
        watch = threading.Thread(target=self._watch, args=(leases, lost := {}))
        watch.start()
        print("ready", flush=True)
        sys.stdin.read()
        self._ends.set()
        for thread in (*threads, watch):
            thread.join()
        print(json.dumps({"calls": self._calls, "lost": list(lost.values())}), flush=True)
        for handle in held:
            with suppress(LockError):
                handle.release()

    def _watch(self, leases: Sequence[Any], lost: dict[str, float]) -> None:
        """Note of each lease that was lost how long it would have lasted."""
        lasts: dict[str, float] = {}
        while not self._ends.wait(0.05):
            for lease in leases:
                if left := lease.remaining:
                    lasts[lease.name] = time.monotonic() + left
                elif lease.name not in lost:
                    lost[lease.name] = lasts[lease.name]

    def _work(self, number: int) -> None:
        own, chance = f"own:{os.getpid()}:{number}", random.Random(number)
        while not self._ends.is_set():
            handle = lock(chance.choice([own, own, own, "shared"]), wait=chance.choice([0, 1]), ttl=self._ttl)
            if self._timed("acquire", handle.acquire) == "granted":
                time.sleep(PAUSE / 4)
                self._timed("release", handle.release)
            time.sleep(PAUSE)

    def _timed(self, kind: str, call: Any) -> str:
        began, outcome, was_asked = time.monotonic(), "", True
        try:
            outcome = {True: "granted", False: "busy", None: "released"}[call()]
        except LockError as error:
            outcome, was_asked = type(error).__name__, getattr(error, "was_asked", True)
        self._calls.append(Timed(kind, began, time.monotonic() - began, outcome, was_asked))
        return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.outage", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the server is stopped; default: 20")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--threads", type=int, default=100, help="of all processes together; default: 100")
    arguments = parser.parse_args()

    from example_project.valkey import Valkey

    with Valkey() as server:
        report = measure(
            server.url, server.process.pid, arguments.seconds, processes=arguments.processes, threads=arguments.threads
        )
    print(json.dumps(asdict(report)), flush=True)
    return 0 if report.is_sound(within=1.0) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        about = json.loads(sys.argv[2])
        settings.configure(
            INSTALLED_APPS=["django_distlock"],
            SECRET_KEY="outage",
            DISTRIBUTED_LOCKS={
                "default": {
                    "BACKEND": "django_distlock.backends.redis.RedisBackend",
                    "LOCATION": about["url"],
                    "OPTIONS": about["options"],
                }
            },
        )
        django.setup()
        from django_distlock import LockError, lock

        Worker(about["threads"], about["ttl"]).run()
    else:
        sys.exit(main())
