"""Locks in a table of PostgreSQL, MySQL, MariaDB or SQLite, reached by an alias of ``DATABASES``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from django.core.checks import CheckMessage
from django.db import connections

from ...exceptions import LockBackendError
from ...journal import QueuedWaiter
from ...runs import LastRun
from ...types import Crowded, Grant, LockInfo, LockRequest, Slot
from ...utils.clock import wall_clock
from ..base import STEP, named
from ..common.attempts import InDoubt
from ..common.by_message import take
from ..common.key_prefix import SHARED, read_fixed_prefix
from ..common.state import DIGITS, Attempt, Row, StoredLease, microseconds
from ..optional import ExchangeBackend, JournalBackend, RunsBackend
from ..twins import ThreadedBackend
from .app import check_app
from .calls import Calls
from .config import read_location, read_timeout, settings_checks
from .connections import Pool
from .engines import address
from .errors import explain
from .fast_path import has_returning
from .journal import Journal
from .notify import PostgresListener, can_listen
from .operations import Operations
from .polling import PollBackoff
from .renewal import Renewal
from .row_keys import name_in, readable_name_in, row_key
from .runs import Runs
from .sql import QueuePosition, Statements
from .sqlite import TemporaryFile, is_in_memory, own_file

R = TypeVar("R")

NO_INBOX = "polls"  # of a waiter that gets no notifications; the row has as much room for each inbox


class DatabaseBackend(ThreadedBackend, RunsBackend, JournalBackend, ExchangeBackend):
    """One row per lock, changed by one statement or by compare-and-swap, on the clock of the database.

    ``LOCATION`` is an alias of ``DATABASES``; by default the one to which routers write the rows. Locks have separate
    connections, outside the caller's transaction.
    """

    supports_queue = True
    supports_slots = True
    supports_max_waiters = True
    takes_callable_prefix = True
    batch_size = STEP  # rows of one statement

    options: ClassVar[Mapping[str, Any]] = {"timeout": 2.0}

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        check_app()
        given = self.shared_prefix if self.ask_prefix else self.settings.get("KEY_PREFIX", SHARED)
        self.prefix = read_fixed_prefix(given, self.setting("KEY_PREFIX"), "the table")
        self._timeout = read_timeout(self)
        self.location, self.vendor = read_location(self)
        self._temporary_file: TemporaryFile | None = None
        self.pool = Pool(self.location, self._timeout, self._file(), alias, self.timing)
        self._sql = Statements(self.vendor, self.timing, has_returning=has_returning(self.vendor))
        self._operations = Operations(self.vendor, self._sql, self._timeout, self.timing)
        self._beat_runs = Runs(self.vendor, self._timeout, self.timing)
        self._journal = Journal(self.prefix.encode(), self.journal_length)
        self._backoffs: WeakKeyDictionary[LockRequest, PollBackoff] = WeakKeyDictionary()
        self._listener = PostgresListener(self.pool, alias, self.timing) if can_listen(self.location) else None
        if self._listener:
            self.pool.on_close = self._listener.stop
        self._inbox = self._listener.inbox if self._listener else NO_INBOX
        self.calls = calls = Calls(self.pool, self._timeout, self._explain, alias)
        self._run, self._run_or_repeat = calls.run, calls.run_or_repeat
        self._renewal = Renewal(alias, calls, self._sql, self._operations, self._row_of, self._batches)

    @property
    def supports_processes(self) -> bool:  # type: ignore[override]
        """False if the database is in the memory of one process."""
        return self._temporary_file is None

    @property
    def supports_hosts(self) -> bool:  # type: ignore[override]
        """False for a file, because SQLite does not lock files on network drives reliably."""
        return self.vendor != "sqlite"

    @property
    def supports_wakeup(self) -> bool:  # type: ignore[override]
        """True if the database notifies: PostgreSQL, with psycopg 3 and no pooler in between."""
        return self._listener is not None

    def _file(self) -> str | None:
        """The file of SQLite with the locks; None for other databases."""
        if self.vendor != "sqlite":
            return None
        name = connections.settings[self.location]["NAME"]
        if is_in_memory(name):
            self._temporary_file = TemporaryFile()
            return self._temporary_file.name
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
        return ("database", *where, self.ask_prefix or self.prefix)

    # One lock

    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        if queue:
            if request.handed and (grant := take(request, self.timing, self._confirm)):
                self._forget(request)
                return grant
            request.placed_at = -inf
        answer = self._attempted(partial(self._acquire, request=request, queue=queue), (request,))
        if request.in_doubt:
            request.placed_at = -inf
        return answer

    def _confirm(self, request: LockRequest) -> bool:
        """Post the statement that confirms what was handed to the request. False: it was not sent."""
        return self.pool.post(*self._operations.confirmation(self._row_of(request), Attempt.of(request)))

    def exchange(self, old: LockRequest, request: LockRequest) -> Grant | LockInfo:
        return self._attempted(partial(self._acquire, request=request, queue=False, old=old), (request,))

    def acquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        attempts = [(self._row_of(request), Attempt.of(request)) for request in requests]
        answer = self._attempted(partial(self._operations.acquire_all, attempts=attempts), requests)
        if answer is None:
            return None
        leases, sent_at = answer
        for request, lease in zip(requests, leases, strict=True):
            request.slot = lease.slot
        return [Grant(lease.fence, sent_at, lease.slot) for lease in leases]

    def _attempted(self, work: Callable[[Any], R], requests: Sequence[LockRequest]) -> R:
        """The result of the work. Afterwards each request says whether it is in doubt, also after an error."""
        in_doubt = True
        try:
            answer, in_doubt = self._run_or_repeat(work, self._call_timeout(requests[0]))  # the first may still come
            return answer
        except BaseException as error:
            in_doubt = _is_in_doubt(error)
            raise
        finally:
            for request in requests:
                request.in_doubt = request.in_doubt or in_doubt

    def _acquire(
        self, connection: Any, request: LockRequest, queue: bool, old: LockRequest | None = None
    ) -> Grant | LockInfo:
        if queue:
            self._expect(request)
        name, attempt = self._row_of(request), Attempt.of(request, queue)
        if old:
            result, sent_at = self._operations.exchange(connection, name, old, attempt)
        else:
            result, sent_at = self._operations.acquire(connection, name, attempt)
        if result.granted:
            self._forget(request)
            request.slot = result.slot
            return Grant(result.fence, sent_at, result.slot)
        if result.place and request.takes_by_message and not request.place:
            request.placed_at = sent_at
        request.place = f"{result.place:0{DIGITS}}" if result.place else ""
        if not result.place:
            self._forget(request)
            request.inbox = ""
        # Only the first in the queue needs to know when the lease ends.
        remaining = result.remaining if result.is_first or not result.place else inf
        lease = StoredLease(result.slot, result.token, result.state, result.fence, 0, result.holder)
        info = lease.info(request.name, self.alias, remaining, request.prefix)
        return Crowded(*info) if result.is_crowded else info

    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        release = partial(self._release, request=request, cooldown=cooldown, force=force)
        # A crash may have brought the lease back, while a waiter that was told of its end believes in its own.
        rest = max(cooldown, self.timing.grant_ttl) if self._listener else cooldown
        release_again = partial(release, cooldown=rest)
        # Before the call, because whatever ends it without an answer leaves it in doubt.
        was_in_doubt, request.is_release_in_doubt = request.is_release_in_doubt, True
        try:
            released, is_repeated = self._run_or_repeat(release_again if was_in_doubt else release, again=release_again)
        except LockBackendError as error:
            request.is_release_in_doubt = was_in_doubt or _is_in_doubt(error)
            raise
        request.is_release_in_doubt = was_in_doubt
        is_repeated = is_repeated or was_in_doubt
        self._forget(request)
        # "Not the holder" on a repeat means that the first attempt, whose reply was lost, has released it. Only an
        # unconfirmed lease may have been over before.
        return released or (is_repeated and not request.is_unconfirmed)

    def _release(self, connection: Any, request: LockRequest, cooldown: float, force: bool) -> bool:
        retire = microseconds(request.retires_for) if request.in_doubt else 0
        by_message = self._listener is not None and request.ttl > 2 * self.timing.grant_ttl
        return self._operations.release(
            connection, self._row_of(request), request.token, microseconds(cooldown), retire, force, by_message
        )

    def is_listening(self, name: str) -> bool:
        """Whether the listener runs. It starts when a lock is busy, because most locks are free."""
        return self._listener is None or self._listener.is_started

    def succeed(self, successor: LockRequest) -> None:
        if self._listener:
            self._listener.expect(successor)

    # Waiting

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        backoff = self._backoff_of(request, timeout)
        while backoff.remaining:
            if not request.place:  # another request of this process stands before it, and wakes it
                request.event.wait(backoff.remaining)
                return
            if self._listener and self._listener.is_ready:
                self._listener.wait(request, backoff.remaining)
                return
            if request.event.wait(backoff.next_pause()):
                return
            position = self._position(request)
            backoff.update(position)
            if position.is_turn:
                return

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        backoff = self._backoff_of(request, timeout)
        while backoff.remaining:
            if not request.place:
                await request.event.await_set(backoff.remaining)
                return
            if self._listener and self._listener.is_ready:
                await self._listener.await_wake(request, backoff.remaining)
                return
            if await request.event.await_set(backoff.next_pause()):
                return
            position = await self._in_thread(lambda: self._position(request), request)
            backoff.update(position)
            if position.is_turn:
                return

    def _backoff_of(self, request: LockRequest, timeout: float) -> PollBackoff:
        """Each wait of a request continues with the pauses of the wait before it."""
        new = PollBackoff(self.timing, is_file=self.pool.file is not None)
        backoff = self._backoffs.setdefault(request, new)
        backoff.begin(timeout)
        return backoff

    def _position(self, request: LockRequest) -> QueuePosition:
        name, token, slots = self._row_of(request), request.token, request.slots
        position = partial(self._sql.position, name=name, token=token, slots=slots)
        return self._run(position, self._call_timeout(request))

    def _expect(self, request: LockRequest) -> None:
        if self._listener:
            self._listener.expect(request)
        request.inbox = request.inbox or self._inbox

    def _forget(self, request: LockRequest) -> None:
        if self._listener:
            self._listener.forget(request)

    # Many locks

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None) -> list[bool | None]:
        return self._renewal.renew(wanted, timeout)

    def slots(self, prefix: str = "") -> Iterator[Slot]:
        own = self.prefix_now() or self.prefix
        begin, last = row_key(own, prefix), b""
        while found := self._run(partial(self._sql.slots, prefix=begin, after=last, limit=self.batch_size)):
            last = found[-1][0]
            for key, numbers in found:
                if (name := readable_name_in(key, own)) is not None:
                    yield from (Slot(name, number) for number in numbers)

    def look(self, names: Sequence[str]) -> list[list[LockInfo]]:
        prefix = self.prefix_now()
        keys = self._row_keys(prefix, names)
        found: dict[bytes, Row] = {}
        for batch in self._batches(keys):
            found |= self._run(partial(self._sql.look, names=batch))
        rows = [(name, found.get(key)) for name, key in zip(names, keys, strict=True)]
        return named([row.infos(name, self.alias) if row else [] for name, row in rows], names, prefix)

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        """How many processes wait for each lock."""
        found: dict[bytes, int | None] = {}
        keys = self._row_keys(self.prefix_now(), names)
        for batch in self._batches(keys):
            found |= self._run(partial(self._sql.count_waiters, names=batch))
        return [found.get(key, 0) for key in keys]

    def waiters(self, names: Sequence[str]) -> list[list[QueuedWaiter] | None]:
        found: dict[bytes, list[QueuedWaiter] | None] = {}
        keys = self._row_keys(self.prefix_now(), names)
        for batch in self._batches(keys):
            found |= self._run(partial(self._sql.waiters, names=batch))
        return [found.get(key, []) for key in keys]

    def waited_for(self, prefix: str = "") -> Iterator[str]:
        own = self.prefix_now() or self.prefix
        begin, last = row_key(own, prefix), b""
        while found := self._run(partial(self._sql.waited_for, prefix=begin, after=last, limit=self.batch_size)):
            last = found[-1]
            yield from filter(None, (readable_name_in(key, own) for key in found))

    def write_journal(self, entries: Sequence[str]) -> None:
        for batch in self._batches(entries):
            self._run(partial(self._journal.write, entries=batch))

    def read_journal(self) -> list[str]:
        return self._run(self._journal.read)

    def make_missing(self, error: LockBackendError) -> bool:
        """Make missing tables and columns, by the migrations of the app."""
        from .tables import make_missing_tables  # imports all that migrations need

        return make_missing_tables(self.location, error)

    def prune(self, older_than_seconds: float) -> int:
        """Delete the rows of locks that nobody has held for so long, and of runs of beat that expired so long ago.

        Also those of journals to which nobody has written for so long, of any KEY_PREFIX. Returns how many.

        The next fencing number of such a name is the time of the database: numbers can repeat only if its clock is set
        back by more than ``older_than_seconds``.
        """
        if not 0 <= older_than_seconds < inf:
            raise ValueError(f"older_than_seconds is {older_than_seconds!r}; it is a number of seconds, 0 or more.")
        deleted, age = 0, microseconds(older_than_seconds)
        for pruning in (self._sql.pruning, self._beat_runs.pruning):
            after: bytes | None = b""
            while after is not None:
                page = self._run(partial(pruning.page, after=after, age=age, size=self.batch_size))
                deleted, after = deleted + page.deleted, page.end
        for journal, last in self._run(partial(self._journal.left, before=wall_clock() - older_than_seconds)):
            delete = partial(self._journal.delete, journal=journal, last=last, most=self.batch_size)
            while count := self._run(delete):
                deleted += count
        return deleted

    # The runs of beat

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        lengths = {
            "ttl": microseconds(ttl),
            "grace": microseconds(self.grace),
            "max_ahead": microseconds(self.runs_ahead),
        }
        return self._run(partial(self._beat_runs.claim, name=row_key(self.prefix, name), seen=seen, now=now, **lengths))

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        found: dict[bytes, LastRun] = {}
        keys = [row_key(self.prefix, name) for name in names]
        for batch in self._batches(keys):
            found |= self._run(partial(self._beat_runs.find, names=batch))
        return [found.get(key) for key in keys]

    def forget_run(self, name: str) -> bool:
        return self._run(partial(self._beat_runs.forget, name=row_key(self.prefix, name)))

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        begin, last = row_key(self.prefix, ""), b""
        while found := self._run(partial(self._beat_runs.page, prefix=begin, after=last, limit=self.batch_size)):
            last = max(found)
            yield from ((name_in(key, self.prefix), stamp) for key, stamp in found.items() if stamp)

    async def _in_thread(self, call: Callable[[], R], waiter: LockRequest | None = None) -> R:
        return await self.calls.in_thread(call, thread_timeout=None if waiter is None else self._thread_timeout(waiter))

    def _call_timeout(self, request: LockRequest) -> float:
        """Seconds for an answer to an attempt; there may be two. The backend's timeout counts if it is shorter."""
        return max(self.timing.shortest_call, request.time_left / 2)

    def _thread_timeout(self, request: LockRequest) -> float:
        """Seconds to wait for a free thread for an attempt; the time of two answers if its caller does not wait."""
        return max(2 * self.timing.shortest_call, request.time_left)

    def close(self) -> None:
        if self._listener:
            self._listener.stop()
        self.calls.close()
        if self._temporary_file:
            self._temporary_file.remove()

    # Rows

    def _batches(self, items: Sequence[R]) -> Iterator[Sequence[R]]:
        return (items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size))

    def _row_of(self, request: LockRequest) -> bytes:
        return row_key(request.prefix or self.prefix, request.name)

    def _row_keys(self, prefix: str, names: Sequence[str]) -> list[bytes]:
        """``prefix``: the answer of a callable KEY_PREFIX, or ""."""
        return [row_key(prefix or self.prefix, name) for name in names]


def _is_in_doubt(error: BaseException) -> bool:
    """Whether the attempt may be executed; also if its thread was interrupted or its task cancelled."""
    return isinstance(error, InDoubt) or not isinstance(error, LockBackendError)
