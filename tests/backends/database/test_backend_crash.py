"""What a crash of PostgreSQL takes from nobody: leases that were granted, confirmed or renewed, and their numbers."""

from __future__ import annotations

import pytest

from django_distlock.types import Grant, Slot
from tests.support.tools import lock_request

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
