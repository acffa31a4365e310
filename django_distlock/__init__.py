"""Distributed locks for Django: for views, tasks, and any code that only one process may run at a time."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.lease import Lease
from .core.lock import Lock, lock
from .core.registry import LockBackends, locks
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
    from .core.assertions import assert_locked, current_lease
    from .core.group import Leases, LockGroup, lock_all
    from .core.leader import Leadership, leader
    from .decorators import distributed_lock, skip
    from .decorators.answers import respond

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


# Each module is imported when one of its names is first used, because a process that does without them starts sooner.
_MODULES = {
    "core.adoption": ("AdoptedLease", "aadopt", "adopt"),
    "core.assertions": ("assert_locked", "current_lease"),
    "core.group": ("Leases", "LockGroup", "lock_all"),
    "core.leader": ("Leadership", "leader"),
    "decorators": ("distributed_lock", "skip"),
    "decorators.answers": ("respond",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
