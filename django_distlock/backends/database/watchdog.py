"""Ends calls to a database that does not answer, because drivers for PostgreSQL have no time limit."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from django.db import OperationalError

from ...utils import fork
from ...utils.clock import clock
from ...utils.events import about_event
from ...utils.guards import new_guard
from ...utils.threads import Worker

logger = logging.getLogger("django_distlock")

Descriptor = Callable[[], int | None]


class CallTimeout(OperationalError):
    """The call took too long and was ended."""


class Watchdog:
    """Shuts down the socket of a call that takes too long. Its driver then reports that the connection broke.

    A statement_timeout would not be enough: it is part of a session, which poolers such as pgbouncer do not keep, and a
    server that hangs does not obey it.

    If no thread can be started, at the limit of a container or while the interpreter exits, calls have no time limit.
    The next call tries again to start one.
    """

    def __init__(self, name: str) -> None:
        self._begin()
        fork.in_child(self._begin)
        self._worker = Worker(f"distlock-watchdog-{name}", self._end_late, self._is_needed, on_refusal=_log_refusal)

    def _begin(self) -> None:
        self._calls: dict[int, tuple[float, Descriptor]] = {}  # number -> (deadline, descriptor of the socket)
        self._numbers = count()
        self._guard = new_guard()  # a signal handler may call while it is held

    def _is_needed(self) -> bool:
        return bool(self._calls)

    @contextmanager
    def watching(self, descriptor: Descriptor, timeout: float) -> Iterator[None]:
        """Shuts the socket down after ``timeout`` seconds, and then raises CallTimeout.

        ``descriptor``: returns the current descriptor of the socket; None if the driver limits its calls itself.
        """
        if descriptor() is None:
            yield
            return
        number, deadline = next(self._numbers), clock() + timeout
        try:
            self._calls[number] = deadline, descriptor
            self._worker.nudge(deadline)
            yield
        except Exception as error:
            if number not in self._calls:
                raise CallTimeout(f"no answer within {timeout:.1f} s") from error
            raise
        finally:
            with self._guard:  # not while the thread looks, because the descriptor may soon belong to another socket
                self._calls.pop(number, None)

    def _end_late(self) -> float | None:
        """Runs in the thread; returns the next deadline."""
        with self._guard:
            now = clock()
            for number, (deadline, descriptor) in self._calls.copy().items():  # made in one step: calls begin meanwhile
                if deadline <= now and self._calls.pop(number, None) is not None:
                    _shut_down(descriptor)
            return min((deadline for deadline, _ in list(self._calls.values())), default=None)


def _log_refusal(error: RuntimeError) -> None:
    """Not as an error: Python 3.12.0 and 3.12.1 start no thread when the interpreter exits."""
    logger.debug(
        "Calls to a database have no time limit, because the watchdog cannot be started: %s", error,
        extra=about_event("watchdog-refused"),
    )  # fmt: skip


def _shut_down(descriptor: Descriptor) -> None:
    # Looked up now: if the end of a call was interrupted, its socket is closed, and another one may have its number.
    with suppress(Exception):  # drivers raise different errors for a closed connection
        if (number := descriptor()) is None:
            return
        view = socket.socket(fileno=number)  # not a duplicate: a process may have no descriptor left for one
        try:
            view.shutdown(socket.SHUT_RDWR)
        finally:
            view.detach()
