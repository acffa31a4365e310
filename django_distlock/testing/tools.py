"""Tools for tests of backends: a request for a lock, polling, and one interface to methods and their ``a`` twins."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..types import Holder, LockRequest

WAYS = ("sync", "async")
PATIENCE = 30.0  # seconds that a test waits for an event that must happen; far more than a busy machine needs


def lock_request(
    name: str = "name", ttl: float = 10.0, label: str = "test", slots: int = 1, max_waiters: int = 0
) -> LockRequest:
    return LockRequest(name, ttl, Holder.here(label, slots=slots), slots=slots, max_waiters=max_waiters)


def in_threads(number: int, work: Callable[[int], object]) -> None:
    """Run ``work(0)``, ``work(1)`` and so on in ``number`` threads, which begin together. Returns when all have ended.

    Raises the error of a thread.
    """
    together = threading.Barrier(number)

    def begin(index: int) -> None:
        together.wait(PATIENCE)
        work(index)

    with ThreadPoolExecutor(number) as pool:
        for one in [pool.submit(begin, index) for index in range(number)]:
            one.result(2 * PATIENCE)


def looks(timeout: float) -> Iterator[float]:
    """Seconds to sleep between looks at what shall happen: more, the longer it takes. Fails after ``timeout``."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) <= timeout:
        yield min(max(0.02, waited / 8), 0.1)
    raise AssertionError(f"did not happen within {timeout} s")


def eventually(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Poll until the condition is true and return its value; fail after ``timeout`` seconds."""
    pauses = looks(timeout)
    while not (value := condition()):
        time.sleep(next(pauses))
    return value


def locked_names(backend: Any, prefix: str = "") -> list[str]:
    """Returns the names of held locks that begin with ``prefix``, in order. ``backend``: itself, or wrapped."""
    return sorted({name for name, _ in backend.slots(prefix)})


@contextmanager
def calling(way: str) -> Iterator[Callable[[Any], Any]]:
    """Gives a function that wraps an object so that ``wrapped.method()`` calls the method, or its ``a`` twin."""
    if way == "sync":
        yield SyncCalls
    else:
        with asyncio.Runner() as runner:
            yield lambda target: AsyncCalls(target, runner)


class SyncCalls:
    """Calls the methods themselves."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._target, method)
        if method in ("slots", "held"):
            return lambda *args, **kwargs: list(found(*args, **kwargs))
        return found


class AsyncCalls:
    """Calls the ``a`` twins, all in one event loop."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, method: str) -> Any:
        twin = "await_for_turn" if method == "wait_for_turn" else f"a{method}"
        found = getattr(self._target, twin)
        if method in ("slots", "held"):
            return lambda *args, **kwargs: self._runner.run(_collected(found(*args, **kwargs)))
        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))


async def _collected(items: Any) -> list[Any]:
    return [item async for item in items]
