"""What follows from an error of a server: whether it is waited for, whether the command is in doubt, for how long.

One table for one server, for a master that sentinels name, for a Cluster and for a quorum, for threads and tasks.
A sample of it runs by default, ``DISTLOCK_SOAK=1`` runs all.
"""

from __future__ import annotations

import os
import re
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import redis
from redis import exceptions
from redis.connection import DefaultParser

from django_distlock import LockBackendError, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.errors import (
    NoMaster,
    NoSentinel,
    NotSent,
    SentinelRefusal,
    UnknownService,
    is_answer,
    is_in_doubt,
    is_transient,
)
from django_distlock.backends.redis.keys import ClusterKeys, slot_of
from django_distlock.testing.tools import WAYS, calling
from django_distlock.types import Grant
from django_distlock.utils.clock import clock
from tests.support.scripted import SERVICE, Scripted
from tests.support.stores import REDIS, REDIS_CLUSTER, REDLOCK
from tests.support.tools import eventually, lock_request, renewer_of

pytestmark = pytest.mark.once

EVERYTHING = bool(os.environ.get("DISTLOCK_SOAK"))
SAMPLE = 12  # of so many cases one runs by default
SLOW_MACHINE = 20.0  # seconds that a machine under load may add to any call
CPU = 0.2  # seconds of the processor that a call may take

SLOT = slot_of(ClusterKeys("lock", 64).lease("name"))
CLOSE, SILENCE = Scripted.CLOSE, Scripted.SILENCE


@dataclass
class Row:
    """``line``: what the server answers. ``transient``: waited for, everywhere or "in a Cluster" alone."""

    line: Any
    transient: bool | str
    advice: str
    in_doubt: bool = False

    def at(self, port: int = 1) -> Any:
        return self.line.format(slot=SLOT, port=port) if isinstance(self.line, str) else self.line


ROWS = {
    "BUSY": Row("BUSY Redis is busy running a script.", True, "a script keeps the server busy"),
    "LOADING": Row("LOADING Redis is loading the dataset in memory", True, "still reading its data"),
    "MASTERDOWN": Row("MASTERDOWN Link with MASTER is down.", True, "a read-only replica"),
    "READONLY": Row("READONLY You can't write against a read only replica.", True, "a read-only replica"),
    "READONLY in a script": Row(
        "ERR Error running script (call to f_x): @user_script:7: -READONLY You can't write.",
        True,
        "a read-only replica",
    ),
    "NOREPLICAS": Row("NOREPLICAS Not enough good replicas to write.", True, "too few replicas follow"),
    "UNBLOCKED": Row("UNBLOCKED force unblock from blocking operation", True, "a read-only replica"),
    "maxclients": Row("ERR max number of clients reached", True, "as many clients as it takes"),
    "maxclients of a Cluster": Row(
        "ERR max number of clients + cluster connections reached", True, "as many clients as it takes"
    ),
    "MISCONF": Row("MISCONF Redis is configured to save RDB snapshots", False, "cannot save its data"),
    "OOM": Row("OOM command not allowed when used memory > 'maxmemory'.", False, "out of memory"),
    "NOAUTH": Row("NOAUTH Authentication required.", False, "refused the user or password"),
    "WRONGPASS": Row("WRONGPASS invalid username-password pair", False, "refused the user or password"),
    "NOPERM": Row("NOPERM User has no permissions to run the command", False, "may not run this command"),
    "CROSSSLOT": Row("CROSSSLOT Keys in request don't hash to the same slot", False, "Cluster|refused the command"),
    "WRONGTYPE": Row("WRONGTYPE Operation against a key", False, "another type of value"),
    "EXECABORT": Row("EXECABORT Transaction discarded because of previous errors.", False, "refused the command"),
    "NOPROTO": Row("NOPROTO unsupported protocol version", False, "refused the command"),
    "DENIED": Row("DENIED Redis is running in protected mode", False, "refused the command"),
    "ERR": Row("ERR unknown command", False, "refused the command"),
    "ERR of SELECT": Row("ERR DB index is out of range", False, "no database of this number; correct the number in"),
    "NOSCRIPT": Row("NOSCRIPT No matching script.", False, "refused the command"),  # after it was loaded, that is
    "CLUSTERDOWN": Row("CLUSTERDOWN Hash slot not served", "in a Cluster", "Cluster"),
    "TRYAGAIN": Row("TRYAGAIN Multiple keys request during rehashing of slot", "in a Cluster", "Cluster|slot"),
    "MOVED": Row("MOVED {slot} 127.0.0.1:{port}", "in a Cluster", "Cluster|announce"),
    "ASK": Row("ASK {slot} 127.0.0.1:{port}", "in a Cluster", "Cluster|slot"),
    "closed": Row(CLOSE, True, "does not answer", in_doubt=True),
    "silence": Row(SILENCE, True, "does not answer", in_doubt=True),
}
LINES = {name: row for name, row in ROWS.items() if isinstance(row.line, str)}


