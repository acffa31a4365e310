"""How many may use connections at the same time."""

from __future__ import annotations

from queue import SimpleQueue
from weakref import ref


class Permit:
    """Taken out of a queue and put back into it; one that is dropped comes back by itself.

    A handler of a signal may raise between any two steps, also right after a permit was taken.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: ref[SimpleQueue[Permit]]) -> None:
        self._queue = queue

    def __del__(self) -> None:
        queue = self._queue()
        if queue is not None:
            queue.put(Permit(self._queue))


def permits(number: int) -> SimpleQueue[Permit]:
    """A queue in C, which is several times faster than a semaphore."""
    queue: SimpleQueue[Permit] = SimpleQueue()
    for _ in range(number):
        queue.put(Permit(ref(queue)))
    return queue
