"""Processes that are killed, stopped and cut off from the store at random while they use locks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.history import EVERYBODY, Event, Journal, grants_in, read
from tests.support.tools import PATIENCE


class Accidents:
    """``run(seconds, grants)`` lets the peers work, and returns what they saw. Prints the seed of its dice.

    ``peers``: ready, each takes the folder of its journal and a seed, says "at work", takes the latest time to end, and
    says "out" then, or once there is a file "over" in the folder; ``cut``: takes the store's connections from all of
    them; ``spared``: how many are not killed.
    """

    def __init__(
        self, peers: Sequence[Any], folder: Path, *, cut: Callable[[], None] | None = None, spared: int
    ) -> None:
        seed = random.randrange(10**9)
        print(f"seed {seed}")
        self._dice = random.Random(seed)
        self._folder = folder
        self._journal = Journal(folder)
        self._running = list(peers)
        self._stopped: dict[Any, float] = {}
        self._cut = cut
        self._spared = spared

    def run(self, seconds: float, grants: int, to: Sequence[Any] = ()) -> list[Event]:
        """At least so long, and until there were so many grants, which takes a busy machine longer.

        ``to``: peers that shall each have had one by then, unless they were killed.
        """
        for peer in self._running:
            peer.tell(f"{self._folder} {self._dice.random()}")
        for peer in self._running:
            peer.says("at work", 3 * PATIENCE)
        ends = time.monotonic() + seconds
        latest = ends + 10 * PATIENCE
        for peer in self._running:
            peer.tell(str(latest))
        happen: list[Callable[[], None]] = [self._kill, self._stop, self._stop, self._stop]
        if self._cut:
            happen += [self._cut_all, self._cut_all]
        while (now := time.monotonic()) < ends or (now < latest and not self._were_granted(grants, to)):
            time.sleep(self._dice.random() * 0.4)
            self._dice.choice(happen)()
            self._continue([peer for peer, until in self._stopped.items() if time.monotonic() > until])
        self._continue(list(self._stopped))
        (self._folder / "over").touch()
        for peer in self._running:
            peer.says("out", 3 * PATIENCE)
            assert peer.process.wait(PATIENCE) == 0
        return read(self._folder)

    def _were_granted(self, grants: int, to: Sequence[Any]) -> bool:
        granted = grants_in(self._folder)
        return len(granted) >= grants and {peer.process.pid for peer in to if peer in self._running} <= {*granted}

    def _kill(self) -> None:
        if len(self._running) > self._spared:
            victim = self._dice.choice(self._running)
            self._running.remove(victim)
            self._stopped.pop(victim, None)
            self._disturbed(victim.process.pid)
            victim.kill()

    def _stop(self) -> None:
        if not self._stopped:
            victim = self._dice.choice(self._running)
            self._disturbed(victim.process.pid)
            victim.stop()
            self._stopped[victim] = time.monotonic() + self._dice.choice((0.05, 0.3, 1.2))

    def _continue(self, peers: Sequence[Any]) -> None:
        for peer in peers:
            self._disturbed(peer.process.pid)
            peer.go_on()
            del self._stopped[peer]

    def _cut_all(self) -> None:
        assert self._cut
        self._disturbed(EVERYBODY)
        self._cut()
        self._disturbed(EVERYBODY)

    def _disturbed(self, pid: int) -> None:
        self._journal.write("disturbed", pid=pid)
