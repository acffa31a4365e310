"""The meaning of redis-py's errors: whether to retry, whether the command was executed, and what to do about it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from ...exceptions import LockBackendError
from ...formats import NEWER
from ...utils.text import printable

if TYPE_CHECKING:
    from ..base import BaseLockBackend

SERVER_BACKEND = "django_distlock.backends.redis.RedisBackend"
CLUSTER_BACKEND = "django_distlock.backends.redis.RedisClusterBackend"


class NotSent(ConnectionError):
    """Nothing was sent: the connection has ended, or leads to a server that is of no use any more."""


class BreakerOpen(ConnectionError):
    """Nothing was sent: the server answers nobody (see the cause). A thread asks it until it answers."""


class NoCredentials(ConnectionError):
    """The server was not asked without user and password: the credential provider failed or did not answer."""


class EndedTls(ConnectionError):
    """The other side closed the connection during the TLS handshake or right after it, without a reason."""


Error = TypeVar("Error", bound=Exception)


def without_traceback(error: Error, above: tuple[Exception, ...] = ()) -> Error:
    """The error without its traceback, so that it can be kept.

    A traceback would keep the frames of its callers, and with them connections, requests and leases.

    ``above``: the errors whose cause it is; a chain may lead back to its beginning.
    """
    kept, cause = copy(error), error.__cause__ or error.__context__
    if isinstance(cause, OSError | RedisError) and not any(cause is one for one in above):
        kept.__cause__ = without_traceback(cause, (*above, error))
    elif isinstance(cause, ExceptionGroup):  # of errors that are kept; it was never raised itself
        kept.__cause__ = cause
    return kept


class NoSentinel(ConnectionError):
    """No sentinel answers."""


class NoMaster(ConnectionError):
    """The sentinels know no working master: a failover is under way, or no replica can take over."""


class UnknownService(ConnectionError):
    """The sentinels watch no master of that name."""


class SentinelRefusal(ConnectionError):
    """The sentinels refuse the login, or the question."""


# Redis 6.2 puts the reason in the middle of the text if a script met it; redis-py removes some at the beginning.
_REASON = re.compile(
    r"(?:^|-)(BUSY|LOADING|MASTERDOWN|MISCONF|NEWER|NOPERM|NOREPLICAS|OOM|READONLY|UNBLOCKED|UNREADABLE|WRONGTYPE) "
)
_BY_CLASS = {
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}
_NO_PERMISSION_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")
_TOO_MANY_CLIENTS = "max number of clients"
_NOT_NOW = {"BUSY", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "UNBLOCKED"}
_OF_SLOTS = AskError | TryAgainError | ClusterDownError  # MovedError is an AskError
_FINAL = AuthenticationError | SentinelRefusal | UnknownService
_GONE = (ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLZeroReturnError)  # during the handshake, without a reason
_CLOSED = "Connection closed by server"  # the text of redis-py


def reason(error: Exception) -> str:
    """The server's own word for the reason of its refusal; "" for other errors."""
    if not isinstance(error, ResponseError | BusyLoadingError):
        return ""
    found = _REASON.search(str(error))
    if any(text in str(error) for text in _NO_PERMISSION_IN_SCRIPT):
        return "NOPERM"
    return _BY_CLASS.get(type(error), "") or (found[1] if found else "")


# Clients of a server, a master, a Cluster or a sentinel decide by these three questions.


def is_transient(error: BaseException, *, in_cluster: bool = False) -> bool:
    """Whether the error may pass by itself: with another connection, a failover, a restart, or a slot that arrives.

    Other errors are final: somebody has to correct a setting, a right, a certificate, or what is in the server.
    """
    if isinstance(error, ResponseError):
        return reason(error) in _NOT_NOW or _is_full(error) or (in_cluster and isinstance(error, _OF_SLOTS))
    if not isinstance(error, ConnectionError | TimeoutError | OSError):
        return False
    return not isinstance(error, _FINAL) and not is_about_certificates(error)


def is_answer(error: BaseException) -> bool:
    """Whether a server that is there answered with the error, and did not execute the command."""
    return isinstance(error, ResponseError | BusyLoadingError | AuthenticationError) or _is_full(error)


