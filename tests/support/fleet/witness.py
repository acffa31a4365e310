"""Who watches a fleet from outside: what its store is made to keep, and when the machine had no time for anybody."""

from __future__ import annotations

import json
import re
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis

from django_distlock.formats import FORMAT
from example_project.valkey import Valkey

from .verdict import EVERYBODY, Claim, Span

STAMP = re.compile(rf"SET \S+\|r:fleet:(.+) {FORMAT}(\[.*\]) PX \d+")
UNSETTLED = re.compile(r"SET \S+\|n:fleet:(.+)  PX (\d+)")
STALL = 0.1  # seconds
OVER = "the witness may go"


class StoreWitness:
    """Each stamp that is written, by MONITOR; a context manager. It hears nothing more of a store that was stopped."""

    def __init__(self, store: Valkey) -> None:
        self._store = store
        self._has_lost_it = False
        self._seen: dict[tuple[str, str], Claim] = {}
        self.unsettled: dict[str, list[Span]] = {}  # by entry, when nobody was given a run
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    @property
    def claims(self) -> list[Claim]:
        """Of a claim that was made again, because its answer was lost, what it came to."""
        assert not self._has_lost_it
        return list(self._seen.values())

    def _client(self, **options: Any) -> redis.Redis:
        return redis.Redis.from_url(self._store.url, **options)

    def _listen(self) -> None:
        with self._client(socket_timeout=None, decode_responses=True) as client, client.monitor() as monitor:
            self._is_listening.set()
            try:
                for heard in monitor.listen():
                    if OVER in heard["command"]:
                        return
                    self._note(heard["command"], heard["time"])
            except redis.ConnectionError:
                self._has_lost_it = True

    def _note(self, command: str, moment: float) -> None:
        if found := STAMP.fullmatch(command):
            at, token, _, host, *more = json.loads(found[2])
            if more and more[0]:
                return  # a mark that the run was sent, or another beat that takes it over
            first = self._seen.setdefault((found[1], token), Claim(found[1], token, host, at, moment, at))
            self._seen[found[1], token] = first._replace(at=at)
        elif found := UNSETTLED.fullmatch(command):
            self.unsettled.setdefault(found[1], []).append((moment, moment + int(found[2]) / 1000))

    def __enter__(self) -> StoreWitness:
        self._thread.start()
        assert self._is_listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with self._client(socket_timeout=5) as client:
                client.echo(OVER)
        self._thread.join(10)


class MachineWitness:
    """Notes when it was not woken in time, and how long processes waited for a processor; a context manager.

    ``pids``: gives the processes, by name; those of one name count together, and one may follow another.
    """

    def __init__(self, pids: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self.stalls: list[Span] = []
        self.waited: dict[str, list[tuple[float, float]]] = {}
        self._pids = pids
        self._last: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._doze, daemon=True)

    def _doze(self) -> None:
        while True:
            began = time.time()
            if self._is_over.wait(0.05):
                return
            if (woken := time.time()) - began > STALL:
                self.stalls.append((began, woken))
            for name, pid in self._pids():
                self._note(name, pid, woken)

    def _note(self, name: str, pid: int, moment: float) -> None:
        try:
            waiting = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the process has ended, or this is no Linux
            return
        known = self.waited.setdefault(name, [])
        so_far = known[-1][1] if known else 0.0
        known.append((moment, so_far + waiting - self._last.get(pid, waiting)))
        self._last[pid] = waiting

    def slowness(self, begin: float) -> float:
        """Seconds by which something may have been late since then because the machine was busy otherwise."""
        stall = max((woken - began for began, woken in self.stalls if woken > begin), default=0.0)
        waits = {
            name: max(
                (so_far - known[bisect(known, (at - 1.0,))][1] for at, so_far in known if at > begin), default=0.0
            )
            for name, known in self.waited.items()  # within a second
        }
        servers = waits.pop(EVERYBODY, 0.0)
        return stall + servers + max(waits.values(), default=0.0)

    def __enter__(self) -> MachineWitness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(10)
