"""The meaning of kazoo's errors for a lock."""

from __future__ import annotations

from kazoo import exceptions as kazoo  # type: ignore[import-untyped]

from ...exceptions import LockBackendError
from ..common.attempts import InDoubt

# Answers of the servers that callers handle
ANSWERS = (kazoo.NoNodeError, kazoo.NodeExistsError, kazoo.NotEmptyError, kazoo.BadVersionError)

# Something between this process and the leader is gone. The request may have been executed.
INTERRUPTIONS = (
    kazoo.ConnectionLoss,
    kazoo.OperationTimeoutError,
    kazoo.RequestTimeoutError,
    kazoo.SessionExpiredError,
    kazoo.SessionMovedError,
    kazoo.ThrottledOpError,
)

REMEDIES = {
    kazoo.NoAuthError: "Give the user of OPTIONS['auth'] all rights (cdrwa) on that path and what is below it.",
    kazoo.AuthFailedError: "Correct OPTIONS['auth'].",
    kazoo.SessionClosedRequireSaslError: "The servers ask for SASL, which this backend does not have.",
    kazoo.InvalidACLError: "Correct OPTIONS['acl']; one for the user itself needs OPTIONS['auth'].",
    kazoo.QuotaExceededError: "Raise the quota of that path.",
}


class Interrupted(Exception):
    """The answer did not come. ``is_sent``: the request may have been executed, or may still be."""

    def __init__(self, message: str, *, is_sent: bool = True) -> None:
        super().__init__(message)
        self.is_sent = is_sent


class NotConnected(Interrupted):
    """Nothing was sent. ``since``: when a server was last there, on ``clock()``, if that is long ago; else None."""

    def __init__(self, message: str, since: float | None = None) -> None:
        super().__init__(message, is_sent=False)
        self.since = since


def refused(error: Exception, place: str) -> LockBackendError:
    """The error to raise if the servers refuse."""
    remedy = next((text for kind, text in REMEDIES.items() if isinstance(error, kind)), "")
    name = type(error).__name__.removesuffix("Error")
    told = LockBackendError(f"ZooKeeper at {place} refuses: {name} {error}".rstrip() + f". {remedy}".rstrip())
    told.is_final = bool(remedy)
    told.__cause__ = error
    return told


def not_answered(error: Interrupted, place: str, *, in_doubt: bool) -> LockBackendError:
    kind = InDoubt if in_doubt else LockBackendError
    told = kind(f"ZooKeeper at {place} did not answer: {error}")
    told.was_asked = not (isinstance(error, NotConnected) and error.since is not None)
    told.__cause__ = error
    return told
