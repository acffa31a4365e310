"""Probes: what they are told, how soon, and what a store is asked for it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections
from django.test import AsyncClient, Client
from django.urls import path
from health_check.views import HealthCheckView

from django_distlock import locks
from django_distlock.contrib import health
from django_distlock.testing import store_down
from tests.support.programs import ROOT, in_a_fork
from tests.support.stores import LOCMEM, REDIS
from tests.support.tools import GIVES_UP_SOON, backend_on, eventually, threads_of

backend = backend_on("redis", "locmem", "sqlite")

urlpatterns = [
    path("sync/", health.readiness),
    path("async/", health.areadiness),
    path("checks/", HealthCheckView.as_view(checks=["django_distlock.contrib.health.LockCheck"])),
]


@pytest.fixture(autouse=True)
def urls(settings):
    settings.ROOT_URLCONF = __name__


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    """None of other tests."""
    found = health.Probes()
    monkeypatch.setattr(health, "probes", found)
    return found


@pytest.fixture(params=["sync", "async"])
def probe(request):
    """Answers with the status and the JSON."""

    def asked(query="", method="get"):
        response = getattr(Client(), method)(f"/{request.param}/{query}")
        return response.status_code, json.loads(response.content or "null")

    return asked


READY = (200, {"status": "ok", "locks": {"default": "ok"}})


def unavailable(state, alias="default"):
    return 503, {"status": "unavailable", "locks": {alias: state}}


class TestAnswers:
    def test_ready(self, probe, backend):
        assert probe() == READY

    def test_an_event_loop(self, locmem_locks):
        async def asked():
            return await AsyncClient().get("/async/")

        response = asyncio.run(asked())
        assert (response.status_code, response.json()) == READY
        assert "no-store" in response["Cache-Control"]

    def test_down_and_up_again(self, probe, backend, monkeypatch, caplog):
        monkeypatch.setattr(health, "KEPT", 0)
        with store_down():
            assert probe() == probe() == unavailable("does not answer")
        assert probe() == READY
        with store_down():
            probe()
        assert [record.name for record in caplog.records] == ["django_distlock"] * 2  # once each time
        assert {record.distlock["event"] for record in caplog.records} == {"not-ready"}

    def test_a_defect(self, probe, locmem_locks, monkeypatch, caplog):
        def fail(*_):
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(type(locmem_locks), "look", fail)
        assert probe() == unavailable("does not answer")
        [record] = [record for record in caplog.records if record.name == "django_distlock"]
        assert record.distlock["event"] == "not-ready"
        assert record.exc_info[0] is ZeroDivisionError

    def test_no_thread_can_be_started(self, probe, locmem_locks, monkeypatch, caplog):
        def refuse(*_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(health, "KEPT", 0)
        with monkeypatch.context() as patched:
            patched.setattr(health, "ask_in_thread", refuse)
            assert probe() == unavailable("does not answer")
        assert "is not ready: can't start new thread" in caplog.text
        assert probe() == READY

    def test_what_somebody_has_to_correct(self, probe, own_valkey, settings):
        server = own_valkey("--requirepass", "secret")
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
        assert probe() == unavailable("refuses")
        locks.close()

    def test_settings_that_are_wrong(self, probe, settings):
        wrong = {"BACKEND": REDIS, "LOCATION": "redis://user:secret@nowhere", "TTL": -1}
        settings.DISTRIBUTED_LOCKS = {"default": wrong}
        assert probe() == unavailable("wrong settings")
        settings.DISTRIBUTED_LOCKS = "redis://user:secret@nowhere"
        assert probe() == unavailable("wrong settings", "DISTRIBUTED_LOCKS")

    def test_each_alias_for_itself(self, probe, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": LOCMEM},
            "other": {"BACKEND": REDIS, "LOCATION": "unix:///nowhere/secret.sock"},
        }
        states = {"default": "ok", "other": "does not answer"}
        assert probe() == (503, {"status": "unavailable", "locks": states})
        assert probe("?using=default") == READY
        assert probe("?using=other") == unavailable("does not answer", "other")
        assert probe("?using=other&using=default") == (503, {"status": "unavailable", "locks": states})
        assert probe("?using=nobody") == (404, {"status": "unknown alias", "locks": {"nobody": "unknown"}})

    def test_a_callable_prefix_is_not_asked_for_a_tenant(self, probe, valkey_locks, settings):
        def prefix():
            raise LookupError("no tenant")

        settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "KEY_PREFIX": prefix}}
        assert probe() == READY

    def test_nothing_but_get_and_head(self, probe, locmem_locks):
        assert probe(method="head")[0] == 200
        assert Client().post("/sync/").status_code == Client().post("/async/").status_code == 405

    def test_no_transaction_is_begun(self, probe, locmem_locks, monkeypatch):
        """Which pytest-django would refuse here."""
        monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
        assert probe() == READY


class TestProbes:
    @pytest.fixture
    def looks(self, backend, monkeypatch):
        """How often the store was asked."""
        asked = []
        look = type(backend).look
        monkeypatch.setattr(type(backend), "look", lambda self, names: asked.append(names) or look(self, names))
        return asked

    def test_an_answer_is_kept(self, probe, looks, monkeypatch):
        for _ in range(3):
            assert probe() == READY
        assert len(looks) == 1
        monkeypatch.setattr(health, "KEPT", 0)
        assert probe() == READY
        assert len(looks) == 2

    def test_nothing_is_written(self, probe, valkey_locks, store):
        store.config_resetstat()
        assert probe() == READY
        asked = {name.removeprefix("cmdstat_") for name in store.info("commandstats")}
        assert asked & {"evalsha_ro", "get", "mget", "eval_ro"}
        assert not asked & {"eval", "evalsha", "set", "del", "publish", "incr"}
        assert store.dbsize() == 0

    @GIVES_UP_SOON
    def test_a_store_that_hangs(self, probe, proxied, proxy, caplog):
        proxy.hang = True
        with ThreadPoolExecutor(4) as pool:
            assert set(map(str, pool.map(lambda _: probe(), range(4)))) == {str(unavailable("does not answer"))}
            assert len(threads_of("ask")) <= 1
        eventually(lambda: "Lock backend 'default' is not ready" in caplog.text)
        proxy.hang = False
        proxy.accept()
        eventually(lambda: not threads_of("ask"))

    def test_it_is_not_waited_for_longer_than_a_second(self, probe, locmem_locks, monkeypatch):
        answers = threading.Event()
        monkeypatch.setattr(type(locmem_locks), "look", lambda self, names: answers.wait(60) and [None])
        try:
            assert probe() == probe() == unavailable("does not answer")
            assert len(threads_of("ask")) == 1
        finally:
            answers.set()
        eventually(lambda: probe() == READY)

    def test_a_loop_that_has_ended_is_not_told(self, locmem_locks, monkeypatch, caplog):
        answers = threading.Event()
        monkeypatch.setattr(type(locmem_locks), "look", lambda self, names: answers.wait(60) and [None])
        monkeypatch.setattr(health, "LONGEST", 0.05)
        try:
            assert asyncio.run(health.astates(["default"])) == {"default": "does not answer"}
        finally:
            answers.set()
        eventually(lambda: not threads_of("ask"))
        assert not caplog.records
        assert asyncio.run(health.astates(["default"])) == {"default": "ok"}

    def test_a_child_asks_for_itself(self, looks):
        assert health.states(["default"]) == {"default": "ok"}
        assert in_a_fork(lambda: (health.states(["default"]), len(looks))) == "({'default': 'ok'}, 2)"


class TestDjangoHealthCheck:
    def test_it_is_a_check(self, backend):
        response = Client().get("/checks/?format=json")
        assert response.status_code == 200
        assert "OK" in response.content.decode()

    def test_it_fails_where_a_store_does(self, backend):
        with store_down():
            response = Client().get("/checks/?format=json")
        assert response.status_code == 500
        assert "default: does not answer" in response.content.decode()

    def test_of_one_alias(self, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": LOCMEM},
            "other": {"BACKEND": REDIS, "LOCATION": "unix:///nowhere/secret.sock"},
        }
        result = asyncio.run(health.LockCheck(using="default").get_result())
        assert result.error is None
        result = asyncio.run(health.LockCheck(using="other").get_result())
        assert str(result.error) == "Unavailable: other: does not answer"
        assert asyncio.run(health.LockCheck().get_result()).error

    @pytest.mark.seconds(4)
    def test_the_views_need_no_package(self):
        program = (
            "import sys; sys.modules['health_check'] = None\n"
            "from django.conf import settings; settings.configure()\n"
            "from django_distlock.contrib import health; print(hasattr(health, 'LockCheck'), health.readiness.__name__)"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "readiness"]
