"""The simulation finds what it must: each broken rule shows within a few runs."""

from __future__ import annotations

import pytest

from .checker import Violation
from .mutants import MUTANTS
from .world import simulate

MOST_RUNS = 100


def violations(profile: str, texts: dict[str, str]):
    for seed in range(MOST_RUNS):
        try:
            simulate(profile, seed, texts)
        except Violation as violation:
            yield violation


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_rule_is_found(mutant):
    assert next(violations(mutant.profile, mutant.texts()), None), f"not found in {MOST_RUNS} runs"
