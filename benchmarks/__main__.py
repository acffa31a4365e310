"""``make bench``: compares what locks cost, on a private server. Figures differ by machine; look at the ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic

from example_project.valkey import Valkey

from . import chart, contended, crowd, databases, held, listing, redlock, tasks, uncontended, zookeeper
from .contenders import configure
from .measure import Store
from .report import Table

PACKAGES = (
    "django-distlock", "django", "redis", "hiredis", "django-redis", "python-redis-lock", "pottery", "redlock-py",
    "psycopg", "django-pglock", "kazoo",
)  # fmt: skip

Benchmark = Callable[..., list[Table]]


def benchmarks(quick: bool) -> dict[str, Benchmark]:
    return {
        "uncontended": partial(uncontended.run, rounds=3 if quick else 12, seconds=0.1 if quick else 0.25),
        "processes": partial(contended.run_processes, rounds=1 if quick else 3, seconds=0.8 if quick else 1.5),
        "threads": partial(contended.run_threads, rounds=1 if quick else 3, seconds=0.8 if quick else 1.5),
        "slots": partial(contended.run_slots, rounds=1 if quick else 3, seconds=0.8 if quick else 1.5),
        "held": partial(held.run, ticks=1 if quick else 2),
        "crowd": partial(crowd.run, rounds=1 if quick else 4, seconds=4.0 if quick else 10.0),
        "listing": partial(listing.run, rounds=2 if quick else 5, most=100_000 if quick else 1_000_000),
        "redlock": partial(redlock.run, rounds=1, seconds=0.3 if quick else 2.0),
        "tasks": partial(tasks.run, rounds=1 if quick else 3),
        "databases": partial(databases.run, rounds=1 if quick else 3, seconds=0.2 if quick else 0.4),
        "zookeeper": partial(zookeeper.run, rounds=1 if quick else 3, seconds=0.4),
    }


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__.replace("``", ""))
    parser.add_argument("--quick", action="store_true", help="five minutes instead of fifteen, and less exact")
    parser.add_argument("--only", action="append", choices=list(benchmarks(True)), help="may be given more than once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw an SVG there")
    return parser.parse_args(given)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def surroundings(url: str) -> dict[str, object]:
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "server": Store(url).version,
        "packages": packages,
    }


def main() -> int:
    options = arguments()
    chosen = {name: run for name, run in benchmarks(options.quick).items() if name in (options.only or [name])}
    began, tables = monotonic(), []
    with Valkey() as server:
        configure(server.url)
        about = surroundings(server.url)
        print(f"Python {about['python']}, {about['server']} on a unix socket, {about['cores']} cores\n")
        for run in chosen.values():
            for table in run(server.url, progress=progress):
                if sys.stderr.isatty():
                    progress("")
                print(f"{table}\n", flush=True)
                tables.append(table)
    print(f"Medians, in {monotonic() - began:.0f} s. Compare within this run: other machines give other figures.")
    if options.json:
        figures = {table.name: table.rows for table in tables}
        options.json.write_text(json.dumps({**about, "figures": figures}, indent=2) + "\n")
    if options.chart:
        options.chart.write_text(chart.draw(tables))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
