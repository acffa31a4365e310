"""One thread acquires and releases a lock that nobody else wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

from .contenders import ASYNC_OURS, FLOOR, OURS, AsyncPair, Pair, async_pairs, pairs
from .measure import Store
from .report import Column, Table

BATCH = 20
WARM_UP = 50

COLUMNS = (
    Column("lock", "lock"),
    Column("microseconds", "µs", ".0f"),
    Column("by_floor", "x floor", ".2f"),
    Column("by_ours", "x ours", ".2f"),
    Column("work", "one core", ".0f"),
    Column("work_by_floor", "x floor", ".2f"),
    Column("commands", "commands", ".1f"),
)


def run(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    """``seconds``: how long each lock is measured in each round."""
    with asyncio.Runner() as runner:
        locks: dict[str, Callable[[float], float]] = {name: _timed(pair) for name, pair in pairs(url).items()}
        locks |= {name: _atimed(runner, pair) for name, pair in async_pairs(url).items()}
        store = Store(url)
        commands = {name: _commands(store, timed) for name, timed in locks.items()}
        times = _rounds(locks, rounds, seconds, progress)
        with store.on_one_core():
            work = _rounds(locks, rounds, seconds / 3, progress)
    ours = {name: ASYNC_OURS if "async" in name else f"{OURS}, with" for name in locks}
    rows = [
        {
            "lock": name,
            "microseconds": median(times[name]) * 1e6,
            "by_floor": _ratio(times[name], times[FLOOR]),
            "by_ours": _ratio(times[name], times[ours[name]]),
            "work": median(work[name]) * 1e6,
            "work_by_floor": _ratio(work[name], work[FLOOR]),
            "commands": commands[name],
        }
        for name in locks
    ]
    return [
        Table(
            "uncontended", "Acquire and release a lock that nobody else wants; store commands per pair", COLUMNS, rows
        )
    ]


def _rounds(
    locks: Mapping[str, Callable[[float], float]], rounds: int, seconds: float, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in locks}
    for number in range(1, rounds + 1):
        progress(f"uncontended, round {number} of {rounds}")
        for name, timed in locks.items():
            times[name].append(timed(seconds))
    return times


def _ratio(times: list[float], others: list[float]) -> float:
    """Returns the median of the ratios within each round, because the machine is busier in some rounds."""
    return median(time / other for time, other in zip(times, others, strict=True))


def _timed(pair: Pair) -> Callable[[float], float]:
    def timed(seconds: float) -> float:
        """Returns the seconds per pair."""
        done, began = 0, perf_counter()
        while (passed := perf_counter() - began) < seconds or not done:
            for _ in range(BATCH):
                pair()
            done += BATCH
        return passed / done

    return timed


def _atimed(runner: asyncio.Runner, pair: AsyncPair) -> Callable[[float], float]:
    async def timed(seconds: float) -> float:
        done, began = 0, perf_counter()
        while (passed := perf_counter() - began) < seconds or not done:
            for _ in range(BATCH):
                await pair()
            done += BATCH
        return passed / done

    return lambda seconds: runner.run(timed(seconds))


def _commands(store: Store, timed: Callable[[float], float]) -> float:
    for _ in range(WARM_UP // BATCH):
        timed(0)
    before = store.commands()
    timed(0)
    return (store.commands() - before) / BATCH
