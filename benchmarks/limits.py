"""A thousand tasks that wait for one lock with slots, on real brokers and workers: ``python -m benchmarks.limits``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import redis
from celery import Celery
from kombu import Exchange, Queue

from example_project.valkey import Valkey
from tests.support.rabbitmq import RabbitMQ, programs
from tests.support.tools import eventually

from .report import Column, Table

TASKS, SLOTS, SECONDS = 1000, 5, 0.1
WORKERS, CONCURRENCY = 2, 8
PROBE_EVERY = 0.5  # seconds between two tasks of another kind
ENDS_WITHIN = 300.0

BROKERS = ("RabbitMQ, classic", "RabbitMQ, quorum", "Redis")
POOLS = ("prefork", "threads")

COLUMNS = (
    Column("broker", "broker"),
    Column("pool", "pool"),
    Column("used", "of the slots' time %", ".0f"),
    Column("last", "last start, ideal = 1", ".2f"),
    Column("requeues", "requeues", "d"),
    Column("peak", "most in a second", "d"),
    Column("unacknowledged", "unacknowledged", "d"),
    Column("other", "another task waits s", ".2f"),
    Column("other_most", "at most s", ".2f"),
    Column("overtaken", "overtaken by", ".0f"),
    Column("overtaken_most", "at most by", "d"),
)


class Scene:
    """One setup of brokers and workers. ``shared``: all tasks go through one queue."""

    def __init__(
        self, folder: Path, server: Valkey, broker: str, url: str, prefetch: int, shared: bool, run: Any
    ) -> None:
        self.folder, self.prefetch, self.run = folder, prefetch, run
        name = uuid.uuid4().hex[:8]
        is_quorum = "quorum" in broker
        self.plan = {
            "locks": server.url,
            "journal": f"unix://{server.socket}?db=3",
            "broker": url or f"redis+socket://{server.socket}?virtual_host=1",
            "limited": f"limited-{name}",
            "others": f"limited-{name}" if shared else f"others-{name}",
            "exchange_type": "topic" if is_quorum else "direct",
            "queue_arguments": {"x-queue-type": "quorum"} if is_quorum else {},
            "prefetch_multiplier": prefetch,
            "slots": run.slots,
            "seconds": run.seconds,
        }
        self.book = redis.Redis.from_url(self.plan["journal"], decode_responses=True)
        self.app = Celery("sender", broker=self.plan["broker"], backend="disabled://", set_as_current=False)

    def queue(self, which: str) -> Queue:
        name = self.plan[which]
        exchange = Exchange(f"{name}-exchange", type=self.plan["exchange_type"])
        return Queue(name, exchange, routing_key=name, queue_arguments=self.plan["queue_arguments"])

    def journal(self, what: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.book.lrange("journal", 0, -1)]
        return [line for line in lines if line["what"] == what]

    def send(self, task: str, which: str, argument: object) -> None:
        self.app.send_task(task, [argument], queue=self.queue(which))

    @contextmanager
    def workers(self, pool: str) -> Iterator[None]:
        processes = []
        try:
            for number in range(self.run.workers):
                with (self.folder / f"worker{number}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [
                                sys.executable, "-m", "celery", "-A", "benchmarks.limits_app", "worker",
                                f"--pool={pool}", f"--concurrency={self.run.concurrency}", f"--hostname=w{number}",
                                "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=info",
                            ],
                            env={**os.environ, "LIMITS": json.dumps(self.plan)},
                            stdout=log, stderr=log, start_new_session=True,
                        )
                    )  # fmt: skip
            yield
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)  # its own session
                process.wait()
            if self.run.keep:
                for number in range(self.run.workers):
                    Path(self.run.keep, f"worker{number}.log").write_bytes(
                        (self.folder / f"worker{number}.log").read_bytes()
                    )


def measure(scene: Scene, broker: str, pool: str) -> dict[str, Any]:
    scene.book.delete("journal")
    count = scene.run.tasks
    with scene.workers(pool):
        eventually(lambda: len(scene.journal("ready")) == scene.run.workers, 120)
        warm_up = 4 * scene.run.workers * scene.run.concurrency
        for _ in range(warm_up):
            scene.send("other", "others", time.time())
        eventually(lambda: len(scene.journal("other")) == warm_up, 120)
        for number in range(count):
            scene.send("limited", "limited", number)
        deadline, probes = time.monotonic() + ENDS_WITHIN, 0
        while len(scene.journal("run")) < count and time.monotonic() < deadline:
            scene.send("other", "others", time.time())
            probes += 1
            time.sleep(PROBE_EVERY)
        eventually(lambda: len(scene.journal("other")) == warm_up + probes, 30)
    runs = sorted(scene.journal("run"), key=lambda run: run["begin"])
    assert sorted(run["number"] for run in runs) == list(range(count))
    assert _at_once(runs) <= scene.run.slots
    begin, end = runs[0]["begin"], max(run["at"] for run in runs)
    requeues = sorted(one["at"] for one in scene.journal("requeue"))
    others = [one["waited"] for one in scene.journal("other")[warm_up:]]
    overtaken = _overtaken([run["number"] for run in runs])
    ideal = count * scene.run.seconds / scene.run.slots
    return {
        "broker": broker,
        "pool": pool,
        "used": 100 * sum(run["at"] - run["begin"] for run in runs) / (scene.run.slots * (end - begin)),
        "last": (runs[-1]["begin"] - begin) / (ideal - scene.run.seconds),
        "requeues": len(requeues),
        "peak": max((sum(at <= one < at + 1 for one in requeues) for at in requeues), default=0),
        "unacknowledged": max((one["most"] for one in scene.journal("unacknowledged")), default=0),
        "other": median(others),
        "other_most": max(others),
        "overtaken": sum(overtaken) / count,
        "overtaken_most": max(overtaken),
    }


def _at_once(runs: Sequence[dict[str, Any]]) -> int:
    events = sorted([(run["begin"], 1) for run in runs] + [(run["at"], -1) for run in runs])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def _overtaken(numbers: Sequence[int]) -> list[int]:
    """Returns, for each task, how many later-sent tasks began before it."""
    return [sum(before > number for before in numbers[:place]) for place, number in enumerate(numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", choices=BROKERS, action="append", help="these brokers")
    parser.add_argument("--pool", choices=POOLS, action="append", help="these pools")
    parser.add_argument(
        "--shared", action="store_true", help="the other tasks come after the limited ones in one queue"
    )
    parser.add_argument("--prefetch", type=int, default=4, help="Celery's worker_prefetch_multiplier")
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a task")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--keep", help="a folder for the logs of the workers")
    run = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        brokers = run.broker or BROKERS
        found = programs() if any("RabbitMQ" in broker for broker in brokers) else None
        rabbitmq = stack.enter_context(RabbitMQ(*found)).url if found else ""
        for broker, pool in product(brokers, run.pool or POOLS):
            with TemporaryDirectory(prefix="limits-") as folder, Valkey(folder=Path(folder)) as server:
                url = rabbitmq if "RabbitMQ" in broker else ""
                scene = Scene(Path(folder), server, broker, url, run.prefetch, run.shared, run)
                rows.append(measure(scene, broker, pool))
                print(rows[-1], file=sys.stderr)
    title = f"{run.tasks:,} tasks of {run.seconds:g} s, {run.slots} at once, {run.workers} workers of {run.concurrency}"
    print(Table("limits", title, COLUMNS, rows))


if __name__ == "__main__":
    main()
