"""The admin's page of held locks, as its views answer. What its script does is seen in test_admin_browser.py."""

from __future__ import annotations

import html
import io
import os
import re

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import QuerySet
from django.test import Client
from django.urls import reverse

from django_distlock import locks
from django_distlock.exceptions import LockBackendError
from django_distlock.models import BeatRun, HeldLock
from django_distlock.monitoring import inventory
from django_distlock.monitoring.admin_querysets import HeldLocks
from django_distlock.monitoring.inventory import Inventory
from django_distlock.signals import lock_forced
from django_distlock.types import Grant
from tests.support.admin_pages import LIST, hold, key_of, lines, login, names_in, notes, release, said
from tests.support.deliveries import UniqueShop
from tests.support.quorum import spread
from tests.support.stores import LOCMEM, REDIS, REDLOCK
from tests.support.tools import eventually, lock_request, locked_names, on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.django_db


@pytest.fixture
def forced():
    told = []

    def note(sender, **about):
        told.append(about)

    lock_forced.connect(note)
    yield told
    lock_forced.disconnect(note)


def test_a_lock_that_is_held_long_is_marked(operator, settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "LONG_HELD": 120}}
    backend = locks["default"]
    hold(backend, "long", ago=125.0)
    hold(backend, "short", ago=110.0)
    backend.release(hold(backend, "resting", ago=125.0), 30)
    pages = [
        operator.get(LIST),
        operator.get(reverse("admin:distlock_heldlock_change", args=[quote(key_of(backend, "long"))])),
    ]
    for page in pages:
        marks = re.findall(r'<strong class="distlock-long" title="(.*?)">(.*?)</strong>', page.content.decode())
        assert marks == [("longer than LONG_HELD, 2 min 00 s", "long")]
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "LONG_HELD": None}}
    hold(locks["default"], "long", ago=1e6)
    assert "distlock-long" not in operator.get(LIST).content.decode()


@on_each_store
def test_the_list_shows_who_holds_what(operator, backend):
    hold(backend, "order:7", ttl=7590, label="POST /orders/7/pay", host="web-3", pid=123, ago=8100)
    page = operator.get(LIST)
    assert names_in(page) == ["order:7"]
    text = page.content.decode()
    for shown in ("POST /orders/<wbr>7/<wbr>pay", "web-3, pid 123", "2 h 15 min", "2 h 06 min", "1 held lock"):
        assert shown in text
    assert "column-using" not in text  # of one backend


def test_a_unique_task_that_waits_in_the_queue_is_shown_with_its_id(operator, backend):
    with UniqueShop() as shop:
        sent = shop.unique().delay(7)
        listed = operator.get(LIST)
        [[info]] = backend.look(["unique:work:7"])
        page = operator.get(reverse("admin:distlock_heldlock_change", args=[quote(key_of(backend, info.name))]))
    assert names_in(listed) == ["unique:work:7"]
    for each in (listed, page):
        assert f"queued: work[{sent.id}]" in re.sub(r"<[^>]+>", "", html.unescape(each.content.decode()))


def test_long_labels_break_between_their_words(operator, backend):
    hold(backend, "order:7", label="POST <x>/import_all.csv")
    assert "POST &lt;x&gt;/<wbr>import_<wbr>all.<wbr>csv " in operator.get(LIST).content.decode()


def test_what_the_package_keeps_for_itself_is_not_listed(operator, backend):
    hold(backend, "order:1")
    hold(backend, "django_distlock.handover:1")
    for query in ({}, {"q": "1"}, {"o": "2"}, {"prefix": "django_distlock."}):
        assert "handover" not in operator.get(LIST, query).content.decode()


def test_tokens_are_on_no_page(operator, backend):
    taken = hold(backend, "secret")
    key = key_of(backend, "secret")
    detail = reverse("admin:distlock_heldlock_change", args=[quote(key)])
    confirmation = operator.post(LIST, {"action": "delete_selected", "_selected_action": [key]})
    for page in (operator.get(LIST), operator.get(detail), confirmation):
        assert page.status_code == 200
        assert "secret" in page.content.decode()
        assert taken.token not in page.content.decode()
    release(operator, [key])
    assert LogEntry.objects.count() == 1
    assert not LogEntry.objects.filter(object_id__contains=taken.token).exists()


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("1", "abc"),
        ("-1", "cba"),
        ("2", "bca"),
        ("-2", "acb"),
        ("3", "cab"),
        ("-3", "bac"),
        ("4", "bca"),
        ("-4", "acb"),
    ],
)
def test_columns_sort(operator, backend, order, names):
    hold(backend, "a", ttl=90, label="z", ago=20)
    hold(backend, "b", ttl=30, label="x", ago=30)
    hold(backend, "c", ttl=60, label="y", ago=10)
    assert names_in(operator.get(LIST, {"o": order})) == list(names)


