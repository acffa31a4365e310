"""What wakes waiters: a subscription, whose reader sets the events of those whose turn has come."""

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

    Where the store has ``readers()``, a thread that waits reads by itself, for all, if none before it does. Then the
    listener's own thread reads where only tasks wait, and where nobody does.
    """

    connection_error: ClassVar[type[Exception]]  # of the store's driver, if not OSError

    _connection: Any = None  # the one that is subscribed
    _readers: Readers | None = None  # of it

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
        if self._readers:
            self._readers.forget()
        self._connection = self._readers = None
        self._tasks: dict[str, None] = {}  # tokens of those that wait
        self._rest = WakeEvent()  # ends that of the thread
        self.is_ready = False  # whether waiters are woken
        self._touched_at = -inf  # when a waiter was here last
        self._not_before = -inf  # when the next subscription may be made
        self._resubscribe = False
        self._has_told = False  # that the thread cannot be started
        self._to_wake: dict[str, None] = {}  # tokens of those that are to look, though nobody named them
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
        """A waiter is here, or about to come: the thread is to run.

        One that has a subscription looks whether it is still wanted when that has ended, so it sees this.
        """
        self._touched_at = clock()
        if not self.is_ready and self._is_wanted:
            self._worker.nudge(self._not_before)

    def wait(self, request: LockRequest, timeout: float) -> None:
        """Until the event of the request is set, at the latest after ``timeout`` seconds."""
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
        """``wait()`` for tasks, which never read."""
        token = request.token
        try:
            if request.inbox:
                self._tasks[token] = None
                self._rest.set()
            await request.event.await_set(timeout)
        finally:
            self._tasks.pop(token, None)

    def stop(self) -> None:
        """Nobody will wait any more; the thread notices within ``listener_nap``."""
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
                self._to_wake.clear()  # after the next one all look anew
                self._not_before = clock() + self._timing.resubscribe_after
                if readers:
                    readers.end()
            if connection is not None and (readers is None or fork.is_copy(pid)):
                self.disconnect(connection)

    def _is_loss(self, error: Exception) -> bool:
        """Of the connection."""
        return isinstance(error, self.connection_error | OSError)

    @abstractmethod
    def connect(self) -> Any: ...

    def readers(self, connection: Any) -> Readers | None:
        """None where the thread alone reads, by ``read()``. Their failure ends its rest."""
        return None

    @abstractmethod
    def subscribe(self, connection: Any) -> None:
        """Calls ``_mark_ready()`` when that has come through, or ``read()`` does."""

    def read(self, connection: Any, timeout: float) -> None:
        """Wake those that are named by what comes within ``timeout`` seconds, or rest where others read."""
        readers = self._readers
        if readers and not readers.read_if_missed(timeout, self._timing.listener_nap, is_wanted=bool(self._tasks)):
            self._rest.wait(timeout)

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
        self._to_wake.update(dict.fromkeys([request.token for request in requests]))
        self._wake_some()

    def _wake_some(self) -> float:
        """A crowd looks over a second, and not all at once. Returns when to go on, in seconds."""
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
