"""What the standard library has for threads, for those of the simulated world."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from .scheduler import Process, Scheduler, Turns, Unhandled, Wake


class Waiters:
    """Who waits for one thing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wakes: list[Wake] = []

    def wait(self, timeout: float | None) -> bool:
        """Whether it was woken in time."""
        return self._scheduler.wait(timeout, self._wakes.append) is not None

    def wait_until(self, is_so: Callable[[], bool], timeout: float | None) -> bool:
        """Whether it is so in time. All are woken, and another one may be quicker."""
        until = None if timeout is None else self._scheduler.now + timeout
        while not is_so():
            if not self.wait(None if until is None else until - self._scheduler.now):
                return is_so()
        return True

    def wake(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake("woken")


class Lock:
    """Of threading. ``is_recursive``: an RLock."""

    def __init__(self, scheduler: Scheduler, *, is_recursive: bool = False) -> None:
        self._scheduler = scheduler
        self._is_recursive = is_recursive
        self._owner: Turns | None = None
        self._depth = 0
        self._waiters = Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until = None if timeout < 0 else self._scheduler.now + timeout
        while not self._is_free():
            if not (blocking and self._wait_for_owner(until)):
                return False
        self._depth += 1
        self._owner = self._scheduler.running
        return True

    def _wait_for_owner(self, until: float | None) -> bool:
        """Whether it was woken in time. While the owner is paused between two lines, whoever waits stands still."""
        owner, running = self._owner, self._scheduler.running
        before = owner.paused_for if owner else 0.0
        is_woken = self._waiters.wait(None if until is None else until - self._scheduler.now)
        if owner and running:
            running.paused_for += owner.paused_for - before
        return is_woken

    def _is_free(self) -> bool:
        return not self._depth or (self._is_recursive and self._owner is self._scheduler.running)

    def release(self) -> None:
        if not self._depth or (self._is_recursive and self._owner is not self._scheduler.running):
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        self.changed()

    def changed(self) -> None:
        """Who waits for it looks again."""
        self._waiters.wake()

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._lock = lock or Lock(scheduler, is_recursive=True)
        self._waiters = Waiters(scheduler)
        self._scheduler = scheduler
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._lock._depth = self._lock._depth, 0
        self._lock.changed()
        try:
            return self._waiters.wait(timeout)
        finally:
            self._lock.acquire()
            self._lock._depth = depth

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._scheduler.now + timeout
        while not predicate():
            left = None if until is None else until - self._scheduler.now
            if (left is not None and left <= 0) or not self.wait(left):
                return predicate()
        return True

    def notify(self, n: int = 1) -> None:
        self._waiters.wake()  # spurious wake-ups are allowed

    notify_all = notify


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._waiters = Waiters(scheduler)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiters.wait(timeout)
        return self._is_set


class Semaphore:
    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._value = value
        self._waiters = Waiters(scheduler)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if blocking and timeout != 0:
            self._waiters.wait_until(lambda: self._value > 0, timeout)
        if not self._value:
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._waiters.wake()


class SimpleQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._items: deque[Any] = deque()
        self._waiters = Waiters(scheduler)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block:
            self._waiters.wait_until(lambda: bool(self._items), timeout)
        return self.get_nowait()

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Thread(threading.Thread):
    """It runs when the scheduler lets it, in the process of whoever starts it."""

    def __init__(self, scheduler: Scheduler, process: Process | None = None, **arguments: Any) -> None:
        super().__init__(**{**arguments, "daemon": True})
        self._scheduler = scheduler
        self._process = process
        self.turns: Turns | None = None

    def start(self) -> None:
        process = self._process or self._scheduler.process
        assert process, "a thread is started in a process"
        self.turns = Turns(process, self.name)
        self.turns.join = super().join
        self._scheduler.begin(self.turns)
        super().start()

    def run(self) -> None:
        turns = self.turns
        assert turns
        turns.turn.acquire()
        try:
            sys.settrace(self._scheduler.trace)
            super().run()
        except BaseException as error:
            turns.failure = error
            if self._process is None:  # who calls the package is started in a process by the simulation
                turns.failure = Unhandled(f"{turns} ended by {type(error).__name__}: {error}")
                turns.failure.__cause__ = error
        finally:
            sys.settrace(None)
            self._scheduler.end(turns)

    def is_alive(self) -> bool:
        return self.turns is not None and not self.turns.is_done and self.turns.process.is_alive

    def join(self, timeout: float | None = None) -> None:
        until = None if timeout is None else self._scheduler.now + timeout
        while self.is_alive() and (until is None or self._scheduler.now < until):
            self._scheduler.sleep(0.01)


class ThreadingModule:
    """In the place of ``threading``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.Lock = partial(Lock, scheduler)
        self.RLock = partial(Lock, scheduler, is_recursive=True)
        self.Condition = partial(Condition, scheduler)
        self.Event = partial(Event, scheduler)
        self.Semaphore = partial(Semaphore, scheduler)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class QueueModule:
    """In the place of ``queue``."""

    Empty = queue.Empty

    def __init__(self, scheduler: Scheduler) -> None:
        self.SimpleQueue = partial(SimpleQueue, scheduler)


class ExecutorThreading(ThreadingModule):
    """In the place of ``threading`` for the executors of the standard library."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.Thread = partial(Thread, scheduler)
