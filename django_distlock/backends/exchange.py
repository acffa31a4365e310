"""The part of the contract that unique tasks need: a lease goes from one token to another."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..types import Grant, LockInfo, LockRequest


class ExchangeBackend(ABC):
    """A store that lets one lease follow on another without a moment in which the lock is free.

    Without twins, because Celery has no event loop. Inherited, beside ``BaseLockBackend``, by a store that can do it.
    """

    @abstractmethod
    def exchange(self, old: LockRequest, request: LockRequest) -> Grant | LockInfo:
        """End the lease of ``old`` and grant its slot to the request, in one step of the store.

        Nobody comes in between, also if others wait for the lock. The new lease has a new number, and the holder and
        the TTL of the request. Where ``old`` does not hold the lock, this is ``acquire(request, queue=False)``. It may
        be repeated as that: what an unseen attempt was granted is granted again, and a release of the request gives
        it back.

        If ``old`` is in doubt, its token is retired, so that a command of it that arrives late is granted nothing.
        """
