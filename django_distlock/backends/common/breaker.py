"""A circuit breaker: the results of the latest attempts decide whether a server is asked. No I/O here."""

from __future__ import annotations

from math import inf

from ...utils import fork
from ...utils.clock import clock
from .timing import Timing


class CircuitBreaker:
    """The breaker of one server in one process, for all its threads and tasks.

    It opens

    - when the server refuses a connection;
    - when two attempts have waited for the whole ``timeout`` since the last answer. If an impatient caller gives up
      sooner, the server is asked in the background, for the whole timeout. Such a probe counts like any attempt;
    - if another server may take over: only after ``failover_timeout`` seconds in which nobody got an answer.

    Any answer closes it. It also closes if nobody keeps it open by asking the server: if the thread for this does not
    get to run, callers must not be turned away from a server that works again.

    A caller that gets an answer writes the moment into ``answered_at``. A closed breaker costs nothing more.
    """

    def __init__(self, timeout: float, failover_timeout: float, timing: Timing) -> None:
        self.timeout, self._failover_timeout, self.timing = timeout, failover_timeout, timing
        self._begin_anew()
        fork.in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        self.answered_at = 0.0  # on clock(), like the other moments
        self.failing_since = -inf  # when the first attempt began that has failed since
        self._failures = 0  # the attempts since then that were refused or lasted the whole timeout
        self._opened_at = self._open_until = -inf
        self.wanted_at = -inf  # when a caller last failed, or was turned away
        self.failure: Exception | None = None  # the error of the last failed attempt

    @property
    def is_failing(self) -> bool:
        return self.failing_since > self.answered_at

    @property
    def is_tripped(self) -> bool:
        """Whether it opened, and nobody has got an answer since."""
        return self._opened_at > self.answered_at

    @property
    def is_open(self) -> bool:
        """Whether callers are turned away."""
        return self._opened_at > self.answered_at and clock() < self._open_until

    def turns_away(self) -> bool:
        """Whether a caller that comes now is refused at once, because it is open."""
        if not self.is_open:
            return False
        self.wanted_at = clock()
        return True

    @property
    def open_for(self) -> float:
        """Seconds since it opened."""
        return clock() - self._opened_at

    def failed(self, began: float, failure: Exception, *, refused: bool) -> bool:
        """An attempt that began then got no answer. Whether that is news: the first since an answer, or it opens."""
        self.wanted_at = clock()
        return self.count(began, failure, refused=refused)

    def count(self, began: float, failure: Exception, *, refused: bool) -> bool:
        """As ``failed()``, for an attempt without a caller, such as a probe."""
        if began <= self.answered_at:
            return False  # others got an answer meanwhile
        now, is_first = clock(), not self.is_failing
        if is_first:
            self.failing_since, self._failures = began, 0
        self.failure = failure
        # A connection gets less than the timeout, to leave time for the error.
        is_whole = refused or now - began >= self.timeout - self.timing.reply_reserve
        self._failures += is_whole
        if self._should_open(now, refused=refused):
            if not self.is_open:
                self._opened_at = self._opened_at if self.is_tripped else now
                self.keep_open(now + self.timing.probe_pause_longest)
                self._ask()
            return True
        if not is_whole:
            self._ask()
        return is_first

    def _should_open(self, now: float, *, refused: bool) -> bool:
        if self._failover_timeout:
            return now - self.failing_since >= self._failover_timeout
        return refused or self._failures >= 2

    def keep_open(self, asked_at: float) -> None:
        """Keep it open until the server, which is asked at that moment, has had time to answer."""
        self._open_until = asked_at + self.timeout + self.timing.probe_slack

    def close(self) -> None:
        """Let callers find out by themselves."""
        self._opened_at = self.failing_since = -inf

    def _ask(self) -> None:
        """Have the server asked in the background, with the whole timeout, until it answers."""
