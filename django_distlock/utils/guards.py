"""Guards: the locks for data in memory, which a thread holds for moments.

If a handler of a signal raises an exception, as for Ctrl-C or Celery's soft time limit, ``with`` frees the guard that
the thread holds. This is not so of a ``threading.Condition``: an exception in its own code leaves it locked. So it gets
a guard, and ``with`` enters that. An exception at the very begin of its ``wait()`` becomes a RuntimeError, but leaves
nothing locked.
"""

from __future__ import annotations

import sys
import threading

if sys.version_info[:2] == (3, 14):
    from _thread import RLock

    class _Guard(RLock):
        """An RLock for CPython 3.14, where ``with`` leaves an RLock locked if a handler raises as it is acquired.

        If ``__enter__`` is written in C, ``with`` runs handlers after it there. Here it is written in Python, after
        which ``with`` runs none, and it acquires by an operator, because a call would run them as well. See
        https://github.com/python/cpython/issues/148874, which 3.15 has resolved.
        """

        __pos__ = RLock.acquire

        def __enter__(self) -> bool:
            return +self

    def new_guard() -> threading.RLock:
        guard = threading.RLock()
        return _Guard() if type(guard) is RLock else guard  # else a library for greenlets has replaced it

else:

    def new_guard() -> threading.RLock:
        return threading.RLock()
