"""Locks in ZooKeeper beside kazoo's own, on one server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection

import django
from django.conf import settings

from tests.support import zookeeper

from .contended import figures, member, race
from .databases import in_turn, median_of, pairs_of, ratio_of
from .measure import Child, in_child, middle
from .report import Column, Table

TTL = 30
OURS, KAZOO = "django-distlock, ZooKeeper", "kazoo Lock"

PAIRS = (
    Column("lock", "lock"),
    Column("microseconds", "µs", ".0f"),
    Column("by_kazoo", "x kazoo", ".2f"),
)
CROWDS = (
    Column("size", "n", "d"),
    Column("lock", "lock"),
    Column("rate", "hand-offs/s", ".0f"),
    Column("by_kazoo", "x kazoo", ".2f"),
    Column("fairness", "Jain", ".3f"),
    Column("longest_ms", "wait ms", ".0f"),
)

Enter = Callable[[], AbstractContextManager[object]]


def run(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    if (java := zookeeper.program()) is None:
        progress("no ZooKeeper here: it is left out")
        return []
    with zookeeper.Server(java, tickTime=2000, maxSessionTimeout=40_000) as server:
        progress("ZooKeeper, uncontended")
        times = in_child(_times, server.address, rounds, seconds, within=60 + 10 * rounds * seconds)
        pairs = [
            {
                "lock": lock,
                "microseconds": median_of(times[lock]) * 1e6,
                "by_kazoo": ratio_of(times[lock], times[KAZOO]),
            }
            for lock in times
        ]
        crowds = []
        for size in (2, 8, 32):
            seen: dict[str, list[dict[str, float]]] = {lock: [] for lock in times}
            for number in range(1, rounds + 1):
                for lock, of_lock in seen.items():
                    progress(f"ZooKeeper, {size} processes, round {number} of {rounds}: {lock}")
                    of_lock.append(_rush(server.address, lock, size, seconds * 4))
                for of_lock in seen.values():
                    of_lock[-1]["by_kazoo"] = of_lock[-1]["rate"] / seen[KAZOO][-1]["rate"]
            crowds += [{"size": size, "lock": lock, **middle(of_lock)} for lock, of_lock in seen.items()]
    return [
        Table("zookeeper", "Acquire and release a lock in ZooKeeper that nobody else wants", PAIRS, pairs),
        Table(
            "zookeeper, contended",
            "n processes want one lock in ZooKeeper, held for 1 ms; the longest wait",
            CROWDS,
            crowds,
        ),
    ]


def contenders(address: str) -> dict[str, Callable[[], Enter]]:
    """Returns the contenders. Each connects when it is made."""

    def ours() -> Enter:
        from django_distlock import lock

        return partial(lock, "name", ttl=TTL, wait=None)

    def kazoo() -> Enter:
        from kazoo.client import KazooClient

        client = KazooClient(address, timeout=TTL)
        client.start()
        return partial(client.Lock, "/kazoo/name")

    return {OURS: ours, KAZOO: kazoo}


def _configure(address: str) -> None:
    settings.configure(
        DISTRIBUTED_LOCKS={
            "default": {
                "BACKEND": "django_distlock.backends.zookeeper.ZooKeeperBackend",
                "LOCATION": f"{address}/distlock",
            }
        },
        LOGGING_CONFIG=None,
    )
    django.setup()


def _times(address: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    _configure(address)
    locks = {lock: partial(pairs_of, make()) for lock, make in contenders(address).items()}
    return in_turn(locks, rounds, seconds)


def _rush(address: str, lock: str, size: int, seconds: float) -> dict[str, float]:
    children = [Child(_compete, address, lock) for _ in range(size)]
    tallies, _ = race(children, seconds, lambda: 0)
    return figures(tallies, seconds)


def _compete(pipe: Connection, address: str, lock: str) -> None:
    _configure(address)
    enter = contenders(address)[lock]()
    with enter():
        pass  # this opens its connection
    pipe.send("ready")
    pipe.send([member(enter, pipe.recv())])
