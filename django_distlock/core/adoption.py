"""How a lease goes from one process to another: detached here as a signed text, adopted there.

The text can be adopted once: the adopting process acquires a lock that is named by the text, and keeps it while the
text is valid. So a message that is delivered twice does not make two holders.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from django.views.decorators.debug import sensitive_variables

from ..exceptions import InvalidLockBackend, LockLost, LockNotHeld
from ..journal import NOT_RENEWED, Event
from ..names import own_name
from ..options import SHORTEST_TTL, Options, Terms
from ..types import NOT_WAITING, Grant, Holder, LockInfo, LockRequest, current_execution, place_of
from ..utils.clock import clock, safe_deadline, wall_clock
from ..utils.drive import Call, Steps, adrive, drive
from .holds import Hold, remember
from .lease import Lease
from .lock import Lock, refuse_in_event_loop
from .registry import locks

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend
    from .detached import Detached
    from .service import Service

CLOCKS_DIFFER = 300.0  # seconds at most between the wall clocks of two hosts


class AdoptedLease(Lease):
    """A lease that another process acquired. A context manager, which ends as the ``with`` of a lock does."""

    __slots__ = ("_handle", "_proof")

    def __init__(self, detached: Detached, service: Service, proof: LockRequest) -> None:
        terms = Terms(**detached.terms)
        here = Holder.here(detached.label)
        holder = Holder(here.host, here.pid, here.thread, here.label, detached.since, slots=terms.slots)
        # An adoption that failed before this one may have left a command on its way to the store.
        request = LockRequest(
            detached.name, terms.ttl, holder, detached.token, in_doubt=True, held_fence=detached.fence,
            longest_ttl=detached.remaining, prefix=detached.prefix, template=detached.template,
            slots=terms.slots, slot=detached.slot, is_unconfirmed=True,  # perhaps, if it was detached at once
        )  # fmt: skip
        now = clock()
        super().__init__(
            service.backend, request, Grant(detached.fence, now, detached.slot), terms, service.renewer,
            current_execution(),
            granted_clock=min(now, now - (wall_clock() - detached.granted_at)),
        )  # fmt: skip
        self._deadline = now + detached.remaining  # at most: the store is asked for what is left
        if not self._renews:
            self._due = self._deadline  # it is over then, and nothing is to be done for it before
        self._handle = Lock(self.name, self.using, Options(detached.terms))
        self._proof = proof

    def __enter__(self) -> Self:
        try:
            self.ensure_held()
            self._handle._holds.enter(Hold(current_execution(), by_with=True, reentrant=self._terms.reentrant), self)
            return self
        except (LockLost, LockNotHeld):
            raise
        except BaseException:  # nobody will leave it
            self._release_after_interrupt(tells=True)
            raise

    async def __aenter__(self) -> Self:
        return self.__enter__()

    def _conclude_release(self, released: bool) -> None:
        super()._conclude_release(released)
        self._renewer.release_in_background(self._proof)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.__exit__(kind, error, traceback)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._handle.__aexit__(kind, error, traceback)


@sensitive_variables("text")
def adopt(text: str) -> AdoptedLease:
    """Continue in this process a lease that another one detached: renew it, and release it at the end.

    ``text``: what ``Lease.detach()`` returned there. ``with adopt(text) as lease:`` releases the lease as the ``with``
    of a lock does.

    Raises LockLost if the lease has ended meanwhile, by its TTL or by a release; LockNotHeld for a text that was
    adopted already or that ``detach()`` did not make; LockBackendError if the store does not answer (the text can
    then be adopted later), and if a newer version of the package detached the lease.
    """
    refuse_in_event_loop()
    adoption = Adoption(text)
    try:
        drive(adoption.steps(), adoption.backend)
        return adoption.lease
    except BaseException:
        adoption.undo()
        raise


@sensitive_variables("text")
async def aadopt(text: str) -> AdoptedLease:
    """``adopt()`` for tasks: ``async with await aadopt(text) as lease:``."""
    adoption = Adoption(text)
    try:
        await adrive(adoption.steps(), adoption.backend)
        return adoption.lease
    except BaseException:
        adoption.undo()
        raise


class Adoption:
    """Checks what must be true of a lease before this process may continue with it. Undone if a check fails."""

    def __init__(self, text: str) -> None:
        from .detached import Detached  # few processes need it

        self._detached = detached = Detached.from_text(text)
        service = locks.service(detached.using)
        if bool(detached.prefix) != bool(service.backend.ask_prefix):
            here, there = ("a callable", "a text") if service.backend.ask_prefix else ("a text", "a callable")
            raise InvalidLockBackend(
                f"{service.backend.setting('KEY_PREFIX')} is {here}, but {there} where this lease was detached. Give"
                " all processes the same one."
            )
        # Keeps others from adopting the token while the store may know it: until the lease is released; if nobody
        # knows whether it is, for as long as the text is valid.
        valid = detached.until - wall_clock() + CLOCKS_DIFFER
        if valid < SHORTEST_TTL:
            raise detached.lost_error()
        holder = Holder.here(f"has adopted {detached.name}")
        name, prefix = own_name("handover:{}", detached.text_id), detached.prefix
        self._proof = LockRequest(name, valid, holder, deadline=NOT_WAITING, prefix=prefix)
        self.lease = AdoptedLease(detached, service, self._proof)
        self._renewer = service.renewer

    @property
    def backend(self) -> BaseLockBackend:
        """It makes the calls of ``steps()``."""
        return self.lease._backend

    def steps(self) -> Steps[None]:
        lease, request = self.lease, self.lease._request
        first = yield Call("acquire", (self._proof,), {"queue": False})
        if isinstance(first, LockInfo):
            raise LockNotHeld(
                f"The lock {lease.name!r} ({place_of(lease.using, lease.prefix)}) was adopted already, by"
                f" {first.holder}. What detach() returns can be adopted once."
            )
        self._renewer.register(lease)
        remember(lease)
        lease.ensure_held()
        sent_at = clock()
        ttl = max(lease._renewal_ttl(sent_at), self._detached.left)
        [renewed] = yield Call("renew", ([(request, ttl)],))
        request.is_unconfirmed = False
        try:
            lease._was_renewed(renewed, sent_at, ttl)
        except LockLost:
            if self._detached.left > 0.0:
                raise
            raise self._detached.lost_error() from None
        lease._deadline = safe_deadline(sent_at, ttl)  # in the place of what the text says
        # This process is the holder, from now on.
        shown = yield Call("acquire", (request.copy(ttl=ttl, deadline=NOT_WAITING),), {"queue": False})
        is_same = isinstance(shown, Grant) and shown.fence == lease.fence
        if not is_same and self._renewer.unregister(lease):
            self._renewer.release_in_background(request)
            lease._mark_lost("its TTL ran out while it was adopted")
        lease.ensure_held()
        lease._note(Event.ADOPTED, "" if lease._renews else NOT_RENEWED)

    def undo(self) -> None:
        if self._renewer.get(self.lease.token) is self.lease:
            self._renewer.unregister(self.lease)
        self._renewer.release_in_background(self._proof)
