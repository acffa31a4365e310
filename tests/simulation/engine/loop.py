"""The event loop of asyncio, whose time and sockets are those of the simulated world."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from functools import partial
from typing import Any

from .network import Socket
from .scheduler import Scheduler
from .threads import Waiters

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Selector(selectors.BaseSelector):
    """Of simulated sockets."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._sockets: dict[int, Socket] = {}
        self._waiters = Waiters(scheduler)
        self._is_called = False  # by another thread

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        socket: Socket = Socket.by_descriptor[fileobj if isinstance(fileobj, int) else fileobj.fileno()]
        key = selectors.SelectorKey(fileobj, socket.fileno(), events, data)
        self._keys[key.fd] = key
        self._sockets[key.fd] = socket
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (found := self._found()) and not self._is_called:
            for fd in self._keys:
                self._sockets[fd].changed_for.append(self._waiters.wake)
            self._waiters.wait(timeout)
            found = self._found()
        self._is_called = False
        return found

    def _found(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for fd, key in self._keys.items():
            socket = self._sockets[fd]
            events = READ * socket.is_readable + WRITE * socket.is_writable
            if events & key.events:
                found.append((key, events & key.events))
        return found

    def call(self) -> None:
        self._is_called = True
        self._waiters.wake()

    def close(self) -> None:
        self._keys.clear()


class SelectorsModule:
    """In the place of ``selectors``."""

    EVENT_READ, EVENT_WRITE = READ, WRITE

    def __init__(self, scheduler: Scheduler) -> None:
        self.DefaultSelector = partial(Selector, scheduler)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        super().__init__(Selector(scheduler))
        self._clock_resolution = 1e-6
        self.tasks: set[asyncio.Task[None]] = set()

    def serve(self) -> None:
        """Until it is stopped; then it ends as asyncio.run() does."""
        asyncio.set_event_loop(self)
        try:
            self.run_forever()
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self.close()

    def time(self) -> float:
        process = self._scheduler.process
        assert process
        return process.host.clock()

    # In the place of a pair of sockets by which other threads wake the loop

    def _make_self_pipe(self) -> None: ...

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None:
        self._selector.call()  # type: ignore[attr-defined]
