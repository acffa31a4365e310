"""No connection to SQLite may be open while the process forks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ForkGate:
    """Lets a fork wait for those who use a connection, and nobody begin to use one until the process has forked.

    The system's locks of a file belong to a process, and a child has none of its parent's. SQLite counts them
    itself, in memory that the child has a copy of, and so takes them for its own: it would read and write without
    any. What was closed before the fork is not in that memory.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of an RLock: the thread that forks may pass
        self._users = 0
        self._forking: list[int] = []  # threads

    @contextmanager
    def using(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking or threading.get_ident() in self._forking)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Until ``open()`` nobody else passes. Whether the last user left within ``seconds``."""
        self._changed.acquire()
        self._forking.append(threading.get_ident())
        return self._changed.wait_for(lambda: not self._users, seconds)

    def open(self) -> None:
        self._forking.remove(threading.get_ident())
        self._changed.notify_all()
        self._changed.release()
