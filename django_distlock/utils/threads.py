"""Background threads. Only this module makes them, so that a simulated world can replace them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from math import inf

from . import fork
from .clock import clock
from .events import about_event
from .wakeup import WakeEvent
from .weak import WeakList

logger = logging.getLogger("django_distlock")


def new_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Returns a thread that is not started yet. It is a daemon, so Ctrl-C and the end of the process do not wait."""
    return threading.Thread(target=target, args=arguments, name=name, daemon=True)


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread | None:
    """Returns the started thread; None if no thread can be started: at the limit of a container, or while the
    interpreter exits."""
    thread = new_thread(name, target, *arguments)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


_workers: WeakList[Worker] = WeakList()
# Kept: when a Thread is freed, CPython 3.13 detaches its thread, which is not there after a fork in C, and crashes.
_inherited: list[threading.Thread] = []


def end_all(timeout: float) -> None:
    """Let all threads end when the interpreter exits, and wait for that at most ``timeout`` seconds.

    A subinterpreter that ends while one of its threads still runs aborts the process.
    """
    deadline = clock() + timeout
    for thread in [worker.end() for worker in _workers]:
        if thread is not None:
            thread.join(max(0.0, deadline - clock()))


class Post:
    """A role that one thread at a time has. A thread tries to take it when it begins to run, and leaves it at the end.

    A post is never given to a thread before its start, because after an interrupt in ``Thread.start()`` it is unknown
    whether the thread will ever run. A post uses no lock, because signal handlers and finalizers may run at any point
    of a thread. A caller that needs the thread first records the work, and then checks whether the post is taken. The
    thread first leaves the post, and then checks for recorded work. So one of the two sees the other.
    """

    def __init__(self) -> None:
        self._taken: dict[str, threading.Thread] = {}

    @property
    def thread(self) -> threading.Thread | None:
        return self._taken.get("by")

    def take(self) -> bool:
        """Take the post. Returns False if another thread has it."""
        me = threading.current_thread()
        return self._taken.setdefault("by", me) is me

    def leave(self) -> None:
        self._taken.pop("by", None)


class Worker:
    """Calls ``work`` in a daemon thread: when it is nudged, and when the last call said that work is due again.

    ``work()`` does what is due, and returns when it should be called next, on ``clock()``; None if there is nothing
    left to do. If it raises, the exception is logged and the work is done again, because nobody would see the thread
    die.

    In a forked child there is no thread until the first nudge.
    """

    idle_timeout = 10.0  # seconds without work after which the thread ends
    retry_delay = 1.0  # seconds until work that failed is done again

    def __init__(
        self,
        name: str,
        work: Callable[[], float | None],
        is_needed: Callable[[], bool] = lambda: False,
        *,
        interrupt: Callable[[], object] = lambda: None,
        on_refusal: Callable[[RuntimeError], object] | None = None,
        idle_timeout: float | None = None,
    ) -> None:
        """``is_needed``: returns whether the work must continue while the interpreter exits.

        ``interrupt``: ends a wait inside ``work()``, so that it returns. ``on_refusal``: called if the thread cannot be
        started, at the limit of a container or while the interpreter exits; by default an error is logged.
        ``idle_timeout``: seconds without work after which the thread ends.
        """
        self._name = name
        self._work = work
        self._is_needed = is_needed
        self._interrupt = interrupt
        self._on_refusal = on_refusal or self._log_refusal
        if idle_timeout is not None:
            self.idle_timeout = idle_timeout
        _workers.add(self)
        self._started: threading.Thread | None = None  # the latest one, which may not have the post yet
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        if self._started:
            _inherited.append(self._started)
        self._post = Post()
        self._started = None
        self._wake_event = WakeEvent()  # for the thread that has the post
        self._is_nudged = False
        self._ends = False
        self.wakes_at = inf  # when it looks by itself; inf: every caller that adds work nudges
        self._nudged_for = -inf

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that runs; None if there is none."""
        return self._post.thread

    def nudge(self, due: float = -inf) -> None:
        """Tell the worker that there is work to do. ``due``: not before this moment, on ``clock()``."""
        if due >= self.wakes_at:
            return
        self._is_nudged = True
        self._nudged_for = due
        self._wake_event.set()
        if self._post.thread is None:
            self._start()

    def _start(self) -> None:
        """Start a thread. Two callers at the same time start two threads, and one of these ends at once."""
        self._started = thread = new_thread(self._name, self._run, os.getpid())
        try:
            thread.start()
        except RuntimeError as error:
            if self._post.thread is None:
                self._on_refusal(error)

    def _log_refusal(self, error: RuntimeError) -> None:
        """Log that the thread cannot be started. Leases then end with their TTL, and report that."""
        about = about_event("thread-refused", thread=self._name)
        logger.error("The thread %s cannot be started", self._name, exc_info=error, extra=about)

    def _run(self, pid: int) -> None:
        while not fork.is_copy(pid) and self._post.take():
            try:
                self._work_on(pid)
            finally:
                if not fork.is_copy(pid):
                    self._ends = False
                    self.wakes_at = inf  # as after the wait below: a killed greenlet does not return from that
                    self._post.leave()
            if not self._is_nudged:
                return

    def _work_on(self, pid: int) -> None:
        """Work until there was nothing to do for a while, or the thread should end."""
        idle_since = clock()
        while True:
            self._is_nudged = False
            self._wake_event.clear()
            due = self._due_after_work(pid)
            if fork.is_copy(pid):
                return
            if due is not None:
                idle_since = clock()
            elif clock() - idle_since >= self.idle_timeout:
                return
            if self._ends:
                return
            if due is None:
                due = idle_since + self.idle_timeout
                if self._nudged_for > clock():
                    # That work is done already. The thread looks again when it would have been due. So callers that
                    # meanwhile add and finish more such work, too fast for the thread to see, need not wake it.
                    due = min(due, self._nudged_for)
            self.wakes_at = due
            self._wake_event.wait(max(0.0, due - clock()))
            if fork.is_copy(pid):
                return
            self.wakes_at = inf

    def end(self) -> threading.Thread | None:
        """Tell the thread to end. Returns it; None if there is none, or it is still needed."""
        if self._is_needed():
            return None
        thread = self._post.thread or self._started
        if thread is None or not thread.is_alive():
            return None
        self._ends = True
        self._interrupt()
        self._wake_event.set()
        return thread

    def _due_after_work(self, pid: int) -> float | None:
        try:
            return self._work()
        except BaseException:  # a receiver of a signal may raise SystemExit, but not to end this thread
            if not fork.is_copy(pid):
                about = about_event("thread-failed", thread=self._name)
                logger.exception("The work of %s failed, and it tries again", self._name, extra=about)
            return clock() + self.retry_delay
