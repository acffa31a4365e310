"""Counts, statistics, and child processes for measurements."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from time import monotonic, sleep
from typing import Any

import redis

# Children start from a process that has imported everything, and that has no threads and no connections.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["benchmarks.contended", "benchmarks.crowd", "benchmarks.held", "benchmarks.redlock", "benchmarks.tasks"]
)

ENDS_WITHIN = 60.0  # seconds after its time is over


class Store:
    """The server's own statistics."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def commands(self) -> int:
        """Returns the number of commands executed until now, also inside scripts."""
        stats = self._client.info("commandstats")
        return sum(about["calls"] for name, about in stats.items() if name != "cmdstat_info")

    def calls(self, command: str) -> int:
        """Returns how often one command was executed until now."""
        return int(self._client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

    def connections(self) -> int:
        """Returns the number of connections, without the one that asks."""
        return int(self._client.info("clients")["connected_clients"]) - 1

    @contextmanager
    def on_one_core(self) -> Iterator[None]:
        """Lets this thread and the server share a core, if the system can do that.

        The result is then the work of both, without the time to wake another core. It is less than in real life, but
        the same in each run.
        """
        pinned = [0, int(self._client.info("server")["process_id"])] if hasattr(os, "sched_setaffinity") else []
        before = {process: os.sched_getaffinity(process) for process in pinned}
        try:
            for process in pinned:
                os.sched_setaffinity(process, {min(before[0])})
            yield
        finally:
            for process, cores in before.items():
                os.sched_setaffinity(process, cores)

    @property
    def version(self) -> str:
        about = self._client.info("server")
        return f"Valkey {about['valkey_version']}" if "valkey_version" in about else f"Redis {about['redis_version']}"


def jain(shares: Sequence[int]) -> float:
    """Returns Jain's fairness index: 1 if all got the same, 1/n if one got everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    return {figure: median(one[figure] for one in rounds) for figure in rounds[0]}


def sleep_until(moment: float) -> None:
    sleep(max(0.0, moment - monotonic()))


class Child:
    """A process that runs ``target(pipe, *arguments)``. ``end()`` ends it in any case."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, self._theirs = processes.Pipe()
        self._process = processes.Process(target=target, args=(self._theirs, *arguments), daemon=True)
        self._process.start()
        self._theirs.close()

    def told(self, within: float = ENDS_WITHIN) -> Any:
        if not self.pipe.poll(within):
            raise TimeoutError(f"a process of the benchmark said nothing for {within:.0f} s")
        return self.pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def in_child(target: Callable[..., Any], *arguments: object, within: float) -> Any:
    """Call the function in its own process. Returns its result."""
    child = Child(_report, target, *arguments)
    try:
        return child.told(within)
    finally:
        child.end()


def _report(pipe: Connection, target: Callable[..., Any], *arguments: object) -> None:
    pipe.send(target(*arguments))
