"""Processes or threads that all want the same lock, each for a millisecond at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import NamedTuple

from .contenders import FLOOR, OURS, REDIS_PY, Enter, configure, prepare_queues, queuers
from .measure import Child, Store, jain, middle, sleep_until
from .report import Column, Table

HOLD = 0.001
SETTLING = 0.4  # seconds of the rush before the measurement window opens

COLUMNS = (
    Column("size", "n", "d"),
    Column("lock", "lock"),
    Column("rate", "hand-offs/s", ".0f"),
    Column("of_floor", "% floor", ".0f"),
    Column("fairness", "Jain", ".3f"),
    Column("longest_ms", "wait ms", ".0f"),
    Column("of_turns", "/ turns", ".2f"),
    Column("commands", "commands", ".1f"),
)


class Window(NamedTuple):
    """The time of a measurement, on the monotonic clock, which all processes of a machine share."""

    starts: float
    opens: float
    closes: float


class Votes(NamedTuple):
    grants: int
    longest: float  # seconds of the longest wait, up to the close of the window
    waits: list[float]  # seconds of each wait that ended with the lock in the window


@dataclass(frozen=True)
class Crowd:
    processes: int
    threads: int = 1
    slots: int = 1  # of the lock that they want

    @property
    def size(self) -> int:
        return self.processes * self.threads

    def __str__(self) -> str:
        size = f"{self.size} threads" if self.threads > 1 else f"{self.size} processes"
        return f"{size} on {self.slots} slots" if self.slots > 1 else size


def run_processes(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    rows = []
    for size in (2, 8, 32):
        rows += _compare(url, Crowd(size), list(queuers(url)), rounds, seconds, progress)
    return [
        Table(
            "processes",
            "n processes want one lock, held for 1 ms; the longest wait; 99.9 % wait no longer, over a turn of each;"
            " store commands per hand-off",
            COLUMNS,
            rows,
        )
    ]


def run_threads(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    rows = _compare(url, Crowd(1, threads=64), [FLOOR, OURS, REDIS_PY], rounds, seconds, progress)
    return [Table("threads", "n threads of one process want one lock, held for 1 ms", COLUMNS, rows)]


def run_slots(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    rows = _compare(url, Crowd(8, slots=4), [FLOOR, OURS], rounds, seconds, progress)
    return [Table("slots", "n processes want one of four slots of a lock, held for 1 ms", COLUMNS, rows)]


def _compare(
    url: str, crowd: Crowd, locks: Sequence[str], rounds: int, seconds: float, progress: Callable[[str], None]
) -> list[dict[str, object]]:
    """``seconds``: how long the window is open for each lock in each round."""
    seen: dict[str, list[dict[str, float]]] = {lock: [] for lock in locks}
    for number in range(1, rounds + 1):
        for lock in locks:
            progress(f"{crowd}, round {number} of {rounds}: {lock}")
            seen[lock].append(rush(url, lock, crowd, seconds))
        floor = seen[FLOOR][-1]["rate"]
        for lock in locks:
            seen[lock][-1]["of_floor"] = 100 * seen[lock][-1]["rate"] / floor
    return [{"size": crowd.size, "lock": lock, **middle(seen[lock])} for lock in locks]


def rush(url: str, lock: str, crowd: Crowd, seconds: float) -> dict[str, float]:
    prepare_queues(url, crowd.slots)
    store = Store(url)
    children = [Child(_compete, url, lock, crowd) for _ in range(crowd.processes)]
    tallies, commands = race(children, seconds, store.commands)
    return {**figures(tallies, seconds), "commands": commands / max(1, sum(tally.grants for tally in tallies))}


def race(children: Sequence[Child], seconds: float, count: Callable[[], int]) -> tuple[list[Votes], int]:
    """Let the children begin together, and end them. Returns their tallies, and how much the count grew in the window.

    Each child says that it is ready, gets the window, and sends its tallies.
    """
    try:
        for child in children:
            child.told()  # that it is ready
        starts = monotonic() + 0.1
        window = Window(starts, starts + SETTLING, starts + SETTLING + seconds)
        for child in children:
            child.pipe.send(window)
        sleep_until(window.opens)
        before = count()
        sleep_until(window.closes)
        grown = count() - before
        return [tally for child in children for tally in child.told()], grown
    finally:
        for child in children:
            child.end()


def figures(tallies: Sequence[Votes], seconds: float) -> dict[str, float]:
    """Returns the figures. ``of_turns``: the 999th of 1,000 waits, divided by the time in which all get one turn."""
    grants = [tally.grants for tally in tallies]
    waits = sorted(wait for tally in tallies for wait in tally.waits) or [0.0]
    all_turns = len(tallies) * seconds / max(1, sum(grants))
    return {
        "rate": sum(grants) / seconds,
        "fairness": jain(grants),
        "longest_ms": max(tally.longest for tally in tallies) * 1000,
        "of_turns": waits[int(len(waits) * 0.999)] / all_turns,
    }


def _compete(pipe: Connection, url: str, lock: str, crowd: Crowd) -> None:
    configure(url)
    make = queuers(url, crowd.slots)[lock]
    entrances = [make() for _ in range(crowd.threads)]
    pipe.send("ready")
    window: Window = pipe.recv()
    pipe.send(_together(entrances, window))


def _together(entrances: Iterable[Enter], window: Window) -> list[Votes]:
    tallies: list[Votes] = []

    def compete(enter: Enter) -> None:
        tallies.append(member(enter, window))

    threads = [threading.Thread(target=compete, args=[enter]) for enter in entrances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tallies


def member(enter: Enter, window: Window) -> Votes:
    longest = 0.0
    waits: list[float] = []
    sleep_until(window.starts)
    while True:
        asked = monotonic()
        with enter():
            got = monotonic()
            if got >= window.opens:
                longest = max(longest, min(got, window.closes) - asked)
            if got >= window.closes:
                return Votes(len(waits), longest, waits)
            if got >= window.opens:
                waits.append(got - asked)
            sleep(HOLD)
