"""The contract between locks and stores. Waiting, renewal, re-entry and signals are written once, above it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import islice, repeat
from typing import Any, ClassVar, Self, TypeVar

from django.core.checks import CheckMessage

from ..exceptions import InvalidLockBackend, LockBackendError
from ..journal import QueuedWaiter
from ..options import OPTION_KEYS, Seconds, Terms, as_seconds
from ..types import CheckResult, Grant, Holder, LockInfo, LockRequest, Outage, Slot, lock_key
from ..utils import other_words
from ..utils.drive import adrive, drive
from ..utils.text import quoted
from .common import selftest
from .common.key_prefix import read_asked_prefix
from .common.timing import Timing
from .optional import JournalBackend

T = TypeVar("T", bound=Hashable)

KEYS = ("BACKEND", "LOCATION", "KEY_PREFIX", *OPTION_KEYS, "LONG_HELD", "RESPONSE_MAX_HOLD", "JOURNAL", "OPTIONS")
HOUR = 3600.0
STEP = 500  # locks per page of a list, and per look
LONGEST_JOURNAL = 100_000  # entries
LONG_HELD = Seconds(
    "after which a lease that is still held is reported, once; None reports none.", above=0.0, or_none=True
)
RESPONSE_MAX_HOLD = Seconds(
    "for which a response that is not finished keeps the lock of its view; None: as long as it takes.",
    above=0.0,
    or_none=True,
)


class LockingBackend(ABC):
    """The part of a store that acquisitions, leases and renewal use."""

    supports_processes: ClassVar[bool] = True  # locks exclude other processes, not only other threads
    supports_hosts: ClassVar[bool] = True  # locks exclude processes of other machines as well
    supports_exclusion: ClassVar[bool] = True
    supports_queue: ClassVar[bool] = False  # waiters are granted the lock in the order they came
    supports_wakeup: bool = True  # waiters are woken; otherwise wait_for_turn() must return several times a second
    supports_slots: ClassVar[bool] = False  # several may hold a lock at once, as many as ``request.slots`` says
    supports_max_waiters: ClassVar[bool] = False  # gives no place if ``request.most_places`` are taken
    supports_failover: ClassVar[bool] = False  # no lock is lost with a server
    supports_transfer: ClassVar[bool] = True  # another process can continue with a lease: detach() and adopt()
    # A process has a session with the store, and its leases end with the session. Until then, no TTL frees them.
    has_sessions: ClassVar[bool] = False

    node_count: int | None = None  # independent servers; a majority of them holds each lock; None: it is one store

    # Call it with a request that must be released because nobody waits for it any more; False if it cannot be released.
    # None for a backend that is not in ``locks``: then the TTL frees the lock.
    on_orphan: Callable[[LockRequest], bool] | None = None

    # A store with sessions calls it with a token and a reason when a lease is over, also if no renewal failed before.
    # It returns at once. None for a backend that is not in ``locks``: then nobody has leases.
    on_loss: Callable[[str, str], object] | None = None

    @abstractmethod
    def acquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        """Try once. Returns a Grant, or the LockInfo of the lease in the way.

        A busy lock keeps a place for the request when ``queue`` is true (if the backend has queues);
        otherwise the attempt leaves nothing behind, and gives up a place the request had. May be
        repeated with the same request: if an earlier attempt was granted without an answer, it is granted again.
        Returns Crowded, and leaves nothing behind, if ``request.most_places`` others have a place. Places of dead
        waiters count only for a short time.
        """

    @abstractmethod
    async def aacquire(self, request: LockRequest, *, queue: bool) -> Grant | LockInfo: ...

    def acquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        """Grant all requests, which are for different locks, in one step of the store, or none.

        None: a lock is busy, or others wait for it, or the store has no such step. Then nothing is left behind.
        May be repeated as ``acquire()``.
        """
        return None

    async def aacquire_all(self, requests: Sequence[LockRequest]) -> Sequence[Grant] | None:
        return None

    def is_listening(self, name: str) -> bool:
        """Whether a place in the queue of that lock costs nothing extra. Otherwise callers first try without one."""
        return True

    def wait_for_turn(self, request: LockRequest, timeout: float) -> None:
        """Return when another attempt may succeed, at the latest after ``timeout`` seconds."""
        self.pause(request, timeout)

    async def await_for_turn(self, request: LockRequest, timeout: float) -> None:
        await self.apause(request, timeout)

    def pause(self, request: LockRequest, timeout: float) -> None:
        """``wait_for_turn()`` without asking the store, which has just failed."""
        request.event.wait(timeout)

    async def apause(self, request: LockRequest, timeout: float) -> None:
        await request.event.await_set(timeout)

    def succeed(self, successor: LockRequest) -> None:  # noqa: B027 - most stores do not know waiters
        """The request inherited the place of one that left. From now on, messages for that place are for it."""

    def places(self, queued: Sequence[LockRequest]) -> list[LockRequest]:
        """The requests to release at exit because they have a place in the queue; one may just be granted its lock."""
        return []

    @abstractmethod
    def release(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        """End the request's lease, give a grant back or leave the queue. Afterwards nothing of the request is left.

        ``cooldown``: seconds for which the lock stays taken. ``force``: an operator frees a lock that was released
        already and is still in its cooldown.
        Returns whether the request held the lock.
        """

    @abstractmethod
    async def arelease(self, request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool: ...

    @abstractmethod
    def renew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None
    ) -> Sequence[bool | None]:
        """Let each lease last that many seconds from now, or longer if it did. False for a lease that is gone.

        None if some of the store's nodes failed and the others cannot tell: ask again.
        ``timeout``: seconds after which an answer would come too late.
        """

    @abstractmethod
    async def arenew(
        self, wanted: Sequence[tuple[LockRequest, float]], *, timeout: float | None = None
    ) -> Sequence[bool | None]: ...


def named(found: list[list[LockInfo]], names: Sequence[str], prefix: str) -> list[list[LockInfo]]:
    """The results by name, from results by the keys of ``keyed()``."""
    if not prefix:
        return found
    seen = zip(found, names, strict=True)
    return [[info._replace(name=name, prefix=prefix) for info in leases] for leases, name in seen]


def names_of(slots: Iterable[Slot]) -> list[str]:
    """The names of the locks, each once."""
    return list(dict.fromkeys(name for name, _ in slots))


def each_once(found: Iterable[T]) -> Iterator[T]:
    """Without what was there before."""
    seen: set[T] = set()
    for one in found:
        if one not in seen:
            seen.add(one)
            yield one


def first_slots(names: Iterable[str]) -> Iterator[Slot]:
    """The first slot of each lock, for very many of them: Slot() takes three times as long."""
    return map(tuple.__new__, repeat(Slot), zip(names, repeat(1), strict=False))


def leases_in(slots: Sequence[Slot], found: Iterable[Iterable[LockInfo]]) -> list[LockInfo | None]:
    """The lease in each slot, from the result of a look at their locks; None if a slot is free."""
    known = {(info.name, info.slot): info for leases in found for info in leases}
    return [known.get(slot) for slot in slots]


class InspectionBackend(ABC):
    """The part that lists and pages use: which leases there are, who holds them, and who waits.

    If KEY_PREFIX is a callable, names are those of the caller's locks.
    """

    takes_callable_prefix: ClassVar[bool] = False  # it identifies locks by ``request.key``, and asks ``prefix_now()``
    template_of: Callable[[str], str] | None = None  # of the lease with that token; "" if another process has it
    ask_prefix: Callable[[], str] | None = None  # KEY_PREFIX, if it is a callable
    shared_prefix = ""  # then: the prefix for keys of no tenant, such as runs of beat

    def prefix_now(self) -> str:
        """The answer of a callable KEY_PREFIX to the caller; "" if it is a text."""
        return self.ask_prefix() if self.ask_prefix else ""

    def keyed(self, names: Sequence[str]) -> tuple[str, Sequence[str]]:
        """That answer, and the keys that requests for the caller's locks of these names have."""
        prefix = self.prefix_now()
        return prefix, [lock_key(prefix, name) for name in names] if prefix else names

    def pinned(self, prefix: str | None = None) -> Self:
        """This backend with a fixed KEY_PREFIX: the answer that the callable gives now, or ``prefix``."""
        if not self.ask_prefix:
            return self
        answer = prefix or self.ask_prefix()
        pinned = copy(self)
        pinned.ask_prefix = lambda: answer
        return pinned

    @abstractmethod
    def slots(self, prefix: str = "") -> Iterator[Slot]:
        """The slots that have a lease now, of locks whose names begin with ``prefix``, in no order.

        A store that grows or shrinks meanwhile may yield one twice; ``list_slots()`` has each once. It does not look at
        the single leases. A lease that comes or goes meanwhile may or may not be included.
        """

    @abstractmethod
    def aslots(self, prefix: str = "") -> AsyncIterator[Slot]: ...

    def list_slots(self, prefix: str = "") -> list[Slot]:
        """``slots()``, all at once, and each once."""
        return list(dict.fromkeys(self.slots(prefix)))

    async def alist_slots(self, prefix: str = "") -> list[Slot]:
        return list(dict.fromkeys([slot async for slot in self.aslots(prefix)]))

    @abstractmethod
    def look(self, names: Sequence[str]) -> list[list[LockInfo]]:
        """The current leases of each lock, in the order of their slots; none if the lock is free."""

    @abstractmethod
    async def alook(self, names: Sequence[str]) -> list[list[LockInfo]]: ...

    def holders(self, slots: Sequence[Slot]) -> list[Holder | None]:
        """The holder of each lease, for very many leases; None if there is no lease, or nobody has taken it yet."""
        return [info.holder if info else None for info in leases_in(slots, self.look(names_of(slots)))]

    async def aholders(self, slots: Sequence[Slot]) -> list[Holder | None]:
        return [info.holder if info else None for info in leases_in(slots, await self.alook(names_of(slots)))]

    def remaining(self, slots: Sequence[Slot]) -> list[float | None]:
        """Seconds that each lease has left, for very many leases; None if there is no lease."""
        return [info.remaining if info else None for info in leases_in(slots, self.look(names_of(slots)))]

    async def aremaining(self, slots: Sequence[Slot]) -> list[float | None]:
        return [info.remaining if info else None for info in leases_in(slots, await self.alook(names_of(slots)))]

    def count_waiters(self, names: Sequence[str]) -> list[int | None]:
        """How many wait in each lock's queue: processes or single waiters, as the store counts; None: not known."""
        return [None] * len(names)

    async def acount_waiters(self, names: Sequence[str]) -> list[int | None]:
        return [None] * len(names)

    # Without twins, because operators ask.

    def waiters(self, names: Sequence[str]) -> list[list[QueuedWaiter] | None]:
        """The waiters in each lock's queue, the first one first; None: not known."""
        return [None] * len(names)

    def waited_for(self, prefix: str = "") -> Iterator[str]:
        """The locks with a queue whose names begin with ``prefix``: each once, in no order."""
        return iter(())

    def held(self, prefix: str = "", *, step: int = STEP) -> Iterator[LockInfo]:
        """The current leases of locks whose names begin with ``prefix``; it looks at ``step`` locks at a time."""
        pinned = self.pinned()
        slots = each_once(pinned.slots(prefix))
        while batch := list(islice(slots, step)):
            yield from map(self._with_template, filter(None, leases_in(batch, pinned.look(names_of(batch)))))

    async def aheld(self, prefix: str = "", *, step: int = STEP) -> AsyncIterator[LockInfo]:
        pinned = self.pinned()
        batch: list[Slot] = []
        seen: set[Slot] = set()
        async for slot in pinned.aslots(prefix):
            if slot in seen:
                continue
            seen.add(slot)
            batch.append(slot)
            if len(batch) == step:
                for info in filter(None, leases_in(batch, await pinned.alook(names_of(batch)))):
                    yield self._with_template(info)
                batch = []
        for info in filter(None, leases_in(batch, await pinned.alook(names_of(batch))) if batch else ()):
            yield self._with_template(info)

    def _with_template(self, info: LockInfo) -> LockInfo:
        template = self.template_of(info.token) if self.template_of else ""
        return info._replace(template=template) if template else info


