"""What may happen to a thread between any two lines of the package: others go first, or an exception strikes.

As the system takes a thread from its processor, and as handlers of signals raise exceptions, such as a time limit.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import django_distlock

from .scheduler import Process, Scheduler

PACKAGE = str(Path(django_distlock.__file__).parent)
STRUCK = (f"{PACKAGE}/core/", f"{PACKAGE}/backends/redis/client.py")  # where exceptions strike
JUDGES = str(Path(__file__).parents[1] / "judges")
STAGES = ("begins", "enters again", "ends")  # of a call: whence on the lines are counted


class Struck(Exception):
    """As a time limit of Celery."""


class StruckHard(BaseException):
    """As Ctrl-C."""


class Lines:
    """``waits``: seconds that a thread waits at most where others go first.

    ``share_of``: the lines of that code before which it does so.
    """

    def __init__(self, scheduler: Scheduler, share_of: Callable[[CodeType], float], waits: float) -> None:
        self._scheduler = scheduler
        self.strikes: Callable[[Process], object] = lambda process: None  # told of each exception
        self.pauses: Callable[[Process, float], object] = lambda process, seconds: None  # told where others went first
        self._share_of = cache(share_of)
        self._waits = waits
        self._planned: WeakKeyDictionary[object, tuple[str, int]] = WeakKeyDictionary()
        self._left: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # lines until a thread or task is struck
        self._has_returned: WeakKeyDictionary[object, bool] = WeakKeyDictionary()

    def plan(self, execution: object, stage: str, after: int) -> None:
        """To be struck so many lines after that stage of its call."""
        self._planned[execution] = stage, after

    def reached(self, stage: str) -> None:
        """By the calling thread or task. Python has stopped to trace a thread once its tracer has raised."""
        execution = _execution()
        planned_stage, after = self._planned.get(execution, ("", 0))
        if planned_stage == stage:
            del self._planned[execution]
            self._left[execution] = after
            sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """For sys.settrace()."""
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._scheduler.running:
            return self._line
        if event == "return" and self._left:  # Python looks for handlers after calls of C, such as send()
            self._has_returned[_execution()] = not frame.f_code.co_flags & inspect.CO_GENERATOR
        if event != "line":
            return self._line
        share = self._share_of(frame.f_code)
        if share and self._scheduler.random.random() < share:
            seconds = self._scheduler.random.uniform(0.0, self._waits)
            thread = self._scheduler.running
            self._scheduler.sleep(seconds)
            thread.paused_for += seconds
            thread.process.paused_for += seconds
            thread.process.stopped_for += seconds
            self.pauses(thread.process, seconds)
        if self._left and frame.f_code.co_filename.startswith(STRUCK):
            execution = _execution()
            has_returned = self._has_returned.pop(execution, False)
            if (left := self._left.get(execution)) is not None:
                self._left[execution] = max(0, left - 1)
                if left == 0 and not has_returned and _may_be_struck(frame, execution):
                    del self._left[execution]
                    self.strikes(self._scheduler.running.process)
                    raise Struck if isinstance(execution, asyncio.Task) or self._scheduler.steps % 2 else StruckHard
        return self._line


def _may_be_struck(frame: FrameType, execution: object) -> bool:
    if frame.f_code.co_filename == STRUCK[1] and isinstance(execution, asyncio.Task):
        return False  # handlers of signals raise in the loop that runs it
    return _runs_handlers(frame) and not _has_not_begun(frame) and not _is_out_of_reach(frame)


def _has_not_begun(frame: FrameType) -> bool:
    """Before its first step, neither the begin nor the end of a ``with`` knows that it was called."""
    code = frame.f_code
    if code.co_filename.endswith("core/adoption.py"):
        is_at_try = linecache.getline(code.co_filename, frame.f_lineno).strip() == "try:"
        return code.co_name in ("__aenter__", "__exit__", "__aexit__") or (code.co_name == "__enter__" and is_at_try)
    is_end = code.co_name in ("__exit__", "__aexit__", "release", "arelease", "<lambda>")
    return code.co_filename.endswith("core/lock.py") and is_end and "hold" not in frame.f_locals


def _runs_handlers(frame: FrameType) -> bool:
    """Python runs none between two plain statements that call nothing, nor from an exception to what handles it."""
    before, line = (linecache.getline(frame.f_code.co_filename, frame.f_lineno - number) for number in (1, 0))
    if _is_except(line) or (_is_except(before) and line.strip() == "try:"):
        return False
    is_plain = before.strip() and "(" not in before and not before.rstrip().endswith(":")
    is_next = len(before) - len(before.lstrip()) == len(line) - len(line.lstrip())
    return not (is_plain and is_next) and not _is_at_with(frame)


def _is_except(line: str) -> bool:
    return line.lstrip().startswith(("except:", "except "))


def _is_at_with(frame: FrameType) -> bool:
    """There a tracer is called once more when the block has ended, right before the call of __exit__, which is skipped
    if it raises. No handler of a signal runs at that point.
    """
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "async with "))


def _is_out_of_reach(frame: FrameType | None) -> bool:
    """Python drops what is raised in finalizers, and nobody can do anything about it. Judges are no part of a call."""
    while frame:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename.startswith(JUDGES):
            return True
        frame = frame.f_back
    return False


def _execution() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()
