"""Time and turns: one thread of the simulated world runs at a time, until it waits; chance says which comes next.

Each simulated thread is a real one that stands still while it is not its turn. So the code in it is the package's own,
as it is, and the order of everything follows from the seed.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

GRAIN = 1e-6  # seconds that a wait takes at least; a clock of floats may stand still where a timeout is a difference
MOST_TURNS = 5_000  # of one thread in a second: more is a busy loop
COLLECTS = 0.01  # share of turns before which the garbage collector runs, in the thread whose turn it is

Wake = Callable[[object], None]
new_lock = threading.Lock


class BusyLoop(AssertionError):
    """A thread goes on and on, and hardly any time passes."""


class Unhandled(AssertionError):
    """A thread of the package ended by an exception, of which nobody is told."""


class Host:
    """A machine with a clock of its own. ``rate``: seconds that it counts in one of the world."""

    def __init__(self, name: str, scheduler: Scheduler, rate: float = 1.0) -> None:
        self.name = name
        self.rate = rate
        self._scheduler = scheduler
        self._wall_offset = 1_800_000_000.0

    def clock(self) -> float:
        return 1_000.0 + self._scheduler.now * self.rate

    def wall_clock(self) -> float:
        return self._wall_offset + self._scheduler.now * self.rate

    def set_wall_clock(self, by: float) -> None:
        """Somebody sets it; nothing may depend on it."""
        self._wall_offset += by


class Process:
    """Threads that live, stop and die together."""

    _pids = count(4242)

    def __init__(self, name: str, host: Host) -> None:
        self.name = name
        self.host = host
        self.pid = next(self._pids)
        self.is_alive = True
        self.has_forked = False  # the simulation goes on with its child
        self.is_child = False  # in which a call may go on that its parent began
        self.is_stopped = False
        self.stopped_for = 0.0  # seconds in all, and with them those for which any of its threads was paused
        self.paused_for = 0.0  # those of its threads alone
        self.threads: list[Turns] = []
        self.at_end: list[Callable[[], object]] = []  # what ends with its threads, as calls do
        self.at_death: list[Callable[[], object]] = []  # what the system does then, such as closing sockets

    def __str__(self) -> str:
        return self.name


class Turns:
    """What the scheduler knows of one thread."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.woken_by: object = None  # None: its time was over
        self.is_done = False
        self.failure: BaseException | None = None
        self.wait_number = 0  # what would wake it from an earlier wait wakes nobody
        self.turn = new_lock()
        self.turn.acquire()
        self.turns = 0
        self.paused_for = 0.0  # seconds, between two lines
        self.counted_since = 0.0
        self.join: Callable[[], object] = lambda: None  # wait until the real thread has ended

    def __str__(self) -> str:
        return self.name


class Scheduler:
    """``now``: seconds of the world. ``at()`` plans what happens by itself, and threads wait by ``wait()``."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.steps = 0
        self.threads: list[Turns] = []  # of processes that live
        self.trace: Any = None  # for sys.settrace() in each thread
        self.acting: Process | None = None  # as which somebody who is no simulated thread looks at a clock
        self._ready: list[Turns] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self.running: Turns | None = None
        self.ended_pids: set[int] = set()
        self.is_collecting = False  # the garbage of all processes
        self.failure: BaseException | None = None  # ends everything
        self._given_back = new_lock()
        self._given_back.acquire()

    # For the world

    def at(self, seconds: float, happen: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def run(self, until: float) -> None:
        while True:
            runnable = [thread for thread in self._ready if not thread.process.is_stopped]
            if runnable:
                thread = self.random.choice(runnable)
                self._ready.remove(thread)
                self._let_run(thread)
            elif self._events and self._events[0][0] <= until:
                moment, _, happen = heapq.heappop(self._events)
                self.now = max(self.now, moment)
                happen()
            else:
                self.now = max(self.now, until)
                return

    def kill(self, process: Process) -> None:
        """Nothing of it happens any more: its threads stand still for ever, wherever they are, and clean up nothing."""
        self._end_threads(process)
        for happen in process.at_death:
            happen()

    def _end_threads(self, process: Process) -> None:
        process.is_alive = False
        self.ended_pids.add(process.pid)
        self.threads = [thread for thread in self.threads if thread.process is not process]
        self._ready = [thread for thread in self._ready if thread.process is not process]
        for happen in process.at_end:
            happen()

    def stop(self, process: Process, seconds: float) -> None:
        """Its threads stand still for a while."""
        if process.is_stopped:
            return
        process.is_stopped = True
        began = self.now

        def go_on() -> None:
            process.is_stopped = False
            process.stopped_for += self.now - began

        self.at(seconds, go_on)

    def stacks(self) -> str:
        """Where the threads stand."""
        frames = sys._current_frames()
        texts = []
        for real in threading.enumerate():
            turns = getattr(real, "turns", None)
            if turns in self.threads and real.ident in frames:
                texts.append(f"{turns}:\n{''.join(traceback.format_stack(frames[real.ident])[-12:-3])}")
        return "\n".join(texts)

    def _let_run(self, thread: Turns) -> None:
        self.steps += 1
        if self.now > thread.counted_since + 1.0:
            thread.counted_since, thread.turns = self.now, 0
        thread.turns += 1
        if thread.turns > MOST_TURNS:
            raise BusyLoop(f"{thread} had {thread.turns} turns within a second:\n{self.stacks()}")
        self.running = thread
        thread.turn.release()
        self._given_back.acquire()
        self.running = None
        if thread.is_done:
            self.threads.remove(thread)
            thread.process.threads.remove(thread)
            thread.join()
        if failure := self.failure or thread.failure:
            raise failure

    # For threads

    def fork(self, parent: Process, parent_lives: float) -> Process:
        """The running thread goes on in a child, where it is alone. Its parent stands still, and dies later."""
        running, child = self.current, Process(parent.name, parent.host)
        parent.name, parent.has_forked, child.is_child = f"{parent.name}-{parent.pid}", True, True
        parent.threads.remove(running)
        child.threads.append(running)
        running.process = child
        self._end_threads(parent)

        def die() -> None:
            for happen in parent.at_death:
                happen()

        self.at(parent_lives, die)
        return child

    def begin(self, thread: Turns) -> None:
        """Called before its real thread starts."""
        thread.process.threads.append(thread)
        self.threads.append(thread)
        self._ready.append(thread)

    def end(self, thread: Turns) -> None:
        """The last thing that a thread does."""
        thread.is_done = True
        self._given_back.release()

    @property
    def current(self) -> Turns:
        assert self.running, "only simulated threads wait"
        return self.running

    @property
    def process(self) -> Process | None:
        """Whose thread runs now, or as which the world itself acts."""
        return self.running.process if self.running else self.acting

    def wait(self, timeout: float | None, register: Callable[[Wake], object]) -> object:
        """Wait until somebody calls what ``register`` was given, and return what it was called with; None: too late.

        ``timeout``: seconds on the clock of its host.
        """
        thread = self.current
        thread.wait_number += 1
        number = thread.wait_number
        thread.woken_by = None

        def wake(by: object) -> None:
            if thread.wait_number == number and thread.process.is_alive:
                thread.woken_by = by
                thread.wait_number += 1
                self._ready.append(thread)

        register(wake)
        if timeout is not None:
            self.at(max(GRAIN, timeout / thread.process.host.rate), lambda: wake(None))
        self._given_back.release()
        thread.turn.acquire()
        if self.random.random() < COLLECTS:
            self.is_collecting = True
            gc.collect()  # finalizers run wherever they happen to
            self.is_collecting = False
        return thread.woken_by

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, lambda wake: None)
