"""S15: a response whose content is made after its view holds the lock of the view until it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_distlock import Lease, State

from ..plan import RESPONSE_MAX_HOLD
from .leases import DRIFT

if TYPE_CHECKING:
    from .calls import Judge, Judges

SOON, WAYS = 2.0, 30  # seconds, and ways that bytes go, in which a release in the background begins and ends


class ResponseJudge:
    """Of one response."""

    def __init__(self, judges: Judges, judge: Judge) -> None:
        self._judges, self._judge = judges, judge
        self._lease: Lease | None = None  # until its view has returned

    def begins(self) -> None:
        """Its view has returned."""
        judge, now = self._judge, self._judges.now
        self._lease, self._returned_at = judge.lease, now
        self._ends_by = max(now + RESPONSE_MAX_HOLD, judge.granted_at + judge.about["ttl"]) + SOON

    @property
    def soon(self) -> float:
        """Seconds after which what is released in the background is free."""
        return SOON + WAYS * self._judges.distance + self._judges.task_time

    def is_open(self) -> None:
        """It is held, for RESPONSE_MAX_HOLD at most."""
        if (lease := self._lease) is None:
            return
        if lease.state is State.RELEASED:
            self._judges.fail(f"S15: {self._judge}: {lease!r} was released before its response was done")
        is_bounded = self._judges.now - self._returned_at >= (1 - DRIFT) * RESPONSE_MAX_HOLD
        if lease.state is State.LOST and not is_bounded and not self._judges.may_be_lost(self._judge):
            self._judges.fail(f"S15: {self._judge}: {lease!r} is lost before its response was done")
        if self._judges.now > self._ends_by and self._judges.believes(lease):
            self._judges.fail(f"S15: {self._judge}: {lease!r} is held for longer than RESPONSE_MAX_HOLD")

    def is_done(self) -> None:
        """It is free: at once, or ``soon`` where it is released in the background."""
        if self._lease:
            self._judges.holders.freed(self._lease, "S15: its response is done")
