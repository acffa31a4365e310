"""The signed text with which a lease goes from one process to another."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from django.core import signing
from django.views.decorators.debug import sensitive_variables

from ..exceptions import LockBackendError, LockLost, LockNotHeld
from ..formats import NEWER, NUMBER
from ..options import Terms
from ..types import place_of
from ..utils.clock import wall_clock

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend

SALT = "django_distlock.handover"  # never changes, because texts that it signs are on their way


def check_transfer(backend: BaseLockBackend, name: str) -> None:
    """Raises LockBackendError if no other process can continue with a lease of this store."""
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
    """What the text says about the lease. ``since``, ``granted_at``, ``until``: seconds of Unix time.

    ``since``: when its holder asked for it, for people. ``granted_at``: its min_hold and max_hold count from then on.
    ``prefix``: the answer of a callable KEY_PREFIX, else "". ``template``: the one of its request.
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
    @sensitive_variables()  # all: the functions of signing have the text in variables with other names
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
        """Seconds that are left; the clocks of the two hosts may differ."""
        return min(self.remaining, self.until - wall_clock())

    def lost_error(self) -> LockLost:
        """For a lease that ended on its way."""
        return LockLost(
            f"The lock {self.name!r} ({place_of(self.using, self.prefix)}) was lost: it was detached by {self.label},"
            f" and its lease ran out {-self.left:.1f} s ago, before it was adopted. Give it more time on its way by"
            " lease.renew(ttl=...) before lease.detach()."
        )

    def to_text(self) -> str:
        return signing.Signer(salt=SALT).sign_object([NUMBER, asdict(self)])
