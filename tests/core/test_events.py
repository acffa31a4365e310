"""What records of the log tell programs."""

from __future__ import annotations

import gc
import json

import pytest

from django_distlock import distributed_lock, lock, locks
from django_distlock.testing import held_here, lose, store_down
from tests.support.leases import hold_elsewhere
from tests.support.tools import backend_on, eventually, on_stores

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "sqlite")

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def told(caplog):
    """What the last record of an event tells, when there is one."""
    caplog.set_level("DEBUG", "django_distlock")

    def find(event):
        def found():
            records = [record.distlock for record in caplog.records if record.name == "django_distlock"]
            return next((about for about in reversed(records) if about["event"] == event), None)

        return eventually(found)

    return find


def test_a_lease(told):
    with lock("order:{}", 42, on_lost="log") as lease:
        lose(lease)
    about = told("lost")
    assert json.loads(json.dumps(about)) == about
    assert 0 < about.pop("held") < 60
    assert about.pop("reason")
    assert about == {
        "event": "lost", "alias": "default", "name": "order:42", "template": "order:{}", "fence": lease.fence,
    }  # fmt: skip


@on_each_store
def test_a_request(told):
    with store_down(), lock("order:{}", 42, on_unavailable="run"):
        about = told("runs-without-lock")
    assert 0 <= about.pop("waited") < 60
    assert about == {"event": "runs-without-lock", "alias": "default", "name": "order:42", "template": "order:{}"}


def test_the_end_of_with(told):
    with pytest.raises(ZeroDivisionError), lock("order:{}", 42) as lease:
        lose(lease)
        1 / 0  # noqa: B018 - it raises
    about = told("end-failed")
    assert about == {"event": "end-failed", "alias": "default", "name": "order:42", "template": "order:{}"}


@on_each_store
def test_what_is_freed_by_force(told):
    with lock("order:{}", 42, on_lost="log") as lease:
        assert lock("order:42").force_release(by="us")
        about = told("forced")
    assert about == {
        "event": "forced", "alias": "default", "name": "order:42", "template": "order:{}", "fence": lease.fence,
    }  # fmt: skip


def test_a_handle_that_is_dropped(told):
    handle = lock("order:{}", 42, ttl=0.5)
    handle.acquire()
    with pytest.warns(ResourceWarning):
        del handle
        gc.collect()
    assert told("handle-dropped")["template"] == "order:{}"
    eventually(lambda: not held_here())  # other tests of this process would meet it


def test_several_leases_of_which_one_is_named(told, settings):
    entry = settings.DISTRIBUTED_LOCKS["default"]
    settings.DISTRIBUTED_LOCKS = {"default": {**entry, "LONG_HELD": 0.05}}
    with lock("order:{}", 1), lock("order:{}", 2):
        about = told("held-long")
    assert about["template"] == "order:{}"
    assert about["held"] > 0.05
    assert about["count"] >= 1


def test_a_call_that_is_skipped(told):
    @distributed_lock("order:{pk}", on_busy="skip")
    def pack(pk):
        pytest.fail("ran")

    hold_elsewhere("order:42")
    pack(42)
    assert told("skipped") == {"event": "skipped", "alias": "default", "template": "order:{}", "reason": "busy"}


def test_no_record_tells_a_token(caplog):
    caplog.set_level("DEBUG", "django_distlock")
    with lock("order:{}", 42, on_lost="log") as lease:
        lose(lease)
    assert list(locks["default"].held()) == []
    assert lease.token not in "".join(repr(vars(record)) for record in caplog.records)
