"""Passwords of servers are in no message, page, log or traceback, however wrongly they are set up."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest
from django.test import Client
from django.views.debug import ExceptionReporter

from django_distlock import LockBackendError, lock, locks
from django_distlock.utils.text import quoted
from tests.support.admin_pages import login
from tests.support.commands import said_by
from tests.support.credentials import Pushing
from tests.support.scripted import Scripted
from tests.support.stores import DATABASE, LOCMEM, REDIS, REDLOCK

PASSWORD = "s3cret"
SENTINELS = {"sentinels": [("127.0.0.1", 1)], "service_name": "mymaster"}


def redis_at(location, **options):
    return {"default": {"BACKEND": REDIS, "LOCATION": location, "OPTIONS": options}}


WRONG = {
    "another scheme": redis_at("valkey://:s3cret@10.0.0.1:6379/0"),
    "a slash too few": redis_at("rediss:/user:s3cret@host/0"),
    "a space before": redis_at(" redis://:s3cret@host/0"),
    "no scheme": redis_at("user:s3cret@host:6379"),
    "a port that is none": redis_at("redis://:s3cret@host:port/0"),
    "an unknown parameter": redis_at("redis://:s3cret@host:1/0?pasword=s3cret"),
    "bytes": redis_at(b"redis://:s3cret@host/0"),
    "a list": redis_at(["redis://:s3cret@host/0"]),
    "a dict": redis_at({"url": "redis://:s3cret@host/0"}),
    "a URL as cache": redis_at("cache:redis://:s3cret@host/0"),
    "a URL as cache, with sentinels": redis_at("cache:redis://:s3cret@host/0", **SENTINELS),
    "unix with sentinels": redis_at("unix://:s3cret@/run/s", **SENTINELS),
    "a server with sentinels": redis_at("redis://:s3cret@host:6379/0", **SENTINELS),
    "sentinel_kwargs as a list": redis_at(None, **SENTINELS, sentinel_kwargs=["password", "s3cret"]),
    "sentinels as URLs": redis_at(None, sentinels=["redis://:s3cret@a:1"], service_name="mymaster"),
    "service_name as a list": redis_at(None, sentinels=[("a", 1)], service_name=["redis://:s3cret@a"]),
    "a Cluster as a text": redis_at("valkey://:s3cret@a", cluster=True),
    "a URL as a timeout": redis_at("redis://host", socket_timeout="redis://:s3cret@host"),
    "Redlock as one text": {"default": {"BACKEND": REDLOCK, "LOCATION": "redis://:s3cret@a,redis://:s3cret@b"}},
    "Redlock of two": {"default": {"BACKEND": REDLOCK, "LOCATION": ["redis://:s3cret@a", "redis://:s3cret@b"]}},
    "Redlock of one twice": {"default": {"BACKEND": REDLOCK, "LOCATION": ["redis://:s3cret@a"] * 3}},
    "Redlock of another scheme": {
        "default": {"BACKEND": REDLOCK, "LOCATION": ["valkey://:s3cret@a", "redis://:s3cret@b", "redis://c"]}
    },
    "a URL as database": {"default": {"BACKEND": DATABASE, "LOCATION": "postgres://u:s3cret@h/db"}},
    "a URL as backend": {"default": {"BACKEND": "redis://:s3cret@host/0"}},
    "a URL as options": {"default": {"BACKEND": LOCMEM, "OPTIONS": "redis://:s3cret@host/0"}},
    "a URL as entry": {"default": "redis://:s3cret@host/0"},
    "a URL as setting": "redis://:s3cret@host/0",
}


@pytest.fixture
def viewer(pages) -> Client:
    """Somebody who may look at locks and no more."""
    return login("view_heldlock")


@pytest.mark.django_db
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_told_without_its_password(what, settings, viewer, caplog):
    settings.DISTRIBUTED_LOCKS = WRONG[what]
    for arguments in (["check"], ["locks", "check"], ["locks"]):
        text = said_by(*arguments)
        assert "DISTRIBUTED_LOCKS" in text
        assert PASSWORD not in text
    page = viewer.get("/admin/distlock/heldlock/").content.decode()
    assert "its settings are wrong, see the log" in page
    assert PASSWORD not in page
    assert "DISTRIBUTED_LOCKS" in caplog.text
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (0.5, "0.5"),
        ("", "''"),
        ("default", "'default'"),
        ("cache:default", "'cache:default'"),
        ("localhost:6379", "'localhost:6379'"),
        ("user:s3cret", "'…'"),
        ("valkey://:s3cret@host", "'valkey://…'"),
        (" redis://:s3cret@host", "' redis://…'"),
        ("redis:s3cret@host", "'…'"),
        (b"redis://", "b'…'"),
        (["redis://:s3cret@host"], "[…]"),
        ([], "[]"),
        (object(), "<object>"),
    ],
)
def test_how_a_setting_is_quoted(value, text):
    assert quoted(value) == text


def variables_shown(call) -> str:
    """Of all frames, as a debug page shows them."""
    with pytest.raises(LockBackendError):
        call()
    locks["default"].close()  # else its breaker might turn the next call away
    try:
        call()
    except LockBackendError:
        frames = ExceptionReporter(None, *sys.exc_info()).get_traceback_data()["frames"]
    return "\n".join(f"{name} = {value}" for frame in frames for name, value in frame["vars"])


@pytest.mark.parametrize("options", [{}, {"sentinels": [("127.0.0.1", 1)], "sentinel_kwargs": {"password": PASSWORD}}])
def test_a_server_that_is_down_is_no_reason_to_show_its_password(settings, options):
    location = "redis://user:s3cret@mymaster/0" if options else "redis://user:s3cret@127.0.0.1:1/0"
    settings.DISTRIBUTED_LOCKS = redis_at(location, **options, socket_connect_timeout=0.2)
    assert PASSWORD not in repr(locks["default"].location)
    for call in (lambda: lock("name", wait=0).acquire(), lambda: asyncio.run(lock("name", wait=0).aacquire())):
        shown = variables_shown(call)
        assert "127.0.0.1" in shown
        assert PASSWORD not in shown


@pytest.mark.parametrize("login", ["user:s3cret@", ""])
def test_a_server_that_hangs_while_the_password_is_sent(settings, tmp_path, login):
    options = {} if login else {"credential_provider": Pushing("user", PASSWORD)}
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(f"{tmp_path}/s")
        deaf.listen()
        settings.DISTRIBUTED_LOCKS = redis_at(f"unix://{login}{tmp_path}/s", socket_timeout=0.2, **options)
        shown = variables_shown(lambda: lock("name", wait=0).acquire())
        assert "auth_args" in shown
        assert PASSWORD not in shown


@pytest.mark.seconds(9)
def test_a_server_that_hangs_while_a_streamed_password_is_sent(settings):
    provider = Pushing("user", "former")
    with Scripted() as server:
        location = f"redis://127.0.0.1:{server.port}/0"
        settings.DISTRIBUTED_LOCKS = redis_at(location, credential_provider=provider, socket_timeout=2.0)
        lock("name").locked()
        server.fail(server.SILENCE, on=[b"AUTH"])
        provider.push("user", PASSWORD)
        for call in (lock("name").locked, lambda: asyncio.run(lock("name").alocked())):
            shown = variables_shown(call)
            assert "login" in shown
            assert PASSWORD not in shown
        locks.close()


def test_a_server_that_wants_the_password_gets_it(own_valkey, settings):
    server = own_valkey("--user", "app", "on", ">s3cret", "~*", "&*", "+@all")
    settings.DISTRIBUTED_LOCKS = redis_at(f"unix://app:s3cret@{server.socket}")
    with lock("name"):
        assert asyncio.run(lock("name", wait=0).aacquire()) is False