def test_a_list_of_one_s_own_may_sort_by_numbers(pages, backend):
    for name in "bca":
        hold(backend, name)
    assert [row.name for row in HeldLocks(Inventory()).order_by("-fence")] == ["a", "c", "b"]


def test_search_looks_at_names_labels_and_holders(operator, backend):
    hold(backend, "order:1", label="POST /pay", host="web-1")
    hold(backend, "order:2", label="report", host="worker-9")
    hold(backend, "Straße", label="x", host="web-1")
    assert names_in(operator.get(LIST, {"q": "ORDER"})) == ["order:1", "order:2"]
    assert names_in(operator.get(LIST, {"q": "worker-9"})) == ["order:2"]
    assert names_in(operator.get(LIST, {"q": "order post"})) == ["order:1"]
    assert names_in(operator.get(LIST, {"q": "STRASSE"})) == ["Straße"]
    assert names_in(operator.get(LIST, {"q": "nobody"})) == []


def test_filters_by_backend_and_prefix_with_counts(operator, valkey, store, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
        "batch": {"BACKEND": LOCMEM},
    }
    for name in ("order:1", "order:2", "mail:1", "plain"):
        hold(locks["default"], name)
    hold(locks["batch"], "order:1")
    assert names_in(operator.get(LIST, {"o": "1"})) == ["mail:1", "order:1", "order:1", "order:2", "plain"]
    assert names_in(operator.get(LIST, {"using": "batch"})) == ["order:1"]
    assert names_in(operator.get(LIST, {"prefix": "order:", "o": "1"})) == ["order:1", "order:1", "order:2"]
    assert names_in(operator.get(LIST, {"prefix": "order:", "using": "default", "o": "1"})) == ["order:1", "order:2"]
    text = operator.get(LIST, {"_facets": "True"}).content.decode()
    for choice in ("order: (3)", "mail: (1)", "batch (1)", "default (4)"):
        assert choice in text
    text = operator.get(LIST, {"_facets": "True", "using": "batch"}).content.decode()
    assert "order: (1)" in text
    assert "mail: (0)" in text
    locks.close()


def test_the_longest_held_are_first(operator, backend):
    for name, ago in (("a", 20), ("b", 700), ("c", 90)):
        hold(backend, name, ago=ago)
    page = operator.get(LIST)
    assert names_in(page) == ["b", "c", "a"]
    assert page.context["cl"].get_ordering_field_columns() == {3: "desc"}  # which the head of the column shows


def test_a_line_for_each_backend_sums_it_up(operator, valkey, store, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
        "empty": {"BACKEND": REDIS, "LOCATION": valkey.url, "KEY_PREFIX": "empty"},
        "gone": {"BACKEND": REDIS, "LOCATION": "unix:///nowhere/at/all.sock"},
        "nobody": {"BACKEND": LOCMEM},
    }
    hold(locks["default"], "<order>:1", ago=7275)
    hold(locks["default"], "order:2", ago=20)
    for name in ("<order>:1", "order:2", "order:2"):
        locks["default"].acquire(lock_request(name), queue=True)
    locks["nobody"].release(hold(locks["nobody"], "order:3", ago=3675), 30)
    page = operator.get(LIST, {"q": "order:2"})  # of all, whatever is searched for
    assert lines(page) == [
        "“default”: 2 held, longest 2 h 01 min (&lt;order&gt;:1), 3 waiting",
        "“empty”: 0 held",
        "“nobody”: 1 held, longest 1 h 01 min (order:3), 0 waiting",
    ]
    assert "“gone” are not shown" in said(page)[0]
    locks.close()


def test_no_lines_where_nothing_is_held(operator, backend):
    assert lines(operator.get(LIST)) == []


