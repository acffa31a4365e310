"""A lease: what its holder may believe of it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Set
from datetime import UTC, datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import ref

from .. import signals
from ..exceptions import LockBackendError, LockError, LockLost, LockNotHeld
from ..journal import Event
from ..options import SHORTEST_TTL, Terms, check_ttl
from ..types import Grant, Holder, LockRequest, State, new_token, place_of
from ..utils import fork
from ..utils.chance import chance
from ..utils.clock import clock, safe_deadline, wall_clock
from ..utils.other_words import answer_other_words
from .belief import Belief
from .events import about_lease

if TYPE_CHECKING:
    from django.dispatch import Signal

    from ..backends.base import BaseLockBackend
    from .journal_writer import JournalWriter

logger = logging.getLogger("django_distlock")


class LeaseRenewer(Protocol):
    """Who keeps leases alive and cleans up behind callers that cannot (see renewal.py)."""

    journal: JournalWriter | None

    def unregister(self, lease: Lease) -> bool: ...
    def wake(self, key: str) -> None: ...
    def wake_first(self, key: str) -> None: ...
    def release_in_background(
        self, request: LockRequest, *, cooldown: float = 0.0, on_released: Callable[[], None] | None = None
    ) -> bool: ...


RELEASED = State.RELEASED  # an enum takes long to find its members
TOO_LATE = "its renewal did not succeed in time"
GONE = "the store no longer knows it: its data was lost, or somebody freed the lock"


@answer_other_words
class Lease(Belief):
    """One acquisition of one lock. It ends by ``release()``, or when its TTL is over and nobody has renewed it.

    ``fence`` grows with every grant of the name: a resource that remembers the largest number that it has
    seen can refuse the late writes of a former holder.

    ``name``: as stores know it. ``using``: the alias of its backend. ``slot``: its number among the leases that the
    lock may have at once, from 1 on. ``ttl``: seconds the store keeps the lease unless it is renewed. ``token``: the
    secret that renews and releases it; never show it.
    """

    name: str
    using: str
    slot: int
    ttl: float
    token: str  # by which its renewer finds it to the end, whatever becomes of the request
    fence: int

    # Most leases end before anything of this changes.
    _is_detached = False
    _long_at = inf  # when, on clock(), it is told that it is held for long

    def __init__(
        self,
        backend: BaseLockBackend,
        request: LockRequest,
        grant: Grant,
        terms: Terms,
        renewer: LeaseRenewer,
        owner: object,
        granted_clock: float | None = None,
    ) -> None:
        """``granted_clock``: when it was granted, on ``clock()``; default: now."""
        self.name, self.using, self.token = request.name, backend.alias, request.token
        self.ttl, self._renews = terms.ttl, terms.renew
        self.fence, sent_at, self.slot = grant
        self._backend, self._renewer = backend, renewer
        self._request, self._terms = request, terms
        self._owner, self._pid = ref(owner), request.holder.pid
        self._hold_count = 1  # how often it was entered by its owner and not left yet
        self._ended = None
        self._granted_clock = clock() if granted_clock is None else granted_clock
        self._retainer_deadlines: dict[object, float] | None = None  # with until when, on clock(), they keep it renewed
        if backend.long_held is not None:
            self._long_at = self._granted_clock + backend.long_held
        self._deadline = 0.0
        self._extend(sent_at, request.ttl)

    @property
    def _retainers(self) -> Set[object]:
        """What it is held for after it was left: transactions, an open response."""
        return self._retainer_deadlines.keys() if self._retainer_deadlines else frozenset()

    def _retain(self, to: object, *, most: float | None = None) -> None:
        """``most``: seconds for which it is renewed for this reason alone; None: no bound."""
        if self._retainer_deadlines is None:
            self._retainer_deadlines = {}
        self._retainer_deadlines[to] = inf if most is None else clock() + most

    def _drop_retainer(self, retainer: object) -> bool:
        """Take a retainer back without releasing the lease. False if there is none, or in a forked child."""
        if not self._retainer_deadlines or retainer not in self._retainer_deadlines or self._pid != fork.pid():
            return False
        return self._retainer_deadlines.pop(retainer, None) is not None

    def _pass_to(self, owner: object) -> None:
        """The thread or task that holds it now."""
        self._owner = ref(owner)  # a task that is done has its result, and so perhaps the response that holds the lease

    def _belongs_to(self, execution: object) -> bool:
        return self._owner() is execution

    @property
    def _may_be_in_use(self) -> bool:
        """Whether its thread or task goes on beside the caller, who ends the process."""
        owner = self._owner()
        if isinstance(owner, asyncio.Task):
            return not owner.done() and owner.get_loop().is_running()
        return isinstance(owner, threading.Thread) and owner.is_alive() and owner is not threading.current_thread()

    @property
    def prefix(self) -> str:
        """What a callable ``KEY_PREFIX`` returned when the lock was requested; "" if the setting is a text."""
        return self._request.prefix

    @property
    def template(self) -> str:
        """The template of its name, with empty braces, such as ``order:{}``; the name itself if it has no values."""
        return self._request.template or self.name

    @property
    def holder(self) -> Holder:
        """Host, process, thread or task, and label, as others see them."""
        return self._request.holder

    @property
    def granted_at(self) -> datetime:
        """By this machine's wall clock, in UTC."""
        return datetime.fromtimestamp(self.holder.since, UTC)

    @property
    def state(self) -> State:
        """The state as this process knows it; no I/O. In a forked child: lost."""
        if self._ended:
            return self._ended
        if not self.is_held:
            return State.LOST
        return State.UNKNOWN if self._is_unknown else State.HELD

    def _is_free(self) -> bool:
        """Whether its holder has left it and nothing else needs it. A lost one is free, to be told at once."""
        return not self._hold_count and not (self._retainer_deadlines and self.is_held)

    def renew(self, ttl: float | timedelta | None = None) -> None:
        """Let the lease last ``ttl`` seconds from now (default: its TTL), whatever its max_hold. It is never shortened.

        Raises LockLost, LockNotHeld after a release or detach(), LockBackendError when the store does not answer.
        """
        ttl = self._renewable(ttl)
        sent_at = clock()
        [renewed] = self._backend.renew([(self._request, ttl)])
        self._was_renewed(renewed, sent_at, ttl)

    async def arenew(self, ttl: float | timedelta | None = None) -> None:
        """``renew()`` for tasks."""
        ttl = self._renewable(ttl)
        sent_at = clock()
        [renewed] = await self._backend.arenew([(self._request, ttl)])
        self._was_renewed(renewed, sent_at, ttl)

    def _renewable(self, ttl: float | timedelta | None) -> float:
        self.ensure_held()
        ttl = self.ttl if ttl is None else check_ttl(ttl)
        self._request.longest_ttl = max(self._request.longest_ttl, ttl)  # the store may do it, whatever it answers
        return ttl

    def _was_renewed(self, renewed: bool | None, sent_at: float, ttl: float) -> None:
        if renewed is None and not self._ended:  # a release on its way has reached some nodes, not others
            raise LockBackendError(
                f"No majority of nodes says whether the lock {self.name!r} stands; it is not renewed."
            )
        if renewed and not self._ended and clock() < self._lost_at and self._pid == fork.pid():
            self._extend(sent_at, ttl)
            self._send_in_background(signals.lock_renewed)
        elif self._renewer.unregister(self):  # else it was released or detached meanwhile, or is known to be lost
            self._mark_lost(TOO_LATE if renewed else GONE)
        # It must not block others for a TTL, whoever told that it is lost; nor may a late command of it.
        if (renewed or self._request.in_doubt) and self._ended is State.LOST:
            self._renewer.release_in_background(self._request, cooldown=self._cooldown)
        if not renewed and not self._ended:
            raise self._lost_error()  # another thread is about to say so
        self.ensure_held()

    def detach(self) -> str:
        """Stop renewing the lease in this process, and return a text with which another process can continue it.

        No I/O. The text is signed with ``SECRET_KEY`` and can be adopted once, within the ``remaining`` seconds
        of the lease; call ``renew(ttl=300)`` before to give it more time. If nobody adopts it, the lock is
        free after that time. It holds the lease's secret token: keep it out of URLs, pages and logs.

        Raises LockLost, or LockNotHeld after a release; LockBackendError if the backend has no ``supports_transfer``.
        """
        from .detached import Detached, check_transfer  # which few processes need

        self.ensure_held()
        check_transfer(self._backend, self.name)
        text = Detached(
            using=self.using, name=self.name, prefix=self.prefix, template=self._request.template, token=self.token,
            fence=self.fence, label=self.holder.label, since=self.holder.since, text_id=new_token(), slot=self.slot,
            granted_at=wall_clock() - self._held_for, remaining=self._lost_at - clock(),
            until=wall_clock() + self._lost_at - clock(), terms=self._terms.elsewhere(),
        ).to_text()  # fmt: skip
        self._mark_detached()
        return text

    # For the modules of this package

    def _mark_detached(self) -> None:
        """Another process goes on with it."""
        self.ensure_held()
        self._is_detached = True  # before it is dropped: from then on its token is no longer this process's
        if not self._renewer.unregister(self):
            self._is_detached = False
            raise self._dropped_error()
        self._ended = RELEASED
        self._wake_watchers()
        self._note(Event.DETACHED)

    def _note(self, event: Event, text: str = "") -> None:
        if journal := self._renewer.journal:
            journal.note(event, self._request, self._granted_clock, self.fence, text)

    def _extend(self, sent_at: float, ttl: float) -> None:
        """The store promised ``ttl`` seconds, asked at ``sent_at``."""
        deadline = safe_deadline(sent_at, ttl)
        if deadline > self._deadline:
            self._deadline = deadline
        # Not all at the same moment that were taken at the same moment.
        self._due = sent_at + self.ttl * (0.3 + chance.random() / 30) if self._renews else self._deadline
        self._is_unknown = False

    def _mark_unknown(self, retry_at: float) -> None:
        """The store did not answer."""
        self._is_unknown = True
        self._due = min(retry_at, self._lost_at)

    def _renewal_ttl(self, now: float) -> float:
        """What to ask the store for. The last renewal before its bound is a shorter one."""
        if self._terms.max_hold is None and not self._retainer_deadlines:
            return self.ttl
        return max(SHORTEST_TTL, min(self.ttl, min(self._bounds()) - now))

    def _bounds(self) -> tuple[float, float]:
        """Until when it is renewed, on ``clock()``: for its max_hold, and for what it is held for after it was left."""
        max_hold = inf if self._terms.max_hold is None else self._terms.max_hold
        retainers = self._retainer_deadlines if self._retainer_deadlines and not self._hold_count else {}
        return self._granted_clock + max_hold, max(retainers.values(), default=inf)

    @property
    def _bound(self) -> str:
        """What ends its renewal, for people."""
        by_max_hold, by_response = self._bounds()
        if by_max_hold <= by_response:
            return f"its max_hold of {self._terms.max_hold:g} s"
        return f"the RESPONSE_MAX_HOLD of {self.using!r}, {self._backend.response_max_hold:g} s,"

    @property
    def _held_for(self) -> float:
        """Seconds since it was granted."""
        return clock() - self._granted_clock

    def _stop_renewal(self) -> None:
        """Nobody is left to release it: let it run out."""
        self._renews, self._due = False, self._lost_at
        self._note(Event.BOUND_REACHED, "its handle was dropped")

    def _mark_lost(self, reason: str, *, log: bool = True) -> None:
        """The lease is over without a release: called once, by whoever dropped it from its renewer."""
        self._ended = State.LOST
        self._wake_watchers()
        self._renewer.wake_first(self._request.key)
        if log:
            self._log_loss(reason)
        self._note(Event.LOST, reason)
        self._send_in_background(signals.lock_lost, reason=reason, held=self._held_for)

    def _log_loss(self, reason: str) -> None:
        place, about = place_of(self.using, self.prefix), about_lease("lost", self, reason=reason)
        logger.error("Lock %r (%s) was lost: %s. Held by %s.", self.name, place, reason, self.holder, extra=about)

    def _mark_released(self) -> float:
        """It is being released by whoever dropped it, or again after that failed. Returns its cooldown."""
        was_told, self._ended = self._ended is RELEASED, RELEASED
        if self._watchers:
            self._wake_watchers()
        if (journal := self._renewer.journal) and not was_told:
            journal.note(journal.RELEASED, self._request, self._granted_clock, self.fence)
        return self._cooldown if self._terms.min_hold else 0.0

    @property
    def _cooldown(self) -> float:
        """Seconds for which the lock stays taken after the lease."""
        return max(0.0, self._terms.min_hold - self._held_for)

    def release(self) -> None:
        """Release the lock, at once or after ``min_hold``.

        Raises LockLost if the lease had ended before, LockNotHeld if it was released already or belongs to the
        parent of a forked process, and LockBackendError if the store does not answer. The release is then tried
        again in the background until the TTL has passed. If the store is already known not to answer, only that
        is done, and nothing is raised.
        """
        try:
            released = self._backend.release(self._request, self._begin_release())
            self._renewer.wake_first(self._request.key)
        except BaseException as error:
            if self._release_after_failure(error, tells=True):
                return
            raise
        self._conclude_release(released)
        if signals.lock_released.receivers:
            signals.send_signal(signals.lock_released, type(self._backend), **self._about(held=self._held_for))

    async def arelease(self) -> None:
        """``release()`` for tasks. Cancelled, it is finished in the background."""
        try:
            released = await self._backend.arelease(self._request, self._begin_release())
            self._renewer.wake_first(self._request.key)
        except BaseException as error:
            if self._release_after_failure(error, tells=True):
                return
            raise
        self._conclude_release(released)
        if signals.lock_released.receivers:
            await signals.asend_signal(signals.lock_released, type(self._backend), **self._about(held=self._held_for))

    def _let_others_enter(self) -> None:
        """Its holder has left it, and it is held on: others of the same transaction may enter it."""
        self._renewer.wake(self._request.key)

    def _release_in_background(self) -> None:
        """Release it in the background, for one who cannot wait for the store."""
        if self._renewer.unregister(self):
            self._free_in_background(tells=True)

    def _release_retainer(self, retainer: object, *, promptly: bool = True) -> None:
        """What it was held for after it was left is over: release it if that was the last.

        Nobody can be told of errors, so they are logged. ``promptly=False``: in the background; the collector calls.
        """
        if not self._drop_retainer(retainer) or self._retainer_deadlines or self._hold_count or self._ended:
            return
        if not promptly:
            self._release_in_background()
            return
        try:
            self.release()
        except LockError as problem:
            logger.error("%s", problem, extra=about_lease("end-failed", self))

    def _begin_release(self) -> float:
        if self._pid != fork.pid():
            raise LockNotHeld(f"The lease of {self.name!r} belongs to process {self._pid}, which forked this one.")
        is_lost = clock() >= self._lost_at if self._ended is None else self._ended is State.LOST
        dropped = self._renewer.unregister(self)
        if is_lost:
            if dropped:
                self._mark_lost("its TTL ran out")
                self._renewer.release_in_background(self._request, cooldown=self._cooldown)
            raise self._lost_error()
        if not dropped:
            raise self._dropped_error()
        return self._mark_released()

    def _release_after_interrupt(self, *, tells: bool = False) -> None:
        """Free it in the background, also if a release has begun: the caller was interrupted, or the store failed."""
        self._renewer.unregister(self)
        if not self._is_detached:
            self._free_in_background(tells=tells)

    def _release_after_failure(self, error: BaseException, *, tells: bool = False) -> bool:
        """Free it in the background, unless it has ended. Whether the store was not even asked, as it is known away."""
        if isinstance(error, LockLost | LockNotHeld):
            return False
        self._release_after_interrupt(tells=tells)
        return isinstance(error, LockBackendError) and not error.was_asked

    def _free_in_background(self, *, tells: bool) -> None:
        """``tells``: whether the signal is sent once it is freed. Of what nobody was told to have, nobody is."""
        on_released = self._tell_released if tells else None
        self._renewer.release_in_background(self._request, cooldown=self._mark_released(), on_released=on_released)

    def _tell_released(self) -> None:
        self._send_in_background(signals.lock_released, held=self._held_for)

    def _conclude_release(self, released: bool) -> None:
        if not released:
            reason = "the store no longer knew it when it was released: its data was lost, or somebody freed the lock"
            self._mark_lost(reason)
            raise self._lost_error()

    def _send_in_background(self, signal: Signal, **about: object) -> None:
        """A slow receiver must not let other leases run out, and an async one cannot be awaited by the renewer."""
        signals.send_signal_in_background(signal, type(self._backend), **self._about(**about))

    def _about(self, **more: object) -> dict[str, object]:
        """What signals carry."""
        return {"name": self.name, "template": self.template, "using": self.using, "lease": self, **more}

    def _dropped_error(self) -> LockError:
        """For a lease that the renewer does not know any more. It drops a lost one before it marks it as lost."""
        return self._over_error() if self._is_detached or self._ended is RELEASED else self._lost_error()

    def _over_error(self) -> LockNotHeld:
        if self._is_detached:
            return LockNotHeld(f"The lock {self.name!r} was detached: another process may adopt it.")
        return LockNotHeld(f"The lock {self.name!r} was released already.")

    def _lost_error(self) -> LockLost:
        if self._pid != fork.pid():
            message = f"The lease of {self.name!r} belongs to process {self._pid}, which forked this one."
            return LockLost(message, lease=self)
        return LockLost(
            f"The lock {self.name!r} ({place_of(self.using, self.prefix)}) was lost while {self.holder} held it:"
            " somebody else may have held it since. Undo or check what was done, or compare fencing numbers where it is"
            " stored.",
            lease=self,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A lease belongs to the process that acquired it. Send the text of lease.detach() elsewhere, and adopt() it"
            " there."
        )

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} using {self.using!r} fence={self.fence} {self.state}>"
