"""What happens in a simulation, as a list that a person can read: calls of the package, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from string import ascii_lowercase
from typing import Any

HORIZON = 20.0  # seconds in which calls and faults begin
MOST_FAULT = 6.0  # seconds that one lasts
AFTERMATH = 8.0  # seconds after a fault in which connections may be found dead
RETRIED = 2.0  # the same, after one that ends no connection and loses nothing: what failed is asked for again
MOST_CALLS, MOST_FAULTS = 30, 8
MOST_PROCESSES = 4
PROCESSES = [f"p{number}" for number in range(MOST_PROCESSES)]
NAMES = "abc"  # of locks, mostly
MANY_NAMES = ascii_lowercase
OPERATIONS = ("acquire", "wait", "renew", "release")
ACQUIRING = ("with", "acquire", "poll", "responds")


@dataclass(frozen=True)
class Event:
    """``at``: seconds. ``who``: the process or server that it happens to; "" where it is all of them.

    A fault with ``during`` happens when the next operation of that kind is on its way, to the process that makes it if
    it is aimed at none.
    """

    at: float
    what: str
    who: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        about = " ".join(f"{key}={value}" for key, value in self.about.items())
        return f"{self.at:7.3f} s  {self.who or '-':4} {self.what:12} {about}".rstrip()


Draw = Callable[[random.Random], Mapping[str, Any]]


@dataclass(frozen=True)
class Fault:
    """``happen(who, **about)`` begins it, and plans its end within ``about["seconds"]``, if it lasts.

    ``on``: the servers that it may happen to; none: it happens to processes. ``aftermath``: seconds after its end in
    which it still has consequences.
    """

    happen: Callable[..., object]
    on: Sequence[str]
    draw: Draw = lambda chance: {}
    aftermath: float = AFTERMATH


def length(chance: random.Random) -> float:
    """Of a fault, in seconds: many short ones, as well as those that outlast leases and timeouts."""
    return round(
        chance.choice([chance.uniform(0.0, 0.5), chance.uniform(0.5, 3.0), chance.uniform(1.0, MOST_FAULT)]), 3
    )


def lasts(chance: random.Random) -> dict[str, Any]:
    return {"seconds": length(chance)}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the calls and faults of a run have in common. Shares are of calls.

    ``within``: seconds in which a burst of calls begins. ``anytime_share``: of those that are part of no burst.
    ``ttls``, ``works``: seconds. ``faults``: those that may befall it; None: any.
    """

    processes: tuple[int, int] = (1, MOST_PROCESSES)
    names: Sequence[str] = ("a", "a", "a", "ab", "abc")
    calls: tuple[int, int] = (2, MOST_CALLS)
    within: Sequence[float] = (2.0, 8.0, HORIZON)
    bursts: int = 1
    anytime_share: float = 0.5
    ttls: Sequence[Sequence[float]] = ((0.5,), (0.5, 2.0), (2.0, 5.0), (0.1, 1.0))
    works: Sequence[float] = (0.0, 0.01, 1.0, 6.0)  # at most
    task_share: float = 0.4  # that are tasks
    wait_share: float = 0.5  # who wait for more than a second
    short_waits: tuple[float, float] = (0.02, 1.0)  # seconds that others wait, if at all
    runs_out_share: float = 0.2
    rest_share: float = 0.2  # that have a min_hold
    cancel_share: float = 0.2
    detach_share: float = 0.2
    adopters: int = 2  # beside ten that acquire
    faults: Sequence[str] | None = None
    least_kinds: int = 0  # of them, which befall each run
    most_faults: int = MOST_FAULTS
    idle: float = 0.0  # seconds after which the second half of the calls comes
    max_connections: int | None = None  # of each process, and of each of its loops
    distance: float | None = None  # seconds that bytes take at most


