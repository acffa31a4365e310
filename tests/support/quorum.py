"""Five servers that know nothing of each other, to be killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from django_distlock.types import Grant, LockRequest
from example_project.valkey import Valkey
from tests.support.tools import eventually, lock_request


def spread(backend: Any, taken: LockRequest, nodes: int = 5) -> None:
    """Ask for a lease again until that many nodes have it: at first some may not be connected yet."""

    def is_everywhere() -> bool:
        assert isinstance(backend.acquire(taken, queue=False), Grant)
        [leases] = backend.look([taken.name])
        return [info.nodes for info in leases] == [nodes]

    eventually(is_everywhere)


def connect_all(backend: Any, nodes: int = 5) -> None:
    """Return when that many nodes are connected, and will be asked."""
    taken = lock_request("connects")
    spread(backend, taken, nodes)
    backend.release(taken)


class Quorum:
    """Nodes by number. ``kill`` loses their data; ``stop`` makes them hang."""

    def __init__(self, size: int = 5) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quorum-")
        self.nodes = [Valkey(folder=self._made(number)) for number in range(size)]
        self.killed: set[int] = set()
        self.stopped: set[int] = set()

    def _made(self, number: int) -> Path:
        folder = Path(self._folder.name, str(number))
        folder.mkdir()
        return folder

    def __enter__(self) -> Quorum:
        for node in self.nodes:
            node.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, node in enumerate(self.nodes):
            if number not in self.killed:
                node.stop()
        self._folder.cleanup()

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def kill(self, number: int) -> None:
        self.nodes[number].stop()
        self.nodes[number].socket.unlink()
        self.killed.add(number)
        self.stopped.discard(number)

    def start(self, number: int) -> None:
        """Again, without what it knew."""
        self.nodes[number].start()
        self.killed.discard(number)

    def stop(self, number: int) -> None:
        os.kill(self.nodes[number].process.pid, signal.SIGSTOP)
        self.stopped.add(number)

    def go_on(self, number: int) -> None:
        os.kill(self.nodes[number].process.pid, signal.SIGCONT)
        self.stopped.discard(number)

    def clients(self) -> ExitStack:
        """``with quorum.clients() as clients``: one per node that lives, to look behind the backend's back."""
        return _Clients(self)

    def all_keys(self) -> list[list[str]]:
        """What each node that can answer holds of locks, without counters of fencing numbers."""
        with self.clients() as clients:
            return [sorted(key for key in client.scan_iter() if key != "lock|f") for client in clients.values()]


class _Clients(ExitStack):
    def __init__(self, quorum: Quorum) -> None:
        super().__init__()
        self._quorum = quorum

    def __enter__(self) -> dict[int, Any]:  # type: ignore[override]
        super().__enter__()
        return {
            number: self.enter_context(redis.Redis.from_url(node.url, socket_timeout=5, decode_responses=True))
            for number, node in enumerate(self._quorum.nodes)
            if number not in self._quorum.killed | self._quorum.stopped
        }
