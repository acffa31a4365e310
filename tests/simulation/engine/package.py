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
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import WeakMethod, WeakSet

from .network import Socket

if TYPE_CHECKING:
    from .network import Network
    from .scheduler import Process, Scheduler

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
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    from .libraries import Reader

    simulated = {"clock_gettime": _clock, "monotonic": _clock, "time": _wall_clock}
    with mock.patch.multiple(time, **simulated, time_ns=_wall_clock_ns):
        django.setup()
        import django_distlock.backends.database.backend
        import django_distlock.backends.redis.cluster.backend
        import django_distlock.backends.redlock.backend
        import django_distlock.testing  # noqa: F401
    from django_distlock.backends.redis import exchange

    exchange.Reader = Reader


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
    from django_distlock.utils.chance import chance as package_chance

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
    os.getpid, os.dup2 = _pid, _dup2
    fork.pid = _pid
    _resets.extend([*fork._functions, *(MethodType(method, owner) for owner, method in fork._methods.items())])
    fork.in_child = _in_child
    random.seed(scheduler.random.random())  # of others; the package has its own
    package_chance.seed(scheduler.random.random())

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


# Forks. Each process has begun anew before anything of the package runs in it, so nothing else finds that out.


class LivingPid(int):
    """Of whichever process has what is collected: garbage is that of all."""

    def __eq__(self, other: object) -> bool:
        assert _scheduler
        return other not in _scheduler.ended_pids

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def _pid() -> int:
    assert _scheduler
    if _scheduler.is_collecting:
        return LivingPid()
    return _scheduler.process.pid if _scheduler.process else 0


_resets: list[Callable[[], object]] = []  # of functions and of what was there before the simulation
_resets_of: defaultdict[str, list[WeakMethod[Any]]] = defaultdict(list)  # by the name of the process


def _in_child(reset: Callable[[], object]) -> None:
    if _scheduler and _scheduler.process and isinstance(reset, MethodType):
        _resets_of[_scheduler.process.name].append(WeakMethod(reset))
    else:
        _resets.append(reset)


def forked(parent: Process, name: str) -> None:
    """The package begins anew in its child, which has that name. What others have at module level stays."""
    from django_distlock.core.registry import locks
    from django_distlock.utils.threads import Worker

    trace = sys.gettrace()
    sys.settrace(None)  # nobody goes first: the child has one thread
    resets = [*_resets, *filter(None, [method() for method in _resets_of[name]])]
    with ExitStack() as kept:
        _keep_others(kept, parent, name)
        for reset in resets:
            match getattr(reset, "__self__", None):
                case Worker(thread=thread) if thread and getattr(thread, "turns", None) not in parent.threads:
                    continue  # it sends the signals of all
                case deque() as unsent:
                    _keep(kept, unsent, lambda send: send.keywords["using"] != name)
            if isinstance(reset, FunctionType):
                for things in map(reset.__globals__.get, reset.__code__.co_names):
                    if isinstance(things, set | WeakSet):  # of connections
                        _keep(kept, things, lambda connection: _process_of(connection) is not parent)
            reset()
    locks.service(name)  # built now, because what guards that is everybody's
    sys.settrace(trace)


def _keep_others(kept: ExitStack, parent: Process, name: str) -> None:
    """Put back at the end what is not of that process."""
    from django_distlock.core.registry import locks

    services = locks._services
    others = {alias: service for alias, service in services.items() if alias != name}
    for alias in others:
        del services[alias]
    kept.callback(lambda: locks._services.update(others))
    of_others = {id(service.renewer) for service in others.values()}
    _keep(kept, locks._renewers, lambda renewer: id(renewer) in of_others)


def _process_of(connection: Any) -> Process | None:
    """``connection``: of redis-py, of a driver, or one of Django."""
    of_driver = getattr(connection, "connection", connection)
    socket = getattr(of_driver, "_sock", None) or getattr(of_driver, "_socket", None)
    return getattr(socket, "process", None)


def _dup2(descriptor: int, over: int, inheritable: bool = True, dup2: Any = os.dup2) -> int:
    """In a child, to which the connection of its parent is nothing then."""
    if over not in Socket.by_descriptor:
        return dup2(descriptor, over, inheritable)
    Socket.by_descriptor[over].forget()
    return over


def _keep(kept: ExitStack, things: Any, is_kept: Callable[[Any], bool]) -> None:
    others = [thing for thing in things if is_kept(thing)]
    mine = [thing for thing in things if not is_kept(thing)]
    things.clear()
    _add(things, mine)
    kept.callback(_add, things, others)


def _add(things: Any, more: list[Any]) -> None:
    add = things.append if isinstance(things, deque) else things.add
    for thing in more:
        add(thing)