class TestKinds:
    @pytest.mark.parametrize("name", LINES)
    def test_of_what_servers_say(self, name):
        row, error = ROWS[name], DefaultParser.parse_error(ROWS[name].at())
        assert is_transient(error) is (row.transient is True)
        assert is_transient(error, in_cluster=True) is bool(row.transient)
        assert is_answer(error)
        assert not is_in_doubt(error, was_sent=True)

    OF_CLASSES: ClassVar = {
        exceptions.ConnectionError: (True, False), exceptions.TimeoutError: (True, False),
        exceptions.MaxConnectionsError: (True, False), exceptions.AuthorizationError: (True, False),
        exceptions.InvalidResponse: (False, False), exceptions.DataError: (False, False),
        exceptions.ResponseError: (False, True), exceptions.NoScriptError: (False, True),
        exceptions.OutOfMemoryError: (False, True), exceptions.ExecAbortError: (False, True),
        exceptions.NoPermissionError: (False, True), exceptions.ModuleError: (False, True),
        exceptions.AuthenticationWrongNumberOfArgsError: (False, True),
        exceptions.AuthenticationError: (False, True), exceptions.BusyLoadingError: (True, True),
        exceptions.ReadOnlyError: (True, True), exceptions.MasterDownError: (True, True),
        exceptions.ClusterDownError: (False, True), exceptions.TryAgainError: (False, True),
        exceptions.ClusterCrossSlotError: (False, True), exceptions.RedisError: (False, False),
        OSError: (True, False), ConnectionResetError: (True, False), BrokenPipeError: (True, False),
        NoSentinel: (True, False), NoMaster: (True, False), UnknownService: (False, False),
        SentinelRefusal: (False, False), NotSent: (True, False), ValueError: (False, False),
    }  # fmt: skip
    # Of clients, pipelines and locks of redis-py, which are not used; of slots: built from an address.
    ELSEWHERE: ClassVar = {
        "LockError", "LockNotOwnedError", "WatchError", "PubSubError", "ClusterError", "AskError", "MovedError",
        "ExternalAuthProviderError", "NoSuchFieldsetError",
    }  # fmt: skip

    @pytest.mark.parametrize("kind", OF_CLASSES)
    def test_of_classes(self, kind):
        error = kind("something")
        assert (is_transient(error), is_answer(error)) == self.OF_CLASSES[kind]
        is_doubtful = not is_answer(error) and kind is not NotSent
        assert is_in_doubt(error, was_sent=True) is is_doubtful
        assert not is_in_doubt(error, was_sent=False)

    def test_no_class_of_redis_is_forgotten(self):
        known = {kind.__name__ for kind in self.OF_CLASSES} | self.ELSEWHERE
        of_redis = {name for name, kind in vars(exceptions).items() if _is_error(kind)}
        assert of_redis <= known


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, redis.RedisError)


