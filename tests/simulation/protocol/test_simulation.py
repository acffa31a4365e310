"""The promises of the protocol, in many short runs with the faults of each profile."""

from __future__ import annotations

import os

import pytest

from .world import PROFILES, simulate

RUNS = int(os.environ.get("DISTLOCK_SIMULATION_RUNS", "30"))


@pytest.mark.parametrize("profile", PROFILES)
def test_promises_are_kept(profile):
    held = sum(simulate(profile, seed)["holds"] for seed in range(RUNS))
    assert held > RUNS, "hardly anybody got the lock: the runs prove little"


def test_the_same_seed_gives_the_same_run():
    assert simulate("all", 1) == simulate("all", 1)
