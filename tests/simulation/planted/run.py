"""Plants each change in a copy of the package and runs the simulation on that until it finds something."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from tests.support.forkserver import run

from .changes import ROOT, Change

SHARE_TO_FIND = 0.9  # of the changes of each world
GRACE = 600.0  # seconds that a simulation may take longer than it was told to: it shrinks what it found
SIMULATE = ("-m", "tests.simulation")
MOST_RUNS = 150  # in which a broken rule of the scripts is found, from the seed that its entry names


@dataclass(frozen=True)
class Result:
    """``outcome``: found, not found, hangs (the simulation did not end by itself), failed (it is broken itself), or
    found without it (each seed that finds something does so in the unchanged package, too, which proves nothing).

    ``runs``: until the finding, of all worlds that were tried. ``events``: of the shrunk list. ``detail``: what was
    found, or what the simulation said at its end.
    """

    name: str
    digest: str
    outcome: str
    world: str
    runs: int
    seconds: float
    events: int
    detail: str

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def run_all(
    changes: Sequence[Change],
    *,
    seed: int,
    minutes: float,
    jobs: int,
    results: Path | None = None,
    simulate: Sequence[str] = SIMULATE,
    report: Callable[[str], object] = print,
) -> dict[str, float]:
    """The share that was found, by world. ``simulate``: what Python runs, to which options are added."""
    known = _read(results)
    done = [result for change in changes if (result := known.get((change.name, change.digest)))]
    left = [change for change in changes if (change.name, change.digest) not in known]
    if done:
        report(f"{len(done)} of {len(changes)} are known from {results}")
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_run, change, seed, minutes, simulate) for change in left]
        try:
            for future in as_completed(futures):
                done.append(result := future.result())
                report(f"[{len(done)}/{len(changes)}] {_row(result)}")
                if results:
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for line in table(sorted(done, key=lambda result: result.name)):
        report(line)
    found, total = Counter(one.group for one in done if one.outcome == "found"), Counter(one.group for one in done)
    for group in total:
        report(f"{group}: {found[group]} of {total[group]} found")
    return {group: found[group] / total[group] for group in total}


def _run(change: Change, seed: int, minutes: float, simulate: Sequence[str]) -> Result:
    began, runs, outcome, detail = monotonic(), 0, "not found", ""
    for world in change.worlds:
        command, following, ends = (
            [*simulate, "--world", world, "--jobs", "1", "--json"],
            seed,
            monotonic() + 60 * minutes,
        )
        try:
            while (left := ends - monotonic()) > 0:
                with change.environment() as environment:
                    options = ["--seed", str(following), "--minutes", f"{left / 60:.2f}"]
                    summary = _summary([*command, *options], environment, left + GRACE)
                runs += summary["runs"]
                if not summary["findings"]:
                    break
                first = summary["findings"][0]
                detail = f"{first['kind']} (seed {first['seed']})"
                if not _summary([*command, "--seed", str(first["seed"])], dict(os.environ), GRACE)["findings"]:
                    return _result(change, "found", world, runs, began, len(first["events"]), detail)
                outcome, following = "found without it", first["seed"] + 1
        except subprocess.TimeoutExpired:
            return _result(change, "hangs", world, runs, began, 0, "")
        except SimulationFailed as error:
            return _result(change, "failed", world, runs, began, 0, str(error))
    return _result(change, outcome, change.worlds[-1], runs, began, 0, detail)


@dataclass(frozen=True)
class Finding:
    """``runs``: it is found in the last of so many."""

    seed: int
    kind: str
    runs: int


def first_finding(change: Change, *limit: str) -> Finding | None:
    """In its first world, from the change's own seed on, within a limit such as ``--runs 150``."""
    command = [*SIMULATE, "--world", change.worlds[0], "--jobs", "1", "--json", "--as-drawn"]
    with change.environment() as environment:
        summary = _summary([*command, "--seed", str(change.seed), *limit], environment, 2 * GRACE)
    for found in summary["findings"]:
        if "the simulation itself failed" in found["kind"]:
            raise SimulationFailed(f"{change.name}, seed {found['seed']}: {found['kind']}")
        return Finding(found["seed"], found["kind"], summary["runs"])
    return None


def look_for(changes: Sequence[Change], jobs: int) -> list[Change]:
    """As the suite does for a few. Returns those that are not found."""

    def look(change: Change) -> tuple[Change, Finding | None]:
        return change, first_finding(change, "--runs", str(MOST_RUNS))

    left = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(look, change) for change in changes]
        for number, future in enumerate(as_completed(futures), 1):
            change, finding = future.result()
            said = f"{finding.kind} (seed {finding.seed}, run {finding.runs})" if finding else "NOT FOUND"
            print(f"[{number}/{len(changes)}] {change.name}: {said}", flush=True)
            left += [] if finding else [change]
    print(f"{len(changes) - len(left)} of {len(changes)} found", flush=True)
    return left


def seed_of_finding(change: Change) -> int:
    """The first one from the change's own on with which its first world finds it, as the suite looks for it."""
    if (finding := first_finding(change, "--minutes", f"{GRACE / 60}")) is None:
        raise SimulationFailed(f"{change.name} is not found")
    return finding.seed


class SimulationFailed(Exception):
    """It did not end with a summary."""


def _summary(command: Sequence[str], environment: dict[str, str], timeout: float) -> Any:
    environment = {**environment, "PYTHONHASHSEED": "0"}  # as its process begins with
    ended = run(command, like="simulation", env=environment, cwd=ROOT, timeout=timeout, check=False)
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
        raise SimulationFailed(f"status {ended.returncode}: {' '.join(said)}") from None


def _result(change: Change, outcome: str, world: str, runs: int, began: float, events: int, detail: str) -> Result:
    return Result(change.name, change.digest, outcome, world, runs, round(monotonic() - began, 1), events, detail)


def _read(results: Path | None) -> dict[tuple[str, str], Result]:
    if results is None or not results.exists():
        return {}
    read = [Result(**json.loads(line)) for line in results.read_text().splitlines()]
    return {(result.name, result.digest): result for result in read}


def table(results: Sequence[Result]) -> list[str]:
    head = "| change | world | outcome | runs | seconds | events | what |"
    return [head, "|---|---|---|--:|--:|--:|---|", *map(_row, results)]


def _row(result: Result) -> str:
    numbers = f"{result.runs} | {result.seconds:.0f} | {result.events or ''}"
    return f"| {result.name} | {result.world} | {result.outcome} | {numbers} | {result.detail} |"
