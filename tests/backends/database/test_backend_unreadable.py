"""Rows of the database backend that others have written to: each says so, and the rest goes on."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_distlock import LockBackendError
from django_distlock.backends.common.state import retired_from_text, waiters_from_text
from django_distlock.types import Grant
from tests.support.databases import TABLE, row_key, run_in, statements_for, write
from tests.support.tools import lock_request, locked_names

RECORD = "1700000000000000" * 2 + "f" * 26 + "inbox       "
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
    | st.sampled_from(
        ["[" * 100_000, "[]", "null", '{"a": "b"}', '{"a": 1e400}', '{"a": NaN}', '{"a": true}', '{"a": -1}', "\0"]
    )
    | st.sampled_from(
        [RECORD[:-1], RECORD + "x", "-" + RECORD[1:], "\uff11" + RECORD[1:], "1_" + RECORD[2:], RECORD * 2]
    )
)


@pytest.mark.parametrize("read", [waiters_from_text, retired_from_text])
@given(text=TEXTS)
def test_what_is_stored_is_read_or_refused(read, text):
    try:
        found = read(text)
    except ValueError:
        return
    assert isinstance(found, list | dict)


@pytest.mark.seconds(3)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(column=st.sampled_from(["waiters", "retired", "holder", "state", "token", "fence", "version"]), text=TEXTS)
def test_every_call_answers_or_raises_its_own_error(sqlite_locks, column, text):
    """SQLite takes any text in any column."""
    backend = sqlite_locks
    run_in(backend, lambda connection: connection.connection.execute(f"DELETE FROM {TABLE}"))
    good, mine = lock_request("good", ttl=60), lock_request("bad", ttl=60)
    backend.acquire(good, queue=False)
    backend.acquire(mine, queue=False)
    write(backend, "bad", column, text)
    assert "good" in locked_names(backend)
    assert [info.name for info in backend.look(["bad", "good"])[1]] == ["good"]
    assert backend.count_waiters(["bad", "good"])[1] == 0
    assert [info.name for info in backend.held()][-1] == "good"
    waiter = lock_request("bad")
    calls = [
        lambda: backend.acquire(waiter, queue=True),
        lambda: backend.acquire(waiter, queue=True),
        lambda: run_in(
            backend, lambda it: statements_for(backend).position(it, row_key(backend, "bad"), waiter.token, 1)
        ),
        lambda: backend.acquire(lock_request("bad"), queue=False),
        lambda: backend.renew([(mine, 60.0), (good, 60.0)]),
        lambda: backend.release(waiter),
        lambda: backend.release(mine, 1.0),
        lambda: backend.release(mine),
        lambda: backend.prune(0),
    ]
    refused = []
    for call in calls:
        try:
            call()
        except LockBackendError as error:
            refused.append(str(error))
    assert set(refused) <= {"The row 'lock:bad' of distlock_lock holds something that is no lock. Delete it."}
    assert backend.release(good) is True


@pytest.fixture(params=["postgres", "mariadb"])
def backend(request):
    return request.getfixturevalue(f"{request.param}_locks")


def test_on_servers(backend, caplog):
    mine = lock_request("bad", ttl=60)
    backend.acquire(mine, queue=False)
    backend.acquire(lock_request("good", ttl=60), queue=False)
    write(backend, "bad", "waiters", "x" * 70)
    assert backend.count_waiters(["bad", "good"]) == [None, 0]
    assert caplog.text.count("The row 'lock:bad' of distlock_lock holds something that is no lock") == 1
    with pytest.raises(LockBackendError, match="Delete it"):
        backend.acquire(lock_request("bad"), queue=True)
    assert sorted(info.name for info in backend.held()) == ["bad", "good"]
    assert isinstance(backend.acquire(lock_request("other"), queue=True), Grant)


def test_a_row_that_cannot_be_read_ends_no_other_lease(sqlite_locks):
    leases = [lock_request(name, ttl=60, slots=3) for name in ("bad", "bad", "good", "good")]
    for lease in leases:
        assert isinstance(sqlite_locks.acquire(lease, queue=False), Grant)
    write(sqlite_locks, "bad", "retired", "garbage")
    renewed = sqlite_locks.renew([(lease, 60.0) for lease in leases])
    assert renewed[1:] == [None, True, True]
    with pytest.raises(LockBackendError) as caught:
        sqlite_locks.renew([(leases[1], 60.0)])
    assert caught.value.is_final