def test_filters_by_the_host_of_the_holder(operator, backend):
    hold(backend, "order:1", host="web-1")
    hold(backend, "mail:1", host="web-1")
    hold(backend, "order:2", host="web-2")
    assert names_in(operator.get(LIST, {"host": "web-1", "o": "1"})) == ["mail:1", "order:1"]
    assert names_in(operator.get(LIST, {"host": "web-1", "prefix": "order:"})) == ["order:1"]
    assert names_in(operator.get(LIST, {"host": "web-2", "q": "order"})) == ["order:2"]
    text = operator.get(LIST, {"_facets": "True", "prefix": "order:"}).content.decode()
    for choice in ("web-1 (1)", "web-2 (1)"):
        assert choice in text


def test_a_host_that_holds_nothing_any_more_is_still_filtered_by(operator, backend):
    """The list of all locks in its place would be taken for that of the host."""
    taken = hold(backend, "order:1", host="web-1")
    hold(backend, "order:2", host="web-2")
    backend.release(taken)
    assert names_in(operator.get(LIST, {"host": "web-1"})) == []


@on_each_store
def test_too_many_locks_to_ask_who_holds_each_are_listed_by_name(operator, backend, monkeypatch):
    for name, ago in (("c", 7275), ("b", 700), ("a", 90)):
        hold(backend, name, ago=ago, host=f"on-{name}")
    monkeypatch.setattr(inventory, "MOST_HOLDERS", 2)
    page = operator.get(LIST)
    assert names_in(page) == ["a", "b", "c"]
    assert lines(page) == ["“default”: 3 held"]
    assert any(note.startswith("info: There are too many locks to ask") for note in notes(page))
    assert "?host=" not in page.content.decode()
    assert names_in(operator.get(LIST, {"host": "on-b"})) == ["b"]


def test_a_filter_that_the_page_does_not_have_is_no_error(operator, backend):
    hold(backend, "a")
    assert operator.get(LIST, {"name__regex": "x"}, follow=True).redirect_chain == [(f"{LIST}?e=1", 302)]


def test_the_list_pages(operator, backend):
    for number in range(120):
        backend.acquire(lock_request(f"n:{number:03}"), queue=False)
    assert names_in(operator.get(LIST, {"p": 2})) == [f"n:{number:03}" for number in range(100, 120)]
    assert len(names_in(operator.get(LIST, {"all": ""}))) == 120


@on_each_store
def test_who_waits_is_counted(operator, backend):
    hold(backend, "busy")
    hold(backend, "calm")
    waiters = [lock_request("busy"), lock_request("busy")]
    for waiter in waiters:
        backend.acquire(waiter, queue=True)
    rows = {row.name: row.waiting for row in operator.get(LIST).context["cl"].result_list}
    assert rows == {"busy": 2, "calm": 0}
    for waiter in waiters:
        backend.release(waiter)


def test_the_page_of_one_lock(operator, backend):
    hold(backend, "a/b c%:ä\n\0'<b>", label="<script>")
    page = operator.get(LIST)
    link = re.search(r'href="(/admin/distlock/heldlock/[^"]+/change/[^"]*)"', page.content.decode())[1]
    detail = operator.get(html.unescape(link))
    assert detail.status_code == 200
    assert "<script>alert" not in detail.content.decode()
    assert "&lt;script&gt;" in detail.content.decode()


def test_where_nodes_are_several_it_says_how_many_have_the_lock(operator, redlock_locks, five_valkeys, settings):
    settings.DISTRIBUTED_LOCKS = {
        **settings.DISTRIBUTED_LOCKS,
        "one": {"BACKEND": REDIS, "LOCATION": five_valkeys[0].url},
    }
    backend = locks["default"]
    spread(backend, hold(backend, "on five"))
    hold(locks["one"], "of one")
    with redis.Redis.from_url(five_valkeys[0].url) as node:
        node.delete("lock:on five")

    def shown(page):
        cells = re.findall(r'<(?:td|div) class="(?:field-nodes|readonly)[^"]*">([^<]*)</', page.content.decode())
        return [cell for cell in cells if " / " in cell]

    page = operator.get(LIST)
    assert "column-nodes" in page.content.decode()
    assert shown(page) == ["4 / 5"]
    for name, alias, nodes in (("on five", "default", ["4 / 5"]), ("of one", "one", [])):
        key = key_of(locks[alias], name)
        assert shown(operator.get(reverse("admin:distlock_heldlock_change", args=[quote(key)]))) == nodes


def test_without_a_quorum_there_is_no_column_of_nodes(operator, backend):
    hold(backend, "order:1")
    assert "column-nodes" not in operator.get(LIST).content.decode()


