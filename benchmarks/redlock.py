"""Measures a lock on a majority of five servers: all alive, one dead, one hung; here, and half a millisecond away.

All five servers and the client share the cores of one machine. So without a distance, the figures show the work of five
servers, and not the time until the majority has answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

import pottery
import redis
from redlock import Redlock as RedlockPy

from django_distlock import lock
from django_distlock.core.registry import locks
from example_project.valkey import Valkey

from . import floor
from .contenders import TTL, AsyncPair, Pair, configure_redlock
from .distance import away
from .measure import in_child
from .report import Column, Table

NODES = 5
AWAY = 0.0005  # seconds in either direction
FLOOR, OURS, SINGLE = "bare sockets, 5 nodes", "django-distlock, 5 nodes", "django-distlock, one server"
ASYNC_OURS, ASYNC_SINGLE = f"{OURS}, async", f"{SINGLE}, async"
FEWEST = 3  # pairs that are measured at least, also if they take longer than the time for a lock

COLUMNS = (
    Column("nodes", "nodes"),
    Column("lock", "lock"),
    Column("milliseconds", "median ms", ".2f"),
    Column("by_single", "x one server", ".2f"),
    Column("longest", "longest ms", ".0f"),
    Column("errors", "% errors", ".0f"),
)

Figures = dict[str, float]
Measure = Callable[[float], tuple[list[float], int]]  # gets seconds; returns how long each took, and how many failed


def run(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    """``seconds``: how long each lock is measured in each round."""
    tables = []
    for distance in (0.0, AWAY):
        rows = []
        for state in ("all alive", "one dead", "one hung"):
            progress(f"5 nodes, {distance * 1000:g} ms away, {state}")
            rows += _rows(url, state, distance, rounds, seconds)
        where = f"{AWAY * 1000:g} ms away" if distance else "on this machine"
        name = "redlock_away" if distance else "redlock"
        tables.append(Table(name, f"Acquire and release on a majority of 5 nodes {where}", COLUMNS, rows))
    return tables


def _rows(url: str, state: str, distance: float, rounds: int, seconds: float) -> list[dict[str, object]]:
    with ExitStack() as stack:
        nodes = [stack.enter_context(Valkey()) for _ in range(NODES)]
        urls = [node.url for node in nodes]
        if distance:
            urls = stack.enter_context(away(urls, distance))
            [url] = stack.enter_context(away([url], distance))
        if state == "one dead":
            nodes[1].process.kill()
            nodes[1].process.wait()
        elif state == "one hung":
            os.kill(nodes[1].process.pid, signal.SIGSTOP)
            stack.callback(os.kill, nodes[1].process.pid, signal.SIGCONT)
        all_alive = state == "all alive"
        figures: dict[str, Figures] = in_child(_measured, url, urls, all_alive, rounds, seconds, within=600)
    return [{"nodes": state, "lock": name, **row} for name, row in figures.items()]


def _measured(url: str, urls: Sequence[str], all_alive: bool, rounds: int, seconds: float) -> dict[str, Figures]:
    configure_redlock(url, urls)
    logging.disable(logging.CRITICAL)  # redlock-py logs each failure with a traceback
    with asyncio.Runner() as runner:
        measures = {name: _timed(pair) for name, pair in _pairs(urls, all_alive).items()}
        measures |= {name: _atimed(runner, pair) for name, pair in _async_pairs().items()}
        figures = _figures(measures, rounds, seconds)
    locks.close()
    return figures


def _figures(measures: Mapping[str, Measure], rounds: int, seconds: float) -> dict[str, Figures]:
    times: dict[str, list[float]] = {name: [] for name in measures}
    errors = dict.fromkeys(measures, 0)
    middles: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            took, failed = measure(seconds)
            times[name] += took
            errors[name] += failed
            middles[name].append(median(took))
    single = {name: ASYNC_SINGLE if "async" in name else SINGLE for name in measures}
    return {
        name: {
            "milliseconds": median(times[name]) * 1000,
            "by_single": median(own / one for own, one in zip(middles[name], middles[single[name]], strict=True)),
            "longest": max(times[name]) * 1000,
            "errors": 100 * errors[name] / len(times[name]),
        }
        for name in measures
    }


def _timed(pair: Pair) -> Measure:
    def measure(seconds: float) -> tuple[list[float], int]:
        took: list[float] = []
        errors, ends = 0, perf_counter() + seconds
        while perf_counter() < ends or len(took) < FEWEST:
            began = perf_counter()
            try:
                pair()
            except Exception:  # counted, because failures are part of the measurement
                errors += 1
            took.append(perf_counter() - began)
        return took, errors

    return measure


def _atimed(runner: asyncio.Runner, pair: AsyncPair) -> Measure:
    async def measure(seconds: float) -> tuple[list[float], int]:
        took: list[float] = []
        errors, ends = 0, perf_counter() + seconds
        while perf_counter() < ends or len(took) < FEWEST:
            began = perf_counter()
            try:
                await pair()
            except Exception:  # as above
                errors += 1
            took.append(perf_counter() - began)
        return took, errors

    return lambda seconds: runner.run(measure(seconds))


def _pairs(urls: Sequence[str], all_alive: bool) -> dict[str, Pair]:
    def single() -> None:
        with lock("pair", ttl=TTL):
            pass

    def ours() -> None:
        with lock("pair", ttl=TTL, using="quorum"):
            pass

    masters = {redis.Redis.from_url(url) for url in urls}

    def by_pottery() -> None:
        with pottery.Redlock(key="pair:pottery", masters=masters, auto_release_time=TTL):
            pass

    manager = RedlockPy(list(urls))

    def by_redlock_py() -> None:
        held = manager.lock("pair:redlock-py", TTL * 1000)
        if not held:
            raise RuntimeError("not acquired")
        manager.unlock(held)

    pairs: dict[str, Pair] = {SINGLE: single, OURS: ours, "pottery": by_pottery, "redlock-py": by_redlock_py}
    if all_alive:  # the floor waits for all nodes
        pairs[FLOOR] = floor.Pair([urlsplit(url).path for url in urls], b"pair:floor", TTL * 1000)
    return pairs


def _async_pairs() -> dict[str, AsyncPair]:
    async def single() -> None:
        async with lock("pair", ttl=TTL):
            pass

    async def ours() -> None:
        async with lock("pair", ttl=TTL, using="quorum"):
            pass

    return {ASYNC_SINGLE: single, ASYNC_OURS: ours}
