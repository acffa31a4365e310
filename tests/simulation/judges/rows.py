"""What may become of a lock that is a row: in a database, or in local memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf, log
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.common import state
from django_distlock.backends.common.state import (
    CLAIMED,
    HELD,
    Attempt,
    Decision,
    Row,
    StoredLease,
    Waiter,
    waiters_from_text,
)
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database.polling import GROWTH
from django_distlock.backends.database.sql import leases_of
from django_distlock.types import Holder

from .leases import DRIFT, GRAIN, OWN_NAMES
from .queues import NUMBERS

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from ..simulation import Simulation

DECIDES = 2.0  # seconds at most between the look of a call at the row and its change
MOST_LOOKS = 14  # of a waiter at a lock that does not move, in WINDOW seconds
LOOKS_AT_FIRST = 10  # of who begins to wait, while its pauses grow
# The pauses at a file begin shorter: so many more looks until they are as long as the first one elsewhere.
MORE_IN_FILE = ceil(log(Timing.poll_interval_shortest / Timing.poll_interval_shortest_of_file, GROWTH))
LOOKS_AT_END = 2  # of a waiter when a lease was to end, which is before the usual look where it is that short
WINDOW = 2.0
SETTLES = 1.0  # seconds in which the pauses of a waiter grow


class RowState(NamedTuple):
    """``now``: when this was so, in seconds on the clock of the store. ``fence``: of the last grant."""

    now: float
    fence: int = 0
    leases: tuple[StoredLease, ...] = ()
    waiters: tuple[Waiter, ...] = ()

    def lease_of(self, token: str) -> StoredLease | None:
        return next((lease for lease in self.leases if lease.token == token), None)

    def live_leases(self, now: float) -> list[StoredLease]:
        return [lease for lease in self.leases if lease.expires / 1e6 > now]

    def live(self, now: float) -> list[Waiter]:
        """Those that a store must reckon with, at that moment."""
        return [one for one in self.waiters if one.seen / 1e6 + Timing.waiter_expires_after > now + GRAIN]

    def free_at(self, slots: int) -> float:
        """When there are fewer leases than that, and nobody stands in its queue, if nothing else happens."""
        ends = sorted(lease.expires / 1e6 for lease in self.leases)
        taken_until = ends[len(ends) - slots] if len(ends) >= slots else -inf
        return max([taken_until, *(one.seen / 1e6 + Timing.waiter_expires_after for one in self.waiters)])

    @classmethod
    def of(cls, row: Mapping[str, Any], now: float) -> RowState:
        """``row``: of a table."""
        return cls(now, row["fence"], tuple(leases_in(row)), tuple(waiters_from_text(row["waiters"])))


def leases_in(row: Mapping[str, Any]) -> list[StoredLease]:
    return leases_of(row["token"], row["state"], row["fence"], row["expires"], row["holder"], row["others"])


class Looks:
    """Of one process, at one grant of the lock."""

    def __init__(self, fence: int, since: float) -> None:
        self.fence, self.since = fence, since
        self.recent: deque[float] = deque()


class RowJudge:
    """S1, S3, S4, S7, S10, S11, S12 and min_hold of one lock. ``looks_within``: seconds, of a waiter.

    ``exchanged``: by the token of a lease that of the one in whose place it was to be granted.
    """

    def __init__(self, simulation: Simulation, name: str, looks_within: float, exchanged: Mapping[str, str]) -> None:
        self._exchanged = exchanged
        self._simulation = simulation
        self._name = name
        self._looks_within = looks_within
        self._state = RowState(-inf)
        self._places: dict[str, float] = {}  # by token
        self._granted_at: dict[str, float] = {}  # by token
        self._kept_until: dict[str, float] = {}  # by token
        self._taken_until: dict[int, float] = {}  # by numbers of slots
        self._idle_since: dict[tuple[str, str], float] = {}  # what nobody takes
        self._numbers_of_places: list[tuple[float, int]] = []  # since when there are so many
        self._unowned_since: dict[str, float] = {}  # by token
        self._looks: dict[Process, Looks] = {}
        self.brought_back: Sequence[StoredLease] = ()  # leases, by the last crash
        self._places_brought_back: set[str] = set()  # by token
        self._lasts = inf  # seconds, the shortest of the leases since its grant, or its last renewal
        self._clock_set_at = -inf  # that of the store: until a while later, times tell nothing

    # Told by the world

    def stands(self, state: RowState) -> None:
        """It was read, and nothing was changed."""
        self._note_taken(self._state, state.now)
        self._state = state
        self._note_places()

    def changed(self, after: RowState) -> None:
        before, self._state = self._state, after
        self._note_places()
        now = after.now
        self._lasts = min((lease.expires / 1e6 - now for lease in after.leases), default=inf)
        self._note_taken(before, now)
        for one in after.waiters:
            self._places[one.token] = min(self._places.get(one.token, inf), one.place)
        self._judge_slots(after)
        self._judge_rests(after)
        for lease in after.leases:
            known = before.lease_of(lease.token)
            if known is None or known.fence != lease.fence:
                if lease.state in (HELD, CLAIMED):
                    self._judge_grant(before, after, lease)
            elif known.state == lease.state == HELD and lease.expires < known.expires - GRAIN * 1e6:
                self._fail(f"S3: the lease of {lease.token[:6]} was shortened")

    def _judge_slots(self, after: RowState) -> None:
        """S1, S3: each slot is of one lease, and each token has one."""
        leases = after.live_leases(after.now)
        if len({lease.slot for lease in leases}) < len(leases) or len({one.token for one in leases}) < len(leases):
            self._fail(f"S1: the row has {leases}")

    def _judge_rests(self, after: RowState) -> None:
        for token, until in list(self._kept_until.items()):
            if self._now >= until - GRAIN or self._simulation.judges.is_freed(token):
                del self._kept_until[token]
            elif after.lease_of(token) is None and self._now > self._clock_set_at + DECIDES:
                self._fail(f"min_hold of {token[:6]} was cut short")

    def _judge_grant(self, before: RowState, after: RowState, lease: StoredLease) -> None:
        now, token = after.now, lease.token
        if not self._simulation.world.may_repeat_numbers and lease.fence <= before.fence:
            self._fail(f"S12: {token[:6]} has the number {lease.fence}, not above {before.fence}")
        old = before.lease_of(self._exchanged.get(token, ""))
        # One that stood until then ends in the same step, whoever waits.
        is_exchanged = old and (old.slot, old.state) == (lease.slot, HELD) and not after.lease_of(old.token)
        if not is_exchanged and self._now > self._clock_set_at + DECIDES:
            self._judge_order(before, after, lease)
            others = [one for one in after.live_leases(now + GRAIN) if one.fence < lease.fence]
            waiting = (one.slots for one in before.waiters if one.token == token)
            most = next(waiting, None) or (Holder.from_text(lease.holder).slots if lease.state == HELD else 1)
            if len(others) >= most or lease.slot > most:
                self._fail(f"S1: {token[:6]} was granted slot {lease.slot} of {most}, while {len(others)} had others")
            had = [one for one in before.live_leases(now + GRAIN) if one.slot == lease.slot and one.state == HELD]
            if lease.state == HELD and had:
                self._fail(f"S1: {token[:6]} was granted the slot that {had[0].token[:6]} had")
            if lease.state == CLAIMED and lease.expires / 1e6 > now + Timing.grant_ttl + GRAIN:
                self._fail(f"S7: what was handed to {token[:6]} is kept for it too long")
        # It was decided when the row was read; a number is not older than that.
        self._granted_at[token] = self._now - max(0.0, now - lease.fence / 1e6)

    def _judge_order(self, before: RowState, after: RowState, lease: StoredLease) -> None:
        place = self._places.get(lease.token, inf)
        stay = {one.token for one in after.waiters}  # the others leave, or are granted a slot, in the same step
        for one in before.live(after.now):
            if one.place < place and one.token in stay:
                self._fail(f"S10: {lease.token[:6]} was granted the lock before {one.token[:6]}, which came earlier")
        record = next((one for one in before.waiters if one.token == lease.token), None)
        if lease.state == CLAIMED and record:
            silent_for = after.now - record.seen / 1e6
            decides = DECIDES + max((self._simulation.stopped_for(one.token) for one in before.leases), default=0.0)
            is_slow = self._simulation.last_fault_of_servers() > self._now - decides
            if silent_for > Timing.waiter_expires_after + decides and not is_slow:
                self._fail(f"S7: {lease.token[:6]} was handed the lock, and has not looked for {silent_for:.1f} s")

    def looked(self, process: Process) -> None:
        """S11: a waiter without notifications looks less and less often while nothing moves."""
        state = self._state
        looks = self._looks.get(process)
        if looks is None or looks.fence != state.fence or looks.recent[-1] < self._now - SETTLES:
            looks = self._looks[process] = Looks(state.fence, self._now)
        looks.recent.append(self._now)
        while looks.recent[0] < self._now - WINDOW:
            looks.recent.popleft()
        newcomers = self._simulation.newcomers(process, self._name, self._now - WINDOW - SETTLES)
        ends = len(state.leases) * WINDOW / self._lasts if 0.0 < self._lasts < Timing.look_interval else 0.0
        at_first = LOOKS_AT_FIRST + (MORE_IN_FILE if self._simulation.world.name == "sqlite" else 0)
        most = MOST_LOOKS + at_first * newcomers + LOOKS_AT_END * ends
        if self._now - looks.since > SETTLES + WINDOW and len(looks.recent) > most:
            self._fail(f"S11: {process} polls: {len(looks.recent)} looks in {WINDOW:g} s")

    def reverted(self, state: RowState) -> None:
        """A crash has undone a release, perhaps, for which nobody waited: that lease lasts until it runs out."""
        self.stands(state)
        self.brought_back = state.leases
        self._places_brought_back = {one.token for one in state.waiters}

    def promised(self, token: str, about: Mapping[str, Any]) -> None:
        """``min_hold`` counts from the grant. One that goes to another process goes by the clock of that one."""
        granted_at = self._granted_at.get(token)
        if (
            granted_at is not None
            and self._state.lease_of(token) is not None
            and not self._simulation.judges.is_freed(token)
            and not about.keys() & {"text", "inside", "detaches"}
        ):
            until = granted_at + about.get("min_hold", 0.0) * (1 - DRIFT)
            self._kept_until[token] = max(self._kept_until.get(token, -inf), until)

    def lost_data(self) -> None:
        self._state, self._kept_until = RowState(-inf), {}
        self._taken_until = dict.fromkeys(NUMBERS, self._now)

    def sets_clock(self, now: float) -> None:
        """``now``: by the clock as it was."""
        self._note_taken(self._state, now)
        self._kept_until, self._clock_set_at = {}, self._now

    def taken_until(self, now: float, slots: int) -> float:
        """When so many had the lock last, or somebody stood in its queue. ``now``: by the store's clock."""
        self._note_taken(self._state, now)
        return self._taken_until[slots]

    def _note_places(self) -> None:
        self._numbers_of_places.append((self._now, len(self._state.waiters)))

    def most_places(self, moment: float) -> int:
        """At that moment, or later."""
        first = bisect_left(self._numbers_of_places, (moment, 0))
        return max((number for _, number in self._numbers_of_places[max(0, first - 1) :]), default=0)

    def _note_taken(self, state: RowState, now: float) -> None:
        for slots in NUMBERS:
            until = self._now + min(0.0, state.free_at(slots) - now)
            self._taken_until[slots] = max(self._taken_until.get(slots, -inf), until)

    # As time passes

    def watch(self, now: float) -> None:
        self._judge_promptness(self._state, now)
        self._judge_owners(self._state, now)

    def _judge_promptness(self, state: RowState, now: float) -> None:
        """S11: who is handed the lock takes it soon, and so does the first in the queue if a slot is free for it."""
        idle = {
            ("handed to", lease.token)
            for lease in state.leases
            if lease.state == CLAIMED and not self._has_left(lease.token)
        }
        waiters = state.live(now)
        if waiters and len(state.live_leases(now)) < waiters[0].slots:
            idle.add(("free for", waiters[0].token))
        self._idle_since = {what: self._idle_since.get(what, self._now) for what in idle}
        judges = self._simulation.judges
        for (how, token), since in self._idle_since.items():
            if self._now - since > judges.soon + self._looks_within and not judges.may_fail(since):
                self._fail(f"S11: nobody took the lock for {self._now - since:.3f} s, which is {how} {token[:6]}")

    def _has_left(self, token: str) -> bool:
        """Whether a crash has brought back the place of a waiter that is gone."""
        return token in self._places_brought_back and not self._simulation.judges.is_waited_with(token)

    def _judge_owners(self, state: RowState, now: float) -> None:
        """S4: a lease of which nobody knows any more is released, as soon as the store answers."""
        judges, unowned = self._simulation.judges, {}
        for lease in state.live_leases(now):
            token, asker = lease.token, self._simulation.asker(lease.token)
            is_held = lease.state == HELD and not self._name.startswith(OWN_NAMES)
            is_held = is_held and all(token != one.token for one in self.brought_back)
            if not is_held or asker is None or judges.holders.owns(self._name, token, asker.at, asker.process):
                continue
            unowned[token] = since = self._unowned_since.get(token, self._now)
            if self._now - since > Timing.retry_delay + judges.soon and not judges.may_fail(since):
                self._fail(f"S4: nobody knows of the lease of {token[:6]} since {since:.3f} s")
        self._unowned_since = unowned

    @property
    def _now(self) -> float:
        return self._simulation.scheduler.now

    def _fail(self, text: str) -> None:
        self._simulation.judges.fail(f"{text} ({self._name})")