class MaintenanceBackend(ABC):
    """The part that operators and Django use: settings, checks, pruning, and close."""

    options: ClassVar[Mapping[str, Any]] = {}  # the keywords of OPTIONS with their defaults
    options_elsewhere: ClassVar[Mapping[str, str]] = {}  # keywords that it does not have, and what to use instead

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        self.alias = alias
        self.timing = Timing()
        where = f"DISTRIBUTED_LOCKS[{alias!r}]"
        if unknown := [key for key in settings if key not in KEYS]:
            hint = other_words.KEYS.get(unknown[0]) or f"Known: {', '.join(KEYS)}."
            raise InvalidLockBackend(f"{where} has the unknown key {unknown[0]!r}. {hint}")
        given = settings.get("OPTIONS") or {}
        if not isinstance(given, Mapping):
            raise InvalidLockBackend(f"{where}['OPTIONS'] is {quoted(given)}; it is a dict of keywords.")
        if unknown := [option for option in given if option not in self.options]:
            known = f"{type(self).__name__} knows: {', '.join(sorted(self.options)) or 'none'}."
            if (key := str(unknown[0]).upper()) in KEYS:
                known = f"Write it beside OPTIONS, as the key {key!r}."
            hint = self.options_elsewhere.get(unknown[0], known)
            raise InvalidLockBackend(f"{where}['OPTIONS'] has the unknown option {unknown[0]!r}. {hint}")
        self.settings = settings
        self.journal_length = self._read_journal_length(settings.get("JOURNAL"))
        self.option = {keyword: as_seconds(value) for keyword, value in {**self.options, **given}.items()}
        try:
            self.terms = Terms(**{key.lower(): settings[key] for key in OPTION_KEYS if key in settings})
            self.long_held = LONG_HELD("LONG_HELD", settings.get("LONG_HELD", HOUR))
            self.response_max_hold = RESPONSE_MAX_HOLD("RESPONSE_MAX_HOLD", settings.get("RESPONSE_MAX_HOLD", HOUR))
        except ValueError as error:
            raise InvalidLockBackend(f"{where} is not usable: {error}") from error

    def _read_journal_length(self, given: object) -> int:
        """0: there is no journal."""
        if given is None:
            return 0
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= LONGEST_JOURNAL:
            raise InvalidLockBackend(
                f"{self.setting('JOURNAL')} is {quoted(given)}. It is how many of the last events are kept, 100000 at"
                " most; None or 0: none."
            )
        if given and not isinstance(self, JournalBackend):
            raise InvalidLockBackend(f"{self.setting('JOURNAL')} is set, but {type(self).__name__} keeps no journal.")
        return given

    @abstractmethod
    def check(self) -> list[CheckResult]:
        """What an operator should know about the store; asks it. Raises nothing if it does not answer.

        A store that has a circuit breaker is asked even if that is open.
        """

    @abstractmethod
    async def acheck(self) -> list[CheckResult]: ...

    def outages(self) -> Sequence[Outage]:
        """The servers whose circuit breakers are open in this process; no I/O."""
        return ()

    def check_settings(self) -> list[CheckMessage]:
        """Django's system checks of this entry; no I/O."""
        return []

    def make_missing(self, error: LockBackendError) -> bool:
        """Make what the store lacked when a request failed so, such as its tables. Whether to repeat the request.

        Raises LockBackendError if it cannot be made.
        """
        return False

    def prune(self, older_than_seconds: float) -> int | None:
        """Delete what the store keeps of locks that nobody has held for so long. Returns the number of locks.

        None if the store keeps nothing of free locks.
        """
        return None

    async def aprune(self, older_than_seconds: float) -> int | None:
        return None

    @property
    def keyspace(self) -> Hashable | None:
        """Equal for backends that keep the same locks; None: no other backend can have these locks.

        A tuple that ends with KEY_PREFIX if keys are KEY_PREFIX, a colon and the name: one prefix may contain another.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Close idle connections of threads. Connections of event loops end with their loop."""

    def setting(self, key: str) -> str:
        """The name of a setting of this backend in messages: DISTRIBUTED_LOCKS['default']['LOCATION']."""
        return f"DISTRIBUTED_LOCKS[{self.alias!r}][{key!r}]"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.alias!r}>"