@on_each_store
def test_any_name_can_be_released(operator, backend):
    names = ["a", "a/b", "a@b", "x\r\ny", "nul\0", "50%", "%41", " space ", "ä/日本", "{}"]
    for name in names:
        hold(backend, name)
    page = operator.get(LIST).content.decode()
    keys = re.findall(r'name="_selected_action" value="([^"\r\n\0]*)"', page)
    assert sorted(map(html.unescape, keys)) == sorted(key_of(backend, name) for name in names)
    assert said(release(operator, keys))[0].startswith(f"success: Released {len(names)} locks")
    assert backend.look(names) == [[] for _ in names]


def test_release_asks_first_and_says_what_it_did(operator, backend, forced):
    hold(backend, "order:1", label="POST /pay")
    hold(backend, "order:2")
    hold(backend, "order:3")
    ids = [key_of(backend, "order:1"), key_of(backend, "order:2")]
    question = operator.post(LIST, {"action": "delete_selected", "index": 0, "_selected_action": ids})
    text = question.content.decode()
    assert "Release these 2 locks? This does not stop the holder of a lock" in text
    assert "order:1 (default): POST /pay (pid 4711 on web-1, MainThread)" in text
    assert re.findall(r'name="_selected_action" value="([^"]+)"', text) == ids
    assert locked_names(backend) == ["order:1", "order:2", "order:3"]
    answer = release(operator, ids)
    assert said(answer) == ["success: Released 2 locks: order:1, order:2."]
    assert locked_names(backend) == ["order:3"]
    entry = LogEntry.objects.get()  # one for all
    assert (entry.object_repr, entry.is_change()) == ("Released: order:1, order:2", True)
    assert entry.change_message == (
        "Released: “order:1” (default), held by POST /pay (pid 4711 on web-1, MainThread);"
        " “order:2” (default), held by shop.tasks.report (pid 4711 on web-1, MainThread)."
    )
    assert [(about["name"], about["using"], about["by"]) for about in forced] == [
        ("order:1", "default", "operator in the admin"),
        ("order:2", "default", "operator in the admin"),
    ]


def test_a_lock_with_several_slots_has_a_line_for_each_that_is_taken(operator, backend):
    for number in (1, 2, 3):
        hold(backend, "export:7", label=f"tenant {number}", slots=3)
    assert names_in(operator.get(LIST)) == [f"export:7, slot {number} of 3" for number in (1, 2, 3)]
    key = key_of(backend, "export:7", slot=2)
    page = operator.get(reverse("admin:distlock_heldlock_change", args=[quote(key)])).content.decode()
    assert "export:7, slot 2 of 3" in page
    assert "tenant 2" in page
    assert said(release(operator, [key])) == ["success: Released 1 lock: export:7, slot 2 of 3."]
    assert [info.slot for info in backend.look(["export:7"])[0]] == [1, 3]
    assert LogEntry.objects.get().object_repr == "Released: export:7, slot 2 of 3"


def test_a_release_has_its_entry_in_the_log_whatever_the_names_are(operator, backend):
    """Databases refuse some characters: PostgreSQL a NUL."""
    names = ["a\x00b", "order:1", "order:2\x1b[2J", *(f"{number:03}" * 60 for number in range(20))]
    for name in names:
        hold(backend, name, label="x\x00y", host="\x00")
    answer = release(operator, [key_of(backend, name) for name in names])
    assert said(answer)[0].startswith("success: Released 23 locks: 000000")
    entry = LogEntry.objects.get()
    assert len(entry.object_repr) == 200
    for name in (r"“a\x00b” (default)", r"“order:2\x1b[2J” (default)"):
        assert name in entry.change_message
    assert all(text.isprintable() for text in (entry.object_repr, entry.change_message))


def test_an_entry_that_the_database_refuses(operator, backend, monkeypatch, caplog):
    """The locks are released, and whoever did it is told that the log does not say so."""
    for number in (1, 2):
        hold(backend, f"order:{number}")

    def refuse(**values):
        with transaction.atomic(savepoint=False), connection.cursor() as cursor:  # breaks the transaction around it
            cursor.execute("SELECT nothing FROM nowhere")

    monkeypatch.setattr(LogEntry.objects, "create", refuse)
    answer = release(operator, [key_of(backend, f"order:{number}") for number in (1, 2)])
    assert said(answer) == [
        "success: Released 2 locks: order:1, order:2.",
        "error: The admin's log has no entry of this: order:1, order:2.",
    ]
    assert (
        "The release of “order:1” (default), “order:2” (default) by operator is not in the admin's log" in caplog.text
    )
    assert locked_names(backend) == []


