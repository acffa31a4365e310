"""Which leases of its own are in the way of an acquisition: to be entered again, or not to be waited for."""

from __future__ import annotations

from collections.abc import Sequence

from ..options import Terms
from ..types import LockInfo, LockRequest
from . import transactions
from .holds import remembers
from .lease import Lease
from .registry import Service


class OwnLeases:
    """The part of an acquisition that knows the leases which its thread or task has, or its transaction keeps."""

    around: transactions.Around | None = None  # None: those of this very thread are looked up
    request: LockRequest
    _service: Service
    _timeout: float | None
    _terms: Terms
    _execution: object

    def depends_on_transactions(self) -> bool:
        """Ask what is open around the task. Whether the lock may depend on it."""
        self.around = transactions.Around()
        return self._terms.in_atomic == "refuse" or any(lease._retainers for lease in self._leases_here())

    def _may_be_own(self) -> bool:
        """Whether the lease in the way may be one to enter again, for which nobody stands in line."""
        here = () if self._terms.slots > 1 else self._leases_here()  # see ask()
        return bool(here) and any(self._is_own(lease) or self._is_deferred(lease) for lease in here)

    def _is_enterable(self, lease: Lease) -> bool:
        """Whether it may be entered again: not one that was granted beside more others."""
        is_open = self._is_deferred(lease) or (self._terms.reentrant and self._is_own(lease))
        return is_open and lease.holder.slots <= self._terms.slots

    def _enterable_beside(self, busy: LockInfo) -> Lease | None:
        return next(filter(self._is_enterable, self._leases_beside(busy)), None)

    def _own_lease(self, busy: LockInfo) -> Lease | None:
        """One that ends after this very thread or task went on, if so many do that it would wait for itself."""
        known, waits = self._leases_beside(busy), self._timeout != 0  # for its own transaction, which keeps one
        held = [it for it in known if (it._hold_count > 0 and self._is_own(it)) or (waits and self._is_deferred(it))]
        return held[-1] if len(held) >= self._terms.slots else None

    def _leases_beside(self, busy: LockInfo) -> list[Lease]:
        """Those of this process that may stand although the store shows ``busy``, which ends first."""
        return [lease for lease in self._leases_here() if lease.token == busy.token or lease.slot != busy.slot]

    def _leases_here(self) -> Sequence[Lease]:
        return self._service.renewer.of_lock(self.request.key)

    def _pending_lease(self) -> Lease | None:
        """One in any slot that this transaction keeps: in a loop, each turn would take another one."""
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
