"""One name per thing: names that were replaced do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_distlock

pytestmark = pytest.mark.once

PACKAGE = Path(django_distlock.__file__).parent
PAGES = PACKAGE.parent / "docs" / "internals"

# What stands in their place is told by the glossary. A few more words are in use in another sense, and so not here.
REPLACED = {
    "aannounce", "announce", "announce_in_background", "Arrival", "Ask", "ask_abreast", "Asked", "Asking",
    "await_turn", "Bell", "Bells", "bells", "bequeath", "check_bound", "Checkup", "clipped", "closes_with_it",
    "ClusterCheckup", "ClusterLocation", "Contact", "disguised", "Entries", "Entry", "Errand", "errand", "Faded",
    "Finding", "FORCED", "forget_the_dead", "forsake", "GivenBack", "goes_ahead", "Guarded", "hand_on", "has_come",
    "heir", "hold_back", "in_time", "in_words", "insists", "is_anew", "is_passing", "is_unanswered", "is_undone",
    "is_worth_waiting", "Keeper", "keeper", "last_of", "learned_at", "Ledger", "ledger", "let_go", "Lines",
    "Lineup", "Link", "looked_at", "Looks", "may_be_executed", "may_wait_on", "naming", "News", "NoAnswer",
    "NoReply", "NotServed", "Numbers", "open_within", "Parts", "PASSED_ON", "past_collisions", "path_of", "Pause",
    "pledge", "pledges", "Questions", "queues_until", "Quick", "redeem", "Rounds", "run_repeatedly",
    "runs_settle", "RunStamp", "SHORTEST_PATIENCE", "silent_for", "SnapshotAdmin", "speaks", "Stopping",
    "TakenOver", "Tally", "tally", "Ticket", "ticket", "tickets", "travel", "Trip", "trip", "trips", "turn_within",
    "Unanswered", "unanswered", "unless_transient", "until_rendered", "Verdict", "VERIFY_INTERVAL", "Wait",
    "wait_turn", "weigh_holders", "will_ring", "Wire", "wires",
}  # fmt: skip


def names_in_python(text: str) -> Iterator[str]:
    """Names of the code, and what comments, docstrings and other strings, such as SQL, name as code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string
        else:
            yield from names_in_text(token.string)


def names_in_text(text: str) -> Iterator[str]:
    """Words in backquotes, and those that are none of English: with an underscore, or with capitals inside."""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        yield from re.findall(r"\w+", quoted)
    yield from (word for word in re.findall(r"\w+", text) if re.search(r"[a-z0-9]_|[a-z][A-Z]|^[A-Z]{4,}$", word))


def names_in_lua(text: str) -> Iterator[str]:
    for line in text.splitlines():
        code, _, comment = line.partition("--")
        yield from re.findall(r"[A-Za-z_]\w*", code)
        yield from names_in_text(comment)


FILES = [
    *((path, names_in_python) for path in PACKAGE.rglob("*.py")),
    *((path, names_in_lua) for path in PACKAGE.rglob("*.lua")),
    *((path, names_in_text) for path in PAGES.rglob("*.md")),
]


@pytest.mark.parametrize(
    ("path", "names"), [pytest.param(*file, id=file[0].relative_to(PACKAGE.parent).as_posix()) for file in FILES]
)
def test_replaced_names_do_not_come_back(path, names):
    found = {name.strip("_") for name in names(path.read_text(encoding="utf-8"))}
    assert not found & REPLACED


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("the_ticket = Ticket()  # of `ledger`", names_in_python),
        ('execute("SELECT 1 -- FORCED")', names_in_python),
        ("local heir = 1 -- await_turn", names_in_lua),
        ("The `Keeper.find` of a lease, see RunStamp.", names_in_text),
    ],
)
def test_names_are_found(text, names):
    assert {name.strip("_") for name in names(text)} & REPLACED
