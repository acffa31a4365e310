"""What a simulation must never show. Each judge names the promise (see docs/internals/promises.md) that it holds."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from django_distlock import (
    Lease,
    LockBackendError,
    State,
    signals,
)
from django_distlock.core.adoption import CLOCKS_DIFFER
from django_distlock.types import MOST_SLOTS, Grant, LockInfo, LockRequest, current_execution

from ..engine.scheduler import Process, Turns
from .breakers import BreakerJudge
from .call import NEARLY, SCHEDULING, WAYS, Judge, Wait
from .groups import GroupJudge
from .holders import HolderJudge, Passed
from .lists import ListJudge
from .pace import PaceJudge
from .responses import ResponseJudge

if TYPE_CHECKING:
    from ..engine.network import Address
    from ..simulation import Simulation

WAYS_OF_CALL = 40  # the same, to connect and to ask twice
SOON, WAYS_TO_ASK = 0.3, 10  # seconds, and ways to connect and ask: then who was told something has done it
UNSERVED = 6.0  # seconds for which a free lock may be waited for where nothing fails


class Violation(AssertionError):
    """A promise that was broken."""


class Judges:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._scheduler = simulation.scheduler
        self._judging: dict[Judge, None] = {}  # in their order
        self._ended: deque[tuple[float, Process]] = deque()  # calls, and when
        self._asked_at: dict[str, float] = {}  # by token: when the call began that got it
        self.given_up: set[tuple[str, str]] = set()  # aliases and locks of releases that a store refused for long
        self._fences: defaultdict[str, int] = defaultdict(int)
        self._freed_at: list[tuple[str, float]] = []  # names, and when
        self._waits: defaultdict[tuple[Process, str], list[Wait]] = defaultdict(list)
        self._freed: set[str] = set()  # tokens of leases that an operator ended; their holders learn of it later
        self._free_since: defaultdict[str, float] = defaultdict(float)
        self.holders = HolderJudge(self, simulation)
        self.pace = PaceJudge(simulation)
        self.breakers = BreakerJudge(simulation)
        simulation.network.connects, simulation.network.closes = self._connects, self.pace.closes
        simulation.network.refuses = self.breakers.refuses
        signals.lock_unavailable.connect(self._unavailable, weak=False)
        signals.lock_unavailable.asend_robust = self._aunavailable  # type: ignore[method-assign] - of this signal alone
        handler = logging.Handler()
        # In the place of emit(), for which it would hold a lock that the simulation does not know.
        handler.handle = self._logged  # type: ignore[assignment, method-assign]
        for name in ("django_distlock", "asyncio"):
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).propagate = False

    @property
    def distance(self) -> float:
        """Seconds that bytes take one way at most, and with them the threads that others go before."""
        return self._simulation.longest_distance * (5 if self._simulation.world.lines else 1)

    @property
    def now(self) -> float:
        return self._scheduler.now

    @property
    def soon(self) -> float:
        """Seconds in which a process does what it was told."""
        return SOON + WAYS_TO_ASK * self.distance + self._simulation.world.queueing_time

    @property
    def thread(self) -> Turns:
        """The calling one."""
        return self._scheduler.current

    @property
    def stood_still_for(self) -> float:
        """Seconds for which it was paused between two lines, and its process stopped, in all."""
        process = self.thread.process
        return process.stopped_for - process.paused_for + self.thread.paused_for

    @property
    def time_to_connect(self) -> float:
        """Seconds at most in which a process that begins finds out whom to ask."""
        return self._simulation.world.ways_to_connect * self.distance

    def time_to_grant(self, locks: int) -> float:
        """Seconds at most for so many locks in one step."""
        return self._simulation.world.ways_to_grant(locks) * self.distance

    @property
    def timeout(self) -> float:
        return self._simulation.world.timeout

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """Seconds for which a caller who waits is not failed by that."""
        return self._simulation.world.patience(error, wait)

    def told(self, error: LockBackendError) -> None:
        self._simulation.world.told(error)

    def may_be_final(self, error: LockBackendError) -> bool:
        return self._simulation.world.may_be_final(error)

    @property
    def store_call(self) -> float:
        """Seconds that a call of the store may last, but for acquisitions: two timeouts."""
        return 2 * self._simulation.world.timeout + self._simulation.world.queueing_time

    @property
    def task_time(self) -> float:
        return self._simulation.world.task_time

    def asking_time(self, about: Mapping[str, Any]) -> float:
        world = self._simulation.world
        return world.asking_time(float(about.get("ttl", 0.0))) + world.queueing_time

    @property
    def longest_attempt(self) -> float:
        return self._simulation.world.longest_attempt

    def _connects(self, process: Process, address: Address) -> None:
        self.pace.connects(process, address)
        self.breakers.connects(process, address)

    def call_of_this_thread(self) -> Judge | None:
        """Or of this task: the call that it makes."""
        execution = current_execution()
        return next((judge for judge in self._judging if judge.execution is execution), None)

    def fail(self, text: str, cause: BaseException | None = None) -> None:
        """The first violation ends the simulation."""
        violation = Violation(text)
        violation.__cause__ = cause
        self._scheduler.failure = self._scheduler.failure or violation

    def _logged(self, record: logging.LogRecord) -> None:
        """Nothing fails unseen in a background thread or a task of the package."""
        self._simulation.world.logged(record)
        about: Mapping[str, Any] = getattr(record, "distlock", {})
        if about.get("event") == "release-given-up":
            self.given_up.add((about["alias"], about["name"]))
        text = re.sub(r"/simulation-\w+/", "/simulation/", record.getMessage())  # another folder in each run
        self._simulation.tell(f"log {record.levelname} {text[:200]}")
        if record.exc_info and record.exc_info[1]:
            self.fail(f"logged: {record.getMessage()}", record.exc_info[1])
        elif record.name == "asyncio" and record.levelno >= logging.ERROR:
            self.fail(f"logged by asyncio: {record.getMessage()}")

    # Calls

    @contextmanager
    def acquiring(self, process: Process, about: Mapping[str, Any]) -> Iterator[Judge]:
        judge = Judge(self, process, about)
        with self._judged(judge):
            yield judge

    @contextmanager
    def gathering(self, process: Process, about: Mapping[str, Any]) -> Iterator[GroupJudge]:
        """Several locks."""
        judge = GroupJudge(self, process, about)
        with self._judged(judge):
            yield judge

    @contextmanager
    def _judged(self, judge: Judge) -> Iterator[None]:
        self._judging[judge] = None
        self._note_wait(judge)
        try:
            yield
            judge.ends()
        except Exception as error:
            judge.failed(error)
        finally:
            self._judging.pop(judge, None)
            judge.wait.ended = min(judge.wait.ended, self.now)
            self._ended.append((self.now, judge.process))
            if judge.is_leaving:
                of_task = self.task_time / 2 if isinstance(judge.execution, asyncio.Task) else 0.0
                self.check_time(judge, judge.releases * self.store_call + of_task)

    def _note_wait(self, judge: Judge) -> None:
        for name in judge.names:
            self._waits[judge.process, name].append(judge.wait)

    def most_waiters(self, judge: Judge) -> float:
        """How many others may have waited for its lock at once while it did: in its process, or in the store."""
        waits = self._waits[judge.process, judge.name]
        here = sum(one.ended >= judge.began for one in waits if one is not judge.wait)
        return max(here, self._simulation.world.most_places(judge.name, judge.began))

    @contextmanager
    def inside(self, process: Process, name: str) -> Iterator[None]:
        """A call takes another lock in its body, whose errors are its own."""
        judge = Judge(self, process, {"name": name})
        self._judging[judge] = None
        self._note_wait(judge)
        try:
            yield
        finally:
            self._judging.pop(judge, None)
            judge.wait.ended = self.now

    @contextmanager
    def adopting(self, process: Process, text: str) -> Iterator[Judge]:
        with self.acquiring(process, {"text": text[-6:]}) as judge:
            if passed := self.holders.passed.get(text):
                judge.passed = self.holders.passed[text] = passed._replace(tries=passed.tries + 1)
                judge.text = text
            yield judge

    @contextmanager
    def listing(self, process: Process, prefix: str) -> Iterator[ListJudge]:
        with self.acquiring(process, {"lists": prefix}) as judge:
            yield ListJudge(self, self._simulation, judge, prefix)

    def responding(self, judge: Judge) -> ResponseJudge:
        return ResponseJudge(self, judge)

    @contextmanager
    def renewing(self, process: Process, lease: Lease) -> Iterator[None]:
        judge = Judge(self, process, {"renews": lease.name})
        try:
            yield
        finally:
            self.check_time(judge, self.store_call)

    @contextmanager
    def renewing_meanwhile(self, process: Process, lease: Lease, about: Mapping[str, Any]) -> Iterator[None]:
        """Another thread or task than its holder, which may give it up at the same time."""
        judge = Judge(self, process, {**about, "releases_twice": True})
        judge.lease, judge.is_waiting = lease, False
        judge.began = judge.granted_at = self._asked_at[lease.token]
        judge.runs_out_at = judge.granted_at + NEARLY * lease.ttl
        try:
            with self.renewing(process, lease):
                yield
        except Exception as error:
            judge.failed(error)

    def check_time(self, judge: Judge, limit: float) -> None:
        if judge.took > limit + SCHEDULING:
            self.fail(f"S16: {judge}: it lasted {judge.took:.3f} s, where {limit:.3f} s are the most")

    # Grants

    def granted(self, lease: Lease, about: Mapping[str, Any], asked_at: float | None = None) -> None:
        self._simulation.tell(f"{lease.using} holds {lease.name} {lease.token[:6]} fence={lease.fence}")
        self._simulation.counts["grants"] += 1
        asked_at = self.now if asked_at is None else asked_at
        self.holders.granted(lease, about, asked_at)
        is_new = lease.token not in self._asked_at
        self._asked_at.setdefault(lease.token, asked_at)
        if is_new and self.believes(lease):
            world = self._simulation.world
            may_repeat = world.may_repeat_numbers or world.has_lost_data_since(asked_at)
            # Of several leases, one that was handed over may be told later than one that came after it.
            if lease.holder.slots > 1:
                self._fences[lease.name] = 0
            elif lease.fence <= self._fences[lease.name] and not may_repeat:
                self.fail(f"S12: {lease} has a number that is not above {self._fences[lease.name]}")
            else:
                self._fences[lease.name] = lease.fence
        self.check_exclusion()

    def runs_without(self, lease: Lease) -> None:
        self._simulation.tell(f"{lease.using} runs without {lease.name} {lease.token[:6]}")
        self._simulation.counts["ungranted"] += 1

    def _unavailable(self, error: LockBackendError, lease: Lease | None, **about: Any) -> None:
        """Whoever fails raises the error."""
        if lease is None or lease.state is not State.UNAVAILABLE:
            return
        execution = current_execution()
        for judge in self._judging:
            if judge.is_waiting and judge.execution is execution and "wait" in judge.about:
                judge.judge_outage(error)

    async def _aunavailable(self, sender: type, **about: Any) -> None:
        """For tasks: Django would call the receiver in a thread of the system."""
        self._unavailable(**about)

    def detaching(self, lease: Lease) -> Passed:
        self._simulation.tell(f"{lease.using} detaches {lease.name} {lease.token[:6]}")
        return self.holders.detaching(lease)

    def answered(self, answer: object) -> None:
        """S16: by the store, to a caller. Who is granted the lock too late again and again is told so."""
        if not isinstance(answer, Grant):
            return
        execution = current_execution()
        for judge in self._judging:
            if judge.is_waiting and judge.execution is execution:
                judge.fences.add(answer.fence)
                if len(judge.fences) > judge.most_grants:
                    self.fail(f"S16: {judge}: it was granted the lock {len(judge.fences)} times and goes on")

    def freed(self, info: LockInfo) -> None:
        self._simulation.tell(f"{info.using} frees {info.name} {info.token[:6]}")
        self._freed.add(info.token)
        self._freed_at.append((info.name, self.now))

    def is_freed(self, token: str) -> bool:
        return token in self._freed

    def is_others(self, token: str) -> bool:
        """Whether it is used by others than who asked for a lock with it: an operator, or who adopts its lease."""
        return token in self._freed or self.holders.was_detached(token)

    def believes(self, lease: Lease) -> bool:
        """Whether its holder may believe at this moment that it has the lock."""
        return self.believed_for(lease) > 0.0

    def believed_for(self, lease: Lease) -> float:
        """Seconds for which its holder may believe that it has the lock."""
        process = self._simulation.processes[lease.using]
        if not process.is_alive or lease.token in self._freed:
            return 0.0
        before, self._scheduler.acting = self._scheduler.acting, process
        current, self._scheduler.running = self._scheduler.running, None
        try:
            return lease.remaining
        finally:
            self._scheduler.acting, self._scheduler.running = before, current

    def check_exclusion(self) -> None:
        """S1."""
        by_name: defaultdict[str, dict[str, Lease]] = defaultdict(dict)
        for lease in self.holders.leases():
            if self.believes(lease):
                by_name[lease.name][lease.token] = lease
        for leases in by_name.values():
            in_order = sorted(leases.values(), key=lambda lease: (lease.fence, lease.token))
            for number, lease in enumerate(in_order):
                if number < (slots := lease.holder.slots):
                    continue
                believed = in_order[: number + 1]
                asked_at = [self._asked_at.get(one.token, self.now) for one in believed]
                if not self._simulation.world.has_lost_data_since(min(asked_at)):
                    shown = ", ".join(f"{one.token[:6]} {one!r}" for one in believed)
                    self.fail(f"S1: {shown} are all believed, and the last one may be with {slots - 1} others")

    def is_called_for(self, name: str, since: float = inf, process: Process | None = None) -> bool:
        """Whether an acquisition or a release of that name is under way that began by then, in that process or any."""
        return any(
            name in judge.names and (judge.is_waiting or judge.is_leaving)
            for judge in self._judging
            if judge.process.is_alive and judge.began <= since and process in (None, judge.process)
        )

    def is_waited_with(self, token: str) -> bool:
        """Whether a call that has asked with the token waits."""
        return any(token in judge.tokens and judge.is_waiting and judge.process.is_alive for judge in self._judging)

    def calls_of(self, process: Process) -> int:
        """How many are under way, or were in the last second, of which connections and requests are counted."""
        while self._ended and self._ended[0][0] < self.now - 1.0:
            self._ended.popleft()
        ended = sum(of is process for _, of in self._ended)
        return ended + sum(judge.process is process for judge in self._judging)

    @contextmanager
    def asking(self, process: Process, operation: str, request: LockRequest) -> Iterator[None]:
        """S16: a call of the store, for one lock. S4: its answer is for the token that was sent."""
        began, stood_before, token = self.now, self.stood_still_for, request.token
        try:
            yield
        except LockBackendError as error:
            if operation == "release":
                self.holders.release_failed(process, request.token, error)
            raise
        finally:
            took = self.now - began - (self.stood_still_for - stood_before)
            distance = self._simulation.longest_distance_since(began)
            limit = self._simulation.world.longest_call(operation, request.ttl) + WAYS_OF_CALL * distance
            if took > limit and not self.may_fail(began, process):
                self.fail(f"S16: {operation} by {process} lasted {took:.3f} s, where {limit:.3f} s are the most")
            begins_anew = self._simulation.world.has_minorities  # with another one
            if request.token != token and not begins_anew:
                self.fail(f"S4: {process} sent {token[:6]}, and goes on with {request.token[:6]} when it is answered")

    def holders_in_store(self) -> Mapping[str, Collection[str]] | None:
        return self._simulation.world.holders()

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        return self._simulation.world.was_taken_since(name, moment, slots)

    # What may go wrong

    def may_fail(self, since: float, process: Process | None = None) -> bool:
        """Whether something failed since then: for that process, or for any."""
        return self._simulation.felt_until(process) > since

    def calls_may_fail(self, since: float, process: Process) -> bool:
        """The same, but for what calls survive."""
        return self._simulation.may_fail_until(process) > since

    def was_paused(self, judge: Judge) -> bool:
        """Whether its thread was paused between two lines for long: it may read an answer too late."""
        return judge.paused_for > self._simulation.world.timeout / 2

    def was_freed(self, judge: Judge) -> bool:
        """By an operator."""
        return any(freed_at >= judge.began for name, freed_at in self._freed_at if name in judge.names)

    def was_freed_in_part(self, judge: Judge) -> bool:
        """Where an operator meets an acquisition, a minority of nodes may have the lock."""
        return self._simulation.world.has_minorities and self.was_freed(judge)

    def may_be_lost(self, judge: Judge) -> bool:
        about = judge.about
        if self.calls_may_fail(judge.began, judge.process) or judge.is_far:
            return True
        if "text" in about:
            return judge.passed is None or self._passed_may_be_lost(judge, judge.passed)
        if self.was_freed(judge):
            return True
        if about.get("renew") is False and self.now >= judge.runs_out_at:
            return True
        return "max_hold" in about and self.now - judge.granted_at >= NEARLY * about["max_hold"]

    def _passed_may_be_lost(self, judge: Judge, passed: Passed) -> bool:
        """What was detached is there for whoever adopts it in time, and for as long as it is renewed."""
        if (
            self.holders.passed[judge.text].tries > 1  # also by who came later, and was quicker
            or self.may_fail(passed.asked_at)
            or any(freed_at >= passed.asked_at for name, freed_at in self._freed_at if name == passed.name)
        ):
            return True
        if float(passed.about.get("ttl", 0.0)) < WAYS * self.distance:
            return True
        if self.now >= passed.asked_at + NEARLY * passed.about.get("max_hold", inf):
            return True
        if not judge.is_waiting:
            return bool(passed.about.keys() & {"renew", "max_hold"})
        is_late = self.now >= passed.at + NEARLY * (passed.until - passed.at)
        return is_late or abs(passed.host.wall_clock() - judge.process.host.wall_clock()) > CLOCKS_DIFFER

    # As time passes

    def watch(self) -> None:
        self.check_exclusion()
        self._check_that_free_locks_are_taken()
        self.holders.watch()
        self._simulation.world.watch()

    def _check_that_free_locks_are_taken(self) -> None:
        """S7, S10: no lock is free while somebody waits for it."""
        waiting: defaultdict[str, float] = defaultdict(lambda: inf)
        numbers: defaultdict[str, int] = defaultdict(lambda: MOST_SLOTS)
        for judge in self._judging:
            if judge.is_waiting and judge.name and judge.process.is_alive and not judge.process.is_stopped:
                waiting[judge.name] = min(waiting[judge.name], judge.waits_since + judge.paused_for)
                numbers[judge.name] = min(numbers[judge.name], judge.slots)
        for name, since in waiting.items():
            if self._simulation.world.leases(name) >= numbers[name]:  # who wants the fewest may be the first
                self._free_since[name] = self.now
            idle = self.now - max(self._free_since[name], since, self._simulation.felt_until())
            if idle > UNSERVED + self._simulation.world.queueing_time:
                self.fail(f"S7: {name} is free, and nobody got it for {idle:.1f} s, though somebody waits")
