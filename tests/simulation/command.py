"""The command: many simulations, each in a process of its own, on all cores."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pickle
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from .plan import Event
from .shrink import shrunk
from .simulation import Outcome, Simulation
from .worlds import WORLDS

LONGEST_RUN = 120.0  # real seconds; more is an endless loop in which no simulated time passes


class Run:
    """One simulation in a forked process, whose threads need no end, and whose changes of the system end with it."""

    def __init__(self, world: str, seed: int, plan: Sequence[Event] | None = None) -> None:
        self.seed, self.plan = seed, plan
        self.connection, theirs = Pipe(duplex=False)
        self.began = time.monotonic()
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
    faulthandler.dump_traceback_later(LONGEST_RUN, exit=True)
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
        self.counts: Counter[str] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()
        self.findings: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.hours += outcome.hours
        self.counts += outcome.counts
        self.met += outcome.met
        if outcome.violation:
            self.findings.append(outcome)

    @property
    def faults(self) -> list[str]:
        return sorted({fault for fault, _ in self.met})

    @property
    def operations(self) -> Sequence[str]:
        return WORLDS[self.world].operations

    def unmet(self) -> list[str]:
        """Faults that met too little to prove anything."""
        pairs = product(self.faults, self.operations)
        return [f"{fault} met no {operation}" for fault, operation in pairs if not self.met[fault, operation]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--world", choices=[*WORLDS, "all"], default="all")
    parser.add_argument("--seed", type=int, help="the first one; default: by the clock")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each world")
    parser.add_argument("--runs", type=int, help="at most, of each world")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--go-on", action="store_true", help="after a finding, too")
    parser.add_argument("--json", action="store_true", help="the last line is one for machines")
    parser.add_argument("--trace", action="store_true", help="show all that happened in a run with a finding")
    options = parser.parse_args(arguments)
    first = int(time.time()) if options.seed is None else options.seed
    is_found = False
    for world in WORLDS if options.world == "all" else [options.world]:
        most = options.runs or (1 if options.seed is not None and "--minutes" not in arguments else sys.maxsize)
        totals = simulate(
            world,
            iter(range(first, sys.maxsize)),
            until=time.monotonic() + 60 * options.minutes,
            most=most,
            jobs=options.jobs,
            go_on=options.go_on,
            show=_show,
        )
        is_found = _tell(totals, options, most) or is_found
    return int(is_found)


def _show(totals: Totals) -> None:
    if sys.stderr.isatty():
        print(f"\r{totals.world}: {totals.runs} runs, {totals.hours:.1f} hours", end="", file=sys.stderr, flush=True)


def _tell(totals: Totals, options: argparse.Namespace, most: int) -> bool:
    found = []
    for finding in totals.findings:
        plan, outcome = shrunk(totals.world, finding, runs, options.jobs)
        print(f"\n{totals.world}, seed {finding.seed}:")
        print(*plan, sep="\n")
        if options.trace:
            print(*outcome.trace, sep="\n")
        print(outcome.violation)
        print(f"Again: python -m tests.simulation --world {totals.world} --seed {finding.seed} --trace")
        found.append({"seed": finding.seed, "kind": outcome.violation.splitlines()[0], "events": [*map(str, plan)]})
    unmet = totals.unmet() if totals.runs >= 200 else []
    print(
        f"{totals.world}: {totals.runs} runs, {totals.hours:.2f} hours, {totals.counts['calls']} calls,"
        f" {totals.counts['grants']} grants, {totals.counts['faults']} faults, {len(found)} findings"
    )
    for fault in totals.faults:
        print(f"  {fault:12}", *(f"{operation} {totals.met[fault, operation]:6}" for operation in totals.operations))
    print(*(f"FAILED: {each}" for each in unmet), sep="\n", end="\n" if unmet else "")
    if options.json:
        print(json.dumps({"runs": totals.runs, "virtual_hours": totals.hours, "findings": found, "unmet": unmet}))
    return bool(found or unmet)
