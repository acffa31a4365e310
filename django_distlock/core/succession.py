"""Leases that follow on one another: the lease of a message in a queue, then the lease of the work it asks for.

No handle has them. The code that makes a request here keeps it, and ends what it was granted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import signals
from ..backends.base import BaseLockBackend
from ..backends.optional import ExchangeBackend
from ..exceptions import InvalidLockBackend
from ..journal import NOT_RENEWED
from ..options import Terms
from ..types import Grant, LockInfo, LockRequest, current_execution
from ..utils.clock import clock
from .busy import slow_error
from .lease import Lease
from .registry import locks

REMEDY = "Name an alias on Redis or on a database: unique(..., using=...)."


def refusal_of(backend: BaseLockBackend) -> str:
    """Why the store of this backend cannot keep tasks unique; "" if it can."""
    if isinstance(backend, ExchangeBackend):
        return ""
    return (
        f"Unique tasks have their names in {backend.alias!r}, a {type(backend).__name__}, where no lease can follow on"
        " another one."
    )


class SucceedingLease(Lease):
    """A lease that this process keeps alive. ``rest``: seconds for which the lock stays taken after its release."""

    rest = 0.0

    @property
    def _cooldown(self) -> float:
        return self.rest

    def _mark_released(self) -> float:
        super()._mark_released()
        return self.rest


class Succession:
    """Leases of one alias that follow on one another. Raises InvalidLockBackend if its store cannot exchange leases."""

    def __init__(self, alias: str) -> None:
        self.service = locks.service(alias)
        self.backend = self.service.backend
        if not isinstance(self.backend, ExchangeBackend):
            raise InvalidLockBackend(f"{refusal_of(self.backend)} {REMEDY}")
        self._exchange = self.backend.exchange
        self._terms = self.backend.terms

    @property
    def ttl(self) -> float:
        """Seconds that a lease lasts if it is renewed, or until its owner extends it."""
        return self._terms.ttl

    def claim(self, request: LockRequest) -> Grant | LockInfo:
        """Ask once. Nobody renews the lease. Raises LockBackendError, and then leaves nothing behind."""
        with self._taken_back(request):
            answer = self.backend.acquire(request, queue=False)
        self._note(request, answer, NOT_RENEWED)
        return answer

    def begin(self, old: LockRequest, request: LockRequest) -> SucceedingLease | LockInfo:
        """Exchange a lease that another process claimed for one that is renewed here, or take the lock if it is free.

        Raises LockBackendError.
        """
        began, service = clock(), self.service
        terms = Terms(ttl=request.ttl, on_lost="log")
        with self._taken_back(request):
            answer = self._exchange(old, request)
            if isinstance(answer, LockInfo):
                return answer
            lease = SucceedingLease(self.backend, request, answer, terms, service.renewer, current_execution())
            if lease._granted_clock >= lease._deadline:
                request.in_doubt = True
                raise slow_error(request)
            service.renewer.register(lease)
        self._note(request, answer)
        about = {"name": lease.name, "template": lease.template, "using": lease.using, "waited": clock() - began}
        signals.send_signal(signals.lock_acquired, type(self.backend), **about, lease=lease)
        return lease

    def requeue(self, lease: SucceedingLease, request: LockRequest) -> Grant | LockInfo:
        """Exchange a lease that is renewed here for one that is not. Afterwards this process has no lease.

        Raises LockLost or LockNotHeld if the lease has ended, LockBackendError.
        """
        lease._mark_detached()  # first: else a renewal that is on its way would find it lost
        try:
            with self._taken_back(request):
                answer = self._exchange(lease._request, request)
        except BaseException:
            self.service.renewer.release_in_background(lease._request)
            raise
        self._note(request, answer, NOT_RENEWED)
        return answer

    def release_in_background(self, request: LockRequest, *, longest_ttl: float = 0.0) -> None:
        """For a caller that cannot wait for the store, or has waited for it in vain.

        ``longest_ttl``: seconds for which the release is tried, if that is longer than the TTL of the request.
        """
        left = request.copy(longest_ttl=max(longest_ttl, request.longest_ttl))
        self.service.renewer.release_in_background(left)

    @contextmanager
    def _taken_back(self, request: LockRequest) -> Iterator[None]:
        """Takes back what the request may have been granted if the call fails or is interrupted."""
        renewer = self.service.renewer
        try:
            yield
        except BaseException:
            if lease := renewer.get(request.token):
                renewer.unregister(lease)
            renewer.release_in_background(request)
            raise

    def _note(self, request: LockRequest, answer: Grant | LockInfo, text: str = "") -> None:
        if isinstance(answer, Grant) and (journal := self.service.journal):
            journal.note(journal.GRANTED, request, clock(), answer.fence, text)
