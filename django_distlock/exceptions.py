"""Every error this package raises. "Busy", "lost" and "store down" are never the same error."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from django.core.exceptions import ImproperlyConfigured

from .formats import NEWER

if TYPE_CHECKING:
    from .types import Holder


class LockError(Exception):
    """Base class of the errors of locks at run time."""


class LockNotAcquired(LockError):
    """Somebody else holds the lock.

    ``retry_after``: seconds until the holder's lease runs out unless renewed, or None.
    ``holder``: who has it, as far as the store could tell, or None.
    ``resting``: its holder has released it, and it is free after ``retry_after``, at the end of its ``min_hold``.
    ``reason``: "busy"; or "crowded": as many callers already wait as ``max_waiters`` allows.
    ``name`` and ``using``: which lock it is, and the alias of its backend.
    """

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float | None = None,
        holder: Holder | None = None,
        resting: bool = False,
        reason: Literal["busy", "crowded"] = "busy",
        name: str = "",
        using: str = "",
    ) -> None:
        super().__init__(message)
        self.name = name
        self.using = using
        self.retry_after = retry_after
        self.holder = holder
        self.resting = resting
        self.reason = reason


class LockTimeout(LockNotAcquired):
    """The lock stayed busy for the whole wait.

    It is not a built-in TimeoutError, because that is an OSError, which code for network errors may catch.
    """


class TaskAlreadyQueued(LockNotAcquired):
    """A unique task was not queued, because it is already queued or running.

    ``task_id``: the id of that one; "" where somebody else has a lock of its name.
    """

    def __init__(self, message: str = "", *, task_id: str = "", **about: Any) -> None:
        super().__init__(message, **about)
        self.task_id = task_id


class LockReentry(LockError):
    """This thread or task already holds the lock, and would wait for itself."""


class LockLost(LockError):
    """The lease ended before its holder released it; somebody else may have held the lock since.

    ``lease``: the ``Lease``. None in another process, and if the lease was lost before it could be adopted.
    """

    def __init__(self, message: str = "", *, lease: Any = None) -> None:
        super().__init__(message)
        self.lease = lease

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...], dict[str, object]]:
        return type(self), self.args, {**vars(self), "lease": None}  # which belongs to its process


class LockNotHeld(LockError, RuntimeError):
    """Release of a lock that is not held."""


class LockBackendError(LockError):
    """The store did not answer, or refused. Whether the lock is free is not known; the cause is chained.

    ``is_final``: somebody has to correct a setting, a right, or what is in the store. Callers that wait get the error
    at once.
    ``was_asked``: False if the store was not asked at all, because it had not answered anybody for a while.
    """

    is_final = False
    was_asked = True


class InvalidLockName(ValueError):
    """A name, or a template and its values, that cannot name a lock."""


class UnusableLockName(InvalidLockName):
    """A text that names no lock, as clients may send it: a view answers 400."""


class InvalidLockBackend(ImproperlyConfigured):
    """A backend in the setting ``DISTRIBUTED_LOCKS`` that cannot be used as it stands."""


class LockBackendDoesNotExist(InvalidLockBackend, KeyError):
    """No backend of that alias in the setting ``DISTRIBUTED_LOCKS``."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class RunRefused(LockBackendError):
    """The store answers, but gives this run to nobody here. Other runs may be given."""


class UnreadableRun(RunRefused):
    """What the store keeps of one entry is no stamp."""

    def __init__(self, place: str, remedy: str = "") -> None:
        """``place``: where it is; ``remedy``: what else may be done than to delete it."""
        super().__init__(
            f"{place} holds something that is no run of beat, or a run of more than a day after now"
            f" ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC by the clock of this host). Correct that clock if it is wrong."
            f" Only if it is right, delete what is there{remedy}."
        )


class NewerRun(UnreadableRun):
    """A newer version of the package wrote it."""

    def __init__(self, place: str) -> None:
        RunRefused.__init__(self, f"{place} {NEWER}.")


class ClockIsAhead(RunRefused):
    """By so many seconds, which are more than is allowed."""

    def __init__(self, seconds: float, most: float) -> None:
        super().__init__(
            f"The clock of this host is {seconds:.1f} s ahead of the clock of the store; beats may be {most:g} s ahead."
            " Set the clocks by NTP."
        )
