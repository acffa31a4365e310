"""The admin's page of beat's runs, as its views answer."""

from __future__ import annotations

import re

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db import connection
from django.urls import reverse

from django_distlock import LockBackendError, locks
from django_distlock.celery.schedule_store import ScheduleStore, recorded_runs
from django_distlock.models import BeatRun
from django_distlock.monitoring.inventory import Key
from django_distlock.runs import LastRun
from django_distlock.utils.text import printable
from tests.support.admin_pages import login, said
from tests.support.stores import LOCMEM, REDIS
from tests.support.tools import on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.django_db

LIST = "/admin/distlock/beatrun/"
NOON = 1_705_305_600.0  # 2024-01-15 08:00 UTC


@pytest.fixture(autouse=True)
def utc(settings):
    settings.TIME_ZONE = "UTC"


def ran(entry: str, *, at: float = NOON, host: str = "web-1", next_at: float | None = NOON + 3600) -> None:
    ScheduleStore("shop").publish(entry, LastRun(at, host, next_at))


def entries_in(page) -> list[str]:
    return [row.entry for row in page.context["cl"].result_list]


def cells(page) -> list[str]:
    found = re.findall(r'<t[hd] class="field-[^>]*>(.*?)</t[hd]>', page.content.decode())
    return [re.sub("<[^>]*>", "", cell) for cell in found]


@on_each_store
def test_the_list_shows_when_entries_ran_where_and_when_they_are_expected(operator, backend):
    ran("report", at=NOON - 0.01, next_at=NOON + 2.3)  # Celery is a little early
    ran("cleanup", at=NOON - 60, host="", next_at=None)  # did not run yet, and nobody knows when it will
    page = operator.get(LIST)
    assert cells(page) == [
        "shop:cleanup", "-", "-", "-",
        "shop:report", "2024-01-15 08:00:00", "web-1", "2024-01-15 08:00:02",
    ]  # fmt: skip
    assert "2 beat runs" in page.content.decode()
    assert page.context["title"] == "Beat runs"


@pytest.mark.parametrize(
    ("order", "entries"), [("1", "abc"), ("-1", "cba"), ("2", "cba"), ("-2", "abc"), ("3", "bca"), ("4", "bac")]
)
def test_columns_sort(operator, backend, order, entries):
    ran("a", at=NOON, host="web-3", next_at=NOON + 60)
    ran("b", at=NOON - 10, host="web-1", next_at=None)
    ran("c", at=NOON - 20, host="web-2", next_at=NOON + 90)
    assert entries_in(operator.get(LIST, {"o": order})) == [f"shop:{entry}" for entry in entries]


def test_search_looks_at_entries(operator, backend):
    for entry in ("orders.report", "orders.cleanup", "mail"):
        ran(entry, host="orders-host")
    assert entries_in(operator.get(LIST, {"q": "ORDERS"})) == ["shop:orders.cleanup", "shop:orders.report"]
    assert entries_in(operator.get(LIST, {"q": "shop report"})) == ["shop:orders.report"]
    assert entries_in(operator.get(LIST, {"q": "nothing"})) == []


def test_the_list_pages(operator, backend):
    for number in range(120):
        ran(f"{number:03}")
    assert entries_in(operator.get(LIST, {"p": "2"})) == [f"shop:{number:03}" for number in range(100, 120)]


@on_each_store
@pytest.mark.parametrize("entry", ["report", "a/b@c 100%\n_5F", "ü"])
def test_the_page_of_one_entry(operator, backend, entry):
    ran(entry)
    [row] = operator.get(LIST).context["cl"].result_list
    page = operator.get(reverse("admin:distlock_beatrun_change", args=[quote(row.pk)]))
    text = page.content.decode()
    assert page.context["original"].entry == printable(f"shop:{entry}")
    for shown in ("default", "web-1", "2024-01-15 08:00:00", "2024-01-15 09:00:00"):
        assert shown in text
    assert 'type="submit" value' not in text  # nothing to save or delete


def test_who_may_not_look_learns_nothing(pages, backend):
    ran("report")
    somebody = login("view_heldlock")
    for entry in ("report", "other"):
        for page in ("change", "history"):
            url = reverse(f"admin:distlock_beatrun_{page}", args=[quote(str(Key("default", f"shop:{entry}")))])
            assert somebody.get(url).status_code == 403


def test_an_entry_that_is_gone(operator, backend):
    gone = reverse("admin:distlock_beatrun_change", args=[quote(str(Key("default", "shop:gone")))])
    answer = operator.get(gone, follow=True)
    assert answer.redirect_chain[0] == ("/admin/", 302)
    assert "shop:gone" in "".join(said(answer))


@pytest.fixture
def several(valkey, store, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
        "gone": {"BACKEND": REDIS, "LOCATION": "unix:///nowhere/at/all.sock"},
        "local": {"BACKEND": LOCMEM},
        "none": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"},
    }
    ran("report")
    settings.DISTRIBUTED_LOCKS_BEAT = {"ALIAS": "local"}
    ran("mail")
    yield
    locks.close()


def test_a_backend_that_is_down_is_named_and_the_others_are_listed(operator, several):
    for query in ({}, {"q": "shop"}, {"o": "1"}, {"_facets": "True"}):
        page = operator.get(LIST, query)
        assert sorted(entries_in(page)) == ["shop:mail", "shop:report"]
        [error] = said(page)
        assert "The runs of “gone” are not shown" in error
        assert "/nowhere/at/all.sock" in error
    assert entries_in(operator.get(LIST, {"using": "local"})) == ["shop:mail"]


