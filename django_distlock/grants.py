"""Grants that end otherwise than by the TTL that was asked for."""

from __future__ import annotations

from math import inf
from typing import Self

from .types import Grant


class HandedGrant(Grant):
    """What a message of the store says. ``ttl``: seconds that it stands after ``sent_at``, unless it is confirmed."""

    ttl: float

    def __new__(cls, fence: int, sent_at: float, slot: int, ttl: float) -> Self:
        self = super().__new__(cls, fence, sent_at, slot)
        self.ttl = ttl
        return self


class StoreSession:
    """The session of a process in a store with sessions. All leases of the process end with it, whatever their TTL.

    ``until``: the moment on ``clock()`` until which it certainly lasts. ``is_suspended``: the store cannot be reached,
    so the session cannot be confirmed. Both change while leases depend on it.
    """

    until: float = inf
    is_suspended: bool = False


class SessionGrant(Grant):
    """The grant of a store with sessions. ``ttl``: seconds that it keeps the lease, perhaps fewer than requested."""

    ttl: float
    session: StoreSession

    def __new__(cls, fence: int, sent_at: float, ttl: float, session: StoreSession) -> Self:
        self = super().__new__(cls, fence, sent_at)
        self.ttl, self.session = ttl, session
        return self