def test_what_was_released_before_an_error_is_in_the_log(operator, backend, monkeypatch):
    for number in (1, 2):
        hold(backend, f"order:{number}")
    free = backend.release

    def fail(request, *about, **more):
        if request.name == "order:2":
            raise ZeroDivisionError
        return free(request, *about, **more)

    monkeypatch.setattr(backend, "release", fail)
    with pytest.raises(ZeroDivisionError):
        release(operator, [key_of(backend, f"order:{number}") for number in (1, 2)])
    assert LogEntry.objects.get().object_repr == "Released: order:1"


@on_each_store
def test_a_lock_that_changed_hands_is_kept(operator, backend, forced):
    """Between the page and the click its holder has gone, and another has come."""
    first = hold(backend, "order:1")
    gone = hold(backend, "order:2")
    ids = [key_of(backend, "order:1"), key_of(backend, "order:2")]
    backend.release(first)
    backend.release(gone)
    second = hold(backend, "order:1", label="the next one")
    answer = release(operator, ids)
    assert said(answer) == [
        "warning: Others hold them by now: order:1.",
        "info: Free by now: order:2.",
    ]
    assert backend.look(["order:1"])[0][0].token == second.token
    assert LogEntry.objects.count() == 0
    assert forced == []


def test_a_lock_that_changes_hands_while_it_is_released_is_kept(operator, backend, monkeypatch):
    """After the look, before the command: the token is compared once more, in the store."""
    first = hold(backend, "order:1")
    key = key_of(backend, "order:1")
    free = backend.release

    def free_late(*about, **more):
        if free(first):
            hold(backend, "order:1", label="the next one")
        return free(*about, **more)

    monkeypatch.setattr(backend, "release", free_late)
    answer = release(operator, [key])
    assert said(answer) == ["warning: Nothing to release: order:1 was freed or changed hands meanwhile."]
    assert backend.look(["order:1"])[0][0].holder.label == "the next one"
    assert LogEntry.objects.count() == 0


def test_release_by_the_page_of_the_lock(operator, backend):
    hold(backend, "order:1")
    url = reverse("admin:distlock_heldlock_delete", args=[quote(key_of(backend, "order:1"))])
    assert "Release this lock?" in operator.get(url).content.decode()
    answer = operator.post(url, {"post": "yes"}, follow=True)
    assert answer.redirect_chain == [(LIST, 302)]
    assert said(answer) == ["success: Released 1 lock: order:1."]
    assert LogEntry.objects.get().object_repr == "Released: order:1"
    assert backend.look(["order:1"]) == [[]]


def test_release_by_the_page_of_a_lock_that_changed_hands(operator, backend):
    first = hold(backend, "order:1")
    url = reverse("admin:distlock_heldlock_delete", args=[quote(key_of(backend, "order:1"))])
    backend.release(first)
    hold(backend, "order:1")
    answer = operator.post(url, {"post": "yes"}, follow=True)
    assert answer.redirect_chain == [(LIST, 302)]
    assert said(answer) == ["warning: Others hold them by now: order:1."]
    assert backend.look(["order:1"]) != [[]]
    assert LogEntry.objects.count() == 0


def test_a_resting_lock_is_shown_as_such_and_can_be_freed(operator, backend):
    backend.release(hold(backend, "nightly"), 50)
    assert "released, resting" in operator.get(LIST).content.decode()
    question = operator.post(LIST, {"action": "delete_selected", "_selected_action": [key_of(backend, "nightly")]})
    assert "(pid 4711 on web-1, MainThread), released, resting, for " in question.content.decode()
    release(operator, [key_of(backend, "nightly")])
    assert backend.look(["nightly"]) == [[]]


@on_each_store
def test_freeing_a_lock_hands_it_to_who_waits(operator, backend):
    hold(backend, "order:1")
    waiter = lock_request("order:1")
    backend.acquire(waiter, queue=True)
    release(operator, [key_of(backend, "order:1")])
    assert isinstance(backend.acquire(waiter, queue=True), Grant)
    backend.release(waiter)


