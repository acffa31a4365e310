"""Ends calls to a database that does not answer: drivers for PostgreSQL have no time limit of their own."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from math import inf

from django.db import OperationalError

from ... import forks
from ...tickets import clock
from ...workers import end_with_interpreter

logger = logging.getLogger("django_distlock")

IDLE = 10.0  # seconds without a call after which the thread ends


class NoAnswer(OperationalError):
    """The call took too long and was ended."""


class Watchdog:
    """Shuts down the socket of a call that takes too long; its driver then says that the connection broke.

    A statement_timeout would not do: it is state of a session, which poolers such as pgbouncer do not keep, and
    a server that hangs does not keep it either.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()
        forks.in_child(self._begin)
        end_with_interpreter(self)

    def _begin(self) -> None:
        self._calls: dict[int, tuple[float, int]] = {}  # number -> (until when, descriptor of the socket)
        self._numbers = count()
        self._changed = threading.Condition(threading.RLock())  # a signal handler may call while it is held
        self._wakes_at = inf
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, descriptor: int | None, seconds: float) -> Iterator[None]:
        """``descriptor``: of the socket; None when the driver limits its calls itself. Raises NoAnswer."""
        if descriptor is None:
            yield
            return
        number, until = next(self._numbers), clock() + seconds
        try:
            with self._changed:
                self._calls[number] = until, descriptor
                if self._thread is None:
                    self._start()
                elif until < self._wakes_at:
                    self._changed.notify()
            yield
        except Exception as error:
            if number not in self._calls:
                raise NoAnswer(f"no answer within {seconds:.1f} s") from error
            raise
        finally:
            with self._changed:  # not while the thread looks: the descriptor may be another socket's soon
                self._calls.pop(number, None)

    def _start(self) -> None:
        name = f"distlock-watchdog-{self._name}"
        self._thread = threading.Thread(target=self._run, args=(os.getpid(),), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            # The interpreter exits, which Python 3.12.0 and 3.12.1 let start no thread, or there are too many. The call
            # is made all the same; the next one tries again.
            self._thread = None
            logger.debug("Calls to the database of the locks %r have no time limit now: %s", self._name, error)

    def _run(self, pid: int) -> None:
        with self._changed:
            while not self._is_over(pid):
                now = clock()
                for number, (until, descriptor) in list(self._calls.items()):
                    if until <= now:
                        del self._calls[number]
                        _shut_down(descriptor)
                self._wakes_at = min([now + IDLE, *(until for until, _ in self._calls.values())])
                was_notified = self._changed.wait(self._wakes_at - now)
                if not self._is_over(pid) and not was_notified and not self._calls and clock() - now >= IDLE:
                    self._thread = None
                    return

    def _is_over(self, pid: int) -> bool:
        return forks.is_copy(pid) or self._thread is not threading.current_thread()

    def end(self) -> threading.Thread | None:
        with self._changed:
            if self._calls:
                return None
            thread, self._thread = self._thread, None
            self._changed.notify()
        return thread


def _shut_down(descriptor: int) -> None:
    with suppress(OSError):
        view = socket.socket(fileno=descriptor)  # of no duplicate: a process may have no descriptor left for one
        try:
            view.shutdown(socket.SHUT_RDWR)
        finally:
            view.detach()
