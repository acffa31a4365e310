"""One process of a long run: threads and tasks use locks in every way until the process is told to end.

Its only argument is a JSON object: ``folder`` of the journal, ``seed``, ``names`` of the locks, and ``locks`` and
``databases`` for the settings. It says "ready", and ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import django
from django.conf import settings

from tests.support.history import Journal
from tests.support.leases import deadline_of
from tests.support.mysql_driver import is_driver_there

THREADS = 3
TASKS = 4
WAITS = 0, 0.3, 2, 5, 10
TTLS = 0.6, 1.2, 3.0
HOLDS = 0, 0.001, 0.005, 0.02, 0.1


class Worker:
    """What the threads and tasks of this process share."""

    def __init__(self, folder: str, seed: str, names: list[str]) -> None:
        self._names, self._chance = names, random.Random(seed)
        self._texts = Path(folder, "detached")
        self._texts.mkdir(exist_ok=True)
        self._ends = threading.Event()
        self._journal = Journal(Path(folder))
        self._journal.attach()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(THREADS)]
        threads.append(threading.Thread(target=lambda: asyncio.run(self._awork())))
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        self._ends.set()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        ways = [self._hold, self._hold, self._hold, self._enter_twice]
        if locks["default"].supports_transfer:
            ways += [self._detach, self._adopt]
        if locks["default"].has_sessions:
            ways += [self._free_by_force]
        while not self._ends.is_set():
            with suppress(LockError):
                self._chance.choice(ways)()
            time.sleep(0.001)

    async def _awork(self) -> None:
        await asyncio.gather(*(self._tasks() for _ in range(TASKS)))

    async def _tasks(self) -> None:
        while not self._ends.is_set():
            task = asyncio.create_task(self._hold_in_task())
            if self._chance.random() < 0.2:
                await asyncio.sleep(self._chance.random() * 0.05)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.001)

    def _lock(self, wait: float, **options: Any) -> Lock:
        return lock(
            self._chance.choice(self._names),
            wait=wait,
            ttl=self._chance.choice(TTLS),
            renew=self._chance.random() < 0.8,
            min_hold=self._chance.choice((0, 0, 0, 0, 0.05)),
            on_lost="log",
            **options,
        )

    @contextmanager
    def _timed(self, operation: str, allowed: float) -> Iterator[None]:
        """Tell the journal how long the call took, and by when it had to return."""
        sent = clock()
        try:
            yield
        finally:
            self._journal.write("call", name=operation, sent=sent, deadline=sent + allowed)

    def _hold_for_a_moment(self) -> None:
        time.sleep(self._chance.choice(HOLDS))

    def _hold(self) -> None:
        wait = self._chance.choice(WAITS)
        handle = self._lock(wait)
        with self._timed("acquire", wait):
            is_granted = handle.acquire()
        if is_granted:
            self._hold_for_a_moment()
            with self._timed("release", 0.0):
                handle.release()

    async def _hold_in_task(self) -> None:
        wait = self._chance.choice(WAITS)
        handle = self._lock(wait)
        with suppress(LockError):
            with self._timed("aacquire", wait):
                is_granted = await handle.aacquire()
            if is_granted:
                try:
                    await asyncio.sleep(self._chance.choice(HOLDS))
                finally:
                    with self._timed("arelease", 0.0):
                        await handle.arelease()

    def _enter_twice(self) -> None:
        handle = self._lock(2, reentrant=True)
        with handle as lease, handle:
            self._hold_for_a_moment()
            lease.renew()

    def _free_by_force(self) -> None:
        """Seldom, what another process or thread holds: as an operator does who knows that it hangs."""
        if self._chance.random() < 0.95:
            return
        name = self._chance.choice(self._names)
        [leases] = locks["default"].look([name])
        if not leases or leases[0].resting or leases[0].holder is None:
            return
        [info] = leases
        # From now on it is the operator who answers for it that nobody works under it.
        self._journal.write("release", pid=info.holder.pid, name=name, fence=info.fence)
        locks["default"].release(LockRequest(name, 3.0, info.holder, info.token), force=True)

    def _detach(self) -> None:
        """Leave the text for whoever comes, in whatever process."""
        with self._lock(2) as lease:
            self._journal.write("release", name=lease.name, fence=lease.fence)
            text = lease.detach()
        (self._texts / secrets.token_hex(8)).write_text(text)

    def _adopt(self) -> None:
        for path in self._texts.glob("[!.]*"):
            mine = path.with_name(f".{path.name}")
            try:
                path.rename(mine)
            except FileNotFoundError:
                continue  # somebody else has it
            text = mine.read_text()
            mine.unlink()
            with adopt(text) as lease:
                self._journal.write("adoption", name=lease.name, fence=lease.fence, deadline=deadline_of(lease))
                self._hold_for_a_moment()
                self._journal.write("release", name=lease.name, fence=lease.fence)
            return


if __name__ == "__main__":
    about = json.loads(sys.argv[1])
    is_driver_there()
    settings.configure(
        SECRET_KEY="the same in all workers",
        INSTALLED_APPS=["django_distlock"],
        DATABASES=about["databases"],
        DISTRIBUTED_LOCKS={"default": about["locks"]},
    )
    django.setup()
    logging.disable(logging.CRITICAL)

    from django_distlock import LockError, adopt, lock, locks
    from django_distlock.core.lock import Lock
    from django_distlock.types import LockRequest
    from django_distlock.utils.clock import clock

    Worker(about["folder"], about["seed"], about["names"]).run()
