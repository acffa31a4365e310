"""The admin's pages in Chinese, where a text that was left in English is seen at once, and in German."""

from __future__ import annotations

import re

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Group
from django.urls import reverse
from django.utils.html import strip_tags

from django_distlock.core.registry import locks
from django_distlock.exceptions import LockBackendError
from tests.support.admin_pages import LIST, hold, key_of, release, said
from tests.support.tools import keeping_a_journal, lock_request

pytestmark = pytest.mark.django_db

ENGLISH = re.compile(r"[A-Za-z]{2,} [a-z]{2,}")
HOLDER = re.compile(r"(pid \d+ on )?[\w.-]+, (pid \d+|\w+Thread)|pid \d+ on [\w-]+")  # the same in all languages


def english_in(page) -> set[str]:
    """Words of English on a page, but for names of holders, and Django's sidebar."""
    text = re.sub(r"<(script|style|head|nav)\b.*?</\1>", "", page.content.decode(), flags=re.DOTALL)
    return {*ENGLISH.findall(HOLDER.sub("", strip_tags(text)))}


@pytest.fixture
def chinese(settings):
    settings.LANGUAGE_CODE = "zh-hans"


@pytest.fixture
def german(settings):
    settings.LANGUAGE_CODE = "de"


@pytest.fixture
def journal(valkey_locks, settings):
    with keeping_a_journal(settings) as found:
        yield found


def page_of(backend, name: str, kind: str = "change") -> str:
    return reverse(f"admin:distlock_heldlock_{kind}", args=[quote(key_of(backend, name))])


def test_no_english_is_left_on_the_pages(operator, journal, chinese):
    hold(journal, "order:1", ago=4000, slots=3)
    hold(journal, "order:2")
    waiter = lock_request("order:2")
    journal.acquire(waiter, queue=True)
    Group.objects.create(name="1")
    of_django = english_in(operator.get("/admin/auth/group/"))  # what its own catalogue lacks
    for url in (
        LIST, f"{LIST}?prefix=none", page_of(journal, "order:1"), page_of(journal, "order:2"),
        page_of(journal, "order:1", "delete"), "/admin/distlock/beatrun/",
    ):  # fmt: skip
        page = operator.get(url, follow=True)
        assert page.status_code == 200
        assert re.search("[\u4e00-\u9fff]", page.content.decode())
        assert english_in(page) - of_django == set(), url
    assert "order:1，槽位 1/3".encode() in operator.get(LIST).content  # noqa: RUF001 - as Chinese has it
    journal.release(waiter)


def test_messages_are_in_the_language(operator, journal, chinese, monkeypatch):
    hold(journal, "order:1")
    page = release(operator, [key_of(journal, "order:1")])
    assert said(page) == ["success: 已释放 1 把锁：order:1。"]  # noqa: RUF001 - as Chinese has it

    def refuse(prefix=""):
        raise LockBackendError("the server does not answer")

    monkeypatch.setattr(locks["default"], "slots", refuse)
    [error] = said(operator.get(LIST))
    assert error.startswith("error: “default”的锁未能显示")
    assert error.endswith("the server does not answer")  # errors are in English everywhere


def test_the_script_gets_its_texts(operator, journal, german):
    text = operator.get(LIST).content.decode()
    [script] = re.findall(r"<script[^>]*held_locks\.js[^>]*>", text)
    for attribute in ('data-pause="Anhalten"', 'data-seconds="%(seconds)s s"', "aktualisiert"):
        assert attribute in script


def test_the_history_of_a_lock_is_found_in_another_language(operator, journal, settings):
    """What was released in one language is found by who reads another one."""
    hold(journal, "order:1", slots=3)
    settings.LANGUAGE_CODE = "de"
    release(operator, [key_of(journal, "order:1")])
    assert "Freigegeben" in LogEntry.objects.get().change_message
    hold(journal, "order:1", slots=3)
    settings.LANGUAGE_CODE = "zh-hans"
    page = operator.get(page_of(journal, "order:1", "history"))
    assert len(page.context["action_list"]) == 1
