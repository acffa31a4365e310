"""Until when the session of a process certainly lasts, from the answers of its servers. No I/O."""

from __future__ import annotations

from collections import deque
from math import inf

from ...grants import StoreSession
from ...utils.clock import clock, safe_deadline

RESOLUTION = 16  # answers that are kept for each spacing


class Confirmations:
    """The last moment at which the leader has certainly heard of a session, and from which it keeps it for its timeout.

    Only the leader ends a session. It learns from the pings of its followers, one every half tick, which of their
    clients sent something. An answer of a follower, even to a write that the leader has committed, does not prove that
    such a ping came through, because the follower may have been cut off right after the answer. But let a request be
    sent more than half a tick after an earlier one was answered, and let the leader commit it. Then a ping with the
    news of the earlier request came before it, on the same connection of the follower to its leader; or it came by
    another follower, which has asked the leader for the session. So the session counts from the sending of the earlier
    request.

    The earlier request must have been answered before. Two requests that were held up on their way may arrive together,
    and the follower may have reported neither of them.

    A timeout is at least two ticks, unless the server's ``minSessionTimeout`` is lowered. So a quarter of it is at
    least half a tick.

    Threads may call it at the same time, without a guard: whichever comes last, no wrong moment counts.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._since = -inf
        # When answered requests were sent and answered; they count when a later one is answered
        self._answered: deque[tuple[float, float]] = deque()

    @property
    def spacing(self) -> float:
        return self.timeout / 4

    def connected(self, sent_at: float) -> None:
        """A connection for the session was opened by a request sent then; its server has asked the leader."""
        self._since = max(self._since, sent_at)

    def answered(self, sent_at: float, answered_at: float) -> None:
        """The leader committed a request that was sent and answered at these moments."""
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
    """One session of this process. ``number``: its id on the servers. ``timeout``: the one they agreed to."""

    is_over = False

    def __init__(self, number: int, timeout: float) -> None:
        self.number = number
        self._confirmations = Confirmations(timeout)
        self.answered = self._confirmations.answered

    @property
    def timeout(self) -> float:
        return self._confirmations.timeout

    def connected(self, sent_at: float, timeout: float) -> None:
        """By a request sent then. The server may agree to a shorter timeout than the one before."""
        self._confirmations.timeout = min(self.timeout, timeout)
        self._confirmations.connected(sent_at)

    @property
    def until(self) -> float:  # type: ignore[override]
        return -inf if self.is_over else self.confirmed_until

    @property
    def confirmed_until(self) -> float:
        """As far as it was known, also if the session is over since."""
        return self._confirmations.until

    @property
    def is_about_to_end(self) -> bool:
        """Whether so little is left without a confirmation that no lease should begin now."""
        return self.until - clock() < self.timeout / 8
