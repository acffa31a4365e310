"""What must hold at every moment of a run, seen from the store and from the clients."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.common.timing import Timing
from django_distlock.types import Grant, LockRequest

if TYPE_CHECKING:
    from .client import Process
    from .world import World

GRAIN = 0.002  # seconds by which times may differ: the store counts in milliseconds


class Violation(AssertionError):
    """A promise that was broken."""


class Lease(NamedTuple):
    """The value of the lease key, read."""

    token: str
    state: str
    fence: int

    @classmethod
    def read(cls, value: str | None) -> Lease | None:
        if value is None:
            return None
        token, state, fence, _ = value.split(" ", 3)
        return cls(token, state, int(fence))


class Snapshot(NamedTuple):
    lease: Lease | None
    queue: dict[str, float]  # token -> place


@dataclass
class Belief:
    process: Process
    deadline: float
    data: int


@dataclass
class Waiter:
    """``present``: the store knows of its place, so that nobody may overtake it."""

    process: Process
    place: float
    looked_at: float
    present: bool = True


class Settled(NamedTuple):
    data: int
    clean: bool  # no command with the token can arrive any more


class Checker:
    """Watches one run. ``patience``: seconds that faults may add before some waiter gets in; ``prompt``: in which the
    first in the queue takes a lock whose lease ended by itself.

    What was promised before the store lost its data is not judged after it: ``_data`` counts these losses.
    """

    def __init__(self, world: World, patience: float, prompt: float) -> None:
        self._world = world
        self._patience = patience
        self._prompt = prompt
        self._ends_at = inf  # the lease, unless it is renewed
        self._data = 0
        self._askers: dict[str, Process] = {}
        self._executed_data: dict[str, int] = {}
        self._unanswered: set[str] = set()
        self._beliefs: dict[str, Belief] = {}
        self._waiters: dict[str, Waiter] = {}
        self._places: dict[str, float] = {}
        self._told_places: dict[str, float] = {}
        self._left: set[str] = set()
        self._settled: dict[str, Settled] = {}
        self._granted_data: dict[str, int] = {}
        self._last_fence = 0
        self._kept_until = 0.0
        self._idle_since = 0.0
        self._unconfirmed = 0

    # What the store did

    def executed(self, process: Process, call: dict[str, Any], reply: Any, before: Snapshot, after: Snapshot) -> None:
        token = call["token"]
        self._askers[token] = process
        self._executed_data[token] = self._data
        if call["script"] == "acquire":
            if token not in before.queue:
                self._places.pop(token, None)  # whoever was dropped before it was told its place gets another one
            self._note_attempt(process, token, call, reply)
        elif call["script"] == "release":
            self._note_release(token, call, before, after)
        elif reply == 1 and (not before.lease or before.lease[:2] != (token, "h")):
            raise Violation(f"{token} renewed a lease that it did not hold")
        self._note_drops(before, after)
        self._judge_promptness(before)
        self._ends_at = self._world.now + self._world.store.remaining(self._world.keys.lease) if after.lease else inf
        if after.lease and (not before.lease or before.lease.token != after.lease.token):
            self._judge_grant(after.lease, asked_by=token)
        elif after.lease and before.lease and after.lease.fence != before.lease.fence:
            raise Violation(f"the fencing number of {after.lease.token} changed")
        if after.lease and after.lease.state in "hr":
            self._waiters.pop(after.lease.token, None)
            self._progress()
        self._judge_ghosts(after)
        if after.queue and self._world.store.remaining(self._world.keys.queue) > Timing.queue_ttl + GRAIN:
            raise Violation("the queue would outlive those who wait")

    def _note_attempt(self, process: Process, token: str, call: dict[str, Any], reply: Any) -> None:
        if call["place"]:
            self._places[token] = min(self._places.get(token, inf), float(call["place"]))
        if reply[0] == 1:
            self._granted_data[token] = self._data
        elif reply[0] == 0 and reply[1]:
            self._note_place(process, token, float(reply[1]))
        elif call["mode"] == "last":
            self._waiters.pop(token, None)
            self._left.add(token)

    def _note_place(self, process: Process, token: str, place: float) -> None:
        self._places[token] = min(self._places.get(token, inf), place)
        if token not in self._left and process.is_alive:
            self._waiters[token] = Waiter(process, self._places[token], self._world.now)

    def _note_release(self, token: str, call: dict[str, Any], before: Snapshot, after: Snapshot) -> None:
        if call["is_offer"] and (not before.lease or before.lease[:2] != (token, "c")):
            if after.lease != before.lease:
                raise Violation(f"a hand-back of {token} ended the lease of {before.lease and before.lease.token}")
            return
        self._waiters.pop(token, None)
        self._left.add(token)
        if after.lease and after.lease.token == token and after.lease.state != "r":
            raise Violation(f"{token} gave the lock up and still has it")
        if before.lease and before.lease[:2] == (token, "h") and call["cooldown"]:
            self._kept_until = max(self._kept_until, self._world.now + call["cooldown"])

    def _note_drops(self, before: Snapshot, after: Snapshot) -> None:
        for token in before.queue.keys() - after.queue.keys():
            waiter = self._waiters.get(token)
            if waiter and not waiter.process.listener.is_heard_of:
                waiter.present = False

    def _judge_grant(self, lease: Lease, asked_by: str) -> None:
        if self._world.now < self._kept_until - GRAIN:
            raise Violation(f"min_hold was cut short by the grant to {lease.token}")
        if lease.fence <= self._last_fence:
            raise Violation(f"the fencing number {lease.fence} of {lease.token} came after {self._last_fence}")
        if lease.fence < self._world.store.micros():
            # In a split brain each side knows only its own numbers, and grants go by the clock alone.
            raise Violation(f"the fencing number {lease.fence} of {lease.token} is older than its grant")
        self._last_fence = lease.fence
        self._judge_order(lease.token)
        if lease.state == "h" and asked_by != lease.token:
            raise Violation(f"{lease.token} was granted the lock for good while it did not ask")
        if lease.state == "c":
            if not self._askers[lease.token].listener.is_heard_of:
                raise Violation(f"the lock was handed to {lease.token}, which does not listen")
            if self._world.store.remaining(self._world.keys.lease) > Timing.grant_ttl + GRAIN:
                raise Violation(f"what was handed to {lease.token} is kept for it too long")
            if lease.token in self._waiters:
                self._waiters[lease.token].present = False  # until its next look, should it miss its turn
            self._unconfirmed += 1

    def _judge_promptness(self, before: Snapshot) -> None:
        late = self._world.now - self._ends_at
        first = min(before.queue, key=before.queue.__getitem__, default="")
        is_there = first in self._waiters  # else a "wait" left the place behind that came after its caller had left
        if is_there and not before.lease and late > self._prompt:
            raise Violation(f"the lock was free for {late:.2f} s, though somebody stood in the queue")

    def _judge_order(self, token: str) -> None:
        place = self._places.get(token, inf)
        for other, waiter in self._waiters.items():
            stayed = waiter.present and self._world.now - waiter.looked_at < Timing.queue_ttl - GRAIN
            if other != token and stayed and waiter.place < place and waiter.process.listener.is_heard_of:
                raise Violation(f"{token} was granted the lock before {other}, which came earlier")

    def _judge_ghosts(self, seen: Snapshot) -> None:
        if seen.lease and seen.lease.state == "h":
            settled = self._settled.get(seen.lease.token)
            if settled and settled.data == self._data:
                raise Violation(f"{seen.lease.token} holds the lock, though it gave it up")
        for token in seen.queue:
            settled = self._settled.get(token)
            if settled and settled.clean and settled.data == self._data:
                raise Violation(f"{token} has a place in the queue, though it left")

    def lost_data(self) -> None:
        self._data += 1
        self._last_fence, self._kept_until, self._ends_at = 0, 0.0, inf
        self._places.clear()
        self._waiters.clear()  # each comes back with its next look

    def died(self, process: Process) -> None:
        self._beliefs = {token: belief for token, belief in self._beliefs.items() if belief.process is not process}
        self._waiters = {token: waiter for token, waiter in self._waiters.items() if waiter.process is not process}

    # What the clients did and were told

    def gives_up_subscription(self, *, works: bool) -> None:
        if works and self._world.faults.are_all_heard:
            raise Violation("a subscription that works was given up, and whoever waits is passed over meanwhile")

    def asks(self, lock_request: LockRequest) -> None:
        self._settled.pop(lock_request.token, None)
        self._left.discard(lock_request.token)

    def fails(self, lock_request: LockRequest, *, waited: bool) -> None:
        if waited and (lock_request.deadline is None or self._world.now < lock_request.deadline):
            raise Violation(f"{lock_request.token} was told an error of the store, though it had time left to wait")

    def told_place(self, lock_request: LockRequest) -> None:
        first = self._told_places.setdefault(lock_request.token, float(lock_request.place))
        if float(lock_request.place) > first:
            raise Violation(f"{lock_request.token} waited without a break and lost its place")

    def settled(self, lock_request: LockRequest) -> None:
        """The client holds that nothing of the request is left. One that hands back knows less than its owner did."""
        if lock_request.in_doubt:
            self._unanswered.add(lock_request.token)
        data = self._executed_data.get(lock_request.token, self._data)
        self._settled[lock_request.token] = Settled(data, clean=lock_request.token not in self._unanswered)

    def believes(self, process: Process, lock_request: LockRequest, grant: Grant, deadline: float) -> None:
        data = self._granted_data[lock_request.token]
        for token, belief in self._beliefs.items():
            if belief.deadline > self._world.now and belief.data == data:
                raise Violation(f"{lock_request.token} and {token} both believe that they hold the lock")
        self._beliefs[lock_request.token] = Belief(process, deadline, data)

    def renewed(self, lock_request: LockRequest, deadline: float) -> None:
        self._beliefs[lock_request.token].deadline = deadline

    def disbelieves(self, lock_request: LockRequest) -> None:
        del self._beliefs[lock_request.token]

    def was_lost(self, lock_request: LockRequest, deadline: float) -> None:
        if self._world.now < deadline and self._granted_data[lock_request.token] == self._data:
            raise Violation(f"{lock_request.token} lost its lease before its deadline")

    def cools_down(self, lock_request: LockRequest, until: float) -> None:
        """The holder gives the lock up, but not before that moment."""
        if self._granted_data[lock_request.token] == self._data:
            self._kept_until = max(self._kept_until, until)

    # As time passes

    def watch(self) -> None:
        lease = self._world.lease()
        waiting = [since for process in self._world.processes if process.is_running for since in process.waiting]
        if not waiting or (lease and lease.state in "hr"):
            self._progress()
            return
        idle = self._world.now - max(self._idle_since, min(waiting))
        if idle > (Timing.grant_ttl + Timing.look_interval + self._patience) * (1 + self._unconfirmed):
            raise Violation(f"nobody got in for {idle:.1f} s, though somebody waits")

    def _progress(self) -> None:
        self._idle_since = self._world.now
        self._unconfirmed = 0

    def ends(self) -> None:
        if any(process.waiting for process in self._world.processes):
            raise Violation("somebody waits for ever")
        if left := self._world.store.keys() - {self._world.keys.counter}:
            raise Violation(f"these keys are left behind: {sorted(left)}")
