"""Guards: the locks for data in memory, which a thread holds for moments.

An exception that a handler of a signal raises, such as Ctrl-C or Celery's soft time limit, frees a guard that it finds
held. A ``threading.Condition`` is not entered by ``with``, because an exception in its own code leaves it locked. It
gets a guard, and that is entered.
"""

from __future__ import annotations

import sys
import threading

if sys.version_info[:2] == (3, 14):
    from _thread import RLock

    class _Guard(RLock):
        """An RLock for CPython 3.14, where ``with`` leaves an RLock locked if a handler raises as it is acquired.

        There, ``with`` calls ``__enter__`` by an instruction that runs handlers after a function written in C. This
        one is written in Python, and calls the function by an operator, which runs none. See
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
