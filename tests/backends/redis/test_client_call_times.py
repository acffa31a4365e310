"""Whatever becomes of the store, a call ends a second after its time at the latest, and takes 0.2 s of CPU at most.

A sample of all stores, faults, calls and ways runs by default; ``DISTLOCK_SOAK=1`` runs all, and measures strictly.
"""

from __future__ import annotations

import os
import threading
import zlib
from contextlib import ExitStack
from itertools import count, product
from math import inf

import pytest

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.testing.tools import WAYS, calling
from tests.support.network import lookups, resolving, silent_listener, swallowing
from tests.support.scripted import SERVICE, Scripted
from tests.support.stores import REDIS, REDIS_CLUSTER, REDLOCK
from tests.support.timed import timed
from tests.support.tools import eventually, insist, renewer_of

pytestmark = [pytest.mark.once, pytest.mark.seconds(1)]

NETWORKS = count()
EVERYTHING = bool(os.environ.get("DISTLOCK_SOAK"))
SAMPLE = 12  # of so many cases one runs by default
SLOW_MACHINE = 0.5 if EVERYTHING else 20.0  # seconds that a machine under load may add to any call
TIMEOUT = 0.5  # seconds
ENOUGH = TIMEOUT if EVERYTHING else 5.0  # seconds, for calls that shall succeed: a fifth of it for each address
FAILOVER = 1.5  # seconds
CPU = 0.2  # seconds of the processor that a call may take

STORES = ("server", "master", "cluster", "quorum")
FAULTS = (
    "refuses", "hangs", "forgets", "refuses at first", "hangs at first", "stops in TLS", "silent resolver",
    "dead addresses", "NOREPLICAS", "LOADING",
)  # fmt: skip
GRANTS = ("forgets", "dead addresses")  # under which every call succeeds
AT_FIRST = ("refuses at first", "hangs at first", "stops in TLS", "silent resolver", "dead addresses")
CALLS = {
    "acquire": (0, 1, 10, None),
    "release": (None,), "renew": (None,), "locked": (None,), "held": (None,), "check": (None,),
}  # fmt: skip


def cases():
    every = [
        pytest.param(*case, wait, way, id="-".join(map(str, (*case, wait, way))))
        for case in product(STORES, FAULTS, CALLS)
        for wait in CALLS[case[2]]
        for way in WAYS
        if not (case[1] in AT_FIRST and case[2] in ("release", "renew"))  # who holds a lock is connected
        and not (case[1] in GRANTS and case[2] == "check")  # which looks closer than these servers can stand
    ]
    return [case for case in every if EVERYTHING or zlib.crc32(case.id.encode()) % SAMPLE == 0]


def longest(store, call, wait, timeout):
    """Seconds that the call is given."""
    whole = 2 * timeout
    if call == "acquire":
        most = max(whole, FAILOVER) if store in ("master", "cluster") else whole
        return min(inf if wait is None else wait, most)
    requests = {"held": 2, "check": 3}.get(call, 1)
    return requests * whole


