"""Locks on a majority of independent Redis (6.2 or later) or Valkey servers: the Redlock algorithm."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from redis.exceptions import MaxConnectionsError

from ...exceptions import LockBackendError
from ...types import CheckResult, Grant, LockInfo, LockRequest
from ...utils.clock import clock
from ...utils.text import printable
from ..base import BaseLockBackend
from ..common.per_loop import PerLoop
from ..redis.diagnostics import of_patience
from ..redis.errors import NoReply, advice
from ..redis.keys import read_prefix
from .aio_connections import AsyncNodes
from .algorithm import Listing, Rounds, StaleConnections
from .config import check_options, read_locations
from .connections import Nodes
from .diagnostics import examine, of_settings
from .messages import HANDSHAKE, Steps, check_process
from .quorum import Seen, is_final, majority_of

RENEWALS = 250  # leases that are renewed in one round: what a node that hangs takes in without blocking us
SHORTEST_WAIT = 0.5  # seconds that even an attempt without a wait gives nodes to be connected

logger = logging.getLogger("django_distlock")


class RedlockBackend(BaseLockBackend):
    """A lock is held by whoever has it on a majority of independent masters, asked all at once.

    Less than half of the nodes may be down or hang, and nobody notices. There is no queue: a waiter tries
    again after a random delay. Nodes must not replicate each other, and a node that lost its data must stay
    away for the longest TTL before it starts again. Fencing numbers grow over any two majorities.
    """

    supports_queue = False
    supports_wakeup = False
    supports_failover = True

    options: ClassVar[Mapping[str, Any]] = {
        "node_timeout": None,
        "retry_delay": (0.05, 0.25),
        "socket_connect_timeout": 2.0,
        "max_connections": 50,
    }

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        self.prefix = read_prefix(self)
        check_options(self)
        self.locations = read_locations(self)
        self.node_count = len(self.locations)
        self.majority = majority_of(self.node_count)
        self._rounds = Rounds(alias, self.prefix, self.node_count, self._explain, self._abandon)
        self._longest_ttl = max(self.terms.ttl, self.terms.min_hold)
        connect_timeout = float(self.option["socket_connect_timeout"])
        self._connecting = connect_timeout + HANDSHAKE
        self._nodes = Nodes(self.locations, self.majority, self.option["max_connections"])
        self._async_nodes = PerLoop(partial(AsyncNodes, self.locations, self.majority))

    def check_settings(self) -> list[CheckMessage]:
        where = f"DISTRIBUTED_LOCKS[{self.alias!r}]"
        found = of_settings(self.setting("LOCATION"), self.locations)
        return found + of_patience(self.terms, "node_timeout", self._node_timeout(), where)

    @property
    def keyspace(self) -> Hashable:
        return frozenset(location.text for location in self.locations), self.prefix

    def check(self) -> list[CheckResult]:
        asked = self._run(lambda last: self._rounds.info(), self._node_timeout())
        found = examine(self.locations, asked, self._longest_ttl)  # before the probe, which has a TTL of its own
        return [*super().check(), *found]

    async def acheck(self) -> list[CheckResult]:
        asked = await self._arun(lambda last: self._rounds.info(), self._node_timeout())
        found = examine(self.locations, asked, self._longest_ttl)
        return [*await super().acheck(), *found]

    # The contract

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        self._longest_ttl = max(self._longest_ttl, request.lasts)
        try:
            end = math.inf if request.give_up is None else request.give_up
            answer: Grant | LockInfo = self._run(*self._acquiring(request), **self._patience(request), queues_until=end)
        except BaseException as error:
            request.in_doubt = request.in_doubt or not isinstance(error, LockBackendError)
            raise
        return answer

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        self._longest_ttl = max(self._longest_ttl, request.lasts)
        try:
            answer: Grant | LockInfo = await self._arun(*self._acquiring(request), **self._patience(request))
        except BaseException as error:
            request.in_doubt = request.in_doubt or not isinstance(error, LockBackendError)
            raise
        return answer

    def _patience(self, request: LockRequest) -> dict[str, Any]:
        """How long to wait for connections, and whether to nodes that refuse, too: for callers who wait themselves."""
        if request.give_up is None:
            return {"persists": True}
        left = request.give_up - clock()
        return {"within": min(self._connecting, max(SHORTEST_WAIT, left) + HANDSHAKE), "persists": left > 0}

    def _acquiring(self, request: LockRequest) -> tuple[Callable[[bool], Steps], float]:
        return lambda last: self._rounds.acquire(request, last), self._node_timeout(request.ttl)

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        super().wait_for_turn(request, self._delay(timeout))

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        await super().await_for_turn(request, self._delay(timeout))

    def _delay(self, most: float) -> float:
        # Random, so that those who took the lock from each other do not meet again.
        shortest, longest = self.option["retry_delay"]
        return min(most, random.uniform(shortest, longest))

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return bool(self._run(*self._releasing(request, cooldown, force), urgent=True))

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return bool(await self._arun(*self._releasing(request, cooldown, force), urgent=True))

    def _releasing(self, request: LockRequest, cooldown: float, force: bool) -> tuple[Callable[[bool], Steps], float]:
        self._longest_ttl = max(self._longest_ttl, cooldown)
        tries = iter((False, True))  # whether an earlier try may have done it

        def steps(last: bool) -> Steps:
            return self._rounds.release(request, cooldown, last, next(tries), force=force)

        return steps, self._node_timeout(request.ttl)

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool | None]:
        renewed: list[bool | None] = []
        for some in _in_steps(wanted, RENEWALS):
            renewed += self._run(*self._renewing(some, within), within=within)
        return renewed

    async def arenew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None
    ) -> list[bool | None]:
        renewed: list[bool | None] = []
        for some in _in_steps(wanted, RENEWALS):
            renewed += await self._arun(*self._renewing(some, within), within=within)
        return renewed

    def _renewing(
        self, wanted: Sequence[tuple[LockRequest, float]], within: float | None
    ) -> tuple[Callable[[bool], Steps], float]:
        shortest = min(ttl for _, ttl in wanted)
        patience = self._node_timeout(shortest)
        return lambda last: self._rounds.renew(wanted, last), patience if within is None else min(patience, within)

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._looked(names, self._run(*self._looking(names)) if names else [])

    async def alook(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._looked(names, await self._arun(*self._looking(names)) if names else [])

    def _looking(self, names: Sequence[str]) -> tuple[Callable[[bool], Steps], float]:
        return lambda last: self._rounds.look(names, last), self._node_timeout()

    def _looked(self, names: Sequence[str], found: Sequence[Seen]) -> list[LockInfo | None]:
        for name, seen in zip(names, found, strict=True):
            if seen.foreign:
                logger.error("%s", self._rounds.foreign_value(name))
        return [seen.held for seen in found]

    def names(self, prefix: str = "") -> Iterator[str]:
        listing = Listing(len(self.locations), self.majority)
        while listing.is_open:
            self._run(lambda last: self._rounds.scan(listing, prefix, last), self._node_timeout())
        return iter(listing.locked)

    async def anames(self, prefix: str = "") -> AsyncIterator[str]:
        listing = Listing(len(self.locations), self.majority)
        while listing.is_open:
            await self._arun(lambda last: self._rounds.scan(listing, prefix, last), self._node_timeout())
        for name in listing.locked:
            yield name

    def close(self) -> None:
        self._nodes.close()

    # Errors

    def _explain(self, failures: Sequence[Exception | None]) -> LockBackendError:
        failed = [
            f"{location.text}: {advice(failure, self)} ({printable(str(failure))})"
            for location, failure in zip(self.locations, failures, strict=True)
            if failure
        ]
        is_down = len(failed) > len(failures) - self.majority
        why = "a majority must answer" if is_down else "and may keep what is given back"
        error = NoReply(
            f"Lock backend {self.alias!r}: {len(failed)} of {len(failures)} nodes failed, {why}. {' '.join(failed)}"
        )
        final = sum(is_final(failure) for failure in failures if failure)
        error.is_final = final > len(failures) - self.majority  # the others are no majority
        error.__cause__ = ExceptionGroup("what the nodes failed with", [failure for failure in failures if failure])
        return error

    def _abandon(self, request: LockRequest) -> bool:
        return self.on_orphan is not None and self.on_orphan(request)

    # Nodes

    def _node_timeout(self, ttl: float | None = None) -> float:
        """Seconds that a node has for an answer."""
        if (given := self.option["node_timeout"]) is not None:
            return float(given)
        return max(0.05, min((ttl or self.terms.ttl) * 0.05, 1.0))

    def _run(
        self,
        steps: Callable[[bool], Steps],
        patience: float,
        *,
        urgent: bool = False,
        within: float | None = None,
        persists: bool = False,
        queues_until: float = -math.inf,
    ) -> Any:
        """``within``: seconds to wait for connections. ``queues_until``: see ``Nodes.run``."""
        how: Any = {"urgent": urgent, "persists": persists, "queues_until": queues_until}
        within, began, pid = self._connecting if within is None else within, clock(), os.getpid()
        try:
            try:
                return self._nodes.run(steps(False), patience, within, **how)
            except StaleConnections:
                self._nodes.reset()
                check_process(pid)
                return self._nodes.run(steps(True), patience, _rest_of(within, began), **how)
        except MaxConnectionsError as error:
            raise LockBackendError(f"Lock backend {self.alias!r}: {advice(error, self)} ({error})") from error

    async def _arun(
        self,
        steps: Callable[[bool], Steps],
        patience: float,
        *,
        urgent: bool = False,
        within: float | None = None,
        persists: bool = False,
    ) -> Any:
        how: Any = {"urgent": urgent, "persists": persists}
        within, began = self._connecting if within is None else within, clock()
        nodes = await self._async_nodes.here()
        try:
            return await nodes.run(steps(False), patience, within, **how)
        except StaleConnections:
            nodes.reset()
            return await nodes.run(steps(True), patience, _rest_of(within, began), **how)


def _rest_of(within: float, began: float) -> float:
    """Seconds to wait for connections in another try; a moment always, because all are new."""
    return max(min(within, SHORTEST_WAIT), began + within - clock())


def _in_steps(wanted: Sequence[Any], step: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(wanted), step):
        yield wanted[start : start + step]
