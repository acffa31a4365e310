"""The lease of a store with sessions, which lasts no longer than the session of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..grants import SessionGrant
from ..types import Grant, LockRequest
from .lease import Lease

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend


class SessionLease(Lease):
    """Held until its TTL ends unrenewed, or until its session may end if that is sooner.

    The backend confirms the session for all leases at once, so its end is looked up each time.
    """

    _ttl_deadline = 0.0
    _renewal_failed = False

    def __init__(self, backend: BaseLockBackend, request: LockRequest, grant: Grant, *others: Any) -> None:
        """``others``: as of any lease."""
        assert isinstance(grant, SessionGrant)
        self._session, self._granted_ttl = grant.session, grant.ttl
        super().__init__(backend, request, grant, *others)
        self.ttl = min(self._terms.ttl, grant.ttl)
        self._extend(grant.sent_at, self.ttl)  # also sets when to renew it

    @property
    def _deadline(self) -> float:
        return min(self._ttl_deadline, self._session.until)

    @_deadline.setter
    def _deadline(self, deadline: float) -> None:
        self._ttl_deadline = max(self._ttl_deadline, deadline)

    @property
    def _is_unknown(self) -> bool:
        return self._renewal_failed or self._session.is_suspended

    @_is_unknown.setter
    def _is_unknown(self, renewal_failed: bool) -> None:
        self._renewal_failed = renewal_failed

    def _extend(self, sent_at: float, ttl: float) -> None:
        super()._extend(sent_at, ttl if self._ttl_deadline else min(ttl, self._granted_ttl))
        self._wait_for_ttl()

    def _stop_renewal(self) -> None:
        super()._stop_renewal()
        self._wait_for_ttl()

    def _wait_for_ttl(self) -> None:
        """A lease that is not renewed is looked at when its TTL ends. The backend reports the end of its session."""
        if not self._renews:
            self._due = self._ttl_deadline

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("A lease belongs to the process that acquired it, and with that to its session.")
