"""Hooks of on_commit() on the view of a URL, in transactions of real databases."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import Client
from django.urls import path

from django_distlock import distributed_lock, lock

pytestmark = [pytest.mark.usefixtures("locmem_locks"), pytest.mark.urls("tests.decorators.test_http_on_commit_hooks")]

seen = []


@distributed_lock("name")
def view(request):
    seen.append(connections["locks"].in_atomic_block)
    with connections["locks"].cursor() as cursor:
        cursor.execute("SELECT 1")
    transaction.on_commit(lambda: seen.append(lock("name").locked()), using="locks")
    if "fail" in request.GET:
        raise ZeroDivisionError
    return HttpResponse("done")


urlpatterns = [path("view", view)]


@pytest.fixture(params=["sqlite_database", "postgres_database", "mariadb_database"])
def database(request, monkeypatch):
    request.getfixturevalue(request.param)
    monkeypatch.setitem(connections.settings["locks"], "ATOMIC_REQUESTS", True)
    seen.clear()


@pytest.mark.usefixtures("database")
def test_they_run_after_commit_and_release():
    assert Client().get("/view").status_code == 200
    assert seen == [True, False]


@pytest.mark.usefixtures("database")
def test_they_do_not_run_after_a_rollback():
    with pytest.raises(ZeroDivisionError):
        Client().get("/view?fail")
    assert seen == [True]
    assert not lock("name").locked()
