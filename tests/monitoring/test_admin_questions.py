"""What the admin's page of held locks asks its backends: as little as it shows, and once."""

from __future__ import annotations

from collections import Counter

import pytest

from django_distlock.monitoring import inventory
from django_distlock.monitoring.inventory import SlotKey
from django_distlock.types import Slot
from tests.support.admin_pages import hold, names_in

pytestmark = pytest.mark.django_db

LIST = "/admin/distlock/heldlock/"


@pytest.fixture
def too_many(monkeypatch):
    """To ask who holds each."""
    monkeypatch.setattr(inventory, "MOST_HOLDERS", 10)


def test_one_page_asks_each_backend_once(operator, valkey_locks, monkeypatch):
    for number in range(30):
        hold(valkey_locks, f"n:{number}")
    asked = []
    for question in ("slots", "holders", "count_waiters", "look"):
        ask = getattr(valkey_locks, question)
        monkeypatch.setattr(
            valkey_locks,
            question,
            lambda about="", what=question, ask=ask: asked.append((what, len(about))) or ask(about),
        )
    operator.get(LIST, {"_facets": "True", "host": "web-1", "q": "shop"})
    assert asked == [("slots", 0), ("holders", 30), ("look", 30), ("count_waiters", 30)]


@pytest.mark.parametrize(
    ("query", "questions"),
    [
        ({"q": "n:1"}, [("holders", 19), ("look", 11)]),
        ({"q": "n:"}, [("look", 30)]),
        ({"q": "shop"}, [("holders", 30), ("look", 30)]),
        ({"q": "nobody"}, [("holders", 30)]),
        ({"o": "4"}, [("remaining", 30), ("look", 30)]),
        ({"o": "3"}, [("holders", 30), ("look", 30)]),
        ({"o": "-1"}, [("look", 30)]),
    ],
)
def test_searching_and_sorting_ask_for_what_they_need_alone(
    operator, valkey_locks, too_many, monkeypatch, query, questions
):
    """Names that fit are found without their holders, and nothing is looked at that the page does not show."""
    for number in range(30):
        hold(valkey_locks, f"n:{number}")
    asked = []
    for question in ("holders", "remaining", "look"):
        ask = getattr(valkey_locks, question)
        monkeypatch.setattr(
            valkey_locks, question, lambda names, what=question, ask=ask: asked.append((what, len(names))) or ask(names)
        )
    operator.get(LIST, query)
    assert asked == questions


def test_only_the_locks_of_the_page_are_looked_at(operator, valkey_locks, monkeypatch):
    for number in range(120):
        hold(valkey_locks, f"n:{number:03}", ttl=100 + number)
    asked = []
    look, remaining = valkey_locks.look, valkey_locks.remaining
    monkeypatch.setattr(valkey_locks, "look", lambda names: asked.append(("look", len(names))) or look(names))
    monkeypatch.setattr(
        valkey_locks, "remaining", lambda names: asked.append(("remaining", len(names))) or remaining(names)
    )
    assert names_in(operator.get(LIST, {"o": "-4"}))[0] == "n:119"
    assert asked == [("remaining", 120), ("look", 100)]
    asked.clear()
    assert names_in(operator.get(LIST, {"o": "4", "p": 2})) == [f"n:{number:03}" for number in range(100, 120)]
    assert asked == [("remaining", 120), ("look", 20)]


@pytest.mark.parametrize("query", [{}, {"prefix": "n:"}, {"p": "2", "using": "default"}])
def test_only_the_locks_of_the_page_have_keys(operator, valkey_locks, too_many, monkeypatch, query):
    """Of a million, to make them takes longer than all the rest."""
    for number in range(300):
        hold(valkey_locks, f"n:{number:03}")
    made, make = [], inventory.new_key
    monkeypatch.setattr(inventory, "new_key", lambda parts: made.append(parts) or make(parts))
    assert len(names_in(operator.get(LIST, query))) == 100
    assert len({*made}) == 100


def test_keys_of_several_backends_stand_by_name_and_slot_each_once():
    slots = {
        "b": [
            ("c", 7),
            ("", 1),
            ("a:2", 1),
            ("a;", 1),
            ("a:1", 3),
            ("a:1", 1),
            ("a:1", 2),
            ("c", 12),
            ("c", 7),
            ("", 1),
        ],
        "none": [],
        "a": [("b", 1), ("a:1", 1)],
    }
    lists = {using: inventory.SlotList() for using in slots}
    for using, found in lists.items():
        found.extend(Slot(*slot) for slot in slots[using])
        found.sort()
    keys = inventory.KeyList(lists)
    every = sorted(
        (SlotKey(using, *slot) for using in slots for slot in {*slots[using]}),
        key=lambda key: (key.name, key.using, key.slot),
    )
    assert [*keys] == every
    assert len(keys) == len(every)
    assert [keys[2:5], keys[5:], keys[:-1], keys[10:]] == [every[2:5], every[5:], every[:-1], []]
    assert [keys[0], keys[-1]] == [every[0], every[-1]]
    for using in (None, "a", "b", "none", "unknown"):
        for prefix in ("", "a", "a:", "b", "d"):
            fitting = [key for key in every if using in (None, key.using) and key.name.startswith(prefix)]
            found = keys.only(using, prefix)
            assert [[*found], len(found), found[1:3]] == [fitting, len(fitting), fitting[1:3]]
    assert keys.count_by_prefix() == Counter(inventory.prefix_of(key.name) for key in every)
    lists["b"].remove("a:")
    assert [*inventory.KeyList({"b": lists["b"]})] == [
        key for key in every if key.using == "b" and not key.name.startswith("a:")
    ]
