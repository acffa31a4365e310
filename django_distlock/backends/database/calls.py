"""Calls to the database: on a connection of the pool, repeated once, in threads for event loops."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, InterfaceError, OperationalError, ProgrammingError

from ...exceptions import LockBackendError
from ...utils import fork
from ...utils.clock import clock
from ...utils.guards import new_guard
from ..common.attempts import InDoubt
from ..common.backoff import Backoff, retry
from .connections import Pool
from .errors import ConnectionBroken, is_lost, is_of_another_session, is_rolled_back
from .watchdog import CallTimeout

R = TypeVar("R")

ASYNC_THREADS = 16  # for the calls of event loops; a task that waits for its turn needs none

# Errors of opening a connection: of drivers, of the system, and of settings that neither can use.
CANNOT_OPEN = (Error, OSError, ImproperlyConfigured, LookupError, TypeError, ValueError)

Explain = Callable[[Exception, type[LockBackendError]], LockBackendError]


class Calls:
    """Does work on a connection. Errors of the database are raised as ``explain`` makes them.

    ``timeout``: seconds for an answer; there may be two attempts.
    """

    def __init__(self, pool: Pool, timeout: float, explain: Explain, name: str) -> None:
        self._pool = pool
        self._timeout = timeout
        self._explain = explain
        self._name = name
        self._begin()
        fork.in_child(self._begin)

    def _begin(self) -> None:
        self._guard = new_guard()
        self._threads: ThreadPoolExecutor | None = None
        self._of_thread = threading.local()
        self._answered_at = 0.0  # when the database answered any call

    def run(self, work: Callable[[Any], R], timeout: float | None = None) -> R:
        return self.run_or_repeat(work, timeout)[0]

    def run_or_repeat(
        self, work: Callable[[Any], R], timeout: float | None = None, again: Callable[[Any], R] | None = None
    ) -> tuple[R, bool]:
        """Do the work on a connection, and once more if that broke. Returns the result, and whether it was repeated.

        ``again``: the work to do then, if it is another one.
        ``timeout``: seconds for an answer; the one of all calls counts if it is shorter.
        Raises LockBackendError; InDoubt if the work may have been done although no answer came.
        """
        pid, timeout = os.getpid(), self._timeout if timeout is None else min(self._timeout, timeout)
        # Only for the first request of a call
        if (thread_deadline := vars(self._of_thread).pop("deadline", None)) is not None:
            timeout = min(timeout, max(self._pool.timing.shortest_call, (thread_deadline - clock()) / 2))
        deadline = clock() + 2 * timeout
        try:
            return self._run_once(work, timeout, deadline), False
        except ConnectionBroken as broken:
            if fork.is_copy(pid):  # the parent's thread repeats the work
                raise self._explain(broken.cause, InDoubt) from broken.cause
            self._pool.close_idle()  # a restart of the server broke all of them
        try:
            return self._run_once(again or work, timeout, deadline), True
        except ConnectionBroken as broken:
            raise self._explain(broken.cause, InDoubt) from broken.cause
        except LockBackendError as error:
            in_doubt = InDoubt(*error.args)
            in_doubt.is_final = error.is_final
            raise in_doubt from error.__cause__

    def _run_once(self, work: Callable[[Any], R], timeout: float, deadline: float) -> R:
        """Raises ConnectionBroken if the connection broke meanwhile, LockBackendError if the database refuses.

        ``timeout``: seconds for an answer; ``deadline``: for getting a connection, on ``clock()``.
        """
        is_open, timing = False, self._pool.timing
        try:
            with self._pool.connection(timeout, deadline) as connection:
                is_open = True
                try:
                    # Only SQLite may take as long as a call lasts, because its answers do not get lost.
                    is_file = self._pool.file is not None
                    lasts = self._pool.time_for_call(timeout, deadline) if is_file else timeout / 2
                    backoff = Backoff(clock() + lasts, timing.retry_pause_shortest, timing.retry_pause_longest)
                    result = retry(partial(work, connection), is_rolled_back, backoff)
                    self._answered_at = clock()
                    return result
                except (OperationalError, InterfaceError, ProgrammingError) as error:
                    if is_of_another_session(error):
                        self._pool.uses_prepared_statements = False
                        raise ConnectionBroken(error) from error
                    if isinstance(error, ProgrammingError) or _is_usable(connection, error):
                        raise
                    raise ConnectionBroken(error) from error
        except CallTimeout as error:
            raise ConnectionBroken(error) from error
        except (LockBackendError, ConnectionBroken):
            raise
        except Exception as error:
            if not isinstance(error, Error if is_open else CANNOT_OPEN):
                raise  # from a signal handler, or a mistake of ours
            raise self._explain(error, LockBackendError) from error

    async def in_thread(self, call: Callable[..., R], *arguments: Any, thread_timeout: float | None = None) -> R:
        """Make the call in a thread of this pool, because other work may use all threads of the loop's own pool.

        Raises LockBackendError if no thread is free after ``thread_timeout`` seconds. ``inf``: wait as long as the
        database answers other calls. None: as long as a call lasts at most; the wait is part of its first request.
        """
        whole = 2 * self._timeout
        seconds = whole if thread_timeout is None or thread_timeout == inf else thread_timeout
        with self._guard:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(ASYNC_THREADS, thread_name_prefix=f"distlock-async-{self._name}")
            try:
                future = self._threads.submit(self._in_thread, clock(), thread_timeout, call, *arguments)
            except RuntimeError as error:  # an existing thread may make the call all the same
                raise InDoubt(
                    f"The database of the locks {self._name!r} cannot be asked for tasks, because there are too many"
                    f" threads, or the process exits: {error}"
                ) from error
        outcome = asyncio.wrap_future(future)
        try:
            await asyncio.wait([outcome], timeout=seconds)
            while thread_timeout == inf and not outcome.done() and clock() - self._answered_at < seconds:
                await asyncio.wait([outcome], timeout=seconds)
        except asyncio.CancelledError:
            outcome.cancel()  # unless a thread is already making the call
            raise
        if not outcome.done() and future.cancel():
            raise LockBackendError(
                f"The database of the locks {self._name!r} was not asked within {seconds:.1f} s: all {ASYNC_THREADS}"
                " threads that ask for the tasks of this process were busy. The database is slow or does not answer,"
                " or too many tasks ask for locks at once."
            )
        return await outcome

    def _in_thread(self, asked_at: float, thread_timeout: float | None, call: Callable[..., R], *arguments: Any) -> R:
        if thread_timeout is None or (thread_timeout == inf and self._answered_at < asked_at):
            self._of_thread.deadline = asked_at + 2 * self._timeout
        try:
            return call(*arguments)
        finally:
            self._of_thread.deadline = None

    def close(self) -> None:
        """Close idle connections and threads. Later calls open new ones."""
        self._pool.close_idle()
        with self._guard:
            threads, self._threads = self._threads, None
        if threads:
            threads.shutdown(wait=False)


def _is_usable(connection: Any, error: Exception) -> bool:
    """Whether the connection can still be used after the error."""
    if is_lost(error):  # do not ask the connection: some drivers would silently connect anew
        return False
    return connection.connection is not None and bool(connection.is_usable())
