"""The command: many simulations, each in a process of its own, on all cores."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any
from zlib import crc32

from .plan import Event
from .shrink import shrunk
from .simulation import Outcome, Simulation
from .worlds import WORLDS

ENOUGH = 300  # runs in which each fault must have met each operation
PROGRESS = 15.0  # seconds between two lines of progress
LONGEST_RUN = 120  # seconds of the processor; more is an endless loop in which no simulated time passes


class Run:
    """One simulation in a forked process, whose threads need no end, and whose changes of the system end with it."""

    def __init__(self, world: str, seed: int, plan: Sequence[Event] | None = None) -> None:
        self.seed, self.plan = seed, plan
        self.connection, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self.connection.close()
            _simulate(world, seed, plan, theirs)
        theirs.close()

    def outcome(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            outcome = Outcome(self.seed, self.plan or (), violation="the process ended, or no time passed")
        os.waitpid(self._pid, 0)
        self.connection.close()
        return outcome


def _simulate(world: str, seed: int, plan: Sequence[Event] | None, connection: Connection) -> None:
    faulthandler.register(signal.SIGXCPU, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_RUN, LONGEST_RUN + 5))
    try:
        outcome = Simulation(WORLDS[world], seed).run(plan)
    except BaseException:
        outcome = Outcome(seed, plan or (), violation=f"the simulation itself failed:\n{traceback.format_exc()}")
    try:
        connection.send_bytes(pickle.dumps(outcome))
    finally:
        sys.stdout.flush()
        os._exit(0)


def runs(world: str, todo: Iterator[tuple[int, Sequence[Event] | None]], jobs: int) -> Iterator[Outcome]:
    """As they end."""
    running: dict[Connection, Run] = {}
    try:
        while True:
            while len(running) < jobs and (following := next(todo, None)) is not None:
                run = Run(world, *following)
                running[run.connection] = run
            if not running:
                return
            for connection in wait(list(running)):
                yield running.pop(connection).outcome()  # type: ignore[arg-type]
    finally:
        for run in running.values():
            run.outcome()


def simulate(world: str, seeds: Iterator[int], *, until: float, most: int, jobs: int, go_on: bool, show: Any) -> Totals:
    totals = Totals(world)

    def todo() -> Iterator[tuple[int, None]]:
        for _ in range(most):
            if time.monotonic() >= until or (totals.findings and not go_on):
                return
            yield next(seeds), None

    for outcome in runs(world, todo(), jobs):
        totals.add(outcome)
        show(totals)
    return totals


class Totals:
    def __init__(self, world: str) -> None:
        self.world = world
        self.runs = 0
        self.hours = 0.0
        self.checksum = 0
        self.faults: Sequence[str] = ()
        self.shown_at = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()
        self.findings: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.hours += outcome.hours
        self.checksum ^= crc32(f"{outcome.seed} {outcome.checksum}".encode())
        self.faults = outcome.faults or self.faults
        self.counts += outcome.counts
        self.met += outcome.met
        if outcome.violation:
            self.findings.append(outcome)

    @property
    def operations(self) -> Sequence[str]:
        return WORLDS[self.world].operations

    def unmet(self) -> list[str]:
        """Faults that met too little to prove anything."""
        pairs = product(self.faults, self.operations)
        return [f"{fault} met no {operation}" for fault, operation in pairs if not self.met[fault, operation]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--world", choices=[*WORLDS, "all"], nargs="+", default=["all"])
    parser.add_argument("--seed", type=int, help="of the first run (by the clock); alone: that run and no other")
    parser.add_argument("--minutes", type=float, help="of each world (1, unless --runs is given)")
    parser.add_argument("--runs", type=int, help="of each world at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--go-on", action="store_true", help="after a finding, too")
    parser.add_argument("--twice", action="store_true", help="the runs of a seed must be the same; needs --runs")
    parser.add_argument("--as-drawn", action="store_true", help="do not make the plan of a failure short")
    parser.add_argument("--json", action="store_true", help="the last line is one for machines")
    parser.add_argument("--trace", action="store_true", help="show all that happened in a run that found something")
    options = parser.parse_args(arguments)
    first = int(time.time()) if options.seed is None else options.seed
    if options.twice and (options.runs is None or options.minutes is not None):
        parser.error("--twice needs --runs, and no --minutes")
    is_found, grand = False, []
    is_one = options.seed is not None and options.runs is None and options.minutes is None
    for world in WORLDS if "all" in options.world else options.world:
        totals, *again = (
            simulate(
                world,
                iter(range(first, sys.maxsize)),
                until=time.monotonic() + 60 * (options.minutes or (sys.maxsize if options.runs or is_one else 1.0)),
                most=1 if is_one else options.runs or sys.maxsize,
                jobs=options.jobs,
                go_on=options.go_on,
                show=_show,
            )
            for _ in range(1 + options.twice)
        )
        is_found = _tell(totals, options) or is_found
        if any(other.checksum != totals.checksum for other in again):
            print(f"FAILED: {world}: the same seeds were other runs the second time")
            is_found = True
        grand.append(totals)
    if len(grand) > 1:
        hours, findings = sum(totals.hours for totals in grand), sum(len(totals.findings) for totals in grand)
        print(f"in all: {sum(totals.runs for totals in grand)} runs, {hours:.2f} hours, {findings} findings")
    return int(is_found)


def _show(totals: Totals) -> None:
    """On a terminal in place, else a line now and then."""
    text = f"{totals.world}: {totals.runs} runs, {totals.hours:.1f} hours, {len(totals.findings)} findings"
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)
    elif time.monotonic() > totals.shown_at + PROGRESS:
        totals.shown_at = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def _tell(totals: Totals, options: argparse.Namespace) -> bool:
    found = []
    for finding in totals.findings:
        plan, outcome = finding.plan, finding
        if not options.as_drawn:
            plan, outcome = shrunk(totals.world, finding, runs, options.jobs)
        print(f"\n{totals.world}, seed {finding.seed}:")
        print(*plan, sep="\n")
        if options.trace:
            print(*outcome.trace, sep="\n")
        print(outcome.violation)
        print(f"Again: python -m tests.simulation --world {totals.world} --seed {finding.seed} --trace")
        found.append({"seed": finding.seed, "kind": outcome.violation.splitlines()[0], "events": [*map(str, plan)]})
    unmet = totals.unmet() if totals.runs >= ENOUGH else []
    print(
        f"{totals.world}: {totals.runs} runs, {totals.hours:.2f} hours, {totals.counts['calls']} calls,"
        f" {totals.counts['grants']} grants, {totals.counts['ungranted']} that went on without the lock,"
        f" {totals.counts['faults']} faults, {len(found)} findings"
    )
    for fault in totals.faults:
        print(f"  {fault:12}", *(f"{operation} {totals.met[fault, operation]:6}" for operation in totals.operations))
    print(*(f"FAILED: {each}" for each in unmet), sep="\n", end="\n" if unmet else "")
    if options.json:
        about = {"world": totals.world, "runs": totals.runs, "virtual_hours": totals.hours, "checksum": totals.checksum}
        print(json.dumps({**about, "findings": found, "unmet": unmet}))
    return bool(found or unmet)
