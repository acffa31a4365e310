"""What signals tell: which template, and how long it took."""

from __future__ import annotations

import asyncio
import threading

import pytest
from django.http import StreamingHttpResponse

import django_distlock
from django_distlock import LockBackendError, LockLost, distributed_lock, lock, locks, signals
from django_distlock.core.holds import Holds
from django_distlock.testing import lose, store_down
from tests.support.leases import hold_elsewhere
from tests.support.tools import backend_on, eventually, locked_names, on_stores

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "sqlite")

pytestmark = pytest.mark.usefixtures("backend")

SIGNALS = [name for name in vars(signals) if name.startswith("lock_")]


@pytest.fixture
def heard():
    """What the signals about the order have carried since, by their names. Other tests may have left locks."""
    news = {}

    def receiver(name):
        return lambda **about: about["name"].startswith("order:") and news.update({name: about})

    receivers = {name: receiver(name) for name in SIGNALS}
    for name, one in receivers.items():
        getattr(signals, name).connect(one)
    yield news
    for name, one in receivers.items():
        getattr(signals, name).disconnect(one)


def test_the_template_and_how_long_it_took(calls, heard):
    handle = lock("order:{}", 42)
    calls(handle).acquire()
    assert calls(lock("order:{}", 42)).acquire(timeout=0.05) is False
    calls(handle).release()
    with pytest.raises(LockLost), lock("order:{}", 42) as lease:
        lose(lease)
    with store_down(), pytest.raises(LockBackendError):
        calls(lock("order:{}", 42)).acquire()
    eventually(lambda: "lock_lost" in heard)
    assert {name: about["template"] for name, about in heard.items()} == dict.fromkeys(
        ["lock_acquired", "lock_busy", "lock_released", "lock_lost", "lock_unavailable"], "order:{}"
    )
    assert heard["lock_busy"]["waited"] >= 0.05
    for name, key in [
        ("lock_acquired", "waited"), ("lock_unavailable", "waited"), ("lock_released", "held"), ("lock_lost", "held"),
    ]:  # fmt: skip
        assert 0 <= heard[name][key] < 60


def test_a_text_is_its_own_template(calls, heard):
    handle = lock("order:all")
    calls(handle).acquire()
    calls(handle).release()
    assert {about["template"] for about in heard.values()} == {"order:all"}


@on_each_store
def test_lists_tell_the_template_where_this_process_holds_the_lock(calls):
    hold_elsewhere("order:7")
    with lock("order:{}", 42), lock("nightly"):
        sync = {info.name: info.template for info in locks["default"].held()}

        async def listed():
            return {info.name: info.template async for info in locks["default"].aheld()}

        assert sync == asyncio.run(listed()) == {"order:42": "order:{}", "nightly": "nightly", "order:7": ""}


def test_forced_tells_it_where_this_process_holds_the_lock(calls, heard):
    with lock("order:{}", 42, on_lost="log"):
        assert calls(lock("order:42")).force_release(by="us")
        mine = heard.pop("lock_forced")
    hold_elsewhere("order:7")
    assert calls(lock("order:7")).force_release(by="us")
    others = heard.pop("lock_forced")
    assert (mine["template"], others["template"]) == ("order:{}", "order:7")
    assert (mine["info"].template, others["info"].template) == ("order:{}", "")


def test_a_release_in_the_background_is_told_when_the_store_has_made_it(calls, heard):
    handle = lock("order:{}", 42)
    calls(handle).acquire()
    lease = handle.lease
    with store_down():
        with pytest.raises(LockBackendError):
            calls(handle).release()
        assert "lock_released" not in heard
    released = eventually(lambda: heard.get("lock_released"))
    assert (released["lease"], released["template"]) == (lease, "order:{}")
    assert 0 <= released["held"] < 60


def test_a_response_that_is_closed_in_an_event_loop_tells_the_release(heard, rf):
    @distributed_lock("order:{pk}")
    async def view(request, pk):
        return StreamingHttpResponse(["part"])

    async def respond():
        (await view(rf.get("/"), pk=42)).close()

    asyncio.run(respond())
    assert eventually(lambda: heard.get("lock_released"))["lease"] is heard["lock_acquired"]["lease"]


def test_an_adopted_lease_whose_with_is_interrupted_as_it_begins_tells_its_release(calls, heard, monkeypatch):
    """Its acquisition was told, by the process that detached it."""

    def interrupted(*_):
        raise KeyboardInterrupt

    handle = lock("order:{}", 42)
    calls(handle).acquire()
    adopted = calls(django_distlock).adopt(handle.lease.detach())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Holds, "enter", interrupted)
        adopted.__enter__()
    assert eventually(lambda: heard.get("lock_released"))["lease"] is adopted


def test_of_a_lease_that_nobody_learned_of_no_release_is_told(heard, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    def receive(name, **_):
        released.append(name)

    released = []
    signals.lock_released.connect(receive)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Holds, "enter", interrupted)
        lock("order:{}", 42).acquire()
    eventually(lambda: not locked_names(locks["default"]))
    handle = lock("order:{}", 43)
    handle.acquire()
    with store_down(), pytest.raises(LockBackendError):
        handle.release()
    eventually(lambda: "order:43" in released)
    assert released == ["order:43"]  # they are told in order
    assert heard["lock_acquired"]["name"] == "order:43"


@on_each_store
def test_renewed(calls, heard):
    with lock("order:{}", 42, ttl=3):
        assert eventually(lambda: heard.get("lock_renewed"))["template"] == "order:{}"
    with lock("order:{}", 7, renew=False) as lease:
        heard.clear()
        calls(lease).renew(ttl=60)
        assert eventually(lambda: heard.get("lock_renewed"))["lease"] is lease


@pytest.fixture
def connected():
    """Connects a receiver that never waits to two signals."""
    both = signals.lock_acquired, signals.lock_released

    def connect(receiver):
        for signal in both:
            signals.connect_prompt(signal, receiver)
            signals.connect_prompt(signal, receiver)  # once is enough
        used.append(receiver)

    used = []
    yield connect
    for receiver in used:
        for signal in both:
            signals.disconnect_prompt(signal, receiver)
            signals.disconnect_prompt(signal, receiver)


async def held():
    async with lock("order:42"):
        return threading.current_thread()


def test_a_receiver_that_never_waits_is_called_in_the_event_loop(connected):
    threads = []
    connected(lambda **_: threads.append(threading.current_thread()))
    loop = asyncio.run(held())
    assert threads == [loop, loop]


def test_another_receiver_is_waited_for_in_a_thread(connected):
    threads = []
    connected(lambda **_: threads.append("prompt"))

    def slow(**_):
        threads.append(threading.current_thread())

    signals.lock_acquired.connect(slow)
    try:
        loop = asyncio.run(held())
    finally:
        signals.lock_acquired.disconnect(slow)
    assert threads.count("prompt") == 2
    [thread] = [one for one in threads if one != "prompt"]
    assert thread is not loop


def test_a_receiver_is_disconnected_once(connected):
    called = []
    connected(lambda **_: called.append("first"))
    asyncio.run(held())
    assert called == ["first", "first"]
