"""A callable KEY_PREFIX: the tenant of the task or of the thread. Each answer is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django_distlock import locks
from django_distlock.backends.base import BaseLockBackend

PATH = f"{__name__}.current_tenant"

asked: list[str] = []
_of_task: ContextVar[str | None] = ContextVar("tenant", default=None)
_of_thread = threading.local()


class NoTenant(LookupError):
    """Nobody knows whose locks are asked for."""


def current_tenant() -> Any:
    found = _of_task.get()
    if found is None and (found := getattr(_of_thread, "tenant", None)) is None:
        raise NoTenant
    asked.append(found)
    return found


@contextmanager
def tenant(name: Any) -> Iterator[None]:
    """Of this thread, in whichever context, but not of others that it has work done by."""
    before, _of_thread.tenant = getattr(_of_thread, "tenant", None), name
    try:
        yield
    finally:
        _of_thread.tenant = before


@contextmanager
def tenant_of_task(name: str) -> Iterator[None]:
    reset = _of_task.set(name)
    try:
        yield
    finally:
        _of_task.reset(reset)


def of_tenants(settings: Any, prefix: object = PATH) -> BaseLockBackend:
    """The default alias as it is, with that KEY_PREFIX; nobody has asked yet."""
    entry = {**settings.DISTRIBUTED_LOCKS["default"], "KEY_PREFIX": prefix}
    settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "default": entry}
    asked.clear()
    return locks["default"]
