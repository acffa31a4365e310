"""The page of held locks in a real browser: it ticks, refreshes, keeps what is selected, and releases.

DISTLOCK_SCREENSHOTS names a folder for its pictures; ``make screenshots`` puts them into the documentation.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import django
import pytest
from django.contrib.auth.models import User
from django.core.servers.basehttp import ThreadedWSGIServer
from django.test import Client
from pytest_django.live_server_helper import LiveServer

from django_distlock import locks
from django_distlock.journal import Event, JournalEntry
from django_distlock.types import Holder, LockRequest, digest
from tests.support.admin_pages import MIDDLEWARE, hold, use_admin
from tests.support.browser import Browser
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, eventually, lock_request, locked_names

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True), pytest.mark.seconds(6)]

LIST = "/admin/distlock/heldlock/"
ROWS = "#result_list tbody tr"
NAMES = f"{ROWS} .field-name"
RUN = "#changelist-form button[name=index]"
CONFIRM = "#content form input[type=submit]"


def checkbox(name: str) -> str:
    return f"input.action-select[value*='/{name}@']"


@pytest.fixture
def site(settings):
    """Django's own policy against foreign scripts where it has one; it would refuse a script or style inside a page."""
    strict = ("'self'",)
    if django.VERSION >= (6, 0):
        from django.utils.csp import CSP

        settings.SECURE_CSP = {"default-src": [CSP.SELF], "script-src": [CSP.NONCE], "style-src": [CSP.NONCE]}
        if django.VERSION < (6, 1):  # its admin has no nonces yet
            settings.SECURE_CSP = {"default-src": strict, "img-src": ["data:", *strict]}
        use_admin(settings, processors=("django.template.context_processors.csp",))
        settings.MIDDLEWARE = ["django.middleware.csp.ContentSecurityPolicyMiddleware", *MIDDLEWARE]
    else:
        use_admin(settings)
        settings.MIDDLEWARE = ["tests.monitoring.test_admin_browser.own_scripts_only", *MIDDLEWARE]


def own_scripts_only(get_response):
    def answer(request):
        response = get_response(request)
        response["Content-Security-Policy"] = "default-src 'self'; img-src 'self' data:"
        return response

    return answer


@pytest.fixture
def backend(valkey, store, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": valkey.url, "JOURNAL": 100},
        "batch": {"BACKEND": REDIS, "LOCATION": valkey.url, "KEY_PREFIX": "batch"},
    }
    yield locks["default"]
    locks.close()


