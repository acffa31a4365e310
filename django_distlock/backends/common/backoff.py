"""Repeat a failed attempt until a deadline, with a growing pause before each new attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...utils.chance import chance
from ...utils.clock import clock, sleep

R = TypeVar("R")


class Backoff:
    """The pauses between attempts.

    ``deadline``: on ``clock()``. ``shortest``, ``longest``: the most seconds of the first pause, and of any pause. A
    pause has a random length between 0 and its most seconds, so that callers which collided do not collide again. If
    not ``is_random``, each pause lasts its most seconds.
    """

    def __init__(self, deadline: float, shortest: float, longest: float, *, is_random: bool = True) -> None:
        self.attempts = 0  # failed ones
        self.deadline = deadline
        self._limit = shortest
        self._longest = longest
        self._is_random = is_random

    def pause(self, minimum: float = 0.0) -> float | None:
        """Seconds before the next attempt; None if that would come after the deadline."""
        longest = min(self._limit, self._longest)
        pause = max(minimum, chance.uniform(0, longest) if self._is_random else longest)
        self.attempts += 1
        self._limit *= 2
        return pause if clock() + pause < self.deadline else None


def retry(
    attempt: Callable[[], R],
    should_retry: Callable[[Exception], bool],
    backoff: Backoff,
    minimum_pause: Callable[[], float] = lambda: 0.0,
) -> R:
    """The result of ``attempt()``. Raises the error of the last attempt."""
    while True:
        try:
            return attempt()
        except Exception as error:
            if not should_retry(error) or (pause := backoff.pause(minimum_pause())) is None:
                raise
        sleep(pause)
