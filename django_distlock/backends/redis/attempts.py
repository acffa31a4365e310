"""The attempts of commands to one server, a master, or the nodes of a Cluster."""

from __future__ import annotations

from math import inf

from redis.exceptions import AuthenticationError, MaxConnectionsError, RedisError, TimeoutError

from ...types import NOT_WAITING
from ...utils.clock import clock
from ..common.attempts import Attempts, InDoubt
from ..common.backoff import Backoff
from ..common.timing import Timing
from .config import Location
from .errors import BreakerOpen, is_about_leaving, is_answer, is_in_doubt, is_transient


def longest_step(timing: Timing, timeout: float, limit: float | None, deadline: float, began: float) -> float:
    """Seconds that one step of a call lasts at most. ``ServerAttempts`` explains the arguments."""
    step = timeout if limit is None else min(timeout, limit)
    return max(0.01, step if deadline == NOT_WAITING else min(step, max(timing.shortest_call, deadline - began)))


class ServerAttempts(Attempts):
    """Attempts on a limited number of connections.

    ``began``: when the call began, on ``clock()``. ``timeout``: seconds of silence after which an attempt fails;
    ``limit``: seconds for the whole call, if they are less. ``deadline``: the moment on ``clock()`` until which the
    caller waits for the lock; inf: no end. ``queue_for``: seconds for which it waits at least for a connection while
    the server answers others. ``pauses``: whether it may try again after a pause.

    A call lasts two timeouts, or as long as the caller waits if that is less. If another server may take over, it lasts
    as long as the caller waits, up to the location's ``failover_timeout``::

        began                                 deadline          + grace
          ├─ attempts and the pauses between ───┼─ last replies ───┤
    """

    def __init__(
        self,
        location: Location,
        timing: Timing,
        timeout: float,
        limit: float | None,
        deadline: float,
        began: float,
        queue_for: float = 0.0,
        *,
        pauses: bool = True,
    ) -> None:
        step = longest_step(timing, timeout, limit, deadline, began)
        if deadline == NOT_WAITING:
            longest, caller_deadline = 2 * timeout if limit is None else min(2 * timeout, limit), inf
        else:
            longest, caller_deadline = max(2 * timeout, location.failover_timeout), deadline
        super().__init__(timing, step, longest, caller_deadline, began)
        self._timeout, self._can_fail_over = timeout, location.failover_timeout > 0
        self._may_log_in_anew = location.credentials is not None  # once, with a new answer of the provider
        self._grace = timing.call_grace if pauses else 0.0
        self._hard_deadline = self.deadline + self._grace
        self.queue_deadline = max(began + step, began + queue_for, deadline)
        self.pause = 0.0  # seconds to wait before the next attempt
        self.has_failed = False  # any attempt so far
        shortest, longest = timing.call_retry_pause_shortest, timing.call_retry_pause_longest
        self._backoff = Backoff(self.deadline, shortest, longest, is_random=False)

    def step_timeout(self, *, was_idle: bool = False) -> float:
        """Seconds for the next step of an attempt.

        ``was_idle``: its connection may have died unnoticed, so time must be left for another one.
        """
        now = clock()
        half = max(self.timing.shortest_call, (self.deadline - now) / 2)
        return max(0.01, min(self.step, half if was_idle else self._hard_deadline - now))

    def connect_timeout(self) -> float:
        """Seconds to open a connection. This takes many steps, so it may be more than for a reply."""
        left, timing = self._hard_deadline - clock(), self.timing
        if self._grace:
            return max(0.01, min(max(self.step, timing.shortest_call + self._grace), left) - timing.reply_reserve)
        return max(0.01, min(self.step, left))

    def pause_before_retry(self, error: BaseException, *, was_sent: bool, was_idle: bool) -> float:
        """Seconds, also kept as ``pause``; 0: at once. Raises the error of the call if no attempt follows."""
        self.in_doubt = self.in_doubt or is_in_doubt(error, was_sent=was_sent)
        self.has_failed = True
        if was_sent and isinstance(error, AuthenticationError) and self._may_log_in_anew:
            self._may_log_in_anew = False
            return self._without_pause()
        if is_transient(error) and not isinstance(error, BreakerOpen):
            if (was_sent or is_about_leaving(error)) and self.may_retry_at_once(was_idle=was_idle):
                return self._without_pause()
            may_pass = is_answer(error) or self._can_fail_over
            if self._grace and may_pass and (pause := self._backoff.pause()) is not None:
                self.pause = pause
                return pause
        try:
            raise self._final_error(error)
        finally:
            del error  # else this frame and its traceback would keep each other, and a connection

    def _without_pause(self) -> float:
        self._hard_deadline = max(self._hard_deadline, clock() + self.timing.call_grace)
        self.pause = 0.0
        return self.pause

    def _final_error(self, error: BaseException) -> BaseException:
        if self.in_doubt and isinstance(error, RedisError | OSError):
            return InDoubt.because_of(error)
        return error  # also an error that a signal handler raised, such as a time limit

    # If all connections are in use

    def seconds_to_queue(self, max_connections: int, silent_since: float) -> float:
        """How long to wait for a connection, while ``silent_since`` stays as it is. Raises if waiting is of no use.

        ``silent_since``: when, on ``clock()``, an attempt first failed without an answer, if nobody got one since; inf:
        the server is busy with others, and only the caller's own wait counts.
        """
        now = clock()
        end = max(self.deadline, min(self.queue_deadline, silent_since + self._timeout))
        if now < end:
            return end - now
        if silent_since < inf:
            raise self._final_error(TimeoutError(f"all {max_connections} connections wait for an answer"))
        raise self._final_error(MaxConnectionsError(exhausted(max_connections)))

    def extend_for_queueing(self, began: float, ended: float) -> None:
        super().extend_for_queueing(began, ended)
        self._backoff.deadline, self._hard_deadline = self.deadline, self.deadline + self._grace


def exhausted(max_connections: int) -> str:
    return f"all {max_connections} connections are busy; OPTIONS['max_connections'] allows more"
