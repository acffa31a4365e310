"""Two bases for a store that write its methods for threads and their twins for tasks."""

from __future__ import annotations

from abc import abstractmethod
from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from ..exceptions import LockBackendError
from ..types import CheckResult, Grant, Holder, LockInfo, LockRequest, Slot
from ..utils.drive import Steps, adrive, drive
from .base import STEP, BaseLockBackend, leases_in, names_of
from .common import selftest
from .common.per_loop import PerLoop

T = TypeVar("T")


class GeneratorBackend(BaseLockBackend):
    """A store whose operations are generators without I/O, written once for threads and tasks.

    They yield calls to a client. ``_client`` makes them for threads. For the tasks of an event loop, the loop's client
    from ``_async_clients`` makes them, by its twins. See ``utils.drive``.

    A store that must be fast implements ``acquire()``, ``release()`` and their twins instead of ``_acquire()`` and
    ``_release()``.
    """

    _client: Any
    _async_clients: PerLoop[Any]

    def _translated(self, error: Exception) -> Exception:
        """The error to raise inside the generators if the client fails with that error."""
        return error

    def _acquire(self, request: LockRequest, queue: bool) -> Steps[Grant | LockInfo]:
        """Implementations handle interrupts of an attempt: afterwards ``request.in_doubt`` is right."""
        raise NotImplementedError

    def _release(self, request: LockRequest, cooldown: float, force: bool) -> Steps[bool]:
        raise NotImplementedError

    def _acquire_all(self, requests: Sequence[LockRequest]) -> Steps[Sequence[Grant] | None]:
        yield from ()
        return None

    @abstractmethod
    def _renew(
        self, wanted: Sequence[tuple[LockRequest, float]], timeout: float | None
    ) -> Steps[Sequence[bool | None]]: ...

    @abstractmethod
    def _pages(self, prefix: str) -> Iterator[Steps[Iterable[Slot]]]:
        """Slots in parts, one part from each of these steps. The next part is made when the ones before were taken."""

    @abstractmethod
    def _look(self, names: Sequence[str]) -> Steps[list[list[LockInfo]]]: ...

    def _holders(self, slots: Sequence[Slot]) -> Steps[list[Holder | None]]:
        found = yield from self._look(names_of(slots))
        return [info.holder if info else None for info in leases_in(slots, found)]

    def _remaining(self, slots: Sequence[Slot]) -> Steps[list[float | None]]:
        found = yield from self._look(names_of(slots))
        return [info.remaining if info else None for info in leases_in(slots, found)]

    def _count_waiters(self, names: Sequence[str]) -> Steps[list[int | None]]:
        yield from ()
        return [None] * len(names)

    def _diagnose(self) -> Steps[list[CheckResult]]:
        """The results of ``check()`` besides the self-test, which follows. A LockBackendError stands for all."""
        yield from ()
        return []

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        return drive(self._acquire(request, queue), self._client, self._translated)

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        return await adrive(self._acquire(request, queue), await self._async_clients.get(), self._translated)

    def acquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        return drive(self._acquire_all(requests), self._client, self._translated)

    async def aacquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        return await adrive(self._acquire_all(requests), await self._async_clients.get(), self._translated)

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return drive(self._release(request, cooldown, force), self._client, self._translated)

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return await adrive(self._release(request, cooldown, force), await self._async_clients.get(), self._translated)

    def renew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None
    ) -> Sequence[bool | None]:
        return drive(self._renew(wanted, timeout), self._client, self._translated)

    async def arenew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None
    ) -> Sequence[bool | None]:
        return await adrive(self._renew(wanted, timeout), await self._async_clients.get(), self._translated)

    def slots(self, prefix: str = "") -> Iterator[Slot]:
        return chain.from_iterable(drive(page, self._client, self._translated) for page in self._pages(prefix))

    async def aslots(self, prefix: str = "") -> AsyncIterator[Slot]:
        for page in self._pages(prefix):
            for slot in await adrive(page, await self._async_clients.get(), self._translated):
                yield slot

    def look(self, names: Sequence[str]) -> list[list[LockInfo]]:
        return drive(self._look(names), self._client, self._translated)

    async def alook(self, names: Sequence[str]) -> list[list[LockInfo]]:
        return await adrive(self._look(names), await self._async_clients.get(), self._translated)

    def holders(self, slots: Sequence[Slot]) -> list[Holder | None]:
        return drive(self._holders(slots), self._client, self._translated)

    async def aholders(self, slots: Sequence[Slot]) -> list[Holder | None]:
        return await adrive(self._holders(slots), await self._async_clients.get(), self._translated)

    def remaining(self, slots: Sequence[Slot]) -> list[float | None]:
        return drive(self._remaining(slots), self._client, self._translated)

    async def aremaining(self, slots: Sequence[Slot]) -> list[float | None]:
        return await adrive(self._remaining(slots), await self._async_clients.get(), self._translated)

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        return drive(self._count_waiters(names), self._client, self._translated)

    async def acount_waiters(self, names: Sequence[str]) -> list[int | None]:
        return await adrive(self._count_waiters(names), await self._async_clients.get(), self._translated)

    def check(self) -> list[CheckResult]:
        try:
            found = drive(self._diagnose(), self._client, self._translated)
        except LockBackendError as error:  # another question would cost the timeouts again
            return [selftest.failed(error)]
        return super().check() + found

    async def acheck(self) -> list[CheckResult]:
        try:
            found = await adrive(self._diagnose(), await self._async_clients.get(), self._translated)
        except LockBackendError as error:
            return [selftest.failed(error)]
        return await super().acheck() + found