@pytest.fixture
def server(site, backend, settings, transactional_db, monkeypatch):
    """Not pytest-django's own one, which would begin before the settings are there."""
    settings.ALLOWED_HOSTS = ["localhost"]
    connections, process_request = [], ThreadedWSGIServer.process_request

    def note(self, connection, address):
        connections.append(connection)
        process_request(self, connection, address)

    monkeypatch.setattr(ThreadedWSGIServer, "process_request", note)
    server = LiveServer("localhost")
    yield server

    def are_idle():
        for connection in list(connections):  # the browser may open another one meanwhile, or have closed it
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # a thread that waits for the next request ends
        return not any("process_request_thread" in thread.name for thread in threading.enumerate())

    eventually(are_idle)  # its stop takes the database from threads that still answer
    server.stop()


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory):
    with Browser(chromium, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    """Logged in, wide and light. What pages keep is this test's own, because the port of its server is."""
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    browser.resize(1440, 800)
    cookie = client.cookies["sessionid"].value
    browser.send("Network.setCookie", name="sessionid", value=cookie, url=server.url)
    browser.address = f"{server.url}{LIST}"
    yield browser
    assert browser.forget() == []


@pytest.fixture
def picture(page):
    """Takes one, if somebody wants to look at it. Names that end with ``-dark`` are of the page in dark colours."""

    def take(name: str) -> None:
        if wanted := os.environ.get("DISTLOCK_SCREENSHOTS"):
            path = Path(wanted, f"{name}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            page.colours("dark" if name.endswith("-dark") else "light")
            page.screenshot(path)

    return take


@pytest.fixture
def some_locks(backend):
    """As an afternoon looks in a shop."""
    hold(backend, "order:1041", ttl=30, label="POST orders/<int:order_id>/pay", host="web-1", pid=211, ago=2)
    paid = hold(backend, "order:1042", ttl=30, label="POST orders/<int:order_id>/pay", host="web-2", pid=198, ago=7)
    hold(backend, "report:monthly", ttl=30, label="shop.tasks.build_report", host="worker-1", pid=77, ago=754)
    hold(backend, "mail:newsletter", ttl=30, label="shop.tasks.send_newsletter", host="worker-2", pid=78, ago=83)
    backend.release(hold(backend, "nightly:reconcile", ttl=60, label="manage.py reconcile", host="cron-1", ago=40), 900)
    hold(locks["batch"], "import:catalogue", ttl=120, label="import_catalogue", host="batch-1", pid=9, ago=4000)
    waiters = [
        LockRequest("order:1042", 30, Holder(host, pid, "MainThread", "POST orders/<int:order_id>/pay", time.time()))
        for host, pid in (("web-1", 214), ("web-3", 96), ("worker-1", 77))
    ]
    for waiter in waiters:
        backend.acquire(waiter, queue=True)
    told = [
        JournalEntry(paid.holder.since, Event.GRANTED, "order:1042", digest(paid.token), paid.holder, 7, 30.0, 0.0),
        *(
            JournalEntry(one.holder.since, Event.WAITS, "order:1042", digest(one.token), one.holder, seconds=20.0)
            for one in waiters
        ),
    ]
    backend.write_journal([entry.to_text() for entry in told])
    yield
    for waiter in waiters:
        backend.release(waiter)


def seconds_left(page, name: str) -> int:
    cell = f"document.querySelector(\"{checkbox(name)}\").closest('tr').querySelector('.field-left').innerText"
    return int(page.run(cell).split()[0])


def test_the_times_tick_between_refreshes(page, backend):
    hold(backend, "order:1", ttl=50, ago=3)
    page.open(page.address)
    page.click(".distlock-refresh button")
    assert page.text(".distlock-refresh").startswith("Resume")
    left = seconds_left(page, "order:1")
    assert 40 < left < 50
    page.poll(lambda: seconds_left(page, "order:1") <= left - 2)
    held = page.text(f"{ROWS} .field-held_for")
    page.poll(lambda: page.text(f"{ROWS} .field-held_for") != held)
    assert page.run("document.querySelectorAll('#result_list style, #result_list script').length") == 0


def test_the_list_refreshes_and_keeps_what_is_selected(page, backend):
    first = hold(backend, "order:1")
    hold(backend, "order:2")
    page.open(page.address)
    page.click(checkbox("order:2"))
    page.run("document.querySelector('#searchbar').value = 'half typed'")
    hold(backend, "order:3")
    backend.release(first)
    page.poll(lambda: page.texts(NAMES) == ["order:2", "order:3"])
    assert page.run(f'document.querySelector("{checkbox("order:2")}").checked')
    assert page.run(f"document.querySelector(\"{checkbox('order:2')}\").closest('tr').className") == "selected"
    assert page.text(".action-counter") == "1 of 2 selected"
    assert page.run("document.querySelector('#searchbar').value") == "half typed"
    # Django's own script knows the rows that came: its box selects all of them.
    page.click("#action-toggle")
    page.until("document.querySelectorAll('input.action-select:checked').length === 2")
    assert page.text(".action-counter") == "2 of 2 selected"


def test_paused_it_stays_as_it_is(page, backend):
    hold(backend, "order:1")
    page.open(page.address)
    page.click(".distlock-refresh button")
    asked = "performance.getEntriesByType('resource').filter((entry) => entry.initiatorType === 'fetch').length"
    before = page.run(asked)
    page.run("new Promise((done) => setTimeout(done, 5500))")
    assert page.run(asked) == before
    page.open(page.address)  # and after a reload
    assert page.text(".distlock-refresh").startswith("Resume")
    hold(backend, "order:2")
    page.click(".distlock-refresh button")
    page.poll(lambda: page.texts(NAMES) == ["order:1", "order:2"])
    assert page.text(".distlock-refresh").startswith("Pause")


@pytest.mark.seconds(17)
def test_the_page_of_a_lock_follows_its_renewal_until_it_is_free(page, backend):
    taken = hold(backend, "order:1", ttl=20)
    page.open(page.address)
    page.click(f"{NAMES} a")
    page.until("document.querySelector('.distlock-release') !== null")
    page.run("document.querySelector('.distlock-release').focus()")
    backend.renew([(taken, 50.0)])
    page.poll(lambda: int(page.text(".field-left .distlock-seconds").split()[0]) > 40)
    assert page.run("document.activeElement.className") == "button distlock-release"  # the refresh kept it
    waiter = lock_request("order:1")
    backend.acquire(waiter, queue=True)
    page.poll(lambda: page.text(".field-queue .readonly") == "1")
    backend.release(waiter)
    backend.release(taken)
    page.poll(lambda: page.texts(".messagelist li") == ["Free by now: order:1."])
    assert page.texts(".distlock-seconds") == ["-", "-"]
    page.run("new Promise((done) => setTimeout(done, 5500))")
    assert page.texts(".messagelist li") == ["Free by now: order:1."]


@pytest.mark.parametrize("width", [1280, 390])
def test_all_columns_fit(page, some_locks, width):
    page.resize(width, 800, phone=width < 800)
    page.open(page.address)
    assert page.run("document.querySelector('#changelist-filter') !== null")
    room, needed = page.run(
        "['.results', '#result_list'].map((part) => document.querySelector(part).getBoundingClientRect().width)"
    )
    assert needed <= room
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("language", "paused", "unit"), [("de", "Anhalten", "s"), ("zh-hans", "暂停", "秒")])
def test_pages_fit_in_each_language(page, picture, some_locks, settings, language, paused, unit):
    settings.LANGUAGE_CODE = language

    def fits(name: str) -> None:
        for width in (1280, 390):
            page.resize(width, 1000, phone=width < 800)
            picture(f"{language}/{name}-{width}-light")
            picture(f"{language}/{name}-{width}-dark")
            assert page.run("document.documentElement.scrollWidth") <= width
            parts = "[...document.querySelectorAll('.results, .actions')]"
            assert page.run(f"{parts}.every((one) => one.scrollWidth <= one.clientWidth)")
            assert not {"undefined", "%("} & {*page.text().split()}

    page.open(page.address)
    page.until(f"document.querySelector('.distlock-refresh button')?.innerText === '{paused}'")
    fits("list")
    assert [text for text in page.texts(f"{ROWS} .distlock-seconds") if not text.endswith((unit, "min", "分"))] == []
    page.run(f"document.querySelector(\"{ROWS} th.field-name a[href*='order_3A1042']\").click()")
    page.poll(lambda: "POST orders/<int:order_id>/pay" in page.text(".field-label"))
    fits("lock")
    page.resize(1280, 1000)
    page.click(".distlock-release")
    page.until(f"document.querySelector('{CONFIRM}') !== null")
    fits("question")


def test_the_question_fits_a_phone(page, backend):
    hold(backend, "order:1", label="shop.management.commands.export_everything.Command.handle_all_of_it")
    page.resize(390, 800, phone=True)
    page.open(page.address)
    page.click(f"{NAMES} a")
    page.until("document.querySelector('.distlock-release') !== null")
    page.click(".distlock-release")
    page.until(f"document.querySelector('{CONFIRM}') !== null")
    assert page.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.seconds(13)
def test_from_an_empty_list_to_a_full_one_and_back(page, backend):
    page.open(page.address)
    assert page.texts(NAMES) == []
    taken = hold(backend, "order:1")
    page.poll(lambda: page.texts(NAMES) == ["order:1"])
    page.until(f"document.querySelector('{RUN}') !== null")
    backend.release(taken)
    page.poll(lambda: page.texts(NAMES) == [])


@pytest.mark.seconds(13)
def test_a_backend_that_goes_down_and_comes_back(page, backend, monkeypatch):
    hold(backend, "order:1")
    page.open(page.address)
    from django_distlock.exceptions import LockBackendError

    def refuse(prefix=""):
        raise LockBackendError("the server does not answer")

    monkeypatch.setattr(locks["batch"], "slots", refuse)
    page.poll(lambda: "“batch” are not shown" in page.text(".messagelist"))
    assert page.texts(NAMES) == ["order:1"]
    page.run("new Promise((done) => setTimeout(done, 5500))")
    assert len(page.texts(".messagelist li.error")) == 1
    monkeypatch.undo()
    page.poll(lambda: not page.texts(".messagelist li.error"))


def test_from_the_list_to_the_release_with_pictures(page, picture, backend, some_locks):
    """List, search, filter, sort, select, confirm, released. On the way the pictures of the documentation are taken."""
    page.open(page.address)
    page.until("document.querySelector('.distlock-refresh') !== null")
    assert len(page.texts(NAMES)) == 6
    assert page.texts(f"{ROWS} .field-queue") == ["0", "0", "0", "0", "3", "0"]
    picture("held-locks")
    picture("held-locks-dark")
    page.resize(400, 800, phone=True)
    picture("held-locks-narrow")
    wide = page.run("document.documentElement.scrollWidth")
    assert wide <= 400, f"the page is {wide} pixels wide on a phone"
    page.resize(1440, 800)

    page.run("document.querySelector('#searchbar').value = 'worker'")
    page.click("#changelist-search input[type=submit]")
    page.poll(lambda: page.texts(NAMES) == ["report:monthly", "mail:newsletter"])
    page.open(page.address)
    page.run("document.querySelector(\"#changelist-filter a[href='?prefix=order%3A']\").click()")
    page.poll(lambda: page.texts(NAMES) == ["order:1042", "order:1041"])
    page.open(page.address)
    page.click("#result_list thead .column-held_for .text a")
    page.until("location.search.includes('o=')")
    page.poll(lambda: page.texts(NAMES)[:1] == ["order:1041"])

    page.open(page.address)
    page.click(checkbox("order:1041"))
    page.click(checkbox("report:monthly"))
    page.run("document.querySelector('select[name=action]').value = 'delete_selected'")
    page.click(RUN)
    page.until(f"document.querySelector('{CONFIRM}') !== null && document.title.includes('Release')")
    assert "order:1041 (default): POST orders/<int:order_id>/pay (pid 211 on web-1" in page.text()
    picture("release")
    page.click(CONFIRM)
    page.poll(lambda: "Released 2 locks: order:1041, report:monthly." in page.text(".messagelist"))
    picture("released")
    assert locked_names(backend) == ["mail:newsletter", "nightly:reconcile", "order:1042"]

    page.run(f"document.querySelector(\"{ROWS} th.field-name a[href*='order_3A1042']\").click()")
    page.poll(lambda: "POST orders/<int:order_id>/pay" in page.text(".field-label"))
    for shown in ("POST orders/<int:order_id>/pay (pid 96 on web-3, MainThread)", "waits", "granted"):
        assert shown in page.text("#heldlock_form")
    assert len(page.texts(".field-waiters li")) == 3
    page.resize(1440, 1120)
    picture("lock")
    page.resize(400, 1900, phone=True)
    assert page.run("document.documentElement.scrollWidth") <= 400
    page.resize(1440, 1120)
    left = json.loads(page.run("JSON.stringify(document.querySelector('.field-left .distlock-seconds').innerText)"))
    page.poll(lambda: page.text(".field-left .distlock-seconds") != left)


def test_all_that_a_host_holds_is_released(page, backend):
    for number in (1, 2):
        hold(backend, f"order:{number}", host="web-1")
    hold(locks["batch"], "import:1", host="web-1", ago=5)
    hold(backend, "order:3", host="web-2")
    page.open(page.address)
    page.run("document.querySelector(\"#changelist-filter a[href='?host=web-1']\").click()")
    page.poll(lambda: page.texts(NAMES) == ["order:1", "order:2", "import:1"])
    page.click(checkbox("order:1"))
    page.run("document.querySelector('select[name=action]').value = 'release_hosts'")
    page.click(RUN)
    page.until(f"document.querySelector('{CONFIRM}') !== null && document.title.includes('web-1')")
    assert "Release these 3 locks?" in page.text("#content")
    page.resize(400, 800, phone=True)
    page.click(CONFIRM)
    page.poll(lambda: "Released 3 locks: " in page.text(".messagelist"))
    assert (locked_names(backend), locked_names(locks["batch"])) == (["order:3"], [])


def test_a_click_is_not_lost_to_a_refresh_between_press_and_release(page, backend):
    hold(backend, "order:1")
    page.open(page.address)
    hold(backend, "order:2")
    place = page.place_of(checkbox("order:1"))
    page.mouse("mousePressed", *place)
    page.until("performance.getEntriesByType('resource').some((entry) => entry.initiatorType === 'fetch')")
    page.until("new Promise((resolve) => setTimeout(() => resolve(true), 300))")  # nothing is replaced in this time
    page.mouse("mouseReleased", *place)
    page.until(f"document.querySelector({json.dumps(checkbox('order:1'))}).checked")
    page.poll(lambda: "order:2" in page.texts(NAMES))
    assert page.run(f"document.querySelector({json.dumps(checkbox('order:1'))}).checked")


def test_a_list_that_takes_long_is_asked_for_less_often(page, backend, monkeypatch):
    hold(backend, "order:1")
    page.open(page.address)
    assert "refreshed every 5 s" in page.text(".distlock-refresh")
    slots = locks["batch"].slots
    monkeypatch.setattr(locks["batch"], "slots", lambda prefix="": time.sleep(2) or slots(prefix))
    page.poll(lambda: "refreshed every" in page.text(".distlock-refresh") and rest(page) >= 8, 2 * PATIENCE)
    monkeypatch.undo()


def rest(page) -> int:
    return int(page.text(".distlock-refresh").split()[-2])
