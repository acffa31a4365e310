"""In which order those who wait for one lock are granted it, and how soon."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from django_distlock import locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.operations import POLLS
from django_distlock.types import Holder

from .leases import GRAIN

if TYPE_CHECKING:
    from ..engine.scheduler import Process
    from .stores import Executed, LockState, StoredLease, StoreJudge

SOONEST = 0.9  # of the look_interval: a waiter looks after that, or a bit later
MOST_LOOKS = 5  # of a thread or task that nothing explains, in WINDOW seconds
WINDOW = 3.0
NUMBERS = (1, 2, 5)  # of slots, which callers name


@dataclass
class Waiter:
    """``is_present``: the store knows of its place, so that nobody may overtake it."""

    process: Process
    place: float
    inbox: str
    looked_at: float
    is_present: bool = True


@dataclass
class Handed:
    """A slot, to a waiter that has not taken it yet; or left to one."""

    token: str
    at: float
    process: Process | None
    stopped_before: float


@dataclass
class Looks:
    """Of one token."""

    last: float = -inf
    pause: float = SOONEST * Timing.look_interval  # until the next one
    lease_ends_at: float = inf  # as it was told
    unexplained: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))  # by who waits


class QueueJudge:
    """S10, S11, and that a free lock is taken (S7)."""

    def __init__(self, store: StoreJudge, name: str) -> None:
        self._store = store
        self._name = name
        self._waiters: dict[str, Waiter] = {}
        self._places: dict[str, float] = {}
        self._left: set[str] = set()
        self._askers: dict[str, Process] = {}
        self._looks: dict[str, Looks] = {}
        self._released_beside: defaultdict[Process, deque[float]] = defaultdict(deque)  # leases beside others, and when
        self._handed: dict[str, Handed] = {}  # by token
        self._free: Handed | None = None  # to one that polls
        self._unwanted_since: dict[str, float] = {}  # places of tokens for which nobody waits
        self._last: LockState | None = None  # when the last script had ended
        self._warned_at = -inf  # the first, of a lease that is over before its next look
        self._taken_until: dict[int, float] = {}  # by numbers of slots: when nothing was free
        self._numbers_of_places: list[tuple[float, int]] = []  # since when there are so many

    def executed(self, executed: Executed) -> None:
        before, after, token = executed.before, executed.after, executed.token
        self._waiters = {one: waiter for one, waiter in self._waiters.items() if waiter.process.is_alive}
        self._judge_promptness(before)
        if executed.script == "acquire":
            self._askers[token] = executed.process
            self._judge_looks(executed)
            self._judge_crowd(executed)
            self._note_attempt(executed)
        elif executed.script == "release":
            self._note_release(executed)
        elif executed.exchanged and executed.reply:
            self._warned_at = executed.at
        self._note_drops(executed)
        for lease in after.leases:
            if before.lease_of(lease.token) is None:
                self._judge_grant(executed, lease)
                if lease.expires_at < executed.at + Timing.look_interval:
                    self._warned_at = executed.at
            if lease.is_taken:
                self._waiters.pop(lease.token, None)
        self._judge_free_slots(executed)
        claims = {lease.token for lease in after.leases if lease.state == "c"}
        self._handed = {token: handed for token, handed in self._handed.items() if token in claims}
        for slots in NUMBERS:
            self._taken_until[slots] = self.taken_until(slots, (before, after))
        self._last = after
        self._numbers_of_places.append((executed.at, len(after.places)))
        queue = self._store.keys.queue(self._name)
        if after.places and self._store.server.store.remaining(queue) > Timing.queue_ttl + GRAIN:
            self._fail("S9: the queue would outlive those who wait")

    def watch(self) -> None:
        self._judge_handed()
        self._judge_free()
        self._judge_places()

    def taken_until(self, slots: int, states: Sequence[LockState] = ()) -> float:
        """When so many had the lock last, or somebody stood in its queue. ``states``: those of this moment."""
        for state in states or [self._store.state(self._name)]:
            if state.places or len(state.leases) >= slots:
                return self._store.now
        ended_at = self._last.free_at(slots) if self._last else -inf
        return max(self._taken_until.get(slots, -inf), ended_at)

    def most_places(self, moment: float) -> int:
        """At that moment, or later."""
        first = bisect_left(self._numbers_of_places, (moment, 0))
        return max((number for _, number in self._numbers_of_places[max(0, first - 1) :]), default=0)

    # Places

    def _judge_crowd(self, executed: Executed) -> None:
        """max_waiters: who allows so many others is given a place beside fewer, and is refused one beside as many."""
        most, token, before = executed.most_places, executed.token, executed.before.places
        others = len(executed.after.places.keys() - {token})
        if most and executed.place is not None and token not in before and others >= most:
            self._fail(f"max_waiters: {token[:6]} was given a place beside {others}, where {most} are the most")
        if executed.is_crowded and (token in before or others < most):
            self._fail(f"max_waiters: {token[:6]} was refused a place beside {others}, where {most} are the most")

    def _note_attempt(self, executed: Executed) -> None:
        token = executed.token
        if token not in executed.before.places:
            self._places.pop(token, None)  # whoever was dropped before it was told its place gets another one
        self._note_place(token, executed.known_place)
        if executed.place is not None:
            self._note_place(token, executed.place)
            if token not in self._left and executed.process.is_alive:
                inbox = executed.inbox
                self._waiters[token] = Waiter(executed.process, self._places[token], inbox, executed.at)
                counts_for = executed.after.looks.get(token, 0.0) if executed.is_polling else Timing.grant_ttl
                if abs(counts_for - Timing.grant_ttl) > GRAIN:
                    self._fail(f"S10: the look of {token[:6]} counts for {counts_for:.3f} s")
        elif executed.mode == "last" and executed.is_answered:
            self._leave(executed)

    def _note_place(self, token: str, place: float) -> None:
        if place < inf:
            self._places[token] = min(self._places.get(token, inf), place)

    def _note_release(self, executed: Executed) -> None:
        lease = executed.before.lease_of(executed.token)
        if lease and executed.after.leases:
            self._released_beside[executed.process].append(executed.at)
        if executed.is_offer and not (lease and lease.state == "c"):
            return
        if executed.is_answered and not executed.is_forced:
            self._leave(executed)

    def _judge_free_slots(self, executed: Executed) -> None:
        """S10: what a script finds free, or frees, it hands to those who listen, or leaves to one that polls."""
        before, after, token = executed.before, executed.after, executed.token
        is_freed = executed.script == "release" and before.lease_of(token) and not after.lease_of(token)
        is_taken = executed.is_granted and before.lease_of(token) is None
        is_looked_for = executed.place is not None and executed.slots > 1
        waiting = sorted(after.places, key=after.places.__getitem__)
        if not (is_freed or is_taken or is_looked_for) or not waiting:
            return
        first = waiting[0]
        is_free = len(after.leases) < after.numbers[first] and not self._is_told_to_look(executed, first)
        if is_free and after.inboxes[first] != POLLS and (first == token or self._is_there(after, first)):
            self._fail(f"S10: {executed.script} of {token[:6]} left a slot free, and it was not handed to {first[:6]}")

    @staticmethod
    def _is_told_to_look(executed: Executed, first: str) -> bool:
        """Whether the last one before it, for which too many slots were taken, was found gone in the end.

        Scripts look for that where a lease ends soon. They tell the next one of it, which then takes the slot. A caller
        that wants a slot itself does not leave it at that.
        """
        before, after = executed.before, executed.after
        if executed.script == "acquire" and len(after.leases) < executed.slots:
            return False
        gone = before.places.keys() - after.places.keys() - {executed.token, *after.tokens}
        return any(
            before.places[one] < after.places[first] and before.numbers[one] <= len(after.leases) for one in gone
        )

    def _leave(self, executed: Executed) -> None:
        self._waiters.pop(executed.token, None)
        # A "wait" that comes after its caller has left may leave a place behind (see acquire.lua).
        is_late = executed.token in self._left and executed.script == "release" and not executed.knows_of_place
        self._left.add(executed.token)
        if executed.token in executed.after.places and not is_late:
            self._fail(f"S4: {executed.token[:6]} left, and its place is kept")

    def _judge_places(self) -> None:
        """S4: whoever has ceased to wait has no place, as soon as the store answers.

        If it did not within the TTL, the place stays until it is handed the lock, and hands that back.
        """
        unwanted, given_up = {}, self._store.simulation.judges.given_up
        for token in self._store.state(self._name).places:
            process = self._askers.get(token)
            # A "wait" that comes after its caller has left may leave a place behind, and hands back what that gets.
            is_left = token in self._left or process is None
            if is_left or self._store.simulation.judges.is_called_for(self._name, process=process):
                continue
            if not process or not self._store.is_undisturbed(process, self._store.now):
                continue
            if (process.name, self._name) in given_up:
                continue
            unwanted[token] = since = self._unwanted_since.get(token, self._store.now)
            if self._store.now - since > Timing.retry_delay + self._store.soon:
                self._fail(f"S4: nobody waits under the place of {token[:6]} since {since:.3f} s")
        self._unwanted_since = unwanted

    def _note_drops(self, executed: Executed) -> None:
        before, after = executed.before, executed.after
        expected = {executed.token, *after.tokens}
        for token in before.places.keys() - after.places.keys():
            if (waiter := self._waiters.get(token)) and not self._is_there(before, token):
                waiter.is_present = False
            elif waiter and waiter.inbox == POLLS and token not in expected:
                self._fail(f"S10: {token[:6]} was dropped, though its look counts")

    def _judge_grant(self, executed: Executed, lease: StoredLease) -> None:
        place = self._places.get(lease.token, inf)
        for token, waiter in self._waiters.items():
            stays = waiter.is_present and executed.at - waiter.looked_at < Timing.queue_ttl - GRAIN
            stays = stays and token not in executed.after.tokens  # else it is granted one in the same step
            stays = stays and not executed.exchanged  # the lock was not free
            if stays and waiter.place < place and self._is_there(executed.before, token):
                self._fail(f"S10: {lease.token[:6]} was granted the lock before {token[:6]}, which came earlier")
        if lease.state == "c":
            self._note_handed(executed, lease.token)

    # Hand-offs

    def _note_handed(self, executed: Executed, token: str) -> None:
        if not self._store.listeners(executed.before.inboxes.get(token, "")):
            self._fail(f"S10: the lock was handed to {token[:6]}, which does not listen")
        process = self._askers.get(token)
        self._handed[token] = Handed(token, executed.at, process, process.stopped_for if process else 0.0)
        if token in self._waiters:
            self._waiters[token].is_present = False  # until its next look, should it miss its turn

    def _judge_handed(self) -> None:
        """S11: no wake-up is lost."""
        for token, handed in self._handed.items():
            if handed.process is None or not self._store.is_undisturbed(handed.process, handed.at):
                continue
            if handed.process.stopped_for == handed.stopped_before and self._store.now - handed.at > self._store.soon:
                lease = self._store.state(self._name).lease_of(token)
                is_taken = any(own.token == token for own in locks.leases())  # by the message
                if not is_taken and (lease is None or lease.state == "c"):
                    self._fail(f"S11: {token[:6]} was handed the lock at {handed.at:.3f} s and did not take it")

    def _is_there(self, state: LockState, token: str) -> bool:
        return state.is_there(token, self._store.listeners)

    def _judge_free(self) -> None:
        """S11: the first in the queue takes a lock that was freed, if it polls."""
        state = self._store.state(self._name)
        waiter = self._waiters.get(state.first)
        if waiter is None or waiter.inbox != POLLS or len(state.leases) >= state.numbers[state.first]:
            self._free = None
            return
        if self._free is None or self._free.token != state.first:
            self._free = Handed(state.first, self._store.now, waiter.process, waiter.process.stopped_for)
        free, late = self._free, self._store.now - self._free.at
        if late < self._store.soon + Timing.look_interval + Timing.retry_delay:
            return
        if waiter.process.stopped_for == free.stopped_before and self._store.is_undisturbed(waiter.process, free.at):
            self._fail(f"S11: the lock is free for {late:.3f} s, and {free.token[:6]}, which polls, did not take it")

    def _judge_promptness(self, before: LockState) -> None:
        """S11: the first of the queue looks when the lease ends."""
        waiter = self._waiters.get(before.first)  # none: a "wait" that came after its caller had left
        if self._last is None or waiter is None:
            return
        ended_at = self._last.free_at(before.numbers[before.first])
        late = self._store.now - ended_at
        is_free = len(before.leases) < before.numbers[before.first] and ended_at > -inf
        if not is_free or late < self._store.soon or waiter.looked_at > ended_at:
            return
        if self._store.is_undisturbed(waiter.process, ended_at):
            self._fail(f"S11: a slot was free for {late:.3f} s, though {before.first[:6]} stood first in the queue")

    # Looks

    def _judge_looks(self, executed: Executed) -> None:
        """S11: nobody polls."""
        looks = self._looks.setdefault(executed.token, Looks())
        is_explained = (
            executed.mode != "look"
            or executed.at - looks.last > looks.pause - GRAIN - self._store.simulation.distance
            or executed.at > looks.lease_ends_at - GRAIN
            or executed.before.lease_of(executed.token) is not None
            or self._warned_at >= looks.last
            # A call that is cancelled does not know what it has done, and wakes the leader of its process.
            or self._store.simulation.judges.pace.was_cancelled_since(executed.process, looks.last)
            or self._follows_release(executed)
        )
        if not is_explained and not self._store.simulation.judges.may_fail(executed.at - WINDOW):
            # Many may go on with one token, one after the other.
            unexplained = looks.unexplained[Holder.from_text(executed.words[1]).thread]
            unexplained.append(executed.at)
            while unexplained[0] < executed.at - WINDOW:
                unexplained.popleft()
            if len(unexplained) > MOST_LOOKS:
                self._fail(f"S11: {executed.token[:6]} polls: {len(unexplained)} looks in {WINDOW:g} s")
        looks.last = executed.at
        if executed.is_polling:
            looks.pause = SOONEST * min(Timing.look_interval, Timing.poll_interval_by_place * (executed.ahead + 1))
        looks.lease_ends_at = executed.at + executed.left if executed.place is not None else inf

    def _follows_release(self, executed: Executed) -> bool:
        """Who releases wakes the leader of its process, which cannot know that others have too many slots still."""
        releases = self._released_beside[executed.process]
        while releases and releases[0] < executed.at - self._store.soon:
            releases.popleft()
        return bool(releases and releases.popleft())  # one look for each

    def _fail(self, text: str) -> None:
        self._store.fail(f"{text} ({self._name})")
