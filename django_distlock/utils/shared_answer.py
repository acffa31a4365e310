"""An answer that one thread finds for all who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .wakeup import WakeEvent

Answer = TypeVar("Answer")


class SharedAnswer(Generic[Answer]):
    """A future without a lock, so that an interrupt of one who waits leaves nothing locked for the others."""

    is_there = False
    _error: BaseException | None = None

    def __init__(self) -> None:
        self._waiting: list[WakeEvent] = []

    def find(self, work: Callable[[], Answer]) -> None:
        """Do the work, and wake all who wait. If it raises an error, that is the answer."""
        try:
            self._answer = work()
        except BaseException as error:
            self._error = error
        self.is_there = True
        for event in self._waiting.copy():
            event.set()

    def notify(self, event: WakeEvent) -> None:
        """Set the event when the answer is there."""
        self._waiting.append(event)
        if self.is_there:  # after the append, because the answer may have come meanwhile
            event.set()

    def result(self) -> Answer:
        """The answer, which is there; raises the error of the work."""
        if self._error is not None:
            raise self._error
        return self._answer
