"""What may become of the lease of one lock in a store."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.common.timing import Timing
from django_distlock.options import SHORTEST_TTL

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from .stores import Executed, StoredLease, StoreJudge

OWN_NAMES = "django_distlock."  # of locks by which the package keeps in mind what was adopted
DRIFT = 0.01  # share by which clocks differ
GRAIN = 0.002  # seconds by which times may differ: the store counts in milliseconds


class Released(NamedTuple):
    """When a token was given up, and for how many seconds it is retired. 0: no command with it is on its way."""

    at: float
    retires_for: float
    clock_error: float


class Unowned(NamedTuple):
    """A lease that the store has and of which nobody knows."""

    token: str
    since: float
    stopped_before: float


class LeaseJudge:
    """S2, S3, S4, S12, min_hold and max_hold."""

    def __init__(self, store: StoreJudge, name: str) -> None:
        self._store = store
        self._name = name
        self._released: dict[str, Released] = {}  # by token
        self._kept_until = -inf
        self._granted_at: dict[str, float] = {}  # by token
        self._renewed_until: dict[str, float] = {}  # by token: the end of its max_hold
        self._askers: dict[str, Process] = {}
        self._asked_at: dict[str, float] = {}  # first, by token
        self._unowned: Unowned | None = None

    def promised(self, token: str, about: Mapping[str, Any]) -> None:
        """What the caller asked for: min_hold holds for others from the grant, and max_hold ends renewal."""
        lease = self._store.state(self._name).lease
        granted_at = self._granted_at.get(token)
        # One that goes to another process goes by the clock of that one.
        if lease is None or lease.token != token or granted_at is None or about.keys() & {"text", "inside", "detaches"}:
            return
        self._kept_until = max(self._kept_until, granted_at + about.get("min_hold", 0.0) * (1 - DRIFT))
        if "max_hold" in about and not about.keys() & {"renews", "renewed_meanwhile", "reentrant"}:
            self._renewed_until.setdefault(token, self._store.now + about["max_hold"])

    def executed(self, executed: Executed) -> None:
        before, after = executed.before.lease, executed.after.lease
        if executed.script == "acquire":
            self._askers[executed.token] = executed.process
            self._asked_at.setdefault(executed.token, executed.at)
        elif executed.script == "renew":
            self._judge_renewal(executed)
        self._judge_owner(executed, before, after)
        if executed.script == "release":
            self._note_release(executed, before, after)
        if after and (before is None or before.token != after.token):
            self._judge_grant(executed, after)
        elif after and before and after.fence != before.fence:
            self._fail(f"S12: the number of {after.token[:6]} changed from {before.fence} to {after.fence}")
        if after and after.state == "h" and (before is None or (before.token, before.state) != (after.token, "h")):
            self._judge_taken(executed, after)

    def _judge_owner(self, executed: Executed, before: StoredLease | None, after: StoredLease | None) -> None:
        token = executed.token
        if before is None or before.token != token:
            if before and after != before:
                self._fail(f"S2: {executed.script} of {token[:6]} changed the lease of {before.token[:6]}")
            if executed.script == "renew" and executed.reply == 1:
                self._fail(f"S2: {token[:6]} renewed a lease that it did not hold")
            return
        if executed.script == "release":
            return
        if before.state == "h":
            if executed.script == "acquire" and executed.is_answered and not executed.is_granted:
                self._fail(f"S3: {token[:6]} was refused the lock, which it has")
            if after and after.expires_at < before.expires_at - GRAIN:
                self._fail(f"S3: {executed.script} of {token[:6]} shortened its lease")
        elif executed.script == "renew" and (executed.reply == 1 or after != before):
            self._fail(f"S2: {token[:6]} renewed a lease that it did not hold")

    def _judge_renewal(self, executed: Executed) -> None:
        until = self._renewed_until.get(executed.token, inf) + SHORTEST_TTL
        ends_at = executed.at + int(executed.words[1]) / 1000
        if ends_at > until + self._store.soon and self._store.is_undisturbed(executed.process, executed.at):
            self._fail(f"{executed.token[:6]} is renewed until {ends_at:.3f} s, beyond its max_hold at {until:.3f} s")

    def _note_release(self, executed: Executed, before: StoredLease | None, after: StoredLease | None) -> None:
        token = executed.token
        is_owner = before is not None and before.token == token
        if executed.is_offer:
            if before and before.state != "c" and after != before:
                self._fail(f"S2: a hand-back of {token[:6]} changed the lease of {before.token[:6]}")
            return
        if not executed.is_answered:
            return
        if after and after.token == token and after.state != "r":
            self._fail(f"S4: {token[:6]} gave the lock up and still has it")
        if executed.is_forced:  # by an operator; a waiter that had not taken the lock yet waits on
            self._kept_until = -inf
            return
        self._released[token] = Released(executed.at, executed.retires_for, self._clock_error)
        if is_owner and before and before.state == "h" and executed.cooldown:
            self._kept_until = max(self._kept_until, executed.at + executed.cooldown)

    def _judge_grant(self, executed: Executed, lease: StoredLease) -> None:
        if executed.at < self._kept_until - GRAIN:
            self._fail(f"min_hold was cut short by the grant to {lease.token[:6]}")
        if lease.fence <= self._store.last_fence:
            self._fail(f"S12: {lease.token[:6]} has the number {lease.fence}, not above {self._store.last_fence}")
        if lease.fence < self._store.server.store.micros():
            # In a split brain each side knows only its own numbers, and grants go by the clock alone.
            self._fail(f"S12: the number {lease.fence} of {lease.token[:6]} is older than its grant")
        self._store.last_fence = max(lease.fence, self._store.last_fence)
        self._granted_at[lease.token] = executed.at
        if lease.state == "h":
            if executed.token != lease.token:
                self._fail(f"S2: {lease.token[:6]} was granted the lock for good while it did not ask")
        elif lease.expires_at > executed.at + Timing.grant_ttl + GRAIN:
            self._fail(f"S7: what was handed to {lease.token[:6]} is kept for it too long")

    def _judge_taken(self, executed: Executed, lease: StoredLease) -> None:
        """At once, or after it was handed over."""
        released = self._released.get(lease.token)
        if released and self._is_retired(released, executed.ttl):
            self._fail(f"S4: {lease.token[:6]} is granted the lock, though it gave it up")

    def watch(self) -> None:
        """S4: a lease of which nobody knows any more is released, as soon as the store answers."""
        lease = self._store.state(self._name).lease
        if lease is None or lease.state != "h" or self._name.startswith(OWN_NAMES):
            self._unowned = None
            return
        process = self._askers.get(lease.token)
        asked_at = self._asked_at.get(lease.token, inf)
        if process is None or self._store.simulation.judges.holders.owns(self._name, lease.token, asked_at):
            self._unowned = None
        elif self._unowned is None or self._unowned.token != lease.token:
            self._unowned = Unowned(lease.token, self._store.now, process.stopped_for)
        elif (
            self._store.now - self._unowned.since > Timing.retry_delay + self._store.soon
            and process.stopped_for == self._unowned.stopped_before
            and self._store.is_undisturbed(process, self._unowned.since)
        ):
            self._fail(f"S4: nobody knows of the lease of {lease.token[:6]} since {self._unowned.since:.3f} s")

    def _is_retired(self, released: Released, ttl: float) -> bool:
        """For as long as a command with its token may arrive, ``ttl`` seconds. A clock that is set ends that early."""
        if released.clock_error != self._clock_error:
            return False
        return not released.retires_for or self._store.now < released.at + max(released.retires_for, ttl) - GRAIN

    @property
    def _clock_error(self) -> float:
        return self._store.server.store.clock_error

    def _fail(self, text: str) -> None:
        self._store.fail(f"{text} ({self._name})")