STORES = ("server", "master", "cluster")
PHASES = {"connecting": (b"AUTH",), "answer": (b"EVALSHA",)}
OF_KEYS = {"CROSSSLOT", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK", "WRONGTYPE", "NOSCRIPT"}  # no handshake is told so


def cases(*waits: float, stores: Sequence[str] = STORES) -> Any:
    every = [
        pytest.param(*case, id="-".join(map(str, case)))
        for case in product(ROWS, stores, PHASES, waits, WAYS)
        if not (case[2] == "connecting" and case[0] in OF_KEYS)
    ]
    sample = [case for case in every if EVERYTHING or zlib.crc32(case.id.encode()) % SAMPLE == 0]
    return pytest.mark.parametrize(("name", "kind", "phase", "wait", "way"), sample)


@pytest.fixture(scope="module")
def servers():
    with Scripted() as one, Scripted() as two, Scripted() as three:
        yield one, two, three


@pytest.fixture
def use(servers, settings, monkeypatch):
    """``use(kind, timeout)`` makes ``locks["default"]`` one of these servers, or all three of them."""
    for server in servers:
        server.heal()
    of_sentinels = {}
    if not EVERYTHING:  # a server that answers does so in time, however busy the machine is
        monkeypatch.setattr(Timing, "last_attempt", 5.0)
        of_sentinels = {"sentinel_kwargs": {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}}

    def use(kind, timeout):
        timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        sentinels = [("127.0.0.1", servers[0].port)]
        entry = {
            "server": {"LOCATION": servers[0].url, "OPTIONS": timeouts},
            "master": {
                "LOCATION": f"redis://:pw@{SERVICE}/0?protocol=2",
                "OPTIONS": {**timeouts, "sentinels": sentinels, **of_sentinels},
            },
            "cluster": {"BACKEND": REDIS_CLUSTER, "LOCATION": servers[0].url, "OPTIONS": timeouts},
            "quorum": {
                "BACKEND": REDLOCK,
                "LOCATION": [server.url for server in servers],
                "OPTIONS": {"node_timeout": 0.3, "socket_connect_timeout": timeout},
            },
        }[kind]
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, **entry}}
        return locks["default"]

    yield use
    # A quorum gives back in the background what is in doubt, over connections that it opens there.
    for server in servers:
        server.heal()
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    locks.close()
    eventually(lambda: not any("distlock-connect" in thread.name for thread in threading.enumerate()))


def acquire(backend, way, wait):
    """One attempt by a caller with so much time: its request, what came of it, and how long that took."""
    asked = lock_request("name", ttl=30)
    with calling(way) as calls:
        calls(backend)
        began, cpu = time.monotonic(), time.thread_time()
        asked.deadline = clock() + wait
        try:
            outcome = calls(backend).acquire(asked, queue=False)
        except LockBackendError as error:
            outcome = error
        took = time.monotonic() - began
        assert time.thread_time() - cpu < CPU
    assert took < wait + 1 + (0 if EVERYTHING else SLOW_MACHINE)
    return asked, outcome, took


def is_transient_at(kind: str, row: Row) -> bool:
    return bool(row.transient) if kind == "cluster" else row.transient is True


@cases(0, 3, stores=[*STORES, "quorum"])
def test_an_error_that_stays(servers, use, name, kind, phase, wait, way):
    row, backend = ROWS[name], use(kind, 0.5)
    for server in servers:
        server.fail(row.at(server.port), on=PHASES[phase])
    asked, outcome, took = acquire(backend, way, wait)
    assert isinstance(outcome, LockBackendError)
    assert re.search(row.advice, str(outcome))
    assert outcome.is_final is not is_transient_at(kind, row)
    if kind == "quorum":
        return  # which undoes what is in doubt by itself, and does not wait for nodes
    assert asked.in_doubt is (row.in_doubt and phase == "answer")
    tries = servers[0].seen.count(b"EVALSHA") if phase == "answer" else servers[0].failed
    if not is_transient_at(kind, row):
        assert tries == (2 if (name, phase) == ("NOSCRIPT", "answer") else 1)
    elif wait and kind in ("master", "cluster"):
        assert tries > 2
        assert took > wait - 1


@cases(3)
def test_an_error_that_passes(servers, use, name, kind, phase, wait, way):
    row = ROWS[name]
    backend = use(kind, 0.5 if row.line is SILENCE else 3.0)
    for server in servers:
        server.fail(row.at(server.port), on=PHASES[phase], times=1)
    asked, outcome, _ = acquire(backend, way, wait)
    is_unreachable = kind == "server" and phase == "connecting" and row.in_doubt  # nobody will take its place
    is_loaded = name == "NOSCRIPT" and phase == "answer"
    is_granted = (is_transient_at(kind, row) and not is_unreachable) or is_loaded
    assert isinstance(outcome, Grant if is_granted else LockBackendError)
    assert asked.in_doubt is (row.in_doubt and phase == "answer")
