"""How long a call lasts, and whether it tries again: one policy for one server, a master, and nodes of a Cluster."""

from __future__ import annotations

from math import inf

from redis.exceptions import MaxConnectionsError, RedisError, TimeoutError

from ...utils.clock import clock
from .config import Location
from .errors import InDoubt, is_answer, is_in_doubt, is_transient

SHORTEST = 0.5  # seconds that even a caller who does not wait gives the server
GRACE = 0.45  # seconds that a call may last beyond its end
RESERVE = 0.1  # seconds of it that are left for a reply when a connection took all others
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 0.5  # seconds between attempts


class Call:
    """The time of one call, and what became of its attempts.

    ``began``: when it began, on ``clock()``. ``timeout``: seconds of silence after which an attempt fails; ``within``:
    a smaller limit. ``until``: the moment on ``clock()`` to which the caller waits for the lock;
    None: open end, 0.0: it does not wait for one. ``queues_until``: the moment to which it waits at least for a
    connection while the server answers others. ``waits``: whether it may try again after a pause.

    A call lasts two timeouts, or as long as the caller waits if that is less. Where another server may take over, it is
    as long as the caller waits, up to the location's patience.
    """

    __slots__ = (
        "_by", "_end", "_grace", "_is_repeated", "_location", "_longest", "_next_pause", "_queues_until",
        "_timeout", "_waits_until", "is_in_doubt", "pause", "seconds", "step",
    )  # fmt: skip

    def __init__(
        self,
        location: Location,
        timeout: float,
        within: float | None,
        until: float | None,
        began: float,
        *,
        queues_until: float = 0.0,
        waits: bool = True,
    ) -> None:
        self._location, self._timeout = location, timeout
        self._waits_until = until or inf
        self.step = timeout if within is None else min(timeout, within)  # seconds that one of its steps lasts at most
        if until == 0.0:
            self._longest = 2 * timeout if within is None else min(2 * timeout, within)
        else:
            self._longest = max(2 * timeout, location.patience)
            self.step = min(self.step, max(SHORTEST, self._waits_until - began))
        self._grace = GRACE if waits else 0.0
        self.pause, self._next_pause = 0.0, FIRST_PAUSE
        self._is_repeated = False
        self.is_in_doubt = False  # an attempt was sent and not answered
        self._queues_until = max(began + timeout, queues_until, inf if until is None else until)
        self._end = min(began + self._longest, max(began + SHORTEST, self._waits_until))
        self.seconds = self._end - began  # that it lasts at most
        self._by = self._end + self._grace

    def left(self, *, was_idle: bool = False) -> float:
        """Seconds for the next step of an attempt.

        ``was_idle``: over a connection that may have died unnoticed, so that there must be time for another one.
        """
        now = clock()
        left = max(SHORTEST, (self._end - now) / 2) if was_idle else self._by - now
        return max(0.01, min(self.step, left))

    def to_connect(self) -> float:
        """Seconds until a connection stands. That takes many steps, so it may be more than for a reply."""
        left = self._by - clock()
        seconds = min(max(self.step, SHORTEST + GRACE), left) - RESERVE if self._grace else min(self.step, left)
        return max(0.01, seconds)

    def failed(self, error: BaseException, *, was_sent: bool, was_idle: bool) -> float:
        """Seconds to pause before the next attempt. Raises what the caller is to be told if there is none."""
        self.is_in_doubt = self.is_in_doubt or is_in_doubt(error, was_sent=was_sent)
        if is_transient(error):
            now = clock()
            if was_sent and not self._is_repeated and (was_idle or now < self._end):
                self._is_repeated = True  # perhaps only this connection is to blame
                self._by = max(self._by, now + GRACE)
                self.pause = 0.0
                return 0.0
            may_pass = is_answer(error) or self._location.patience
            if self._grace and may_pass and now + self._next_pause < self._end:
                self.pause, self._next_pause = self._next_pause, min(LONGEST_PAUSE, 1.5 * self._next_pause)
                return self.pause
        try:
            raise self._to_tell(error)
        finally:
            del error  # else this frame and the traceback that it is in would keep each other, and a connection

    def _to_tell(self, error: BaseException) -> BaseException:
        if not self.is_in_doubt or not isinstance(error, RedisError | OSError):
            return error  # also what a handler of a signal raised, such as a time limit
        in_doubt = InDoubt(error)
        in_doubt.__cause__ = error
        return in_doubt

    # For one of ``most`` connections, where all are in use.

    def queued(self, most: int, silent_since: float) -> float:
        """Seconds to wait on for a connection, while ``silent_since`` is what it is. Raises if it is no use.

        ``silent_since``: when, on ``clock()``, somebody gave an attempt up without an answer, where nobody has had one
        since; inf: the server is busy with others, and only the caller's own wait counts.
        """
        now = clock()
        end = max(self._end, min(self._queues_until, silent_since + self._timeout))
        if now < end:
            return end - now
        busy = f"all {most} connections wait for an answer"
        raise self._to_tell(TimeoutError(busy) if silent_since < inf else MaxConnectionsError(exhausted(most)))

    def admitted(self, queued_at: float) -> None:
        """A connection is free at last. The time for which it was waited for is not the server's."""
        now = clock()
        self._end = min(self._end + now - queued_at, now + self._longest, max(now + SHORTEST, self._waits_until))
        self._by = self._end + self._grace


def exhausted(most: int) -> str:
    return f"all {most} connections are busy; OPTIONS['max_connections'] allows more"
