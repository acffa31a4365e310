"""Locks on a majority of independent Redis (6.2 or later) or Valkey servers: the Redlock algorithm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.core.checks import CheckMessage
from redis.exceptions import MaxConnectionsError

from ...exceptions import LockBackendError
from ...types import CheckResult, Grant, LockInfo, LockRequest, Outage, Slot
from ...utils import fork
from ...utils.chance import chance
from ...utils.clock import clock
from ...utils.drive import Call, Steps
from ...utils.events import about_event
from ...utils.text import printable
from ..base import named
from ..common.per_loop import PerLoop
from ..redis.breaker import ServerBreaker
from ..redis.diagnostics import timeout_warnings
from ..redis.errors import BreakerOpen, advice
from ..redis.keys import Keys, TenantKeys, read_prefix
from ..twins import GeneratorBackend
from .aio_connections import AsyncNodes
from .algorithm import MajorityListing, Redlock
from .config import check_options, read_locations
from .connections import Nodes
from .diagnostics import examine, setting_warnings
from .messages import Limits, NodeSteps, StaleConnections, check_process
from .quorum import NoMajority, is_final, majority_of

RENEWALS = 250  # leases per fan-out: a node that hangs accepts so many without blocking us

T = TypeVar("T")
logger = logging.getLogger("django_distlock")


class RedlockBackend(GeneratorBackend):
    """A lock is held by the request that has it on a majority of independent masters, asked all at once.

    If less than half of the nodes are down or hang, nobody notices. There is no queue: a waiter tries again after a
    random delay. Nodes must not replicate each other, and a node that lost its data must stay away for the longest TTL
    before it starts again. Fencing numbers grow over any two majorities.
    """

    supports_queue = False
    supports_wakeup = False
    supports_failover = True
    takes_callable_prefix = True

    options: ClassVar[Mapping[str, Any]] = {
        "node_timeout": None,
        "retry_delay": (0.05, 0.25),
        "socket_connect_timeout": 2.0,
        "max_connections": 50,
        "credential_provider": None,
    }

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        self.keys = Keys(read_prefix(self))
        if self.ask_prefix:
            self.keys = TenantKeys(self.keys)
        check_options(self)
        self.locations = read_locations(self)
        self.node_count = len(self.locations)
        self.majority = majority_of(self.node_count)
        self._redlock = Redlock(alias, self.keys, self.node_count, self._explain, self._release_in_background)
        self._longest_ttl = max(self.terms.ttl, self.terms.min_hold)
        self._connect_timeout = float(self.option["socket_connect_timeout"]) + self.timing.handshake
        timeout = float(self.option["socket_connect_timeout"])  # the time for a connection
        self._breakers = [ServerBreaker(alias, location, timeout, self.timing) for location in self.locations]
        shared, max_connections = (self.locations, self._breakers, self.majority), self.option["max_connections"]
        self._client = Nodes(alias, *shared, max_connections, self.timing)
        self._async_clients = PerLoop(partial(AsyncNodes, *shared, self.timing))

    def check_settings(self) -> list[CheckMessage]:
        where = f"DISTRIBUTED_LOCKS[{self.alias!r}]"
        found = setting_warnings(self.setting("LOCATION"), self.locations)
        return found + timeout_warnings(self.terms, "node_timeout", self._node_timeout(), where)

    @property
    def keyspace(self) -> Hashable:
        return frozenset(location.text for location in self.locations), self.ask_prefix or self.keys.prefix

    def _diagnose(self) -> Steps[list[CheckResult]]:
        limits = self._limits()._replace(despite_outage=True)
        exchanges = yield from self._run(lambda last_try: self._redlock.info(), limits)
        return examine(self.locations, exchanges, self._longest_ttl)

    # The contract

    def _acquire(self, request: LockRequest, queue: bool) -> Steps[Grant | LockInfo]:
        self._longest_ttl = max(self._longest_ttl, request.ttl)
        try:
            return (yield from self._run(partial(self._redlock.acquire, request), self._limits_of_attempt(request)))
        except BaseException as error:
            request.in_doubt = request.in_doubt or not isinstance(error, LockBackendError)
            raise

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        super().wait_for_turn(request, self._delay(timeout))

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        await super().await_for_turn(request, self._delay(timeout))

    def _delay(self, timeout: float) -> float:
        # Random, so that requests that each got some of the nodes do not collide again.
        shortest, longest = self.option["retry_delay"]
        return min(timeout, chance.uniform(shortest, longest))

    def _release(self, request: LockRequest, cooldown: float, force: bool) -> Steps[bool]:
        self._longest_ttl = max(self._longest_ttl, cooldown)
        tries = iter((False, True))  # whether an earlier try may have released it

        def steps(last_try: bool) -> NodeSteps[bool]:
            return self._redlock.release(request, cooldown, last_try, next(tries), force=force)

        return (yield from self._run(steps, self._limits(request.ttl)._replace(urgent=True)))

    def _renew(self, wanted: Sequence[tuple[LockRequest, float]], timeout: float | None) -> Steps[list[bool | None]]:
        renewed: list[bool | None] = []
        for start in range(0, len(wanted), RENEWALS):
            some = wanted[start : start + RENEWALS]
            limits = self._limits(min(ttl for _, ttl in some))._replace(despite_outage=True)
            if timeout is not None:
                limits = limits._replace(timeout=min(limits.timeout, timeout), connect_timeout=timeout)
            renewed += yield from self._run(partial(self._redlock.renew, some), limits)
        return renewed

    def _look(self, names: Sequence[str]) -> Steps[list[list[LockInfo]]]:
        if not names:
            return []
        prefix, locks = self.keyed(names)
        found = yield from self._run(partial(self._redlock.look, locks), self._limits())
        for lock, observed in zip(locks, found, strict=True):
            if observed.foreign:
                about = about_event("unreadable", alias=self.alias, name=lock)
                logger.error("%s", self._redlock.unreadable(lock, observed), extra=about)
        return named([[observed.held] if observed.held else [] for observed in found], names, prefix)

    def _pages(self, prefix: str) -> Iterator[Steps[Iterable[Slot]]]:
        """The names that a majority has are known only when all nodes have no more."""
        keys = self.keys.at(self.prefix_now())
        listing = MajorityListing(keys, prefix, len(self.locations), self.majority)
        while listing.is_open:
            yield self._page(listing)

    def _page(self, listing: MajorityListing) -> Steps[Iterable[Slot]]:
        yield from self._run(partial(self._redlock.scan, listing), self._limits())
        return () if listing.is_open else map(Slot, listing.locked)

    def close(self) -> None:
        self._client.close()
        for breaker in self._breakers:
            breaker.close()

    def outages(self) -> Sequence[Outage]:
        return [outage for breaker in self._breakers if (outage := breaker.outage())]

    # Errors

    def _translated(self, error: Exception) -> Exception:
        if not isinstance(error, MaxConnectionsError):
            return error
        busy = LockBackendError(f"Lock backend {self.alias!r}: {advice(error, self)} ({error})")
        busy.__cause__ = error
        return busy

    def _explain(self, failures: Sequence[Exception | None]) -> LockBackendError:
        failed = [
            f"{location.text}: {advice(failure, self)} ({printable(str(failure))})"
            for location, failure in zip(self.locations, failures, strict=True)
            if failure
        ]
        is_down = len(failed) > len(failures) - self.majority
        why = "a majority must answer" if is_down else "and may keep what is given back"
        error = (NoMajority if is_down else LockBackendError)(
            f"Lock backend {self.alias!r}: {len(failed)} of {len(failures)} nodes failed, {why}. {' '.join(failed)}"
        )
        final = sum(is_final(failure) for failure in failures if failure)
        unasked = sum(isinstance(failure, BreakerOpen) for failure in failures)
        error.is_final = final > len(failures) - self.majority  # the other nodes are not a majority
        error.was_asked = unasked <= len(failures) - self.majority
        error.__cause__ = ExceptionGroup("what the nodes failed with", [failure for failure in failures if failure])
        return error

    def _release_in_background(self, request: LockRequest) -> bool:
        return self.on_orphan is not None and self.on_orphan(request)

    # Nodes

    def _limits(self, ttl: float | None = None) -> Limits:
        return Limits(self._node_timeout(ttl), self._connect_timeout)

    def _limits_of_attempt(self, request: LockRequest) -> Limits:
        """A caller that waits also waits for connections, and for nodes that refuse them."""
        limits, timing, left = self._limits(request.ttl), self.timing, request.time_left
        connect_timeout = min(self._connect_timeout, max(timing.shortest_call, left) + timing.handshake)
        return limits._replace(connect_timeout=connect_timeout, retry_refused=left > 0, queue_deadline=clock() + left)

    def _node_timeout(self, ttl: float | None = None) -> float:
        """Seconds for the reply of a node."""
        if (given := self.option["node_timeout"]) is not None:
            return float(given)
        return max(0.05, min((ttl or self.terms.ttl) * 0.05, 1.0))

    def _run(self, steps: Callable[[bool], NodeSteps[T]], limits: Limits) -> Steps[T]:
        """Take the steps on the nodes. If connections were stale, once more on new ones, as the last try."""
        began, pid = clock(), fork.pid()
        try:
            result: T = yield Call("run", (steps(False), limits))
            return result
        except StaleConnections:
            yield Call("reset")
            check_process(pid)
            # At least a moment, because all connections are new.
            shortest = min(limits.connect_timeout, self.timing.shortest_call)
            connect_timeout = max(shortest, began + limits.connect_timeout - clock())
            result = yield Call("run", (steps(True), limits._replace(connect_timeout=connect_timeout)))
            return result
