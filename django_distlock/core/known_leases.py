"""The leases that this process has from one backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .lease import Lease


class KnownLeases:
    """Leases, which are found by token and by lock.

    Most leases end before anybody looks for one. So a new one is only noted, in one step. The next look takes it in.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # for all but ``_new``; the garbage collector may end a lease inside
        self._new: dict[Lease, None] = {}  # noted, and not taken in
        self._leases: dict[str, Lease] = {}  # by token
        self._by_lock: dict[str, tuple[Lease, ...]] = {}  # by the ``key`` of their requests, the last one at the end
        self._unordered: dict[str, Lease] = {}  # by token, for the renewer, which looks at them in an order

    def unregister(self, lease: Lease) -> bool:
        """Renew it no more. True for the one caller that ends the lease; the others must leave it alone."""
        if self._new.pop(lease, False) is None:
            return True
        with self._guard:  # of two who end it, one could have it adopted before the other takes what has its token then
            if self._leases.get(lease.token) is not lease:
                return False  # also where it was detached and adopted again: its token is that of another lease now
            return self._take_out(lease)

    def leases(self) -> list[Lease]:
        self._take_in()
        return list(self._leases.values())

    def get(self, token: str) -> Lease | None:
        self._take_in()
        return self._leases.get(token)

    def template_of(self, token: str) -> str:
        """Of a lease that this process holds; "" for one of another."""
        return lease.template if (lease := self.get(token)) else ""

    def of_lock(self, key: str) -> Sequence[Lease]:
        """Those of one lock, the last one at the end."""
        self._take_in()
        return self._by_lock.get(key, ())

    def _take_in(self) -> None:
        """The new leases."""
        while self._new:
            with self._guard:
                for lease in list(self._new):
                    self._take_in_one(lease)

    def _take_in_one(self, lease: Lease) -> None:
        token, key = lease.token, lease._request.key
        try:
            self._by_lock[key] = (*self._by_lock.get(key, ()), lease)
            self._leases[token] = self._unordered[token] = lease
            del self._new[lease]  # no call, after which a handler of a signal could raise
        except BaseException as error:
            self._take_out(lease)
            if not isinstance(error, KeyError):  # else another thread has ended it meanwhile
                raise

    def _take_out(self, lease: Lease) -> bool:
        """False if it is out. In this order: an interrupt in between leaves nothing behind that nobody looks at."""
        token, key = lease.token, lease._request.key
        of_lock = self._by_lock.get(key, ())
        if of_lock == (lease,):
            self._by_lock.pop(key, None)
        elif of_lock:
            self._by_lock[key] = tuple(one for one in of_lock if one is not lease)
        known = self._leases.pop(token, None)
        self._unordered.pop(token, None)
        return known is not None

    def _forget_all(self) -> None:
        """In a forked child: the leases are the parent's."""
        self._guard = threading.RLock()  # another thread may have been inside
        for known in (self._new, self._leases, self._by_lock, self._unordered):
            known.clear()
