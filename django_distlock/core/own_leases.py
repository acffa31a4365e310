"""The caller's own leases that are in the way of an acquisition: it enters them again, or must not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..options import Terms
from ..types import LockInfo, LockRequest
from . import transactions
from .holds import remembers
from .lease import Lease

if TYPE_CHECKING:
    from .service import Service


class OwnLeases:
    """The part of an acquisition that knows the leases of its thread or task, and those that its transaction keeps."""

    around: transactions.Around | None = None  # None: look up those of this thread
    request: LockRequest
    _service: Service
    _timeout: float | None
    _terms: Terms
    _execution: object

    def depends_on_transactions(self) -> bool:
        """Ask which transactions are open around the task. Returns whether the lock may depend on them."""
        self.around = transactions.Around()
        return self._terms.in_atomic == "refuse" or any(lease._retainers for lease in self._leases_here())

    def _may_be_own(self) -> bool:
        """Whether the lease in the way may be one to enter again; then nobody stands in line."""
        here = () if self._terms.slots > 1 else self._leases_here()  # see ask()
        return bool(here) and any(self._is_own(lease) or self._is_deferred(lease) for lease in here)

    def _is_enterable(self, lease: Lease) -> bool:
        """Whether it may be entered again; not if it was granted beside more others than this request allows."""
        is_open = self._is_deferred(lease) or (self._terms.reentrant and self._is_own(lease))
        return is_open and lease.holder.slots <= self._terms.slots

    def _enterable_beside(self, busy: LockInfo) -> Lease | None:
        return next(filter(self._is_enterable, self._leases_beside(busy)), None)

    def _own_lease(self, busy: LockInfo) -> Lease | None:
        """The latest lease that ends only when this thread or task continues.

        None if there are so few of these that another slot may become free. Else the caller would wait for itself.
        """
        known, waits = self._leases_beside(busy), self._timeout != 0  # perhaps for a lease of its transaction
        held = [it for it in known if (it._hold_count > 0 and self._is_own(it)) or (waits and self._is_deferred(it))]
        return held[-1] if len(held) >= self._terms.slots else None

    def _leases_beside(self, busy: LockInfo) -> list[Lease]:
        """The leases of this process that may stand beside ``busy``, which the store shows because it ends first."""
        return [lease for lease in self._leases_here() if lease.token == busy.token or lease.slot != busy.slot]

    def _leases_here(self) -> Sequence[Lease]:
        return self._service.renewer.of_lock(self.request.key)

    def _pending_lease(self) -> Lease | None:
        """A lease in any slot that this transaction keeps. Without it, each round of a loop would take another slot."""
        here = self._leases_here()  # most often none
        return next(filter(self._is_enterable, here), None) if here and self._open_transactions() else None

    def _is_own(self, lease: Lease) -> bool:
        return lease.is_held and lease._belongs_to(self._execution) and remembers(lease)

    def _is_deferred(self, lease: Lease) -> bool:
        """Whether it was left already, and is held for a transaction that is open here."""
        if lease._hold_count or not lease._retainers or not lease.is_held:
            return False
        return any(transaction in lease._retainers for transaction in self._open_transactions())

    def _open_transactions(self) -> Sequence[transactions.Transaction]:
        return transactions.open_here() if self.around is None else self.around.known()