class ThreadedBackend(BaseLockBackend):
    """A store whose client has no asyncio: the twins run the methods in threads.

    Waiting costs no thread, because ``await_for_turn()`` sleeps in the event loop. A callable KEY_PREFIX is called
    outside the threads, because they do not know whose locks their caller asks for.
    """

    @abstractmethod
    async def _in_thread(self, call: Callable[[], T], waiter: LockRequest | None = None) -> T:
        """Returns or raises what ``call()`` does, in a thread. A store that never waits calls it directly.

        ``waiter``: the request of the attempt, which may be urgent.
        """

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        try:
            return await self._in_thread(lambda: self.acquire(request, queue=queue), request)
        except CancelledError:
            request.in_doubt = True  # its thread continues
            raise

    async def aacquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        try:
            return await self._in_thread(lambda: self.acquire_all(requests), requests[0])
        except CancelledError:
            for request in requests:
                request.in_doubt = True
            raise

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return await self._in_thread(lambda: self.release(request, cooldown, force=force))

    async def arenew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None
    ) -> Sequence[bool | None]:
        return await self._in_thread(lambda: self.renew(wanted, timeout=timeout))

    async def aslots(self, prefix: str = "") -> AsyncIterator[Slot]:
        slots = self.pinned().slots(prefix)
        while batch := await self._in_thread(lambda: list(islice(slots, STEP))):
            for slot in batch:
                yield slot

    async def alook(self, names: Sequence[str]) -> list[list[LockInfo]]:
        return await self._in_thread(partial(self.pinned().look, names))

    async def aholders(self, slots: Sequence[Slot]) -> list[Holder | None]:
        return await self._in_thread(partial(self.pinned().holders, slots))

    async def aremaining(self, slots: Sequence[Slot]) -> list[float | None]:
        return await self._in_thread(partial(self.pinned().remaining, slots))

    async def acount_waiters(self, names: Sequence[str]) -> list[int | None]:
        return await self._in_thread(partial(self.pinned().count_waiters, names))

    async def aprune(self, older_than_seconds: float) -> int | None:
        return await self._in_thread(lambda: self.prune(older_than_seconds))
