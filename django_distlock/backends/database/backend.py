"""Locks in a table of PostgreSQL, MySQL, MariaDB or SQLite, reached by an alias of ``DATABASES``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import ceil, inf
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from django.core.checks import CheckMessage
from django.db import connections

from ...exceptions import InvalidLockName, LockBackendError
from ...models import LONGEST_KEY
from ...types import Grant, Holder, LastRun, LockInfo, LockRequest
from ...utils.clock import clock
from ..base import STEP, RunsBackend
from ..common.state import CLAIMED, HELD, RESTING, Attempt
from ..twins import ThreadedBackend
from .beat import Runs
from .calls import SHORTEST_PATIENCE, Calls
from .config import check_app, read_location, read_prefix, read_timeout, settings_checks
from .connections import Pool, address
from .errors import NoReply, explain
from .notify import Listener, PollBackoff, can_listen
from .operations import Steps, has_returning
from .sql import Statements, Turn, unreadable
from .sqlite import TemporaryFile, is_in_memory, own_file

logger = logging.getLogger("django_distlock")

R = TypeVar("R")


class DatabaseBackend(ThreadedBackend, RunsBackend):
    """One row per lock, changed by one statement per step, by the clock of the database.

    ``LOCATION`` is an alias of ``DATABASES``; by default the one that routers write the rows to. Locks have
    connections of their own, outside the caller's transaction.
    """

    supports_queue = True

    options: ClassVar[Mapping[str, Any]] = {"timeout": 2.0}

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        check_app(self)
        self.prefix = read_prefix(self)
        self._timeout = read_timeout(self)
        self.location, self.vendor = read_location(self)
        self._memory: TemporaryFile | None = None
        self.pool = Pool(self.location, self._timeout, self._file(), alias)
        self._sql = Statements(self.vendor, has_returning=has_returning(self.vendor))
        self._steps = Steps(self.vendor, self._sql, self._timeout)
        self._runs = Runs(self.vendor)
        self._looks: WeakKeyDictionary[LockRequest, PollBackoff] = WeakKeyDictionary()
        self._listener = Listener(self.pool, alias, self.timing) if can_listen(self.location) else None
        if self._listener:
            self.pool.closes_with_it = self._listener.stop
        self._inbox = self._listener.inbox if self._listener else "looks"
        self.calls = calls = Calls(self.pool, self._timeout, self._explain, alias)
        self._run, self._run_repeatedly = calls.run, calls.run_repeatedly

    @property
    def supports_processes(self) -> bool:  # type: ignore[override]
        """Not where the database is in the memory of one."""
        return self._memory is None

    @property
    def supports_hosts(self) -> bool:  # type: ignore[override]
        """Not in a file: SQLite does not lock those on network drives reliably."""
        return self.vendor != "sqlite"

    @property
    def supports_wakeup(self) -> bool:  # type: ignore[override]
        """Only where the database notifies: on PostgreSQL, with psycopg 3 and no pooler in between."""
        return self._listener is not None

    def _file(self) -> str | None:
        """Of SQLite: where the locks are."""
        if self.vendor != "sqlite":
            return None
        name = connections.settings[self.location]["NAME"]
        if is_in_memory(name):
            self._memory = TemporaryFile()
            return self._memory.name
        return own_file(name)

    def _explain(self, error: Exception, kind: type[LockBackendError]) -> LockBackendError:
        return explain(error, self, self.location, self.pool.file, kind)

    def check_settings(self) -> list[CheckMessage]:
        """Django's system checks of this entry; no I/O."""
        return list(settings_checks(self, self.location, self.pool.file))

    @property
    def keyspace(self) -> tuple[Hashable, ...]:
        """Equal for backends that keep the same locks."""
        where = (self.pool.file,) if self.pool.file else address(connections.settings[self.location])
        return ("database", *where, self.prefix)

    # One lock

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        try:
            answer, repeated = self._run_repeatedly(
                partial(self._acquire, request=request, queue=queue), _patience(request)
            )
        except BaseException as error:
            request.in_doubt = request.in_doubt or _may_be_executed(error)
            raise
        request.in_doubt = request.in_doubt or repeated  # what was sent first may still be executed
        return answer

    def _acquire(self, connection: Any, request: LockRequest, queue: bool) -> Grant | LockInfo:
        if queue:
            self._expect(request)
        place, inbox = int(request.place or 0), request.inbox
        attempt = Attempt(request.token, _us(request.ttl), request.holder.to_text(), queue, place, inbox)
        answer, sent_at = self._steps.acquire(connection, self._key(request.name), attempt)
        if answer.granted:
            self._forget(request)
            return Grant(answer.fence, sent_at)
        request.place = f"{answer.place:016}" if answer.place else ""
        if not answer.place:
            self._forget(request)
            request.inbox = ""
        # Those behind the first would only find that it is not their turn.
        told_later = queue and not answer.is_first
        left = inf if told_later else answer.left
        return self._info(request.name, answer.token, answer.state, answer.fence, left, answer.holder)

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        released, repeated = self._run_repeatedly(
            partial(self._release, request=request, cooldown=cooldown, force=force)
        )
        self._forget(request)
        # "Not the holder" on a repeat means that the first attempt, whose reply was lost, did it.
        return released or repeated

    def _release(self, connection: Any, request: LockRequest, cooldown: float, force: bool) -> bool:
        retire = _us(request.retires_for) if request.in_doubt else 0
        return self._steps.release(connection, self._key(request.name), request.token, _us(cooldown), retire, force)

    def is_listening(self, name: str) -> bool:
        """Most locks are free, so a connection that listens is opened when one turns out to be busy."""
        return self._listener is None or self._listener.is_started

    def succeed(self, successor: LockRequest) -> None:
        if self._listener:
            self._listener.expect(successor)

    # Waiting

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        looks = self._begin_to_look(request, timeout)
        while looks.go_on():
            if self._will_ring(request):
                request.event.wait(looks.left)
                return
            if request.event.wait(looks.pause()) or looks.see(self._turn(request)):
                return

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        looks = self._begin_to_look(request, timeout)
        while looks.go_on():
            if self._will_ring(request):
                await request.event.await_set(looks.left)
                return
            if await request.event.await_set(looks.pause()) or looks.see(await self._aturn(request)):
                return

    def _begin_to_look(self, request: LockRequest, timeout: float) -> PollBackoff:
        """Each wait goes on at the pace of the one before."""
        looks = self._looks.setdefault(request, PollBackoff())
        looks.begin(timeout)
        return looks

    def _will_ring(self, request: LockRequest) -> bool:
        """Also for those who stand behind another one of this process and have no place in the store."""
        return not request.place or (self._listener is not None and self._listener.is_ready)

    def _turn(self, request: LockRequest) -> Turn:
        turn = partial(self._sql.turn, name=self._key(request.name), token=request.token)
        return self._run(turn, _patience(request))

    async def _aturn(self, request: LockRequest) -> Turn:
        return await self._in_thread(lambda: self._turn(request), request)

    def _expect(self, request: LockRequest) -> None:
        if self._listener:
            self._listener.expect(request)
        request.inbox = request.inbox or self._inbox

    def _forget(self, request: LockRequest) -> None:
        if self._listener:
            self._listener.forget(request)

    # Many locks

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None) -> list[bool]:
        held: set[str] = set()
        by_ttl = sorted(wanted, key=lambda one: one[1])
        for ttl, leases in groupby(by_ttl, key=lambda one: one[1]):
            for batch in _batches([(self._key(request.name), request.token) for request, _ in leases]):
                held |= self._run(partial(self._sql.renew, leases=batch, ttl=_us(ttl)), timeout)
        return [request.token in held for request, _ in wanted]

    def names(self, prefix: str = "") -> Iterator[str]:
        beginning, last = self._key(prefix), b""
        while found := self._run(partial(self._sql.names, prefix=beginning, after=last, limit=STEP)):
            last = found[-1]
            yield from self._names(found)

    def look(self, names: Sequence[str]) -> list[LockInfo | None]:
        found: dict[bytes, Any] = {}
        for batch in _batches([self._key(name) for name in names]):
            found |= self._run(partial(self._sql.look, names=batch))
        seen = [(name, found.get(self._key(name))) for name in names]
        return [self._info_of(name, about) if about else None for name, about in seen]

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        """How many processes wait for each lock."""
        found: dict[bytes, int | None] = {}
        for batch in _batches([self._key(name) for name in names]):
            found |= self._run(partial(self._sql.waiters, names=batch))
        return [found.get(self._key(name), 0) for name in names]

    def prune(self, older_than_seconds: float) -> int:
        """Delete the rows of locks that nobody has held for so long, and of runs of beat that ran out so long ago.

        Returns how many they were.

        A fencing number never repeats, because the next one of that name is the time of the database; only if
        its clock is set back by more than ``older_than_seconds`` it may.
        """
        if not 0 <= older_than_seconds < inf:
            raise ValueError(f"older_than_seconds is {older_than_seconds!r}; it is a number of seconds, 0 or more.")
        deleted, age = 0, _us(older_than_seconds)
        for pruning in (self._sql.pruning, self._runs.pruning):
            after: bytes | None = b""
            while after is not None:
                page = self._run(partial(pruning.page, after=after, age=age, size=STEP))
                deleted, after = deleted + page.deleted, page.end
        return deleted

    # The runs of beat

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        lengths = {"ttl": _us(ttl), "settle": _us(self.grace), "ahead": _us(self.runs_ahead)}
        claim = partial(self._runs.claim, name=self._key(name), seen=seen, now=now, **lengths, timeout=self._timeout)
        return self._run(claim)

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        found: dict[bytes, LastRun] = {}
        for batch in _batches([self._key(name) for name in names]):
            found |= self._run(partial(self._runs.find, names=batch))
        return [found.get(self._key(name)) for name in names]

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        beginning, last = self._key(""), b""
        while found := self._run(partial(self._runs.page, prefix=beginning, after=last, limit=STEP)):
            last = max(found)
            yield from ((self._name(key), stamp) for key, stamp in found.items() if stamp)

    async def _in_thread(self, call: Callable[[], R], waiter: LockRequest | None = None) -> R:
        return await self.calls.in_thread(call, turn_within=None if waiter is None else _turn_within(waiter))

    def close(self) -> None:
        if self._listener:
            self._listener.stop()
        self.calls.close()
        if self._memory:
            self._memory.remove()

    # Rows

    def _key(self, name: str) -> bytes:
        key = f"{self.prefix}:{name}".encode()
        if len(key) > LONGEST_KEY:
            raise InvalidLockName(f"The name {name!r:.80} takes {len(key)} bytes; the table has room for {LONGEST_KEY}")
        return key

    def _names(self, keys: Iterable[bytes]) -> Iterator[str]:
        for key in keys:
            try:
                yield self._name(key)
            except UnicodeDecodeError:
                logger.error("%s", unreadable(key))

    def _name(self, key: bytes) -> str:
        return key.decode()[len(self.prefix) + 1 :]

    def _info_of(self, name: str, about: Sequence[Any]) -> LockInfo | None:
        """None where the row cannot be read."""
        token, state, fence, left, holder = about
        if state in (HELD, CLAIMED, RESTING) and type(fence) is int and type(left) is int:
            return self._info(name, str(token), state, fence, left, str(holder))
        logger.error("%s", unreadable(self._key(name)))
        return None

    def _info(self, name: str, token: str, state: str, fence: int, left: float, holder: str) -> LockInfo:
        """``left``: microseconds."""
        return LockInfo(
            name,
            self.alias,
            None if state == CLAIMED else _holder(holder),
            fence,
            max(0.0, left / 1e6),
            resting=state == RESTING,
            token=token,
        )


def _holder(text: str) -> Holder | None:
    try:
        return Holder.from_text(text) if text else None
    except ValueError:
        return None


def _may_be_executed(error: BaseException) -> bool:
    """Also what an interrupted thread or a cancelled task sent."""
    return isinstance(error, NoReply) or not isinstance(error, LockBackendError)


def _patience(request: LockRequest) -> float | None:
    """Seconds for an answer to a caller who waits: it may be asked for twice. None: the backend's timeout counts."""
    return None if request.deadline is None else max(SHORTEST_PATIENCE, (request.deadline - clock()) / 2)


def _turn_within(request: LockRequest) -> float:
    """Seconds until a thread is there for the caller: its own, and as long as two answers where it does not wait."""
    return inf if request.deadline is None else max(2 * SHORTEST_PATIENCE, request.deadline - clock())


def _batches(items: Sequence[R]) -> Iterator[Sequence[R]]:
    return (items[start : start + STEP] for start in range(0, len(items), STEP))


def _us(seconds: float) -> int:
    return ceil(seconds * 1_000_000)
