"""What happens in a simulation, as a list that a person can read: calls of the package, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HORIZON = 20.0  # seconds in which calls and faults begin
MOST_FAULT = 6.0  # seconds that one lasts
MOST_CALLS, MOST_FAULTS = 30, 8
MOST_PROCESSES = 4
OPERATIONS = ("acquire", "wait", "renew", "release")


@dataclass(frozen=True)
class Event:
    """``at``: seconds. ``who``: the process or server that it happens to; "" where it is all of them.

    A fault with ``during`` happens when the next operation of that kind is on its way.
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

    ``on``: whom it may happen to.
    """

    happen: Callable[..., object]
    on: Sequence[str]
    draw: Draw = lambda chance: {}


def length(chance: random.Random) -> float:
    """Of a fault, in seconds: many short ones, as well as those that outlast leases and timeouts."""
    return round(
        chance.choice([chance.uniform(0.0, 0.5), chance.uniform(0.5, 3.0), chance.uniform(1.0, MOST_FAULT)]), 3
    )


def draw_plan(chance: random.Random, faults: Mapping[str, Fault], of_call: Draw) -> list[Event]:
    processes = [f"p{number}" for number in range(chance.randint(1, MOST_PROCESSES))]
    names = "abc"[: chance.choice([1, 1, 1, 2, 3])]
    ttls = chance.choice([(0.5,), (0.5, 2.0), (2.0, 5.0), (0.1, 1.0)])
    crowded = chance.choice([2.0, 8.0, HORIZON])  # seconds in which most of it happens
    plan = []
    for _ in range(chance.randint(2, MOST_CALLS)):
        at = round(chance.choice([chance.uniform(0, crowded), chance.uniform(0, HORIZON)]), 3)
        what, who, about = _draw_call(chance, chance.choice(processes), names, ttls)
        plan.append(Event(at, what, who, {**about, **of_call(chance)}))
    kinds = chance.sample(sorted(faults), chance.randint(0, len(faults)))  # of each run its own
    for _ in range(chance.randint(1, MOST_FAULTS) if kinds else 0):
        kind = chance.choice(kinds)
        fault = faults[kind]
        who = chance.choice([*fault.on]) if fault.on else chance.choice(processes)
        about = dict(fault.draw(chance))
        if chance.random() < 0.5:
            about["during"] = chance.choice(OPERATIONS)
        plan.append(Event(round(chance.uniform(0, crowded), 3), kind, who, about))
    return sorted(plan, key=lambda event: event.at)


def _draw_call(
    chance: random.Random, process: str, names: str, ttls: Sequence[float]
) -> tuple[str, str, Mapping[str, Any]]:
    def rarely(share: float, value: Any) -> Any:
        return value if chance.random() < share else None

    about: dict[str, Any] = {"name": chance.choice(names), "in_task": chance.random() < 0.4}
    what = chance.choice(["with"] * 6 + ["acquire"] * 4 + ["adopt"] * 2 + ["free", "poll"])
    if what in ("with", "acquire", "poll"):
        about["ttl"] = chance.choice(ttls)
        about["wait"] = chance.choice([0, round(chance.uniform(0.02, 1), 3), round(chance.uniform(1, 12), 3), None])
        about["renew"] = rarely(0.2, False)
        about["min_hold"] = rarely(0.2, round(chance.uniform(0, 2), 3))
        about["max_hold"] = rarely(0.1, 3.0)
        about["reentrant"] = rarely(0.15, True)
    if what != "free":
        about["works"] = chance.choice([0.0, 0.01, round(chance.uniform(0, 1), 3), round(chance.uniform(0, 6), 3)])
        about["renews"] = rarely(0.1, chance.choice([0.5, 6.0]))
    if what in ("with", "acquire"):
        about["inside"] = rarely(0.15, chance.choice([about["name"], *names]))  # another lock that is taken meanwhile
        about["raises"] = rarely(0.1, True)
        about["detaches"] = rarely(0.2, True)
        about["in_atomic"] = rarely(0.1, True) if what == "with" and not about["in_task"] else None
    if what == "acquire":
        about["releases_twice"] = rarely(0.1, True)
        about["forgets"] = rarely(0.05, True)
    if about["in_task"]:
        about["cancelled_after"] = rarely(0.2, round(chance.uniform(0, 3), 3))
    return what, process, {key: value for key, value in about.items() if value is not None or key == "wait"}
