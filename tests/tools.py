"""What several test modules need: polling with a deadline, and one interface to sync and async calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from django_distlock.tickets import Holder, Ticket

PATIENCE = 10.0  # seconds a test waits for what must happen; far above what it takes


def eventually(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Poll until the condition is true and return its value; fail after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {patience} s")
        time.sleep(0.005)
    return value


async def aeventually(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {patience} s")
        await asyncio.sleep(0.005)
    return value


def ticket(name: str = "name", ttl: float = 10.0, label: str = "test") -> Ticket:
    return Ticket(name, ttl, Holder.here(label))


class SyncCalls:
    """Calls methods as they are."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._target, method)
        if method in ("names", "held"):
            return lambda *args, **kwargs: list(found(*args, **kwargs))
        return found


class AsyncCalls:
    """Calls the ``a`` twins, all in one event loop."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, method: str) -> Any:
        twin = "await_turn" if method == "wait_turn" else f"a{method}"
        found = getattr(self._target, twin)
        if method in ("names", "held"):
            return lambda *args, **kwargs: self._runner.run(_collected(found(*args, **kwargs)))
        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))


async def _collected(items: Any) -> list[Any]:
    return [item async for item in items]
