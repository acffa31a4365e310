"""Events that wake a waiting thread or task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from .clock import clock


class WakeEvent:
    """An event that any thread may set, and for which one thread or task waits. It may be set before the wait."""

    _is_set = False  # whether it was set since the last wait
    _wake: Callable[[], object] | None = None  # ends the wait; None: no thread or task waits

    def set(self) -> None:
        self._is_set = True
        if wake := self._wake:
            wake()

    def clear(self) -> None:
        """Forget that it was set. For its waiter, which looks afterwards at what it was set for."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, or return at once if it was set since the last wait; at most ``timeout`` seconds.

        Returns whether it was set.
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
        """The same for a caller with other work meanwhile: ``sleep(seconds)`` does it, and ``wake()`` ends it.

        If ``sleep()`` returns False, the thread sleeps for the rest of the time.
        """
        deadline, self._wake = clock() + timeout, wake
        has_work = True
        try:
            while True:
                left = deadline - clock()
                if self._is_set or left <= 0:
                    return self._is_set
                if not has_work:
                    return self.wait(left)
                has_work = sleep(left)
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
            with suppress(RuntimeError):  # the loop was closed, so nobody waits there any more
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