def test_one_page_asks_each_backend_once(operator, backend, monkeypatch):
    ran("report")
    asked, runs = [], backend.runs
    monkeypatch.setattr(backend, "runs", lambda: asked.append("runs") or runs())
    operator.get(LIST, {"_facets": "True", "q": "report", "o": "-2"})
    assert asked == ["runs"]


def test_the_permission_to_look_allows_no_more(pages, backend):
    ran("report")
    codes = Permission.objects.filter(content_type__model="beatrun").values_list("codename", flat=True)
    assert sorted(codes) == ["operate_beatrun", "view_beatrun"]
    viewer = login("view_beatrun")
    page = viewer.get(LIST)
    assert entries_in(page) == ["shop:report"]
    assert "action-select" not in page.content.decode()
    one = reverse("admin:distlock_beatrun_change", args=[quote("default/shop:report")])
    assert viewer.get(one).status_code == 200
    assert viewer.post(one, {"entry": "other"}).status_code == 403
    assert viewer.get("/admin/distlock/beatrun/add/").status_code == 403
    deletion = reverse("admin:distlock_beatrun_delete", args=[quote("default/shop:report")])
    assert viewer.post(deletion, {"post": "yes"}).status_code == 403
    assert entries_in(viewer.get(LIST)) == ["shop:report"]


@pytest.mark.parametrize(
    ("settings_of_project", "is_listed"),
    [
        ({}, False),
        ({"DISTRIBUTED_LOCKS_BEAT": {}}, True),
        ({"CELERY_BEAT_SCHEDULER": "distlock_memory"}, True),
        ({"SHOP_BEAT_SCHEDULER": "django_distlock.celery.beat:DistlockScheduler"}, True),
        ({"CELERY_BEAT_SCHEDULER": "django_celery_beat.schedulers:DatabaseScheduler"}, False),
    ],
)
def test_the_index_has_the_page_where_beat_is_used(operator, backend, settings, settings_of_project, is_listed):
    for name, value in settings_of_project.items():
        setattr(settings, name, value)
    assert (LIST in operator.get("/admin/").content.decode()) is is_listed
    assert operator.get(LIST).status_code == 200


def test_others_see_nothing(pages, backend):
    assert login("view_heldlock").get(LIST).status_code == 403


def test_not_even_a_superuser_changes_anything(operator, backend):
    ran("report")
    one = reverse("admin:distlock_beatrun_change", args=[quote("default/shop:report")])
    assert operator.post(one, {"entry": "other"}).status_code == 403
    form = {"action": "delete_selected", "post": "yes", "_selected_action": ["default/shop:report"]}
    operator.post(LIST, form)
    assert entries_in(operator.get(LIST)) == ["shop:report"]


def test_dumpdata_finds_nothing_and_no_table_is_made(backend, capsys):
    ran("report")
    call_command("dumpdata", "distlock.beatrun", use_base_manager=True)
    assert capsys.readouterr().out.strip() == "[]"
    assert BeatRun._meta.db_table not in connection.introspection.table_names()


def act(browser, action, *entries):
    form = {"action": action, "_selected_action": [str(Key("default", entry)) for entry in entries]}
    return browser.post(LIST, form, follow=True)


@on_each_store
def test_entries_are_reset(pages, backend, monkeypatch):
    monkeypatch.setattr(backend, "grace", 0.02)
    for entry in ("report", "a/b@c 100%", "other"):
        ran(entry)
    page = act(login("operate_beatrun"), "reset", "shop:report", "shop:a/b@c 100%")
    assert sorted(said(page)) == [
        "success: “shop:a/b@c 100%” counts from now on, as if it was new.",
        "success: “shop:report” counts from now on, as if it was new.",
    ]
    known = {run.entry: run for run in recorded_runs("default")}
    assert [entry for entry, run in known.items() if run.host] == ["shop:other"]
    assert sorted(LogEntry.objects.values_list("object_repr", "change_message")) == [
        ("shop:a/b@c 100%", "Reset."),
        ("shop:report", "Reset."),
    ]


def test_entries_are_sent_now(pages, backend, monkeypatch):
    pytest.importorskip("celery", reason="needs Celery")
    from django_distlock.celery import run_now

    def send(entry, by):
        if entry == "shop:other":
            raise run_now.NotSent("the broker is down")
        sent.append((entry, by))
        return "id-1"

    sent = []
    monkeypatch.setattr(run_now, "run_now", send)
    ran("report")
    ran("other")
    before = dict(backend.runs())
    page = act(login("operate_beatrun"), "run_now", "shop:report", "shop:other")
    assert sorted(said(page)) == [
        "error: the broker is down",
        "success: “shop:report” was sent as task id-1. Its schedule does not move.",
    ]
    assert [(entry, by.endswith(" by the admin")) for entry, by in sent] == [("shop:report", True)]
    assert dict(backend.runs()) == before
    assert list(LogEntry.objects.values_list("change_message", flat=True)) == ["Sent as task id-1."]


@pytest.mark.parametrize("action", ["run_now", "reset"])
def test_who_may_only_look_does_nothing(action, pages, backend):
    ran("report")
    before = dict(backend.runs())
    act(login("view_beatrun"), action, "shop:report")
    assert dict(backend.runs()) == before
    assert not LogEntry.objects.exists()


def test_a_store_that_goes_down_is_told(operator, backend, monkeypatch):
    ran("report")

    def unreachable(*_):
        raise LockBackendError("the store is down")

    monkeypatch.setattr(backend, "find_runs", unreachable)
    monkeypatch.setattr(backend, "claim_run", unreachable)
    monkeypatch.setattr("django_distlock.monitoring.admin_runs.reset_run", unreachable)
    assert "error: the store is down" in said(act(operator, "reset", "shop:report"))
