"""Measures a thousand tasks of one event loop that wait for the same lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import monotonic

import redis.asyncio

from django_distlock import lock

from .contenders import ASYNC_OURS, ASYNC_REDIS_PY, TTL, configure
from .measure import Store, in_child, middle
from .report import Column, Table

TASKS = 1000
GIVES_UP = 30.0  # seconds after which tasks that still wait are cancelled

COLUMNS = (
    Column("lock", "lock"),
    Column("tasks", "tasks", ",.0f"),
    Column("passed", "passed", ",.0f"),
    Column("connections", "connections", ".0f"),
    Column("seconds", "seconds", ".2f"),
    Column("commands", "commands each", ".1f"),
)


def run(url: str, *, rounds: int, progress: Callable[[str], None]) -> list[Table]:
    seen: dict[str, list[dict[str, float]]] = {ASYNC_OURS: [], ASYNC_REDIS_PY: []}
    for number in range(1, rounds + 1):
        for name, rows in seen.items():
            progress(f"{TASKS:,} tasks, round {number} of {rounds}: {name}")
            rows.append(in_child(_pass_through, url, name, within=GIVES_UP + 30))
    rows = [{"lock": name, **middle(rounds)} for name, rounds in seen.items()]
    return [Table("tasks", "Tasks of one event loop that wait for one lock", COLUMNS, rows)]


def _pass_through(url: str, name: str) -> dict[str, float]:
    configure(url)
    return asyncio.run(_measured(url, name))


async def _measured(url: str, name: str) -> dict[str, float]:
    store = Store(url)
    before = store.connections()
    client = redis.asyncio.Redis.from_url(url, max_connections=2 * TASKS)  # its waiters need one each
    enters: dict[str, Callable[[], AbstractAsyncContextManager[object]]] = {
        ASYNC_OURS: partial(lock, "tasks:ours", ttl=TTL, wait=None),
        ASYNC_REDIS_PY: partial(client.lock, "tasks:redis-py", timeout=TTL),
    }
    enter = enters[name]
    passed = 0
    is_held, may_pass = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with enter():
            is_held.set()
            await may_pass.wait()

    async def one() -> None:
        nonlocal passed
        async with enter():
            passed += 1

    # A task of its own, because each task that a holder starts would first ask whether the lock is its own.
    holder = asyncio.create_task(hold())
    await is_held.wait()
    waiting = [asyncio.create_task(one()) for _ in range(TASKS)]
    await asyncio.sleep(1.0)  # until all of them wait
    connections = store.connections()
    commands = store.commands()
    began = monotonic()
    may_pass.set()
    _, late = await asyncio.wait([holder, *waiting], timeout=GIVES_UP)
    seconds = monotonic() - began
    connections = max(connections, store.connections()) - before
    commands = store.commands() - commands
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    await client.aclose()
    return {
        "tasks": TASKS,
        "passed": passed,
        "connections": connections,
        "seconds": seconds,
        "commands": commands / max(1, passed),
    }
