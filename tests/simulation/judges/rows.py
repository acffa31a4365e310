"""What may become of a lock that is a row: in a database, or in local memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil, inf, log
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.common.state import CLAIMED, FREE, HELD, Waiter, waiters_from_text
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database.polling import GROWTH

from .leases import DRIFT, GRAIN, OWN_NAMES

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
    """Moments are seconds on the clock of the store. ``now``: when this was so."""

    now: float
    token: str = ""
    state: str = FREE
    fence: int = 0
    expires: float = 0.0
    waiters: tuple[Waiter, ...] = ()

    @property
    def is_taken(self) -> bool:
        return self.state != FREE and self.expires > self.now

    def live(self, now: float) -> list[Waiter]:
        """Those that a store must reckon with, at that moment."""
        return [one for one in self.waiters if one.seen / 1e6 + Timing.waiter_expires_after > now + GRAIN]

    @property
    def ends_at(self) -> float:
        """When nobody has it, and nobody stands in its queue, if nothing else happens."""
        taken_until = self.expires if self.state != FREE else -inf
        return max([taken_until, *(one.seen / 1e6 + Timing.waiter_expires_after for one in self.waiters)])

    @classmethod
    def of(cls, row: Mapping[str, Any], now: float) -> RowState:
        """``row``: of a table."""
        waiters = tuple(waiters_from_text(row["waiters"]))
        return cls(now, row["token"], row["state"], row["fence"], row["expires"] / 1e6, waiters)


class Looks:
    """Of one process, at one grant of the lock."""

    def __init__(self, fence: int, since: float) -> None:
        self.fence, self.since = fence, since
        self.recent: deque[float] = deque()


class RowJudge:
    """S1, S3, S4, S7, S10, S11, S12 and min_hold of one lock. ``looks_within``: seconds, of a waiter."""

    def __init__(self, simulation: Simulation, name: str, looks_within: float) -> None:
        self._simulation = simulation
        self._name = name
        self._looks_within = looks_within
        self._state = RowState(-inf)
        self._places: dict[str, float] = {}  # by token
        self._granted_at: dict[str, float] = {}  # by token
        self._kept_until = -inf
        self._taken_until = -inf
        self._idle_since: tuple[Any, float] = (None, inf)  # what nobody takes, and since when
        self._unowned_since: tuple[str, float] = ("", inf)
        self._looks: dict[Process, Looks] = {}
        self._reverted_token = ""
        self._lasts = inf  # seconds, the lease since its grant, or its last renewal
        self._clock_set_at = -inf  # that of the store: until a while later, times tell nothing

    # Told by the world

    def stands(self, state: RowState) -> None:
        """It was read, and nothing was changed."""
        self._note_taken(self._state, state.now)
        self._state = state

    def changed(self, after: RowState) -> None:
        before, self._state = self._state, after
        now, world = after.now, self._simulation.world
        self._lasts = after.expires - now
        self._note_taken(before, now)
        if self._simulation.judges.is_freed(before.token):  # by an operator
            self._kept_until = -inf
        for one in after.waiters:
            self._places[one.token] = min(self._places.get(one.token, inf), one.place)
        is_same = (before.token, before.fence) == (after.token, after.fence)
        if after.state not in (HELD, CLAIMED) or is_same:
            if is_same and before.state == after.state == HELD and after.expires < before.expires - GRAIN:
                self._fail(f"S3: the lease of {after.token[:6]} was shortened")
            return
        if not world.may_repeat_numbers and after.fence <= before.fence:
            self._fail(f"S12: {after.token[:6]} has the number {after.fence}, not above {before.fence}")
        if self._now > self._clock_set_at + DECIDES:
            self._judge_order(before, after)
            if before.state == HELD == after.state and before.expires > now + GRAIN:
                self._fail(f"S1: {after.token[:6]} was granted the lock, which {before.token[:6]} had")
            if self._now < self._kept_until - GRAIN:
                self._fail(f"min_hold was cut short by the grant to {after.token[:6]}")
            if after.state == CLAIMED and after.expires > now + Timing.grant_ttl + GRAIN:
                self._fail(f"S7: what was handed to {after.token[:6]} is kept for it too long")
        # It was decided when the row was read; a number is not older than that.
        self._granted_at[after.token] = self._now - max(0.0, now - after.fence / 1e6)

    def _judge_order(self, before: RowState, after: RowState) -> None:
        place = self._places.get(after.token, inf)
        for one in before.live(after.now):
            if one.token != after.token and one.place < place:
                self._fail(f"S10: {after.token[:6]} was granted the lock before {one.token[:6]}, which came earlier")
        record = next((one for one in before.waiters if one.token == after.token), None)
        if after.state == CLAIMED and record:
            silent_for = after.now - record.seen / 1e6
            decides = DECIDES + self._simulation.stopped_for(before.token)
            is_slow = self._simulation.last_fault_of_servers() > self._now - decides
            if silent_for > Timing.waiter_expires_after + decides and not is_slow:
                self._fail(f"S7: {after.token[:6]} was handed the lock, and has not looked for {silent_for:.1f} s")

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
        ends = WINDOW / self._lasts if 0.0 < self._lasts < Timing.look_interval else 0.0
        at_first = LOOKS_AT_FIRST + (MORE_IN_FILE if self._simulation.world.name == "sqlite" else 0)
        most = MOST_LOOKS + at_first * newcomers + LOOKS_AT_END * ends
        if self._now - looks.since > SETTLES + WINDOW and len(looks.recent) > most:
            self._fail(f"S11: {process} polls: {len(looks.recent)} looks in {WINDOW:g} s")

    def reverted(self, state: RowState) -> None:
        """A crash has undone a release, perhaps, for which nobody waited: that lease lasts until it runs out."""
        self.stands(state)
        self._reverted_token = state.token

    def promised(self, token: str, about: Mapping[str, Any]) -> None:
        """``min_hold`` counts from the grant. One that goes to another process goes by the clock of that one."""
        granted_at = self._granted_at.get(token)
        if (
            granted_at is not None
            and not self._simulation.judges.is_freed(token)
            and not about.keys() & {"text", "inside", "detaches"}
        ):
            self._kept_until = max(self._kept_until, granted_at + about.get("min_hold", 0.0) * (1 - DRIFT))

    def lost_data(self) -> None:
        self._state, self._taken_until, self._kept_until = RowState(-inf), self._now, -inf

    def sets_clock(self, now: float) -> None:
        """``now``: by the clock as it was."""
        self._note_taken(self._state, now)
        self._kept_until, self._clock_set_at = -inf, self._now

    def taken_until(self, now: float) -> float:
        """When somebody had the lock last, or stood in its queue. ``now``: by the store's clock."""
        self._note_taken(self._state, now)
        return self._taken_until

    def _note_taken(self, state: RowState, now: float) -> None:
        self._taken_until = max(self._taken_until, self._now + min(0.0, state.ends_at - now))

    # As time passes

    def watch(self, now: float) -> None:
        self._judge_promptness(self._state, now)
        self._judge_owner(self._state, now)

    def _judge_promptness(self, state: RowState, now: float) -> None:
        """S11: who is handed the lock takes it soon, and so does the first in the queue of a free one."""
        is_busy = state.state not in (FREE, CLAIMED) and state.expires > now
        idle = None if is_busy or not (state.state == CLAIMED or state.live(now)) else (state.fence, state.state)
        if idle is None or idle != self._idle_since[0]:
            self._idle_since = idle, self._now
        late, judges = self._now - self._idle_since[1], self._simulation.judges
        if late > judges.soon + self._looks_within and not judges.may_fail(self._idle_since[1]):
            self._fail(f"S11: nobody took the lock for {late:.3f} s, though somebody stands in its queue")

    def _judge_owner(self, state: RowState, now: float) -> None:
        """S4: a lease of which nobody knows any more is released, as soon as the store answers."""
        judges, asker = self._simulation.judges, self._simulation.asker(state.token)
        is_held = state.state == HELD and state.expires > now and not self._name.startswith(OWN_NAMES)
        is_held = is_held and state.token != self._reverted_token
        if not is_held or asker is None or judges.holders.owns(self._name, state.token, asker.at):
            self._unowned_since = "", inf
        elif self._unowned_since[0] != state.token:
            self._unowned_since = state.token, self._now
        since = self._unowned_since[1]
        if self._now - since > Timing.retry_delay + judges.soon and not judges.may_fail(since):
            self._fail(f"S4: nobody knows of the lease of {state.token[:6]} since {since:.3f} s")

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

    def __getitem__(self, name: str) -> RowJudge:
        if name not in self._of:
            self._of[name] = RowJudge(self._simulation, name, self._looks_within)
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

    def was_taken_since(self, name: str, moment: float, now: float) -> bool:
        return self._lost_data_at >= moment or (name in self._of and self._of[name].taken_until(now) >= moment)
