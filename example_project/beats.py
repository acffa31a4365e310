"""Runs three beats and two workers with one schedule, and kills one of the beats: shows what was sent, and what ran."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from .server import ROOT, hidden_from_ctrl_c, stop

BEATS, WORKERS = 3, 2
TICK = 2  # seconds between the runs of an entry
STARTS_WITHIN = 60.0  # seconds
BEFORE, AFTER = 5.0, 9.0  # seconds of observation, before a beat is killed and after it

SENT = re.compile(r"^\[(\S+ \S+): INFO.*Sending due task tick ", re.MULTILINE)
RAN = re.compile(r"Task example_project\.shop\.tasks\.tick\[(\S+)\] succeeded")


@dataclass
class Watch:
    """The logs of one observation. ``sent``: the times, by the number of the beat. ``ran``: the ids of the tasks."""

    sent: dict[int, list[datetime]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    killed: int = 0

    @property
    def sends(self) -> list[datetime]:
        return sorted(moment for moments in self.sent.values() for moment in moments)

    @property
    def ticks(self) -> int:
        """How many runs were due from the first sent run to the last."""
        return round((self.sends[-1] - self.sends[0]).total_seconds() / TICK) + 1 if self.sends else 0

    @property
    def duplicates(self) -> int:
        return sum((later - earlier).total_seconds() < TICK / 2 for earlier, later in pairwise(self.sends))


def watch() -> Watch:
    """Start beats and workers by Celery's own commands. They share the broker and the locks of the shop."""
    with tempfile.TemporaryDirectory(prefix="beats-") as folder, ExitStack() as running:
        beats, workers = _names("beat", BEATS), _names("worker", WORKERS)
        logs = {name: Path(folder, f"{name}.log") for name in (*beats, *workers)}
        processes = {}
        for name, log in logs.items():
            processes[name] = _start(name, log)
            running.callback(stop, processes[name])
        _wait_until(lambda: any(SENT.search(logs[name].read_text()) for name in beats))
        time.sleep(BEFORE)
        victim = max(beats, key=lambda name: len(SENT.findall(logs[name].read_text())))
        print(f"Killing {victim.replace('-', ' ')}", flush=True)
        for name, process in processes.items():
            if process.poll() is not None:
                print(f"{name} ended by itself:\n{logs[name].read_text()}", flush=True)
        processes[victim].kill()
        time.sleep(AFTER)
        for name in beats:
            stop(processes[name])
        found = Watch(killed=beats.index(victim) + 1)
        for number, name in enumerate(beats, start=1):
            found.sent[number] = [_moment(text) for text in SENT.findall(logs[name].read_text())]
        _wait_until(lambda: len(_ran(logs[name] for name in workers)) >= len(found.sends), within=10)
        found.ran = _ran(logs[name] for name in workers)
    return found


def table(seen: Watch) -> str:
    rows = [(f"beat {number}" + " (killed)" * (number == seen.killed), len(sent)) for number, sent in seen.sent.items()]
    sent_by = "\n".join(f"  {who:<20}{count:>14}" for who, count in rows)
    return (
        f"{'ticks, one each ' + str(TICK) + ' s':<22}{seen.ticks:>14}\n"
        f"{'sends':<22}{len(seen.sends):>14}\n{sent_by}\n"
        f"{'runs':<22}{len(seen.ran):>14}\n"
        f"{'duplicates':<22}{seen.duplicates:>14}"
    )


def complaints(seen: Watch) -> list[str]:
    """Returns why this run proves nothing, or the opposite of what it should."""
    is_fine = {
        "Beats sent a run twice.": seen.duplicates == 0,
        f"Of {seen.ticks} runs that were due {len(seen.sends)} were sent.": seen.ticks == len(seen.sends) >= 5,
        f"Of {len(seen.sends)} runs that were sent {len(seen.ran)} ran.": sorted(set(seen.ran)) == sorted(seen.ran)
        and len(seen.ran) == len(seen.sends),
        "The beat that was killed had sent nothing.": bool(seen.sent.get(seen.killed)),
    }
    return [complaint for complaint, fine in is_fine.items() if not fine]


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range(1, count + 1)]


def _start(name: str, log: Path) -> subprocess.Popen[bytes]:
    if name.startswith("beat"):
        options = ["beat", "--scheduler=distlock_memory", "--pidfile="]
    else:
        options = ["worker", f"--hostname={name}@shop", "--pool=solo", "--without-gossip", "--without-mingle"]
    with hidden_from_ctrl_c(), log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "example_project", *options, "--loglevel=info"],
            cwd=ROOT,
            env={**os.environ, "SHOP_TICK": str(TICK)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _wait_until(condition: Callable[[], bool], within: float = STARTS_WITHIN) -> None:
    """Wait until the condition is true, or the time is over. The table shows the result in both cases."""
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _moment(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f")


def _ran(logs: Iterable[Path]) -> list[str]:
    return [found for log in logs for found in RAN.findall(log.read_text())]
