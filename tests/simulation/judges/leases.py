"""What may become of the leases of one lock in a store."""

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

    since: float
    stopped_before: float


class LeaseJudge:
    """S1 of slots, S2, S3, S4, S12, min_hold and max_hold. By token, but for the name."""

    def __init__(self, store: StoreJudge, name: str) -> None:
        self._store = store
        self._name = name
        self._released: dict[str, Released] = {}
        self._kept_until: dict[str, float] = {}
        self._granted_at: dict[str, float] = {}
        self._renewed_until: dict[str, float] = {}  # the end of its max_hold
        self._askers: dict[str, Process] = {}
        self._asked_at: dict[str, float] = {}  # first
        self._numbers: dict[str, int] = {}  # of slots
        self._unowned: dict[str, Unowned] = {}

    def promised(self, token: str, about: Mapping[str, Any]) -> None:
        """What the caller asked for: min_hold holds for others from the grant, and max_hold ends renewal."""
        granted_at = self._granted_at.get(token)
        # One that goes to another process goes by the clock of that one.
        is_there = self._store.state(self._name).lease_of(token) is not None
        if not is_there or granted_at is None or about.keys() & {"text", "inside", "detaches"}:
            return
        self._keep(token, granted_at + about.get("min_hold", 0.0) * (1 - DRIFT))
        if "max_hold" in about and not about.keys() & {"renews", "renewed_meanwhile", "reentrant"}:
            self._renewed_until.setdefault(token, self._store.now + about["max_hold"])

    def executed(self, executed: Executed) -> None:
        token = executed.token
        before, after = executed.before.lease_of(token), executed.after.lease_of(token)
        if executed.script == "acquire":
            self._askers[token] = executed.process
            self._asked_at.setdefault(token, executed.at)
            self._numbers[token] = executed.slots
        elif executed.script == "renew":
            self._judge_renewal(executed)
        elif executed.exchanged:
            self._askers[token] = executed.process
            self._asked_at.setdefault(token, executed.at)
            self._judge_exchange(executed)
        self._numbers.update(executed.before.numbers)
        self._judge_others(executed)
        self._judge_owner(executed, before, after)
        if executed.script == "release":
            self._note_release(executed, before, after)
        self._judge_rests(executed)
        self._judge_slots(executed)
        for lease in sorted(executed.after.leases, key=lambda lease: lease.fence):
            known = executed.before.lease_of(lease.token)
            if known is None:
                self._judge_grant(executed, lease)
            elif known.fence != lease.fence or known.slot != lease.slot:
                self._fail(f"S12: {known} became {lease}")
            if lease.state == "h" and (known is None or known.state != "h"):
                self._judge_taken(executed, lease)

    def _judge_others(self, executed: Executed) -> None:
        """S2: the leases of other tokens stand, and others are only handed one."""
        for lease in executed.before.leases:
            now = executed.after.lease_of(lease.token)
            has_ended = now is None and lease.expires_at <= executed.at + GRAIN
            is_exchanged = lease.token == executed.exchanged and executed.after.lease_of(executed.token) is not None
            if lease.token != executed.token and not is_exchanged and not has_ended and now != lease:
                self._fail(f"S2: {executed.script} of {executed.token[:6]} changed the lease of {lease.token[:6]}")

    def _judge_exchange(self, executed: Executed) -> None:
        """S1, S3: the one lease ends when the other one begins, in its slot, or nothing changes."""
        old, new = executed.exchanged, executed.token
        had, has = executed.before.lease_of(old), executed.after.lease_of(new)
        is_new = has is not None and executed.before.lease_of(new) is None
        if is_new and (had is None or had.state != "h" or has.slot != had.slot or executed.after.lease_of(old)):
            self._fail(f"S1: {new[:6]} was granted {has} in the place of {had}")
        if not is_new and had and had.state == "h" and had.expires_at > executed.at + GRAIN and executed.is_answered:
            released = self._released.get(new)
            if not (released and self._is_retired(released, executed.ttl)):
                self._fail(f"S3: {new[:6]} was not granted the lease of {old[:6]}")
        if executed.is_answered and (retires_for := int(executed.words[4]) / 1000):
            self._released[old] = Released(executed.at, retires_for, self._clock_error)

    def _judge_owner(self, executed: Executed, before: StoredLease | None, after: StoredLease | None) -> None:
        token = executed.token
        if before is None:
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
            if executed.takes_by_message and before.state == "c" and after:
                if after.expires_at < before.expires_at - GRAIN:
                    self._fail(f"S3: {token[:6]} shortened what it was handed")
                if after == before._replace(state="h", expires_at=after.expires_at):
                    return
            self._fail(f"S2: {token[:6]} renewed a lease that it did not hold")

    def _judge_renewal(self, executed: Executed) -> None:
        until = self._renewed_until.get(executed.token, inf) + SHORTEST_TTL
        ends_at = executed.at + int(executed.words[1]) / 1000
        if ends_at > until + self._store.soon and self._store.is_undisturbed(executed.process, executed.at):
            self._fail(f"{executed.token[:6]} is renewed until {ends_at:.3f} s, beyond its max_hold at {until:.3f} s")

    def _note_release(self, executed: Executed, before: StoredLease | None, after: StoredLease | None) -> None:
        token = executed.token
        if executed.is_offer:
            if before and (before.state != "c" or executed.may_be_taken) and after != before:
                self._fail(f"S2: a hand-back of {token[:6]} changed the lease that was taken")
            return
        if not executed.is_answered:
            return
        if after and after.state != "r":
            self._fail(f"S4: {token[:6]} gave the lock up and still has it")
        if executed.is_forced:  # by an operator; a waiter that had not taken the lock yet waits on
            self._kept_until.pop(token, None)
            return
        self._released[token] = Released(executed.at, executed.retires_for, self._clock_error)
        if before and before.state == "h" and executed.cooldown:
            self._keep(token, executed.at + executed.cooldown)

    def _keep(self, token: str, until: float) -> None:
        self._kept_until[token] = max(self._kept_until.get(token, -inf), until)

    def _judge_rests(self, executed: Executed) -> None:
        for token, until in list(self._kept_until.items()):
            if executed.at >= until - GRAIN:
                del self._kept_until[token]
            elif executed.after.lease_of(token) is None:
                self._fail(f"min_hold of {token[:6]} was cut short by {executed.script} of {executed.token[:6]}")

    def _judge_slots(self, executed: Executed) -> None:
        """S1, S3: each slot is of one lease, and each token has one."""
        leases = executed.after.leases
        if len({lease.slot for lease in leases}) < len(leases) or len(executed.after.tokens) < len(leases):
            self._fail(f"S1: {executed.script} of {executed.token[:6]} left {leases}")

    def _judge_grant(self, executed: Executed, lease: StoredLease) -> None:
        token = lease.token
        before = [other for other in executed.after.leases if other.fence < lease.fence]
        most = self._numbers.get(token, 1)
        if not executed.exchanged and (len(before) >= most or lease.slot > most):
            self._fail(f"S1: {token[:6]} was granted slot {lease.slot} of {most}, while {len(before)} had others")
        if lease.fence <= self._store.last_fence:
            self._fail(f"S12: {token[:6]} has the number {lease.fence}, not above {self._store.last_fence}")
        if lease.fence < self._store.server.store.micros():
            # In a split brain each side knows only its own numbers, and grants go by the clock alone.
            self._fail(f"S12: the number {lease.fence} of {token[:6]} is older than its grant")
        self._store.last_fence = max(lease.fence, self._store.last_fence)
        self._granted_at[token] = executed.at
        if lease.state == "h":
            if executed.token != token:
                self._fail(f"S2: {token[:6]} was granted the lock for good while it did not ask")
        elif lease.expires_at > executed.at + Timing.grant_ttl + GRAIN:
            self._fail(f"S7: what was handed to {token[:6]} is kept for it too long")

    def _judge_taken(self, executed: Executed, lease: StoredLease) -> None:
        """At once, or after it was handed over."""
        released = self._released.get(lease.token)
        if released and self._is_retired(released, executed.ttl):
            self._fail(f"S4: {lease.token[:6]} is granted the lock, though it gave it up")

    def watch(self) -> None:
        """S4: a lease of which nobody knows any more is released, as soon as the store answers."""
        unowned: dict[str, Unowned] = {}
        leases = () if self._name.startswith(OWN_NAMES) else self._store.state(self._name).leases
        for lease in leases:
            token, process = lease.token, self._askers.get(lease.token)
            asked_at = self._asked_at.get(token, inf)
            is_owned = self._store.simulation.judges.holders.owns(self._name, token, asked_at, process)
            if lease.state != "h" or process is None or is_owned:
                continue
            known = self._unowned.get(token, Unowned(self._store.now, process.stopped_for))
            unowned[token] = known
            if (
                self._store.now - known.since > Timing.retry_delay + self._store.soon
                and process.stopped_for == known.stopped_before
                and self._store.is_undisturbed(process, known.since)
            ):
                self._fail(f"S4: nobody knows of the lease of {token[:6]} since {known.since:.3f} s")
        self._unowned = unowned

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
