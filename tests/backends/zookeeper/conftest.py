"""A look behind the backend's back, and servers that may be broken."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from django_distlock import locks
from django_distlock.signals import lock_lost
from django_distlock.utils.clock import clock
from tests.support import zookeeper as server
from tests.support.inside import client_of
from tests.support.stores import ZOOKEEPER
from tests.support.tools import eventually, renewer_of, threads_of


class Behind:
    """What is stored below a path, as another client sees it."""

    def __init__(self, address: str, root: str) -> None:
        self.client = KazooClient(address, timeout=60.0)
        self.client.start(60)
        self.root = root

    def paths(self, below: str = "") -> list[str]:
        """Of all nodes that have no children, but for the folders of locks and runs."""
        top = f"{self.root}{below}"
        if not self.client.exists(top):
            return []
        self.client.sync(top)
        found = []
        for child in self.client.get_children(top):
            path = f"{below}/{child}"
            found += self.paths(path) if path.count("/") < (3 if path.startswith("/locks") else 2) else [path]
        return sorted(found)

    def places(self) -> list[str]:
        """Nodes of holders and waiters."""
        return [path for path in self.paths() if path.startswith("/locks") and not path.endswith("~rest")]

    def rests(self) -> list[str]:
        return [path for path in self.paths() if path.endswith("~rest")]

    def stat(self, path: str) -> Any:
        return self.client.get(f"{self.root}{path}")[1]

    def data(self, path: str) -> bytes:
        return self.client.get(f"{self.root}{path}")[0]

    def deletions(self) -> list[float]:
        """When nodes of holders and waiters that are there now are deleted, on ``clock()``, as that becomes known."""
        moments: list[float] = []
        for path in self.places():
            self.client.exists(f"{self.root}{path}", watch=lambda event: moments.append(clock()))
        return moments

    def close(self) -> None:
        self.client.stop()
        self.client.close()


@pytest.fixture
def behind(zookeeper, zookeeper_entry):
    """The store of ``zookeeper_locks``."""
    found = Behind(zookeeper.address, "/" + zookeeper_entry["LOCATION"].partition("/")[2])
    yield found
    found.close()


@pytest.fixture
def configured(settings):
    """``configured(location, **entry)`` is ``locks["default"]`` there."""
    made = []

    def configure(location, timeout=4.0, options=(), **entry):
        options = {"timeout": timeout, "request_timeout": 10.0, **dict(options)}
        given = {"BACKEND": ZOOKEEPER, "LOCATION": location, "TTL": timeout, "OPTIONS": options, **entry}
        settings.DISTRIBUTED_LOCKS = {"default": given}
        made.append((locks["default"], renewer_of(locks["default"])))
        return locks["default"]

    yield configure
    for backend, renewer in made:
        eventually(lambda renewer=renewer: not renewer.is_cleaning, 60)
        client_of(backend).close()
    locks.close()
    eventually(lambda: not threads_of("zookeeper") + threads_of("closing"), 60)


@pytest.fixture
def proxy(zookeeper):
    with server.TcpProxy(zookeeper.port) as proxy:
        yield proxy


@pytest.fixture
def root():
    """A path that no other test has."""
    return f"/test-{secrets.token_hex(4)}"


@pytest.fixture
def proxied(proxy, root, configured, zookeeper):
    """``locks["default"]`` behind the proxy, with a session of four seconds."""
    yield configured(f"{proxy.address}{root}")
    proxy.hang = False
    proxy.accept()


@pytest.fixture
def behind_proxy(zookeeper, root):
    found = Behind(zookeeper.address, root)
    yield found
    found.close()


@pytest.fixture
def losses() -> Iterator[list[tuple[str, str]]]:
    """Each lease that is told to be lost: its name, and why."""
    told: list[tuple[str, str]] = []

    def note(lease: Any, reason: str, **about: Any) -> None:
        told.append((lease.name, reason))

    lock_lost.connect(note)
    yield told
    lock_lost.disconnect(note)
