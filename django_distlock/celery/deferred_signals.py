"""Defers signals that end a beat while it sends a run that it has claimed."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from ..utils.threads import start_thread
from ..utils.wakeup import WakeEvent

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DeferredSignals:
    """Lets signals wait between ``defer()`` and ``deliver()``, because Celery's handlers raise SystemExit anywhere.

    A second signal acts at once, and the first one after ``timeout`` seconds, because the broker may not answer.
    Outside the main thread nothing is deferred, because no handler runs there.
    """

    timeout = 5.0

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: int | None = None
        self._delivered = WakeEvent()

    def defer(self) -> None:
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is not None:  # None: not a handler of Python, so it could not be restored
                self._handlers[number] = signal.signal(number, self._receive)

    def deliver(self) -> None:
        """Restore the handlers, and let the pending signal act. Another signal may arrive at any point of this."""
        self._delivered.set()
        for number, handler in list(self._handlers.items()):
            signal.signal(number, handler)
        self._handlers.clear()
        pending, self._pending = self._pending, None
        self._delivered.set()  # also for a signal that was deferred meanwhile
        if pending:
            signal.raise_signal(pending)

    def _receive(self, number: int, frame: object) -> None:
        is_second, self._pending = self._pending is not None, number
        if is_second:
            self.deliver()
            return
        self._delivered = WakeEvent()
        if start_thread("distlock-signal", self._send_again, self._delivered, number) is None:
            self.deliver()

    def _send_again(self, delivered: WakeEvent, number: int) -> None:
        """Send the signal again, unless it is delivered in time. As the second signal, it acts at once."""
        if not delivered.wait(self.timeout):
            os.kill(os.getpid(), number)
