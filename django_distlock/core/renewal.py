"""Where leases are kept alive.

One thread per backend and process serves the leases of threads and tasks alike: an event loop that is
blocked must not lose its leases, and a store that hangs must not delay the leases of another one.

What is to be done is decided by generators, as in ``core.acquire``: they yield the calls of the store, and a Worker
drives them.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ..exceptions import LockBackendError
from ..journal import Event
from ..signals import lock_held_long, lock_renewed
from ..types import LockRequest, State
from ..utils import fork
from ..utils.clock import clock
from ..utils.drive import Call, Steps, drive
from ..utils.threads import Worker
from .cleaning import Cleaner
from .events import about_lease, about_request
from .known_leases import KnownLeases
from .lease import GONE, TOO_LATE, Lease
from .local_queue import LocalQueue

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend
    from .journal_writer import JournalWriter

logger = logging.getLogger("django_distlock")

BATCH_RANGE = 3  # leases that have up to so many times as long as the first one of a batch are in it
GROUP = 100  # leases that are looked at together

_deadline, _lost_at, _token = attrgetter("_deadline"), attrgetter("_lost_at"), attrgetter("token")


class Group(NamedTuple):
    """Leases to be looked at together, so that it costs little to have many of them in order."""

    moment: float  # on ``clock()``: before it none of them is due or becomes long
    is_soon_from: float  # when they may go with others that are due
    tokens: list[str]  # so that nothing keeps a lease that has ended


class Renewer(KnownLeases):
    """Keeps the leases of one backend.

    A lease is renewed when a third of its TTL has passed. Those that are due soon go with it, many in one round trip.
    """

    def __init__(self, backend: BaseLockBackend, queue: LocalQueue, journal: JournalWriter | None = None) -> None:
        super().__init__()
        self._backend = backend
        self._queue = queue
        self.journal = journal
        self.wake, self.wake_first = queue.wake, queue.wake_first
        self._pid = fork.pid()
        self._order: list[Group] = []  # a heap
        self._ordered = 0  # tokens in it, of leases that have ended, too
        self._waiting: dict[str, Lease] = {}  # taken from the order, because they are to be renewed
        self._unknown: list[tuple[Lease, object]] = []  # with the reasons, to be logged together
        self._lost: list[tuple[Lease, str]] = []
        self._worker = Worker(f"distlock-renewal-{backend.alias}", self.renew, lambda: bool(self._known))
        self._cleaner = Cleaner(backend, queue)

    def register(self, lease: Lease) -> None:
        self._known[lease] = self._new[lease] = None
        wakes_at = self._worker.wakes_at
        if lease._due < wakes_at or lease._long_at < wakes_at:
            self._worker.nudge(min(lease._due, lease._long_at))

    @property
    def is_cleaning(self) -> bool:
        """Whether some request is not released yet."""
        return self._cleaner.is_busy

    def release_in_background(
        self, request: LockRequest, *, cooldown: float = 0.0, on_released: Callable[[], None] | None = None
    ) -> bool:
        """Free whatever the request may have got, in the background. False if it cannot be.

        ``cooldown``: seconds the lock shall stay taken from now. ``on_released`` is called once it is freed.

        The garbage collector may call it, from anywhere. In a forked child it does nothing: its parent takes that back.
        """
        if self._pid != fork.pid():
            return False
        self._cleaner.add(request, cooldown, on_released)
        return True

    def release_all(self) -> None:
        """The process exits: free what nobody works under any more.

        Daemon threads run on until the interpreter stops, which others who do something at the exit may delay by
        seconds. What they hold is renewed until then, and freed by its TTL.
        """
        drive(self._release_all(), self._backend)

    def _release_all(self) -> Steps[None]:
        left = [lease for lease in self.leases() if lease._is_free() or not lease._may_be_in_use]
        wanted = [(lease._request, lease._mark_released()) for lease in left if self.unregister(lease)]
        wanted += self._cleaner.left()
        taken = {request.key: request for request, _ in wanted}  # until they are released
        wanted += [(place, 0.0) for place in self._backend.places(self._queue.queued())]
        in_vain = 0.0  # seconds
        reason: LockBackendError | None = None
        for request, cooldown in wanted:
            began = clock()
            try:
                yield Call("release", (request, cooldown))
                if taken.get(request.key) is request:  # not a waiter's place for it
                    del taken[request.key]
            except LockBackendError as error:
                reason = error
                in_vain += clock() - began
                if in_vain > self._backend.timing.prompt_failure:
                    break
        if taken and reason:
            self._warn_of_left_ones(list(taken.values()), reason)

    def _warn_of_left_ones(self, left: Sequence[LockRequest], reason: LockBackendError) -> None:
        first, alias = left[0], self._backend.alias
        which = f"Lock {first.name!r} is"
        if len(left) > 1:
            which = f"{len(left)} locks of {alias!r}, such as {first.name!r}, are"
        logger.warning(
            "%s not released at exit but by the TTL: %s",
            which, reason, extra=about_request("left-at-exit", alias, first, count=len(left)),
        )  # fmt: skip

    def forget(self) -> None:
        """In a forked child: the leases are the parent's."""
        super().forget()
        self._order_anew()
        self._cleaner.forget()

    def renew(self) -> float | None:
        """What its thread does when it wakes."""
        return drive(self.steps(), self._backend)

    def steps(self) -> Steps[float | None]:
        """Renew what is due. Returns when the next lease is due or becomes long, on ``clock()``."""
        try:
            yield from self._renew_due()
        except BaseException:
            self._order_anew()  # what is neither there nor renewed would be lost unnoticed
            raise
        if not self._known:
            self._order_anew()
        return self._order[0].moment if self._order else None

    def _renew_due(self) -> Steps[None]:
        """Renew what is due, and again what comes due meanwhile, but for what failed, until all had their turn."""
        failed: set[str] = set()
        tried: set[str] = set()
        try:
            self._take_due(warns_if_late=True)
            while not self._waiting.keys() <= tried:
                wanted = [lease for token, lease in self._waiting.items() if token not in failed]
                for batch in _batches(sorted(wanted, key=_deadline), self._backend.timing.renewal_batch):
                    tried.update(map(_token, batch))
                    failed |= yield from self._renew_together(batch)
                now = clock()  # those that ran out while others were tried are told at once
                self._put_back([lease for lease in self._waiting.values() if now >= lease._lost_at])
                self._take_due()
        finally:
            self._put_back(list(self._waiting.values()))
            self._log()

    def _take_due(self, *, warns_if_late: bool = False) -> None:
        """Let wait for their renewal what is due; what nearly is goes with others that wait or are looked at now."""
        if self._ordered > 2 * len(self._known) + GROUP:
            self._order_anew()
        self._take_in()
        while self._unordered:
            # What is taken, and no other lease that has the same token by then: it was adopted meanwhile.
            self._put_back([lease for token in list(self._unordered) if (lease := self._unordered.pop(token, None))])
            self._take_in()
        now, order, known = clock(), self._order, self._known
        later, late, long_ones, is_due = [], [], [], bool(self._waiting)
        while order and (order[0].moment <= now or (is_due and order[0].is_soon_from <= now)):
            group, is_due = heappop(order), True
            self._ordered -= len(group.tokens)
            for token in group.tokens:
                lease = self._by_token.get(token)
                if lease is None or lease not in known:
                    continue
                due, soon = lease._due, lease.ttl / 6
                if now > due + soon and lease._renews:
                    late.append(lease)
                if lease._long_at <= now < lease._lost_at:
                    lease._long_at = inf
                    long_ones.append(lease)
                is_left = lease._renews and not lease._hold_count and lease._is_free()
                if is_left:  # about to be released. If its release was interrupted before it began, it runs out
                    lease._due = min(now + soon, lease._lost_at)
                if lease._renews and not is_left and due - soon <= now < lease._lost_at:
                    self._waiting[token] = lease
                else:
                    later.append(lease)
        self._put_back(later)
        if late and warns_if_late:
            self._warn_of_late_ones(late, now)
        if long_ones:
            self._warn_of_long_ones(long_ones)

    def _order_anew(self) -> None:
        """Without those that have ended."""
        self._order.clear()
        self._waiting.clear()
        self._ordered = 0
        self._take_out_ended()
        self._unordered.update(self._by_token)

    def _put_back(self, leases: Sequence[Lease]) -> None:
        """Into the order, but for those that are over."""
        now, known, waiting = clock(), self._known, self._waiting
        for start in range(0, len(leases), GROUP):
            tokens, moment, soon = [], inf, 0.0
            for lease in leases[start : start + GROUP]:
                token, due = lease.token, lease._due
                waiting.pop(token, None)
                if lease not in known:
                    continue
                if now >= lease._lost_at:
                    self._mark_lost(lease, TOO_LATE if lease._renews else "its TTL ran out")
                    continue
                tokens.append(token)
                if due < moment or lease._long_at < moment:
                    moment, soon = min(due, lease._long_at), lease.ttl / 6
            if tokens:
                heappush(self._order, Group(moment, moment - soon, tokens))
                self._ordered += len(tokens)

    def _renew_together(self, leases: Sequence[Lease]) -> Steps[set[str]]:
        """In one round trip. Returns the tokens of those that are not renewed, which wait on."""
        now = clock()
        live = [lease for lease in leases if now < lease._lost_at and lease in self._known]
        failed: set[str] = set()
        if live:
            ttls = [lease._renewal_ttl(now) for lease in live]
            try:
                # A third of what the shortest lease has left, so that there is time for another attempt.
                timeout = (_end_of(live, now) - now) / 3
                wanted = [(lease._request, ttl) for lease, ttl in zip(live, ttls, strict=True)]
                renewed = yield Call("renew", (wanted,), {"timeout": timeout})
            except LockBackendError as error:
                for lease in live:
                    if lease in self._known:
                        self._mark_unknown(lease, error)
                return {lease.token for lease in live}
            if (took := clock() - now) > timeout / 2:
                self._warn_if_slow(took, live)
            failed = self._take_answers(live, ttls, renewed, now)
        self._put_back([lease for lease in leases if lease.token not in failed] if failed else leases)
        return failed

    def _take_answers(
        self, leases: Sequence[Lease], ttls: Sequence[float], renewed: Sequence[bool | None], sent_at: float
    ) -> set[str]:
        failed = set()
        for lease, ttl, still_held in zip(leases, ttls, renewed, strict=True):
            if lease not in self._known:
                continue  # released or detached meanwhile
            if still_held is None:
                self._mark_unknown(lease, "too few nodes of the store tell that it stands")
                failed.add(lease.token)
                continue
            if not still_held:
                if self._mark_lost(lease, GONE) and lease._request.in_doubt:
                    self.release_in_background(lease._request)  # else a late command of it could take the lock
                continue
            if clock() >= lease._lost_at:
                if self._mark_lost(lease, TOO_LATE):
                    # What was told as lost must not block others for a TTL.
                    self.release_in_background(lease._request, cooldown=lease._cooldown)
                continue
            is_last = ttl < lease.ttl
            if is_last:
                lease._renews = False
            lease._extend(sent_at, ttl)
            if lock_renewed.receivers:  # of very many leases
                lease._send_in_background(lock_renewed)
            if is_last:
                lease._note(Event.BOUND_REACHED, lease._bound)
                logger.warning(
                    "Lock %r reaches %s and is no longer renewed; it is lost in %.1f s. Held by %s.",
                    lease.name, lease._bound, lease.remaining, lease.holder, extra=about_lease("bound-reached", lease),
                )  # fmt: skip
        return failed

    def _mark_unknown(self, lease: Lease, reason: object) -> None:
        if lease.state is State.HELD:
            self._unknown.append((lease, reason))
        lease._mark_unknown(clock() + min(self._backend.timing.retry_delay, lease.ttl / 6))

    def _mark_lost(self, lease: Lease, reason: str) -> bool:
        """False if somebody else ended it before."""
        if not self.unregister(lease):
            return False
        self._lost.append((lease, reason))
        lease._mark_lost(reason, log=False)
        return True

    def _log(self) -> None:
        """A line for all: where a store is away, there may be thousands of leases."""
        unknown, lost = self._unknown.copy(), self._lost.copy()
        self._unknown.clear()
        self._lost.clear()
        if unknown:
            lease, reason = min(unknown, key=lambda told: told[0]._deadline)
            which = f"lock {lease.name!r}" if len(unknown) == 1 else f"{len(unknown)} locks of {lease.using!r}"
            first = "it" if len(unknown) == 1 else f"the first of them, {lease.name!r},"
            logger.warning(
                "Renewal of %s failed; %s is lost in %.1f s unless the store answers before: %s",
                which, first, lease.remaining, reason,
                extra=about_lease("renewal-failed", lease, count=len(unknown)),
            )  # fmt: skip
        if lost:
            lease, reason = max(lost, key=lambda told: told[0]._held_for)
            if len(lost) == 1:
                lease._log_loss(reason)
                return
            logger.error(
                "%d locks of %r were lost. The one that was held longest, %r, was lost: %s. Held by %s.",
                len(lost), lease.using, lease.name, reason, lease.holder,
                extra=about_lease("lost", lease, reason=reason, count=len(lost)),
            )  # fmt: skip

    def _warn_of_late_ones(self, late: Sequence[Lease], now: float) -> None:
        """Renewal that began late is a process that was stopped, or whose threads do not get to run."""
        worst = max(late, key=lambda lease: now - lease._due)
        logger.warning(
            "Renewal of %d lock(s) of %r begins late, that of %r by %.1f s of its TTL of %g s: this process was"
            " stopped, or its threads get no time to run.",
            len(late), self._backend.alias, worst.name, now - worst._due, worst.ttl,
            extra=about_lease("renewal-late", worst, count=len(late)),
        )  # fmt: skip

    def _warn_of_long_ones(self, long_ones: Sequence[Lease]) -> None:
        longest = max(long_ones, key=lambda lease: lease._held_for)
        others = f" and {len(long_ones) - 1} more are" if len(long_ones) > 1 else " is"
        logger.warning(
            "Lock %r%s held for longer than the LONG_HELD of %r, %g s: for %.0f s now, by %s. A holder that hangs"
            " keeps it until its process ends or it is released by force; max_hold= sets a bound.",
            longest.name, others, self._backend.alias, self._backend.long_held, longest._held_for, longest.holder,
            extra=about_lease("held-long", longest, count=len(long_ones)),
        )  # fmt: skip
        for lease in long_ones:
            lease._send_in_background(lock_held_long, held=lease._held_for)

    def _warn_if_slow(self, took: float, leases: Sequence[Lease]) -> None:
        shortest = min(leases, key=attrgetter("ttl"))
        if took > shortest.ttl / 6:
            logger.warning(
                "The store of %r took %.1f s to renew %d lock(s), much of the TTL of %g s of %r.",
                self._backend.alias, took, len(leases), shortest.ttl, shortest.name,
                extra=about_lease("renewal-slow", shortest, count=len(leases)),
            )  # fmt: skip


def mark_lost(lease: Lease, reason: str) -> None:
    """The caller knows that the store has the lease no more: tell its holder."""
    if lease._renewer.unregister(lease):
        lease._mark_lost(reason)


def _end_of(leases: Sequence[Lease], now: float) -> float:
    """When the first of them ends, as its holder believes; or, if that is over for one, when the first is lost."""
    first: float = min(map(_deadline, leases))
    if first <= now:
        first = min(map(_lost_at, leases))
    return first


def _batches(leases: Sequence[Lease], most: int) -> Iterator[Sequence[Lease]]:
    """Of leases in the order of their ends: the hurried ones, and the first of the others.

    Apart, because the store has no longer for an answer than the most hurried lease of a batch allows: leases with a
    short TTL, for which it is too slow, must not let those with a long one run out.
    """
    now = clock()
    longest = now + BATCH_RANGE * max(0.0, leases[0]._deadline - now)
    hurried = bisect_right(leases, longest, key=_deadline)
    yield leases[:hurried][:most]
    if others := leases[hurried:][:most]:
        yield others
