"""Measures what a process pays before its first lock, while it waits for very many, and after a burst of threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from time import process_time, sleep

from django_distlock import lock, locks

from .contenders import configure
from .measure import Store, in_child
from .report import Column, Table

NAMES = 10_000
LEASE = 600  # seconds, so that no lease ends meanwhile
THREADS = 50
KEPT = 2.0  # seconds for which an idle connection is kept, in place of a minute

IMPORT = """
import django, json, sys, time
from django.conf import settings
settings.configure(LOGGING_CONFIG=None)
django.setup()
before, began = len(sys.modules), time.process_time()
import {package}
print(json.dumps([(time.process_time() - began) * 1000, len(sys.modules) - before]))
"""

IMPORTS = (
    Column("what", "import after django.setup()"),
    Column("cpu_ms", "CPU ms", ".1f"),
    Column("modules", "modules", "d"),
)
WAITING = (
    Column("names", "names waited for at once", ",d"),
    Column("core", "% of a core", ".1f"),
    Column("looks", "looks/s", ",.0f"),
)
IDLE = (
    Column("busy", "after the burst", "d"),
    Column("idle", "later", "d"),
)


def run(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    progress(f"imports, {NAMES:,} names waited for, {THREADS} threads")
    imports = [_imported(package, rounds) for package in ("django_distlock", "redis", "redis.asyncio")]
    waiting = [in_child(_wait, url, names, seconds, within=120 + seconds) for names in (NAMES // 10, NAMES)]
    idle = in_child(_burst, url, within=60)
    return [
        Table("imports", "Imports, the cheapest of some processes", IMPORTS, imports),
        Table("waiting", "One process, a task per name, nobody is served", WAITING, waiting),
        Table(
            "idle",
            f"Connections after {THREADS} threads at once, kept for {KEPT:.0f} s in place of a minute",
            IDLE,
            [idle],
        ),
    ]


def _imported(package: str, rounds: int) -> dict[str, object]:
    program = [sys.executable, "-c", IMPORT.format(package=package)]
    found = [subprocess.run(program, capture_output=True, text=True, check=True).stdout for _ in range(3 * rounds)]
    cpu_ms, modules = min(tuple(map(float, one.strip("[]\n").split(","))) for one in found)
    return {"what": package, "cpu_ms": cpu_ms, "modules": int(modules)}


def _wait(url: str, names: int, seconds: float) -> dict[str, float]:
    configure(url)
    held = [lock("crowd:{}", number, ttl=LEASE, renew=False) for number in range(names)]
    for one in held:
        one.acquire()
    try:
        return asyncio.run(_waiting(url, names, seconds))
    finally:
        for one in held:
            one.release()


async def _waiting(url: str, names: int, seconds: float) -> dict[str, float]:
    async def wait(number: int) -> None:
        async with lock("crowd:{}", number, wait=None):
            pass

    store, waiters = Store(url), [asyncio.create_task(wait(number)) for number in range(names)]
    await asyncio.sleep(2 + names / 500)  # until each has looked once, and their looks are spread
    worked, looked = process_time(), store.calls("evalsha")
    await asyncio.sleep(seconds)
    worked, looked = process_time() - worked, store.calls("evalsha") - looked
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    return {"names": names, "core": worked / seconds * 100, "looks": looked / seconds}


def _burst(url: str) -> dict[str, int]:
    configure(url)
    locks["default"].timing.idle_kept = KEPT
    store, together = Store(url), threading.Barrier(THREADS)
    before = store.connections()

    def work(number: int) -> None:
        for _ in range(20):
            together.wait()
            with lock("burst:{}", number):
                pass

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busy = store.connections() - before
    for _ in range(10):  # the process continues with little to do
        sleep(KEPT / 4)
        with lock("burst"):
            pass
    return {"busy": busy, "idle": store.connections() - before}
