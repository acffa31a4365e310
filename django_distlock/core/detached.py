"""The text by which a lease goes from one process to another: what it says, and that it is signed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from django.core import signing
from django.views.decorators.debug import sensitive_variables

from ..backends.base import BaseLockBackend
from ..exceptions import LockBackendError, LockLost, LockNotHeld
from ..formats import NEWER, NUMBER
from ..options import Terms
from ..types import place_of
from ..utils.clock import wall_clock

SALT = "django_distlock.handover"  # signs texts that are on their way now: it stays


def check_transfer(backend: BaseLockBackend, name: str) -> None:
    """Raises LockBackendError where no other process can go on with a lease."""
    if backend.supports_transfer:
        return
    error = LockBackendError(
        f"The lock {name!r} ({backend.alias}) cannot be detached: {type(backend).__name__} keeps it for the session of"
        " this process, with which no other one can go on. Keep locks that are handed over in Redis or in a database."
    )
    error.is_final = True
    raise error


@dataclass(frozen=True, slots=True)
class Detached:
    """What the text says of the lease. ``since``, ``granted_at``, ``until``: seconds of Unix time.

    ``since``: when its holder asked for it, for people. ``granted_at``: from which its min_hold and max_hold count.
    ``prefix``: what a callable KEY_PREFIX had answered; "" where it is a text. ``template``: that of its request.
    ``remaining``: seconds that were left when it was detached; ``until`` is their end.
    """

    using: str
    name: str
    token: str = field(repr=False)
    fence: int
    label: str
    since: float
    granted_at: float
    remaining: float
    until: float
    text_id: str
    terms: dict[str, Any]
    prefix: str = ""
    template: str = ""
    slot: int = 1

    @classmethod
    @sensitive_variables()  # all: those of signing, which it calls, have the text under names of their own
    def from_text(cls, text: str) -> Self:
        try:
            number, fields = signing.Signer(salt=SALT).unsign_object(text)
            if number > NUMBER:
                error = LockBackendError(f"This detached lease {NEWER}.")
                error.is_final = True
                raise error
            detached = cls(**fields)
            Terms(**detached.terms)
        except signing.BadSignature as wrong:
            raise LockNotHeld(
                "This text is no detached lease: its signature is wrong. It must come from Lease.detach() unchanged,"
                " and both processes need the same SECRET_KEY (or SECRET_KEY_FALLBACKS)."
            ) from wrong
        except (TypeError, ValueError) as wrong:
            raise LockNotHeld(
                "This lease was detached by another version of django-distlock. Let the processes that pass leases to"
                " each other run the same one."
            ) from wrong
        return detached

    @property
    def left(self) -> float:
        """Seconds that are left, by clocks of two hosts that may differ."""
        return min(self.remaining, self.until - wall_clock())

    def lost_error(self) -> LockLost:
        """For one that ran out on its way."""
        return LockLost(
            f"The lock {self.name!r} ({place_of(self.using, self.prefix)}) was lost: it was detached by {self.label},"
            f" and its lease ran out {-self.left:.1f} s ago, before it was adopted. Give it more time on its way by"
            " lease.renew(ttl=...) before lease.detach()."
        )

    def to_text(self) -> str:
        return signing.Signer(salt=SALT).sign_object([NUMBER, asdict(self)])
