"""Many leases of one process: in which order they are renewed, and what is logged of them."""

from __future__ import annotations

import pytest

from django_distlock import LockBackendError, LockLost, State, lock
from django_distlock.core import renewal
from django_distlock.utils.clock import clock
from tests.support.inside import before_a_loss_is_told, deadline_of, due_of, end_at, make_due, renew_due, worker_of
from tests.support.tools import renewer_of


class Store:
    """Notes what is renewed together, and fails where it is told to."""

    def __init__(self, backend):
        self._renew = backend.renew
        self.batches = []
        self.fails = lambda names: False
        self.after = lambda: None

    def renew(self, wanted, *, timeout=None):
        names = [lock_request.name for lock_request, _ in wanted]
        self.batches.append(names)
        if self.fails(names):
            raise LockBackendError("the store is away")
        renewed = self._renew(wanted, timeout=timeout)
        self.after()
        return renewed


@pytest.fixture
def renewer(locmem_locks, monkeypatch):
    renewer = renewer_of(locmem_locks)
    monkeypatch.setattr(worker_of(renewer), "_work", lambda: None)  # the test does it
    return renewer


@pytest.fixture
def store(locmem_locks, monkeypatch):
    store = Store(locmem_locks)
    monkeypatch.setattr(locmem_locks, "renew", store.renew)
    return store


@pytest.fixture
def hold(renewer):
    handles = []

    def held(name, ttl):
        handles.append(lock(name, ttl=ttl, on_lost="log"))
        lease = handles[-1].__enter__()
        make_due(lease, clock())
        return lease

    yield held
    for handle in handles:
        handle.__exit__(None, None, None)


def test_many_are_renewed_in_batches_and_what_comes_due_meanwhile_between_them(renewer, store, hold, monkeypatch):
    monkeypatch.setattr(renewal, "BATCH", 10)
    for number in range(35):
        hold(f"long {number}", 600)
    short = hold("short", 60)
    store.after = lambda: make_due(short, clock())
    renew_due(renewer)
    assert store.batches[0] == ["short"]
    longs = [batch for batch in store.batches if "short" not in batch]
    assert [len(batch) for batch in longs] == [10, 10, 10, 5]
    assert len({name for batch in longs for name in batch}) == 35
    assert store.batches[:8:2] == [["short"]] * 4


def test_one_that_the_store_is_too_slow_for_does_not_cost_others_their_renewal(renewer, store, hold):
    short, long = hold("short", 1), hold("long", 60)
    first = deadline_of(long)
    store.fails = lambda names: "short" in names
    renew_due(renewer)
    assert (short.state, long.state) == ("unknown", "held")
    assert deadline_of(long) > first
    assert store.batches == [["short"], ["long"]]


def test_those_that_were_taken_together_are_not_due_at_the_same_moment(renewer, hold):
    leases = [hold(f"name {number}", 60) for number in range(20)]
    renew_due(renewer)
    dues = [due_of(lease) - clock() for lease in leases]
    assert max(dues) - min(dues) > 0.1
    assert all(15 < due <= 20 for due in dues)


def test_a_store_that_is_away_costs_two_lines(renewer, store, hold, caplog):
    leases = [hold(f"name {number}", 60 - number) for number in range(20)]
    store.fails = lambda names: True
    renew_due(renewer)
    renew_due(renewer)
    for lease in leases:
        end_at(lease, clock())
    renew_due(renewer)
    doubt, loss = [record.getMessage() for record in caplog.records if "name" in record.getMessage()]
    assert doubt.startswith("Renewal of 20 locks of 'default' failed; the first of them, 'name 19', is lost in ")
    assert loss.startswith("20 locks of 'default' were lost. The one that was held longest, 'name 0', was lost: ")
    assert {lease.state for lease in leases} == {"lost"}


def test_a_lease_that_is_about_to_be_told_as_lost_is_lost(locmem_locks, renewer, hold, monkeypatch):
    """The renewer drops it, and says so in a second step."""
    lease = hold("name", 10.0)
    monkeypatch.setattr(locmem_locks, "renew", lambda wanted, **_: [False] * len(wanted))
    met = []

    def end_it():
        for call in (lease.renew, lease.detach, lease.release):
            with pytest.raises(LockLost):
                call()
            met.append(call)

    before_a_loss_is_told(monkeypatch, end_it)
    renew_due(renewer)
    assert len(met) == 3
    assert lease.state is State.LOST
