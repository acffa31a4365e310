"""Time, the network, and what goes wrong in them."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any, NamedTuple
from unittest import mock

from django_distlock import types
from django_distlock.backends.common import wakeup_listener
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import backend, pubsub
from django_distlock.backends.redis.operations import ACQUIRE, RELEASE, RENEW
from django_distlock.backends.redis.scripts import Command
from django_distlock.core import acquire, local_queue, renewal

from ..store import Store
from .checker import Checker, Lease, Snapshot, Violation
from .client import LONGEST_TTL, SHORTEST_TTL, TIMEOUT, Process, Wake

HORIZON = 40.0  # seconds after which nobody asks any more and nothing fails any more
STEP = 0.1  # seconds between throws of the dice of kills, stops and the like
TRACE = 80  # last events that a failure shows


@dataclass(frozen=True)
class Faults:
    """The first seven are shares of messages, waits or holds, the others happen so often per second, to each process or
    to the store. ``patience``, ``prompt``: see the checker. ``ttls``: of the leases."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0  # executed after the client has given it up
    lost_hint: float = 0.0
    late_hint: float = 0.0  # a connection of its own: it stalls by itself
    cancel: float = 0.1
    run_out: float = 0.0  # of leases that nobody renews or releases
    kill: float = 0.0
    stop: float = 0.0
    cut: float = 0.0  # of the subscription
    flush: float = 0.0
    clock: float = 0.0
    patience: float = 4 * TIMEOUT
    prompt: float = inf
    ttls: tuple[float, ...] = (SHORTEST_TTL, LONGEST_TTL)

    @property
    def are_all_heard(self) -> bool:
        """Whether what is published comes soon to all who listen."""
        return not (self.late_hint or self.cut or self.stop)


PROFILES = {
    "calm": Faults(patience=1.0, prompt=0.3),
    "short leases": Faults(cancel=0.3, run_out=0.5, patience=1.0, prompt=0.3, ttls=(0.2, 0.5, 3.0)),
    "network": Faults(lost_request=0.05, lost_reply=0.05, late=0.05, lost_hint=0.05, late_hint=0.05),
    "death": Faults(kill=0.05, stop=0.05),
    "deaf": Faults(lost_hint=0.05, late_hint=0.1, cut=0.1),
    "all": Faults(0.02, 0.02, 0.03, 0.03, 0.03, kill=0.02, stop=0.03, cut=0.03),
    "clock": Faults(lost_reply=0.02, clock=0.3),
    "flush": Faults(lost_reply=0.02, lost_hint=0.02, flush=0.2),
}


class Keys(NamedTuple):
    lease: str
    queue: str
    retired: str
    counter: str


KEYS = Keys("lock:name", "lock|q:name", "lock|x:name", "lock|f")


