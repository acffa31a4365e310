"""Objects of each event loop, such as connections, until the loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet


class EndsWithLoop(Protocol):
    ending: AsyncIterator[None]  # kept there, because the loop has only a weak reference to it

    async def aclose(self) -> None:
        """Close what is open. Later calls, of tasks that end with the loop, must leave nothing open."""


Own = TypeVar("Own", bound=EndsWithLoop)


class PerLoop(Generic[Own]):
    """An object from ``new`` for each event loop that asks, closed when the loop shuts down."""

    def __init__(self, new: Callable[[], Own]) -> None:
        self._new = new
        self._made: dict[asyncio.AbstractEventLoop, Own] = {}
        self._ending: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def __len__(self) -> int:
        return len(self._made)

    async def get(self) -> Own:
        """The object of the running loop."""
        return self.known() or await self.make()

    def known(self) -> Own | None:
        """The object of the running loop, if there is one."""
        return self._made.get(asyncio.get_running_loop())

    async def make(self) -> Own:
        loop = asyncio.get_running_loop()
        for other in list(self._made):
            if other.is_closed():
                self._made.pop(other, None)
        own = self._new()
        if loop in self._ending:
            await own.aclose()
            return own
        self._made[loop] = own
        own.ending = self._until_loop_ends(loop, own)
        await anext(own.ending)
        return own

    async def _until_loop_ends(self, loop: asyncio.AbstractEventLoop, own: Own) -> AsyncIterator[None]:
        """Closes connections when a loop that shuts down closes its asynchronous generators."""
        try:
            yield
        finally:
            self._ending.add(loop)
            self._made.pop(loop, None)
            await own.aclose()
