"""How a lease goes from one process to another: detached here as a signed text, adopted there.

The text can be adopted once. Whoever does, acquires a lock that is named by the text and kept while the text is
valid; so a message that is delivered twice does not make two holders.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from django.core import signing
from django.views.decorators.debug import sensitive_variables

from .attempts import take_over
from .entries import Entry
from .exceptions import LockLost, LockNotHeld
from .handlers import locks
from .leases import Lease
from .locking import Lock, refuse_in_a_loop
from .names import own_name
from .options import Options
from .terms import Terms
from .tickets import Grant, Holder, LockInfo, Ticket, clock, current_execution, new_token, safe_deadline

SALT = "django_distlock.handover"
CLOCKS_DIFFER = 300.0  # seconds at most between the wall clocks of two hosts


@dataclass(frozen=True, slots=True)
class Detached:
    """What the text says of the lease. ``until`` and ``since``: seconds of Unix time."""

    using: str
    name: str
    token: str = field(repr=False)
    fence: int
    label: str
    since: float
    until: float
    text_id: str
    terms: dict[str, Any]

    @classmethod
    @sensitive_variables("text")
    def read(cls, text: str) -> Self:
        try:
            detached = cls(**signing.Signer(salt=SALT).unsign_object(text))
            Terms(**detached.terms)
        except signing.BadSignature as error:
            raise LockNotHeld(
                "This text is no detached lease: its signature is wrong. It must come from Lease.detach() unchanged,"
                " and both processes need the same SECRET_KEY (or SECRET_KEY_FALLBACKS)."
            ) from error
        except (TypeError, ValueError) as error:
            raise LockNotHeld(
                "This lease was detached by another version of django-distlock. Let the processes that pass leases to"
                " each other run the same one."
            ) from error
        if time.time() >= detached.until:
            raise LockLost(
                f"The lock {detached.name!r} ({detached.using}) was lost: it was detached by {detached.label}, and its"
                f" lease ran out {time.time() - detached.until:.1f} s ago, before it was adopted. Give it more time on"
                " its way by lease.renew(ttl=...) before lease.detach()."
            )
        return detached


def detach(lease: Lease) -> str:
    """``Lease.detach()``."""
    lease.ensure_held()
    detached = Detached(
        using=lease.using,
        name=lease.name,
        token=lease.token,
        fence=lease.fence,
        label=lease.holder.label,
        since=lease.holder.since,
        until=time.time() + lease.remaining,
        text_id=new_token(),
        terms=asdict(lease.terms),
    )
    text = signing.Signer(salt=SALT).sign_object(asdict(detached))
    lease.leave()
    return text


class AdoptedLease(Lease):
    """A lease that another process acquired. A context manager, which ends as the ``with`` of its lock does."""

    __slots__ = ("_handle", "_proof")

    def __init__(self, detached: Detached) -> None:
        service = locks.service(detached.using)
        terms = Terms(**detached.terms)
        here = Holder.here(detached.label)
        holder = Holder(here.host, here.pid, here.thread, here.label, detached.since)
        # An adoption that failed before this one may have left a command on its way to the store.
        ticket = Ticket(detached.name, terms.ttl, holder, detached.token, unanswered=True, is_held=True)
        # What the text says of the time that is left, until the store has confirmed it.
        now, wall_clock = clock(), time.time()
        sent_at = now + detached.until - wall_clock - safe_deadline(0.0, terms.ttl)
        super().__init__(
            service.backend, ticket, Grant(detached.fence, sent_at), terms, service.renewer, current_execution()
        )
        self._granted_clock = min(now, now - (wall_clock - detached.since))
        self._handle = Lock(self.name, self.using, Options(detached.terms))
        valid = detached.until - wall_clock + CLOCKS_DIFFER
        self._proof = Ticket(
            own_name("handover:{}", detached.text_id), valid, Holder.here(f"has adopted {detached.name}")
        )

    # Once the store knows the token no more, nobody can adopt it, and the proof is not needed.

    def _begin_release(self) -> float:
        rest = super()._begin_release()
        self._keeper.abandon(self._proof)
        return rest

    def lose(self, reason: str, *, log: bool = True) -> None:
        self._keeper.abandon(self._proof)
        super().lose(reason, log=log)

    def __enter__(self) -> Self:
        self.ensure_held()
        self._handle._entries.enter(Entry(current_execution(), by_with=True, reentrant=self.terms.reentrant), self)
        return self

    async def __aenter__(self) -> Self:
        return self.__enter__()

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
    """``Lease.adopt()``."""
    refuse_in_a_loop()
    with Adoption(text) as adoption:
        lease = adoption.lease
        adoption.is_first(lease.backend.acquire(adoption.proof, queue=False))
        lease.renew()
        adoption.is_known(lease.backend.acquire(lease.ticket, queue=False))
    return lease


@sensitive_variables("text")
async def aadopt(text: str) -> AdoptedLease:
    """``Lease.aadopt()``."""
    with Adoption(text) as adoption:
        lease = adoption.lease
        adoption.is_first(await lease.backend.aacquire(adoption.proof, queue=False))
        await lease.arenew()
        adoption.is_known(await lease.backend.aacquire(lease.ticket, queue=False))
    return lease


class Adoption:
    """What has to be true of a lease before this process may go on with it. Undone if something is not."""

    def __init__(self, text: str) -> None:
        self.lease = AdoptedLease(Detached.read(text))
        self.proof = self.lease._proof
        self._keeper = locks.service(self.lease.using).renewer

    def __enter__(self) -> Self:
        return self

    def is_first(self, answer: Grant | LockInfo) -> None:
        if isinstance(answer, LockInfo):
            raise LockNotHeld(
                f"The lock {self.lease.name!r} ({self.lease.using}) was adopted already, by {answer.holder}. What"
                " detach() returns can be adopted once."
            )
        take_over(self.lease)

    def is_known(self, answer: Grant | LockInfo) -> None:
        """The store shows this process as the holder from now on."""
        is_same = isinstance(answer, Grant) and answer.fence == self.lease.fence
        if not is_same and self._keeper.drop(self.lease):
            self._keeper.abandon(self.lease.ticket)
            self.lease.lose("its TTL ran out while it was adopted")
        self.lease.ensure_held()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            if self._keeper.find(self.lease.token) is self.lease:
                self._keeper.drop(self.lease)
            self._keeper.abandon(self.proof)
