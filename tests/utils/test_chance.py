"""Pauses are of different lengths in all processes, whatever the application does with its own random numbers."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

import django_distlock
from django_distlock import lock
from django_distlock.utils.chance import chance
from tests.support.programs import FORKS, in_a_fork

PACKAGE = Path(django_distlock.__file__).parent


@pytest.fixture
def numbers_of_others():
    """What other tests draw does not depend on a seed of this one."""
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.mark.usefixtures("numbers_of_others")
def test_what_an_application_seeded_it_gets_again(backend):
    """Also where locks are used between its numbers."""
    random.seed(1)
    expected = random.getstate()
    for _ in range(3):
        with lock("name"):
            pass
    assert random.getstate() == expected


@pytest.mark.usefixtures("numbers_of_others")
def test_an_application_that_seeds_alike_everywhere_has_different_pauses():
    random.seed(1)
    first = chance.random()
    random.seed(1)
    assert chance.random() != first


def test_no_other_module_draws_from_the_numbers_of_the_application():
    users = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if "random" in names or (isinstance(node, ast.ImportFrom) and not node.level and node.module == "random"):
                users.add(file.relative_to(PACKAGE).as_posix())
    assert users == {"utils/chance.py"}


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", FORKS)
def test_children_draw_different_numbers(kind, locmem_locks):
    def draw():
        lock("name").locked()  # by which a child of a fork in C notices that it is one
        return chance.random()

    assert in_a_fork(draw, FORKS[kind]) != in_a_fork(draw, FORKS[kind])