def test_more_locks_than_a_form_may_have_fields(operator, backend, settings):
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 60
    for number in range(120):
        backend.acquire(lock_request(f"n:{number:03}"), queue=False)
    some = key_of(backend, "n:000")
    question = operator.post(LIST, {"action": "delete_selected", "select_across": 1, "_selected_action": [some]})
    assert "120 locks are selected; the first 50 can be released now" in question.content.decode()
    ids = re.findall(r'name="_selected_action" value="([^"]+)"', question.content.decode())
    assert len(ids) == 50
    assert said(release(operator, ids))[0].startswith("success: Released 50 locks")
    assert len(locked_names(backend)) == 70
    assert LogEntry.objects.count() == 1


def without_spaces(page) -> str:
    return " ".join(re.sub("<[^>]*>", " ", page.content.decode()).split())


def test_of_local_memory_it_says_what_cannot_be_seen(operator, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": LOCMEM},
        "none": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"},
    }
    note = "warning: “default” is in local memory: locks that other processes hold cannot be seen here."
    nothing = "Nothing is locked in “default”, “none”. A lock is listed for as long as somebody holds it."
    assert notes(operator.get(LIST)) == [f"info: {nothing}", note]
    hold(locks["default"], "order:1")
    for query in ({}, {"q": "nobody"}):
        assert notes(operator.get(LIST, query)) == [note]
    assert notes(operator.post(LIST, {"action": "delete_selected", "_selected_action": ["x"]})) == []


def test_of_other_backends_it_says_only_that_nothing_is_locked(operator, valkey_locks):
    nothing = "Nothing is locked in “default”. A lock is listed for as long as somebody holds it."
    assert notes(operator.get(LIST)) == [f"info: {nothing}"]
    hold(valkey_locks, "order:1")
    assert notes(operator.get(LIST)) == []


def test_locks_are_released_and_not_deleted(operator, backend):
    hold(backend, "order:1")
    hold(backend, "order:2")
    key, other = key_of(backend, "order:1"), key_of(backend, "order:2")
    url = {page: reverse(f"admin:distlock_heldlock_{page}", args=[quote(key)]) for page in ("change", "delete")}
    lock = operator.get(url["change"])
    assert f'href="{html.escape(url["delete"])}">Release this lock…</a>' in lock.content.decode()
    for page in (
        operator.get(LIST),
        lock,
        operator.get(url["delete"]),
        operator.post(LIST, {"action": "delete_selected", "_selected_action": [key]}),
        release(operator, [key]),
        operator.get(reverse("admin:distlock_heldlock_history", args=[quote(other)])),
        operator.get("/admin/"),
    ):
        assert page.status_code == 200
        assert "elet" not in without_spaces(page)
    assert "Released: “order:1” (default), held by" in str(LogEntry.objects.get())


def test_the_history_of_a_lock_is_what_was_released_under_its_name(operator, backend):
    for names in (["order:1"], ["order:1", "order:2"], ["order:2", "border:1"]):
        for name in names:
            hold(backend, name)
        release(operator, [key_of(backend, name) for name in names])
    hold(backend, "order:1")
    history = operator.get(reverse("admin:distlock_heldlock_history", args=[quote(key_of(backend, "order:1"))]))
    assert [entry.object_repr for entry in history.context["action_list"]] == [
        "Released: order:1",
        "Released: order:1, order:2",
    ]
    assert "2 entries" in without_spaces(history)


def test_a_lock_that_is_gone_leads_to_the_list(operator, backend):
    taken = hold(backend, "order:1")
    key = key_of(backend, "order:1")
    backend.release(taken)
    for page in ("change", "delete", "history"):
        answer = operator.get(reverse(f"admin:distlock_heldlock_{page}", args=[quote(key)]), follow=True)
        assert answer.redirect_chain == [(LIST, 302)]
        assert said(answer) == ["info: Free by now: order:1."]


def test_confirmed_is_only_what_the_page_has_shown(operator, backend):
    """A confirmation that claims to be for all locks frees those it names."""
    hold(backend, "a")
    hold(backend, "b")
    release(operator, [key_of(backend, "a")], select_across="1")
    assert locked_names(backend) == ["b"]


