"""All errors of this package. "Busy", "lost" and "store down" are never the same error."""

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
    ``holder``: who has it, as far as the store knows, or None.
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

    ``task_id``: the id of the queued or running task; "" if another caller holds the lock with its name.
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
        return type(self), self.args, {**vars(self), "lease": None}  # a lease belongs to its process


class LockNotHeld(LockError, RuntimeError):
    """A lock that is not held was released."""


class LockBackendError(LockError):
    """The store did not answer, or refused. It is unknown whether the lock is free. The cause is chained.

    ``is_final``: somebody has to correct a setting, a permission, or data in the store. Callers that wait get the error
    at once.
    ``was_asked``: False if the store was not asked at all, because it had not answered anybody for a while.
    """

    is_final = False
    was_asked = True


class InvalidLockName(ValueError):
    """A name, or a template and its values, that cannot name a lock."""


class UnusableLockName(InvalidLockName):
    """A text that cannot name a lock, perhaps sent by a client: a view answers 400."""


class InvalidLockBackend(ImproperlyConfigured):
    """A backend in the setting ``DISTRIBUTED_LOCKS`` cannot be used as it is configured."""


class LockBackendDoesNotExist(InvalidLockBackend, KeyError):
    """The setting ``DISTRIBUTED_LOCKS`` has no backend with this alias."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class RunRefused(LockBackendError):
    """The store answers, but does not give this run to this process. It may give other runs."""


class UnreadableRun(RunRefused):
    """The value that the store keeps for an entry is not a stamp."""

    def __init__(self, place: str, remedy: str = "") -> None:
        """``place``: where the value is; ``remedy``: what can be done instead of deleting it."""
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
    """The clock of this host is ahead of the store's by more seconds than are allowed."""

    def __init__(self, seconds: float, most: float) -> None:
        super().__init__(
            f"The clock of this host is {seconds:.1f} s ahead of the clock of the store; beats may be {most:g} s ahead."
            " Set the clocks by NTP."
        )
