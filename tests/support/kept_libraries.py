"""Forked programs leave the libraries that were there before them as they are when they exit.

To free them takes 30 ms of the processor, since all pages are copied for it, and to free the interpreter 15 more. What
a program has itself is cleared by the interpreter as ever, unless a library refers to it, as to a receiver of a signal.
That, and what libraries have, is never finalised, so no ResourceWarning tells of it: programs whose exit is tested are
started with ``like=None``.

To be imported before all else: what is registered first runs last, when all other functions that wait for the end of
the process are done.
"""

import atexit
import ctypes
import os
import sys
import sysconfig
from collections.abc import Callable

INSTALLED = tuple(sysconfig.get_path(kind) + "/" for kind in ("stdlib", "platstdlib", "purelib", "platlib"))

END = "_end_of_program"  # an attribute of ``sys``

left: list[str] = []


def keep_libraries() -> None:
    """Those that are imported now, for ever: the interpreter clears modules that ``sys.modules`` still has."""
    left[:] = [name for name, module in sys.modules.items() if _is_installed(module)]
    for name in left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[name]))


def _is_installed(module: object) -> bool:
    """Not the package, nor its tests, wherever the checkout is."""
    return str(getattr(module, "__file__", None)).startswith(INSTALLED)


@atexit.register
def leave_libraries() -> None:
    for name in left:
        sys.modules.pop(name, None)


class End:
    """Of the process, when the interpreter has cleared all modules: the last but one is ``sys``, which has this."""

    def __init__(self, status: int) -> None:
        self._status, self._streams = status, [stream for stream in (sys.stdout, sys.stderr) if stream is not None]

    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        for stream in self._streams:
            if not stream.closed:
                stream.flush()
        end(self._status)


def end_with(status: int) -> None:
    """Once the program has returned, or exits. Those in which that of its server ends, too, say nothing new."""
    if END not in vars(sys):
        vars(sys)[END] = End(status)
