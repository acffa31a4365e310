"""Text that clients and others choose: it gives nothing away, forges no line of a log, and steers no terminal."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import contextmanager

import pytest
from django.http import HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from redis.exceptions import ResponseError

from django_distlock import LockBackendError, LockNotAcquired, distributed_lock, lock, locks
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redis.cluster.routing import Address
from django_distlock.backends.redis.config import Location
from django_distlock.backends.redis.sentinel.discovery import Master
from django_distlock.core.forced import force_release
from django_distlock.types import Holder
from django_distlock.utils.text import bounded, printable
from tests.support.admin_pages import hold
from tests.support.commands import said_by

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.urls("tests.utils.test_text")]

HOSTILE = "x\r\n2026-11-22 09:00:00 CRITICAL root login\x1b[2J\x9b2J\u202e\u2028\x00\ud800"
IN_URLS = "x%0d%0a2026-11-22 09:00:00 CRITICAL root login%1b[2J%c2%9b2J%e2%80%ae%00"
SECRET = "c8w2k1-5f0e7"

started, go_on = threading.Event(), threading.Event()


def only_holder():
    [info] = locks["default"].held()
    return info.holder


@distributed_lock("reset")
def reset(request, **parts):
    return HttpResponse(only_holder().label)


@distributed_lock("reset")
async def areset(request, **parts):
    [info] = [info async for info in locks["default"].aheld()]
    return HttpResponse(info.holder.label)


@method_decorator(distributed_lock("reset"), name="dispatch")
class Reset(View):
    def get(self, request, **parts):
        return HttpResponse(only_holder().label)


@distributed_lock("reset", on_busy="raise")
def insist(request, **parts):
    return HttpResponse("insisted")


@distributed_lock("reset")
def stay(request, **parts):
    started.set()
    assert go_on.wait(60)
    return HttpResponse("stayed")


urlpatterns = [
    path("", reset),
    path("reset/<str:uid>/<str:token>/", reset),
    path("async/<str:uid>/<str:token>/", areset),
    path("class/<str:uid>/<str:token>/", Reset.as_view()),
    path("shop/", include([re_path(r"^reset-(?P<token>.+)/$", reset)])),
    path("stay/<str:uid>/<str:token>/", stay),
    path("insist/<str:uid>/<str:token>/", insist),
]


@contextmanager
def staying():
    """A client holds the lock, by a path that steers terminals and has a secret."""
    started.clear()
    go_on.clear()
    client = Client(raise_request_exception=False)
    thread = threading.Thread(target=client.get, args=[f"/stay/{IN_URLS}/{SECRET}/"])
    thread.start()
    try:
        assert started.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()


def is_harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and "\n2026-11-22" not in text and SECRET not in text


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("/", "GET /"),
        (f"/reset/{IN_URLS}/{SECRET}/?token={SECRET}", "GET reset/<str:uid>/<str:token>/"),
        (f"/class/7/{SECRET}/", "GET class/<str:uid>/<str:token>/"),
        (f"/shop/reset-{SECRET}/", "GET shop/reset-(?P<token>.+)/$"),
    ],
)
def test_the_label_of_a_request_is_its_method_and_the_route_of_its_url(url, label):
    assert Client().get(url).content.decode() == label


def test_the_label_of_a_request_to_an_async_view():
    response = asyncio.run(AsyncClient().get(f"/async/7/{SECRET}/"))
    assert response.content.decode() == "GET async/<str:uid>/<str:token>/"


@pytest.mark.parametrize(("view", "name"), [(reset, "reset"), (Reset.as_view(), "Reset.dispatch")])
def test_the_label_of_a_request_without_a_route_is_its_method_and_the_view(view, name):
    response = view(RequestFactory().get(f"/reset/{SECRET}"))
    assert response.content.decode() == f"GET tests.utils.test_text.{name}"


def test_methods_are_chosen_by_clients_too():
    request = RequestFactory().generic("GET", "/")
    request.method = HOSTILE * 100
    label = reset(request).content.decode()
    assert label.isprintable()
    assert len(label) == 200


def test_logs_and_errors_tell_nothing_that_a_client_has_written(caplog):
    caplog.set_level(logging.INFO, "django_distlock")
    with staying():
        with pytest.raises(LockNotAcquired) as busy:
            lock("reset", wait=0).__enter__()
        insisting = Client(raise_request_exception=False).get(f"/insist/{IN_URLS}/{SECRET}/")
        assert insisting.status_code == 500
        [info] = locks["default"].held()
        assert force_release(info, by="a test")
    assert is_harmless(str(busy.value))
    told = [record.getMessage() for record in caplog.records if record.name == "django_distlock"]
    assert "was freed by a test. It was held by GET stay/<str:uid>/<str:token>/ (pid" in "".join(told)
    assert "was lost" in "".join(told)
    assert all(map(is_harmless, told))


def test_the_log_of_a_store_that_is_down_names_the_route(caplog, monkeypatch):
    def fail(*_, **__):
        raise LockBackendError("The store is down.")

    monkeypatch.setattr(type(locks["default"]), "acquire", fail)
    assert Client().get(f"/reset/{IN_URLS}/{SECRET}/").status_code == 503
    assert "GET reset/<str:uid>/<str:token>/ is answered 503: The store is down." in caplog.text
    assert all(is_harmless(record.getMessage()) for record in caplog.records if record.name == "django_distlock")


def test_a_call_that_is_skipped_is_logged_harmlessly(caplog):
    caplog.set_level(logging.INFO, "django_distlock")
    work = distributed_lock("reset", on_busy="skip", label=HOSTILE)(lambda: None)
    hold(locks["default"], "reset", label=HOSTILE, host=HOSTILE)
    assert work() is None
    assert "is skipped." in caplog.text
    assert all(is_harmless(record.getMessage()) for record in caplog.records)


def test_commands_show_names_and_holders_without_steering_the_terminal(backend):
    name = HOSTILE.replace("\ud800", "")
    hold(backend, name, label=HOSTILE, host=HOSTILE)
    for arguments in (
        ["locks"],
        ["locks", "show", name],
        ["locks", "show", f"{name}2"],
        ["runlocked", name, "true"],
        ["locks", "release", name, "--no-input"],
    ):
        assert is_harmless(said_by(*arguments)), arguments
    assert backend.look([name]) == [[]]


def test_a_holder_is_printable_and_short_however_it_was_made():
    for holder in (
        Holder(HOSTILE, 1, HOSTILE, HOSTILE * 100, 1.0),
        Holder.here(HOSTILE * 100),
        Holder.from_text('["h\\u001b",1,"t\\u202e","l\\ud800\\r\\n",1.0]'),
    ):
        for text in (holder.host, holder.thread, holder.label, str(holder), holder.process):
            assert text.isprintable()
            text.encode()
        assert len(holder.label) <= 200
        assert Holder.from_text(holder.to_text()) == holder


def test_a_long_label_keeps_its_beginning_and_its_end():
    label = Holder.here("shop.tasks." + "long" * 100 + "[2f0e1c]").label
    assert len(label) == 200
    assert label.startswith("shop.tasks.long")
    assert label.endswith("long[2f0e1c]")
    assert "…" in label


def test_printable():
    assert printable("Straße 日本 a b") == "Straße 日本 a b"
    assert printable("\x1b\n\x9b\u202e\U000e0001") == r"\x1b\n\x9b\u202e\U000e0001"
    assert [bounded("abcdef", most) for most in (7, 6, 5, 4)] == ["abcdef", "abcdef", "ab…ef", "ab…f"]


def test_what_servers_say_of_themselves_and_of_errors(monkeypatch):
    def refuse(*_, **__):
        raise ResponseError(f"ERR {HOSTILE}")

    monkeypatch.setattr(Location, "connected", refuse)
    with pytest.raises(LockBackendError) as error:
        RedisBackend("default", {}).look(["name"])
    for text in (str(error.value), str(Address(HOSTILE, 1)), str(Master(HOSTILE, 1, 1))):
        assert text.isprintable()
        assert "CRITICAL root login" in text
    assert RedisBackend("default", {}).location.at(HOSTILE, 1).text.isprintable()
