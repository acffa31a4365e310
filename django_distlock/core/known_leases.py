"""The leases that this process has from one backend."""

from __future__ import annotations

from collections.abc import Sequence

from ..utils.guards import new_guard
from .lease import Lease


class KnownLeases:
    """Leases, which are found by token and by lock.

    Most leases end before anybody looks for one. So a new one is only noted. The next look puts it into the indexes.

    ``_known`` decides. An index may also have leases that have ended, after an interrupt.

    The garbage collector, or a handler of a signal, may look for a lease or end one after any call in here, in the same
    thread, and a handler may raise. So changes that belong together have no call between them.
    """

    def __init__(self) -> None:
        self._guard = new_guard()  # of the indexes
        self._known: dict[Lease, None] = {}
        self._new: dict[Lease, None] = {}  # of these, those that are in no index yet
        self._by_token: dict[str, Lease] = {}
        self._by_lock: dict[str, dict[Lease, None]] = {}  # by the ``key`` of their requests
        self._unordered: dict[str, Lease] = {}  # by token, those that are not in the order of the renewer yet

    def unregister(self, lease: Lease) -> bool:
        """Renew it no more. True for the one caller that ends the lease; the others must leave it alone.

        It is also False where the lease was detached and adopted again: its token is that of another lease now.
        """
        if self._known.pop(lease, False) is not None:
            return False
        if self._new.pop(lease, False) is not None:
            with self._guard:
                self._take_out(lease)
        return True

    def leases(self) -> list[Lease]:
        return list(self._known)

    def get(self, token: str) -> Lease | None:
        self._take_in()
        lease = self._by_token.get(token)
        return lease if lease in self._known else None

    def template_of(self, token: str) -> str:
        """Of a lease that this process holds; "" for one of another."""
        return lease.template if (lease := self.get(token)) else ""

    def of_lock(self, key: str) -> Sequence[Lease]:
        """Those of one lock, the last one at the end."""
        self._take_in()
        return [lease for lease in [*self._by_lock.get(key, ())] if lease in self._known]

    def _take_in(self) -> None:
        """Put the new leases into the indexes."""
        while self._new:
            with self._guard:
                for lease in list(self._new):
                    self._take_in_one(lease)

    def _take_in_one(self, lease: Lease) -> None:
        token, key = lease.token, lease._request.key
        if lease in self._known:  # else another lease may have its token
            self._by_token[token] = self._unordered[token] = lease
            while lease not in (of_lock := self._by_lock.setdefault(key, {})):  # again if that was taken out meanwhile
                of_lock[lease] = None
        self._new.pop(lease, None)
        if lease not in self._known:  # it has ended meanwhile
            self._take_out(lease)

    def _take_out(self, lease: Lease) -> None:
        """Of the indexes; of that by token at last, so that it has all that an interrupt leaves in others."""
        token, key = lease.token, lease._request.key
        self._by_lock.get(key, {}).pop(lease, None)
        if key in self._by_lock and not self._by_lock[key]:
            del self._by_lock[key]
        for index in (self._unordered, self._by_token):
            if token in index and index[token] is lease:
                del index[token]

    def _take_out_ended(self) -> None:
        """What an interrupt has left in the indexes."""
        ended = [lease for lease in list(self._by_token.values()) if lease not in self._known]
        with self._guard:
            for lease in ended:
                self._take_out(lease)

    def forget(self) -> None:
        """In a forked child: the leases are the parent's."""
        self._guard = new_guard()  # another thread may have been inside
        self._known.clear()
        for index in (self._new, self._by_token, self._by_lock, self._unordered):
            index.clear()
