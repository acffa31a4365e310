"""Locks in databases beside those in Redis, and beside the advisory locks of PostgreSQL (django-pglock)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import django
from django.conf import settings

from tests.support import mariadb
from tests.support.postgres import Postgres, programs

from .contended import figures, member, race
from .contenders import OURS, TTL
from .measure import Child, in_child, middle
from .report import Column, Table

REDIS, POSTGRES, SQLITE = f"{OURS}, Valkey", f"{OURS}, PostgreSQL", f"{OURS}, SQLite"
MARIADB = f"{OURS}, MariaDB"
ADVISORY = "django-pglock advisory"

PAIRS = (
    Column("lock", "lock"),
    Column("microseconds", "µs", ".0f"),
    Column("by_advisory", "x django-pglock", ".2f"),
)
CROWDS = (
    Column("size", "n", "d"),
    Column("lock", "lock"),
    Column("rate", "hand-offs/s", ".0f"),
    Column("fairness", "Jain", ".3f"),
    Column("longest_ms", "wait ms", ".0f"),
)

Enter = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Stores:
    url: str
    postgres: Mapping[str, Any]
    mariadb: Mapping[str, Any] | None  # None: it is not here
    file: str


def run(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    if (folder := programs()) is None:
        progress("no PostgreSQL here: databases are left out")
        return []
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory())
        postgres, maria = stack.enter_context(Postgres(folder)).settings(), None
        if (program := mariadb.program()) and mariadb.is_driver_there():
            maria = stack.enter_context(mariadb.MariaDB(program)).settings()
        else:
            progress("no MariaDB here: it is left out")
        stores = Stores(url, postgres, maria, str(Path(place, "shop.sqlite3")))
        in_child(_make_table, stores, within=60)
        progress("databases, uncontended")
        times = in_child(_times, stores, rounds, seconds, within=60 + 20 * rounds * seconds)
        pairs = [
            {
                "lock": lock,
                "microseconds": middle([{"time": time} for time in of_lock])["time"] * 1e6,
                "by_advisory": middle(
                    [{"ratio": mine / other} for mine, other in zip(of_lock, times[ADVISORY], strict=True)]
                )["ratio"],
            }
            for lock, of_lock in times.items()
        ]
        crowds = []
        for size in (2, 8, 32):
            for lock in times:
                progress(f"databases, {size} processes: {lock}")
                seen = [_rush(stores, lock, size, seconds * 4) for _ in range(rounds)]
                crowds.append({"size": size, "lock": lock, **middle(seen)})
    return [
        Table("databases", "Acquire and release a lock that nobody else wants, by the store", PAIRS, pairs),
        Table(
            "databases, contended",
            "n processes want one lock, held for 1 ms; the longest wait",
            CROWDS,
            crowds,
        ),
    ]


def configure(stores: Stores) -> None:
    backend = "django_distlock.backends.database.DatabaseBackend"
    others = {"mariadb": {**stores.mariadb, "CONN_MAX_AGE": None}} if stores.mariadb else {}
    mariadb.is_driver_there()
    settings.configure(
        INSTALLED_APPS=["django_distlock"],
        DATABASES={
            "default": {**stores.postgres, "CONN_MAX_AGE": None},
            "file": {"ENGINE": "django.db.backends.sqlite3", "NAME": stores.file, "CONN_MAX_AGE": None},
            **others,
        },
        DISTRIBUTED_LOCKS={
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": stores.url},
            "postgres": {"BACKEND": backend, "LOCATION": "default"},
            "sqlite": {"BACKEND": backend, "LOCATION": "file"},
            **{alias: {"BACKEND": backend, "LOCATION": alias} for alias in others},
        },
    )
    django.setup()


def contenders() -> dict[str, Enter]:
    import pglock  # knows settings when it is imported

    from django_distlock import lock

    def ours(using: str) -> Enter:
        return partial(lock, "name", ttl=TTL, wait=None, using=using)

    return {
        ADVISORY: partial(pglock.advisory, "name"),
        POSTGRES: ours("postgres"),
        SQLITE: ours("sqlite"),
        **({MARIADB: ours("mariadb")} if "mariadb" in settings.DATABASES else {}),
        REDIS: ours("default"),
    }


def _make_table(stores: Stores) -> None:
    configure(stores)
    from django.core.management import call_command

    for database in settings.DATABASES:
        call_command("migrate", database=database, verbosity=0)


def _times(stores: Stores, rounds: int, seconds: float) -> dict[str, list[float]]:
    configure(stores)
    entrances = contenders()
    for enter in entrances.values():
        _pairs_of(enter, 0.05)
    times: dict[str, list[float]] = {lock: [] for lock in entrances}
    for _ in range(rounds):
        for lock, enter in entrances.items():
            times[lock].append(_pairs_of(enter, seconds))
    return times


def _pairs_of(enter: Enter, seconds: float) -> float:
    """Seconds per pair."""
    done, began = 0, perf_counter()
    while (passed := perf_counter() - began) < seconds:
        with enter():
            done += 1
    return passed / done


def _rush(stores: Stores, lock: str, size: int, seconds: float) -> dict[str, float]:
    children = [Child(_compete, stores, lock) for _ in range(size)]
    tallies, _ = race(children, seconds, lambda: 0)
    return figures(tallies, seconds)


def _compete(pipe: Connection, stores: Stores, lock: str) -> None:
    configure(stores)
    enter = contenders()[lock]
    with enter():
        pass  # opens its connection
    pipe.send("ready")
    pipe.send([member(enter, pipe.recv())])
