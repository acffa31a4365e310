"""Backends that hang: whoever asks all of them waits for all at the same time, and is told of each."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from django_distlock import locks
from django_distlock.backends.locmem import LocMemBackend
from tests.support.admin_pages import hold, said
from tests.support.proxy import Proxy
from tests.support.stores import DATABASE, LOCMEM, REDIS
from tests.support.tools import eventually

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(4)]

TIMEOUT = 3.0  # seconds; a server that began to hang costs two: a lost reply is asked for once more
ONE = 2 * TIMEOUT
HANGING = ("first", "second", "third")


@pytest.fixture
def hanging(valkey, store, settings, tmp_path_factory):
    """Three aliases whose servers take what they are sent and say nothing, and one that answers."""
    proxies = [Proxy(valkey.socket, tmp_path_factory.mktemp("p")) for _ in HANGING]
    options = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
    settings.DISTRIBUTED_LOCKS = {
        **{
            alias: {"BACKEND": REDIS, "LOCATION": proxy.url, "OPTIONS": options}
            for alias, proxy in zip(HANGING, proxies, strict=True)
        },
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
    }
    hold(locks["default"], "order:1")
    for proxy in proxies:
        proxy.__enter__()
    for alias, proxy in zip(HANGING, proxies, strict=True):
        locks[alias].look(["order:1"])  # so that there is a connection
        proxy.hang = True
    yield
    for proxy in proxies:
        proxy.hang = False
    locks.close()
    for proxy in proxies:
        proxy.__exit__()


class Watch:
    """``with Watch() as watch: ...``, then ``watch.passed`` in seconds."""

    def __enter__(self):
        self.began = time.monotonic()
        return self

    def __exit__(self, *_):
        self.passed = time.monotonic() - self.began


def ran(*arguments):
    out = io.StringIO()
    with pytest.raises(CommandError) as raised, Watch() as watch:
        call_command("locks", *arguments, stdout=out, no_color=True)
    return watch.passed, out.getvalue(), str(raised.value)


@pytest.mark.django_db
@pytest.mark.parametrize("query", [{}, {"q": "order"}, {"o": "2"}], ids=["all", "search", "order"])
def test_the_admin_waits_for_them_once_and_names_each(operator, hanging, query):
    with Watch() as watch:
        page = operator.get("/admin/distlock/heldlock/", query)
    assert TIMEOUT < watch.passed < 2.5 * ONE
    assert [row.name for row in page.context["cl"].result_list] == ["order:1"]
    errors = [message for message in said(page) if message.startswith("error")]
    assert [alias for alias in HANGING if any(f"“{alias}” are not shown" in error for error in errors)] == [*HANGING]
    assert len(errors) == len(HANGING)


@pytest.mark.django_db
def test_so_does_the_page_of_beat(operator, hanging):
    with Watch() as watch:
        page = operator.get("/admin/distlock/beatrun/")
    assert TIMEOUT < watch.passed < 2.5 * ONE
    assert len(said(page)) == len(HANGING)


def test_locks_list_waits_for_them_once_and_names_each(hanging):
    took, out, errors = ran("list", "--json")
    assert TIMEOUT < took < 2.5 * ONE
    assert [lock["name"] for lock in json.loads(out)] == ["order:1"]
    assert [alias for alias in HANGING if f"Lock backend {alias!r}" in errors] == [*HANGING]


@pytest.mark.parametrize("arguments", [("show", "order:1"), ("release", "order:1", "--no-input")])
def test_so_do_those_for_one_name(hanging, arguments):
    took, _, errors = ran(*arguments)
    assert TIMEOUT < took < 2.5 * ONE
    assert all(f"Lock backend {alias!r}" in errors for alias in HANGING)


def test_locks_check_waits_for_them_once_and_reports_each(hanging):
    took, out, _ = ran("check", "--json")
    assert TIMEOUT < took < 2.5 * ONE
    found = json.loads(out)
    assert list(found) == [*HANGING, "default"]
    for alias in HANGING:
        assert [(finding["level"], finding["about"]) for finding in found[alias]] == [
            ("error", "reachable"),
            ("info", "keeps"),
        ]
    assert not any(finding["level"] == "error" for finding in found["default"])


@pytest.mark.django_db(transaction=True)
def test_what_backends_open_for_their_threads_is_closed(sqlite_database, settings, monkeypatch):
    """Not those of the database backend, which are its own, but what somebody else's takes from Django."""
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": DATABASE, "LOCATION": "locks"},
        "memory": {"BACKEND": LOCMEM},
    }
    hold(locks["default"], "order:1")
    opened = []

    def slots(self, prefix=""):
        connections["locks"].ensure_connection()
        opened.append((threading.current_thread(), connections["locks"]))
        return iter(())

    monkeypatch.setattr(LocMemBackend, "slots", slots)
    out = io.StringIO()
    call_command("locks", "list", stdout=out)
    assert "order:1" in out.getvalue()
    [(thread, connection)] = opened
    assert thread is not threading.current_thread()
    assert connection.connection is None
    eventually(lambda: not thread.is_alive())
    eventually(lambda: not any(thread.name.startswith("distlock-ask") for thread in threading.enumerate()))
    locks.close()
