"""Locks in ZooKeeper: ephemeral nodes of a session, which survives the loss of a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, ClassVar, TypeVar

from django.core.checks import CheckMessage

from ...exceptions import LockBackendError
from ...grants import SessionGrant
from ...runs import LastRun
from ...types import CheckResult, Grant, LockInfo, LockRequest, Outage, Slot, lock_key
from ...utils.clock import clock, wall_clock
from ...utils.drive import Call, Steps, adrive, drive
from ...utils.events import about_event
from ..common.attempts import Attempts
from ..common.key_prefix import SHARED, read_fixed_prefix
from ..optional import RunsBackend
from ..twins import GeneratorBackend
from .client import Client
from .config import OPTIONS, read_config, settings_checks
from .diagnostics import Diagnostics
from .errors import Interrupted, NotConnected, not_answered
from .inspection import LISTED, READ, Subject
from .listing import Listing
from .names import Tree, decode
from .operations import Operations
from .runs import Runs
from .upkeep import Upkeep

T = TypeVar("T")

PAUSE = 0.02  # seconds before an interrupted request is repeated, if there is a connection by then

logger = logging.getLogger("django_distlock")


class ZooKeeperBackend(GeneratorBackend, RunsBackend):
    """The holder of a lock has the oldest of its ephemeral nodes. The ensemble may lose a minority of its servers.

    ``LOCATION`` names the servers, and the path of all nodes: "zk1:2181,zk2:2181,zk3:2181/shop". A process has one
    session with them, and its leases end with it. A killed holder blocks others for the timeout of the session.
    """

    supports_queue = True
    supports_max_waiters = True
    supports_failover = True
    supports_transfer = False
    has_sessions = True
    takes_callable_prefix = True

    options: ClassVar[Mapping[str, Any]] = OPTIONS

    def __init__(self, alias: str, settings: Mapping[str, Any]) -> None:
        super().__init__(alias, settings)
        given = self.shared_prefix if self.ask_prefix else self.settings.get("KEY_PREFIX", SHARED)
        self.prefix = read_fixed_prefix(given, self.setting("KEY_PREFIX"), "ZooKeeper")
        self.config = config = read_config(self)
        self._own_prefix = "" if self.ask_prefix else self.prefix
        self._tree = Tree(config.root)
        self._upkeep = Upkeep(alias, config, self._tree, self.timing, self)
        self._client = self._upkeep.client
        self._async_clients = EachLoop(self._client)  # type: ignore[assignment]
        parts = alias, self._tree, self._own_prefix, self._upkeep
        self._operations, self._listing = Operations(*parts), Listing(*parts)
        self._beat_runs = Runs(self._tree, self._listing)
        self._diagnostics = Diagnostics(self._tree, self.terms, self.setting("OPTIONS"))
        self._has_warned = False  # of a TTL that is longer than the timeout of the session

    def check_settings(self) -> list[CheckMessage]:
        """Django's system checks of this entry; no I/O."""
        return settings_checks(self, self.config)

    @property
    def keyspace(self) -> tuple[Hashable, ...]:
        """Equal for backends that keep the same locks."""
        return ("zookeeper", frozenset(self.config.hosts), self.config.root, self.ask_prefix or self.prefix)

    def outages(self) -> Sequence[Outage]:
        since = self._client.absent_since
        if since is None:
            return ()
        return [Outage(self.config.text, wall_clock() - (clock() - since), self._client.failure)]

    def close(self) -> None:
        """End the session, as soon as no lease depends on it."""
        self._upkeep.close()

    def _diagnose(self) -> Steps[list[CheckResult]]:
        return (yield from self._run(self._diagnostics.steps))

    # Leases and requests that nobody has any more

    def lose(self, token: str, reason: str) -> None:
        if self.on_loss:
            self.on_loss(token, reason)

    def give_up(self, request: LockRequest) -> None:
        """Try to delete its node until it is gone."""
        if self.on_orphan:
            self.on_orphan(request)
            return
        try:
            self.release(request)
        except LockBackendError as error:
            about = about_event("release-given-up", alias=self.alias, name=request.name)
            logger.error("Lock %r could not be released: %s", request.name, error, extra=about)

    # One lock

    def _acquire(self, request: LockRequest, queue: bool) -> Steps[Grant | LockInfo]:
        def steps(deadline: float) -> Steps[Grant | LockInfo]:
            return self._operations.acquire(request, queue, deadline)

        try:
            answer = yield from self._run(steps, request=request, caller_deadline=request.deadline or inf)
        except BaseException as error:
            request.in_doubt = request.in_doubt or not isinstance(error, LockBackendError)
            raise
        if isinstance(answer, SessionGrant) and answer.ttl < request.ttl:
            self._warn_of_ttl(request, answer)
        return answer

    def _release(self, request: LockRequest, cooldown: float, force: bool) -> Steps[bool]:
        tries = iter((False,))

        def steps(deadline: float) -> Steps[bool]:
            # If the node is not there on a repetition, the first attempt, whose answer was lost, has deleted it.
            is_repeated = next(tries, True)
            released = yield from self._operations.release(request, cooldown, force, deadline)
            return released or is_repeated

        released = yield from self._run(steps)
        request.inbox = request.place = ""
        return released

    def succeed(self, successor: LockRequest) -> None:
        self._upkeep.wake_instead(successor)

    def places(self, queued: Sequence[LockRequest]) -> list[LockRequest]:
        return list(queued)

    def _warn_of_ttl(self, request: LockRequest, grant: SessionGrant) -> None:
        if self._has_warned or request.ttl <= request.min_hold:
            return
        self._has_warned = True
        logger.warning(
            "Lock %r has a TTL of %g s, but the servers of %r keep a session for %g s after its process was last heard"
            " of, so its lease has that. This is told once.",
            request.name, request.ttl, self.alias, grant.ttl,
            extra=about_event("ttl-shortened", alias=self.alias, name=request.name, fence=grant.fence),
        )  # fmt: skip

    # Many locks

    def _renew(self, wanted: Sequence[tuple[LockRequest, float]], timeout: float | None) -> Steps[list[bool | None]]:
        return (yield from self._run(lambda deadline: self._operations.renew(wanted, deadline), timeout=timeout))

    def _pages(self, prefix: str) -> Iterator[Steps[Iterable[Slot]]]:
        own = self.prefix_now() or self.prefix
        start = lock_key(own, prefix)
        shards = self._tree.shards
        for begin in range(0, len(shards), LISTED):
            yield self._page(shards[begin : begin + LISTED], own, start)

    def _page(self, paths: Sequence[str], own: str, start: str) -> Steps[list[Slot]]:
        found = yield from self._run(lambda deadline: self._listing.page(paths, deadline))
        return [Slot(key.removeprefix(f"{own}:")) for key in map(decode, found) if key.startswith(start)]

    def _look(self, names: Sequence[str]) -> Steps[list[list[LockInfo]]]:
        subjects = self._subjects(names)
        return (yield from self._run(partial(self._listing.look, subjects))) if subjects else []

    def _count_waiters(self, names: Sequence[str]) -> Steps[list[int | None]]:
        keys = [about.key for about in self._subjects(names)]
        return (yield from self._run(partial(self._listing.count_waiters, keys))) if keys else []

    def _subjects(self, names: Sequence[str]) -> list[Subject]:
        prefix, keys = self.keyed(names)
        return [Subject(name, prefix, lock_key(self._own_prefix, key)) for name, key in zip(names, keys, strict=True)]

    def prune(self, older_than_seconds: float) -> int:
        """Delete the rests of locks and the runs of beat that were over so long ago. Returns how many.

        The process that left a rest deletes it when it is over. A later caller for the lock does the same. So this
        finds only rests of processes that have ended and of locks that nobody requests again.
        """
        return drive(self._prune(older_than_seconds), self._client)

    async def aprune(self, older_than_seconds: float) -> int:
        return await adrive(self._prune(older_than_seconds), self._client)

    def _prune(self, older_than_seconds: float) -> Steps[int]:
        if not 0 <= older_than_seconds < inf:
            raise ValueError(f"older_than_seconds is {older_than_seconds!r}; it is a number of seconds, 0 or more.")
        deleted, age = 0, older_than_seconds
        for shard in self._tree.shards:
            deleted += yield from self._run(partial(self._listing.prune, shard, age))
        for key in (yield from self._run(self._beat_runs.keys)):
            deleted += yield from self._run(partial(self._beat_runs.prune, key, age))
        return deleted

    # The runs of beat

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        def steps(deadline: float) -> Steps[LastRun | None]:
            return self._beat_runs.claim(
                lock_key(self.prefix, name), seen, now, ttl, self.grace, self.runs_ahead, deadline
            )

        return drive(self._run(steps), self._client)

    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        keys = [lock_key(self.prefix, name) for name in names]
        return drive(self._run(lambda deadline: self._beat_runs.find(keys, deadline)), self._client)

    def forget_run(self, name: str) -> bool:
        key = lock_key(self.prefix, name)
        return drive(self._run(lambda deadline: self._beat_runs.forget(key, deadline)), self._client)

    def runs(self) -> Iterator[tuple[str, LastRun]]:
        start = lock_key(self.prefix, "")
        keys = [key for key in drive(self._run(self._beat_runs.keys), self._client) if key.startswith(start)]
        for begin in range(0, len(keys), READ):
            page = partial(self._beat_runs.page, keys[begin : begin + READ])
            for key, stamp in drive(self._run(page), self._client):
                yield key.removeprefix(start), stamp

    # Calls

    def _run(
        self,
        steps: Callable[[float], Steps[T]],
        *,
        timeout: float | None = None,
        request: LockRequest | None = None,
        caller_deadline: float = inf,
    ) -> Steps[T]:
        """Take the steps, given the deadline of the call, and again if they were interrupted.

        ``request``: of an attempt, which then looks for its node. Raises LockBackendError.
        """
        longest = min(self.config.request_timeout, inf if timeout is None else timeout)
        deadline = Attempts(self.timing, longest, longest, caller_deadline, clock()).deadline
        in_doubt = False
        while True:
            try:
                return (yield from steps(deadline))
            except Interrupted as error:
                in_doubt = in_doubt or error.is_sent
                if request:
                    request.in_doubt = request.in_doubt or in_doubt
                if isinstance(error, NotConnected) or clock() + PAUSE >= deadline:
                    raise not_answered(error, self.config.text, in_doubt=in_doubt) from error
            yield Call("pause", (PAUSE,))


class EachLoop:
    """One client, for all event loops."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def get(self) -> Client:
        return self._client
