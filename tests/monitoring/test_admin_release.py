"""Releases of many locks at once from the admin's list: of a host, and by prefix."""

from __future__ import annotations

import re

import pytest
from django.contrib.admin.models import LogEntry

from django_distlock import lock, locks
from django_distlock.monitoring.inventory import Inventory
from tests.support.admin_pages import LIST, hold, key_of, login, release, said
from tests.support.stores import LOCMEM, REDIS
from tests.support.tools import locked_names

pytestmark = pytest.mark.django_db


@pytest.fixture
def two(valkey, store, settings):
    """Two backends, in which two hosts hold locks."""
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url},
        "batch": {"BACKEND": LOCMEM},
    }
    for name, host in (("order:1", "web-1"), ("order:2", "web-2"), ("mail:1", "web-1"), ("plain", "web-2")):
        hold(locks["default"], name, host=host)
    hold(locks["batch"], "order:3", host="web-1")
    yield
    locks.close()


def ask(browser, action, *names, using="default", query="", **fields):
    ids = [key_of(locks[using], name) for name in names]
    form = {"action": action, "index": 0, "_selected_action": ids, **fields}
    return browser.post(f"{LIST}{query}", form, follow=True)


def ids_in(question) -> list[str]:
    return re.findall(r'name="_selected_action" value="([^"]+)"', question.content.decode())


def names_of(question) -> list[str]:
    return sorted(text.split("@")[0] for text in ids_in(question))


def test_all_that_a_host_holds_is_released_after_a_question(operator, two):
    question = ask(operator, "release_hosts", "order:1", query="?prefix=order%3A")
    assert question.context["title"] == "Release all that web-1 holds"
    assert "Release these 3 locks? This does not stop the holder of a lock" in question.content.decode()
    assert names_of(question) == ["batch/order:3", "default/mail:1", "default/order:1"]
    assert locked_names(locks["default"]) == ["mail:1", "order:1", "order:2", "plain"]
    answer = release(operator, ids_in(question))
    assert said(answer)[0].startswith("success: Released 3 locks: ")
    assert locked_names(locks["default"]) == ["order:2", "plain"]
    assert locked_names(locks["batch"]) == []
    entry = LogEntry.objects.get()
    for name in ("“order:1” (default), held by", "“mail:1” (default), held by", "“order:3” (batch), held by"):
        assert name in entry.change_message


def test_by_prefix_it_is_that_backend_alone(operator, two):
    question = ask(operator, "release_prefixes", "order:1", "plain")
    assert question.context["title"] == "Release all of order:"
    assert names_of(question) == ["default/order:1", "default/order:2"]
    release(operator, ids_in(question))
    assert locked_names(locks["default"]) == ["mail:1", "plain"]
    assert locked_names(locks["batch"]) == ["order:3"]
    assert LogEntry.objects.count() == 1


def test_a_name_without_a_prefix_is_not_the_prefix_of_all(operator, two):
    answer = ask(operator, "release_prefixes", "plain")
    assert said(answer) == ["warning: The names of the selected locks have no prefix."]
    assert ids_in(answer) != []  # the list, on which nothing is asked
    assert "Yes, release" not in answer.content.decode()
    assert len(locked_names(locks["default"])) == 4


def test_what_its_host_takes_after_the_question_is_kept(operator, two):
    question = ask(operator, "release_hosts", "order:1")
    hold(locks["default"], "late:1", host="web-1")
    release(operator, ids_in(question))
    assert locked_names(locks["default"]) == ["late:1", "order:2", "plain"]


def test_what_another_host_takes_before_the_question_is_not_in_it(operator, two, monkeypatch):
    look = Inventory.look

    def look_late(inventory, keys):
        if locks["default"].look(["mail:1"])[0][0].holder.host == "web-1":
            lock("mail:1").force_release()
            hold(locks["default"], "mail:1", host="web-9")
        return look(inventory, keys)

    monkeypatch.setattr(Inventory, "look", look_late)
    assert names_of(ask(operator, "release_hosts", "order:1")) == ["batch/order:3", "default/order:1"]


@pytest.mark.parametrize("action", ["release_hosts", "release_prefixes"])
def test_who_may_only_view_cannot_release_many(pages, two, action):
    answer = ask(login("view_heldlock"), action, "order:1")
    assert "Yes, release" not in answer.content.decode()
    assert action not in answer.content.decode()
    assert len(locked_names(locks["default"])) == 4


@pytest.mark.parametrize(("action", "count"), [("release_hosts", 80), ("release_prefixes", 82)])
def test_more_than_a_form_may_have_fields_are_asked_for_in_parts(operator, two, settings, action, count):
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 60
    for number in range(80):
        hold(locks["default"], f"order:n{number:02}", host="web-3")
    question = ask(operator, action, "order:n00")

    assert f"{count} locks are selected; the first 50 can be released now" in question.content.decode()
    assert len(ids_in(question)) == 50
