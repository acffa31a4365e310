"""A thread that is there while there is something to do."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from math import inf
from typing import Protocol
from weakref import WeakSet

from . import forks
from .tickets import clock

logger = logging.getLogger("django_distlock")

RETRY = 1.0  # seconds after which work that failed is done again
IDLE = 10.0  # seconds without work after which the thread ends


class Background(Protocol):
    """What has a thread now and then."""

    def end(self) -> threading.Thread | None:
        """Tell the thread to end, unless it is needed. Returns it."""


_all: WeakSet[Background] = WeakSet()


def end_with_interpreter(background: Background) -> None:
    _all.add(background)


def end_all(seconds: float) -> None:
    """The interpreter exits. A subinterpreter that ends while one of its threads is there aborts the process."""
    give_up = clock() + seconds
    for thread in [background.end() for background in list(_all)]:
        if thread is not None:
            thread.join(max(0.0, give_up - clock()))


class Worker:
    """Calls ``work`` in a daemon thread: when it is nudged, and when the last call said that it is due again.

    ``work()`` does what is due and returns when it is to be called next, on ``clock()``, or None when nothing
    is left to do. An exception is logged and the work done again: nobody would see the thread die.

    In a forked child there is no thread until somebody nudges.
    """

    def __init__(
        self, name: str, work: Callable[[], float | None], is_needed: Callable[[], bool] = lambda: False
    ) -> None:
        """``is_needed``: whether the work is to go on while the interpreter exits."""
        self._name = name
        self._work = work
        self._is_needed = is_needed
        end_with_interpreter(self)
        self._begin()
        forks.in_child(self._begin)

    def _begin(self) -> None:
        # Reentrant, because the garbage collector may nudge while this very thread is inside.
        self._changed = threading.Condition(threading.RLock())
        self._nudged = False
        self._wakes_at = inf  # inf: whoever adds something nudges
        self._thread: threading.Thread | None = None

    def nudge(self, due: float = -inf) -> None:
        """There is something to do; ``due``: not before this moment."""
        if due >= self._wakes_at:
            return
        with self._changed:
            self._nudged = True
            if self._thread is not None:
                self._changed.notify()
                return
            self._thread = threading.Thread(target=self._run, args=(os.getpid(),), name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                # No more threads here, or the interpreter exits. Leases end with their TTL, and say so.
                logger.exception("The thread %s cannot be started", self._name)

    def _run(self, pid: int) -> None:
        idle_since = clock()
        while True:
            due = self._due_after_work(pid)
            with self._changed:
                if self._is_over(pid):
                    return
                if due is not None:
                    idle_since = clock()
                elif clock() - idle_since >= IDLE and not self._nudged:
                    self._thread = None
                    return
                if not self._nudged:
                    self._wakes_at = idle_since + IDLE if due is None else due
                    self._changed.wait(max(0.0, self._wakes_at - clock()))
                    if self._is_over(pid):
                        return
                self._nudged = False
                self._wakes_at = inf

    def _is_over(self, pid: int) -> bool:
        return forks.is_copy(pid) or self._thread is not threading.current_thread()

    def end(self) -> threading.Thread | None:
        if self._is_needed():
            return None
        with self._changed:
            thread, self._thread = self._thread, None
            self._wakes_at = inf
            self._changed.notify()
        return thread

    def _due_after_work(self, pid: int) -> float | None:
        try:
            return self._work()
        except Exception:
            if not forks.is_copy(pid):
                logger.exception("What %s does failed and is tried again", self._name)
            return clock() + RETRY
