"""Requests of a client to the servers, as values, so that operations are generators without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kazoo.exceptions import RolledBackError, RuntimeInconsistency  # type: ignore[import-untyped]

from .confirmations import ZooKeeperSession

_NONE: Mapping[str, Any] = MappingProxyType({})


class Request(NamedTuple):
    """A method of kazoo's client. ``commits``: the leader answers when most servers have it."""

    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = _NONE
    commits: bool = False

    def send(self, client: Any) -> Any:
        """Returns kazoo's AsyncResult."""
        return getattr(client, self.method)(*self.arguments, **self.options)


class Multi(NamedTuple):
    """Several changes, all or none."""

    changes: Sequence[Request]
    commits: bool = True

    def send(self, client: Any) -> Any:
        transaction = client.transaction()
        for change in self.changes:
            method = "set_data" if change.method == "set_async" else change.method.removesuffix("_async")
            getattr(transaction, method)(*change.arguments, **change.options)
        return transaction.commit_async()


class Answers(NamedTuple):
    """Answers to requests that were sent together, in one session. A value may be one of ``errors.ANSWERS``."""

    session: ZooKeeperSession
    sent_at: float  # on clock(), before the first one was sent
    values: list[Any]


def children(path: str) -> Request:
    return Request("get_children_async", (path,))


def children_watched(path: str, watch: Callable[[Any], object]) -> Request:
    """An ephemeral node has no children, so this watch fires when it is deleted, and not when it is changed."""
    return Request("get_children_async", (path,), {"watch": watch})


def read(path: str, watch: Callable[[Any], object] | None = None) -> Request:
    """Answered by data and stat."""
    return Request("get_async", (path,), {"watch": watch} if watch else _NONE)


def stat(path: str) -> Request:
    """None if there is no such node."""
    return Request("exists_async", (path,))


def sync(path: str) -> Request:
    """The server catches up with the leader before it answers later requests."""
    return Request("sync_async", (path,))


def ensure(path: str) -> Request:
    """Send it alone, because it takes several requests."""
    return Request("ensure_path_async", (path,), _NONE, True)


def create_place(path: str, data: bytes) -> Request:
    """Answered by the path, with its number, and the stat."""
    options = {"ephemeral": True, "sequence": True, "include_data": True}
    return Request("create_async", (path, data), options, True)


def create(path: str, data: bytes) -> Request:
    return Request("create_async", (path, data), _NONE, True)


def write(path: str, data: bytes, version: int = -1) -> Request:
    """Answered by the stat."""
    return Request("set_async", (path, data, version), _NONE, True)


def delete(path: str, version: int = -1) -> Request:
    return Request("delete_async", (path, version), _NONE, True)


def check(path: str) -> Request:
    """For a Multi: checks that the node is there."""
    return Request("check", (path, -1), _NONE, True)


_ROLLED_BACK = (RolledBackError, RuntimeInconsistency)


def refusal(results: Sequence[Any]) -> tuple[int, Exception] | None:
    """Which change of a Multi was refused, and why; then no change was made. None: all were made."""
    for index, result in enumerate(results):
        if isinstance(result, Exception) and not isinstance(result, _ROLLED_BACK):
            return index, result
    return None
