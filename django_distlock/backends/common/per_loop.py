"""What every event loop has of its own, such as connections, from its first use until the loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet


class EndsWithLoop(Protocol):
    ending: AsyncIterator[None]  # held there because a loop itself keeps no more than a weak reference

    async def aclose(self) -> None:
        """Close what is open; what still comes, from others that end with the loop, keeps nothing open."""


Own = TypeVar("Own", bound=EndsWithLoop)


class PerLoop(Generic[Own]):
    """One of what ``new`` makes for each event loop that asks, closed when that loop shuts down."""

    def __init__(self, new: Callable[[], Own]) -> None:
        self._new = new
        self._made: dict[asyncio.AbstractEventLoop, Own] = {}
        self._ending: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def __len__(self) -> int:
        return len(self._made)

    async def here(self) -> Own:
        """The one of the running loop."""
        loop = asyncio.get_running_loop()
        own = self._made.get(loop)
        return await self._make(loop) if own is None else own

    async def _make(self, loop: asyncio.AbstractEventLoop) -> Own:
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
        """A loop that shuts down closes its asynchronous generators: the moment to close connections."""
        try:
            yield
        finally:
            self._ending.add(loop)
            self._made.pop(loop, None)
            await own.aclose()
