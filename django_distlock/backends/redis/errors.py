"""From an error of redis-py to one that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from ...exceptions import LockBackendError

if TYPE_CHECKING:
    from ..base import BaseLockBackend
    from .backend import RedisBackend


def is_wrong_type(reply: object) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


class NoReply(LockBackendError):
    """The server may have done what it was asked, or may do so yet."""


def explain(
    error: Exception, backend: RedisBackend, kind: type[LockBackendError] = LockBackendError
) -> LockBackendError:
    return kind(f"Lock backend {backend.alias!r} at {backend.location.text}: {advice(error, backend)} ({error})")


def advice(error: Exception, backend: BaseLockBackend) -> str:
    """What to do about it."""
    # redis-py's asyncio side wraps what went wrong while connecting.
    match error.__cause__ if isinstance(error.__cause__, AuthenticationError) else error:
        case AuthenticationError():
            return f"the server refused the user or password; correct {backend.setting('LOCATION')}."
        case NoPermissionError():
            return "the user may not run this command or use this key; widen its ACL rule."
        case ReadOnlyError():
            return f"this server is a read-only replica; point {backend.setting('LOCATION')} at the primary."
        case OutOfMemoryError():
            return "the server is out of memory and takes no more keys; raise its maxmemory or free some."
        case MaxConnectionsError():
            return f"no connection became free; raise {backend.setting('OPTIONS')}['max_connections']."
        case ResponseError() if is_wrong_type(error):
            return (
                "a key of ours holds another type of value; delete that key, or give the locks a prefix of their"
                f" own in {backend.setting('KEY_PREFIX')}."
            )
        case ClusterDownError() if backend.option.get("cluster"):
            return "the Cluster is down for these locks; CLUSTER INFO and CLUSTER NODES tell which primary is missing."
        case AskError() | TryAgainError() if backend.option.get("cluster"):
            return (
                "the slot of these locks moves from node to node, which takes longer than"
                f" {backend.setting('OPTIONS')}['socket_timeout']."
            )
        case ClusterDownError() | AskError() | TryAgainError() | ClusterCrossSlotError():
            return f"this server is a node of a Cluster; {_for_cluster(backend)}"
        case ResponseError() if "cluster support disabled" in str(error):
            return f"this server is no Cluster; take 'cluster' out of {backend.setting('OPTIONS')}."
        case ResponseError():
            return "the server refused the command."
    return f"the server does not answer; check that it runs and that {backend.setting('LOCATION')} is right."


def _for_cluster(backend: BaseLockBackend) -> str:
    if "cluster" in backend.options:
        return f"set {backend.setting('OPTIONS')}['cluster'] to True."
    return f"name servers of their own in {backend.setting('LOCATION')}."
