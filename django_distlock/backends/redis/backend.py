"""Locks on one Redis (6.2 or later) or Valkey server."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from redis.exceptions import RedisError

from ...exceptions import InvalidLockBackend, LockBackendError, UnreadableRun
from ...types import CheckResult, Grant, Holder, LastRun, LockInfo, LockRequest
from ...utils.clock import clock
from ...utils.text import quoted
from ..base import BaseLockBackend, RunsBackend
from ..common.per_loop import PerLoop
from ..common.selftest import failed
from .client import Answer
from .errors import CLUSTER_BACKEND, InDoubt, NoReply, explain
from .keys import LEASES, RUNS, SCAN_STEP, Listing
from .operations import GRANT_TTL, Operations
from .pubsub import NoListener
from .scripts import Command
from .timeouts import SHORTEST
from .topology import Topology, server_topology

logger = logging.getLogger("django_distlock")


class RedisBackend(BaseLockBackend, RunsBackend):
    """One key per lock: token, state, fencing number and holder in its value, the TTL on the key.

    A grant is an atomic script on the server, as are renewal and release, which compare the token first.
    """

    supports_queue = True

    options: ClassVar[Mapping[str, Any]] = {
        "socket_timeout": 2.0, "socket_connect_timeout": 2.0, "max_connections": 50,
        "sentinels": None, "service_name": None, "sentinel_kwargs": None, "failover_timeout": 30.0,
    }  # fmt: skip
    options_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("cluster", "shards", "address_remap"), f"Take it out; for a Cluster, name {CLUSTER_BACKEND!r} in BACKEND."
    )
    in_cluster: ClassVar[bool] = False

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        for option in ("socket_timeout", "socket_connect_timeout", "max_connections", "failover_timeout"):
            value, whole = self.option[option], option == "max_connections"
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not fits or not 0 < value < float("inf"):
                needed = "a whole number above 0" if whole else "a number of seconds above 0"
                raise InvalidLockBackend(f"{self.setting('OPTIONS')}[{option!r}] is {quoted(value)}; it is {needed}.")
        timeouts = {key: float(self.option[key]) for key in ("socket_timeout", "socket_connect_timeout")}
        topology = self._topology(timeouts)
        self.location, self.keys = topology.location, topology.keys
        self._client, self._async_clients = topology.client, PerLoop(topology.new_async_client)
        self._listener, self._checkup = topology.listener, topology.checkup
        self._operations = Operations(alias, self.keys, self.location.text, self.setting("KEY_PREFIX"), self._explain)

    def _topology(self, timeouts: Mapping[str, float]) -> Topology:
        return server_topology(self, timeouts, self._hand_back)

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        try:
            if queue and not request.inbox and not self.is_listening(request.name):
                queue = self._start_listener(request)
            answer = self._send(self._acquire(request, queue), within=self._patience(request), until=request.give_up)
            return self._answered(request, answer)
        except BaseException as error:
            request.in_doubt = request.in_doubt or _may_be_executed(error)
            raise

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        try:
            if queue and not request.inbox and not self.is_listening(request.name):
                queue = await self._astart_listener(request)
            within = self._patience(request)
            answer = await self._asend(self._acquire(request, queue), within=within, until=request.give_up)
            return self._answered(request, answer)
        except BaseException as error:
            request.in_doubt = request.in_doubt or _may_be_executed(error)
            raise

    def is_listening(self, name: str) -> bool:
        """Most locks are free, so the subscription is made when one turns out to be busy."""
        return self._listener.hears(name)

    def succeed(self, successor: LockRequest) -> None:
        self._listener.expect(successor)

    def places(self, queued: Sequence[LockRequest]) -> list[LockRequest]:
        return [replace(request, is_offer=True) for request in queued]

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        return self._released(
            request, self._send(self._operations.release(request, cooldown, force), queues_until=_held_until([request]))
        )

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        answer = await self._asend(
            self._operations.release(request, cooldown, force), queues_until=_held_until([request])
        )
        return self._released(request, answer)

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool | None]:
        queues_until = 0.0 if within else _held_until([request for request, _ in wanted])
        answer = self._send(*self._operations.renew(wanted), within=within, queues_until=queues_until)
        return self._operations.renewed(answer)

    async def arenew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None
    ) -> list[bool | None]:
        queues_until = 0.0 if within else _held_until([request for request, _ in wanted])
        answer = await self._asend(*self._operations.renew(wanted), within=within, queues_until=queues_until)
        return self._operations.renewed(answer)

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._operations.infos(names, self._send(*self._operations.look(names)))

    async def alook(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._operations.infos(names, await self._asend(*self._operations.look(names)))

    def holders(self, names: Sequence[str]) -> list[Holder | None]:
        groups = self.keys.grouped(names)
        return self._operations.found_holders(names, groups, self._send(*self._operations.holders(groups)))

    async def aholders(self, names: Sequence[str]) -> list[Holder | None]:
        groups = self.keys.grouped(names)
        return self._operations.found_holders(names, groups, await self._asend(*self._operations.holders(groups)))

    def remaining(self, names: Sequence[str]) -> list[float | None]:
        return self._operations.found_remaining(self._send(*self._operations.remaining(names)))

    async def aremaining(self, names: Sequence[str]) -> list[float | None]:
        return self._operations.found_remaining(await self._asend(*self._operations.remaining(names)))

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        """The processes that wait for each: a process has one place, however many of its threads and tasks wait."""
        return self._operations.counted(self._send(*self._operations.count_waiters(names)))

    async def acount_waiters(self, names: Sequence[str]) -> list[int | None]:
        return self._operations.counted(await self._asend(*self._operations.count_waiters(names)))

    def names(self, prefix: str = "") -> Iterator[str]:
        return self._names_of(LEASES, prefix)

    def _names_of(self, kind: str, prefix: str = "") -> Iterator[str]:
        listing = Listing(self.keys, kind, prefix)
        for part in self._parts():
            for command in listing.commands(part):
                yield from listing.new_names(self._operations.only(self._send(command)))

    async def anames(self, prefix: str = "") -> AsyncIterator[str]:
        listing = Listing(self.keys, LEASES, prefix)
        async for part in self._aparts():
            for command in listing.commands(part):
                for name in listing.new_names(self._operations.only(await self._asend(command))):
                    yield name

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        answer = self._send(self._operations.claim_run(name, seen, now, ttl, self.grace, self.runs_ahead))
        return self._operations.claimed_run(name, answer, self.runs_ahead)

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        return [run if isinstance(run, LastRun) else None for run in self._find_runs(names)]

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        names = self._names_of(RUNS)
        while batch := list(islice(names, SCAN_STEP)):
            for name, run in zip(batch, self._find_runs(batch), strict=True):
                if isinstance(run, LastRun):
                    yield name, run
                elif run:
                    logger.error("%s", run)

    def _find_runs(self, names: Sequence[str]) -> list[LastRun | UnreadableRun | None]:
        return self._operations.found_runs(names, self._send(*self._operations.find_runs(names)))

    def check(self) -> list[CheckResult]:
        began = time.time()
        try:
            parts = list(dict.fromkeys(self._parts()))
            answer = self._send(*self._checkup.questions(parts))
        except LockBackendError as error:  # a second question would cost the timeouts once more
            return [failed(error)]
        found = self._checkup.findings(parts, answer.replies, (began + time.time()) / 2)
        return super().check() + found

    async def acheck(self) -> list[CheckResult]:
        began = time.time()
        try:
            parts = list(dict.fromkeys([part async for part in self._aparts()]))
            answer = await self._asend(*self._checkup.questions(parts))
        except LockBackendError as error:
            return [failed(error)]
        found = self._checkup.findings(parts, answer.replies, (began + time.time()) / 2)
        return await super().acheck() + found

    def check_settings(self) -> list[CheckMessage]:
        return self._checkup.of_settings(self.option["socket_timeout"], f"DISTRIBUTED_LOCKS[{self.alias!r}]")

    @property
    def keyspace(self) -> Hashable:
        return self._checkup.keyspace

    # Commands

    def _acquire(self, request: LockRequest, queue: bool) -> Command:
        if queue and not request.inbox:
            self._listener.expect(request)  # before the store knows of it
        if queue:
            mode = "look" if request.place else "again" if request.in_doubt else "wait"
            if mode == "look":
                self._listener.will_look(request)
        else:
            mode = "last" if request.inbox else "try"
        return self._operations.acquire(request, mode)

    # Replies

    def _answered(self, request: LockRequest, answer: Answer) -> Grant | LockInfo:
        request.in_doubt = request.in_doubt or answer.repeated
        match self._operations.only(answer):
            case [1, fence]:
                return Grant(int(fence), answer.sent_at)
            case [0, place, left, value, ears]:
                request.place = place.decode()
                if not place:
                    self._listener.forget(request)
                    request.inbox = ""
                elif ears >= 0:
                    self._listener.looked(request, ears, answer.sent_at)
                return self._operations.busy(request.name, value, left)
        raise LockBackendError(f"The request for lock {request.name!r} was given back before it was answered.")

    def _released(self, request: LockRequest, answer: Answer) -> bool:
        self._listener.forget(request)
        # "Not the holder" on a repeat means that the first attempt, whose reply was lost, did it.
        return bool(self._operations.only(answer)) or answer.repeated

    # Connections

    def _send(
        self,
        *commands: Command,
        within: float | None = None,
        until: float | None = 0.0,
        queues_until: float = 0.0,
    ) -> Answer:
        try:
            return self._client.send(*commands, within=within, until=until, queues_until=queues_until)
        except InDoubt as error:
            raise self._explain(error.cause, NoReply) from error.cause
        except (RedisError, OSError) as error:
            raise self._explain(error) from error

    async def _asend(
        self,
        *commands: Command,
        within: float | None = None,
        until: float | None = 0.0,
        queues_until: float = 0.0,
    ) -> Answer:
        try:
            return await (await self._async_clients.here()).send(
                *commands, within=within, until=until, queues_until=queues_until
            )
        except InDoubt as error:
            raise self._explain(error.cause, NoReply) from error.cause
        except (RedisError, OSError) as error:
            raise self._explain(error) from error

    def _parts(self) -> Iterator[Any]:
        try:
            yield from self._client.parts()
        except (RedisError, OSError) as error:
            raise self._explain(error) from error

    async def _aparts(self) -> AsyncIterator[Any]:
        try:
            async for part in (await self._async_clients.here()).parts():
                yield part
        except (RedisError, OSError) as error:
            raise self._explain(error) from error

    def _start_listener(self, request: LockRequest) -> bool:
        """False if nobody can listen here, so that a place in the queue is of no use."""
        try:
            self._client.locate(self.keys.lease(request.name))
            self._listener.start(request.name, self._patience_to_listen(request))
            return True
        except NoListener:
            return False
        except (RedisError, OSError) as error:
            raise self._explain(error) from error

    async def _astart_listener(self, request: LockRequest) -> bool:
        try:
            await (await self._async_clients.here()).locate(self.keys.lease(request.name))
            await self._listener.astart(request.name, self._patience_to_listen(request))
            return True
        except NoListener:
            return False
        except (RedisError, OSError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception, kind: type[LockBackendError] = LockBackendError) -> LockBackendError:
        return explain(error, self, self.location.text, kind, in_cluster=self.in_cluster)

    def _patience(self, request: LockRequest) -> float:
        """Seconds for an answer: what a caller who waits has left, if that is less than the timeout."""
        usual: float = self.option["socket_timeout"]
        return usual if request.give_up is None else min(usual, max(SHORTEST, request.give_up - clock()))

    def _patience_to_listen(self, request: LockRequest) -> float:
        left = inf if request.give_up is None else request.give_up - clock()
        return max(self._patience(request), min(self.location.patience, left))

    def _hand_back(self, token: str, key: str) -> None:
        """The lock was handed to a waiter that has left: on to the next one.

        Unless it was taken meanwhile: a message may come late, and another process may have the same inbox (both were
        started from one image of a memory) or have adopted the lease.
        """
        if self.on_orphan:
            self.on_orphan(LockRequest(self.keys.locked_by(key), GRANT_TTL, Holder.here(), token=token, is_offer=True))

    def close(self) -> None:
        self._client.close()
        self._listener.stop()
        self.location.close()


def _may_be_executed(error: BaseException) -> bool:
    """Also what an interrupted thread or a cancelled task sent."""
    return isinstance(error, NoReply) or not isinstance(error, LockBackendError)


def _held_until(requests: Sequence[LockRequest]) -> float:
    """A moment on ``clock()`` at which the store has forgotten them, unless they are renewed."""
    return clock() + max((request.lasts for request in requests), default=0.0)
