"""How long a call lasts, whether it is tried again, and whether it is in doubt then: one policy for all stores.

A call fails if a step takes too long, if a connection breaks, or if a server refuses for now. Then

1. a command that was sent and not answered leaves the call in doubt, whatever comes later;
2. the first attempt that fails after it was sent, or whose connection ends while it opens, is repeated at once, because
   perhaps only its connection is to blame;
3. other attempts follow after growing pauses (``Backoff``), while they may help and before the deadline of the call.
"""

from __future__ import annotations

from ...exceptions import LockBackendError
from ...utils.clock import clock
from .timing import Timing


class InDoubt(LockBackendError):
    """The store may have executed the command, or may still execute it."""

    @classmethod
    def because_of(cls, cause: Exception) -> InDoubt:
        error = cls(str(cause))
        error.__cause__ = cause
        return error


class Attempts:
    """The attempts of one call, and their results.

    ``longest``: seconds that the call lasts at most, from ``began`` on; less if its caller waits for less, until
    ``caller_deadline``, but at least ``shortest_call``. ``step``: seconds that one of its steps lasts at most.
    """

    def __init__(self, timing: Timing, step: float, longest: float, caller_deadline: float, began: float) -> None:
        self.timing, self.step = timing, step
        self._longest, self._caller_deadline = longest, caller_deadline
        self.deadline = self._latest_end(began)  # no attempt begins after it
        self.in_doubt = False  # an attempt was sent and not answered
        self.queued_for = 0.0  # seconds that it waited for a free connection
        self._has_retried_at_once = False

    def _latest_end(self, began: float) -> float:
        return min(began + self._longest, max(began + self.timing.shortest_call, self._caller_deadline))

    def extend_for_queueing(self, began: float, ended: float) -> None:
        """The wait for a free connection does not count as time of the server: move the deadline by it."""
        self.queued_for += ended - began
        self.deadline = max(self.deadline, min(self.deadline + ended - began, self._latest_end(ended)))

    def may_retry_at_once(self, *, was_idle: bool = False) -> bool:
        """True once. ``was_idle``: the connection may have died unnoticed, so the deadline does not matter."""
        if self._has_retried_at_once or not (was_idle or clock() < self.deadline):
            return False
        self._has_retried_at_once = True
        return True
