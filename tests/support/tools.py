"""What several test modules need: those of the contract suite, and polling in tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.common.timing import Timing
from django_distlock.core.local_queue import LocalQueue
from django_distlock.core.renewal import Renewer
from django_distlock.testing.tools import PATIENCE, eventually, lock_request, locked_names, looks
from django_distlock.types import Grant

ALLOWANCE = 20.0  # seconds
# Of a test that waits until the client gives up a server that hangs: seconds, for both timeouts of ``proxied``
GIVES_UP_SOON = pytest.mark.parametrize("proxied", [0.3], indirect=True, ids=["gives up soon"])

__all__ = [
    "ALLOWANCE",
    "GIVES_UP_SOON",
    "PATIENCE",
    "aeventually",
    "backend_on",
    "ending_within",
    "eventually",
    "inbox_of_a_waiter",
    "insist",
    "keeping_a_journal",
    "lock_request",
    "locked_names",
    "on_stores",
    "queue_of",
    "renewer_of",
    "take_no_waiter_for_dead",
    "threads_of",
]


def renewer_of(backend: BaseLockBackend) -> Renewer:
    """What keeps the leases of a backend of ``locks``, also of one that the settings name no more."""
    renewer: Renewer = backend.on_orphan.__self__
    return renewer


def queue_of(backend: BaseLockBackend) -> LocalQueue:
    """The waiters of this process for a backend of ``locks``."""
    service = locks.service(backend.alias)
    assert service.backend is backend
    return service.queue


def threads_of(kind: str, alias: str = "default") -> list[threading.Thread]:
    """Those of this process that do that for an alias, by their names."""
    return [thread for thread in threading.enumerate() if thread.name == f"distlock-{kind}-{alias}"]


@contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer, even where a busy machine has kept it for ``ALLOWANCE`` seconds.

    What it must not wait for lasts longer than both together.
    """
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds + ALLOWANCE, f"took {took:.1f} s instead of {seconds:g}"


def take_no_waiter_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be so busy that one that lives does nothing for seconds; nobody shall pass it then."""
    for name in ("unresponsive_after", "grant_ttl", "waiter_expires_after"):
        monkeypatch.setattr(Timing, name, 2 * PATIENCE)


def inbox_of_a_waiter(backend: BaseLockBackend) -> str:
    """One that waits in ``with``, while somebody else has the lock."""
    other = lock_request(ttl=2 * PATIENCE)
    assert isinstance(backend.acquire(other, queue=False), Grant)

    def wait() -> None:
        with lock("name", using=backend.alias, wait=2 * PATIENCE):
            pass

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        eventually(lambda: backend.count_waiters(["name"]) == [1])
        [request] = queue_of(backend).line("name")
        return request.inbox
    finally:
        backend.release(other)
        waiter.join(2 * PATIENCE)


async def aeventually(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    pauses = looks(patience)
    while not (value := condition()):
        await asyncio.sleep(next(pauses))
    return value


def backend_on(*kinds: str) -> Any:
    """A fixture: ``locks["default"]`` on each of these kinds of store."""

    @pytest.fixture(params=kinds)
    def backend(request: pytest.FixtureRequest) -> BaseLockBackend:
        fixture = "valkey_locks" if request.param == "redis" else f"{request.param}_locks"
        found: BaseLockBackend = request.getfixturevalue(fixture)
        return found

    return backend


def on_stores(*kinds: str, fixture: str = "backend") -> Any:
    """A mark of a test that runs on these kinds of store, while that fixture of its module is on one of them."""
    return pytest.mark.parametrize(fixture, kinds, indirect=True)


@contextmanager
def keeping_a_journal(settings: Any) -> Iterator[BaseLockBackend]:
    """``locks["default"]`` with a journal, which nothing writes to any more when the next test begins."""
    settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "JOURNAL": 100}}
    try:
        yield locks["default"]
    finally:
        if journal := locks.service("default").journal:
            journal.write_last()
            eventually(lambda: not journal.unwritten)
        locks.close()


def insist(call):
    """On a busy machine, what nothing is the matter with may also take too long."""
    give_up = time.monotonic() + 6 * PATIENCE
    while True:
        try:
            return call()
        except LockBackendError:
            if time.monotonic() > give_up:
                raise


def in_a_thread(work):
    outcome = []

    def run():
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def held_names():
    return sorted(info.name for info in locks["default"].held())


def must_not_run(*args, **kwargs):
    pytest.fail("the body ran")
