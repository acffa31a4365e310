"""Distributed locks for Django: for views, tasks, and any code that only one process may run at a time."""

from typing import TYPE_CHECKING, Any

from .core.assertions import assert_locked, current_lease
from .core.group import Leases, LockGroup, lock_all
from .core.leader import Leadership, leader
from .core.lease import Lease
from .core.lock import Lock, lock
from .core.registry import LockBackends, locks
from .decorators import distributed_lock, skip
from .decorators.answers import respond
from .exceptions import (
    InvalidLockBackend,
    InvalidLockName,
    LockBackendDoesNotExist,
    LockBackendError,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockReentry,
    LockTimeout,
)
from .types import Holder, LockInfo, State, Usage
from .version import VERSION

if TYPE_CHECKING:
    from .core.adoption import AdoptedLease, aadopt, adopt

__version__ = VERSION

__all__ = [
    "AdoptedLease",
    "Holder",
    "InvalidLockBackend",
    "InvalidLockName",
    "Leadership",
    "Lease",
    "Leases",
    "Lock",
    "LockBackendDoesNotExist",
    "LockBackendError",
    "LockBackends",
    "LockError",
    "LockGroup",
    "LockInfo",
    "LockLost",
    "LockNotAcquired",
    "LockNotHeld",
    "LockReentry",
    "LockTimeout",
    "State",
    "Usage",
    "aadopt",
    "adopt",
    "assert_locked",
    "current_lease",
    "distributed_lock",
    "leader",
    "lock",
    "lock_all",
    "locks",
    "respond",
    "skip",
]


def __getattr__(name: str) -> Any:
    """Import adoption when it is first used: few processes adopt leases, and the parts of Django that it needs take a
    fifth as long to import as everything else."""
    if name not in ("AdoptedLease", "aadopt", "adopt"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .core import adoption

    return getattr(adoption, name)
