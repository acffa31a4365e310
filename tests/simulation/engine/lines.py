"""What may happen to a thread between any two lines of the package: others go first, or an exception strikes.

As the system takes a thread from its processor, and as handlers of signals raise exceptions, such as a time limit.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import django_distlock

from .scheduler import Scheduler

PACKAGE = str(Path(django_distlock.__file__).parent)
STRUCK = f"{PACKAGE}/core/"  # where exceptions strike


class Struck(Exception):
    """As a time limit of Celery."""


class StruckHard(BaseException):
    """As Ctrl-C."""


class Lines:
    """``waits``: seconds that a thread waits at most where others go first, which it does in so large a ``share``."""

    def __init__(self, scheduler: Scheduler, share: float, waits: float) -> None:
        self._scheduler = scheduler
        self._share = share
        self._waits = waits
        self._left: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # lines until a thread or task is struck

    def strike(self, execution: object, after: int) -> None:
        """Called by that thread or task itself. Python has stopped to trace a thread once its tracer has raised."""
        self._left[execution] = after
        sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """For sys.settrace()."""
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "line" or not self._scheduler.running:
            return self._line
        if self._share and self._scheduler.random.random() < self._share:
            seconds = self._scheduler.random.uniform(0.0, self._waits)
            process = self._scheduler.running.process
            self._scheduler.sleep(seconds)
            process.stopped_for += seconds
        if self._left and frame.f_code.co_filename.startswith(STRUCK):
            execution = _execution()
            if (left := self._left.get(execution)) is not None:
                self._left[execution] = max(0, left - 1)
                if left == 0 and _runs_handlers(frame) and not _is_finalizing(frame):
                    del self._left[execution]
                    raise Struck if isinstance(execution, asyncio.Task) or self._scheduler.steps % 2 else StruckHard
        return self._line


def _runs_handlers(frame: FrameType) -> bool:
    """Python runs none between two plain statements that call nothing."""
    before, line = (linecache.getline(frame.f_code.co_filename, frame.f_lineno - number) for number in (1, 0))
    is_plain = before.strip() and "(" not in before and not before.rstrip().endswith(":")
    is_next = len(before) - len(before.lstrip()) == len(line) - len(line.lstrip())
    return not (is_plain and is_next) and not _is_at_with(frame)


def _is_at_with(frame: FrameType) -> bool:
    """There a tracer is called once more when the block has ended, right before the call of __exit__, which is skipped
    if it raises. No handler of a signal runs at that point.
    """
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "async with "))


def _is_finalizing(frame: FrameType | None) -> bool:
    """Python drops what is raised in there, and nobody can do anything about it."""
    while frame:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _execution() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()
