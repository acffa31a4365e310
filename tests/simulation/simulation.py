"""One simulation: a world, a plan, and the turns of its threads, all from one seed."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import traceback
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from django.db import connections

from django_distlock import locks
from django_distlock.backends.optional import ExchangeBackend
from django_distlock.types import Grant, LockInfo, LockRequest

from .calls import Calls
from .engine import package
from .engine.lines import Struck, StruckHard
from .engine.loop import Loop
from .engine.network import Address, Network, Socket
from .engine.scheduler import BusyLoop, Process, Scheduler, Unhandled
from .engine.threads import Thread
from .forks import Forks
from .judges.calls import Judges, Violation
from .judges.groups import judge_step
from .plan import AFTERMATH, HORIZON, MOST_FAULT, PROCESSES, RETRIED, Event, Fault, draw_plan, lasts

if TYPE_CHECKING:
    from .worlds import World

WATCH = 0.1  # seconds between two looks of the judges
MOST_WAITING = 300.0  # seconds after the faults in which everybody is served or told
OF_EXECUTION = ("in_task", "cancelled_after", "struck_at", "struck_after")  # not of the call itself
CLOSES = 5.0  # seconds in which what a process closes is closed
SETTLES = 45.0  # seconds in which background threads end that have nothing to do
KEPT = ("Lease", "AdoptedLease", "UngrantedLease", "LockRequest", "Acquisition", "Hold", "Adoption")  # while needed
OPERATIONS = {"acquire": "acquire", "wait_for_turn": "wait", "pause": "wait", "renew": "renew", "release": "release"}


@dataclass
class Outcome:
    """``met``: how often each fault met each operation. ``checksum``: of all that happened, in its order."""

    seed: int
    plan: Sequence[Event]
    hours: float = 0.0  # of the world
    violation: str = ""
    trace: Sequence[str] = ()
    checksum: int = 0
    faults: Sequence[str] = ()  # that the world has
    counts: Counter[str] = field(default_factory=Counter)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)


class Asker(NamedTuple):
    """Who asked for a lock first with a token, and when."""

    name: str
    process: Process
    at: float


class Simulation:
    def __init__(self, new_world: Callable[[Simulation], World], seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(f"world {seed}")
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        self.network.delay = self._delay
        self.processes: dict[str, Process] = {}
        self.counts: Counter[str] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()
        self.checksum = 0
        self.trace: deque[str] = deque(maxlen=2_000)
        self.distance = self.chance.choice([0.001, 0.005, 0.05])  # seconds that bytes usually take at most
        self.longest_distance = self.distance  # of the run
        self._distances = [(0.0, self.distance)]  # since when
        self._disturbed_until: defaultdict[str, float] = defaultdict(lambda: -inf)  # by process; "": all
        self._connections_end_until = -inf  # when something last befell them, or will
        self._felt_until: defaultdict[str, float] = defaultdict(lambda: -inf)  # the same, with its aftermath
        self._failing_until: defaultdict[str, float] = defaultdict(lambda: -inf)  # the same, for calls
        self._servers_disturbed_until: defaultdict[str, float] = defaultdict(lambda: -inf)
        self._servers_felt_until: defaultdict[str, float] = defaultdict(lambda: -inf)
        self._waits: defaultdict[tuple[Process, str], dict[int, float]] = defaultdict(dict)  # and when each began
        self._inside: Counter[tuple[str, str]] = Counter()  # calls of stores, by process and operation
        self._active: list[tuple[str, str, float]] = []  # faults: what, who, until
        self._armed: list[Event] = []  # faults that happen during the next operation of their kind
        self._loops: dict[str, Loop] = {}
        self._incarnations: Counter[str] = Counter()
        self._askers: dict[str, Asker] = {}  # by token
        self._running: set[str] = set()  # calls
        self.world = new_world(self)
        if self.world.profile.distance:
            self._set_distance(self.world.profile.distance)
        self.judges = Judges(self)
        self.calls = Calls(self)
        self.faults = {**self._faults_of_processes(), **self.world.faults()}
        if self.world.forks:
            self.faults["fork"] = Forks(self).fault

    def tell(self, text: str) -> None:
        line = f"{self.scheduler.now:9.4f}  {text}"
        self.checksum = crc32(line.encode(), self.checksum)
        self.trace.append(line)

    def run(self, plan: Sequence[Event] | None = None) -> Outcome:
        if plan is None:
            world = self.world
            drawn = world.profile, world.profiles, self.faults, world.of_call, world.operations
            has = {has: getattr(world, has) for has in ("has_slots", "has_max_waiters", "has_exchange")}
            plan = draw_plan(self.seed, *drawn, **has)
        if self.world.most_processes == 1:
            plan = [Event(event.at, event.what, event.who and "p0", event.about) for event in plan]
        outcome = Outcome(self.seed, plan, counts=self.counts, met=self.met)
        package.enter(self.scheduler, self.network, self.world.settings)
        try:
            self._run(plan)
        except (Violation, BusyLoop, Unhandled) as violation:
            outcome.violation = f"{type(violation).__name__}: {violation}"
            if violation.__cause__:
                outcome.violation += "\n" + "".join(traceback.format_exception(violation.__cause__))
        self.world.end()
        outcome.hours, outcome.trace = self.scheduler.now / 3600, list(self.trace)
        outcome.checksum, outcome.faults = self.checksum, sorted(self.faults)
        return outcome

    def _run(self, plan: Sequence[Event]) -> None:
        for event in plan:
            self.scheduler.at(event.at, partial(self._begin, event))
        self.scheduler.at(WATCH, self._watch)
        self.scheduler.run(max([HORIZON, *(event.at for event in plan)]) + MOST_FAULT)
        until = self.scheduler.now + MOST_WAITING
        while self._running and self.scheduler.now < until:
            self.scheduler.run(self.scheduler.now + 1.0)
        if self._running:
            raise Violation(f"waits for ever: {sorted(self._running)}\n{self.scheduler.stacks()}")
        if self.chance.random() < 0.5:  # else what stands idle is closed while it is in use still
            self.scheduler.run(self.scheduler.now + SETTLES)
        self._end_loops()
        self._close_connections()
        self._judge_end()

    def _watch(self) -> None:
        self.judges.watch()
        self.scheduler.at(WATCH, self._watch)

    def _begin(self, event: Event) -> None:
        if event.what in self.faults:
            if "during" in event.about:
                self._armed.append(event)
            else:
                self.begin_fault(event)
        else:
            self._begin_call(event)

    # Calls

    def _alias(self, name: str) -> str:
        return f"{name}.{self._incarnations[name]}"

    def process(self, name: str) -> Process | None:
        """The one of that name that lives; None while it is dead."""
        alias = self._alias(name)
        if alias not in self.processes:
            rate = 1.0 + self.chance.uniform(-self.world.drift, self.world.drift)
            host = self.world.new_host(name, rate)
            self.processes[alias] = process = Process(alias, host)
            self.scheduler.acting = process
            self._instrument(locks[alias])
            self.scheduler.acting = None
        process = self.processes[alias]
        return process if process.is_alive else None

    def _begin_call(self, event: Event) -> None:
        process = self.process(event.who)
        if process is None or process.is_stopped:
            return
        self.tell(f"{process} begins: {event}")
        self.counts["calls"] += 1
        about = {key: value for key, value in event.about.items() if key not in OF_EXECUTION}
        name = {"with": "with_"}.get(event.what, event.what)
        in_task = event.about.get("in_task", False)
        self.begin(process, event, partial(getattr(self.calls, f"a{name}" if in_task else name), process, **about))

    def begin(self, process: Process, event: Event, call: Callable[[], Any]) -> None:
        """In a thread of its own, or in a task."""
        if event.about.get("in_task"):
            self._begin_task(process, call, event)
        else:
            work = partial(self._in_thread, process, call, event)
            Thread(self.scheduler, process, target=work, name=f"{process} {event.what} {event.at}").start()

    @contextmanager
    def counted(self, process: Process, text: str) -> Iterator[None]:
        text = f"{process} {text}"
        self._running.add(text)
        process.at_end.append(partial(self._running.discard, text))
        try:
            yield
        finally:
            self._running.discard(text)

    def _in_thread(self, process: Process, call: Callable[[], object], event: Event) -> None:
        with self.counted(process, str(event)):
            try:
                self._let_strike(threading.current_thread(), event)
                call()
            except (Struck, StruckHard):
                self.counts["struck"] += 1
            finally:
                connections.close_all()

    def _let_strike(self, execution: object, event: Event) -> None:
        if self.world.lines and "struck_after" in event.about:
            self.world.lines.plan(execution, event.about["struck_at"], event.about["struck_after"])
            self.reached("begins")

    def reached(self, stage: str) -> None:
        """By a call, whose thread or task it is."""
        if self.world.lines:
            self.world.lines.reached(stage)

    def _begin_task(self, process: Process, call: Callable[[], Any], event: Event) -> None:
        loop = self._loop(process)

        async def run() -> None:
            with self.counted(process, str(event)):
                try:
                    self._let_strike(asyncio.current_task(), event)
                    await call()
                except asyncio.CancelledError:
                    self.counts["cancelled"] += 1
                except Struck:
                    self.counts["struck"] += 1

        def begin() -> None:
            task = loop.create_task(run(), name=f"{event.what} {event.at}")
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if (seconds := event.about.get("cancelled_after")) is not None:
                loop.call_later(seconds, cancel, task)

        def cancel(task: asyncio.Task[None]) -> None:
            self.judges.pace.cancels(process)
            task.cancel()

        tasks: set[asyncio.Task[None]] = loop.tasks
        loop.call_soon_threadsafe(begin)

    def _loop(self, process: Process) -> Loop:
        if process.name not in self._loops:
            self.scheduler.acting = process
            loop = self._loops[process.name] = Loop(self.scheduler)
            self.scheduler.acting = None
            Thread(self.scheduler, process, target=loop.serve, name=f"{process} loop").start()
        return self._loops[process.name]

    def _end_loops(self) -> None:
        for name, loop in self._loops.items():
            if self.processes[name].is_alive:
                loop.call_soon_threadsafe(loop.stop)
        self.scheduler.run(self.scheduler.now + 5.0)

    def _close_connections(self) -> None:
        """With them goes what they still know of their last calls."""
        for name, process in self.processes.items():
            if process.is_alive:
                Thread(self.scheduler, process, target=locks[name].close, name=f"{name} close").start()
        self.scheduler.run(self.scheduler.now + CLOSES)
        self._judge_listeners()
        self.scheduler.run(self.scheduler.now + SETTLES)

    def _judge_listeners(self) -> None:
        """Where nobody waits any more, nobody listens. Not where something failed just before."""
        listening = [
            one for one in self.network.sockets if one.process.is_alive and getattr(one.session, "channels", ())
        ]
        if listening and not self.judges.may_fail(self.scheduler.now):
            raise Violation(f"closed, and still subscribed: {[str(one.process) for one in listening]}")

    def _instrument(self, backend: Any) -> None:
        """Note which calls of the store are on their way, to know which faults they meet."""
        for method, operation in OPERATIONS.items():
            setattr(backend, method, self._noted(getattr(backend, method), backend.alias, operation))
            setattr(backend, f"a{method}", self._anoted(getattr(backend, f"a{method}"), backend.alias, operation))
        backend.acquire_all = self._noted_all(backend.acquire_all, backend.alias)
        backend.aacquire_all = self._anoted_all(backend.aacquire_all, backend.alias)
        if isinstance(backend, ExchangeBackend):
            backend.exchange = self._noted_exchange(backend.exchange, backend.alias)  # type: ignore[method-assign]

    def name_of(self, token: str) -> str:
        """Of the lock that was asked for with it."""
        return self._askers[token].name

    def asker(self, token: str) -> Asker | None:
        """Who asked for a lock with it."""
        return self._askers.get(token)

    def stopped_for(self, token: str) -> float:
        """Seconds for which whoever asked with it was stopped."""
        return self._askers[token].process.stopped_for if token in self._askers else 0.0

    def _noted(self, call: Any, alias: str, operation: str) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            self._note_asker(alias, operation, arguments[0])
            with self._on_its_way(alias, operation), self._timed(alias, operation, arguments[0]):
                answer = call(*arguments, **options)
            self.judges.answered(answer)
            return answer

        return noted

    def _anoted(self, call: Any, alias: str, operation: str) -> Any:
        async def noted(*arguments: Any, **options: Any) -> Any:
            self._note_asker(alias, operation, arguments[0])
            with self._on_its_way(alias, operation), self._timed(alias, operation, arguments[0]):
                answer = await call(*arguments, **options)
            self.judges.answered(answer)
            return answer

        return noted

    def _noted_all(self, call: Any, alias: str) -> Any:
        def noted(requests: Sequence[LockRequest]) -> Any:
            self._note_askers_of_all(alias, requests)
            began = self.scheduler.now
            with self._on_its_way(alias, "acquire"):
                grants = call(requests)
            judge_step(self.judges, requests, grants, began)
            return grants

        return noted

    def _anoted_all(self, call: Any, alias: str) -> Any:
        async def noted(requests: Sequence[LockRequest]) -> Any:
            self._note_askers_of_all(alias, requests)
            began = self.scheduler.now
            with self._on_its_way(alias, "acquire"):
                grants = await call(requests)
            judge_step(self.judges, requests, grants, began)
            return grants

        return noted

    def _note_askers_of_all(self, alias: str, requests: Sequence[LockRequest]) -> None:
        for request in requests:
            self._note_asker(alias, "acquire", request)
        if judge := self.judges.call_of_this_thread():
            judge.asks_for_all({request.token: request.name for request in requests})

    def _noted_exchange(self, call: Any, alias: str) -> Any:
        def noted(old: LockRequest, request: LockRequest) -> Grant | LockInfo:
            self._note_asker(alias, "acquire", request)
            with self._on_its_way(alias, "acquire"):
                answer: Grant | LockInfo = call(old, request)
            return answer

        return noted

    def _timed(self, alias: str, operation: str, of: Any) -> AbstractContextManager[None]:
        if operation not in ("acquire", "release"):
            return nullcontext()
        return self.judges.asking(self.processes[alias], operation, of)

    def newcomers(self, process: Process, name: str, since: float) -> int:
        """How many calls of a process have begun to wait for that lock since then."""
        began = self._waits.get((process, name), {})
        return sum(moment >= since for moment in began.values())

    def _note_asker(self, alias: str, operation: str, what: Any) -> None:
        requests = [what] if isinstance(what, LockRequest) else [request for request, _ in what]
        for request in requests:
            asked = Asker(request.name, self.processes[alias], self.scheduler.now)
            asker = self._askers.setdefault(request.token, asked)
            if asker.process.has_forked and not self.judges.is_others(request.token):
                self.judges.fail(f"S8: {operation} by {asked.process} of what {asker.process} asked for: {request}")
            if operation == "acquire" and (judge := self.judges.call_of_this_thread()):
                judge.asks(request.name, request.token)
            if operation == "wait":
                self._waits[self.processes[alias], request.name][id(request)] = self.scheduler.now

    @contextmanager
    def _on_its_way(self, alias: str, operation: str) -> Iterator[None]:
        self._inside[alias, operation] += 1
        for event in [event for event in self._armed if event.about["during"] == operation]:
            if self.scheduler.now > HORIZON or event.who in ("", alias.partition(".")[0]) or self.faults[event.what].on:
                self._armed.remove(event)
                seconds = self.scheduler.random.uniform(0.0, 1.5) * self.distance
                if self.scheduler.now <= HORIZON:
                    aimed = replace(event, who=event.who or alias.partition(".")[0])
                    self.scheduler.at(seconds, partial(self.begin_fault, aimed))
        for fault, who, until in self._active:
            if until >= self.scheduler.now and who in ("", alias):
                self.met[fault, operation] += 1
        try:
            yield
        finally:
            self._inside[alias, operation] -= 1

    # Faults

    def disturb(
        self,
        who: str,
        until: float,
        *,
        is_survived: bool = False,
        of_connections: bool = True,
        aftermath: float = AFTERMATH,
    ) -> None:
        """Something fails until then: for that process, or, "", for all. ``is_survived``: calls go on all the same.

        ``of_connections``: they may end.
        """
        if of_connections:
            self._connections_end_until = max(self._connections_end_until, until)
        if not is_survived:
            self._failing_until[who] = max(self._failing_until[who], until + aftermath)
        self._disturbed_until[who] = max(self._disturbed_until[who], until)
        self._felt_until[who] = max(self._felt_until[who], until + aftermath)

    def last_fault(self, process: Process) -> float:
        """When something last failed, or will: for that process."""
        of_servers = self.world.last_fault(self._servers_disturbed_until)
        return max(of_servers, self._disturbed_until[""], self._disturbed_until[process.name])

    def felt_until(self, process: Process | None = None) -> float:
        """When what failed has no consequences any more: for that process, or for any."""
        if process is None:
            return max(self._servers_are_felt_until, *self._felt_until.values(), -inf)
        return max(self._servers_are_felt_until, self._felt_until[""], self._felt_until[process.name])

    @property
    def _servers_are_felt_until(self) -> float:
        in_time = {name: until - AFTERMATH for name, until in self._servers_felt_until.items()}
        return self.world.last_fault(in_time) + AFTERMATH

    def last_fault_of_servers(self) -> float:
        return max(self._servers_disturbed_until.values(), default=-inf)

    def last_fault_of_connections(self) -> float:
        """At any process or server."""
        return max(self._connections_end_until, self.world.last_fault({}))

    def last_fault_of(self, server: str) -> float:
        return self._servers_disturbed_until[server]

    def last_fault_of_process(self, process: Process) -> float:
        """Alone, whatever servers do."""
        return self._disturbed_until[process.name]

    def may_fail_until(self, process: Process) -> float:
        """When calls of that process have no reason to fail any more."""
        return max(self._servers_are_felt_until, self._failing_until[""], self._failing_until[process.name])

    def longest_distance_since(self, moment: float) -> float:
        """Seconds that bytes have taken one way at most since then."""
        index = bisect_right(self._distances, moment, key=itemgetter(0)) - 1
        return max(distance for _, distance in self._distances[max(0, index) :])

    def _disturb_by(self, event: Event, who: str, until: float) -> None:
        """Its process, or all servers and processes that it names."""
        aftermath = self.faults[event.what].aftermath
        if event.what not in self.world.keeping_connections:
            self._connections_end_until = max(self._connections_end_until, until)
        if self.faults[event.what].on and event.what in self.world.survived:
            is_second = self._disturbed_until[""] > self.scheduler.now - AFTERMATH
            self.disturb("", until, is_survived=not is_second)
            return
        if not self.faults[event.what].on:
            # One connection that fails is replaced. Another one may not be.
            is_second = self._disturbed_until[who] > self.scheduler.now - AFTERMATH
            is_survived = event.what in self.world.survived and not is_second
            is_survived = is_survived or event.what == "fork"  # what its parent asked for fails no call of a child
            self.disturb(who, until, is_survived=is_survived, aftermath=aftermath)
            return
        for name in {who, *event.about.get("others", "").split("+")} - {""}:
            if name in PROCESSES:
                self.disturb(self._alias(name), until)
            else:
                self._servers_disturbed_until[name] = max(self._servers_disturbed_until[name], until)
                self._servers_felt_until[name] = max(self._servers_felt_until[name], until + aftermath)

    def _set_distance(self, distance: float) -> None:
        """So many seconds bytes usually take at most from now on."""
        self.distance = distance
        self.longest_distance = max(self.longest_distance, distance)
        self._distances.append((self.scheduler.now, distance))

    def begin_fault(self, event: Event) -> None:
        who, fault = event.who, self.faults[event.what]
        if not fault.on:
            process = self.process(event.who)
            if process is None or process.is_stopped:
                return
            who = process.name
        self.tell(f"{who}: {event}")
        self.counts["faults"] += 1
        until = self.scheduler.now + event.about.get("seconds", 0.0)
        self._set_distance(self.world.profile.distance or self.chance.choice([0.001, 0.005, 0.05]))
        self._disturb_by(event, who, until)
        self._active = [active for active in self._active if active[2] >= self.scheduler.now]
        self._active.append((event.what, "" if fault.on else who, until))
        for (alias, operation), number in self._inside.items():
            if number > 0 and (fault.on or alias == who):
                self.met[event.what, operation] += number
        fault.happen(who, **{key: value for key, value in event.about.items() if key != "during"})

    def _faults_of_processes(self) -> dict[str, Fault]:
        faults = {
            "kill": Fault(self._kill, (), lambda chance: {"restarts_after": round(chance.uniform(0.0, 3.0), 3)}),
            "stop": Fault(lambda who, seconds: self.scheduler.stop(self.processes[who], seconds), (), lasts),
            "set_clock": Fault(
                lambda who, by: self.processes[who].host.set_wall_clock(by),
                (),
                lambda chance: {"by": chance.choice([-3600.0, -5.0, 5.0, 3600.0])},
            ),
        }
        if self.world.has_network:
            faults |= {
                "cut": Fault(self._cut, ()),
                "stall": Fault(self._stall, (), lasts, aftermath=RETRIED),
                "lossy": Fault(lambda who, seconds: None, (), lasts),
                "slow": Fault(lambda who, seconds: None, (), lasts),
                "partition": Fault(lambda who, seconds: None, (), lasts),
            }
        return faults

    def _kill(self, who: str, restarts_after: float) -> None:
        process = self.processes[who]
        self.scheduler.kill(process)
        package.process_died(process)
        self._forget_calls(who)

        def restart() -> None:
            self._incarnations[who.partition(".")[0]] += 1

        self.scheduler.at(restarts_after, restart)

    def _forget_calls(self, alias: str) -> None:
        """With its threads all calls have vanished."""
        for operation in {*OPERATIONS.values()}:
            self._inside.pop((alias, operation), None)
        self._loops.pop(alias, None)

    def fork(self, parent: Process, lives: float) -> Process:
        """The running thread goes on in a child, in which nothing else goes on."""
        alias = parent.name
        child = self.scheduler.fork(parent, lives)
        self.processes[alias], self.processes[parent.name] = child, parent
        self._forget_calls(alias)
        self.world.forked()
        self.judges.breakers.forked()
        package.forked(parent, alias)
        self._instrument(locks[alias])
        self.tell(f"{child} is the child of {parent}")
        return child

    def _cut(self, who: str) -> None:
        for socket in list(self.network.sockets):
            if socket.process.name == who:
                self.world.cut(socket)

    def _stall(self, who: str, seconds: float) -> None:
        """The connections that there are; others work."""
        for socket in self.network.sockets:
            if socket.process.name == who:
                socket.stall(seconds)

    def _delay(self, process: Process, address: Address) -> float | None:
        """Bytes that meet a partition come when it is over, as TCP repeats them."""
        usual = self.scheduler.random.uniform(0.1, 1.0) * self.distance
        for fault, who, until in self._active:
            if who != process.name or until < self.scheduler.now:
                continue
            if fault == "lossy" and self.scheduler.random.random() < 0.2:
                return None
            if fault == "slow" and self.scheduler.random.random() < 0.5:
                usual += self.scheduler.random.uniform(0.0, 3.0)
            if fault == "partition":
                usual = max(usual, self._after(until))
        if until := self.world.delayed_until(process, address):
            usual = max(usual, self._after(until))
        return usual

    def _open_sockets(self) -> list[Socket]:
        return [one for one in self.network.sockets if one.process.is_alive and one.session]

    def _after(self, until: float) -> float:
        """Seconds until what was lost comes, as TCP repeats it."""
        return until - self.scheduler.now + self.scheduler.random.uniform(0.0, 1.0)

    # The end

    def _judge_end(self) -> None:
        """S4: nothing is left in the stores and in the processes."""
        if left := [thread for thread in self.scheduler.threads if not self.world.may_stay(thread.name)]:
            raise Violation(f"threads are left: {[str(thread) for thread in left]}\n{self.scheduler.stacks()}")
        if untold := self.judges.holders.untold():
            raise Violation(f"these signals were not sent: {untold}")
        if (
            self._open_sockets()
        ):  # maybe of an exception that struck while a connection was taken, which its judge keeps
            gc.collect()
        if sockets := self._open_sockets():
            raise Violation(f"connections are left open: {[f'{one.process} to {one.address}' for one in sockets]}")
        if keys := self.world.left():
            raise Violation(f"the store has left: {keys}")
        dead = {name for name, process in self.processes.items() if not process.is_alive}
        if leases := [lease for lease in locks.leases() if lease.using not in dead]:
            raise Violation(f"leases are left: {leases}")
        if lacking := [
            text
            for name, process in self.processes.items()
            if process.is_alive
            for text in self.world.lacks(locks[name])
        ]:
            raise Violation(f"processes lack: {lacking}")
        if not dead:
            self.calls.kept.clear()
            self._judge_memory()

    def _judge_memory(self) -> None:
        gc.collect()
        left = Counter(
            type(thing).__name__
            for thing in gc.get_objects()
            if type(thing).__module__.startswith("django_distlock") and type(thing).__name__ in KEPT
        )
        if left:
            raise Violation(f"objects are left in memory: {dict(left)}")
