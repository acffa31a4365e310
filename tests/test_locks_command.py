"""``manage.py locks``: what it prints and the code it ends with."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from django.core.management import CommandError, call_command

from django_distlock import locks, tables
from django_distlock.signals import lock_forced

from .admin_pages import hold
from .conftest import LOCMEM, REDIS
from .tools import PATIENCE, eventually, ticket

ROOT = Path(__file__).resolve().parent.parent


def said(*arguments, code=0, **options):
    """What the command prints; it must end with that code."""
    out = io.StringIO()
    try:
        call_command("locks", *arguments, stdout=out, no_color=True, **options)
        ended = 0
    except CommandError as error:
        ended = error.returncode
        out.write(f"\n{error}")
    assert ended == code, out.getvalue()
    return out.getvalue()


def test_list_is_a_table(backend):
    hold(backend, "order:1", label="POST /pay", pid=7, host="web-3")
    hold(backend, "mail:2")
    heading, first, second, count = said().splitlines()
    assert heading.split() == ["NAME", "BACKEND", "LABEL", "HOLDER", "HELD", "LEFT", "WAITING"]
    assert first.startswith("mail:2 ")
    assert re.fullmatch(r"order:1  default  POST /pay +7@web-3 +1\d s +5\d s +0", second)
    assert count == "2 held"
    assert said("list", "order:").splitlines()[-1] == "1 held"
    assert said("list", "nothing").splitlines() == ["0 held"]


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
    said("release", "--prefix", "", "--no-input")
    assert [info.name for info in backend.held()] == ["django_distlock.done:1"]


def test_names_cannot_steer_the_terminal(backend):
    hold(backend, "a\x1b[2Jb\nc", label="\x07\u202e")
    for text in (said(), said("show", "a\x1b[2Jb\nc")):
        assert r"a\x1b[2Jb\nc" in text
        assert not set(text) & set("\x1b\x07\u202e")


def test_tables_fit():
    rows = [("NAME", "BACKEND", "LABEL"), ("n" * 50, "default", "日本" * 20), ("short", "default", "x")]
    lines = tables.table(rows, 60, (0, 2))
    assert max(map(tables.width, lines)) <= 60
    assert lines[0].index("BACKEND") == lines[1].index("default") == lines[2].index("default")
    assert "…" in lines[1]
    assert max(map(tables.width, tables.table(rows))) > 100


def test_show(backend):
    hold(backend, "order:1", label="POST /pay")
    waiter = ticket("order:1")
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
    hold(redlock_locks, "order:1")
    eventually(lambda: redlock_locks.look(["order:1"])[0].nodes == 5)
    with redis.Redis.from_url(five_valkeys[0].url) as node:
        node.delete("lock:order:1")
    heading, line, _ = said().splitlines()
    assert heading.split()[-2:] == ["WAITING", "NODES"]
    assert line.endswith("4 / 5")
    assert re.search(r"nodes +4 / 5$", said("show", "order:1"), re.MULTILINE)
    for action in (["list"], ["show", "order:1"]):
        assert json.loads(said(*action, "--json"))[0]["nodes"] == 4


def test_release_is_exact(backend):
    told = []
    lock_forced.connect(note := lambda **about: told.append((about["name"], about["by"])))
    for name in ("order", "order:1", "order:2"):
        hold(backend, name)
    assert "freed  order  was held by" in said("release", "order", "--no-input")
    assert sorted(backend.names()) == ["order:1", "order:2"]
    said("release", "--prefix", "order:", "--no-input")
    assert list(backend.names()) == []
    assert sorted(told) == [(name, "manage.py locks release") for name in ("order", "order:1", "order:2")]
    assert "Nobody holds" in said("release", "order", "--no-input", code=1)
    lock_forced.disconnect(note)


@pytest.mark.parametrize(("answer", "code"), [("yes", 0), ("y", 0), ("no", 1), ("", 1)])
def test_release_asks(backend, monkeypatch, answer, code):
    hold(backend, "order:1")
    monkeypatch.setattr("builtins.input", lambda question: answer)
    said("release", "order:1", code=code)
    assert (backend.look(["order:1"]) == [None]) == (code == 0)


def test_release_without_anybody_to_ask(backend, monkeypatch):
    hold(backend, "order:1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "say --no-input" in said("release", "order:1", code=2)
    assert backend.look(["order:1"]) != [None]


def test_release_keeps_what_changed_hands_while_it_asked(backend, monkeypatch):
    first = hold(backend, "order:1")
    hold(backend, "order:2")

    def answer_late(question):
        backend.release(first)
        hold(backend, "order:1", label="the next one")
        return "yes"

    monkeypatch.setattr("builtins.input", answer_late)
    text = said("release", "--prefix", "order:", code=1)
    assert "kept   order:1  was freed or changed hands meanwhile" in text
    assert "freed  order:2" in text
    assert [info.holder.label for info in backend.look(["order:1"])] == ["the next one"]


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
    assert two["batch"].look(["order:1"]) == [None]
    assert two["default"].look(["order:1"]) != [None]
    said("release", "order:1", "--no-input")
    assert two["default"].look(["order:1"]) == [None]


def test_a_backend_that_is_down(two, settings):
    settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "gone": {"BACKEND": REDIS, "LOCATION": "unix:///no/s"}}
    hold(two["batch"], "order:1")
    text = said(code=3)
    assert "order:1" in text
    assert "Lock backend 'gone' at unix:///no/s" in text
    assert "1 held" in said("--using", "batch")
    assert "Lock backend 'gone'" in said("release", "order:1", "--no-input", code=3)
    assert two["batch"].look(["order:1"]) != [None]
    assert "There is no backend 'nope'" in said("--using", "nope", code=2)


def test_wrong_settings(settings):
    settings.DISTRIBUTED_LOCKS = []
    assert "it is a dict of lock backends" in said(code=3)
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": "nowhere.Backend"}}
    assert "cannot be imported" in said(code=3)
    assert "cannot be imported" in said("check", code=1)


def test_watch_redraws_the_terminal_until_ctrl_c(valkey, valkey_locks):
    """In a real terminal of 12 lines and 70 columns: only what fits is looked at and shown."""
    for number in range(40):
        hold(valkey_locks, f"order:{number:02}", label="POST /orders/" + "9" * 60)
    terminal, inside = pty.openpty()
    os.set_blocking(terminal, False)
    process = subprocess.Popen(
        [sys.executable, "example_project/manage.py", "locks", "list", "--watch", "0.1"],
        cwd=ROOT, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        env={**os.environ, "SHOP_LOCKS": valkey.url, "DJANGO_SETTINGS_MODULE": "example_project.settings",
             "LINES": "12", "COLUMNS": "70", "TERM": "xterm"},
    )  # fmt: skip
    os.close(inside)
    seen, deadline = b"", time.monotonic() + PATIENCE
    while seen.count(b"\033[H\033[2J") < 3 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536)
    os.kill(process.pid, 2)
    assert process.wait(PATIENCE) == 0
    os.close(terminal)
    screen = re.sub(r"\x1b\[[\d;]*m", "", seen.decode().split("\033[H\033[2J")[1]).splitlines()
    assert screen[0].startswith("NAME")
    assert screen[1].startswith("order:00")
    assert max(map(len, screen)) <= 70
    assert len(screen) <= 12
    assert screen[-1].startswith("40 held, 33 of them not shown, at ")


def test_check_of_a_backend_that_is_fine(backend):
    text = said("check")
    assert "A lock was taken, waited for, renewed, listed and released." in text
    assert list(backend.names()) == []
    assert [finding["level"] for finding in json.loads(said("check", "--json"))["default"]][:2] == ["ok", "ok"]


def test_check_of_a_dummy(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}
    assert "Locks of this backend exclude nobody" in said("check")


def test_check_of_a_backend_that_is_down(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "unix:///no/s"}}
    text = said("check", code=1)
    assert "1 error(s)." in text
    assert text.count("/no/s") >= 1
    locks.close()
