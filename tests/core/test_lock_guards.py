"""Signal handlers and finalizers run at any point of a thread: none may wait for what its own thread is inside of."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from django_distlock import distributed_lock, lock, locks
from django_distlock.backends import locmem
from django_distlock.types import Grant, LockInfo
from tests.support.tools import PATIENCE, backend_on, lock_request, queue_of, renewer_of

PACKAGE = "django_distlock"

backend = backend_on("redis", "cluster", "redlock", "locmem", "postgres", "mariadb", "sqlite")


def ends(work):
    """Do it in a thread, and fail if that hangs."""
    done = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(6 * PATIENCE)
    assert done, "it hangs"
    return done[0]


def guards_of(backend):
    """All that the backend and what serves it may be inside of."""
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    seen, parts = set(), [*modules, locks, backend, queue_of(backend), renewer_of(backend)]
    while parts:
        part = parts.pop()
        is_ours = part in modules or type(part).__module__.startswith(PACKAGE)
        if id(part) in seen or not is_ours:
            continue
        seen.add(id(part))
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, type(threading.Lock()) | type(threading.RLock()) | threading.Condition):
                yield value
            parts.append(value)


def test_a_lock_can_be_asked_for_inside_of_any_guard(backend):
    with lock("name"):  # what is made by the first use is there
        assert lock("name", wait=0.1, reentrant=False).acquire(timeout=0) is False

    def work():
        with lock("other"):
            return lock("busy", wait=0).acquire()

    holder = lock_request("busy", ttl=60)
    assert isinstance(backend.acquire(holder, queue=False), Grant)
    guards = list(guards_of(backend))
    assert len(guards) >= 4
    for guard in guards:

        def inside(guard=guard):
            with guard:
                return work()

        assert ends(inside) is False


def test_local_memory_is_changed_by_one_at_a_time(locmem_locks, monkeypatch):
    """What comes in the midst finds the lock busy; what it releases is released after that."""
    mine, came = lock_request("mine", ttl=60), []
    assert isinstance(locmem_locks.acquire(mine, queue=False), Grant)

    def clock():
        monkeypatch.setattr(locmem, "clock", real)
        came.append(locmem_locks.acquire(lock_request(), queue=False))
        came.append(locmem_locks.release(mine))
        came.append(locmem_locks.look(["mine"]))
        return real()

    real = locmem.clock
    monkeypatch.setattr(locmem, "clock", clock)
    assert isinstance(ends(lambda: locmem_locks.acquire(lock_request(), queue=False)), Grant)
    assert isinstance(came[0], LockInfo)
    assert came[1] is True
    assert came[2][0][0].token == mine.token
    assert locmem_locks.look(["mine"]) == [[]]


@pytest.mark.usefixtures("locmem_locks")
def test_locks_that_the_collector_finalizes_are_released():
    @distributed_lock("rows:{number}")
    def rows(number):
        frame = []  # a cycle, as of a frame that keeps an exception
        yield frame

    def work():
        for number in range(300):
            generator = rows(number)
            next(generator).append([generator])
            with lock("other"):
                pass
        return True

    threshold = gc.get_threshold()
    gc.set_threshold(7, 2, 2)
    try:
        assert ends(work)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert list(locks["default"].held("rows:")) == []
