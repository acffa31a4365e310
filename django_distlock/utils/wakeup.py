"""Events that wake a waiting thread or task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from .clock import clock


class WakeEvent:
    """Set from any thread, waited for by one thread or task. Setting it before the wait is not lost."""

    _is_set = False  # since the last wait
    _wake: Callable[[], object] | None = None  # while it is waited for

    def set(self) -> None:
        self._is_set = True
        if wake := self._wake:
            wake()

    def wait(self, timeout: float) -> bool:
        """Return when it is set, or was set since the last wait; at the latest after ``timeout`` seconds.

        Whether it was set.
        """
        sleeping = threading.Lock()
        sleeping.acquire()

        def wake() -> None:
            with suppress(RuntimeError):  # set twice
                sleeping.release()

        self._wake = wake
        try:
            if not self._is_set:
                sleeping.acquire(timeout=max(0.0, timeout))
            return self._is_set
        finally:
            self._wake = None
            self._is_set = False

    def wait_by(self, sleep: Callable[[float], bool], wake: Callable[[], object], timeout: float) -> bool:
        """The same for one who has something to do meanwhile, in ``sleep(seconds)``, which ``wake()`` ends.

        Where that returns False, the thread sleeps for the rest of the time.
        """
        deadline, self._wake = clock() + timeout, wake
        try:
            while True:
                left = deadline - clock()
                if self._is_set or left <= 0:
                    return self._is_set
                if not sleep(left):
                    return self.wait(deadline - clock())
        finally:
            self._wake = None
            self._is_set = False

    async def await_set(self, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed; nobody waits there any more
                loop.call_soon_threadsafe(settle)

        self._wake = wake
        late = loop.call_later(timeout, settle)
        try:
            if not self._is_set:
                await done
            return self._is_set
        finally:
            late.cancel()
            self._wake = None
            self._is_set = False
