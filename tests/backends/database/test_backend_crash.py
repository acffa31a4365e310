"""What a crash of PostgreSQL takes from nobody: leases that were granted, confirmed or renewed, and their numbers.

A lease that was taken by the message may go before it is confirmed. Its holder learns of it, and nobody else has it.
"""

from __future__ import annotations

import pytest

from django_distlock import State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.types import Grant, Slot
from tests.support.tools import PATIENCE, eventually, lock_request
from tests.support.waiting import Waiter

pytestmark = pytest.mark.slow

ROUNDS = 3  # the server writes by itself what nobody waits for, sooner or later


def crash(server, backend):
    server.crash()
    server.start()
    backend.close()


def acquire(backend, request):
    grant = backend.acquire(request, queue=True)
    assert isinstance(grant, Grant)
    return grant


def free(backend, request):
    before = lock_request(request.name, ttl=60.0)
    acquire(backend, before)
    assert backend.release(before)


def handed_over(backend, request):
    before = lock_request(request.name, ttl=60.0)
    acquire(backend, before)
    assert not isinstance(backend.acquire(request, queue=True), Grant)
    assert backend.release(before)


def never_used(backend, request):
    pass


@pytest.mark.parametrize("prepare", [never_used, free, handed_over])
@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_a_lease_is_there_afterwards(postgres, postgres_locks, prepare, round_number):
    request = lock_request("name", ttl=60.0)
    prepare(postgres_locks, request)
    grant = acquire(postgres_locks, request)
    crash(postgres, postgres_locks)
    assert postgres_locks.look(["name"])[0][0].token == request.token
    assert postgres_locks.renew([(request, 600.0)]) == [True]
    crash(postgres, postgres_locks)
    assert postgres_locks.remaining([Slot("name")])[0] > 500
    assert postgres_locks.release(request)
    assert acquire(postgres_locks, lock_request("name", ttl=60.0)).fence > grant.fence


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_who_has_it_by_the_message_alone_is_alone(postgres, postgres_locks, settings, way, round_number):
    settings.DISTRIBUTED_LOCKS = dict.fromkeys(("default", "other"), settings.DISTRIBUTED_LOCKS["default"])
    before, rival = lock("name", using="other", ttl=60), lock("name", using="other")
    assert before.acquire()
    waiter = Waiter(way, ttl=60, on_lost="log")
    eventually(lambda: locks["other"].count_waiters(["name"]) == [1])
    before.release()
    lease = waiter.gets_in()
    postgres.crash()
    postgres.start()
    while lease.is_held and lease.remaining < Timing.grant_ttl:
        assert not rival.acquire(blocking=False)
    eventually(lambda: lease.state in (State.HELD, State.LOST))
    waiter.leaves()
    rival.force_release()  # what the crash has brought back
    with lock("name", using="other", wait=PATIENCE) as following:
        assert following.fence > lease.fence


def test_a_release_that_was_lost_can_be_repeated(postgres, postgres_locks):
    """The lease is as it was then, unless the release was written just in time, and its token alone ends it."""
    request = lock_request("name", ttl=60.0)
    acquire(postgres_locks, request)
    assert postgres_locks.release(request)
    crash(postgres, postgres_locks)
    [leases] = postgres_locks.look(["name"])
    assert [info.token for info in leases] in ([], [request.token])
    assert postgres_locks.release(request) is bool(leases)
    acquire(postgres_locks, lock_request("name", ttl=60.0))
