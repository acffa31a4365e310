"""What a lease shows of itself. Programs without Django's apps import it, too."""

from __future__ import annotations

from django_distlock import Lease, Lock, locks
from django_distlock.core.detached import Detached
from django_distlock.options import Terms
from django_distlock.testing.tools import eventually, lock_request
from django_distlock.types import Grant, LockRequest
from django_distlock.utils.clock import clock


def request_of(lease: Lease) -> LockRequest:
    """By which the store knows the lease."""
    return LockRequest(lease.name, lease.ttl, lease.holder, token=lease.token)


def lease_of(handle: Lock) -> Lease:
    """The only one that this process holds of the handle's lock."""
    [lease] = [lease for lease in locks.leases() if (lease.name, lease.using) == (handle.name, handle.using)]
    return lease


def deadline_of(lease: Lease) -> float:
    """Until when its holder may believe in it, on ``clock()``, to the microseconds that the look takes; or now."""
    return clock() + lease.remaining


def wait_for_renewal(lease: Lease) -> None:
    before = deadline_of(lease)
    eventually(lambda: lease.remaining and deadline_of(lease) > before + 0.01)


def terms_of_detached(text: str) -> Terms:
    """Those under which a lease goes on with whoever adopts it."""
    return Terms(**Detached.from_text(text).terms)


def hold_elsewhere(name: str = "name", ttl: float = 60.0, label: str = "somebody else") -> LockRequest:
    """Another owner takes the lock."""
    other = lock_request(name, ttl, label)
    assert isinstance(locks["default"].acquire(other, queue=False), Grant)
    return other
