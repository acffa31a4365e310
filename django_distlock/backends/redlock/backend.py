"""Locks on a majority of independent Redis (6.2 or later) or Valkey servers: the Redlock algorithm."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from redis.exceptions import MaxConnectionsError

from ...exceptions import LockBackendError
from ...types import CheckResult, Grant, LockInfo, LockRequest
from ...utils.clock import clock
from ...utils.drive import Call, Steps
from ...utils.text import printable
from ..common.per_loop import PerLoop
from ..redis.diagnostics import of_patience
from ..redis.errors import NoReply, advice
from ..redis.keys import read_prefix
from ..twins import GeneratorBackend
from .aio_connections import AsyncNodes
from .algorithm import Listing, Rounds, StaleConnections
from .config import check_options, read_locations
from .connections import Nodes
from .diagnostics import examine, of_settings
from .messages import HANDSHAKE, NodeSteps, check_process
from .quorum import is_final, majority_of

RENEWALS = 250  # leases that are renewed in one round: what a node that hangs takes in without blocking us
SHORTEST_WAIT = 0.5  # seconds that even an attempt without a wait gives nodes to be connected

logger = logging.getLogger("django_distlock")


class RedlockBackend(GeneratorBackend):
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
        self._client = Nodes(self.locations, self.majority, self.option["max_connections"])
        self._async_clients = PerLoop(partial(AsyncNodes, self.locations, self.majority))

    def check_settings(self) -> list[CheckMessage]:
        where = f"DISTRIBUTED_LOCKS[{self.alias!r}]"
        found = of_settings(self.setting("LOCATION"), self.locations)
        return found + of_patience(self.terms, "node_timeout", self._node_timeout(), where)

    @property
    def keyspace(self) -> Hashable:
        return frozenset(location.text for location in self.locations), self.prefix

    def _diagnose(self) -> Steps[list[CheckResult]]:
        longest = self._longest_ttl  # before the self-test, which has a TTL of its own
        asked = yield from self._ask(lambda last: self._rounds.info(), self._node_timeout())
        return examine(self.locations, asked, longest)

    # The contract

    def _acquire(self, request: LockRequest, queue: bool) -> Steps[Grant | LockInfo]:
        self._longest_ttl = max(self._longest_ttl, request.lasts)
        patience = self._node_timeout(request.ttl)
        try:
            steps = partial(self._rounds.acquire, request)
            answer: Grant | LockInfo = yield from self._ask(steps, patience, **self._wait(request))
            return answer
        except BaseException as error:
            request.in_doubt = request.in_doubt or not isinstance(error, LockBackendError)
            raise

    def _wait(self, request: LockRequest) -> dict[str, Any]:
        """How long to wait for connections, and whether to nodes that refuse, too: for callers who wait themselves."""
        if request.deadline is None:
            return {"persists": True, "queues_until": math.inf}
        left = request.deadline - clock()
        within = min(self._connecting, max(SHORTEST_WAIT, left) + HANDSHAKE)
        return {"within": within, "persists": left > 0, "queues_until": request.deadline}

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        super().wait_for_turn(request, self._delay(timeout))

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        await super().await_for_turn(request, self._delay(timeout))

    def _delay(self, most: float) -> float:
        # Random, so that those who took the lock from each other do not meet again.
        shortest, longest = self.option["retry_delay"]
        return min(most, random.uniform(shortest, longest))

    def _release(self, request: LockRequest, cooldown: float, force: bool) -> Steps[bool]:
        self._longest_ttl = max(self._longest_ttl, cooldown)
        tries = iter((False, True))  # whether an earlier try may have done it

        def steps(last: bool) -> NodeSteps:
            return self._rounds.release(request, cooldown, last, next(tries), force=force)

        return bool((yield from self._ask(steps, self._node_timeout(request.ttl), urgent=True)))

    def _renew(self, wanted: Sequence[tuple[LockRequest, float]], within: float | None) -> Steps[list[bool | None]]:
        renewed: list[bool | None] = []
        for start in range(0, len(wanted), RENEWALS):
            some = wanted[start : start + RENEWALS]
            patience = self._node_timeout(min(ttl for _, ttl in some))
            if within is not None:
                patience = min(patience, within)
            renewed += yield from self._ask(partial(self._rounds.renew, some), patience, within=within)
        return renewed

    def _look(self, names: Sequence[str]) -> Steps[list[LockInfo | None]]:
        if not names:
            return []
        found = yield from self._ask(partial(self._rounds.look, names), self._node_timeout())
        for name, seen in zip(names, found, strict=True):
            if seen.foreign:
                logger.error("%s", self._rounds.foreign_value(name))
        return [seen.held for seen in found]

    def _pages(self, prefix: str) -> Iterator[Steps[Iterable[str]]]:
        """What a majority has is known when all nodes are through."""
        listing = Listing(len(self.locations), self.majority)
        while listing.is_open:
            yield self._page(listing, prefix)

    def _page(self, listing: Listing, prefix: str) -> Steps[Iterable[str]]:
        yield from self._ask(partial(self._rounds.scan, listing, prefix), self._node_timeout())
        return () if listing.is_open else listing.locked

    def close(self) -> None:
        self._client.close()

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

    def _ask(
        self, steps: Callable[[bool], NodeSteps], patience: float, *, within: float | None = None, **how: Any
    ) -> Steps[Any]:
        """Take the steps on the nodes; on new connections, as the last try, where those that stood were stale.

        ``within``: seconds to wait for connections; ``how``: see ``Nodes.run``.
        """
        within, began, pid = self._connecting if within is None else within, clock(), os.getpid()
        try:
            return (yield Call("run", (steps(False), patience, within), how))
        except StaleConnections:
            yield Call("reset")
            check_process(pid)
            return (yield Call("run", (steps(True), patience, _rest_of(within, began)), how))


def _rest_of(within: float, began: float) -> float:
    """Seconds to wait for connections in another try; a moment always, because all are new."""
    return max(min(within, SHORTEST_WAIT), began + within - clock())