def is_silence(error: BaseException) -> bool:
    """Whether a server was asked, or was about to be asked, and did not answer."""
    return is_transient(error) and not is_answer(error)


def is_in_doubt(error: BaseException, *, was_sent: bool) -> bool:
    """Whether the server may have executed the command, or may still execute it."""
    return was_sent and not is_answer(error) and not isinstance(error, NotSent)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, RedisError) and _TOO_MANY_CLIENTS in str(error)


def is_about_certificates(error: BaseException) -> bool:
    """Whether a connection failed because one side does not trust the other. redis-py chains the reason."""
    return any(isinstance(cause, ssl.SSLError) and not isinstance(cause, _GONE) for cause in chain(error))


def is_about_leaving(error: BaseException) -> bool:
    """Whether a connection failed because the other side ended it, without a reason."""
    gone = (*_GONE, ConnectionResetError, BrokenPipeError)
    return _CLOSED in str(error) or any(isinstance(cause, gone) for cause in chain(error))


def is_refused(error: BaseException) -> bool:
    """Whether nobody listens at the address."""
    return any(isinstance(cause, ConnectionRefusedError | FileNotFoundError) for cause in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on; each once, because a chain of causes may be a circle."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def is_wrong_type(reply: object) -> bool:
    return isinstance(reply, Exception) and reason(reply) == "WRONGTYPE"


def is_newer_value(reply: object) -> bool:
    return isinstance(reply, Exception) and reason(reply) == "NEWER"


def is_of_publishing(reply: object) -> bool:
    """Whether a script that only publishes failed, and the reason is neither a missing right nor one that passes."""
    return isinstance(reply, ResponseError) and not (reason(reply) or is_transient(reply, in_cluster=True))


def explain(
    error: Exception,
    backend: BaseLockBackend,
    where: str,
    kind: type[LockBackendError] = LockBackendError,
    *,
    in_cluster: bool = False,
) -> LockBackendError:
    """The error to raise for it, of that kind. ``where``: the server as people know it, without its password."""
    what_to_do = advice(error, backend, in_cluster=in_cluster)
    explained = kind(f"Lock backend {backend.alias!r} at {where}: {what_to_do} ({printable(str(error))})")
    explained.is_final = not is_transient(error, in_cluster=in_cluster)
    explained.was_asked = not isinstance(error, BreakerOpen)
    return explained


def advice(error: Exception, backend: BaseLockBackend, *, in_cluster: bool = False) -> str:
    """What to do about it."""
    match error:
        case BreakerOpen(__cause__=Exception() as cause):
            return advice(cause, backend, in_cluster=in_cluster)
        case AuthenticationError():
            return f"the server refused the user or password; correct {_source_of_login(backend)}."
        case NoCredentials():
            return f"no user and password came from the credential provider, see {_source_of_login(backend)}."
        case EndedTls():
            return (
                "the server ended the connection when TLS began: it went away, or it refuses our certificate; check"
                f" that it runs, and ssl_certfile and ssl_keyfile in {backend.setting('LOCATION')}."
            )
        case NoSentinel():
            return (
                f"no sentinel answers; check that they run and that {backend.setting('OPTIONS')}['sentinels'] is right."
            )
        case SentinelRefusal():
            return (
                "the sentinels refuse the user or password, or its ACL rule;"
                f" correct {backend.setting('OPTIONS')}['sentinel_kwargs']."
            )
        case UnknownService():
            return f"the sentinels watch no such master; correct {backend.setting('OPTIONS')}['service_name']."
        case NoMaster():
            return "there is no master now: a failover goes on, or no replica can take over."
        case MaxConnectionsError():
            return (
                "no connection became free in time; ask for less at a time, or raise"
                f" {backend.setting('OPTIONS')}['max_connections']."
            )
        case ResponseError() if "DB index is out of range" in str(error):
            return f"the server has no database of this number; correct the number in {backend.setting('LOCATION')}."
        case RedisError() if _is_full(error):
            return "the server has as many clients as it takes (its maxclients); raise that, or use fewer connections."
        case InvalidResponse():
            return (
                "what answers there does not speak the protocol of Redis;"
                f" check host, port and scheme (rediss:// for TLS) of {backend.setting('LOCATION')}."
            )
        case ResponseError() | BusyLoadingError():
            return _advice_on_slots(error, backend, in_cluster) or _advice_on_refusal(reason(error), backend)
    if is_about_certificates(error):
        return (
            f"TLS failed: check the certificates that {backend.setting('LOCATION')} names (ssl_ca_certs, ssl_certfile,"
            " ssl_keyfile), and that the server's certificate is for this host."
        )
    return f"the server does not answer; check that it runs and that {backend.setting('LOCATION')} is right."


def _source_of_login(backend: BaseLockBackend) -> str:
    if backend.option["credential_provider"] is None:
        return backend.setting("LOCATION")
    return f"{backend.setting('OPTIONS')}['credential_provider']"


def _advice_on_refusal(reason: str, backend: BaseLockBackend) -> str:
    match reason:
        case "NOPERM":
            return (
                "the user may not run this command or use this key; widen its ACL rule to the one that the"
                ' documentation has under "TLS and ACL".'
            )
        case "READONLY" | "MASTERDOWN" | "UNBLOCKED":
            return f"this server is a read-only replica; point {backend.setting('LOCATION')} at the primary."
        case "NEWER":
            return f"what it has {NEWER}."
        case "UNREADABLE":
            return (
                "others wrote a member into a key of ours; remove it with ZREM, or give the locks a prefix of their own"
                f" in {backend.setting('KEY_PREFIX')}."
            )
        case "OOM":
            return "the server is out of memory and takes no more keys; raise its maxmemory or free some."
        case "MISCONF":
            return "the server cannot save its data and takes no writes (MISCONF); its log says why."
        case "LOADING":
            return "the server is still reading its data from disk; try again in a moment."
        case "NOREPLICAS":
            return "too few replicas follow this server to write (its min-replicas-to-write); start or connect them."
        case "BUSY":
            return "a script keeps the server busy; end it with SCRIPT KILL."
        case "WRONGTYPE":
            return (
                "a key of ours holds another type of value; delete that key, or give the locks a prefix of their"
                f" own in {backend.setting('KEY_PREFIX')}."
            )
    return "the server refused the command."


def _advice_on_slots(error: Exception, backend: BaseLockBackend, in_cluster: bool) -> str:
    """For an unexpected Cluster, or a Cluster in a state in which it serves nobody; "" for other errors."""
    match error:
        case MasterDownError():
            return ""
        case ClusterDownError() if in_cluster:
            return "the Cluster is down for these locks; CLUSTER INFO and CLUSTER NODES tell which primary is missing."
        case MovedError() if in_cluster:
            return (
                "nodes redirect these locks to each other; let every node announce an address that is reached from"
                f" here (cluster-announce-ip, cluster-announce-hostname), or set {backend.setting('OPTIONS')}"
                "['address_remap']."
            )
        case AskError() | TryAgainError() if in_cluster:
            return (
                "the slot of these locks moves from node to node, which takes longer than"
                f" {backend.setting('OPTIONS')}['socket_timeout']."
            )
        case ClusterCrossSlotError() if not in_cluster and backend.node_count is None:
            return (
                f"this server is a node of a Cluster; {_for_cluster(backend)} If it is a proxy before one, write"
                f" {backend.setting('KEY_PREFIX')} in braces, '{{lock}}'."
            )
        case ClusterDownError() | AskError() | TryAgainError() | ClusterCrossSlotError() if not in_cluster:
            return f"this server is a node of a Cluster; {_for_cluster(backend)}"
        case ResponseError() if "cluster support disabled" in str(error):
            return f"this server is no Cluster; name {SERVER_BACKEND!r} in {backend.setting('BACKEND')}."
    return ""


def _for_cluster(backend: BaseLockBackend) -> str:
    if backend.node_count is None:
        return f"name {CLUSTER_BACKEND!r} in {backend.setting('BACKEND')}."
    return f"name servers of their own in {backend.setting('LOCATION')}."
