"""Locks on one Redis (6.2 or later) or Valkey server."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from redis.exceptions import RedisError

from ...exceptions import ClockIsAhead, InvalidLockBackend, LockBackendError, UnreadableRun
from ...types import CheckResult, Grant, Holder, LastRun, LockInfo, LockRequest
from ...utils.clock import clock
from ...utils.text import quoted
from ..base import BaseLockBackend
from ..common.per_loop import PerLoop
from ..common.selftest import failed
from .client import Answer
from .codec import read_holder, read_lease, read_remaining
from .errors import CLUSTER_BACKEND, InDoubt, NoReply, explain, is_wrong_type
from .keys import LEASES, RUNS, SCAN_STEP, Listing
from .pubsub import NoListener
from .scripts import Command, Script, pack
from .timeouts import SHORTEST
from .topology import Topology, server_topology

ACQUIRE, RELEASE, RENEW = Script("acquire"), Script("release"), Script("renew")
CLAIM_RUN = Script("claim_run")

GRANT_TTL = 2.0  # seconds a waiter has to take what it was handed: two looks, because a hint can be lost
QUEUE_TTL = 10.0  # seconds a queue is kept in which nobody looks any more
GONE = -2  # says PTTL

logger = logging.getLogger("django_distlock")


class RedisBackend(BaseLockBackend):
    """One key per lock: token, state, fencing number and holder in its value, the TTL on the key.

    A grant is an atomic script on the server, as are renewal and release, which compare the token first.
    """

    supports_queue = True
    supports_runs = True

    options: ClassVar[Mapping[str, Any]] = {
        "socket_timeout": 2.0, "socket_connect_timeout": 2.0, "max_connections": 50,
        "sentinels": None, "service_name": None, "sentinel_kwargs": None, "failover_timeout": 30.0,
    }  # fmt: skip
    options_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("cluster", "shards", "address_remap"), f"A Cluster has a backend of its own: {CLUSTER_BACKEND!r}."
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

    def release(self, request: LockRequest, rest: float = 0.0) -> bool:
        return self._released(request, self._send(self._release(request, rest), queues_until=_held_until([request])))

    async def arelease(self, request: LockRequest, rest: float = 0.0) -> bool:
        answer = await self._asend(self._release(request, rest), queues_until=_held_until([request]))
        return self._released(request, answer)

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None) -> list[bool | None]:
        queues_until = 0.0 if within else _held_until([request for request, _ in wanted])
        answer = self._send(*self._renewals(wanted), within=within, queues_until=queues_until)
        return self._renewed(answer)

    async def arenew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, within: float | None = None
    ) -> list[bool | None]:
        queues_until = 0.0 if within else _held_until([request for request, _ in wanted])
        answer = await self._asend(*self._renewals(wanted), within=within, queues_until=queues_until)
        return self._renewed(answer)

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._infos(names, self._send(*self._looks(names)))

    async def alook(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._infos(names, await self._asend(*self._looks(names)))

    def holders(self, names: Sequence[str]) -> list[Holder | None]:
        groups = self.keys.grouped(names)
        return self._holders(names, groups, self._send(*self._values_wanted(groups)))

    async def aholders(self, names: Sequence[str]) -> list[Holder | None]:
        groups = self.keys.grouped(names)
        return self._holders(names, groups, await self._asend(*self._values_wanted(groups)))

    def remaining(self, names: Sequence[str]) -> list[float | None]:
        return self._lefts(self._send(*self._lefts_wanted(names)))

    async def aremaining(self, names: Sequence[str]) -> list[float | None]:
        return self._lefts(await self._asend(*self._lefts_wanted(names)))

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        """The processes that wait for each: a process has one place, however many of its threads and tasks wait."""
        return self._counts(self._send(*self._counts_wanted(names)))

    async def acount_waiters(self, names: Sequence[str]) -> list[int | None]:
        return self._counts(await self._asend(*self._counts_wanted(names)))

    def names(self, prefix: str = "") -> Iterator[str]:
        return self._names_of(LEASES, prefix)

    def _names_of(self, kind: str, prefix: str = "") -> Iterator[str]:
        listing = Listing(self.keys, kind, prefix)
        for part in self._parts():
            for command in listing.commands(part):
                yield from listing.new_names(self._only(self._send(command)))

    async def anames(self, prefix: str = "") -> AsyncIterator[str]:
        listing = Listing(self.keys, LEASES, prefix)
        async for part in self._aparts():
            for command in listing.commands(part):
                for name in listing.new_names(self._only(await self._asend(command))):
                    yield name

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        command = CLAIM_RUN.call(
            self.keys.of_run(name),
            repr(seen.at), repr(now.at), now.token, seen.to_text(), now.to_text(), _ms(ttl), _ms(self.grace),
            repr(self.runs_ahead),
        )  # fmt: skip
        reply = self._only(self._send(command))
        if isinstance(reply, int) and reply > 0:
            raise ClockIsAhead(reply / 1000, self.runs_ahead)
        return self._stamp(name, reply)

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        return [stamp if isinstance(stamp, LastRun) else None for stamp in self._find_runs(names)]

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        names = self._names_of(RUNS)
        while batch := list(islice(names, SCAN_STEP)):
            for name, stamp in zip(batch, self._find_runs(batch), strict=True):
                if isinstance(stamp, LastRun):
                    yield name, stamp
                elif stamp:
                    logger.error("%s", stamp)

    def _find_runs(self, names: Sequence[str]) -> Iterator[LastRun | UnreadableRun | None]:
        answer = self._send(*(Command(pack("GET", key), key=key) for key in map(self.keys.run, names)))
        for name, reply in zip(names, answer.replies, strict=True):
            try:
                yield self._stamp(name, reply if is_wrong_type(reply) else self._checked(reply))
            except UnreadableRun as error:
                yield error

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
        return ACQUIRE.call(
            self.keys.of_lock(request.name),
            request.token, _ms(request.lasts), request.holder.to_text(), mode, request.place, request.inbox,
            _ms(GRANT_TTL), _ms(QUEUE_TTL),
        )  # fmt: skip

    def _release(self, request: LockRequest, rest: float) -> Command:
        retire = _ms(request.retires_for) if request.in_doubt else 0
        return RELEASE.call(
            self.keys.of_lock(request.name),
            request.token, _ms(rest), retire, request.inbox, _ms(GRANT_TTL), int(request.is_offer),
        )  # fmt: skip

    def _renewals(self, wanted: Sequence[tuple[LockRequest, float]]) -> list[Command]:
        return [RENEW.call((self.keys.lease(request.name),), request.token, _ms(ttl)) for request, ttl in wanted]

    def _looks(self, names: Sequence[str]) -> list[Command]:
        keys = map(self.keys.lease, names)
        return [Command(pack(verb, key), key=key) for key in keys for verb in ("GET", "PTTL")]

    def _values_wanted(self, groups: Sequence[Sequence[str]]) -> list[Command]:
        """Many in one command: a reply of its own costs more than a value."""
        keys = [[*map(self.keys.lease, names)] for names in groups]
        return [Command(pack("MGET", *together), key=together[0]) for together in keys]

    def _lefts_wanted(self, names: Sequence[str]) -> list[Command]:
        return [Command(pack("PTTL", key), key=key) for key in map(self.keys.lease, names)]

    def _counts_wanted(self, names: Sequence[str]) -> list[Command]:
        return [Command(pack("ZCARD", key), key=key) for key in map(self.keys.queue, names)]

    # Replies

    def _answered(self, request: LockRequest, answer: Answer) -> Grant | LockInfo:
        request.in_doubt = request.in_doubt or answer.repeated
        match self._only(answer):
            case [1, fence]:
                return Grant(int(fence), answer.sent_at)
            case [0, place, left, value, ears]:
                request.place = place.decode()
                if not place:
                    self._listener.forget(request)
                    request.inbox = ""
                elif ears >= 0:
                    self._listener.looked(request, ears, answer.sent_at)
                if info := read_lease(self.alias, request.name, value, left):
                    return info
                raise self._foreign_value(request.name)
        raise LockBackendError(f"The request for lock {request.name!r} was given back before it was answered.")

    def _released(self, request: LockRequest, answer: Answer) -> bool:
        self._listener.forget(request)
        # "Not the holder" on a repeat means that the first attempt, whose reply was lost, did it.
        return bool(self._only(answer)) or answer.repeated

    def _renewed(self, answer: Answer) -> list[bool | None]:
        """A node that refuses must not hide what became of leases elsewhere; raises where that is all there is."""
        renewed = list(map(self._is_renewed, answer.replies))
        if all(still_held is None for still_held in renewed):
            return list(map(self._checked, answer.replies))
        failures = [reply for reply, still_held in zip(answer.replies, renewed, strict=True) if still_held is None]
        for reason in dict.fromkeys(str(self._explain(failure)) for failure in failures):
            logger.warning("Some leases are not renewed now: %s", reason)
        return renewed

    @staticmethod
    def _is_renewed(reply: Any) -> bool | None:
        if is_wrong_type(reply):
            return False
        return None if isinstance(reply, RedisError) else bool(reply)

    def _infos(self, names: Sequence[str], answer: Answer) -> list[LockInfo | None]:
        replies = iter(answer.replies)
        return [self._seen(name, value, left) for name, value, left in zip(names, replies, replies, strict=True)]

    def _holders(self, names: Sequence[str], groups: Sequence[Sequence[str]], answer: Answer) -> list[Holder | None]:
        values: dict[str, bytes | None] = {}
        for group, reply in zip(groups, answer.replies, strict=True):
            values.update(zip(group, self._checked(reply), strict=True))
        return [read_holder(values[name]) for name in names]

    def _lefts(self, answer: Answer) -> list[float | None]:
        return [None if self._checked(left) == GONE else read_remaining(left) for left in answer.replies]

    def _counts(self, answer: Answer) -> list[int | None]:
        return [None if is_wrong_type(reply) else self._checked(reply) for reply in answer.replies]

    def _seen(self, name: str, value: Any, left: Any) -> LockInfo | None:
        if value is None or left == GONE:
            return None
        info = None
        if not is_wrong_type(value):
            info = read_lease(self.alias, name, self._checked(value), self._checked(left))
        if info is None:
            logger.error("%s", self._foreign_value(name))
        return info

    def _stamp(self, name: str, value: Any) -> LastRun | None:
        if value is None:
            return None
        try:
            if isinstance(value, bytes):
                return LastRun.from_text(value)
        except ValueError:
            pass
        raise UnreadableRun(
            f"The key {self.keys.run(name)!r} at {self.location.text}",
            f", or give the locks a prefix of their own in {self.setting('KEY_PREFIX')}",
        )

    # Errors

    def _only(self, answer: Answer) -> Any:
        return self._checked(answer.replies[0])

    def _checked(self, reply: Any) -> Any:
        if isinstance(reply, RedisError):
            raise self._explain(reply) from reply
        return reply

    def _foreign_value(self, name: str) -> LockBackendError:
        error = LockBackendError(
            f"The key {self.keys.lease(name)!r} at {self.location.text} holds something that is no lock. Delete it,"
            f" or give the locks a prefix of their own in {self.setting('KEY_PREFIX')}."
        )
        error.is_final = True
        return error

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


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)
