"""What keeps a lease held after its holder has left it: a transaction, a response that is not finished."""

from __future__ import annotations

import sys

from .lease import Lease


class Retainer:
    """Holds a lease until it is released, or collected; then the lease is released if nothing else needs it.

    ``reason``: equal ones count as one; default: one of its own. ``most``: seconds for which the lease is renewed on
    account of this; None: no bound.
    """

    _lease: Lease | None = None  # until it is made

    def __init__(self, lease: Lease, reason: object = None, *, most: float | None = None) -> None:
        self._reason = reason or object()
        self._lease = lease  # first, so that there is no retainer that nothing releases
        lease._retain(self._reason, most=most)

    def drop(self) -> None:
        """The holder itself goes on, and releases what nothing else holds."""
        if self._lease:
            self._lease._drop_retainer(self._reason)

    def release(self, *, promptly: bool = True) -> None:
        """``promptly=False``: in the background, without waiting for anything."""
        if self._lease:
            self._lease._release_retainer(self._reason, promptly=promptly)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release(promptly=False)


class ResponseRetainer(Retainer):
    """Of a response whose content is made after its view has returned."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease, most=lease._backend.response_max_hold)
