"""What a holder may believe about its lease by the local clock, and how it waits for the end of the lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from operator import attrgetter

from ..exceptions import LockError
from ..options import as_seconds
from ..types import State
from ..utils import fork
from ..utils.clock import clock
from ..utils.wakeup import WakeEvent

LONGEST_SLEEP = 3600.0  # seconds, which all timers take


class Belief:
    """The part of a lease that asks no store."""

    _pid: int  # of the process that it belongs to
    _deadline: float  # until when it certainly holds without another renewal, on clock()
    _ended: State | None  # set once; then a renewal that is still on its way changes nothing
    _watchers: list[WakeEvent] | None = None  # of those who wait for its end
    _group: Sequence[Belief] = ()  # it, and the leases that were acquired together with it

    @property
    def remaining(self) -> float:
        """Seconds until the holder must stop unless the lease is renewed before; 0.0 once it ended."""
        return max(0.0, self._deadline - clock()) if self.is_held else 0.0

    @property
    def is_held(self) -> bool:
        """Whether the lease certainly holds at this moment, in this process."""
        return self._ended is None and clock() < self._deadline and self._pid == fork.pid()

    # When, on clock(), it is lost without a question to the store, unless it is renewed. No frame of Python for it.
    _lost_at = property(attrgetter("_deadline"))

    @property
    def _is_over(self) -> bool:
        """Whether its holder no longer continues with it."""
        return not self.is_held

    def ensure_held(self) -> None:
        """Return if the lease certainly holds at this moment, by the local clock; no I/O.

        Raises LockLost, also where another lease of its ``lock_all()`` was lost, or LockNotHeld after a release.
        """
        if self.is_held:
            for other in self._group:
                if not other.is_held and other._ended is not State.RELEASED:
                    raise other._lost_error()
            return
        if self._ended is State.RELEASED:
            raise self._over_error()
        raise self._lost_error()

    def _over_error(self) -> LockError:
        """For a lease that was released."""
        raise NotImplementedError

    def _lost_error(self) -> LockError:
        raise NotImplementedError

    def wait_lost(self, timeout: float | timedelta | None = None) -> bool:
        """Sleep until the holder must stop, at most ``timeout`` seconds (None: as long as it takes). Whether it must.

        True as soon as the lease is lost, released, or out of time by the local clock; no I/O. A loop calls it in the
        place of ``time.sleep()``: ``while not lease.wait_lost(5): ...``. Any number of threads and tasks may wait.
        """
        with self._watched() as ended:
            self._sleep(ended, _deadline(timeout))
        return self._is_over

    def _sleep(self, ended: WakeEvent, deadline: float) -> None:
        while (seconds := self._seconds_to(deadline)) > 0:
            ended.wait(seconds)

    async def await_lost(self, timeout: float | timedelta | None = None) -> bool:
        """``wait_lost()`` for tasks."""
        with self._watched() as ended:
            await self._asleep(ended, _deadline(timeout))
        return self._is_over

    async def _asleep(self, ended: WakeEvent, deadline: float) -> None:
        while (seconds := self._seconds_to(deadline)) > 0:
            await ended.await_set(seconds)

    @contextmanager
    def _watched(self, ended: WakeEvent | None = None) -> Iterator[WakeEvent]:
        """The event is set when the lease ends. Look before you wait, because it may have ended already."""
        ended = ended or WakeEvent()
        watchers = vars(self).setdefault("_watchers", [])  # in one step: two may be the first
        watchers.append(ended)
        try:
            yield ended
        finally:
            watchers.remove(ended)

    def _seconds_to(self, deadline: float) -> float:
        """How long to sleep: until then, or until the lease is out of time without a renewal."""
        return 0.0 if self._is_over else min(deadline - clock(), self._deadline - clock(), LONGEST_SLEEP)

    def _wake_watchers(self) -> None:
        for ended in list(self._watchers or ()):
            ended.set()


def _deadline(timeout: float | timedelta | None) -> float:
    return inf if timeout is None else clock() + as_seconds(timeout)
