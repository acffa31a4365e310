"""Puts the package into the simulated world: its clocks, threads, sockets and chance are the world's.

Nothing of the package is replaced but what it takes from the system. This process then serves simulations alone, and
nothing is put back. One alias of DISTRIBUTED_LOCKS stands for one process: its backend, renewer, queue and listener are
built for it alone, as they would be in a process of its own. The module level of the package is shared.
"""

from __future__ import annotations

import concurrent.futures.thread
import gc
import os
import random
import select
import selectors
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from .network import Network
    from .scheduler import Process, Scheduler

PID = 4242  # of all: an alias stands for a process

_scheduler: Scheduler | None = None  # of the world that is there


def _clock(*of: int) -> float:
    if _scheduler is None:
        return 0.0
    return _scheduler.process.host.clock() if _scheduler.process else 1_000.0 + _scheduler.now


def _wall_clock() -> float:
    if _scheduler is None:
        return 0.0
    return _scheduler.process.host.wall_clock() if _scheduler.process else 1_800_000_000.0 + _scheduler.now


def _wall_clock_ns() -> int:
    return int(_wall_clock() * 1e9)


def import_package() -> None:
    """Called before anything imports the package, which asks the system for its clocks once."""
    assert "django_distlock" not in sys.modules
    sys.modules["hiredis"] = None  # type: ignore[assignment] - it reads from sockets of the system alone
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import celery  # noqa: F401 - what is imported now has the true clocks
    import django
    import redis.asyncio  # noqa: F401

    simulated = {"clock_gettime": _clock, "monotonic": _clock, "time": _wall_clock}
    with mock.patch.multiple(time, **simulated, time_ns=_wall_clock_ns):
        django.setup()
        import django_distlock.backends.database.backend
        import django_distlock.backends.redis.cluster.backend
        import django_distlock.backends.redlock.backend
        import django_distlock.testing  # noqa: F401


class _Time:
    """In the place of ``time``, for what is looked up when it is called."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.sleep = scheduler.sleep
        self.time_ns = _wall_clock_ns

    def thread_time(self) -> float:
        """What runs takes no time."""
        return 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def enter(scheduler: Scheduler, network: Network, settings: dict[str, Any]) -> None:
    """From now on the package is in that world. Once in a process."""
    global _scheduler
    _scheduler = scheduler
    from django.conf import settings as django_settings
    from django.core.signals import request_finished

    from django_distlock.backends.database import connections
    from django_distlock.core.detached import Detached
    from django_distlock.core.registry import locks
    from django_distlock.utils import clock, fork, threads

    from .loop import SelectorsModule
    from .network import Poll, SocketModule
    from .threads import ExecutorThreading, QueueModule, Thread, ThreadingModule
    from .threads import SimpleQueue as SimulatedQueue

    def new_thread(name: str, target: Any, *arguments: Any) -> Thread:
        return Thread(scheduler, name=name, target=target, args=arguments)

    in_their_place: dict[int, Any] = {
        id(threading): ThreadingModule(scheduler),
        id(socket): SocketModule(network),
        id(SimpleQueue): partial(SimulatedQueue, scheduler),
        id(select.poll): partial(Poll, network),
        id(selectors): SelectorsModule(scheduler),
        id(threads.new_thread): new_thread,
    }
    clock.time = connections.time = _Time(scheduler)  # type: ignore[assignment, attr-defined]
    concurrent.futures._base.threading = concurrent.futures.thread.threading = ExecutorThreading(scheduler)  # type: ignore[assignment, attr-defined]
    concurrent.futures.thread.queue = QueueModule(scheduler)  # type: ignore[assignment, attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("django_distlock"):
            for attribute, value in list(vars(module).items()):
                if id(value) in in_their_place:
                    setattr(module, attribute, in_their_place[id(value)])

    chance = random.Random(scheduler.random.random())
    os.urandom = chance.randbytes
    os.getpid = lambda: PID
    fork.known_pid = PID
    random.seed(scheduler.random.random())

    def from_text(text: str, read: Any = Detached.from_text) -> Detached:
        """It is adopted by the process that reads it, whose backend has its alias."""
        assert scheduler.process
        detached: Detached = replace(read(text), using=scheduler.process.name)
        return detached

    Detached.from_text = staticmethod(from_text)  # type: ignore[method-assign]
    request_finished.receivers.clear()  # which would close old connections of all simulated processes
    django_settings.DISTRIBUTED_LOCKS = settings
    locks.close()
    gc.collect()
    gc.freeze()  # what is there lives on, and is not looked at each time
    gc.disable()  # the scheduler says when


def process_died(process: Process) -> None:
    """The thread that sends signals serves all processes. Where it was of this one, the next signal starts another."""
    from django_distlock import signals

    turns = getattr(signals._worker.thread, "turns", None)
    if turns and turns.process is process:
        signals._worker._reset_after_fork()