def test_who_may_only_view_sees_no_action_and_cannot_forge_one(pages, backend):
    hold(backend, "order:1")
    browser = login("view_heldlock")
    key = key_of(backend, "order:1")
    page = browser.get(LIST)
    assert names_in(page) == ["order:1"]
    assert page.context["action_form"] is None
    assert "delete_selected" not in page.content.decode()
    release(browser, [key])
    detail = browser.get(reverse("admin:distlock_heldlock_change", args=[quote(key)]))
    assert "deletelink" not in detail.content.decode()
    delete = reverse("admin:distlock_heldlock_delete", args=[quote(key)])
    assert browser.get(delete).status_code == 403
    assert browser.post(delete, {"post": "yes"}).status_code == 403
    assert backend.look(["order:1"]) != [[]]
    assert LogEntry.objects.count() == 0


def test_who_may_release_may_see(pages, backend):
    hold(backend, "order:1")
    browser = login("release_heldlock")
    assert names_in(browser.get(LIST)) == ["order:1"]
    assert said(release(browser, [key_of(backend, "order:1")])) == ["success: Released 1 lock: order:1."]


def test_others_see_nothing(pages, backend):
    assert login("view_user").get(LIST).status_code == 403
    assert Client().get(LIST).status_code == 302


def test_forged_requests_do_nothing(operator, backend):
    hold(backend, "order:1")
    for ids in (
        ["default/order:1"],
        ["default/order:1@0000000000000000"],
        ["x"],
        ["/@"],
        ["other/order:1@" + "0" * 16],
    ):
        release(operator, ids)
    assert backend.look(["order:1"]) != [[]]
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="operator"))
    assert release(strict, [key_of(backend, "order:1")]).status_code == 403
    assert backend.look(["order:1"]) != [[]]
    assert operator.get(f"{LIST}add/").status_code == 403
    key = reverse("admin:distlock_heldlock_change", args=[quote(key_of(backend, "order:1"))])
    assert operator.post(key, {"name": "other"}).status_code == 403


@pytest.fixture
def half_down(valkey, store, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
        "gone": {"BACKEND": REDIS, "LOCATION": "unix:///nowhere/at/all.sock"},
        "wrong": {"BACKEND": "shop.Backend"},
    }
    hold(locks["default"], "order:1")
    yield
    locks.close()


def test_a_backend_that_is_down_is_named_and_the_others_are_listed(operator, half_down):
    for query in ({}, {"q": "order"}, {"o": "2"}, {"_facets": "True"}):
        page = operator.get(LIST, query)
        assert names_in(page) == ["order:1"]
        gone, wrong = said(page)
        assert "“gone” are not shown" in gone
        assert "/nowhere/at/all.sock" in gone
        assert "“wrong” are not shown" in wrong


def test_of_a_server_that_this_process_does_not_ask_any_more_one_message_says_so_too(operator, half_down):
    operator.get(LIST)
    page = operator.get(LIST)
    gone, wrong = said(page)
    assert "“gone” are not shown" in gone
    about = rf"\. This process \(.+:{os.getpid()}\) has had no answer since 2.+:\d\d\.$"
    assert re.search(about, gone)
    assert "“wrong” are not shown" in wrong
    assert notes(page) == []


def test_a_server_without_which_the_backend_answers_is_named_and_the_process_too(operator, five_valkeys, settings):
    gone = "unix:///nowhere/at/all.sock"
    locations = [*(server.url for server in five_valkeys[:4]), gone]
    settings.DISTRIBUTED_LOCKS = {"quorum": {"BACKEND": REDLOCK, "LOCATION": locations, "KEY_PREFIX": "four"}}
    hold(locks["quorum"], "order:1")
    [note] = eventually(lambda: notes(operator.get(LIST)))
    assert note.startswith(f"warning: “quorum”: {gone}?db=0 does not answer (")
    assert f":{os.getpid()}) has had no answer since 2" in note
    assert names_in(operator.get(LIST)) == ["order:1"]
    locks.close()


def test_a_release_says_once_of_each_backend_that_it_is_down(operator, half_down):
    released, gone, wrong = said(release(operator, [key_of(locks["default"], "order:1")]))
    assert released == "success: Released 1 lock: order:1."
    assert "“gone” are not shown" in gone
    assert "“wrong” are not shown" in wrong


def test_release_from_a_backend_that_is_down_says_so(operator, half_down):
    answer = release(operator, [f"gone/order:2@{'0' * 16}", key_of(locks["default"], "order:1")])
    assert said(answer)[:2] == [
        "warning: The backend does not tell who holds them: order:2.",
        "success: Released 1 lock: order:1.",
    ]
    assert len(said(answer)) == 4


