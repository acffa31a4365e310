"""Passwords of servers are in no message, page, log or traceback, however wrongly they are set up."""

from __future__ import annotations

import io

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from django_distlock.texts import quoted

from .admin_pages import login
from .conftest import DATABASE, LOCMEM, REDIS, REDLOCK

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


def said(*arguments: str) -> str:
    out = io.StringIO()
    try:
        call_command(*arguments, stdout=out, stderr=out, no_color=True)
    except CommandError as error:
        out.write(str(error))
    return out.getvalue()


@pytest.fixture
def viewer(pages) -> Client:
    """Somebody who may look at locks and no more."""
    return login("view_heldlock")


@pytest.mark.django_db
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_told_without_its_password(what, settings, viewer, caplog):
    settings.DISTRIBUTED_LOCKS = WRONG[what]
    for arguments in (["check"], ["locks", "check"], ["locks"]):
        text = said(*arguments)
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
