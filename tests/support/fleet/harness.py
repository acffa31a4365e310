"""Starts beats and workers as Celery's own commands, and reads what they sent and ran.

They share two servers: one carries the broker and the journal and is left in peace, the other has the stamps.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import redis

from example_project.valkey import Valkey
from tests.support.forkserver import Program
from tests.support.programs import ROOT
from tests.support.tools import eventually

from .verdict import EVERYBODY, LOOKS, PROMPT, Faults, Rhythm, Sent, Span, Verdict, judge
from .witness import MachineWitness, StoreWitness

STARTS_WITHIN = 60.0  # seconds; many processes start at once on a busy machine
FIRST_TICK = 1.0  # seconds that a beat needs once it says that it is ready
RETRY = 1.5  # seconds within which a beat asks a store again that did not answer: one, and the timeout of its socket


class Fleet:
    """``with Fleet(folder, journal, store, entries) as fleet``: ends all it started."""

    def __init__(
        self,
        folder: Path,
        journal: Valkey,
        store: Valkey,
        entries=None,
        rows=None,
        scheduler="distlock_memory",
        settle=2.0,
        broker: str | None = None,
        beat: dict[str, object] | None = None,
        conf: dict[str, object] | None = None,
    ) -> None:
        """``beat``: DISTRIBUTED_LOCKS_BEAT; ``conf``: further settings of Celery.

        ``broker``: its URL, if it is another server than the journal.
        """
        self.folder, self.scheduler, self.store = folder, scheduler, store
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        repeated = {name: (kind, value) for name, (kind, value, one_off) in (rows or {}).items() if not one_off}
        planned = ((entries or {}) | repeated).items()
        self.rhythms = {name: Rhythm(kind, value) for name, (kind, value) in planned if kind != "cron"}
        self._servers = [(EVERYBODY, store.process.pid), (EVERYBODY, journal.process.pid)]
        self.machine, self.witness = MachineWitness(self._pids), StoreWitness(store)
        self._ended: dict[str, list[float]] = {}
        self._emptied: list[float] = []
        self._stopped: dict[str, float] = {}
        self._paused: dict[str, list[Span]] = {}
        self.journal = redis.Redis.from_url(journal.url, socket_timeout=5, decode_responses=True)
        self.journal.flushall()
        plan = {
            "locks": store.url,
            "journal": journal.url,
            "broker": broker or f"redis+socket://{journal.socket}?virtual_host=1",
            "beat": beat or {},
            "conf": conf or {},
            "database": str(folder / "fleet.sqlite3"),
            "entries": entries or {},
            "rows": rows or {},
            "settle": settle,
        }
        self.environment = {
            **os.environ,
            "FLEET": json.dumps(plan),
            "DJANGO_SETTINGS_MODULE": "tests.support.fleet.settings",
            "PYTHONPATH": os.pathsep.join([self._entry_points(), str(ROOT)]),
        }
        if rows:
            subprocess.run(
                [sys.executable, "-m", "tests.support.fleet.app"], cwd=ROOT, env=self.environment, check=True
            )

    def _entry_points(self) -> str:
        """A folder that makes Celery find the schedulers by their names, where the package is not installed."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        info = self.folder / "site" / "django_distlock_here-0.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: django-distlock-here\nVersion: 0\n")
        lines = [f"{name} = {target}" for name, target in project["entry-points"]["celery.beat_schedulers"].items()]
        info.joinpath("entry_points.txt").write_text("\n".join(["[celery.beat_schedulers]", *lines, ""]))
        return str(info.parent)

    def _pids(self) -> list[tuple[str, int]]:
        return [*self._servers, *((name, process.pid) for name, process in list(self.processes.items()))]

    def beat(self, name: str, ahead: float = 0.0, broker: str = "") -> None:
        """``broker``: the URL by which this one reaches it, if that is another way."""
        self._start(name, ["beat", *self._beat_options(name)], ahead, broker)

    def worker(self, name: str, with_beat: bool = False) -> None:
        """Prefork where there is a beat inside, as it is in production; else as small as can be."""
        more = ["--beat", *self._beat_options(name), "--concurrency=1"] if with_beat else ["--pool=solo"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        self._start(name, ["worker", f"--hostname={name}@fleet", *quiet, *more])

    def _beat_options(self, name: str) -> list[str]:
        # Not -S, which is another option of the worker.
        return ["--scheduler", self.scheduler, "-s", str(self.folder / f"schedule-{name}")]

    def _start(self, name: str, arguments: list[str], ahead: float = 0.0, broker: str = "") -> None:
        self.folder.joinpath(f"celerybeat-{name}.pid").unlink(missing_ok=True)
        with self.folder.joinpath(f"{name}.log").open("ab") as log:
            arguments = [
                "-m",
                "celery",
                "-A",
                "tests.support.fleet.app",
                *arguments,
                "--loglevel=warning",
                "--pidfile=",
            ]
            self.processes[name] = Program(
                arguments,
                like="celery",
                cwd=ROOT,
                env={**self.environment, "FLEET_NAME": name, "FLEET_AHEAD": str(ahead), "FLEET_BROKER": broker},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self, beats: int, workers: int = 0, with_beat: bool = False) -> None:
        """b1, b2, … and w1, w2, …; returns when all are ready."""
        for number in range(1, beats + 1):
            if with_beat:
                self.worker(f"b{number}", with_beat=True)
            else:
                self.beat(f"b{number}")
        for number in range(1, workers + 1):
            self.worker(f"w{number}")
        self.wait_for(2 * beats if with_beat else beats + workers)

    def wait_for(self, ready: int) -> None:
        eventually(lambda: self.journal.llen("ready") >= ready or self._died(), STARTS_WITHIN)

    def _died(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, -signal.SIGKILL, -signal.SIGTERM, 0):
                raise AssertionError(f"{name} ended with {process.returncode}: {self.log(name)[-3000:]}")

    def strike_next(self, moment: str, number: signal.Signals) -> tuple[str, float]:
        """Stop or kill the beat that is the next to send, "before" it does or "after".

        Returns its name, and when the run was due.
        """
        beats, struck = [name for name in self.processes if name.startswith("b")], self.journal.llen("struck")
        for name in beats:
            self.journal.set(f"{moment}:{name}", int(number))
        eventually(lambda: self.journal.llen("struck") > struck, STARTS_WITHIN)
        self.journal.delete(*(f"{moment}:{name}" for name in beats))
        _, due, by, _ = json.loads(self.journal.lindex("struck", struck))
        return by, due

    def send_signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.send_signal(name, number)
        self._ended.setdefault(name, []).append(time.time())  # what it did before counts as done before
        self.processes[name].wait(30)

    def replace(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a beat and start another one; returns when that is ready."""
        self.end(name, number)
        self.beat(name)
        eventually(lambda: self._ready_after(name, self._ended[name][-1]) or self._died(), STARTS_WITHIN)

    def stop(self, name: str) -> None:
        self._stopped[name] = time.time()
        self.send_signal(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self.send_signal(name, signal.SIGCONT)
        self._paused.setdefault(name, []).append((self._stopped.pop(name), time.time()))

    def pause(self, name: str, seconds: float) -> None:
        self.stop(name)
        time.sleep(seconds)
        self.go_on(name)

    def pause_store(self, seconds: float) -> None:
        begin = time.time()
        self.store.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.store.process.send_signal(signal.SIGCONT)
        self._paused.setdefault(EVERYBODY, []).append((begin, time.time() + RETRY))

    def empty_store(self) -> None:
        self._emptied.append(time.time())
        with redis.Redis.from_url(self.store.url, socket_timeout=5) as client:
            client.flushall()
        self._paused.setdefault(EVERYBODY, []).append((self._emptied[-1], time.time() + LOOKS))

    def _ready_after(self, name: str, moment: float) -> float | None:
        ready = (json.loads(line) for line in self.journal.lrange("ready", 0, -1))
        return min((at for who, at in ready if who == name and at > moment), default=None)

    def faults(self) -> Faults:
        """What hindered whom up to now."""
        spans = {name: list(paused) for name, paused in self._paused.items()}
        for name, moments in self._ended.items():
            for moment in moments:
                ready = self._ready_after(name, moment)
                spans.setdefault(name, []).append((moment, math.inf if ready is None else ready + FIRST_TICK))
        spans.setdefault(EVERYBODY, []).extend(self.machine.stalls)
        unsettled = {
            entry: [(begin, end + RETRY) for begin, end in times] for entry, times in self.witness.unsettled.items()
        }
        return Faults(spans, self._ended, self._emptied, unsettled, self.machine.waited)

    def judge(self, begin: float) -> Verdict:
        """From that moment to now: of the entries whose rhythm is known."""
        end = time.time()
        time.sleep(2 * PROMPT)  # for messages that are on their way
        beats = [name for name in self.processes if name.startswith("b")]
        seen = [*self.sends(), *self.runs()]
        return judge(self.rhythms, beats, self.witness.claims, seen, self.faults(), begin, end)

    def is_alive(self, name: str) -> bool:
        return self.processes[name].poll() is None

    def log(self, name: str) -> str:
        return self.folder.joinpath(f"{name}.log").read_text(errors="replace")

    def _read(self, what: str) -> list[Sent]:
        return sorted((Sent(*json.loads(line)) for line in self.journal.lrange(what, 0, -1)), key=lambda one: one.at)

    def sends(self, entry: str | None = None, begin: float = 0.0, end: float = math.inf) -> list[Sent]:
        return [one for one in self._read("sends") if entry in (None, one.entry) and begin <= one.at <= end]

    def runs(self) -> list[Sent]:
        return self._read("runs")

    def sent_runs(self, begin: float = 0.0) -> list[tuple[str, float]]:
        """For each message since then, of which entry it is, and for which moment; not of stock beats."""
        lines = sorted(map(json.loads, self.journal.lrange("scheduled", 0, -1)), key=lambda line: line[-1])
        return [(entry, due) for entry, due, _, at in lines if at >= begin]

    def scheduled(self, entry: str) -> list[float]:
        """For which moments it was sent, in the order of the messages."""
        return [due for name, due in self.sent_runs() if name == entry]

    def __enter__(self) -> Fleet:
        self.witness.__enter__()
        self.machine.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the session that was made for it: worker -B forks
            process.wait()
        if kind:
            for name in self.processes:
                print(f"--- {name}\n{self.log(name)[-2000:]}")
        self.machine.__exit__()
        self.witness.__exit__()
        self.journal.close()


def per_window(sends: list[Sent], period: float, begin: float, end: float) -> Counter[int]:
    """How many were sent in each window of the wall clock between two moments; windows without any are there too."""
    windows = range(math.ceil(begin / period), math.floor(end / period))
    counted = Counter(math.floor(one.at / period) for one in sends)
    return Counter({window: counted[window] for window in windows})


def silences(sends: list[Sent]) -> list[float]:
    return [later.at - earlier.at for earlier, later in pairwise(sends)]


def report(test: str, **figures: object) -> None:
    """A line of JSON, to the output of the test and to the file that DISTLOCK_FIGURES names."""
    line = json.dumps({"test": test, **figures})
    print(line)
    if path := os.environ.get("DISTLOCK_FIGURES"):
        with Path(path).open("a") as file:
            file.write(f"{line}\n")
