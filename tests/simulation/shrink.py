"""Makes the plan of a failure short: leaves out what the failure does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .plan import Event
from .simulation import Outcome

Runs = Callable[[str, Iterator[Any], int], Iterator[Outcome]]


def shrunk(world: str, finding: Outcome, runs: Runs, jobs: int) -> tuple[Sequence[Event], Outcome]:
    """The shortest plan found with which the same seed fails, and its outcome.

    By delta debugging (Zeller and Hildebrandt, 2002): parts of the list are left out, then smaller ones.
    """
    plan, outcome, parts = list(finding.plan), finding, 2
    while len(plan) > 1:
        size = -(-len(plan) // parts)
        candidates = [plan[:start] + plan[start + size :] for start in range(0, len(plan), size)]
        shorter = None
        for candidate in runs(world, iter([(finding.seed, candidate) for candidate in candidates]), jobs):
            if candidate.violation and (shorter is None or len(candidate.plan) < len(shorter.plan)):
                shorter = candidate
        if shorter:
            plan, outcome, parts = list(shorter.plan), shorter, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(plan), 2 * parts)
    return plan, outcome
