"""Three beats and a fault: this package's schedulers beside RedBeat. ``python -m benchmarks.beats`` (15 minutes).

Ten entries are due every two seconds. In the forty seconds after the fault, it counts how many of the due runs were
sent, how many were sent twice, and for how long an entry was silent.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from example_project.valkey import Valkey
from tests.support.fleet.harness import Fleet
from tests.support.fleet.verdict import Sent
from tests.support.proxy import Proxy
from tests.support.tools import eventually

from .report import Column, Table

ENTRIES, PERIOD, WINDOW = 10, 2.0, 40.0  # seconds
FROZEN, DOWN, CUT_OFF = 12.0, 4.0, 30.0  # seconds that the faults last
WARM = 5.0  # seconds from the first messages to the fault
BEATS = ("b1", "b2", "b3")
TOO_SOON = 0.6 * PERIOD  # seconds; messages closer than this are for the same run, if they do not say for which

COLUMNS = (
    Column("fault", "fault"),
    Column("scheduler", "scheduler"),
    Column("sent", "runs sent", "d"),
    Column("due", "due", "d"),
    Column("twice", "twice", "d"),
    Column("silence", "longest silence s", ".1f"),
    Column("alive", "beats alive", "d"),
)


@dataclass(frozen=True)
class Contender:
    """A scheduler to compare. ``beat``: DISTRIBUTED_LOCKS_BEAT. ``conf``: settings of Celery."""

    name: str
    scheduler: str
    beat: dict[str, Any] = field(default_factory=dict)
    conf: dict[str, Any] = field(default_factory=dict)

    @property
    def is_redbeat(self) -> bool:
        return "redbeat" in self.scheduler


OURS = Contender("distlock_memory", "distlock_memory")
AT_LEAST_ONCE = Contender(
    "the same, AT_LEAST_ONCE, RESEND_AFTER 4",
    "distlock_memory",
    beat={"AT_LEAST_ONCE": [f"entry {number}" for number in range(ENTRIES)], "RESEND_AFTER": 4},
)
TUNED_REDBEAT = Contender(
    "RedBeat, lock_timeout 10, loop 2",
    "redbeat.RedBeatScheduler",
    conf={"redbeat_lock_timeout": 10, "beat_max_loop_interval": 2},
)
REDBEAT = Contender("RedBeat, its defaults", "redbeat.RedBeatScheduler", conf={"beat_max_loop_interval": 300})


class Scene(NamedTuple):
    fleet: Fleet
    store: Valkey
    proxies: dict[str, Proxy]
    victim: str  # the beat that sent the most


def kill(scene: Scene) -> None:
    scene.fleet.end(scene.victim)


def freeze(scene: Scene) -> None:
    scene.fleet.send_signal(scene.victim, signal.SIGSTOP)
    time.sleep(FROZEN)
    scene.fleet.send_signal(scene.victim, signal.SIGCONT)


def cut_off(scene: Scene) -> None:
    scene.proxies[scene.victim].refuse()
    time.sleep(CUT_OFF)
    scene.proxies[scene.victim].accept()


def lose_store(scene: Scene) -> None:
    scene.store.stop()
    time.sleep(DOWN)
    scene.store.start()


FAULTS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    "none": ("none", lambda scene: None),
    "kill": ("kill -9 of the busiest beat", kill),
    "freeze": (f"it is stopped for {FROZEN:g} s", freeze),
    "broker": (f"it does not reach the broker for {CUT_OFF:g} s", cut_off),
    "store": (f"the store is down for {DOWN:g} s and loses its data", lose_store),
}


def measure(contender: Contender, fault: str) -> dict[str, Any]:
    with _scene(contender) as scene:
        begin = time.time()
        FAULTS[fault][1](scene)
        time.sleep(max(0.0, begin + WINDOW - time.time()))
        sends = [one for one in scene.fleet.sends() if one.at >= begin - 2 * PERIOD]
        runs = None if contender.is_redbeat else Counter(scene.fleet.sent_runs(begin))
        alive = sum(scene.fleet.is_alive(name) for name in BEATS)
    return {
        "fault": FAULTS[fault][0],
        "scheduler": contender.name,
        "sent": len(runs) if runs is not None else len([one for one in sends if one.at > begin]) - _too_soon(sends),
        "due": int(ENTRIES * WINDOW / PERIOD),
        "twice": sum(runs.values()) - len(runs) if runs is not None else _too_soon(sends),
        "silence": max(_silences(sends, begin + WINDOW)),
        "alive": alive,
    }


@contextmanager
def _scene(contender: Contender) -> Iterator[Scene]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="beats-")))
        for name in ("journal", "store", "broker", *BEATS):
            folder.joinpath(name).mkdir()
        journal, broker = (stack.enter_context(Valkey(folder=folder / name)) for name in ("journal", "broker"))
        store = stack.enter_context(Valkey(folder=folder / "store"))
        proxies = {name: stack.enter_context(Proxy(broker.socket, folder / name)) for name in BEATS}
        conf = {**contender.conf, **({"redbeat_redis_url": store.url} if contender.is_redbeat else {})}
        entries = {f"entry {number}": ("every", PERIOD) for number in range(ENTRIES)}
        fleet = stack.enter_context(
            Fleet(
                folder,
                journal,
                store,
                entries,
                scheduler=contender.scheduler,
                settle=5.0,
                beat=contender.beat,
                conf=conf,
            )
        )
        for name in BEATS:
            fleet.beat(name, broker=f"redis+socket://{proxies[name].socket}?virtual_host=1")
        eventually(lambda: len(fleet.sends()) >= 2 * ENTRIES, 90)
        time.sleep(WARM)
        victim, _ = Counter(one.by for one in fleet.sends()).most_common(1)[0]
        yield Scene(fleet, store, proxies, victim)


def _by_entry(sends: list[Sent]) -> list[list[float]]:
    return [[one.at for one in sends if one.entry == f"entry {number}"] for number in range(ENTRIES)]


def _too_soon(sends: list[Sent]) -> int:
    return sum(later - earlier < TOO_SOON for times in _by_entry(sends) for earlier, later in pairwise(times))


def _silences(sends: list[Sent], end: float) -> list[float]:
    return [max(later - earlier for earlier, later in pairwise([*times, end])) for times in _by_entry(sends) if times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FAULTS, help="this fault")
    only = parser.parse_args().only
    rows = []
    for fault in FAULTS if only is None else [only]:
        for contender in (OURS, AT_LEAST_ONCE, TUNED_REDBEAT, *([REDBEAT] if fault == "kill" else [])):
            rows.append(measure(contender, fault))
            print(rows[-1], file=sys.stderr)
    print(Table("beats", "Three beats, ten entries each 2 s, 40 s from the fault on", COLUMNS, rows))


if __name__ == "__main__":
    main()
