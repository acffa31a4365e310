"""Exceptions at each point where CPython runs handlers of signals, as Ctrl-C and soft time limits raise them."""

from __future__ import annotations

import gc
import opcode
import sys
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django_distlock

PACKAGE = str(Path(django_distlock.__file__).parent)
JUMP_BACKWARD = opcode.opmap["JUMP_BACKWARD"]


class Interrupt(BaseException):
    """What a handler raises."""


class Interrupter:
    """Raises Interrupt at the n-th such point in the package.

    These are where a function, a generator or another round of a loop goes on, and where a function that is written
    in C has returned: its result is lost. CPython 3.14 looks also where such a function has entered a ``with``.

    ``files``: in the package, or elsewhere by their whole paths.

    ``meanwhile``: is called there instead, as a finalizer is, and the package goes on.
    """

    def __init__(
        self, number: int, files: tuple[str, ...] = ("",), meanwhile: Callable[[], object] | None = None
    ) -> None:
        self._left, self._meanwhile = number, meanwhile
        self._files = tuple(str(Path(PACKAGE, file)) for file in files)
        self.where = ""

    def run(self, call: Callable[[], object]) -> None:
        """Raises what the call raises, unless it was interrupted."""
        gc.disable()
        others = sys.gettrace()  # as of who measures coverage
        sys.setprofile(self._returned)
        sys.settrace(self._entered)
        try:
            Context().run(call)  # one that remembers no other leases: so the points are the same in each run
        except Interrupt:
            pass
        except Exception:
            if self._meanwhile or not self.where:  # SQLite makes an error of its own of what its functions raise
                raise
        finally:
            sys.settrace(others)
            sys.setprofile(None)
            gc.enable()

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        self._passed(frame, " at its begin")
        if not _jumps_back(frame.f_code):
            return None  # each step that is traced takes time
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and _instructions(frame.f_code)[frame.f_lasti] == JUMP_BACKWARD:
            self._passed(frame, " again")
        return self._stepped

    def _returned(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and frame.f_code.co_filename.startswith(self._files):
            self._passed(frame, f" after {argument.__name__}()")

    def _passed(self, frame: FrameType, after: str) -> None:
        self._left -= 1
        if self._left == 0:
            sys.settrace(None)
            sys.setprofile(None)
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.where = f"{file}:{frame.f_lineno} {frame.f_code.co_name}{after}"
            if self._meanwhile is None:
                raise Interrupt(self.where)
            self._meanwhile()


@cache
def _instructions(code: CodeType) -> bytes:
    return code.co_code


@cache
def _jumps_back(code: CodeType) -> bool:
    return JUMP_BACKWARD in code.co_code[::2]


def at_each_point(
    call: Callable[[str], object], *files: str, meanwhile: Callable[[], object] | None = None
) -> Iterator[tuple[str, str]]:
    """Call it with a new name for each of its points in these files, interrupted there. Yields names and points.

    ``meanwhile``: as of ``Interrupter``.
    """
    for number in range(1, 5000):
        interrupter = Interrupter(number, files or ("",), meanwhile)
        name = f"{number:04}"
        interrupter.run(lambda: call(name))  # noqa: B023
        if not interrupter.where:
            return
        yield name, interrupter.where
    raise AssertionError("the call has no end")
