"""How a waiter is woken, be it a thread or a task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Rung from any thread, heard by the one thread or task that waits. A ring before the wait is not lost."""

    __slots__ = ("_rung", "_wake")

    def __init__(self) -> None:
        self._rung = False
        self._wake: Callable[[], object] | None = None

    def ring(self) -> None:
        self._rung = True
        if wake := self._wake:
            wake()

    def wait(self, timeout: float) -> bool:
        """Return when the bell rings, or has rung since the last wait; at the latest after ``timeout`` seconds.

        Whether it rang.
        """
        sleeping = threading.Lock()
        sleeping.acquire()

        def wake() -> None:
            with suppress(RuntimeError):  # rung twice
                sleeping.release()

        self._wake = wake
        try:
            if not self._rung:
                sleeping.acquire(timeout=timeout)
            return self._rung
        finally:
            self._wake = None
            self._rung = False

    async def await_(self, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        rung = loop.create_future()

        def settle() -> None:
            if not rung.done():
                rung.set_result(None)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed; nobody waits there any more
                loop.call_soon_threadsafe(settle)

        self._wake = wake
        late = loop.call_later(timeout, settle)
        try:
            if not self._rung:
                await rung
            return self._rung
        finally:
            late.cancel()
            self._wake = None
            self._rung = False
