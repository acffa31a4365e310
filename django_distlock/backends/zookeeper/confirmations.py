"""Until when the session of a process lasts for certain, by what its servers have answered. No I/O."""

from __future__ import annotations

from collections import deque
from math import inf

from ...types import StoreSession
from ...utils.clock import clock, safe_deadline

RESOLUTION = 16  # answers that are kept of each spacing


class Confirmations:
    """Since when the leader has heard of a session for certain: from then on it keeps it for its timeout.

    The leader alone ends a session, and learns from the pings of its followers, one each half tick, which of their
    clients sent something. That a follower answered, even a write that the leader has committed, does not say that
    such a ping came through: the follower may have been cut off right after the answer. But a request that the leader
    committed, and that was sent more than half a tick after an earlier one was answered, has followed a ping with the
    news of the earlier one: on the same connection of the follower to its leader, or on that of another one, which has
    asked the leader for the session. So the session counts from the sending of that earlier one.

    That the earlier one was answered before matters: of two that were held up on their way, and came together, the
    follower may have told nothing.

    A timeout is two ticks at least, unless the server's ``minSessionTimeout`` is lowered, so that a quarter of it is
    half a tick or longer.

    Threads call it at once, without a guard: whichever comes last, no moment counts that should not.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._since = -inf
        # Of answered requests, which count when a later one is answered: when they were sent, and answered
        self._answered: deque[tuple[float, float]] = deque()

    @property
    def spacing(self) -> float:
        return self.timeout / 4

    def connected(self, sent_at: float) -> None:
        """A connection was opened for the session by a request sent then: its server has asked the leader."""
        self._since = max(self._since, sent_at)

    def answered(self, sent_at: float, answered_at: float) -> None:
        """A request sent then was committed by the leader, and its answer came then."""
        while self._answered:
            try:
                earlier = self._answered.popleft()
            except IndexError:  # another thread took the last one
                break
            if earlier[1] > sent_at - self.spacing:
                self._answered.appendleft(earlier)
                break
            self._since = max(self._since, earlier[0])
        if not self._answered or answered_at >= self._answered[-1][1] + self.spacing / RESOLUTION:
            self._answered.append((sent_at, answered_at))

    @property
    def until(self) -> float:
        return safe_deadline(self._since, self.timeout)


class ZooKeeperSession(StoreSession):
    """One session of this process. ``number``: by which the servers know it. ``timeout``: the one they agreed to."""

    is_over = False

    def __init__(self, number: int, timeout: float) -> None:
        self.number = number
        self._confirmations = Confirmations(timeout)
        self.answered = self._confirmations.answered

    @property
    def timeout(self) -> float:
        return self._confirmations.timeout

    def connected(self, sent_at: float, timeout: float) -> None:
        """By a request sent then. The server may agree to less than the one before did."""
        self._confirmations.timeout = min(self.timeout, timeout)
        self._confirmations.connected(sent_at)

    @property
    def until(self) -> float:  # type: ignore[override]
        return -inf if self.is_over else self.confirmed_until

    @property
    def confirmed_until(self) -> float:
        """By what was known of it, whether or not it is over since."""
        return self._confirmations.until

    @property
    def is_about_to_end(self) -> bool:
        """Unless it is confirmed: so little is left that no lease should begin now."""
        return self.until - clock() < self.timeout / 8
