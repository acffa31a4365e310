"""How long a lock is held: without a bound unless one is set, told once when it is long, and bounded for responses."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import StreamingHttpResponse
from django.test import RequestFactory

from django_distlock import LockLost, State, adopt, distributed_lock, lock, locks
from django_distlock.core.renewal import Renewer
from django_distlock.signals import lock_held_long, lock_lost, lock_released
from django_distlock.testing import lose
from tests.support.stores import LOCMEM
from tests.support.tools import PATIENCE, eventually, on_stores

pytestmark = [pytest.mark.once, pytest.mark.seconds(0.5)]

TTL = 1.2  # seconds, of which a busy machine may take a part
TOLD = "held for longer than the LONG_HELD of 'default'"


@pytest.fixture
def configured(backend, settings):
    """Gives the entry of the alias further keys."""

    def configured(**keys):
        settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], **keys}}
        return locks["default"]

    yield configured
    locks.close()


@pytest.fixture
def told():
    """What ``lock_held_long`` was sent with."""
    told = []

    def note(signal, sender, **about):
        told.append(about)

    lock_held_long.connect(note)
    yield told
    lock_held_long.disconnect(note)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if TOLD in record.getMessage()]


class TestLongHeld:
    @on_stores("redis", "locmem")
    def test_it_is_told_once(self, configured, told, caplog):
        backend = configured(LONG_HELD=0.2)
        with lock("name", ttl=TTL, label="nightly") as lease:
            eventually(lambda: told)
            time.sleep(TTL)
            assert lease.state is State.HELD
        [about] = told
        assert 0.2 <= about.pop("held") < 20
        assert about == {"name": "name", "template": "name", "using": "default", "lease": lease}
        [text] = warnings(caplog)
        assert text.startswith("Lock 'name' is held for longer than the LONG_HELD of 'default', 0.2 s: for ")
        assert "by nightly (pid " in text
        assert backend.long_held == 0.2

    def test_in_tasks(self, configured, told, caplog):
        async def main():
            async with lock("name") as lease:
                await asyncio.to_thread(eventually, lambda: told)
                return lease

        configured(LONG_HELD=0.1)
        lease = asyncio.run(main())
        assert [about["lease"] for about in told] == [lease]
        assert len(warnings(caplog)) == 1

    def test_also_where_it_is_not_renewed(self, configured, told):
        configured(LONG_HELD=0.1)
        with lock("name", ttl=60, renew=False):
            eventually(lambda: told)

    def test_many_are_told_in_one_line(self, configured, told, caplog, monkeypatch):
        """They became long while the thread that tells had something else to do."""
        backend, begun, go_on = configured(LONG_HELD=1), threading.Event(), threading.Event()
        renew = backend.renew

        def hang(wanted, *, timeout=None):
            begun.set()
            go_on.wait(PATIENCE)
            return renew(wanted, timeout=timeout)

        monkeypatch.setattr(backend, "renew", hang)
        mutexes = [lock(f"name:{number}", ttl=60) for number in range(10)]
        with lock("first", ttl=0.3, on_lost="log"):
            assert begun.wait(PATIENCE)
            for mutex in mutexes:
                assert mutex.acquire()
            time.sleep(1.1)
            go_on.set()
            eventually(lambda: len(told) == 10)
        for mutex in mutexes:
            mutex.release()
        assert {about["name"] for about in told} == {f"name:{number}" for number in range(10)}
        assert len(warnings(caplog)) <= 2

    def test_whoever_adopts_it_tells_for_the_time_since_the_grant(self, configured, told):
        configured(LONG_HELD=0.4)
        with lock("name") as first:
            time.sleep(0.2)
            text = first.detach()
        with adopt(text) as lease:
            eventually(lambda: told)
        assert [about["lease"] for about in told] == [lease]
        assert told[0]["held"] >= 0.4

    def test_one_that_was_released_or_lost_is_not_told(self, configured, told, caplog):
        configured(LONG_HELD=0.3)
        with lock("released"):
            pass
        with lock("resting", min_hold=30):
            pass
        with pytest.raises(LockLost), lock("lost") as lease:
            lose(lease)
        with lock("other"):
            eventually(lambda: told)
        assert [about["name"] for about in told] == ["other"]
        assert len(warnings(caplog)) == 1

    def test_none_tells_nothing(self, configured, told, caplog):
        configured(LONG_HELD=None)
        with lock("name"):
            time.sleep(0.5)
        assert told == []
        assert warnings(caplog) == []

    def test_it_keeps_no_thread_busy(self, configured, told, monkeypatch):
        calls, renew = [], Renewer.renew
        monkeypatch.setattr(Renewer, "renew", lambda renewer: calls.append(1) or renew(renewer))
        configured(LONG_HELD=0.05)
        with lock("name", ttl=60):
            eventually(lambda: told)
            time.sleep(0.3)
        assert 1 <= len(calls) < 10


def streaming(request=None):
    return StreamingHttpResponse(iter([b"text"]))


@pytest.mark.usefixtures("keep_connections")
class TestResponses:
    @pytest.mark.seconds(3)
    def test_they_have_a_bound_of_their_own(self, configured, caplog):
        lost = []

        def note(reason, **_):
            lost.append(reason)

        configured(RESPONSE_MAX_HOLD=3)
        lock_lost.connect(note)
        try:
            response = distributed_lock("name", ttl=2)(streaming)(RequestFactory().get("/"))
            eventually(lambda: lost)
            eventually(lambda: not lock("name").locked())
        finally:
            lock_lost.disconnect(note)
        response.close()
        assert "Lock 'name' reaches the RESPONSE_MAX_HOLD of 'default', 3 s, and is no longer renewed" in caplog.text

    def test_which_counts_from_the_end_of_the_view(self, configured):
        def view(request):
            time.sleep(1.5)
            return streaming()

        configured(RESPONSE_MAX_HOLD=2)
        response = distributed_lock("name", ttl=TTL)(view)(RequestFactory().get("/"))
        time.sleep(TTL)
        assert lock("name").locked()
        response.close()
        assert not lock("name").locked()

    def test_the_view_itself_has_none(self, configured):
        def view(request):
            time.sleep(1.5 * TTL)
            assert lock("name").locked()
            return streaming()

        configured(RESPONSE_MAX_HOLD=0.2)
        distributed_lock("name", ttl=TTL)(view)(RequestFactory().get("/")).close()

    @pytest.mark.seconds(3)
    def test_max_hold_counts_as_well(self, configured, caplog):
        configured(RESPONSE_MAX_HOLD=60)
        response = distributed_lock("name", ttl=2, max_hold=3)(streaming)(RequestFactory().get("/"))
        eventually(lambda: not lock("name").locked())
        response.close()
        assert "reaches its max_hold of 3 s" in caplog.text

    def test_none_is_no_bound(self, configured):
        configured(RESPONSE_MAX_HOLD=None)
        response = distributed_lock("name", ttl=TTL)(streaming)(RequestFactory().get("/"))
        time.sleep(1.5 * TTL)
        assert lock("name").locked()
        response.close()

    def test_who_is_in_around_the_view_has_none(self, configured):
        released = []

        def note(lease, **_):
            released.append(lease)

        configured(RESPONSE_MAX_HOLD=0.2)
        lock_released.connect(note)
        with lock("name", ttl=TTL, reentrant=True) as lease:
            response = distributed_lock("name", ttl=TTL, reentrant=True)(streaming)(RequestFactory().get("/"))
            time.sleep(1.5 * TTL)
            lease.ensure_held()
        eventually(lambda: not lock("name").locked())
        lock_released.disconnect(note)
        assert released == []  # the response held it on, until its time was over
        response.close()

    @pytest.mark.django_db(transaction=True)
    def test_nor_has_a_transaction_that_needs_the_lock_while_the_response_is_open(self, configured):
        configured(RESPONSE_MAX_HOLD=0.2)
        with transaction.atomic():
            response = distributed_lock("name", ttl=TTL)(streaming)(RequestFactory().get("/"))
            time.sleep(1.5 * TTL)
            assert lock("name").locked()
        eventually(lambda: not lock("name").locked())
        response.close()

    @pytest.mark.django_db(transaction=True)
    def test_a_lock_that_a_transaction_holds_on_is_not_bound_by_a_response_that_is_done(self, configured):
        configured(RESPONSE_MAX_HOLD=0.4)
        with transaction.atomic():
            response = distributed_lock("name", ttl=TTL)(streaming)(RequestFactory().get("/"))
            response.close()
            time.sleep(1.5 * TTL)
            assert lock("name").locked()
        assert not lock("name").locked()


@pytest.mark.parametrize("key", ["LONG_HELD", "RESPONSE_MAX_HOLD"])
class TestSettings:
    def test_an_hour_unless_told(self, settings, key):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        assert getattr(locks["default"], key.lower()) == 3600

    @pytest.mark.parametrize("value", [0, -1, "3600", True, float("nan"), float("inf"), []])
    def test_wrong_values_say_what_to_change(self, settings, key, value):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, key: value}}
        with pytest.raises(ImproperlyConfigured) as caught:
            locks["default"]
        assert f"is not usable: {key} is {value!r}. It is the number of seconds" in str(caught.value)

    def test_they_are_no_options_of_a_lock(self, key):
        with pytest.raises(TypeError, match="A lock has no option"):
            lock("name", **{key.lower(): 60})


def test_a_warning_is_all_that_happens(configured, caplog):
    configured(LONG_HELD=0.1)
    with lock("name", ttl=TTL) as lease:
        eventually(lambda: warnings(caplog))
        [record] = [record for record in caplog.records if TOLD in record.getMessage()]
        assert record.levelno == logging.WARNING
        time.sleep(1.5 * TTL)
        lease.ensure_held()
