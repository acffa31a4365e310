"""A row that a newer version of the package wrote stays as it is while anything in it counts; each call says so."""

from __future__ import annotations

import pytest

from django_distlock import LockBackendError, lock
from django_distlock.backends.common.state import CLAIMED, FREE, HELD, RECORD_LENGTH, end_of_record
from django_distlock.types import Grant, LockInfo, new_token
from tests.support.databases import TABLE, row_key, run_in, statements_for
from tests.support.tools import PATIENCE, lock_request

TOLD = "The row 'lock:name' of distlock_lock was written by a newer version of django-distlock; bring all processes"
HOUR = 3_600_000_000


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def backend(request):
    backend = request.getfixturevalue(f"{request.param}_locks")
    yield backend
    put(backend, format=1)  # so that what is given back in the background is


def put(backend, name="name", **columns):
    """Change columns of the row."""

    def write(connection):
        binary = connection.Database.Binary(row_key(backend, name))
        with connection.cursor() as cursor:
            assigned = ", ".join(f"{column} = %s" for column in columns)
            cursor.execute(f"UPDATE {TABLE} SET {assigned} WHERE name = %s", [*columns.values(), binary])

    run_in(backend, write)


def row_of(backend, name="name"):
    def read(connection):
        binary = connection.Database.Binary(row_key(backend, name))
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {TABLE} WHERE name = %s", [binary])
            [row] = cursor.fetchall()
            return dict(zip([column[0] for column in cursor.description], row, strict=True))

    return run_in(backend, read)


def refusal_of(call):
    with pytest.raises(LockBackendError, match=TOLD) as caught:
        call()
    assert caught.value.is_final


def assert_refused(backend, request, *waiters):
    """By each call with the request, and with requests that have a place."""
    before = row_of(backend)
    for waiter in waiters:
        refusal_of(lambda waiter=waiter: backend.acquire(waiter, queue=True))
        refusal_of(lambda waiter=waiter: backend.release(waiter))
    refusal_of(lambda: backend.acquire(lock_request(), queue=False))
    refusal_of(lambda: backend.acquire(lock_request(), queue=True))
    refusal_of(lambda: backend.acquire(lock_request(ttl=0.1), queue=False))
    refusal_of(lambda: lock("name", wait=60).acquire())
    refusal_of(lambda: backend.acquire(request, queue=False))
    refusal_of(lambda: backend.renew([(request, 60.0)]))
    refusal_of(lambda: backend.release(request))
    refusal_of(lambda: backend.release(request, 5.0))
    refusal_of(lambda: backend.release(request, force=True))
    request.in_doubt = True  # so that the release retires its token
    refusal_of(lambda: backend.release(request))
    assert row_of(backend) == before


def test_a_newer_lease(backend, caplog, monkeypatch):
    monkeypatch.setattr(backend.timing, "waiter_expires_after", PATIENCE)
    mine, waiter = lock_request(ttl=60), lock_request()
    backend.acquire(mine, queue=False)
    backend.acquire(waiter, queue=True)
    put(backend, format=2)
    assert backend.count_waiters(["name"]) == [None]  # first, since the place of one that does not look again lapses
    assert TOLD in caplog.text
    assert_refused(backend, mine, waiter)
    caplog.clear()
    assert backend.look(["name"]) == [[]]
    assert list(backend.held()) == []
    assert TOLD in caplog.text


def test_a_newer_grant_that_is_not_taken_yet(backend):
    holder, waiter = lock_request(), lock_request()
    backend.acquire(holder, queue=False)
    backend.acquire(waiter, queue=True)
    assert backend.release(holder)
    assert row_of(backend)["state"] == CLAIMED
    put(backend, format=2, expires=row_of(backend)["expires"] + HOUR)
    assert_refused(backend, holder, waiter)


@pytest.mark.parametrize("state", [HELD, FREE])
def test_a_newer_queue_of_a_lock_that_is_not_held(backend, state):
    mine, waiter = lock_request(), lock_request()
    backend.acquire(mine, queue=False)
    backend.acquire(waiter, queue=True)
    row = row_of(backend)
    put(backend, format=2, state=state, expires=1, careful_until=row["careful_until"] + HOUR)
    assert_refused(backend, mine, waiter)


def test_of_a_newer_row_that_is_over_the_number_alone_counts(backend):
    """Its waiters and tokens do not, in whatever way they are written."""
    mine = lock_request()
    backend.acquire(mine, queue=False)
    number = row_of(backend)["fence"] + HOUR
    put(backend, format=2, expires=1, careful_until=1, fence=number, state=HELD, waiters="new", retired="new")
    assert backend.look(["name"]) == [[]]
    assert backend.count_waiters(["name"]) == [0]
    assert backend.renew([(mine, 60.0)]) == [False]
    assert backend.release(mine) is False
    assert backend.acquire(lock_request(), queue=False).fence == number + 1
    row = row_of(backend)
    assert (row["format"], row["waiters"], row["retired"]) == (1, "", "")
    put(backend, format=2, expires=1, careful_until=1, fence=1)
    assert backend.prune(0) == 1


def test_others_are_renewed_beside_it(backend, caplog):
    """What became of its lease is unknown."""
    wanted = [(lock_request(name), 60.0) for name in ("name", "other", "gone")]
    for request, _ in wanted[:2]:
        backend.acquire(request, queue=False)
    put(backend, format=2)
    assert backend.renew(wanted) == [None, True, False]
    assert TOLD in caplog.text


def test_a_waiter_that_looks_by_itself_is_told(backend):
    holder, waiter = lock_request(ttl=60), lock_request()
    backend.acquire(holder, queue=False)
    backend.acquire(waiter, queue=True)
    position = lambda: run_in(  # noqa: E731
        backend, lambda it: statements_for(backend).position(it, row_key(backend, "name"), waiter.token, 1)
    )
    assert not position().is_turn
    put(backend, format=2)
    assert position().is_turn
    refusal_of(lambda: backend.acquire(waiter, queue=True))


@pytest.mark.parametrize("number", [0, -1, 10])
def test_what_no_version_wrote(backend, number):
    backend.acquire(lock_request(), queue=False)
    put(backend, format=number)
    with pytest.raises(LockBackendError, match="holds something that is no lock. Delete it"):
        backend.acquire(lock_request(), queue=True)


def test_the_entry_of_a_waiter(backend):
    """It has room for a thread, which stays what it is."""
    holder, first, second = lock_request(ttl=60), lock_request(), lock_request()
    backend.acquire(holder, queue=False)
    backend.acquire(first, queue=True)
    text = row_of(backend)["waiters"]
    assert text.endswith(first.token + end_of_record(first.inbox))
    assert text.endswith(f"0001{'':16}")
    assert len(text) == RECORD_LENGTH
    backend.acquire(second, queue=True)
    filled = row_of(backend)["waiters"].replace(f"0001{'':16}", f"0001{'7f00deadbeef':16}")
    put(backend, waiters=filled)
    stranger = lock_request()
    stranger.in_doubt = True
    backend.release(stranger)  # which is decided by the algorithm on rows, and writes the queue anew
    assert row_of(backend)["waiters"] == filled
    assert isinstance(backend.acquire(second, queue=True), LockInfo)  # a look, by the fast path where there is one
    assert backend.release(holder)
    assert isinstance(backend.acquire(first, queue=True), Grant)
    assert row_of(backend)["waiters"].startswith(filled[RECORD_LENGTH : RECORD_LENGTH + 16])


def test_a_token_and_an_inbox_fill_their_room():
    assert len(new_token()) + len(end_of_record("x" * 12)) == RECORD_LENGTH - 32
