"""Locks in databases beside those in Redis, and beside the advisory locks of PostgreSQL (django-pglock)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from django.core.signals import request_finished, request_started

from tests.support import mariadb
from tests.support.mysql_driver import is_driver_there
from tests.support.postgres import Postgres, programs

from .contended import figures, member, race
from .contenders import OURS, TTL
from .measure import Child, in_child, middle
from .report import Column, Table

REDIS, POSTGRES, SQLITE = f"{OURS}, Valkey", f"{OURS}, PostgreSQL", f"{OURS}, SQLite"
MARIADB = f"{OURS}, MariaDB"
ADVISORY = "django-pglock advisory"
SYNCED = ", 1 ms per sync"  # for PostgreSQL, which otherwise does not sync here
UNKEPT = ", CONN_MAX_AGE=0"

PAIRS = (
    Column("lock", "lock"),
    Column("microseconds", "µs", ".0f"),
    Column("by_advisory", "x django-pglock", ".2f"),
)
CROWDS = (
    Column("size", "n", "d"),
    Column("lock", "lock"),
    Column("rate", "hand-offs/s", ".0f"),
    Column("by_advisory", "x django-pglock", ".2f"),
    Column("fairness", "Jain", ".3f"),
    Column("longest_ms", "wait ms", ".0f"),
)
REQUESTS = (
    Column("lock", "lock"),
    Column("microseconds", "µs", ".0f"),
    Column("unkept", "µs, CONN_MAX_AGE=0", ".0f"),
    Column("ratio", "x", ".2f"),
)

Enter = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Stores:
    url: str
    postgres: Mapping[str, Any]
    synced: Mapping[str, Any]  # PostgreSQL on a disk whose sync takes 1 ms
    mariadb: Mapping[str, Any] | None  # None: it is not installed
    file: str


def run(url: str, *, rounds: int, seconds: float, progress: Callable[[str], None]) -> list[Table]:
    if (folder := programs()) is None:
        progress("no PostgreSQL here: databases are left out")
        return []
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory())
        postgres, maria = stack.enter_context(Postgres(folder)).settings(), None
        synced = stack.enter_context(Postgres(folder, sync_us=1000)).settings()
        if (program := mariadb.program()) and is_driver_there():
            maria = stack.enter_context(mariadb.MariaDB(program)).settings()
        else:
            progress("no MariaDB here: it is left out")
        stores = Stores(url, postgres, synced, maria, str(Path(place, "shop.sqlite3")))
        in_child(_make_table, stores, within=60)
        progress("databases, uncontended")
        times = in_child(_times, stores, rounds, seconds, within=60 + 30 * rounds * seconds)
        pairs = [
            {"lock": lock, "microseconds": median_of(of_lock) * 1e6, "by_advisory": ratio_of(of_lock, times[ADVISORY])}
            for lock, of_lock in times.items()
        ]
        progress("databases, requests")
        kept = in_child(_request_times, stores, rounds, seconds, within=60 + 30 * rounds * seconds)
        requests = [
            {
                "lock": lock,
                "microseconds": median_of(kept[lock]) * 1e6,
                "unkept": median_of(of_lock) * 1e6,
                "ratio": ratio_of(of_lock, kept[lock]),
            }
            for with_unkept, of_lock in kept.items()
            if (lock := with_unkept.removesuffix(UNKEPT)) != with_unkept
        ]
        crowds = []
        for size in (2, 8, 32):
            seen: dict[str, list[dict[str, float]]] = {lock: [] for lock in times}
            for _ in range(rounds):
                for lock, of_lock in seen.items():
                    progress(f"databases, {size} processes: {lock}")
                    of_lock.append(_rush(stores, lock, size, seconds * 4))
                    advisory = ADVISORY + SYNCED if lock.endswith(SYNCED) else ADVISORY
                    of_lock[-1]["by_advisory"] = of_lock[-1]["rate"] / seen[advisory][-1]["rate"]
            crowds += [{"size": size, "lock": lock, **middle(of_lock)} for lock, of_lock in seen.items()]
    return [
        Table("databases", "Acquire and release a lock that nobody else wants, by the store", PAIRS, pairs),
        Table("databases, requests", "A request that takes a lock that nobody else wants", REQUESTS, requests),
        Table(
            "databases, contended",
            "n processes want one lock, held for 1 ms; the longest wait",
            CROWDS,
            crowds,
        ),
    ]


def median_of(times: Sequence[float]) -> float:
    return middle([{"time": time} for time in times])["time"]


def ratio_of(times: Sequence[float], others: Sequence[float]) -> float:
    """Returns the ratio of two that were measured in turn."""
    return median_of([mine / other for mine, other in zip(times, others, strict=True)])


def configure(stores: Stores) -> None:
    is_driver_there()
    known: dict[str, Mapping[str, Any]] = {
        "postgres": stores.postgres,
        "synced": stores.synced,
        "sqlite": {"ENGINE": "django.db.backends.sqlite3", "NAME": stores.file},
        **({"mariadb": stores.mariadb} if stores.mariadb else {}),
    }
    kept = {alias: {**database, "CONN_MAX_AGE": None} for alias, database in known.items()}
    unkept = {alias + UNKEPT: {**database, "CONN_MAX_AGE": 0} for alias, database in known.items()}
    backend = "django_distlock.backends.database.DatabaseBackend"
    settings.configure(
        INSTALLED_APPS=["django_distlock"],
        DATABASES={"default": {}, **kept, **unkept},
        DISTRIBUTED_LOCKS={
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": stores.url},
            **{alias: {"BACKEND": backend, "LOCATION": alias} for alias in (*kept, *unkept)},
        },
    )
    django.setup()


def contenders() -> dict[str, Enter]:
    import pglock  # reads the settings when it is imported

    return {
        ADVISORY: partial(pglock.advisory, "name", using="postgres"),
        POSTGRES: _ours("postgres"),
        ADVISORY + SYNCED: partial(pglock.advisory, "name", using="synced"),
        POSTGRES + SYNCED: _ours("synced"),
        SQLITE: _ours("sqlite"),
        **({MARIADB: _ours("mariadb")} if "mariadb" in settings.DATABASES else {}),
        REDIS: _ours("default"),
    }


def _ours(using: str) -> Enter:
    from django_distlock import lock

    return partial(lock, "name", ttl=TTL, wait=None, using=using)


def _make_table(stores: Stores) -> None:
    configure(stores)
    from django.core.management import call_command

    for database in settings.DATABASES:
        if database != "default" and not database.endswith(UNKEPT):
            call_command("migrate", database=database, verbosity=0)


def _times(stores: Stores, rounds: int, seconds: float) -> dict[str, list[float]]:
    configure(stores)
    return in_turn({lock: partial(pairs_of, enter) for lock, enter in contenders().items()}, rounds, seconds)


def _request_times(stores: Stores, rounds: int, seconds: float) -> dict[str, list[float]]:
    configure(stores)
    kept = {POSTGRES: "postgres", SQLITE: "sqlite", **({MARIADB: "mariadb"} if stores.mariadb else {})}
    unkept = {lock + UNKEPT: alias + UNKEPT for lock, alias in kept.items()}
    requests = {lock: partial(_requests_of, _ours(using)) for lock, using in {**kept, **unkept}.items()}
    return in_turn(requests, rounds, seconds)


def in_turn(measures: Mapping[str, Callable[[float], float]], rounds: int, seconds: float) -> dict[str, list[float]]:
    for measure in measures.values():
        measure(0.05)
    times: dict[str, list[float]] = {lock: [] for lock in measures}
    for _ in range(rounds):
        for lock, measure in measures.items():
            times[lock].append(measure(seconds))
    return times


def _requests_of(enter: Enter, seconds: float) -> float:
    """Returns the seconds per request."""
    done, began = 0, perf_counter()
    while (passed := perf_counter() - began) < seconds:
        request_started.send(sender=None)
        with enter():
            done += 1
        request_finished.send(sender=None)
    return passed / done


def pairs_of(enter: Enter, seconds: float) -> float:
    """Returns the seconds per pair."""
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
        pass  # this opens its connection
    pipe.send("ready")
    pipe.send([member(enter, pipe.recv())])
