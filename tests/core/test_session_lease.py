"""A lease of a store with sessions ends with the session of its process at the latest."""

from __future__ import annotations

import pickle
from contextlib import suppress

import pytest

from django_distlock import LockError, LockLost, State
from django_distlock.core.lease import Lease
from django_distlock.core.session_lease import SessionLease
from django_distlock.grants import SessionGrant, StoreSession
from django_distlock.options import Terms
from django_distlock.types import current_execution
from django_distlock.utils.clock import clock
from tests.support.leases import deadline_of
from tests.support.tools import eventually, lock_request, renewer_of


@pytest.fixture
def session():
    session = StoreSession()
    session.until = clock() + 60
    return session


@pytest.fixture
def held(locmem_locks, session):
    """Makes leases on local memory, which hang on the session."""
    made, renewer = [], renewer_of(locmem_locks)

    def hold(name="name", ttl=30.0, granted_ttl=None, **options):
        request = lock_request(name, ttl=ttl)
        grant = locmem_locks.acquire(request, queue=False)
        grant = SessionGrant(grant.fence, grant.sent_at, ttl if granted_ttl is None else granted_ttl, session)
        lease = SessionLease(locmem_locks, request, grant, Terms(ttl=ttl, **options), renewer, current_execution())
        renewer.register(lease)
        made.append(lease)
        return lease

    yield hold
    for lease in made:
        with suppress(LockError):  # it was lost
            lease.release()


def test_its_own_ttl_ends_it(held):
    lease = held(ttl=30)
    assert 29 < lease.remaining < 30
    assert lease.ttl == 30


def test_so_does_the_end_of_its_session(held, session):
    lease = held(ttl=30)
    session.until = clock() + 5
    assert 4 < lease.remaining < 5
    session.until = clock() + 10  # it was confirmed
    assert 9 < lease.remaining < 10
    session.until = clock() - 1
    assert lease.state is State.LOST
    assert lease.remaining == 0.0
    with pytest.raises(LockLost):
        lease.ensure_held()


def test_it_is_unknown_while_the_store_is_not_reached(held, session):
    lease = held()
    session.is_suspended = True
    assert lease.state is State.UNKNOWN
    lease.ensure_held()  # it stands until its deadline
    session.is_suspended = False
    assert lease.state is State.HELD


def test_it_has_the_ttl_that_the_store_keeps(held):
    lease = held(ttl=30, granted_ttl=12.0)
    assert lease.ttl == 12.0


def test_it_is_renewed_by_the_ttl_that_it_has(held):
    """A third of which is less than a second here, and ten seconds of what was asked for."""
    lease = held(ttl=30, granted_ttl=1.0)
    before = deadline_of(lease)
    eventually(lambda: deadline_of(lease) > before + 0.1, 20)


def test_a_renewal_never_shortens_it(held):
    lease = held(ttl=30)
    before = deadline_of(lease)
    lease.renew(1.0)
    assert deadline_of(lease) >= before - 0.01


def test_one_that_is_not_renewed_is_looked_at_when_its_ttl_ends(held, session, locmem_locks):
    """Not when the session may end, which is confirmed before: its thread would look again and again."""
    session.until = clock() + 0.3
    lease = held(ttl=1.0, renew=False)
    session.until = clock() + 60
    eventually(lambda: lease.state is State.LOST)
    eventually(lambda: lease not in renewer_of(locmem_locks).leases())
    assert clock() < session.until


def test_a_store_may_tell_that_it_is_over(held, locmem_locks):
    lease = held()
    locmem_locks.on_loss(lease.token, "because")
    assert lease.state is State.LOST
    locmem_locks.on_loss(lease.token, "again")
    locmem_locks.on_loss("unknown", "because")


def test_it_cannot_be_copied(held):
    with pytest.raises(TypeError, match="belongs to the process that acquired it, and with that to its session"):
        pickle.dumps(held())


def test_other_stores_have_other_leases(locmem_locks):
    from django_distlock import lock

    with lock("name") as lease:
        assert type(lease) is Lease