class World:
    """One run. ``texts``: other texts for some of the scripts, by the script's name."""

    def __init__(self, seed: int, faults: Faults, texts: dict[str, str] | None = None) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.faults = faults
        self.keys = KEYS
        self.store = Store(self._clock, self._publish)
        self.checker = Checker(self, faults.patience, faults.prompt)
        self.processes: list[Process] = []
        self.counts: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=TRACE)
        self._scripts = {
            script.sha: (name, (texts or {}).get(name) or script.text.decode())
            for name, script in (("acquire", ACQUIRE), ("release", RELEASE), ("renew", RENEW))
        }
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._numbers = count(1)
        self._tokens = count(1)

    def run(self) -> Counter[str]:
        with self._instead_of_the_real_clock():
            for _ in range(self.random.randint(2, 5)):
                self._start_process()
            self._throw_dice()
            self._watch()
            try:
                self._go_through_events()
            finally:
                for process in self.processes:
                    process.kill()
        return self.counts

    def _go_through_events(self) -> None:
        while self._events:
            moment, _, happen = heapq.heappop(self._events)
            self.now = max(self.now, moment)
            happen()
        self.now += LONGEST_TTL + Timing.queue_ttl
        self.checker.ends()

    @contextmanager
    def _instead_of_the_real_clock(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in (acquire, local_queue, renewal, wakeup_listener, pubsub, backend):
                stack.enter_context(mock.patch.object(module, "clock", self._clock))
            stack.enter_context(mock.patch.object(types, "new_token", self.new_token))
            yield

    def _clock(self) -> float:
        return self.now

    def new_token(self) -> str:
        return f"{next(self._tokens):0{types.TOKEN_LENGTH}}"

    def after(self, seconds: float, happen: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), partial(happen, *arguments)))

    def chance(self, share: float) -> bool:
        return self.is_faulty and self.random.random() < share

    def between(self, least: float, most: float) -> float:
        return self.random.uniform(least, most)

    @property
    def is_faulty(self) -> bool:
        return self.now < HORIZON

    def tell(self, what: str, who: Process | None = None, *about: object) -> None:
        self.counts[what] += 1
        self.trace.append(f"{self.now:9.4f} {who or '   '} {what} {' '.join(map(str, about))}")

    def lease(self) -> Lease | None:
        return Lease.read(self.store.peek(self.keys.lease))

    # The network

    def exchange(self, process: Process, command: Command, patience: float, wake: Wake) -> None:
        """Send a command; wake with the reply, or with None once the client gives it up."""
        delay, gives_up_at = self._delay(), self.random.choice([0.05, patience])
        if self.chance(self.faults.lost_request):
            self.tell("request lost", process)
        elif self.chance(self.faults.late):
            self.tell("request late", process)
            gives_up_at = patience
            self.after(self.between(TIMEOUT, SHORTEST_TTL - TIMEOUT), self._execute, process, command)
        elif self.chance(self.faults.lost_reply):
            self.after(delay, self._execute, process, command)
        else:
            self.after(delay, self._execute, process, command, wake)
            return
        self.after(gives_up_at, wake, None)

    def _delay(self) -> float:
        return self.between(0.002, 0.05)

    def _execute(self, process: Process, command: Command, wake: Wake | None = None) -> None:
        _, sha, amount, *rest = command.packed.decode().split("\r\n")[2::2]
        keys, arguments = rest[: int(amount)], rest[int(amount) :]
        assert keys == list(self.keys[: len(keys)])
        name, text = self._scripts[sha]
        before = self._snapshot()
        reply = self.store.run(text, keys, arguments)
        after = self._snapshot()
        call = _read_call(name, arguments)
        self.tell(name, process, call, "->", reply, *(["(reply lost)"] if wake is None else []), "|", *_shown(after))
        self.checker.executed(process, call, reply, before, after)
        if wake:
            self.after(self._delay(), wake, reply)

    def _snapshot(self) -> Snapshot:
        queue = self.store.peek(self.keys.queue) or {}
        return Snapshot(self.lease(), {member[: types.TOKEN_LENGTH]: score for member, score in queue.items()})

    def _publish(self, kind: str, channel: str, text: str) -> int:
        ears = [process for process in self.processes if process.listener.is_counted(kind, channel)]
        for process in ears:
            if text == "?" or not self.chance(self.faults.lost_hint):
                delay = self.between(0.5, 5.0) if self.chance(self.faults.late_hint) else self._delay()
                self.after(delay, process.when_running, partial(process.listener.receive, text))
        return len(ears)

    # What happens by itself

    def _start_process(self) -> None:
        process = Process(self, next(self._numbers))
        self.processes.append(process)
        for _ in range(self.random.choice([1, 1, 2])):
            process.start(process.calls())

    def _watch(self) -> None:
        self.checker.watch()
        if self._events:
            self.after(0.5, self._watch)

    def _throw_dice(self) -> None:
        if not self.is_faulty:
            self._recover()
            return
        for process in [process for process in self.processes if process.is_running]:
            if self.chance(self.faults.kill * STEP):
                self._kill(process)
            elif self.chance(self.faults.stop * STEP):
                self._stop(process)
            elif self.chance(self.faults.cut * STEP):
                self.tell("subscription cut", process)
                process.listener.cut(is_noticed_by_store=self.random.random() < 0.7)
        if self.chance(self.faults.flush * STEP):
            self.tell("FLUSHALL")
            self.store.flush()
            self.checker.lost_data()
        if self.chance(self.faults.clock * STEP):
            self.store.clock_error = self.random.choice([-3600.0, -0.5, 0.0, 0.5, 3600.0])
            self.tell("clock is wrong by", None, self.store.clock_error)
        self.after(STEP, self._throw_dice)

    def _kill(self, process: Process) -> None:
        self.tell("killed", process)
        process.kill()
        self.checker.died(process)
        # A host that lost its power leaves a connection that the store still believes in.
        self.after(self.random.choice([0.0, 0.0, 5.0]), process.listener.disappear)
        self.after(self.between(0.0, 3.0), self._start_process)

    def _stop(self, process: Process) -> None:
        self.tell("stopped", process)
        process.is_stopped = True
        self.after(self.random.choice([0.3, 3.0, self.between(0.0, 2 * LONGEST_TTL)]), self._go_on, process)

    def _go_on(self, process: Process) -> None:
        if process.is_stopped:
            self.tell("goes on", process)
            process.go_on()

    def _recover(self) -> None:
        for process in self.processes:
            self._go_on(process)


def simulate(profile: str, seed: int, texts: dict[str, str] | None = None) -> Counter[str]:
    """One run; what happened how often. Raises Violation with the trace."""
    world = World(seed, PROFILES[profile], texts)
    try:
        return world.run()
    except Violation as violation:
        trace = "\n".join(world.trace)
        raise Violation(f"{violation}\nprofile {profile}, seed {seed}, {world.now:.4f} s:\n{trace}") from None


def _read_call(script: str, arguments: list[str]) -> dict[str, Any]:
    call: dict[str, Any] = {"script": script, "token": arguments[0]}
    if script == "acquire":
        return call | {"mode": arguments[3], "place": arguments[4]}
    if script == "release":
        cooldown, retire = int(arguments[1]) / 1000, int(arguments[2]) / 1000
        return call | {"cooldown": cooldown, "retire": retire, "is_offer": arguments[5] == "1"}
    return call


def _shown(seen: Snapshot) -> Iterator[str]:
    if seen.lease:
        yield f"{seen.lease.token[-4:]} {seen.lease.state}"
    yield "queue " + " ".join(token[-4:] for token in sorted(seen.queue, key=seen.queue.__getitem__))
