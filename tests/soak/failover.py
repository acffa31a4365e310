"""Kill the master of Redis with Sentinel and the leader of ZooKeeper, and tell what became of the locks that were held.

    python -m tests.soak.failover

Nothing that it writes in its last second reaches the others, as where the network between them is slow. Then somebody
else asks for each lock whose holder believes in it. Exit code 1: ZooKeeper forgot one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import django
from django.conf import settings

WARM = 200  # locks that are held when it begins
BEHIND = 1.0  # seconds before the death of the first one in which nothing of it reaches the others
TTL = 30.0
ASKED_WITHIN = 60.0  # seconds in which somebody serves again


@dataclass
class Report:
    """``held``: locks whose holders believed in them after a failover. ``twice``: granted to another one then."""

    store: str
    failovers: int = 0
    held: int = 0
    twice: int = 0
    lost: int = 0  # whose holders knew that they were lost
    longest: float = 0.0  # seconds until a lock was granted again

    def __str__(self) -> str:
        return (
            f"{self.store}: {self.failovers} failovers, after which {self.held} holders believed in their locks;"
            f" {self.twice} of these were granted to somebody else, {self.lost} others were lost before;"
            f" again a lock after {self.longest:.1f} s at most"
        )


class Topology:
    """Servers, one of which decides. ``entry`` of the settings."""

    name: str
    entry: dict[str, Any]

    def first(self) -> Any:
        """The one that decides."""
        raise NotImplementedError

    def cut(self, first: Any) -> Callable[[], None]:
        """Nothing reaches the others. Returns what lets them take over when it is dead."""
        raise NotImplementedError

    def heal(self, killed: Any) -> None:
        raise NotImplementedError


class Sentinel(Topology):
    """As it is by default: the master goes on where none of its replicas is there."""

    name = "Redis with Sentinel"
    server: tuple[str, ...] = ()

    def __init__(self, watched: Any) -> None:
        self._watched = watched
        self.entry = {"BACKEND": "django_distlock.backends.redis.RedisBackend", "OPTIONS": watched.options}

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Sentinel]:
        from tests.support.sentinel import Watched

        with Watched(replicas=2, server=cls.server) as watched:
            yield cls(watched)

    def first(self) -> Any:
        return self._watched.master

    def cut(self, first: Any) -> Callable[[], None]:
        self._watched.cut_off(first)
        return lambda: None

    def heal(self, killed: Any) -> None:
        from tests.support.tools import eventually

        self._watched.wait_for_another(killed)
        killed.start()
        eventually(lambda: self._follows(killed), ASKED_WITHIN)

    def _follows(self, server: Any) -> bool:
        """Whether it was told by the sentinels, and knows what its master does."""
        with server.client() as client:
            about = client.info("replication")
        return bool(about["role"] == "slave" and about["master_link_status"] == "up")


class CarefulSentinel(Sentinel):
    """It refuses what no replica is there to learn. One that is there, and late, it does not wait for."""

    name = "Redis with Sentinel, min-replicas-to-write 1"
    server = ("min-replicas-to-write 1", "min-replicas-max-lag 3")


class ZooKeeper(Topology):
    name = "ZooKeeper"

    def __init__(self, ensemble: Any) -> None:
        self._ensemble = ensemble
        self.entry = {
            "BACKEND": "django_distlock.backends.zookeeper.ZooKeeperBackend",
            "LOCATION": ensemble.location,
            "OPTIONS": {"request_timeout": 20.0},
        }

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[ZooKeeper]:
        from tests.support.zookeeper import Ensemble, program

        if (java := program()) is None:
            raise SystemExit("ZooKeeper is not installed.")
        with Ensemble(java, syncLimit=20) as ensemble:
            yield cls(ensemble)

    def first(self) -> Any:
        return self._ensemble.leader

    def cut(self, first: Any) -> Callable[[], None]:
        others = [server for server in self._ensemble.servers if server is not first]
        for server in others:
            server.stop()

        def go_on() -> None:
            for server in others:
                server.go_on()

        return go_on

    def heal(self, killed: Any) -> None:
        self._ensemble.heal()


def measure(topology: Topology, failovers: int, report: Report) -> None:
    for number in range(1, failovers + 1):
        first, held = topology.first(), []
        while len(held) < WARM:
            take_locks(f"before:{number}", held, until=time.monotonic() + BEHIND)
        go_on = topology.cut(first)
        take_locks(f"behind:{number}", held, until=time.monotonic() + BEHIND)
        began = time.monotonic()
        first.kill()
        go_on()
        insist(lambda number=number: lock(f"again:{number}", using="other", ttl=TTL, wait=5).acquire())
        report.longest = max(report.longest, time.monotonic() - began)
        judge(held, report)
        report.failovers += 1
        topology.heal(first)
        for handle, _ in held:
            with suppress(LockError):  # it was counted
                handle.release()


def judge(held: list[tuple[Any, Any]], report: Report) -> None:
    for handle, lease in held:
        if not lease.is_held:
            report.lost += 1
            continue
        report.held += 1
        thief = lock(handle.name, using="other", ttl=TTL, wait=0)
        if not insist(thief.acquire):
            continue
        report.twice += lease.is_held
        thief.release()


def take_locks(prefix: str, held: list[tuple[Any, Any]], until: float) -> None:
    """As fast as the store grants them."""
    while time.monotonic() < until:
        handle = lock(f"{prefix}:{len(held)}", ttl=TTL, wait=0)
        try:
            if handle.acquire():
                held.append((handle, handle.lease))
        except LockError:
            return  # it grants nothing now, so nothing can be forgotten
        time.sleep(0.002)


def insist(call: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + ASKED_WITHIN
    while True:
        try:
            return call()
        except LockBackendError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.failover", description=__doc__)
    parser.add_argument("--failovers", type=int, default=5, help="of each store; default: 5")
    arguments = parser.parse_args()
    reports = []
    for kind in (Sentinel, CarefulSentinel, ZooKeeper):
        reports.append(report := Report(kind.name))
        with kind.running() as topology:
            settings.DISTRIBUTED_LOCKS = {"default": topology.entry, "other": topology.entry}
            measure(topology, arguments.failovers, report)
            locks.close()
        print(report, flush=True)
    return int(bool(reports[-1].twice or reports[-1].lost))


if __name__ == "__main__":
    settings.configure(INSTALLED_APPS=["django_distlock"], SECRET_KEY="failover", DISTRIBUTED_LOCKS={})
    django.setup()
    logging.disable(logging.CRITICAL)

    from django_distlock import LockBackendError, LockError, lock, locks

    sys.exit(main())
