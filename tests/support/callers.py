"""Threads and tasks that wait for a lock, hold it until told, and release it."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import count

from django_distlock import LockBackendError, LockLost, lock
from tests.support.tools import PATIENCE, eventually


class Caller:
    """A thread, or a task in an event loop of its own, that acquires a lock, holds it until told, and releases it."""

    numbers = count(1)

    def __init__(self, using="default", *, wait=4 * PATIENCE, ttl=30.0, as_task=False, name="name", stays=True):
        self.handle = lock(name, using=using, wait=wait, ttl=ttl, on_lost="log")
        self.go = threading.Event()
        self.ended = threading.Event()
        self.outcome = None  # "in", "late", "cancelled" or an error
        self.decided_at = 0.0
        self.number = 0  # in the order in which they got in
        if not stays:
            self.go.set()
        self._task = None
        self.thread = threading.Thread(target=self._as_task if as_task else self._as_thread)
        self.thread.start()

    def _decided(self, outcome):
        self.decided_at = time.monotonic()
        if outcome == "in":
            self.number = next(self.numbers)
        self.outcome = outcome
        return outcome == "in"

    def _as_thread(self):
        try:
            if self._decided("in" if self.handle.acquire() else "late"):
                self.go.wait()
                self.handle.release()
        except LockBackendError as error:
            self._decided(error)
        except LockLost:
            pass
        finally:
            self.ended.set()

    def _as_task(self):
        asyncio.run(self._main())

    async def _main(self):
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self._decided("in" if await self.handle.aacquire() else "late"):
                while not self.go.is_set():
                    await asyncio.sleep(0.002)
                await self.handle.arelease()
        except LockBackendError as error:
            self._decided(error)
        except LockLost:
            pass
        except asyncio.CancelledError:
            self._decided("cancelled")
        finally:
            self.ended.set()

    def cancel(self):
        if self._task and not self.ended.is_set():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def gets_in(self, within=PATIENCE):
        """Return the moment; fail if it does not happen."""
        assert eventually(lambda: self.outcome, within) == "in"
        return self.decided_at

    def leaves(self):
        self.go.set()
        assert self.ended.wait(PATIENCE)
