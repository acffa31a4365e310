"""``manage.py locks``: what it prints and the code it ends with."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from itertools import pairwise

import pytest
import redis
from django.core.management import CommandError, call_command, load_command_class

from django_distlock import locks
from django_distlock.monitoring import formatting
from django_distlock.monitoring.diagnostics import capabilities_of
from django_distlock.monitoring.inventory import Inventory
from django_distlock.names import check_name
from django_distlock.signals import lock_forced
from tests.support.admin_pages import hold
from tests.support.commands import said
from tests.support.quorum import spread
from tests.support.stores import LOCMEM, REDIS
from tests.support.tools import lock_request, locked_names, on_stores

on_each_store = on_stores("redis", "locmem")


@on_each_store
def test_list_is_a_table(backend):
    hold(backend, "order:1", label="POST /pay", pid=7, host="web-3")
    hold(backend, "mail:2")
    heading, first, second, count = said().splitlines()
    assert heading.split() == ["NAME", "BACKEND", "LABEL", "HOLDER", "HELD", "LEFT", "WAITING"]
    assert first.startswith("mail:2 ")
    assert re.fullmatch(r"order:1  default  POST /pay +7@web-3 +1\d s +5\d s +0", second)
    assert count == "2 held"
    assert said("list", "order:").splitlines()[-1] == "1 held"
    assert said("list", "nothing").splitlines() == ["0 held whose names begin with 'nothing'"]


def test_what_is_no_action_is_the_prefix_of_a_list(backend):
    hold(backend, "order:1")
    hold(backend, "mail:2")
    for arguments in (["order:"], ["list", "order:"], ["--json", "order:"], ["order:", "--json"]):
        assert "order:1" in said(*arguments)
        assert "mail:2" not in said(*arguments)


@pytest.mark.parametrize("action", ["chek", "relase", "lists"])
def test_a_misspelt_action_lists_nothing(backend, action):
    """A probe that is to check would always be content."""
    with pytest.raises(CommandError, match=f"no action '{action}': say (check|release|list), or list {action} for"):
        call_command("locks", action)


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("action", [["list"], ["show", "order:1"], ["release", "order:1", "--no-input"], ["check"]])
def test_the_options_of_every_command_stand_before_the_action_or_behind_it(backend, action, place):
    hold(backend, "order:1")
    options = ["--settings", "tests.settings", "--pythonpath", ".", "-v", "2", "--traceback"]
    arguments = [*options, *action] if place == "before" else [*action, *options]
    said(*arguments)
    parsed = load_command_class("django_distlock", "locks").create_parser("manage.py", "locks").parse_args(arguments)
    assert (parsed.settings, parsed.pythonpath, parsed.verbosity) == ("tests.settings", ".", 2)
    assert parsed.traceback


def test_locks_that_are_held_long_are_marked(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "LONG_HELD": 120}}
    backend = locks["default"]
    hold(backend, "long", ago=125.0)
    backend.release(hold(backend, "resting", ago=125.0), 30)
    hold(backend, "short", ago=110.0)
    lines = said().splitlines()
    assert [line for line in lines if "(long)" in line] == [line for line in lines if line.startswith("long ")]
    assert [(row["name"], row["held_long"]) for row in json.loads(said("list", "--json"))] == [
        ("long", True),
        ("resting", False),
        ("short", False),
    ]
    assert re.search(r"held for +2 min 0\d s, longer than LONG_HELD \(2 min 00 s\)\n", said("show", "long"))
    assert json.loads(said("show", "long", "--json"))[0]["held_long"] is True
    assert "LONG_HELD" not in said("show", "short")


def test_list_as_json(backend):
    taken = hold(backend, "order:1", label="POST /pay", pid=7, host="web-3")
    backend.release(hold(backend, "nightly"), 30)
    for arguments in (("--json",), ("list", "--json"), ("--json", "list"), ("list", "--json", "--using", "default")):
        nightly, order = json.loads(said(*arguments))
        assert nightly["state"] == "resting"
        assert order["holder"] == {"host": "web-3", "pid": 7, "thread": "MainThread", "label": "POST /pay"}
        assert (order["name"], order["using"], order["state"], order["waiting"]) == ("order:1", "default", "held", 0)
        assert 50 < order["remaining"] <= 60
        assert 12 <= order["held_for"] < 20
        assert taken.token not in json.dumps(order)


@on_each_store
def test_json_is_written_as_it_is_found_and_not_kept(backend, monkeypatch):
    for number in range(5):
        hold(backend, f"order:{number}")
    seen, look = [], backend.look

    def noted(names):
        seen.append(names)
        return look(names)

    class Output(io.StringIO):
        def write(self, text):
            seen.append(text)
            return super().write(text)

    monkeypatch.setattr(formatting, "PORTION", 2)
    monkeypatch.setattr(backend, "look", noted)
    output = Output()
    call_command("locks", "list", "--json", stdout=output)
    assert [lock["name"] for lock in json.loads(output.getvalue())] == [f"order:{number}" for number in range(5)]
    looks = [index for index, what in enumerate(seen) if isinstance(what, list)]
    assert [len(seen[index]) for index in looks] == [2, 2, 1]
    assert [len(seen[before + 1 : after]) for before, after in pairwise(looks)] == [1, 1]


def test_a_list_in_portions_keeps_neither_leases_nor_counts(backend, monkeypatch):
    taken, inventory = hold(backend, "order:1"), Inventory()
    [[(seen, waiting)]] = formatting.in_portions(inventory)
    assert (seen.info.token, waiting) == (taken.token, 0)
    backend.release(taken)
    monkeypatch.setattr(backend, "count_waiters", lambda names: [7] * len(names))
    assert inventory.leases([seen.lock]) == []
    assert inventory.count_waiters([seen.lock]) == {seen.lock: 7}


def test_json_has_its_end_also_where_something_fails_in_the_midst(backend, monkeypatch):
    for number in range(5):
        hold(backend, f"order:{number}")
    look = backend.look

    def fails_at_last(names):
        if "order:4" in names:
            raise ZeroDivisionError
        return look(names)

    monkeypatch.setattr(formatting, "PORTION", 2)
    monkeypatch.setattr(backend, "look", fails_at_last)
    output = io.StringIO()
    with pytest.raises(ZeroDivisionError):
        call_command("locks", "list", "--json", stdout=output)
    assert [lock["name"] for lock in json.loads(output.getvalue())] == [f"order:{number}" for number in range(4)]


def test_what_the_package_keeps_for_itself_is_not_listed_unless_it_is_asked_for(backend):
    hold(backend, "order:1")
    hold(backend, "django_distlock.done:1")
    hold(backend, "django_distlocked")
    for prefix, shown in (
        ("", ["django_distlocked", "order:1"]),
        ("django_", ["django_distlocked"]),
        ("django_distlock.", ["django_distlock.done:1"]),
    ):
        assert [lock["name"] for lock in json.loads(said("list", prefix, "--json"))] == shown
    assert "django_distlock.done:1" in said("show", "django_distlock.done:1")
    said("release", "--prefix", "django_", "--no-input")
    assert {info.name for info in backend.held()} == {"django_distlock.done:1", "order:1"}


def test_names_cannot_steer_the_terminal(backend):
    hold(backend, "a\x1b[2Jb\nc", label="\x07\u202e")
    for text in (said(), said("show", "a\x1b[2Jb\nc")):
        assert r"a\x1b[2Jb\nc" in text
        assert not set(text) & set("\x1b\x07\u202e")


def test_json_cannot_steer_the_terminal_either(backend):
    name = "a\x1b\x9b2J\u202e\U000e0001b"
    hold(backend, name, label="Straße 日本")
    text = said("--json")
    assert text.rstrip("\n").isprintable()
    assert "Straße 日本" in text
    assert json.loads(text)[0]["name"] == name


def test_nor_can_ascii_alone(backend):
    hold(backend, "a\x7fb\x1b")
    text = said("--json")
    assert text.rstrip("\n").isprintable()
    assert json.loads(text)[0]["name"] == "a\x7fb\x1b"


def test_tables_fit():
    rows = [("NAME", "BACKEND", "LABEL"), ("n" * 50, "default", "日本" * 20), ("short", "default", "x")]
    lines = formatting.table(rows, 60, (0, 2))
    assert max(map(formatting.width, lines)) <= 60
    assert lines[0].index("BACKEND") == lines[1].index("default") == lines[2].index("default")
    assert "…" in lines[1]
    assert max(map(formatting.width, formatting.table(rows))) > 100


def test_a_table_looks_at_each_character_of_a_long_text_a_few_times(monkeypatch):
    """Others may write keys of any length, and must not keep the operator from the list."""
    looked = []

    class Counted:
        combining = staticmethod(unicodedata.combining)

        @staticmethod
        def east_asian_width(character):
            looked.append(character)
            return unicodedata.east_asian_width(character)

    monkeypatch.setattr(formatting, "unicodedata", Counted)
    lines = formatting.table([("NAME", "LABEL"), ("é" * 4000, "日本" * 1000)], 80, (0, 1))
    assert [formatting.width(line) for line in lines] == [46, 80]
    assert len(looked) < 10 * 6000


@pytest.mark.parametrize("text", ["a" * 50, "日本語" * 20, "e\u0301" * 30, "ab日e\u0301", "", "…"])
def test_a_text_is_cut_to_the_columns_there_are(text):
    for size in range(1, 60):
        shown = formatting.truncated(text, size)
        kept = shown.removesuffix("…") if shown != text else text
        assert formatting.width(shown) <= size
        assert text.startswith(kept)
        if shown != text:
            assert formatting.width(text) > size
            assert formatting.width(text[: len(kept) + 1]) > size - 1  # no more of it would fit


def test_show(backend):
    hold(backend, "order:1", label="POST /pay")
    waiter = lock_request("order:1")
    backend.acquire(waiter, queue=True)
    text = said("show", "order:1")
    assert "POST /pay (pid 4711 on web-1, MainThread)" in text
    assert re.search(r"waiting +1$", text, re.MULTILINE)
    assert "nodes" not in text
    [shown] = json.loads(said("show", "order:1", "--json"))
    assert (shown["waiting"], shown["nodes"]) == (1, None)
    assert "Nobody holds the lock 'order'" in said("show", "order", code=1)
    backend.release(waiter)


def test_on_how_many_nodes_of_a_quorum(redlock_locks, five_valkeys):
    spread(redlock_locks, hold(redlock_locks, "order:1"))
    with redis.Redis.from_url(five_valkeys[0].url) as node:
        node.delete("lock:order:1")
    heading, line, _ = said().splitlines()
    assert heading.split()[-2:] == ["WAITING", "NODES"]
    assert line.endswith("4 / 5")
    assert re.search(r"nodes +4 / 5$", said("show", "order:1"), re.MULTILINE)
    for action in (["list"], ["show", "order:1"]):
        assert json.loads(said(*action, "--json"))[0]["nodes"] == 4


@on_each_store
def test_release_is_exact(backend):
    told = []
    lock_forced.connect(note := lambda **about: told.append((about["name"], about["by"])))
    for name in ("order", "order:1", "order:2"):
        hold(backend, name)
    assert "freed  order  was held by" in said("release", "order", "--no-input")
    assert locked_names(backend) == ["order:1", "order:2"]
    said("release", "--prefix", "order:", "--no-input")
    assert locked_names(backend) == []
    assert sorted(told) == [(name, "manage.py locks release") for name in ("order", "order:1", "order:2")]
    assert "Nobody holds" in said("release", "order", "--no-input", code=1)
    lock_forced.disconnect(note)


@on_each_store
def test_slots(backend):
    for number in (1, 2, 3):
        hold(backend, "export:7", label=f"tenant {number}", slots=3)
    hold(backend, "order:1")
    assert [re.split("  +", line)[0] for line in said().splitlines()[1:-1]] == [
        *(f"export:7, slot {number} of 3" for number in (1, 2, 3)), "order:1",
    ]  # fmt: skip
    rows = json.loads(said("list", "--json"))
    assert [(row["name"], row["slot"], row["slots"]) for row in rows] == [
        ("export:7", 1, 3), ("export:7", 2, 3), ("export:7", 3, 3), ("order:1", 1, 1),
    ]  # fmt: skip
    shown = said("show", "export:7")
    assert re.findall(r"export:7, slot \d of 3|tenant \d", shown) == [
        text for number in (1, 2, 3) for text in (f"export:7, slot {number} of 3", f"tenant {number}")
    ]
    assert "freed  export:7, slot 2 of 3  was held by tenant 2" in said(
        "release", "export:7", "--slot", "2", "--no-input"
    )
    assert [info.slot for info in backend.look(["export:7"])[0]] == [1, 3]
    assert "Nobody holds" in said("release", "export:7", "--slot", "2", "--no-input", code=1)
    assert "--slot is for one lock" in said("release", "--prefix", "export", "--slot", "1", "--no-input", code=2)
    assert said("release", "export:7", "--no-input").count("freed") == 2
    assert locked_names(backend) == ["order:1"]


@pytest.mark.parametrize(("answer", "code"), [("yes", 0), ("y", 0), ("no", 1), ("", 1)])
def test_release_asks(backend, monkeypatch, answer, code):
    hold(backend, "order:1")
    monkeypatch.setattr("builtins.input", lambda: answer)
    said("release", "order:1", code=code)
    assert (backend.look(["order:1"]) == [[]]) == (code == 0)


def test_release_without_anybody_to_ask(backend, monkeypatch):
    hold(backend, "order:1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "say --no-input" in said("release", "order:1", code=2)
    assert backend.look(["order:1"]) != [[]]


def test_release_keeps_what_changed_hands_while_it_asked(backend, monkeypatch):
    first = hold(backend, "order:1")
    hold(backend, "order:2")

    def answer_late():
        backend.release(first)
        hold(backend, "order:1", label="the next one")
        return "yes"

    monkeypatch.setattr("builtins.input", answer_late)
    text = said("release", "--prefix", "order:", code=1)
    assert "kept   order:1  was freed or changed hands meanwhile" in text
    assert "freed  order:2" in text
    assert [info.holder.label for info in backend.look(["order:1"])[0]] == ["the next one"]


def test_release_as_json(backend):
    hold(backend, "order:1")
    [freed] = json.loads(said("release", "order:1", "--no-input", "--json"))
    assert (freed["name"], freed["outcome"]) == ("order:1", "freed")


@pytest.fixture
def two(valkey, store, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
        "batch": {"BACKEND": LOCMEM},
    }
    yield locks
    locks.close()


def test_release_does_not_guess_the_backend(two):
    hold(two["default"], "order:1")
    hold(two["batch"], "order:1")
    assert "in 'batch' and 'default'. Say which by --using" in said("release", "order:1", "--no-input", code=2)
    said("--using", "batch", "release", "order:1", "--no-input")
    assert two["batch"].look(["order:1"]) == [[]]
    assert two["default"].look(["order:1"]) != [[]]
    said("release", "order:1", "--no-input")
    assert two["default"].look(["order:1"]) == [[]]


def test_a_backend_that_is_down(two, settings):
    settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "gone": {"BACKEND": REDIS, "LOCATION": "unix:///no/s"}}
    hold(two["batch"], "order:1")
    text = said(code=3)
    assert "order:1" in text
    assert "Lock backend 'gone' at unix:///no/s" in text
    assert "1 held" in said("--using", "batch")
    assert "Lock backend 'gone'" in said("release", "order:1", "--no-input", code=3)
    assert two["batch"].look(["order:1"]) != [[]]
    assert "There is no backend 'nope'" in said("--using", "nope", code=2)
    assert "held" not in said("--using", "gone", code=3)  # nobody knows
    assert json.loads(said("--using", "gone", "--json", code=3).splitlines()[0]) == []


def test_wrong_settings(settings):
    settings.DISTRIBUTED_LOCKS = []
    assert "it is a dict of lock backends" in said(code=3)
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": "nowhere.Backend"}}
    assert "cannot be imported" in said(code=3)
    assert "cannot be imported" in said("check", code=1)


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_an_interval_that_cannot_be_waited_for(every):
    with pytest.raises(CommandError, match="is no length of time from 0.01s to 1d"):
        call_command("locks", "list", "--watch", every)


def test_all_locks_are_not_freed_by_an_empty_prefix_without_asking(backend, monkeypatch):
    """As a shell passes it for a variable that is not set."""
    hold(backend, "order:1")
    hold(backend, "mail:2")
    assert "means all locks" in said("release", "--prefix", "", "--no-input", code=2)
    assert locked_names(backend) == ["mail:2", "order:1"]
    monkeypatch.setattr("builtins.input", lambda: "yes")
    said("release", "--prefix", "")
    assert locked_names(backend) == []


def test_a_question_is_not_among_the_json(backend, monkeypatch, capsys):
    hold(backend, "order:1")
    monkeypatch.setattr("builtins.input", lambda: "yes")
    call_command("locks", "release", "order:1", "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["outcome"] == "freed"
    assert "order:1" in printed.err
    assert "Free 1 lock," in printed.err


@pytest.mark.parametrize("arguments", [("show", "nope"), ("release", "nope", "--no-input")])
def test_what_is_not_there_is_json_too(backend, arguments):
    assert json.loads(said(*arguments, "--json", code=1).splitlines()[0]) == []


def test_a_long_name_is_found_as_it_was_given_and_as_it_is_listed(backend):
    long_name = "order:" + "x" * 400
    hold(backend, listed := check_name(long_name))
    for name in (long_name, listed):
        assert json.loads(said("show", name, "--json"))[0]["name"] == listed
    said("release", long_name, "--no-input")
    assert backend.look([listed]) == [[]]


@pytest.mark.parametrize("action", ["show", "release"])
@pytest.mark.parametrize("name", ["", "x" * 11_000])
def test_what_is_no_name(action, name):
    with pytest.raises(CommandError, match="The name of a lock is (empty|too long)"):
        call_command("locks", action, name)


def test_check_of_a_backend_that_is_fine(backend):
    text = said("check")
    assert "A lock was taken, waited for, renewed, listed and released." in text
    assert locked_names(backend) == []
    assert [finding["level"] for finding in json.loads(said("check", "--json"))["default"]][:2] == ["ok", "ok"]


def test_check_of_a_backend_that_takes_seconds(locmem_locks, monkeypatch):
    """It is slow, but keeps its locks."""
    real, now = type(locmem_locks).look, [100.0]

    def look(backend, names):
        now[0] += 2.0
        return real(backend, names)

    monkeypatch.setattr(type(locmem_locks), "look", look)
    for module in ("locmem", "common.selftest"):
        monkeypatch.setattr(f"django_distlock.backends.{module}.clock", lambda: now[0])
    assert "A lock was taken, waited for, renewed, listed and released." in said("check")
    locmem_locks.terms = locmem_locks.terms.replace(ttl=9.0)
    assert "s, for which a lock with the TTL of 9 s is not kept." in said("check", code=1)


def test_check_tells_what_each_backend_keeps_also_for_programs(settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": LOCMEM},
        "none": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"},
    }
    checked = said("check")
    assert "exclusion, order of arrival, wake-up of waiters, slots, " in checked
    assert "runs of beat, unique tasks; not: exclusion of other processes" in checked
    found = json.loads(said("check", "--json"))
    kept = {alias: [item["data"] for item in items if item["about"] == "keeps"] for alias, items in found.items()}
    assert kept == {alias: [capabilities_of(locks[alias])] for alias in ("default", "none")}
    assert kept["default"][0]["supports_queue"] is True
    assert [flag for flag, is_kept in kept["none"][0].items() if is_kept] == [
        "supports_transfer",
        "supports_exchange",
    ]


def test_what_a_backend_keeps_is_told_when_it_is_down(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "unix:///nowhere"}}
    assert re.search(r"keeps +exclusion, exclusion of other processes", said("check", code=1))


def test_check_of_a_dummy(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}
    assert "Locks of this backend exclude nobody" in said("check")


def test_check_of_a_backend_that_is_down(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "unix:///no/s"}}
    text = said("check", code=1)
    assert "1 error(s)." in text
    assert text.count("/no/s") >= 1
    locks.close()
