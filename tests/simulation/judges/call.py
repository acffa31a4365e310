"""What one call must never show. Each judgement names the promise (see docs/internals/promises.md) that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from django_distlock import Lease, LockBackendError, LockLost, LockNotAcquired, LockNotHeld, LockReentry, State, locks
from django_distlock.core.acquire import MOST_LATE_GRANTS
from django_distlock.core.holds import acquired_here
from django_distlock.types import current_execution

from ..calls import BodyError
from ..engine.lines import Struck
from ..engine.scheduler import Process

if TYPE_CHECKING:
    from .calls import Judges
    from .holders import Passed

BEYOND = 1.0  # seconds that an acquisition may last beyond its wait (docs/settings.md, "How long a call lasts")
REQUESTS_TO_ADOPT = 3
SCHEDULING = 1.0  # seconds that threads and the network may take in addition
WAYS = 30  # ways that bytes go at most, to connect and to renew, before a lease is over
LAST_PAUSE = 0.6  # seconds before its end in which a call begins no further attempt
NEARLY = 0.95  # of a length of time, by clocks that drift


@dataclass
class Wait:
    """Of one call, until it was answered, as far as that is known."""

    began: float
    ended: float = inf


class Judge:
    """Of one call."""

    def __init__(self, judges: Judges, process: Process, about: Mapping[str, Any]) -> None:
        self._judges = judges
        self.process = process
        self.about = about
        self.name: str = about.get("name", "")
        self.text = ""  # of the lease that it adopts
        self.began = self.asked_at = judges.now
        self.stood_before = judges.stood_still_for
        self._thread = judges.thread
        self._paused_before = self._thread.paused_for
        self.granted_at = self.began
        self.is_waiting = True
        self.is_leaving = False
        self.was_told_of_outage = False
        self.lease: Lease | None = None
        self.passed: Passed | None = None  # what it adopts
        self.runs_out_at = inf  # nearly: its lease, unless it is renewed
        self.fences: set[int] = set()  # of what the store granted it
        self.tokens: dict[str, str] = {}  # with which it asked, and the names of the locks
        self.wait = Wait(self.began)
        self.execution = current_execution()
        self._body_error: BaseException | None = None

    @property
    def took(self) -> float:
        """Seconds since it began to wait for the store, but for those in which it stood still."""
        return self._judges.now - self.asked_at - (self._judges.stood_still_for - self.stood_before)

    @property
    def names(self) -> Sequence[str]:
        """Of all locks that it asks for."""
        return [name for name in (self.name, self.about.get("inside")) if name]

    @property
    def slots(self) -> int:
        slots: int = self.about.get("slots", 1)
        return slots

    @property
    def releases(self) -> int:
        """Requests that end it, one after another."""
        return 1

    @property
    def most_grants(self) -> int:
        """That it may be given: the last of them in time, or it fails."""
        return MOST_LATE_GRANTS

    def asks(self, name: str, token: str) -> None:
        """The store, for one lock."""
        self.tokens[token] = name

    def asks_for_all(self, tokens: Mapping[str, str]) -> None:
        """In one step. By token, the names of the locks."""
        self.tokens.update(tokens)

    @property
    def waits_since(self) -> float:
        """Since when it may be waiting for the lock of its name."""
        return self.began

    @property
    def paused_for(self) -> float:
        """Seconds for which its thread was paused between two lines, since it began."""
        return self._thread.paused_for - self._paused_before

    @property
    def is_far(self) -> bool:
        """Whether the store is too far away for so short a lease. To connect takes several times the distance."""
        ttl = min(self.about.get("ttl", 1.0), self.about.get("renews", inf))
        wait = self.about.get("wait")
        ends_after = inf if wait is None else wait + BEYOND
        return float(ttl) < WAYS * self._judges.distance or ends_after < self._judges.time_to_connect

    def got(self, lease: Lease | None) -> None:
        self._answered()
        if lease and lease.state is State.UNAVAILABLE:
            self._judge_ungranted(lease)
            return
        self.lease, self.granted_at = lease, self._judges.now
        if lease:
            self.runs_out_at = self._judges.now + NEARLY * lease.remaining
            self._judges.granted(lease, self.about, self.began)
        elif self._may_be_crowded:
            return
        elif self.about.get("wait", 0) is None:
            self._judges.fail(f"S16: {self}: a caller who waits as long as it takes was told that the lock is busy")
        elif self.name:
            self._judge_busy()

    def got_by(self, process: Process, name: str) -> Lease | None:
        """The lease that it was just given; None where it is over already. Others may have a later one by now."""
        given = [lease for lease in acquired_here() if (lease.using, lease.name) == (process.name, name)]
        lease = max((lease for lease in locks.leases() if lease in given), key=lambda lease: lease.fence, default=None)
        lease = lease or next((lease for lease in given if lease.state is State.UNAVAILABLE), None)
        if lease:
            self.got(lease)
        else:
            self._answered()
        return lease

    def _judge_ungranted(self, lease: Lease) -> None:
        """S16: who goes on without the lock is no holder. From now on, nobody knows what the store has of its token."""
        self._judges.runs_without(lease)
        if self.about.get("on_unavailable") != "run" or not self.was_told_of_outage:
            self._judges.fail(f"S16: {self}: goes on without the lock, and was not told why")
        if lease.is_held or lease.remaining or lease.fence or lease in locks.leases():
            self._judges.fail(f"S16: {self}: {lease!r} was not granted, and is taken for one that was")
        for ask in (lease.ensure_held, lease.renew, lease.detach):
            try:
                ask()
            except LockNotHeld:
                continue
            self._judges.fail(f"S16: {self}: {ask.__name__}() of {lease!r} says nothing")

    def _judge_busy(self) -> None:
        """S16: "busy" is told of a lock that somebody had."""
        if not self._judges.was_taken_since(self.name, self.began, self.slots):
            self._judges.fail(f"S16: {self}: told that the lock is busy, though it was free for it")

    @property
    def _may_be_crowded(self) -> bool:
        """Whether as many others as it allows waited: callers of its process, or places in the store."""
        most = self.about.get("max_waiters")
        return most is not None and self._judges.most_waiters(self) >= most

    @contextmanager
    def body(self) -> Iterator[None]:
        """What ``with`` guards."""
        try:
            yield
        except BaseException as error:
            self._body_error = error
            raise
        finally:
            self.leaves()

    def leaves(self) -> None:
        """Its work is over, and it gives the lock up."""
        self.asked_at, self.stood_before, self.is_leaving = self._judges.now, self._judges.stood_still_for, True

    def _answered(self) -> None:
        """S16: no call outlasts its time."""
        self.is_waiting, self.wait.ended = False, self._judges.now
        self._judges.check_time(self, self._time_allowed)

    @property
    def _time_allowed(self) -> float:
        """Seconds after which it is answered."""
        wait, beyond = self.about.get("wait"), BEYOND + self._judges.asking_time(self.about)
        if isinstance(self.execution, asyncio.Task):
            beyond += self._judges.task_time
        if "text" in self.about:
            return REQUESTS_TO_ADOPT * self._judges.store_call
        if "wait" in self.about:
            return inf if wait is None else float(wait) + beyond
        return self._judges.store_call

    def ends(self) -> None:
        """Without an error."""
        if self.lease:
            self._judges.holders.left(self.lease)
        if self._body_error:
            self._judges.fail(f"S6: {self}: nobody was told what the body raised: {self._body_error!r}")

    def failed(self, error: BaseException) -> None:
        """S6: what the body raised is raised; S16 and S5 of the rest."""
        judges = self._judges
        if self._body_error and self._body_error is not error and not isinstance(error, Struck):
            judges.fail(f"S6: {self}: the body raised {self._body_error!r}, and its caller was told {error!r}")
        match error:
            case BodyError():
                return
            case Struck():
                raise error
            case LockNotAcquired():
                if self.is_waiting:
                    self._answered()
                    if error.reason == "busy":
                        self._judge_busy()
                    elif not self._may_be_crowded:
                        judges.fail(f"max_waiters: {self}: told that it is crowded, and fewer waited")
            case LockReentry():
                if self.about.get("inside") != self.name:
                    judges.fail(f"{self}: {error!r}")
            case LockBackendError():
                if self.is_waiting:
                    self._answered()
                self.judge_outage(error)
            case LockLost():
                if not judges.may_be_lost(self):
                    judges.fail(f"S5: {self}: {error!r}, though nothing was lost")
                if self.lease and "inside" not in self.about:
                    judges.holders.raised_lost(self.lease)
            case LockNotHeld():
                if not (self.about.get("detaches") or self.about.get("releases_twice") or "text" in self.about):
                    judges.fail(f"{self}: {error!r}")
            case _:
                judges.fail(f"{self}: {type(error).__name__}: {error}", error)

    def judge_outage(self, error: LockBackendError) -> None:
        """S16: something has failed where a store could not be asked."""
        judges, self.was_told_of_outage = self._judges, True
        judges.told(error)
        is_explained = self.is_far or judges.was_paused(self) or judges.was_freed_in_part(self)
        is_explained = is_explained or judges.patience(error, self.about.get("wait", 0)) == inf
        if not is_explained and not judges.calls_may_fail(self.began, self.process):
            judges.fail(f"{self}: {error!r}, though nothing failed")
        is_holder = "frees" not in self.about  # an operator is told
        if self.is_leaving and is_holder and not error.was_asked and error is not self._body_error:
            judges.fail(f"S16: {self}: a release is left to the background, and its caller was told {error!r}")
        if error.is_final and not judges.may_be_final(error):
            judges.fail(f"S16: {self}: told that this does not pass by itself: {error!r}")
        if self.lease is None and not error.is_final:
            self._judge_patience(error)

    def _judge_patience(self, error: LockBackendError) -> None:
        """S16: a caller who waits is not failed by what may pass meanwhile."""
        if len(self.fences) == MOST_LATE_GRANTS:  # each of which came too late
            return
        wait = self.about.get("wait", 0)
        longest, lasted = inf if wait is None else wait, self._judges.now - self.asked_at
        least = min(longest, self._judges.patience(error, wait))
        if lasted < least - LAST_PAUSE:
            self._judges.fail(f"S16: {self}: failed after {lasted:.3f} s, before {least:.3f} s: {error!r}")
        has_waited = self.took > self._judges.longest_attempt + SCHEDULING
        if has_waited and lasted < NEARLY * longest:  # its deadline comes while it stands still, too
            self._judges.fail(f"S16: {self}: failed after {self.took:.3f} s, though it had waited before: {error!r}")

    def __str__(self) -> str:
        return f"{self.process} {dict(self.about)} since {self.began:.3f} s"
