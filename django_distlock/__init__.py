"""Distributed locks for Django: for views, tasks, and any code that only one may run at a time."""

from .assertions import assert_locked
from .decorators import distributed_lock, skip
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
from .handlers import LockBackends, locks
from .handover import AdoptedLease, aadopt, adopt
from .leases import Lease, State
from .locking import Lock, lock
from .responses import respond
from .types import Holder, LockInfo

__version__ = "0.1.0"

__all__ = [
    "AdoptedLease",
    "Holder",
    "InvalidLockBackend",
    "InvalidLockName",
    "Lease",
    "Lock",
    "LockBackendDoesNotExist",
    "LockBackendError",
    "LockBackends",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotAcquired",
    "LockNotHeld",
    "LockReentry",
    "LockTimeout",
    "State",
    "aadopt",
    "adopt",
    "assert_locked",
    "distributed_lock",
    "lock",
    "locks",
    "respond",
    "skip",
]