def test_the_page_of_a_lock_whose_backend_is_down_leads_to_the_list_which_says_so(operator, half_down):
    url = reverse("admin:distlock_heldlock_change", args=[quote(f"gone/order:2@{'0' * 16}")])
    answer = operator.get(url, follow=True)
    assert answer.redirect_chain == [(LIST, 302)]
    unknown, gone, wrong = said(answer)
    assert unknown == "warning: The backend does not tell who holds them: order:2."
    assert "“gone” are not shown" in gone
    assert "“wrong” are not shown" in wrong


def test_a_backend_that_goes_down_during_a_release(operator, backend, monkeypatch):
    for number in (1, 2, 3):
        hold(backend, f"order:{number}")
    free = backend.release
    asked = []

    def fail(request, *about, **more):
        asked.append(request.name)
        if request.name == "order:2":
            raise LockBackendError("The server does not answer.")
        return free(request, *about, **more)

    monkeypatch.setattr(backend, "release", fail)
    answer = release(operator, [key_of(backend, f"order:{number}") for number in (1, 2, 3)])
    assert said(answer) == [
        "success: Released 1 lock: order:1.",
        "error: Not released: order:2, order:3. The server does not answer.",
    ]
    assert asked == ["order:1", "order:2"]


def test_the_whole_setting_wrong(operator, settings):
    settings.DISTRIBUTED_LOCKS = ["default"]
    assert "its settings are wrong, see the log" in "".join(said(operator.get(LIST)))


@pytest.mark.parametrize("page", ["change", "delete", "history"])
def test_who_may_not_look_learns_nothing(pages, backend, page, monkeypatch):
    """Neither whether a lock is held, nor that it is free; the store is not even asked."""
    hold(backend, "payroll:run")
    monkeypatch.setattr(backend, "look", None)
    somebody = login()
    for name in ("payroll:run", "payroll:other"):
        url = reverse(f"admin:distlock_heldlock_{page}", args=[quote(f"default/{name}@{'0' * 16}")])
        assert somebody.get(url).status_code == 403
        assert somebody.post(url, {"post": "yes"}).status_code == 403
        assert "payroll" not in somebody.get("/admin/").content.decode()


def test_a_project_s_own_site_without_the_usual_action(pages, client, backend):
    hold(backend, "order:1")
    client.force_login(User.objects.create_superuser("operator"))
    page = client.get("/own/distlock/heldlock/")
    assert "Release selected locks" in page.content.decode()
    form = {"action": "delete_selected", "post": "yes", "_selected_action": [key_of(backend, "order:1")]}
    answer = client.post("/own/distlock/heldlock/", form, follow=True)
    assert answer.redirect_chain == [("/own/distlock/heldlock/", 302)]
    assert backend.look(["order:1"]) == [[]]


def test_other_pages_of_the_admin(operator, backend):
    hold(backend, "order:1")
    release(operator, [key_of(backend, "order:1")])
    assert "order:1" in operator.get("/admin/").content.decode()  # in "recent actions"
    assert operator.get("/admin/distlock/").status_code == 200
    hold(backend, "order:1")
    history = reverse("admin:distlock_heldlock_history", args=[quote(key_of(backend, "order:1"))])
    assert operator.get(history).status_code == 200


@pytest.mark.parametrize("options", [{}, {"use_base_manager": True}], ids=["default", "all"])
def test_dumpdata_works(options, backend):
    hold(backend, "order:1")
    out = io.StringIO()
    call_command("dumpdata", "distlock", stdout=out, **options)
    assert out.getvalue().strip() == "[]"


def test_no_migration_is_missing():
    call_command("makemigrations", "distlock", check=True, dry_run=True, verbosity=0)


@pytest.mark.parametrize(
    "evaluate",
    [
        list, len, bool, repr, QuerySet.count, QuerySet.exists, QuerySet.first, QuerySet.delete, QuerySet.iterator,
        lambda rows: rows.update(using="x"), lambda rows: rows.values_list("using").get(),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("model", "source"), [(HeldLock, "held()"), (BeatRun, "runs()")])
def test_a_query_raises_and_says_who_tells(model, source, evaluate):
    rows = model.objects.filter(using="default")
    with pytest.raises(RuntimeError, match="has no table, so it cannot be queried") as caught:
        evaluate(rows)
    assert f"locks[alias].{source}" in str(caught.value)


def test_no_table_is_made():
    assert HeldLock._meta.db_table not in connection.introspection.table_names()
