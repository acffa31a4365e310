"""What callers of ``lock_all()`` may see: all of their locks or none, and nobody who waits in a circle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from django_distlock import Lease, LockBackendError, LockLost, LockNotAcquired, State
from django_distlock.backends.common.timing import Timing
from django_distlock.types import Grant, LockRequest

from ..calls import about_of
from .call import NEARLY, Judge

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from .calls import Judges


class GroupJudge(Judge):
    """Of one call. Its ``name`` is that of the lock which it asks for alone just now; "" in the step for all."""

    def __init__(self, judges: Judges, process: Process, about: Mapping[str, Any]) -> None:
        super().__init__(judges, process, about)
        self._leases: Sequence[Lease] = ()
        self._asked_alone_at = self.began  # for the lock of its name
        self.runs_out_at = self.began + NEARLY * about["ttl"]  # the first, while it waits for the next

    @property
    def names(self) -> Sequence[str]:
        return self.about["names"]  # type: ignore[no-any-return]

    @property
    def slots(self) -> int:
        slots: int = self.about["slots"].get(self.name, 1)
        return slots

    @property
    def releases(self) -> int:
        return len({*self.names})

    @property
    def most_grants(self) -> int:
        return super().most_grants * len(self.names)

    @property
    def is_far(self) -> bool:
        """Also for the one step, each of whose two attempts has half of the time of the call."""
        wait = self.about["wait"]
        attempt = inf if wait is None else max(Timing.shortest_call, wait / 2)
        return super().is_far or min(self._judges.timeout, attempt) < self._judges.time_to_grant(len({*self.names}))

    def asks(self, name: str, token: str) -> None:
        if name != self.name:
            self.name, self._asked_alone_at = name, self._judges.now
        super().asks(name, token)

    def asks_for_all(self, tokens: Mapping[str, str]) -> None:
        self.name = ""
        super().asks_for_all(tokens)

    def got_all(self, leases: Sequence[Lease]) -> None:
        self._answered()
        self.name, self._leases = "", leases
        self.granted_at = self._judges.now
        self.runs_out_at = self._judges.now + NEARLY * min(lease.remaining for lease in leases)
        for lease in dict.fromkeys(leases):
            self._judges.granted(lease, about_of(self.about, lease.name), self.began)
        if [lease.name for lease in leases] != [*self.names]:
            self._judges.fail(f"several locks: {self}: given {leases}")
        if not all(lease.is_held for lease in leases) and not (self.paused_for or self._judges.may_fail(self.began)):
            self._judges.fail(f"several locks: {self}: given {leases}, of which not all stand")
        self.holds_all()

    def holds_all(self) -> None:
        """Each of them, or none is said to be held."""
        known = [lease.is_held for lease in self._leases]
        if not all(known) and not self._judges.may_be_lost(self):
            self._judges.fail(f"several locks: {self}: {self._leases} are held in part")
        try:
            self._leases.ensure_held()  # type: ignore[attr-defined]
        except LockLost:
            if all(lease.state is not State.LOST for lease in self._leases):
                self._judges.fail(f"several locks: {self}: one of {self._leases} is told to be lost")
            raise

    @property
    def _time_allowed(self) -> float:
        """One deadline for all; what was granted is given back behind it."""
        return super()._time_allowed + len(self.names) * self._judges.store_call

    def ends(self) -> None:
        for lease in dict.fromkeys(self._leases):
            self._judges.holders.left(lease)
        super().ends()

    def failed(self, error: BaseException) -> None:
        name = self.name
        super().failed(error)
        if isinstance(error, LockNotAcquired):
            self._judge_none(error)
            if error.name != name:
                self._judges.fail(f"several locks: {self}: told that {error.name!r} is busy, and asked for {name!r}")
        if isinstance(error, LockLost) and self._leases and error.lease:
            self._judges.holders.raised_lost(error.lease)

    def _judge_none(self, error: BaseException) -> None:
        """What was granted before one was busy is given back before its caller is told so."""
        holders = self._judges.holders_in_store()
        # What came too late is given back in the background, and what ran out ends by itself, a bit later in the store.
        if holders is None or self._judges.may_be_lost(self) or self._judges.may_fail(self.began):
            return
        held = [name for token, name in self.tokens.items() if token in holders.get(name, ())]
        if held:
            self._judges.fail(f"several locks: {self}: told {error!r}, and the store has its leases of {held}")

    def _judge_patience(self, error: LockBackendError) -> None:
        """The next lock may be asked for the first time, when the one before was waited for. Its end waits for none."""
        if len(self.tokens) <= len({*self.names}) and not self.name and not self._leases:
            super()._judge_patience(error)

    @property
    def waits_since(self) -> float:
        """Since when it may be waiting for the lock that it asked for alone.

        inf: for none, or it has that one, and stands behind others of its process for the next.
        """
        has_it = self.tokens.keys() & (self._judges.holders_in_store() or {}).get(self.name, ())
        return self._asked_alone_at if self.name and not has_it else inf


def judge_step(judges: Judges, requests: Sequence[LockRequest], grants: Sequence[Grant] | None, since: float) -> None:
    """What one step, which began then, has left in the store where it granted not all of them."""
    holders = judges.holders_in_store()
    if grants is not None or holders is None or judges.may_fail(since) or any(one.in_doubt for one in requests):
        return
    if held := [one.name for one in requests if one.token in holders.get(one.name, ())]:
        judges.fail(f"several locks: {[*map(str, requests)]} were refused in one step, and the store has {held}")
