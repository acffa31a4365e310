"""The lease of a body that runs without its lock, because the store could not be asked."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ..exceptions import LockBackendError, LockNotHeld
from ..options import Terms
from ..types import Grant, LockRequest, State
from .lease import RELEASED, Lease, LeaseRenewer

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend


class UngrantedLease(Lease):
    """A lease that no store has granted. It is never held, and its release makes no call and sends no signal.

    The renewer does not know it, so it is never renewed, lost or listed.
    """

    def __init__(
        self,
        backend: BaseLockBackend,
        request: LockRequest,
        terms: Terms,
        renewer: LeaseRenewer,
        owner: object,
        error: LockBackendError,
    ) -> None:
        super().__init__(backend, request, Grant(0, -inf, 0), terms, renewer, owner)
        self._hold_count = 0  # until it is entered, as for an existing lease
        self._ended = State.UNAVAILABLE
        self._deadline = inf  # its body waits only for its release
        self._reason = str(error)  # not the error, whose traceback keeps the frames of its callers

    @property
    def _is_over(self) -> bool:
        return self._ended is RELEASED

    def ensure_held(self) -> None:
        """Raises LockNotHeld."""
        if self._is_over:
            raise self._over_error()
        raise LockNotHeld(
            f"The lock {self.name!r} ({self.using}) is not held: its store could not be asked for it, and"
            f' on_unavailable="run" goes on without it. {self._reason}'
        )

    def release(self) -> None:
        """Raises LockNotHeld if it was released already."""
        if self._is_over:
            raise self._over_error()
        self._ended = RELEASED
        self._wake_watchers()

    async def arelease(self) -> None:
        """``release()`` for tasks."""
        self.release()
