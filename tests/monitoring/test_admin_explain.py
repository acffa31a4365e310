"""The page of one lock, where it says why the lock is held, who waits, and what happened."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.admin.utils import quote
from django.urls import reverse

from django_distlock.exceptions import LockBackendError
from django_distlock.monitoring.explain import NO_JOURNAL
from tests.support.admin_pages import hold, key_of, said
from tests.support.crossed import Crossed
from tests.support.tools import eventually, keeping_a_journal, lock_request

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["redis", "locmem"])
def journal(request, settings):
    """A backend that keeps one."""
    request.getfixturevalue("valkey_locks" if request.param == "redis" else "locmem_locks")
    with keeping_a_journal(settings) as found:
        yield found


def page_of(operator, backend, name):
    return operator.get(reverse("admin:distlock_heldlock_change", args=[quote(key_of(backend, name))]))


def shown(page, field) -> list[str]:
    """The lines of a list, or the cells of a table."""
    text = page.content.decode()
    part = text[text.index(f" field-{field}") :].split('class="form-row')[0]
    return [html.unescape(found) for found in re.findall("<(?:li|td)>([^<]*)</(?:li|td)>", part)]


@pytest.mark.seconds(4)
def test_a_deadlock_is_named_by_its_journal_alone(operator, journal, monkeypatch):
    """A page that refreshes itself does not list all queues of the store."""
    monkeypatch.setattr(journal, "waited_for", None)
    with Crossed():

        def page_that_says_it():
            """The journal comes a moment later than what the store shows."""
            page = page_of(operator, journal, "a")
            is_named = any(line.startswith("Deadlock: needs ") for line in shown(page, "why"))
            return page if is_named and {"granted", "waits"} <= {*shown(page, "lately")} else None

        page = eventually(page_that_says_it)
        assert [line.split(" (pid ")[0] for line in shown(page, "waiters")] == ["needs a"]


def test_a_journal_that_must_not_be_read(operator, journal, monkeypatch):
    def refuse():
        error = LockBackendError("NOPERM: no permission to run 'lrange'")
        error.is_final = True
        raise error

    hold(journal, "order:1")
    monkeypatch.setattr(journal, "read_journal", refuse)
    page = page_of(operator, journal, "order:1")
    assert shown(page, "waiters") == ["Nobody waits."]
    assert shown(page, "why") == ["The journal cannot be read: NOPERM: no permission to run 'lrange'"]


def test_without_a_journal_it_says_so(operator, backend):
    hold(backend, "order:1")
    waiter = lock_request("order:1")
    backend.acquire(waiter, queue=True)
    page = page_of(operator, backend, "order:1")
    assert shown(page, "why") == [NO_JOURNAL % {"using": "default"}]
    assert len(shown(page, "waiters")) == 1
    assert shown(page, "lately") == []
    backend.release(waiter)


def test_who_waits_is_escaped(operator, locmem_locks):
    hold(locmem_locks, "order:1", ago=4000, label="<script>\x1b", host="<b>")
    page = page_of(operator, locmem_locks, "order:1")
    assert any("<script>" in line and "\\x1b" in line for line in shown(page, "why"))
    assert "<script>\\" not in page.content.decode()


def test_a_backend_that_does_not_answer_any_more(operator, valkey_locks, monkeypatch):
    hold(valkey_locks, "order:1")
    key = key_of(valkey_locks, "order:1")

    def fail(*about):
        raise LockBackendError("The server does not answer.")

    monkeypatch.setattr(valkey_locks, "waiters", fail)
    page = operator.get(reverse("admin:distlock_heldlock_change", args=[quote(key)]))
    assert page.status_code == 200
    assert [shown(page, field) for field in ("why", "waiters", "lately")] == [[], [], []]
    assert "The server does not answer." in said(page)[0]
