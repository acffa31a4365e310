"""What wakes waiters: a thread that reads a subscription and sets the events of those whose turn has come."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from ...types import LockRequest
from ...utils import fork
from ...utils.clock import clock
from ...utils.drive import Call, Steps, drive
from ...utils.threads import Worker
from .timing import Timing

logger = logging.getLogger("django_distlock")


SPREAD = 1.0  # seconds over which a crowd of waiters looks after a subscription began
PORTIONS = 20
AT_ONCE = 50  # waiters


class Waiters:
    """Requests that can be woken, by token. Weak, because a lease that was lost is never released here."""

    def __init__(self) -> None:
        self._requests: WeakValueDictionary[str, LockRequest] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LockRequest]:
        for reference in self._requests.valuerefs():  # a list, where values() would meet those that come meanwhile
            if request := reference():
                yield request

    def add(self, request: LockRequest) -> None:
        self._requests[request.token] = request

    def discard(self, request: LockRequest) -> None:
        if self._requests.get(request.token) is request:
            del self._requests[request.token]

    def wake(self, token: str) -> bool:
        """False if nobody here has it."""
        request = self._requests.get(token)
        if request is None:
            return False
        request.event.set()
        return True


class WakeupListener(ABC):
    """One subscription of a process, for all its waiting threads and tasks, while there are any.

    A hint is a hint: the truth is the lease in the store. Where nothing can be heard, waiters look by themselves.
    A store says how to connect, subscribe, read and disconnect; all but the last are calls of ``steps()``.
    """

    connection_errors: ClassVar[tuple[type[Exception], ...]]  # of a connection that was lost

    _connection: Any = None  # the one that is subscribed

    def __init__(self, name: str, timing: Timing, waiters: Waiters | None = None) -> None:
        self._name = name
        self._timing = timing
        self._waiters = Waiters() if waiters is None else waiters
        self._worker = Worker(
            f"distlock-listener-{name}",
            self._work,
            interrupt=self._interrupt,
            on_refusal=self._on_refusal,
            idle_timeout=0.0,
        )
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        """Also in a forked child: what stands there is the parent's."""
        self._connection = None
        self.is_ready = False  # whether waiters are woken
        self._touched_at = -inf  # when a waiter was here last
        self._not_before = -inf  # when the next subscription may be made
        self._resubscribe = False
        self._has_told = False  # that the thread cannot be started
        self._to_wake: list[str] = []  # tokens of those that are to look, though nobody said that their turn has come
        self._wakes_more_at = -inf

    # For waiters

    def expect(self, request: LockRequest) -> None:
        """Wake this request from now on. To be called before the store may know of it."""
        request.inbox = request.inbox or self._inbox_of(request)
        self._waiters.add(request)
        self.touch()

    @abstractmethod
    def _inbox_of(self, request: LockRequest) -> str:
        """Where the store is to say that its turn has come."""

    def forget(self, request: LockRequest) -> None:
        self._waiters.discard(request)

    def touch(self) -> None:
        """A waiter is here, or about to come: the thread is to run."""
        self._touched_at = clock()
        if self._is_wanted:
            self._worker.nudge(self._not_before)

    def stop(self) -> None:
        """Nobody will wait any more; the thread notices within ``listener_nap``."""
        self._touched_at = -inf

    @abstractmethod
    def _interrupt(self) -> None:
        """End the thread, also while it reads: the interpreter exits."""

    def _on_refusal(self, error: RuntimeError) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "Who waits for a lock of %r is not woken but looks at times, because the thread that listens cannot be"
                " started: %s",
                self._name, error,
            )  # fmt: skip

    # In the thread

    def _work(self) -> float | None:
        if self._is_wanted and clock() >= self._not_before:
            self._has_told = False
            drive(self.steps(), self)
        return self._not_before if self._is_wanted else None

    @property
    def _is_wanted(self) -> bool:
        return clock() - self._touched_at < self._timing.listener_idle

    def steps(self) -> Steps[None]:
        """One subscription, from its connection to its end."""
        connection, pid = None, os.getpid()
        try:
            connection = yield Call("connect")
            if not fork.is_copy(pid):
                self._connection, self._resubscribe = connection, False
                yield Call("subscribe", (connection,))
            while self._connection is connection and self._is_wanted and not self._resubscribe:
                nap = min(self._timing.listener_nap, self._wake_some())
                yield Call("read", (connection, nap))
        except Exception as error:
            if fork.is_copy(pid):
                return
            self._note_failure(error)
            if not isinstance(error, self.connection_errors):
                raise
        finally:
            if not fork.is_copy(pid):
                self.is_ready, self._connection, self._to_wake = False, None, []  # after the next one all look anew
                self._not_before = clock() + self._timing.resubscribe_after
            if connection is not None:
                self.disconnect(connection)

    @abstractmethod
    def connect(self) -> Any: ...

    @abstractmethod
    def subscribe(self, connection: Any) -> None:
        """Calls ``_mark_ready()`` when that has come through, or ``read()`` does."""

    @abstractmethod
    def read(self, connection: Any, timeout: float) -> None:
        """Wake those that are named by what comes within ``timeout`` seconds."""

    @abstractmethod
    def disconnect(self, connection: Any) -> None: ...

    def _mark_ready(self) -> None:
        self._resubscribe = False  # what was found out about an earlier one
        self.is_ready = True
        self._wake_all()

    def _wake_all(self) -> None:
        """What was published while nobody listened is found by a look."""
        self._let_look(self._waiters)

    def _let_look(self, requests: Iterable[LockRequest]) -> None:
        self._to_wake = list(dict.fromkeys([*self._to_wake, *(request.token for request in requests)]))
        self._wake_some()

    def _wake_some(self) -> float:
        """A crowd looks over a second, and not all at once. Returns when to go on, in seconds."""
        if not self._to_wake:
            return inf
        if (now := clock()) >= self._wakes_more_at:
            self._wakes_more_at = now + SPREAD / PORTIONS
            portion = max(AT_ONCE, len(self._waiters) // PORTIONS)
            woken, self._to_wake = self._to_wake[:portion], self._to_wake[portion:]
            for token in woken:
                self._waiters.wake(token)
        return max(0.0, self._wakes_more_at - now)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, self.connection_errors):
            logger.debug("The listener of %r lost its connection: %s", self._name, error)
