"""How a run that a beat has claimed is sent although the beat is told to end."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 5.0  # seconds that a signal is held back at most


class Stopping:
    """Celery's handlers of signals raise SystemExit wherever beat is. This holds them back for a while.

    A second signal acts at once, and after ``PATIENCE`` seconds the first one does: the broker may not answer.
    Outside the main thread nothing is held back: no handler runs there.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._heard: int | None = None
        self._timer: threading.Timer | None = None

    def hold_back(self) -> None:
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is not None:  # else it is none of Python's, and could not be put back
                self._handlers[number] = signal.signal(number, self._hear)

    def deliver(self) -> None:
        """What was held back happens now."""
        if self._timer:
            self._timer.cancel()
        heard, self._heard, self._timer = self._heard, None, None
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if heard:
            signal.raise_signal(heard)

    def _hear(self, number: int, frame: object) -> None:
        is_second, self._heard = self._heard is not None, number
        if is_second:
            self.deliver()
            return
        self._timer = threading.Timer(PATIENCE, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()