class RowJudges:
    """Of all locks of a store whose clock is ``now()``, by their names."""

    def __init__(self, simulation: Simulation, looks_within: float) -> None:
        self._simulation, self._looks_within = simulation, looks_within
        self._of: dict[str, RowJudge] = {}
        self._lost_data_at = -inf
        self._exchanged: dict[str, str] = {}
        state.exchange = self._noted(state.exchange)  # type: ignore[assignment] - as below
        state.acquire = self._judged(state.acquire)  # type: ignore[assignment] - it takes the same, and returns the same
        state.release = self._judged(state.release)

    def _judged(self, decide: Callable[..., Decision]) -> Callable[..., Decision]:
        """S10: who finds slots free, or frees them, hands them to all who wait for one."""

        def decided(row: Row, by: Attempt | str, *about: Any, **options: Any) -> Decision:
            token = by if isinstance(by, str) else by.token
            has_one = isinstance(by, Attempt) and (token in row.retired or row.lease_of(token) is not None)
            had_place = any(one.token == token for one in row.waiters)
            decision = decide(row, by, *about, **options)
            if isinstance(by, Attempt) and not had_place and not by.place:
                self._judge_crowd(row, by, decision)
            if not has_one and row.waiters and len(row.leases) < row.waiters[0].slots:
                self._simulation.judges.fail(f"S10: a slot was left free, and not handed to {row.waiters[0].token[:6]}")
            return decision

        return decided

    def _judge_crowd(self, row: Row, attempt: Attempt, decision: Decision) -> None:
        """max_waiters: who allows so many others is given a place beside fewer, and is refused one beside as many."""
        most, token = attempt.most_places, attempt.token
        others = sum(one.token != token for one in row.waiters)
        has_place = len(row.waiters) > others
        if (has_place and 0 < most <= others) or (decision.is_crowded and others < most):
            place = "given" if has_place else "refused"
            self._simulation.judges.fail(
                f"max_waiters: {token[:6]} was {place} a place beside {others}, where {most} are the most"
            )

    def _noted(self, decide: Callable[..., Decision]) -> Callable[..., Decision]:
        def noted(row: Row, old: str, attempt: Attempt, *about: Any, **options: Any) -> Decision:
            self._exchanged[attempt.token] = old
            return decide(row, old, attempt, *about, **options)

        return noted

    def __getitem__(self, name: str) -> RowJudge:
        if name not in self._of:
            self._of[name] = RowJudge(self._simulation, name, self._looks_within, self._exchanged)
        return self._of[name]

    def watch(self, now: float) -> None:
        for judge in list(self._of.values()):
            judge.watch(now)

    def lost_data(self) -> None:
        self._lost_data_at = self._simulation.scheduler.now
        for judge in self._of.values():
            judge.lost_data()

    def sets_clock(self, now: float) -> None:
        """Leases end early or late, and so do rests and the places of waiters. ``now``: by the clock as it was."""
        for judge in self._of.values():
            judge.sets_clock(now)

    def most_places(self, name: str, moment: float) -> float:
        if self._lost_data_at >= moment:
            return inf
        return self._of[name].most_places(moment) if name in self._of else 0

    def was_taken_since(self, name: str, moment: float, now: float, slots: int) -> bool:
        return self._lost_data_at >= moment or (name in self._of and self._of[name].taken_until(now, slots) >= moment)
