"""The lease that a waiter takes by a message of the store, before the store has confirmed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..grants import HandedGrant
from ..types import Grant, LockRequest
from ..utils.clock import clock
from .lease import Lease

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend


class HandedLease(Lease):
    """Until it is confirmed, its holder believes in it for as long as the store keeps what it hands over.

    A process that gets no time to run may find that this time is over, though the store keeps the lease for its TTL, as
    it was asked to. So the store is asked before the lease counts as lost. A process that adopts the lease asks, too:
    therefore the text of ``detach()`` allows for the TTL.
    """

    def __init__(self, backend: BaseLockBackend, request: LockRequest, grant: Grant, *others: Any) -> None:
        """``others``: as of any lease."""
        assert isinstance(grant, HandedGrant)
        self._handed_ttl: float | None = grant.ttl
        super().__init__(backend, request, grant, *others)

    def _extend(self, sent_at: float, ttl: float) -> None:
        if self._handed_ttl is None:
            self._request.is_unconfirmed = False
            super()._extend(sent_at, ttl)
            return
        super()._extend(sent_at, self._handed_ttl)
        self._handed_ttl, self._due = None, self._granted_clock + self._backend.timing.confirmed_after

    def _renewal_ttl(self, now: float) -> float:
        # What the store was asked for already. If its holder believed in less, it would block others after its end.
        return self.ttl if self._request.is_unconfirmed else super()._renewal_ttl(now)

    @property
    def _lost_at(self) -> float:
        may_be_asked = self._request.is_unconfirmed and not self._is_unknown  # it has not been asked in vain
        return self._granted_clock + self.ttl if may_be_asked else self._deadline

    def _begin_release(self) -> float:
        cooldown = super()._begin_release()
        # If the time is over, a repeated release that finds nothing may not be the reason for that.
        self._request.is_unconfirmed = self._request.is_unconfirmed and clock() >= self._deadline
        return cooldown

    def _mark_lost(self, reason: str, *, log: bool = True) -> None:
        super()._mark_lost(reason, log=log)
        if self._request.is_unconfirmed:  # the store may keep it for its TTL
            self._renewer.release_in_background(self._request)
