"""How calls get to the database: on a connection of the pool, repeated once, in threads for event loops."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
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
from .connections import Pool
from .errors import Broken, NoReply, is_lost, is_of_another_session, is_undone
from .watchdog import NoAnswer

R = TypeVar("R")

ASYNC_THREADS = 16  # that do what event loops ask for; a task that waits for its turn takes none

SHORTEST_PATIENCE = 0.5  # seconds that a call gives the server, however little time is left to its caller
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds before a statement is repeated that the database has undone

# Of drivers, of the system, and of settings that they cannot use.
CANNOT_OPEN = (Error, OSError, ImproperlyConfigured, LookupError, TypeError, ValueError)

Explain = Callable[[Exception, type[LockBackendError]], LockBackendError]


class Calls:
    """Does work on a connection. What the database refuses is raised as ``explain`` puts it."""

    def __init__(self, pool: Pool, timeout: float, explain: Explain, name: str) -> None:
        self._pool = pool
        self._timeout = timeout
        self._explain = explain
        self._name = name
        self._begin()
        fork.in_child(self._begin)

    def _begin(self) -> None:
        self._guard = threading.RLock()
        self._threads: ThreadPoolExecutor | None = None
        self._of_thread = threading.local()
        self._answered_at = 0.0  # by the database, whoever asked

    def run(self, work: Callable[[Any], R], within: float | None = None) -> R:
        return self.run_repeatedly(work, within)[0]

    def run_repeatedly(self, work: Callable[[Any], R], within: float | None = None) -> tuple[R, bool]:
        """Do the work on a connection, and once more if that broke. Whether it was done more than once.

        Raises LockBackendError; NoReply when the work may have been done although nothing was heard of it.
        """
        pid, seconds = os.getpid(), self._timeout if within is None else min(self._timeout, within)
        if (ends := vars(self._of_thread).pop("ends", None)) is not None:  # of the first request of a call alone
            seconds = min(seconds, max(SHORTEST_PATIENCE, (ends - clock()) / 2))
        deadline = clock() + 2 * seconds
        try:
            return self._done(work, seconds, deadline), False
        except Broken as broken:
            if fork.is_copy(pid):  # the parent's thread repeats the work
                raise self._explain(broken.cause, NoReply) from broken.cause
            self._pool.close_idle()  # a server that was restarted broke them all
        try:
            return self._done(work, seconds, deadline), True
        except Broken as broken:
            raise self._explain(broken.cause, NoReply) from broken.cause
        except LockBackendError as error:
            unheard = NoReply(*error.args)
            unheard.is_final = error.is_final
            raise unheard from error.__cause__

    def _done(self, work: Callable[[Any], R], seconds: float, deadline: float) -> R:
        """Raises Broken when the connection broke meanwhile, LockBackendError when the database refuses.

        ``seconds``: for an answer; ``deadline``: until when a connection must be there, on ``clock()``.
        """
        is_open = False
        try:
            with self._pool.connection(seconds, deadline) as connection:
                is_open = True
                try:
                    done = _past_collisions(partial(work, connection), clock() + seconds / 2)
                    self._answered_at = clock()
                    return done
                except (OperationalError, InterfaceError, ProgrammingError) as error:
                    if is_of_another_session(error):
                        self._pool.prepares = False
                        raise Broken(error) from error
                    if isinstance(error, ProgrammingError) or _is_usable(connection, error):
                        raise
                    raise Broken(error) from error
        except NoAnswer as error:
            raise Broken(error) from error
        except (LockBackendError, Broken):
            raise
        except Exception as error:
            if not isinstance(error, Error if is_open else CANNOT_OPEN):
                raise  # of a handler of a signal, or a mistake of ours
            raise self._explain(error, LockBackendError) from error

    async def in_thread(self, call: Callable[..., R], *arguments: Any, turn_within: float | None = None) -> R:
        """Not in the loop's own threads, which a program may have given to something else.

        Raises LockBackendError if none of the threads is free in time: ``turn_within`` seconds, by default those in
        which a call is done; the time that it waits for a thread counts for its first request. ``inf``: in time as long
        as the database answers others.
        """
        whole = 2 * self._timeout
        seconds = whole if turn_within is None or turn_within == inf else turn_within
        with self._guard:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(ASYNC_THREADS, thread_name_prefix=f"distlock-async-{self._name}")
            try:
                future = self._threads.submit(self._here, clock(), turn_within, call, *arguments)
            except RuntimeError as error:  # it may be done all the same, by a thread that was there already
                raise NoReply(
                    f"The database of the locks {self._name!r} cannot be asked for tasks, because there are too many"
                    f" threads, or the process exits: {error}"
                ) from error
        outcome = asyncio.wrap_future(future)
        try:
            await asyncio.wait([outcome], timeout=seconds)
            while turn_within == inf and not outcome.done() and clock() - self._answered_at < seconds:
                await asyncio.wait([outcome], timeout=seconds)
        except asyncio.CancelledError:
            outcome.cancel()  # unless a thread is at it
            raise
        if not outcome.done() and future.cancel():
            raise LockBackendError(
                f"The database of the locks {self._name!r} was not asked within {seconds:.1f} s: all {ASYNC_THREADS}"
                " threads that ask for the tasks of this process were busy. The database is slow or does not answer,"
                " or too many tasks ask for locks at once."
            )
        return await outcome

    def _here(self, asked_at: float, turn_within: float | None, call: Callable[..., R], *arguments: Any) -> R:
        """The call, in a thread."""
        if turn_within is None or (turn_within == inf and self._answered_at < asked_at):
            self._of_thread.ends = asked_at + 2 * self._timeout
        try:
            return call(*arguments)
        finally:
            self._of_thread.ends = None

    def close(self) -> None:
        """Calls that come later open anew what they need."""
        self._pool.close_idle()
        with self._guard:
            threads, self._threads = self._threads, None
        if threads:
            threads.shutdown(wait=False)


def _past_collisions(work: Callable[[], R], deadline: float) -> R:
    """Again while the database undoes it for the sake of others."""
    pause = SHORTEST_PAUSE
    while True:
        try:
            return work()
        except OperationalError as error:
            if not is_undone(error) or clock() + pause > deadline:
                raise
        time.sleep(random.uniform(0, pause))
        pause = min(LONGEST_PAUSE, pause * 2)


def _is_usable(connection: Any, error: Exception) -> bool:
    """Whether the connection outlived the error."""
    if is_lost(error):  # not asked: some drivers would silently connect anew
        return False
    return connection.connection is not None and bool(connection.is_usable())
