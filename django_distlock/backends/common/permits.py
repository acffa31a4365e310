"""Permits, which limit how many callers use connections at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from queue import SimpleQueue
from weakref import ref


class Permit:
    """Taken out of a queue and put back into it. A permit that is dropped comes back by itself.

    A signal handler may raise between any two steps, also right after a permit was taken.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: ref[SimpleQueue[Permit]]) -> None:
        self._queue = queue

    def __del__(self) -> None:
        queue = self._queue()
        if queue is not None:
            queue.put(Permit(self._queue))


def new_permits(number: int) -> SimpleQueue[Permit]:
    """A queue in C, which is several times faster than a semaphore."""
    queue: SimpleQueue[Permit] = SimpleQueue()
    for _ in range(number):
        queue.put(Permit(ref(queue)))
    return queue


class TaskPermits:
    """The same for the tasks of an event loop, in the order in which they come."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[asyncio.Future[bool]] = deque()

    def take(self) -> bool:
        """Take a permit if there is one. Returns whether there was."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def wait(self, timeout: float | None) -> bool:
        """Whether a permit came within the timeout and before ``wake()``. Call it after ``take()`` had none."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        late = None if timeout is None else loop.call_later(timeout, _end, turn)
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.result():  # it came meanwhile
                self.put()
            raise
        finally:
            if late:
                late.cancel()

    def put(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    def wake(self) -> None:
        """End all waits, so that their callers decide again whether to wait."""
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            _end(turn)


def _end(turn: asyncio.Future[bool]) -> None:
    """End the wait without a permit."""
    if not turn.done():
        turn.set_result(False)
