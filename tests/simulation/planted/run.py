"""Plants each change in a copy of the package and runs the simulation on that until it finds something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from .changes import ROOT, Change

SHARE_TO_FIND = 0.9  # of the changes of each world
GRACE = 600.0  # seconds that a simulation may take longer than it was told to: it shrinks what it found
SIMULATE = (sys.executable, "-m", "tests.simulation")


@dataclass(frozen=True)
class Result:
    """``outcome``: found, not found, hangs (the simulation did not end by itself), failed (it is broken itself), or
    found without it (the same seed finds something in the unchanged package, too, so that this proves nothing).

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
    """The share that was found, by world. ``simulate``: the command, to which options are added."""
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
    began, runs = monotonic(), 0
    for world in change.worlds:
        command = [*simulate, "--world", world, "--jobs", "1", "--json"]
        long = ["--seed", str(seed), "--minutes", f"{minutes:g}"]
        try:
            with change.environment() as environment:
                summary = _summary([*command, *long], environment, 60 * minutes + GRACE)
            runs += summary["runs"]
            if not summary["findings"]:
                continue
            first = summary["findings"][0]
            unchanged = _summary([*command, "--seed", str(first["seed"])], dict(os.environ), GRACE)
        except subprocess.TimeoutExpired:
            return _result(change, "hangs", world, runs, began, 0, "")
        except SimulationFailed as error:
            return _result(change, "failed", world, runs, began, 0, str(error))
        outcome = "found without it" if unchanged["findings"] else "found"
        return _result(
            change, outcome, world, runs, began, len(first["events"]), f"{first['kind']} (seed {first['seed']})"
        )
    return _result(change, "not found", change.worlds[-1], runs, began, 0, "")


class SimulationFailed(Exception):
    """It did not end with a summary."""


def _summary(command: Sequence[str], environment: dict[str, str], timeout: float) -> Any:
    ended = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
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