Weighed = tuple[int, Profile]
ANYTHING: Weighed = (3, Profile())
# Many threads of a process come cold, each for a lock of its own.
CROWD = Profile(
    processes=(1, 1), names=(MANY_NAMES,), calls=(40, 60), within=(0.1,), anytime_share=0.1, ttls=((5.0,), (20.0,)),
    works=(0.01,), wait_share=0.5, faults=(),
)  # fmt: skip
# Servers end while they are asked.
ENDS = Profile(
    names=("a", "abc"), calls=(15, 40), within=(8.0, HORIZON), ttls=((2.0, 5.0),), works=(0.01, 0.1), wait_share=0.8,
    faults=("crash", "power_loss", "hang", "cut"), most_faults=12,
)  # fmt: skip
# Connections that stood idle do not answer any more.
STALE = Profile(
    names=("a", "abc"), calls=(10, 30), within=(HORIZON,), ttls=((20.0,), (2.0, 5.0)), works=(0.01, 0.5),
    wait_share=0.3, faults=("cut", "forgotten"), most_faults=2,
)  # fmt: skip
# What befalls connections to one server, and tokens that go from one request to another.
OF_ONE_SERVER: Sequence[Profile] = (
    # Those that stood idle do not answer any more, and their callers have little time.
    Profile(
        processes=(1, 2), names=("a", "abc"), calls=(10, 25), within=(HORIZON,), ttls=((20.0,), (2.0, 5.0)),
        works=(0.01, 0.1), wait_share=0.2, faults=("forgotten",), least_kinds=1, most_faults=1,
    ),
    # All are in use, and the server answers.
    Profile(
        processes=(1, 1), names=(MANY_NAMES,), calls=(85, 95), within=(0.3,), anytime_share=0.0, ttls=((20.0,),),
        works=(0.01,), task_share=0.1, wait_share=0.9, detach_share=0.0, faults=(), max_connections=1, distance=0.05,
    ),
    # Nobody needs them for a minute.
    Profile(names=("abc",), calls=(4, 12), within=(8.0,), works=(0.01,), faults=(), idle=70.0),
    # Many leases of a process, for some of which the server is too far away.
    Profile(
        processes=(1, 1), names=(MANY_NAMES,), calls=(60, 80), within=(8.0,), anytime_share=0.0,
        ttls=((0.4, 0.4, 0.4, 5.0),), works=(12.0,), wait_share=1.0, runs_out_share=0.0, rest_share=0.0,
        cancel_share=0.0, detach_share=0.0, faults=(), distance=0.1,
    ),
    # Whoever is handed the place of another one of its process leaves before what that one has sent arrives.
    Profile(
        processes=(1, 2), names=("a",), calls=(20, 40), within=(6.0,), anytime_share=0.2, ttls=((0.3, 5.0),),
        works=(0.1, 0.3), task_share=0.7, wait_share=0.4, cancel_share=0.7, faults=("stall",), least_kinds=1,
        most_faults=20,
    ),
    # The same, and the lock is free by then.
    Profile(
        processes=(2, 2), names=("a",), calls=(30, 40), within=(8.0,), anytime_share=0.0, ttls=((0.1, 5.0),),
        works=(0.0, 0.01), task_share=0.5, wait_share=0.7, rest_share=0.0, cancel_share=1.0, detach_share=0.0,
        faults=("stall",), least_kinds=1, most_faults=8,
    ),
    # Few want the same lock, and who stands second learns by a message alone that the lease of the first ends soon.
    Profile(
        processes=(4, 4), names=("ab",), calls=(25, 35), within=(0.3,), bursts=5, anytime_share=0.0, ttls=((0.3,),),
        works=(3.0,), wait_share=0.8, runs_out_share=0.95, rest_share=0.0, cancel_share=0.0, detach_share=0.0,
        adopters=0, faults=(), distance=0.005,
    ),
)  # fmt: skip
# Threads of a process that have little time give up one shortly after the other, while somebody has the lock for long.
IMPATIENT = Profile(
    processes=(1, 1), names=("a",), calls=(90, 120), within=(0.05, 0.2), bursts=4, anytime_share=0.0, ttls=((5.0,),),
    works=(20.0,), task_share=0.1, wait_share=0.0, short_waits=(0.5, 0.5), runs_out_share=0.0, rest_share=0.0,
    detach_share=0.0, adopters=0, faults=(),
)  # fmt: skip
# What befalls a database while many ask it.
OF_DATABASES: Sequence[Profile] = (
    # It is back before they notice.
    Profile(
        calls=(40, 60), within=(8.0,), anytime_share=0.0, works=(0.01, 0.3), faults=("restart",), most_faults=1,
    ),
    # It does not answer, and more tasks of a process ask than it has threads.
    Profile(
        processes=(1, 1), names=(MANY_NAMES,), calls=(50, 70), within=(1.0,), anytime_share=0.0, ttls=((20.0,),),
        works=(0.1, 0.3), task_share=1.0, faults=("hang", "partition"), most_faults=3,
    ),
    # It crashes while the lock changes hands by messages alone.
    Profile(
        processes=(3, 4), names=("a",), calls=(50, 70), within=(0.3,), bursts=5, anytime_share=0.0,
        ttls=((20.0,), (5.0, 20.0), (2.0, 5.0)), works=(0.005, 0.05), wait_share=1.0, runs_out_share=0.1,
        rest_share=0.05, cancel_share=0.1, faults=("crash_handing", "cut", "stall"), least_kinds=1, most_faults=12,
        distance=0.005,
    ),
)  # fmt: skip
EVERY = 5  # of so many seeds one has a profile of its world's own
PROFILES: Sequence[Weighed] = (
    ANYTHING,
    # Many want the same lock at the same time.
    (
        2,
        Profile(
            processes=(2, 4), names=("a",), calls=(8, 40), within=(2.0, 5.0), works=(0.01, 0.1, 0.5), wait_share=0.8,
            faults=("stop", "kill", "cut"),
        ),
    ),
    # Leases run out unrenewed while others wait.
    (
        2,
        Profile(
            processes=(3, 4), names=("a",), calls=(20, 40), within=(1.0, 3.0), ttls=((0.3,), (0.3, 3.0)),
            works=(0.1, 0.1, 3.0), wait_share=0.8, runs_out_share=0.9, cancel_share=0.5, rest_share=0.4, faults=(),
        ),
    ),
    # So few wait that each learns from one message alone when its turn comes: others release a lock with a min_hold, or
    # give up shortly before a lease ends.
    (
        3,
        Profile(
            processes=(4, 4), names=("abc",), calls=(30, 50), within=(0.8,), bursts=5, anytime_share=0.0,
            ttls=((0.7,), (0.7, 5.0)), works=(0.3, 3.0, 3.0), runs_out_share=0.9, cancel_share=0.5, rest_share=0.5,
            faults=(),
        ),
    ),
    # Connections of listeners end while the lock changes hands again and again.
    (
        2,
        Profile(
            processes=(3, 4), names=("a",), calls=(15, 40), within=(3.0, 6.0), ttls=((2.0, 5.0),), works=(0.05, 0.3),
            wait_share=0.9, faults=("cut_listener", "cut"), most_faults=40,
        ),
    ),
    # Who is handed the lock hears of it late, or never.
    (
        2,
        Profile(
            processes=(2, 4), names=("a",), calls=(15, 35), within=(4.0, 8.0), ttls=((3.0,),), works=(0.01, 0.1),
            wait_share=0.9, cancel_share=0.5, detach_share=0.6, adopters=6, faults=("late_hints",), most_faults=20,
        ),
    ),
    # What was given up arrives after all.
    (
        1,
        Profile(
            processes=(2, 4), names=("a",), calls=(10, 30), within=(6.0, 12.0), ttls=((5.0, 20.0), (0.5, 5.0)),
            works=(0.0, 0.01, 0.1), wait_share=0.2, cancel_share=0.5, faults=("stall", "hang"), most_faults=20,
        ),
    ),
    # The clock of the server is set while the lock changes hands.
    (
        1,
        Profile(
            processes=(2, 4), names=("a",), calls=(15, 40), within=(8.0,), ttls=((2.0, 5.0),), works=(0.05, 0.5),
            wait_share=0.9, faults=("server_clock",),
        ),
    ),
    # More tasks of a process than it has threads ask a database that is slow, or does not answer.
    (
        1,
        Profile(
            processes=(1, 1), names=(MANY_NAMES, "abc"), calls=(40, 60), within=(1.0,), anytime_share=0.0,
            ttls=((5.0,), (20.0,)), works=(0.1, 0.3), task_share=1.0, faults=("hang", "slow_server"), most_faults=3,
        ),
    ),
    # What a server does to a single statement, or connection.
    (
        1,
        Profile(
            calls=(15, 40), within=(8.0,), works=(0.01, 0.3), faults=("deadlock", "restart"), most_faults=3,
        ),
    ),
)  # fmt: skip

