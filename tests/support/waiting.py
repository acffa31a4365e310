"""Threads and tasks that wait for a lock in ``with``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

from django_distlock import Lease, LockLost, lock
from tests.support.tools import PATIENCE


class Waiter:
    """A thread or a task that waits in ``with``, and stays inside until it is told to go."""

    def __init__(self, way: str, name: str = "name", **options: Any) -> None:
        self.handle = lock(name, **{"wait": PATIENCE, **options})
        self.lease: Lease | None = None
        self.error: LockLost | None = None
        self._inside, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._in_thread if way == "sync" else self._in_task)
        self._thread.start()

    def _in_thread(self) -> None:
        try:
            with self.handle as self.lease:
                self._inside.set()
                assert self._go.wait(PATIENCE)
        except LockLost as error:
            self.error = error

    def _in_task(self) -> None:
        async def main() -> None:
            async with self.handle as self.lease:
                self._inside.set()
                while not self._go.is_set():
                    await asyncio.sleep(0.001)

        try:
            asyncio.run(main())
        except LockLost as error:
            self.error = error

    def gets_in(self) -> Lease | None:
        assert self._inside.wait(PATIENCE)
        return self.lease

    def leaves(self) -> None:
        self._go.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def waiters_of(way: str) -> Iterator[Callable[..., Waiter]]:
    """Starts waiters, "sync" or "async", that end when it does."""
    waiters: list[Waiter] = []

    def start(name: str = "name", **options: Any) -> Waiter:
        waiters.append(Waiter(way, name, **options))
        return waiters[-1]

    yield start
    for waiter in waiters:
        waiter.leaves()
