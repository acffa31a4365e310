"""Timeouts of tasks that count the time in which their event loop runs."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from types import TracebackType

import redis

TOO_LATE = "Timeout reading from socket"


class RunningTimer:
    """Calls ``on_over`` after so many seconds in which the event loop runs, unless it is stopped before.

    If thousands of tasks begin at once, the loop reads the replies to the first ones late. With a timer of real time,
    they would have timed out by then. To start it again costs little: a stop leaves the scheduled call for the next
    start.
    """

    __slots__ = ("_counted_from", "_due", "_handle", "_is_on", "_left", "_on_over", "_part", "loop")

    PARTS = 4  # the fewest rounds of the loop

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over, self.loop = on_over, asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._is_on, self._due = False, 0.0

    def start(self, seconds: float) -> None:
        now = self.loop.time()
        self._is_on, self._left, self._part, self._counted_from = True, seconds, seconds / self.PARTS, now
        if self._handle is None or self._due > now + self._part:
            self._schedule(now + self._part)

    def stop(self) -> None:
        self._is_on = False

    def end(self) -> None:
        """It is not started again."""
        if self._handle:
            self._handle.cancel()
        self._is_on, self._handle, self._on_over = False, None, _nothing

    def _schedule(self, due: float) -> None:
        if self._handle:
            self._handle.cancel()
        self._due = due  # uvloop's handles do not have it
        self._handle = self.loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._handle = None
        if not self._is_on:
            return
        self._left -= max(0.0, self._due - self._counted_from)  # after its due time, the loop did not run
        self._counted_from = now = self.loop.time()
        if self._left > 1e-9:
            self._schedule(now + min(self._part, self._left))
        else:
            self._is_on = False
            self._on_over()


def _nothing() -> None: ...


class RunningFor:
    """``async with RunningFor(seconds)`` raises redis-py's TimeoutError if the block takes longer.

    By a ``RunningTimer``.
    """

    __slots__ = ("_message", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float, message: str = TOO_LATE) -> None:
        self._seconds, self._message = seconds, message

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._timer = RunningTimer(lambda: self._timeout.reschedule(0.0))
        self._timer.start(self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.end()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except builtins.TimeoutError as late:
            raise redis.TimeoutError(self._message) from late