RESPONSE_MAX_HOLD = 6.0  # seconds for which a response keeps the lock of its view
RESPONSES_SHARE, MOST_RESPONSES = 0.4, 6  # of runs, and in one
FORKS_SHARE, MOST_FORKS = 0.4, 3  # the same
LISTS_SHARE, MOST_LISTS = 0.4, 4  # the same
SUCCESSIONS_SHARE, MOST_SUCCESSIONS = 0.3, 8  # the same
SLOTS_SHARE = 0.4  # of runs in which locks have several slots
MOST_OF_SLOTS = 5
CROWDS_SHARE, CROWDED = 0.3, (1, 1, 2, 3, None)  # of runs in which callers refuse to wait behind so many others
GROUPS_SHARE, MOST_GROUPS = 0.3, 12  # of runs in which several locks are asked for together; and in one
SLOTS = ((1, 2, 5), (1, 2, 5), (2,), (5,), (1, 5))  # of the calls of such a run; of 1, more than one may be
OUTAGES_SHARE, RUNNING_SHARE = 0.5, 0.5  # of runs; and of the calls in one that go on without the lock in an outage
LOST_LISTS_SHARE = 0.3  # of lists, whose process reaches no server when it asks for them
AIMED = 4  # faults of a run of the first profile that are aimed at an operation, each seed at others