class BaseLockBackend(LockingBackend, InspectionBackend, MaintenanceBackend):
    """One store of locks, named by an alias of the setting ``DISTRIBUTED_LOCKS``.

    One object serves all threads and event loops of a process. Methods with the prefix ``a`` are the
    native twins for asyncio. If the store does not answer, or refuses, a method raises LockBackendError within
    the timeouts of the backend. ``backends.twins`` has two bases that write the twins for a store.
    """

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        prefix, setting = settings.get("KEY_PREFIX"), self.setting("KEY_PREFIX")
        if self.takes_callable_prefix and (asked := read_asked_prefix(prefix, setting)):
            self.ask_prefix, self.shared_prefix = asked, asked.shared
        elif callable(prefix):
            raise InvalidLockBackend(
                f"{setting} is a callable, which {type(self).__name__} does not support; give a text."
            )
        if self.terms.max_waiters and self.supports_exclusion and not self.supports_max_waiters:
            raise InvalidLockBackend(f"{self.setting('MAX_WAITERS')}: {type(self).__name__} counts no waiters.")

    def check(self) -> list[CheckResult]:
        try:
            return drive(selftest.steps(self.shared_prefix, self.terms.ttl), self.pinned(self.shared_prefix))
        except LockBackendError as error:
            return [selftest.failed(error)]

    async def acheck(self) -> list[CheckResult]:
        try:
            return await adrive(selftest.steps(self.shared_prefix, self.terms.ttl), self.pinned(self.shared_prefix))
        except LockBackendError as error:
            return [selftest.failed(error)]
