"""What a holder believes of its lease, and how it waits for its end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from django_distlock import LockLost, lock
from django_distlock.testing import lose, store_down
from tests.support.inside import waiters_for_the_end_of
from tests.support.leases import wait_for_renewal
from tests.support.tools import PATIENCE, backend_on, eventually, on_stores

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.usefixtures("backend")


class Waiter(threading.Thread):
    """Waits for the end of a lease, and keeps the answer."""

    def __init__(self, lease):
        super().__init__(daemon=True)
        count = waiters_for_the_end_of(lease)
        self.lease, self.answer = lease, None
        self.start()
        eventually(lambda: waiters_for_the_end_of(lease) > count)

    def run(self):
        self.answer = self.lease.wait_lost()


@on_each_store
def test_while_it_is_held_it_is_waited_for_until_the_timeout(calls):
    with lock("name", ttl=60) as lease:
        began = time.monotonic()
        assert calls(lease).wait_lost(0.2) is False
        assert time.monotonic() - began >= 0.19
        assert calls(lease).wait_lost(timedelta(milliseconds=1)) is False
        assert calls(lease).wait_lost(0) is False
        assert not waiters_for_the_end_of(lease)


def test_renewals_do_not_end_the_wait():
    with lock("name", ttl=6) as lease:
        waiter = Waiter(lease)
        wait_for_renewal(lease)
        wait_for_renewal(lease)
        assert waiter.is_alive()
    waiter.join(PATIENCE)
    assert waiter.answer is True


def test_all_who_wait_are_told_of_a_loss():
    with pytest.raises(LockLost), lock("name", ttl=60) as lease:
        waiters = [Waiter(lease) for _ in range(3)]
        lose(lease)
        for waiter in waiters:
            waiter.join(PATIENCE)
            assert waiter.answer is True


def test_after_its_end_nobody_waits(calls):
    with lock("name") as lease:
        pass
    assert calls(lease).wait_lost() is True


@on_each_store
def test_a_lease_that_is_not_renewed_ends_by_the_local_clock(calls):
    with pytest.raises(LockLost), lock("name", ttl=0.3, renew=False) as lease:
        assert calls(lease).wait_lost(PATIENCE) is True


def test_who_detaches_it_has_it_no_more():
    with lock("name", ttl=60) as lease:
        waiter = Waiter(lease)
        lease.detach()
        waiter.join(PATIENCE)
        assert waiter.answer is True


def test_a_body_that_runs_without_its_lock_is_to_stop_at_no_time_of_its_own(calls):
    with store_down(), lock("name", on_unavailable="run") as lease:
        assert calls(lease).wait_lost(0.05) is False
        waiter = Waiter(lease)
    waiter.join(PATIENCE)
    assert waiter.answer is True
