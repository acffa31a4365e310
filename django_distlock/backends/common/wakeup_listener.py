"""Wakes waiters: the reader of a subscription sets the events of waiters whose turn has come."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from ...types import LockRequest
from ...utils import fork
from ...utils.clock import clock
from ...utils.drive import Call, Steps, drive
from ...utils.events import about_event
from ...utils.threads import Worker
from ...utils.wakeup import WakeEvent
from .timing import Timing

if TYPE_CHECKING:
    from .readers import Readers

logger = logging.getLogger("django_distlock")


SPREAD = 1.0  # seconds over which many waiters spread their looks after a subscription has begun
PORTIONS = 20
AT_ONCE = 50  # waiters


class Waiters:
    """Requests that can be woken, by token. Weak, because nobody removes the request of a lost lease."""

    def __init__(self) -> None:
        self._requests: WeakValueDictionary[str, LockRequest] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LockRequest]:
        for reference in self._requests.valuerefs():  # a list; values() would fail if requests come meanwhile
            if request := reference():
                yield request

    def add(self, request: LockRequest) -> None:
        self._requests[request.token] = request

    def discard(self, request: LockRequest) -> None:
        if self._requests.get(request.token) is request:
            self._requests.pop(request.token, None)  # another thread may discard it, too

    def wake(self, token: str, handed: tuple[int, int] | None = None) -> bool:
        """False if no request here has the token. ``handed``: the slot and the fencing number of what it may take."""
        request = self._requests.get(token)
        if request is None:
            return False
        if handed:
            request.handed = handed
        request.event.set()
        return True


class WakeupListener(ABC):
    """One subscription of a process, for all its waiting threads and tasks, while there are any.

    A message is only a hint; the lease in the store decides, unless the message says what a waiter may take by it: see
    ``by_message``. Without messages, waiters look by themselves. A store implements how to connect, subscribe, read and
    disconnect; ``steps()`` yields calls of all but the last.

    If the store has ``readers()``, the first waiting thread reads the messages, for all waiters. The listener's own
    thread reads only if no thread waits.
    """

    connection_error: ClassVar[type[Exception]]  # of the driver, if not OSError

    _connection: Any = None  # the subscribed connection
    _readers: Readers | None = None  # of that connection

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
        """Also in a forked child, because the old connection belongs to the parent."""
        if self._readers:
            self._readers.forget()
        self._connection = self._readers = None
        self._tasks: dict[str, None] = {}  # tokens of waiting tasks
        self._rest = WakeEvent()  # ends the rest of the thread
        self.is_ready = False  # whether waiters are woken
        self._touched_at = -inf  # when a waiter was here last
        self._not_before = -inf  # when the next subscription may be made
        self._resubscribe = False
        self._has_told = False  # logged that the thread cannot be started
        self._to_wake: dict[str, None] = {}  # tokens of waiters that must look although no message named them
        self._wakes_more_at = -inf

    # For waiters

    def expect(self, request: LockRequest) -> None:
        """Wake this request from now on. Call it before the store may know the request."""
        request.inbox = request.inbox or self._inbox_of(request)
        self._waiters.add(request)
        self.touch()

    @abstractmethod
    def _inbox_of(self, request: LockRequest) -> str:
        """The inbox to which the store sends that the turn of the request has come."""

    def forget(self, request: LockRequest) -> None:
        self._waiters.discard(request)

    def touch(self) -> None:
        """A waiter is here, or about to come: the thread must run.

        When a subscription has ended, the thread checks whether it is still wanted, so it sees this.
        """
        self._touched_at = clock()
        if not self.is_ready and self._is_wanted:
            self._worker.nudge(self._not_before)

    def wait(self, request: LockRequest, timeout: float) -> None:
        """Until the event of the request is set, at most ``timeout`` seconds."""
        readers = self._readers
        if readers is None or not (self.is_ready and request.inbox):
            request.event.wait(timeout)
            return
        try:
            readers.wait(request.event, timeout, self._timing.listener_nap)
        finally:
            if self._tasks:
                self._rest.set()

    async def await_wake(self, request: LockRequest, timeout: float) -> None:
        """``wait()`` for tasks, which never read the connection."""
        token = request.token
        try:
            if request.inbox:
                self._tasks[token] = None
                self._rest.set()
            await request.event.await_set(timeout)
        finally:
            self._tasks.pop(token, None)

    def stop(self) -> None:
        """Nobody will wait any more. The thread notices within ``listener_nap``."""
        self._touched_at = -inf

    def _interrupt(self) -> None:
        """End the thread, also while it reads: the interpreter exits."""
        self._touched_at = -inf
        self._rest.set()
        if self._readers:
            self._readers.wake()

    def _on_refusal(self, error: RuntimeError) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "Waiters for locks of %r poll, because the thread that listens cannot be started: %s",
                self._name, error, extra=about_event("listener-refused", alias=self._name),
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
        connection, readers, pid = None, None, os.getpid()
        try:
            connection = yield Call("connect")
            if not fork.is_copy(pid):
                readers = self.readers(connection)
                self._connection, self._readers, self._resubscribe = connection, readers, False
                yield Call("subscribe", (connection,))
            while self._connection is connection and self._is_wanted and not self._resubscribe:
                nap = min(self._timing.listener_nap, self._wake_some())
                yield Call("read", (connection, nap))
        except Exception as error:
            if fork.is_copy(pid):
                return
            self._note_failure(error)
            if not self._is_loss(error):
                raise
        finally:
            if not fork.is_copy(pid):
                self.is_ready, self._connection, self._readers = False, None, None
                self._to_wake.clear()  # after the next subscription, all look anyway
                self._not_before = clock() + self._timing.resubscribe_after
                if readers:
                    readers.end()
            if connection is not None and (readers is None or fork.is_copy(pid)):
                self.disconnect(connection)

    def _is_loss(self, error: Exception) -> bool:
        """Whether the error is a loss of the connection."""
        return isinstance(error, self.connection_error | OSError)

    @abstractmethod
    def connect(self) -> Any: ...

    def readers(self, connection: Any) -> Readers | None:
        """None if only the thread reads, by ``read()``. A failure of the readers ends the rest of the thread."""
        return None

    @abstractmethod
    def subscribe(self, connection: Any) -> None:
        """Subscribe. It, or ``read()``, calls ``_mark_ready()`` when the subscription is confirmed."""

    def read(self, connection: Any, timeout: float) -> None:
        """Wake the waiters named by messages within ``timeout`` seconds, or rest while others read."""
        readers = self._readers
        if readers and not readers.read_if_missed(timeout, self._timing.listener_nap, is_wanted=bool(self._tasks)):
            self._rest.wait(timeout)

    @abstractmethod
    def disconnect(self, connection: Any) -> None: ...

    def _mark_ready(self) -> None:
        self._resubscribe = False  # it may stem from an earlier subscription
        self.is_ready = True
        self._wake_all()

    def _wake_all(self) -> None:
        """After a time without a subscription, all waiters must look, because they may have missed a message."""
        self._let_look(self._waiters)

    def _let_look(self, requests: Iterable[LockRequest]) -> None:
        self._to_wake.update(dict.fromkeys([request.token for request in requests]))
        self._wake_some()

    def _wake_some(self) -> float:
        """Many waiters look over a second, not all at once. Returns the seconds until the next ones."""
        if not self._to_wake:
            return inf
        if (now := clock()) >= self._wakes_more_at:
            self._wakes_more_at = now + SPREAD / PORTIONS
            portion = max(AT_ONCE, len(self._waiters) // PORTIONS)
            for token in [*self._to_wake][:portion]:
                self._to_wake.pop(token, None)
                self._waiters.wake(token)
        return max(0.0, self._wakes_more_at - now)

    def _note_failure(self, error: Exception) -> None:
        if self._is_loss(error):
            about = about_event("listener-cut-off", alias=self._name)
            logger.debug("The listener of %r lost its connection: %s", self._name, error, extra=about)
