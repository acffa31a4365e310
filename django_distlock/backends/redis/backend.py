"""Locks on one Redis (6.2 or later) or Valkey server."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from redis.exceptions import RedisError

from ...exceptions import InvalidLockBackend, LockBackendError
from ...findings import Finding
from ...stamps import RunStamp
from ...tickets import Grant, Holder, LockInfo, Ticket, clock, new_token
from ..base import BaseLockBackend
from ..loops import PerLoop
from ..probing import failed
from . import health
from .errors import NoReply, explain, is_wrong_type
from .keys import Keys, pattern, read_prefix
from .leases import read_holder, read_lease, read_remaining
from .listener import Listener
from .location import read_location
from .wire import Answer, AsyncWire, Command, Script, Unanswered, Wire, pack

ACQUIRE, RELEASE, RENEW = Script("acquire"), Script("release"), Script("renew")
CLAIM_RUN = Script("claim_run")

GRANT_TTL = 2.0  # seconds a waiter has to take what it was handed: two looks, because a hint can be lost
QUEUE_TTL = 10.0  # seconds a queue is kept in which nobody looks any more
GONE = -2  # says PTTL
SHORTEST_PATIENCE = 0.5  # seconds that even an attempt without a wait gives the server

HEALTH = Command(pack("INFO")), Command(pack("TIME"))

SCAN_STEP = 1000  # keys the server visits per SCAN: well below a millisecond

logger = logging.getLogger("django_distlock")


class RedisBackend(BaseLockBackend):
    """One key per lock: token, state, fencing number and holder in its value, the TTL on the key.

    A grant is an atomic script on the server, as are renewal and release, which compare the token first.
    """

    supports_queue = True
    supports_runs = True

    options: ClassVar[Mapping[str, Any]] = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0, "max_connections": 50}

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        for option, value in self.option.items():
            whole = option == "max_connections"
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not fits or not 0 < value < float("inf"):
                needed = "a whole number above 0" if whole else "a number of seconds above 0"
                raise InvalidLockBackend(f"{self.setting('OPTIONS')}[{option!r}] is {value!r}; it is {needed}.")
        self.keys = Keys(read_prefix(self))
        timeouts = {key: float(self.option[key]) for key in ("socket_timeout", "socket_connect_timeout")}
        self.location = read_location(
            settings.get("LOCATION", "redis://127.0.0.1:6379/0"), self.setting("LOCATION"), timeouts
        )
        self._new_wire = partial(Wire, self.location, self.option["max_connections"], timeouts["socket_timeout"])
        self._async_wires = PerLoop(partial(AsyncWire, *self._new_wire.args))
        self._wire = self._new_wire()
        self._listener = Listener(self.location, self.keys.inbox(new_token()), self._hand_back, self.alias)

    def acquire(self, ticket: Ticket, *, queue: bool) -> Grant | LockInfo:
        try:
            if queue and not ticket.inbox and not self.is_listening:
                self._start_listener(ticket)
            answer = self._send(self._acquire(ticket, queue), within=self._patience(ticket))
            return self._answered(ticket, answer)
        except BaseException as error:
            ticket.unanswered = ticket.unanswered or _may_be_executed(error)
            raise

    async def aacquire(self, ticket: Ticket, *, queue: bool) -> Grant | LockInfo:
        try:
            if queue and not ticket.inbox and not self.is_listening:
                await self._astart_listener(ticket)
            answer = await self._asend(self._acquire(ticket, queue), within=self._patience(ticket))
            return self._answered(ticket, answer)
        except BaseException as error:
            ticket.unanswered = ticket.unanswered or _may_be_executed(error)
            raise

    @property
    def is_listening(self) -> bool:
        """Most locks are free, so the subscription is made when one turns out to be busy."""
        return self._listener.is_ready

    def succeed(self, heir: Ticket) -> None:
        self._listener.expect(heir)

    def release(self, ticket: Ticket, rest: float = 0.0) -> bool:
        return self._released(ticket, self._send(self._release(ticket, rest)))

    async def arelease(self, ticket: Ticket, rest: float = 0.0) -> bool:
        return self._released(ticket, await self._asend(self._release(ticket, rest)))

    def renew(self, wanted: Sequence[tuple[Ticket, float]], *, within: float | None = None) -> list[bool]:
        return self._renewed(self._send(*self._renewals(wanted), within=within))

    async def arenew(self, wanted: Sequence[tuple[Ticket, float]], *, within: float | None = None) -> list[bool]:
        return self._renewed(await self._asend(*self._renewals(wanted), within=within))

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._infos(names, self._send(*self._looks(names)))

    async def alook(self, names: Sequence[str]) -> list[LockInfo | None]:
        return self._infos(names, await self._asend(*self._looks(names)))

    def holders(self, names: Sequence[str]) -> list[Holder | None]:
        return self._holders(self._send(*self._values_wanted(names)))

    async def aholders(self, names: Sequence[str]) -> list[Holder | None]:
        return self._holders(await self._asend(*self._values_wanted(names)))

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
        return self._names_at(self.keys.lease(""), prefix)

    def _names_at(self, start: str, prefix: str = "") -> Iterator[str]:
        """Of the keys that begin with ``start`` and go on with ``prefix``, what stands behind ``start``."""
        seen: set[str] = set()  # SCAN may tell a key twice
        cursor = b"0"
        while True:
            cursor, keys = self._only(self._send(self._scan(cursor, start + prefix)))
            yield from self._new_names(keys, seen, start)
            if cursor == b"0":
                return

    async def anames(self, prefix: str = "") -> AsyncIterator[str]:
        seen: set[str] = set()
        cursor = b"0"
        while True:
            cursor, keys = self._only(await self._asend(self._scan(cursor, self.keys.lease(prefix))))
            for name in self._new_names(keys, seen, self.keys.lease("")):
                yield name
            if cursor == b"0":
                return

    def claim_run(self, name: str, seen: RunStamp, now: RunStamp, ttl: float) -> RunStamp | None:
        command = CLAIM_RUN.call(
            self.keys.of_run(name),
            repr(seen.at), repr(now.at), now.token, seen.to_text(), now.to_text(), _ms(ttl), _ms(self.runs_settle),
        )  # fmt: skip
        return self._stamp(name, self._only(self._send(command)))

    def find_runs(self, names: Sequence[str]) -> list[RunStamp | None]:
        answer = self._send(*(Command(pack("GET", self.keys.run(name))) for name in names))
        return [self._stamp(name, self._checked(reply)) for name, reply in zip(names, answer.replies, strict=True)]

    def runs(self) -> Iterator[tuple[str, RunStamp]]:
        names = self._names_at(self.keys.run(""))
        while batch := list(islice(names, SCAN_STEP)):
            yield from ((name, stamp) for name, stamp in zip(batch, self.find_runs(batch), strict=True) if stamp)

    def check(self) -> list[Finding]:
        began = time.time()
        try:
            health = self._health(self._send(*HEALTH), began)
        except LockBackendError as error:  # a second question would cost the timeouts once more
            return [failed(error)]
        return super().check() + health

    async def acheck(self) -> list[Finding]:
        began = time.time()
        try:
            health = self._health(await self._asend(*HEALTH), began)
        except LockBackendError as error:
            return [failed(error)]
        return await super().acheck() + health

    def _health(self, answer: Answer, began: float) -> list[Finding]:
        info, server_time = answer.replies
        return health.findings(info, server_time, (began + time.time()) / 2, self.terms, self.location)

    def check_settings(self) -> list[CheckMessage]:
        where = f"DISTRIBUTED_LOCKS[{self.alias!r}]"
        return health.check_settings(self.location, self.terms, self.option["socket_timeout"], where)

    @property
    def keyspace(self) -> Hashable:
        return (*health.server_of(self.location.arguments), self.keys.prefix)

    # Commands

    def _acquire(self, ticket: Ticket, queue: bool) -> Command:
        if queue and not ticket.inbox:
            self._listener.expect(ticket)  # before the store knows of it
        if queue:
            mode = "look" if ticket.place else "again" if ticket.unanswered else "wait"
            if mode == "look":
                self._listener.expect_echo()
        else:
            mode = "last" if ticket.inbox else "try"
        return ACQUIRE.call(
            self.keys.of_lock(ticket.name),
            ticket.token, _ms(ticket.ttl), ticket.holder.to_text(), mode, ticket.place, ticket.inbox,
            _ms(GRANT_TTL), _ms(QUEUE_TTL),
        )  # fmt: skip

    def _release(self, ticket: Ticket, rest: float) -> Command:
        retire = _ms(ticket.ttl) if ticket.unanswered else 0
        return RELEASE.call(
            self.keys.of_lock(ticket.name), ticket.token, _ms(rest), retire, ticket.inbox, _ms(GRANT_TTL)
        )  # fmt: skip

    def _renewals(self, wanted: Sequence[tuple[Ticket, float]]) -> list[Command]:
        return [RENEW.call((self.keys.lease(ticket.name),), ticket.token, _ms(ttl)) for ticket, ttl in wanted]

    def _looks(self, names: Sequence[str]) -> list[Command]:
        keys = map(self.keys.lease, names)
        return [Command(pack(verb, key)) for key in keys for verb in ("GET", "PTTL")]

    def _values_wanted(self, names: Sequence[str]) -> list[Command]:
        """In one command, because each reply of its own costs more than the value. See ``_holders``."""
        return [Command(pack("MGET", *map(self.keys.lease, names)))] if names else []

    def _lefts_wanted(self, names: Sequence[str]) -> list[Command]:
        return [Command(pack("PTTL", self.keys.lease(name))) for name in names]

    def _counts_wanted(self, names: Sequence[str]) -> list[Command]:
        return [Command(pack("ZCARD", self.keys.queue(name))) for name in names]

    def _scan(self, cursor: bytes, start: str) -> Command:
        return Command(pack("SCAN", cursor, "MATCH", pattern(start), "COUNT", SCAN_STEP))

    # Replies

    def _answered(self, ticket: Ticket, answer: Answer) -> Grant | LockInfo:
        ticket.unanswered = ticket.unanswered or answer.repeated
        match self._only(answer):
            case [1, fence]:
                return Grant(int(fence), answer.sent_at)
            case [0, place, left, value, ears]:
                ticket.place = place.decode()
                if not place:
                    self._listener.forget(ticket)
                    ticket.inbox = ""
                elif ears >= 0:
                    self._listener.looked(ears)
                if info := self._info(ticket.name, value, left):
                    return info
                raise self._foreign_value(ticket.name)
        raise LockBackendError(f"The request for lock {ticket.name!r} was given back before it was answered.")

    def _released(self, ticket: Ticket, answer: Answer) -> bool:
        self._listener.forget(ticket)
        # "Not the holder" on a repeat means that the first attempt, whose reply was lost, did it.
        return bool(self._only(answer)) or answer.repeated

    def _renewed(self, answer: Answer) -> list[bool]:
        # Another type of value under one key must not hide what became of the others.
        return [not is_wrong_type(reply) and bool(self._checked(reply)) for reply in answer.replies]

    def _infos(self, names: Sequence[str], answer: Answer) -> list[LockInfo | None]:
        replies = iter(answer.replies)
        return [self._seen(name, value, left) for name, value, left in zip(names, replies, replies, strict=True)]

    def _holders(self, answer: Answer) -> list[Holder | None]:
        return [read_holder(value) for values in answer.replies for value in self._checked(values)]

    def _lefts(self, answer: Answer) -> list[float | None]:
        return [None if self._checked(left) == GONE else read_remaining(left) for left in answer.replies]

    def _counts(self, answer: Answer) -> list[int | None]:
        return [None if is_wrong_type(reply) else self._checked(reply) for reply in answer.replies]

    def _seen(self, name: str, value: Any, left: Any) -> LockInfo | None:
        if value is None or left == GONE:
            return None
        info = None
        if not is_wrong_type(value):
            info = self._info(name, self._checked(value), self._checked(left))
        if info is None:
            logger.warning("%s", self._foreign_value(name))
        return info

    def _info(self, name: str, value: bytes, left: int) -> LockInfo | None:
        return read_lease(self.alias, name, value, left)

    def _stamp(self, name: str, value: bytes | None) -> RunStamp | None:
        if value is None:
            return None
        try:
            return RunStamp.from_text(value)
        except ValueError:
            raise LockBackendError(
                f"The key {self.keys.run(name)!r} at {self.location.text} holds something that is no run of beat."
                f" Delete it, or give the locks a prefix of their own in {self.setting('KEY_PREFIX')}."
            ) from None

    def _new_names(self, keys: Sequence[bytes], seen: set[str], start: str) -> Iterator[str]:
        for key in keys:
            try:
                name = key.decode().removeprefix(start)
            except UnicodeDecodeError:
                continue  # no lock has such a key
            if name not in seen:
                seen.add(name)
                yield name

    # Errors

    def _only(self, answer: Answer) -> Any:
        return self._checked(answer.replies[0])

    def _checked(self, reply: Any) -> Any:
        if isinstance(reply, RedisError):
            raise explain(reply, self) from reply
        return reply

    def _foreign_value(self, name: str) -> LockBackendError:
        return LockBackendError(
            f"The key {self.keys.lease(name)!r} at {self.location.text} holds something that is no lock. Delete it,"
            f" or give the locks a prefix of their own in {self.setting('KEY_PREFIX')}."
        )

    # Connections

    def _send(self, *commands: Command, within: float | None = None) -> Answer:
        try:
            return self._wire.send(*commands, within=within)
        except Unanswered as error:
            raise explain(error.cause, self, NoReply) from error.cause
        except (RedisError, OSError) as error:
            raise explain(error, self) from error

    async def _asend(self, *commands: Command, within: float | None = None) -> Answer:
        try:
            return await (await self._async_wires.here()).send(*commands, within=within)
        except Unanswered as error:
            raise explain(error.cause, self, NoReply) from error.cause
        except (RedisError, OSError) as error:
            raise explain(error, self) from error

    def _start_listener(self, ticket: Ticket) -> None:
        try:
            self._listener.start(self._patience(ticket))
        except (RedisError, OSError) as error:
            raise explain(error, self) from error

    async def _astart_listener(self, ticket: Ticket) -> None:
        try:
            await self._listener.astart(self._patience(ticket))
        except (RedisError, OSError) as error:
            raise explain(error, self) from error

    def _patience(self, ticket: Ticket) -> float:
        """Seconds for an answer: what a caller who waits has left, if that is less than the timeout."""
        usual: float = self.option["socket_timeout"]
        return usual if ticket.give_up is None else min(usual, max(SHORTEST_PATIENCE, ticket.give_up - clock()))

    def _hand_back(self, token: str, key: str) -> None:
        """The lock was handed to a waiter that has left: on to the next one."""
        if self.keeper:
            self.keeper.abandon(Ticket(self.keys.locked_by(key), GRANT_TTL, Holder.here(), token=token))

    def close(self) -> None:
        self._wire.close()
        self._listener.stop()


def _may_be_executed(error: BaseException) -> bool:
    """Also what an interrupted thread or a cancelled task sent."""
    return isinstance(error, NoReply) or not isinstance(error, LockBackendError)


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)