class Stage:
    """Servers, how they are reached, and what goes wrong there."""

    def __init__(self, store, servers, settings, timeout):
        self.store, self.servers, self.settings, self.timeout = store, servers, settings, timeout
        self.stack = ExitStack()
        self.host, self.ports, self.tls = "127.0.0.1", [server.port for server in servers], False

    def use(self):
        scheme, query = ("rediss", "&ssl_cert_reqs=none") if self.tls else ("redis", "")
        urls = [f"{scheme}://:pw@{self.host}:{port}/0?protocol=2{query}" for port in self.ports]
        timeouts = {
            "socket_timeout": self.timeout, "socket_connect_timeout": self.timeout, "failover_timeout": FAILOVER,
        }  # fmt: skip
        entry = {
            "server": {"LOCATION": urls[0], "OPTIONS": timeouts},
            "master": {
                "LOCATION": f"{scheme}://:pw@{SERVICE}/0?protocol=2{query}",
                "OPTIONS": {**timeouts, "sentinels": [(self.host, self.servers[0].port)]},
            },
            "cluster": {"BACKEND": REDIS_CLUSTER, "LOCATION": urls[0], "OPTIONS": timeouts},
            "quorum": {
                "BACKEND": REDLOCK,
                "LOCATION": urls,
                "OPTIONS": {"node_timeout": self.timeout / 2, "socket_connect_timeout": self.timeout},
            },
        }[self.store]
        self.settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, **entry}}

    def break_(self, fault):
        match fault.removesuffix(" at first"):
            case "refuses":
                for server in self.servers:
                    server.refuse()
            case "hangs":
                for server in self.servers:
                    server.answer = lambda words: Scripted.SILENCE
            case "forgets":
                for server in self.servers:
                    server.forget()
            case "NOREPLICAS" | "LOADING" as word:
                for server in self.servers:
                    server.fail(f"{word} not now", on=(b"EVALSHA", b"GET", b"PTTL", b"SCAN"))
            case "stops in TLS":
                self.tls = True
                self.ports = [self.stack.enter_context(silent_listener()) for _ in self.servers]
                self.servers[0].master = self.ports[0]
            case "silent resolver" | "dead addresses" as kind:
                self.host = "redis.test"
                names, _ = self.stack.enter_context(resolving())
                if kind == "silent resolver":
                    names["redis.test"] = threading.Event()
                else:
                    one, two = divmod(next(NETWORKS), 250)  # nobody knows yet that those do not answer
                    dead = [f"127.{1 + one}.{two}.{number}" for number in range(2, 6)]
                    for address, port in product(dead, self.ports):
                        self.stack.enter_context(swallowing(address, port))
                    names["redis.test"] = [*dead, "127.0.0.1"]

    def end(self):
        """All is well again."""
        for server in self.servers:
            server.heal()
        self.stack.close()


@pytest.fixture(scope="module")
def three():
    with Scripted() as one, Scripted() as two, Scripted() as three:
        yield one, two, three


@pytest.fixture
def stage(three, settings, monkeypatch):
    """``stage(store, timeout)`` is set, with ``use()`` and ``break_()``, and cleared at the end."""
    monkeypatch.setattr(Timing, "idle_trusted", 0.0)
    stages = []

    def stage(store, timeout):
        for server in three:
            server.heal()
        stages.append(Stage(store, three, settings, timeout))
        return stages[-1]

    yield stage
    for one in stages:
        one.end()
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    locks.close()
    eventually(lambda: not lookups())


# CPython closes no socket that was reset between connect() and the begin of TLS, as when the servers come back here.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("store", "fault", "call", "wait", "way"), cases())
def test_a_call_ends_within_its_time(stage, three, store, fault, call, wait, way, monkeypatch):
    timeout = ENOUGH if fault in GRANTS else TIMEOUT
    if fault in GRANTS and not EVERYTHING:
        monkeypatch.setattr(Timing, "shortest_call", ENOUGH)
    on = stage(store, timeout)
    if fault in AT_FIRST:
        on.break_(fault)
    on.use()
    with calling(way) as calls:
        held, lease = lock("held", ttl=30), None
        if fault not in AT_FIRST:
            lease = insist(held.__enter__)
            insist(calls(lock("name")).locked)  # its connection stands, too
            on.break_(fault)
        handle = lock("name", wait=wait if call == "acquire" else 0, ttl=30)
        result = timed(call, calls, held, lease, handle, lambda: sum(server.cpu for server in three))
        if result.outcome is True:
            calls(handle).release()
        if fault in AT_FIRST:
            locks.close()
        on.end()
        if lease and call != "release":
            held.release()
    assert result.took < longest(store, call, wait, timeout) + 1 + SLOW_MACHINE
    servers = 3 if store == "quorum" else 1
    assert result.cpu < (CPU + 0.02 * result.took) * servers  # of one core, while it tries again
    if call == "check":
        assert any(finding.is_error for finding in result.outcome) is (fault not in GRANTS)
    else:
        assert isinstance(result.outcome, LockBackendError) is (fault not in GRANTS)
