"""Tools for the tests of projects with locks: no server, another holder, a loss, an outage, code under a lock."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn
from unittest import mock

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import TestContextDecorator, override_settings

from ..backends.base import BaseLockBackend
from ..backends.common.key_prefix import with_end
from ..core import assertions
from ..core.holds import is_entered
from ..core.lease import Lease
from ..core.registry import DEFAULT_ALIAS, LOCAL_MEMORY, SETTING, locks
from ..core.renewal import mark_lost
from ..exceptions import LockBackendError, LockNotAcquired
from ..names import render
from ..options import OPTION_KEYS, check_ttl
from ..types import Grant, Holder, LockInfo, LockRequest, new_token

LOSS = "a test let it be lost"
ASKING = (  # methods of a backend, which have twins or not
    "acquire", "release", "renew", "slots", "list_slots", "look", "holders", "remaining", "count_waiters", "prune",
    "claim_run", "find_runs", "runs", "forget_run", "exchange", "write_journal", "read_journal",
)  # fmt: skip


class override_locks(TestContextDecorator):  # noqa: N801 - named as override_settings is
    """Uses locks in local memory instead of a server: new and empty at the beginning, dropped at the end.

    A context manager, and a decorator for functions, ``async def`` and test cases. It has every alias of the project,
    with its ``TTL``, ``WAIT`` and so on. Keywords change these for all aliases: ``override_locks(WAIT=0)``.
    ``backend``: the dotted path of another backend, such as the dummy, which grants every lock to everybody.
    """

    def __init__(self, backend: str = LOCAL_MEMORY, **defaults: Any) -> None:
        super().__init__()
        if unknown := [key for key in defaults if key not in OPTION_KEYS]:
            raise TypeError(f"override_locks() knows no {unknown[0]!r}; it changes {', '.join(OPTION_KEYS)}.")
        self._backend = backend
        self._defaults = defaults

    def enable(self) -> None:
        configured = locks.settings if hasattr(settings, SETTING) else {DEFAULT_ALIAS: {}}
        entries = {
            alias: {
                **{key: entry[key] for key in (*OPTION_KEYS, "KEY_PREFIX") if key in entry},
                **self._defaults,
                "BACKEND": self._backend,
            }
            for alias, entry in configured.items()
        }
        self._override = override_settings(**{SETTING: entries})
        self._override.enable()

    def disable(self) -> None:
        self._override.disable()


def separate_locks() -> None:
    """Give the locks of this process their own names in the store, for as long as the process lives.

    Each ``KEY_PREFIX`` of ``DISTRIBUTED_LOCKS`` gets a random end, so that test processes that run at the same time,
    and a run that was killed, do not share locks. A forked child that calls it again has other locks than its parent.
    The pytest plugin calls it.
    """
    if not hasattr(settings, SETTING):
        return
    end = f"-{new_token()[:8]}"
    entries = {
        alias: {**entry, "KEY_PREFIX": with_end(entry.get("KEY_PREFIX", "lock"), end)}
        for alias, entry in locks.settings.items()
    }
    setattr(settings, SETTING, entries)
    locks.close()


class held_elsewhere:  # noqa: N801 - reads as a sentence: with held_elsewhere("order:42")
    """A context, sync and async, in which a holder on another host has the lock. Gives its LockInfo.

    ``values`` fill the fields of the name, as for ``lock()``. ``ttl``: seconds of the lease, which is not renewed.
    ``slots``: how many slots the lock has; the holder takes one of them. Raises LockNotAcquired if the lock is already
    held.
    """

    def __init__(
        self,
        name: str,
        /,
        *values: object,
        using: str = DEFAULT_ALIAS,
        ttl: float = 3600.0,
        label: str = "somebody else",
        slots: int = 1,
    ) -> None:
        holder = Holder("elsewhere", 4711, "MainThread", label, Holder.here().since, slots=slots)
        self._request = LockRequest(render(name, values), check_ttl(ttl), holder, slots=slots)
        self._using = using

    def __enter__(self) -> LockInfo:
        backend = self._backend
        self._request = self._request.copy(prefix=backend.prefix_now())
        return self._info_of(backend.acquire(self._request, queue=False))

    async def __aenter__(self) -> LockInfo:
        backend = self._backend
        self._request = self._request.copy(prefix=backend.prefix_now())
        return self._info_of(await backend.aacquire(self._request, queue=False))

    @property
    def _backend(self) -> BaseLockBackend:
        backend = locks[self._using]
        if not backend.supports_exclusion:
            raise ImproperlyConfigured(
                f"{type(backend).__name__} grants every lock to everybody, so nobody else can hold one. Use"
                " override_locks(), which keeps locks in local memory."
            )
        return backend

    def _info_of(self, answer: Grant | LockInfo) -> LockInfo:
        if isinstance(answer, LockInfo):
            raise LockNotAcquired(
                f"held_elsewhere(): the lock {self._request.name!r} is held already, by {answer.holder}.",
                holder=answer.holder,
                name=self._request.name,
                using=self._using,
            )
        request = self._request
        return LockInfo(
            request.name, self._using, request.holder, answer.fence, request.ttl, token=request.token,
            prefix=request.prefix, slot=answer.slot,
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        locks[self._using].release(self._request)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await locks[self._using].arelease(self._request)


def lose(lease: Lease) -> None:
    """Let the lease be lost: others can acquire its lock, and its holder is notified as of any loss.

    ``lease.state`` is "lost" at once, ``ensure_held()`` and the end of ``with`` raise LockLost, the loss is logged,
    and the signal ``lock_lost`` is sent from another thread.
    """
    locks[lease.using].release(_request_of(lease))
    mark_lost(lease, LOSS)


async def alose(lease: Lease) -> None:
    """``lose()`` for tasks."""
    await locks[lease.using].arelease(_request_of(lease))
    mark_lost(lease, LOSS)


def _request_of(lease: Lease) -> LockRequest:
    return LockRequest(lease.name, lease.ttl, lease.holder, token=lease.token, prefix=lease.prefix)


class store_down(TestContextDecorator):  # noqa: N801 - named as override_settings is
    """Simulates that the store of an alias does not answer: each request to it from this process raises
    LockBackendError at once.

    A context manager, and a decorator for functions, ``async def`` and test cases. Inside ``override_locks()`` no
    server is needed. A lease that was acquired before is "unknown" from its next renewal on, and lost at its deadline.
    Its release raises, too, and is repeated in the background until the store is back.
    """

    def __init__(self, using: str = DEFAULT_ALIAS) -> None:
        super().__init__()
        self._using = using

    def enable(self) -> None:
        backend = locks[self._using]
        asking = [name for method in ASKING for name in (method, f"a{method}") if hasattr(backend, name)]
        refusing: dict[str, Any] = dict.fromkeys(asking, self._refuse)
        self._patch = mock.patch.multiple(backend, **refusing)
        self._patch.start()

    def disable(self) -> None:
        self._patch.stop()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise LockBackendError(f"Lock backend {self._using!r} does not answer: a test let its store be down.")


class assume_locked(TestContextDecorator):  # noqa: N801 - named as override_settings is
    """Lets ``assert_locked()`` pass for every name, in all threads: for unit tests of code that runs under a lock.

    A context manager, and a decorator for functions, ``async def`` and test cases.
    """

    def enable(self) -> None:
        assertions.assumed_depth += 1

    def disable(self) -> None:
        assertions.assumed_depth -= 1


def held_here() -> list[Lease]:
    """Returns the leases that this process holds, of all backends, except leases that were left but not released yet.

    A lease of a ``with`` inside a transaction is released at the end of the transaction, which in a test case is the
    end of the test.
    """
    return [lease for lease in locks.leases() if is_entered(lease)]


__all__ = [
    "alose",
    "assume_locked",
    "held_elsewhere",
    "held_here",
    "lose",
    "override_locks",
    "separate_locks",
    "store_down",
]