def profile_of(seed: int, profiles: Sequence[Weighed], own_profiles: Sequence[Profile]) -> Profile:
    if own_profiles and seed % EVERY == 0:
        return own_profiles[seed // EVERY % len(own_profiles)]
    in_turn = [profile for weight, profile in profiles for _ in range(weight)]
    return in_turn[seed % len(in_turn)]


def draw_plan(
    seed: int,
    profile: Profile,
    profiles: Sequence[Weighed],
    faults: Mapping[str, Fault],
    of_call: Callable[[random.Random, Mapping[str, Any]], Mapping[str, Any]],
    operations: Sequence[str],
    *,
    has_slots: bool,
    has_max_waiters: bool,
    has_exchange: bool,
) -> list[Event]:
    """Neighbouring seeds have different profiles, and aim different faults at different operations.

    The first of the profiles is the one whose faults are aimed.
    """
    chance = random.Random(f"plan {seed}")
    faults, fork = {kind: fault for kind, fault in faults.items() if kind != "fork"}, faults.get("fork")
    turns, place = divmod(seed, sum(weight for weight, _ in profiles))
    processes = [f"p{number}" for number in range(chance.randint(*profile.processes))]
    names, ttls, within = chance.choice(profile.names), chance.choice(profile.ttls), chance.choice(profile.within)
    plan = []
    for _ in range(chance.randint(*profile.calls)):
        burst = HORIZON * chance.randrange(profile.bursts) / profile.bursts
        is_anytime = chance.random() < profile.anytime_share
        at = round(chance.uniform(0, HORIZON) if is_anytime else burst + chance.uniform(0, within), 3)
        what, who, about = _draw_call(chance, profile, chance.choice(processes), names, ttls)
        plan.append(Event(at, what, who, {**about, **of_call(chance, about)}))
    if profile.idle:
        half = len(plan) // 2
        plan[half:] = [replace(event, at=event.at + profile.idle) for event in plan[half:]]
    kinds = sorted(faults if profile.faults is None else faults.keys() & set(profile.faults))
    kinds = chance.sample(kinds, chance.randint(profile.least_kinds, len(kinds)))  # of each run its own
    for _ in range(chance.randint(1, profile.most_faults) if kinds else 0):
        kind = chance.choice(kinds)
        fault = faults[kind]
        who = chance.choice([*fault.on]) if fault.on else chance.choice(processes)
        about = dict(fault.draw(chance))
        if chance.random() < 0.5:
            about["during"] = chance.choice(OPERATIONS)
        plan.append(Event(round(chance.uniform(0, within), 3), kind, who, about))
    if profile.faults is None:
        pairs = [*product(sorted(faults), operations)]
        first = (turns * profiles[0][0] + place) * AIMED
        for kind, operation in [pairs[(first + number) % len(pairs)] for number in range(AIMED)]:
            fault = faults[kind]
            who = chance.choice([*fault.on]) if fault.on else ""
            about = {**fault.draw(chance), "during": operation}
            plan.append(Event(round(chance.uniform(0, within), 3), kind, who, about))
    plan += _draw_responses(seed, profile, processes, names, ttls)
    if has_exchange:
        plan += _draw_successions(seed, processes, names, ttls)
    plan = _let_run(seed, plan)
    plan += _draw_groups(seed, profile, processes, names, ttls)
    if has_slots:
        plan = _let_share(seed, plan)
    if has_max_waiters:
        plan = _let_refuse(seed, plan)
    if fork:
        plan += _draw_forks(seed, fork, processes, operations)
    plan += _draw_lists(seed, profile, names, faults.get("partition"))
    return sorted(plan, key=lambda event: event.at)


def _draw_responses(
    seed: int, profile: Profile, processes: Sequence[str], names: str, ttls: Sequence[float]
) -> Iterator[Event]:
    """Of some runs, from chance of their own, so that the rest of a plan is what it is without them."""
    chance, again = random.Random(f"responses {seed}"), random.Random(f"responses again {seed}")
    for _ in range(chance.randint(1, MOST_RESPONSES) if chance.random() < RESPONSES_SHARE else 0):
        about: dict[str, Any] = {
            "name": chance.choice(names),
            "in_task": chance.random() < profile.task_share,
            "ttl": chance.choice(ttls),
            "wait": chance.choice([0, 0.5, 8.0, None]),
            "works": round(chance.uniform(0.0, chance.choice([0.1, 3.0, 20.0])), 3),
            "ends": chance.choice(["read", "closed", "dropped", "replaced"]),
        }
        if chance.random() < 0.2:
            about["raises"] = True
        if again.random() < 0.3:
            about["asks_again"] = True  # for the lock, while it is open
        if about["in_task"] and chance.random() < profile.cancel_share:
            about["cancelled_after"] = round(chance.uniform(0.0, 6.0), 3)
        yield Event(round(chance.uniform(0.0, HORIZON), 3), "responds", chance.choice(processes), about)


def _draw_groups(
    seed: int, profile: Profile, processes: Sequence[str], names: str, ttls: Sequence[float]
) -> Iterator[Event]:
    """Of some runs, several locks that are asked for together, often in opposite orders. The same."""
    chance = random.Random(f"groups {seed}")
    several = names if len(names) > 1 else NAMES
    for _ in range(chance.randint(2, MOST_GROUPS) if chance.random() < GROUPS_SHARE else 0):
        together = chance.sample(several, min(len(several), chance.choice([2, 2, 3])))
        if chance.random() < 0.1:
            together.append(together[0])  # the same one once more
        about: dict[str, Any] = {
            "names": "".join(together),
            "in_task": chance.random() < profile.task_share,
            "ttl": chance.choice(ttls),
            "wait": chance.choice([0, round(chance.uniform(0.02, 12.0), 3), None, None]),
            "works": round(chance.uniform(0.0, chance.choice([0.1, 1.0, 4.0])), 3),
            "slots": dict.fromkeys(together, 1),
        }
        if chance.random() < profile.runs_out_share:
            about["renew"] = False
        if chance.random() < profile.rest_share:
            about["min_hold"] = round(chance.uniform(0.0, 2.0), 3)
        if chance.random() < 0.1:
            about["raises"] = True
        if about["in_task"] and chance.random() < profile.cancel_share:
            about["cancelled_after"] = round(chance.uniform(0.0, 6.0), 3)
        yield Event(
            round(chance.uniform(0.0, chance.choice([2.0, HORIZON])), 3), "gathers", chance.choice(processes), about
        )


def _let_run(seed: int, plan: Sequence[Event]) -> list[Event]:
    """Calls of some runs go on without the lock where the store cannot be asked. From chance of its own, too."""
    chance = random.Random(f"outages {seed}")
    share = RUNNING_SHARE if chance.random() < OUTAGES_SHARE else 0.0
    return [
        replace(event, about={**event.about, "on_unavailable": "run"})
        if event.what in ACQUIRING and chance.random() < share
        else event
        for event in plan
    ]


def _let_share(seed: int, plan: Sequence[Event]) -> list[Event]:
    """In some runs, callers let others have the lock beside them. The same.

    Not where the clock of a server is set, which ends leases in all slots but the first, as the models have it.
    """
    chance = random.Random(f"slots {seed}")
    numbers = chance.choice(SLOTS)
    if chance.random() >= SLOTS_SHARE or any(event.what == "server_clock" for event in plan):
        return list(plan)
    shared = [
        replace(event, about={**event.about, "slots": chance.choice(numbers)})
        if event.what in ACQUIRING and not event.about.get("reentrant")
        else event
        for event in plan
    ]
    return [_let_one_share(chance, event) for event in shared]


def _let_one_share(chance: random.Random, event: Event) -> Event:
    if (
        event.what == "succeeds"
    ):  # an exchange draws a number after those of leases that were granted beside the old one
        return replace(event, about={**event.about, "slots": MOST_OF_SLOTS})
    if event.what == "gathers":
        slots = {name: chance.choice([1, 2]) for name in event.about["slots"]}
        return replace(event, about={**event.about, "slots": slots})
    return event


def _let_refuse(seed: int, plan: Sequence[Event]) -> list[Event]:
    """In some runs, callers do not wait where as many others do. The same."""
    chance = random.Random(f"crowds {seed}")
    if chance.random() >= CROWDS_SHARE:
        return list(plan)
    return [
        replace(event, about={**event.about, "max_waiters": most})
        if event.what in ACQUIRING and (most := chance.choice(CROWDED))
        else event
        for event in plan
    ]


def _draw_forks(seed: int, fork: Fault, processes: Sequence[str], operations: Sequence[str]) -> Iterator[Event]:
    """The same."""
    chance = random.Random(f"forks {seed}")
    for _ in range(chance.randint(1, MOST_FORKS) if chance.random() < FORKS_SHARE else 0):
        about = dict(fork.draw(chance))
        if chance.random() < 0.7:
            about["during"] = chance.choice(operations)
        yield Event(round(chance.uniform(0.0, HORIZON), 3), "fork", chance.choice(processes), about)


def _draw_lists(seed: int, profile: Profile, names: str, partition: Fault | None) -> Iterator[Event]:
    """The same. Often by a process that has asked for nothing before, as a command of an operator is one."""
    chance = random.Random(f"lists {seed}")
    for _ in range(chance.randint(1, MOST_LISTS) if chance.random() < LISTS_SHARE else 0):
        at, process = round(chance.uniform(0.0, HORIZON), 3), chance.choice(PROCESSES)
        if partition and profile.faults is None and chance.random() < LOST_LISTS_SHARE:
            yield Event(at, "partition", process, partition.draw(chance))
        about = {"prefix": chance.choice(["", "", names[0]]), "in_task": chance.random() < profile.task_share}
        yield Event(at, "lists", process, about)


def _draw_successions(seed: int, processes: Sequence[str], names: str, ttls: Sequence[float]) -> Iterator[Event]:
    """Messages that hold a lock, and their runs. The same."""
    chance = random.Random(f"successions {seed}")
    for _ in range(chance.randint(1, MOST_SUCCESSIONS) if chance.random() < SUCCESSIONS_SHARE else 0):
        about = {
            "name": chance.choice(names),
            "ttl": chance.choice(ttls),
            "queued": round(chance.uniform(0.0, chance.choice([0.1, 3.0])), 3),
            "works": round(chance.uniform(0.0, chance.choice([0.1, 6.0])), 3),
            "retries": chance.choice([0, 0, 1, 2]),
        }
        yield Event(round(chance.uniform(0.0, HORIZON), 3), "succeeds", chance.choice(processes), about)


def _draw_call(
    chance: random.Random, profile: Profile, process: str, names: str, ttls: Sequence[float]
) -> tuple[str, str, Mapping[str, Any]]:
    def rarely(share: float, value: Any) -> Any:
        return value if chance.random() < share else None

    about: dict[str, Any] = {"name": chance.choice(names), "in_task": chance.random() < profile.task_share}
    what = chance.choice(["with"] * 6 + ["acquire"] * 4 + ["adopt"] * profile.adopters + ["free", "poll"])
    if what in ("with", "acquire", "poll"):
        about["ttl"] = chance.choice(ttls)
        is_patient = chance.random() < profile.wait_share
        seconds = round(chance.uniform(*((1, 12) if is_patient else profile.short_waits)), 3)
        about["wait"] = chance.choice((seconds, None) if is_patient else (0, seconds))
        about["renew"] = rarely(profile.runs_out_share, False)
        about["min_hold"] = rarely(profile.rest_share, round(chance.uniform(0, 2), 3))
        about["max_hold"] = rarely(0.1, 3.0)
        about["reentrant"] = rarely(0.15, True)
    if what != "free":
        most = chance.choice(profile.works)
        about["works"] = round(chance.uniform(0, most), 3) if most > 0.1 else most
        about["renews"] = rarely(0.1, chance.choice([0.5, 6.0]))
    if what in ("with", "acquire"):
        about["inside"] = rarely(0.15, chance.choice([about["name"], *names]))  # another lock that is taken meanwhile
        about["raises"] = rarely(0.1, True)
        about["detaches"] = rarely(profile.detach_share, True)
        about["renewed_meanwhile"] = rarely(0.2, True)  # by another thread or task, while it is given up
        about["in_atomic"] = rarely(0.1, True) if what == "with" and not about["in_task"] else None
    if what == "acquire":
        about["releases_twice"] = rarely(0.1, True)
        about["is_timed"] = rarely(0.3, True)
        about["forgets"] = rarely(0.05, True)
    if about["in_task"]:
        about["cancelled_after"] = rarely(profile.cancel_share, round(chance.uniform(0, 3), 3))
    return what, process, {key: value for key, value in about.items() if value is not None or key == "wait"}
