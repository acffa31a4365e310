"""Locks on one Redis (6.2 or later) or Valkey server."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from math import inf
from typing import Any, ClassVar, NoReturn

from django.core.checks import CheckMessage
from redis.exceptions import RedisError

from ...exceptions import LockBackendError
from ...journal import QueuedWaiter
from ...runs import LastRun
from ...types import NOT_WAITING, CheckResult, Grant, Holder, LockInfo, LockRequest, Outage, Slot, lock_key
from ...utils.clock import wall_clock
from ...utils.drive import Call, Steps, adrive, drive
from ..base import each_once, first_slots, named
from ..common import selftest
from ..common.attempts import InDoubt
from ..common.by_message import take
from ..common.per_loop import PerLoop
from ..optional import ExchangeBackend, JournalBackend, RunsBackend
from ..twins import GeneratorBackend
from .config import check_numbers, read_credentials
from .diagnostics import waiting_result
from .errors import CLUSTER_BACKEND, explain
from .keys import LEASES, MOST_ROUNDS, OTHERS, QUEUES, RUNS, Keys, Listing, TenantKeys
from .operations import CROWDED, POLLS, Operations
from .pubsub import NoListener
from .replies import Reply
from .runs import Runs
from .scripts import Command
from .topology import Topology, server_topology

logger = logging.getLogger("django_distlock")
new_tuple = tuple.__new__

LONGEST_LOOK_INTERVAL = 8.0  # seconds: a third of the queue_ttl, and LONGEST in release.lua
# In one round trip, which takes a server some 80 ms. It reads them in parts and serves others in between: a PING waits
# for 7 ms then, and for 4 ms beside a thousand, as measured.
RENEWALS = 10_000


class RedisBackend(GeneratorBackend, RunsBackend, JournalBackend, ExchangeBackend):
    """One key per lock: token, state, fencing number and holder in its value, the TTL on the key.

    A grant is an atomic script on the server, as are renewal and release, which compare the token first.
    """

    supports_queue = True
    supports_slots = True
    supports_max_waiters = True
    takes_callable_prefix = True

    options: ClassVar[Mapping[str, Any]] = {
        "socket_timeout": 2.0, "socket_connect_timeout": 2.0, "max_connections": 50,
        "sentinels": None, "service_name": None, "sentinel_kwargs": None, "failover_timeout": 30.0,
        "credential_provider": None,
    }  # fmt: skip
    options_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("cluster", "shards", "address_remap"), f"Take it out; for a Cluster, name {CLUSTER_BACKEND!r} in BACKEND."
    )
    in_cluster: ClassVar[bool] = False
    _listener: Any  # RedisListener, or ClusterListener

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        check_numbers(self)
        self.timing.renewal_batch, self.timing.look_interval_longest = RENEWALS, LONGEST_LOOK_INTERVAL
        timeouts = {key: float(self.option[key]) for key in ("socket_timeout", "socket_connect_timeout")}
        topology = self._topology({**timeouts, **read_credentials(self)})
        self.location = topology.location
        self.keys = TenantKeys(topology.keys) if self.ask_prefix else topology.keys
        self._client, self._async_clients = topology.client, PerLoop(topology.new_async_client)
        self._listener, self._diagnostics, self._breakers = topology.listener, topology.diagnostics, topology.breakers
        self._pausing: set[str] = set()  # tokens of those that poll, while they pause
        self._operations = Operations(
            alias, self.keys, self.location.text, self.setting("KEY_PREFIX"), self.timing, self._explain
        )
        self._beat_runs = Runs(alias, self._operations, self._sent)

    def _topology(self, arguments: Mapping[str, Any]) -> Topology:
        return server_topology(self, arguments, self._hand_back)

    # A lock is acquired and released by one command each. Generators would take longer than all the rest of that.

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        if queue:
            if request.handed and (grant := take(request, self.timing, self._operations.confirm, self._client)):
                return grant
            if not request.inbox:
                drive(self._listen(request), self._client, self._translated)
        command = self._operations.acquire(request, queue, echo=queue and self._will_look(request))
        try:
            reply = self._client.send((command,), request.deadline)
        except BaseException as error:
            self._raise_unanswered(request, error)
        return self._answered(request, reply)

    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        client = self._async_clients.known() or await self._async_clients.make()
        if queue:
            if request.handed and (grant := take(request, self.timing, self._operations.confirm, client)):
                return grant
            if not request.inbox:
                await adrive(self._listen(request), client, self._translated)
        command = self._operations.acquire(request, queue, echo=queue and self._will_look(request))
        try:
            reply = await client.asend((command,), request.deadline)
        except BaseException as error:
            self._raise_unanswered(request, error)
        return self._answered(request, reply)

    def _acquire_all(self, requests: Sequence[LockRequest]) -> Steps[Sequence[Grant] | None]:
        return self._operations.acquire_all(requests)

    def _listen(self, request: LockRequest) -> Steps[None]:
        """Give the request an inbox, before the store knows of it."""
        if (yield from self._can_be_told(request)):
            self._listener.expect(request)
        else:
            request.inbox = POLLS

    def _can_be_told(self, request: LockRequest) -> Steps[bool]:
        """Whether a script may hand it the lock: somebody listens here, and scripts are told so."""
        name, listener = request.name, self._listener
        if listener.is_deaf(name):
            return False
        if not self.is_listening(name):
            try:
                yield Call("locate", (self.keys.lease(request.key),))
                yield Call("start", (name, self._time_to_listen(request)), on=listener)
            except NoListener:
                return False
        if not listener.is_counted(name):
            question = self._operations.ears(request, listener.inbox(name), gives_leases=listener.gives_leases)
            reply = yield Call("send", (question, request.deadline))
            if not reply.is_by_next_owner:
                listener.note_count(name, self._operations.counts_ears(reply))
        return bool(listener.is_counted(name))

    def _will_look(self, request: LockRequest) -> bool:
        """Returns whether it is to send an echo."""
        request.placed_at = -inf  # what is handed to it from now on, it cannot tell from what was handed to it before
        return bool(request.place) and request.inbox != POLLS and bool(self._listener.will_look(request))

    def _raise_unanswered(self, request: LockRequest, error: BaseException) -> NoReturn:
        """The attempt failed, or was interrupted."""
        problem = self._translated(error) if isinstance(error, Exception) else error
        is_known = isinstance(problem, LockBackendError) and not isinstance(problem, InDoubt)
        request.in_doubt = request.in_doubt or not is_known
        try:
            raise problem
        finally:
            del problem, error  # else this frame and the traceback that it is in would keep each other, and a permit

    def _answered(self, request: LockRequest, reply: Reply) -> Grant | LockInfo:
        if reply.in_doubt:
            request.in_doubt = True
        answer = reply.values[0]
        if type(answer) is int and answer > 0:
            if request.slots > 1:
                request.slot = 1
            return new_tuple(Grant, (answer, reply.sent_at, 1))  # which takes a third of what Grant() does
        if type(answer) is list and len(answer) == 2:
            fence, request.slot = answer
            return Grant(fence, reply.sent_at, request.slot)
        if type(answer) is list and len(answer) == 4:
            place, left, value, ears = answer
            if place and request.takes_by_message and not (request.place or request.in_doubt):
                request.placed_at = reply.sent_at
            request.place = place.decode()
            if not place:
                self._listener.forget(request)
                request.inbox = ""
            elif request.inbox == POLLS:
                request.ahead = ears
            elif ears >= 0 and not reply.is_by_next_owner:
                self._listener.looked(request, ears, reply.sent_at)
            return self._operations.busy(request, value, left, is_crowded=ears == CROWDED)
        self._operations.only(reply)
        raise LockBackendError(f"The request for lock {request.name!r} was given back before it was answered.")

    def exchange(self, old: LockRequest, request: LockRequest) -> Grant | LockInfo:
        try:
            reply = self._client.send((self._operations.exchange(old, request),), request.deadline)
        except BaseException as error:
            self._raise_unanswered(request, error)
        if reply.values[0] != 0:
            return self._answered(request, reply)
        request.in_doubt = request.in_doubt or reply.in_doubt
        return self.acquire(request, queue=False)

    def is_listening(self, name: str) -> bool:
        """Most locks are free, so the subscription is made when one turns out to be busy."""
        return bool(self._listener.is_ready)

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        if request.inbox != POLLS:
            self._listener.wait(request, timeout)
            return
        with self._polling(request, timeout) as seconds:
            self.pause(request, seconds)

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        if request.inbox != POLLS:
            await self._listener.await_wake(request, timeout)
            return
        with self._polling(request, timeout) as seconds:
            await self.apause(request, seconds)

    @contextmanager
    def _polling(self, request: LockRequest, timeout: float) -> Iterator[float]:
        """Seconds until its next look: the sooner, the fewer stand before it."""
        timing = self.timing
        self._pausing.add(request.token)
        try:
            busiest = len(self._pausing) / timing.looks_per_second
            by_place = timing.poll_interval_by_place * (request.ahead + 1)
            yield min(timeout, timing.look_interval, max(by_place, busiest))
        finally:
            self._pausing.discard(request.token)

    def succeed(self, successor: LockRequest) -> None:
        if successor.inbox != POLLS:
            self._listener.expect(successor)

    def places(self, queued: Sequence[LockRequest]) -> list[LockRequest]:
        return [request.copy(is_offer=True) for request in queued]

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        commands = self._operations.release(request, cooldown, force)
        try:
            reply = self._client.send(commands, NOT_WAITING, request.ttl)  # then the store has forgotten it
        except Exception as error:
            self._raise_translated(error)
        return self._released(request, reply)

    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        commands = self._operations.release(request, cooldown, force)
        client = self._async_clients.known() or await self._async_clients.make()
        try:
            reply = await client.asend(commands, NOT_WAITING, request.ttl)
        except Exception as error:
            self._raise_translated(error)
        return self._released(request, reply)

    def _released(self, request: LockRequest, reply: Reply) -> bool:
        if request.inbox:
            self._listener.forget(request)
        answer = reply.values[-1]
        if type(answer) is int:
            # "Not the holder" on a repeat: the first attempt, whose reply was lost, did it. Only an unconfirmed lease
            # may have been over before.
            return answer > 0 or (reply.in_doubt and not request.is_unconfirmed)
        raise self._explain(answer, InDoubt if reply.in_doubt else LockBackendError)

    def _renew(self, wanted: Sequence[tuple[LockRequest, float]], timeout: float | None) -> Steps[list[bool | None]]:
        queue_for = 0.0
        if timeout is None:  # afterwards the store has forgotten them, unless they are renewed
            queue_for = max((request.ttl for request, _ in wanted), default=0.0)
        options = {"timeout": timeout, "queue_for": queue_for, "despite_outage": True}
        reply = yield Call("send", (self._operations.renew(wanted),), options)
        return self._operations.renewed(reply)

    def _look(self, names: Sequence[str]) -> Steps[list[list[LockInfo]]]:
        prefix, locks = self.keyed(names)
        groups = self.keys.grouped_safely(locks)
        found, may_have_others = self._operations.infos(groups, (yield Call("send", (self._operations.look(groups),))))
        for lock, leases in (yield from self._look_at_others(may_have_others)).items():
            found[lock] += leases
        return named([found[lock] for lock in locks], names, prefix)

    def _look_at_others(self, locks: Sequence[str]) -> Steps[dict[str, list[LockInfo]]]:
        """The leases in other slots than the first, of locks that are known by their keys."""
        if not locks:
            return {}
        reply = yield Call("send", (self._operations.look_at_others(locks),))
        return self._operations.other_infos(locks, reply)

    def _holders(self, slots: Sequence[Slot]) -> Steps[list[Holder | None]]:
        keys = self._slot_keys(slots)
        firsts = [lock for lock, number in keys if number == 1]
        groups = self.keys.grouped(firsts)
        reply = yield Call("send", (self._operations.holders(groups),))
        found = dict(zip(firsts, self._operations.found_holders(firsts, groups, reply), strict=True))
        others = yield from self._infos_of_others(keys)
        return [
            found[lock] if number == 1 else others[lock, number].holder if (lock, number) in others else None
            for lock, number in keys
        ]

    def _remaining(self, slots: Sequence[Slot]) -> Steps[list[float | None]]:
        keys = self._slot_keys(slots)
        firsts = [lock for lock, number in keys if number == 1]
        reply = yield Call("send", (self._operations.remaining(firsts),))
        found = dict(zip(firsts, self._operations.found_remaining(reply), strict=True))
        others = yield from self._infos_of_others(keys)
        return [
            found[lock] if number == 1 else others[lock, number].remaining if (lock, number) in others else None
            for lock, number in keys
        ]

    def _slot_keys(self, slots: Sequence[Slot]) -> list[tuple[str, int]]:
        """By the key of the lock, and the number."""
        _, locks = self.keyed([name for name, _ in slots])
        return [(lock, number) for lock, (_, number) in zip(locks, slots, strict=True)]

    def _infos_of_others(self, keys: Sequence[tuple[str, int]]) -> Steps[dict[tuple[str, int], LockInfo]]:
        locks = list(dict.fromkeys(lock for lock, number in keys if number > 1))
        found = yield from self._look_at_others(locks)
        return {(lock, info.slot): info for lock, leases in found.items() for info in leases}

    def _count_waiters(self, names: Sequence[str]) -> Steps[list[int | None]]:
        """The processes that wait for each: a process has one place, however many of its threads and tasks wait."""
        _, locks = self.keyed(names)
        return self._operations.counted((yield Call("send", (self._operations.count_waiters(locks),))))

    def _pages(self, prefix: str) -> Iterator[Steps[Iterable[Slot]]]:
        own = self.prefix_now()
        for page in self._listed(self.keys.at(own), (LEASES, OTHERS), prefix):
            yield self._slots_on(page, own)

    def _slots_on(self, page: Steps[dict[str, list[str]]], prefix: str) -> Steps[Iterable[Slot]]:
        found = yield from page
        names = dict.fromkeys(found.get(OTHERS, ()))
        others = yield from self._look_at_others([lock_key(prefix, name) for name in names])
        more = (Slot(name, info.slot) for name, leases in zip(names, others.values(), strict=True) for info in leases)
        return chain(first_slots(found.get(LEASES, ())), more)

    def _listed(self, keys: Keys, kinds: Sequence[str], start: str) -> Iterator[Steps[dict[str, list[str]]]]:
        """Names by kind, page by page."""
        return Listing(keys, kinds, start).pages(self._operations.only)

    def _listed_names(self, prefix: str, kind: str, start: str) -> Iterator[str]:
        pages = self._listed(self.keys.at(prefix), [kind], start)
        return each_once(
            chain.from_iterable(drive(page, self._client, self._translated).get(kind, ()) for page in pages)
        )

    def _diagnose(self) -> Steps[list[CheckResult]]:
        began, nodes, known = wall_clock(), [], None
        for _ in range(MOST_ROUNDS):
            known, further = yield Call("nodes", (known,), {"despite_outage": True})
            nodes += [node for node in further if node not in nodes]
            if not further:
                break
        reply = yield Call("send", (self._diagnostics.questions(nodes),), {"despite_outage": True})
        found = self._diagnostics.results(nodes, reply.values, (began + wall_clock()) / 2)
        with suppress(LockBackendError):  # of which the self-test tells
            request = selftest.new_request(self.shared_prefix, self.terms.ttl)
            found.append(waiting_result(is_told=(yield from self._can_be_told(request))))
        return found

    def waiters(self, names: Sequence[str]) -> list[list[QueuedWaiter] | None]:
        _, locks = self.keyed(names)
        return self._operations.found_waiters(self._sent(*self._operations.waiters(locks)))

    def waited_for(self, prefix: str = "") -> Iterator[str]:
        return self._listed_names(self.prefix_now(), QUEUES, prefix)

    def write_journal(self, entries: Sequence[str]) -> None:
        for value in self._sent(*self._operations.write_journal(entries, self.journal_length)).values:
            self._operations.checked(value)

    def read_journal(self) -> list[str]:
        return self._operations.journal_texts(self._sent(self._operations.read_journal()))

    # The runs of beat

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        return self._beat_runs.claim(name, seen, now, ttl, self.grace, self.runs_ahead)

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        return self._beat_runs.find(names)

    def forget_run(self, name: str) -> bool:
        return self._beat_runs.forget(name)

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        return self._beat_runs.page(self._listed_names(self.shared_prefix, RUNS, ""))

    def _sent(self, *commands: Command) -> Reply:
        def steps() -> Steps[Reply]:
            reply: Reply = yield Call("send", (commands,))
            return reply

        return drive(steps(), self._client, self._translated)

    def outages(self) -> Sequence[Outage]:
        return [outage for breaker in list(self._breakers()) if (outage := breaker.outage())]

    def check_settings(self) -> list[CheckMessage]:
        return self._diagnostics.setting_warnings(self.option["socket_timeout"], f"DISTRIBUTED_LOCKS[{self.alias!r}]")

    @property
    def keyspace(self) -> Hashable:
        found = self._diagnostics.keyspace
        return (found, self.ask_prefix) if self.ask_prefix else found

    def _translated(self, error: Exception) -> Exception:
        match error:
            case NoListener():
                return error
            case InDoubt(__cause__=Exception() as cause):
                return self._explain(cause, InDoubt)
            case RedisError():
                return self._explain(error)
            case OSError():  # of a handler of a signal too, such as TimeoutError, whatever had been executed by then
                return self._explain(error, InDoubt)
        return error

    def _raise_translated(self, error: Exception) -> NoReturn:
        try:
            raise self._translated(error)
        finally:
            del error  # see _raise_unanswered()

    def _explain(self, error: Exception, kind: type[LockBackendError] = LockBackendError) -> LockBackendError:
        explained = explain(error, self, self.location.text, kind, in_cluster=self.in_cluster)
        explained.__cause__ = error
        return explained

    def _time_to_listen(self, request: LockRequest) -> float:
        """Seconds until the subscription must stand."""
        left = request.time_left
        timeout: float = self.option["socket_timeout"]
        return max(min(timeout, max(self.timing.shortest_call, left)), min(self.location.failover_timeout, left))

    def _hand_back(self, token: str, key: str) -> None:
        """The lock was handed to a waiter that has left: on to the next one.

        Unless it was taken meanwhile: a message may come late, and another process may have the same inbox (both were
        started from one image of a memory) or have adopted the lease.
        """
        if self.on_orphan:
            prefix, name = self.keys.locked_by(key)
            ttl = self.timing.grant_ttl
            self.on_orphan(LockRequest(name, ttl, Holder.here(), token=token, is_offer=True, prefix=prefix))

    def close(self) -> None:
        self._client.close()
        for breaker in list(self._breakers()):
            breaker.close()
        self._listener.stop()
        self.location.close()
