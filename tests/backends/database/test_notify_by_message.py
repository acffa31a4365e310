"""Waiters in PostgreSQL that go on by the notification which hands them the lock, before the database has confirmed it.

What waiters by message have in common, whatever the store, is in ``tests/core/test_handed_lease.py``.
"""

from __future__ import annotations

import asyncio
from threading import Event
from types import SimpleNamespace

import pytest
from django.db import connections

from django_distlock import LockBackendError, LockLost, adopt, lock, locks
from django_distlock.backends.common.attempts import InDoubt
from django_distlock.backends.common.state import CLAIMED, FREE, HELD
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database.connections import Pool
from django_distlock.backends.database.operations import Operations
from django_distlock.backends.database.sql import CHANNEL, Statements
from django_distlock.core.handed_lease import HandedLease
from django_distlock.core.lease import Lease
from django_distlock.utils.clock import clock
from tests.support.databases import TABLE, end_sessions, row_key
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, aeventually, eventually, lock_request
from tests.support.waiting import waiters_of


@pytest.fixture
def backends(postgres_database, settings, long_calls):
    """Two that know nothing of each other: ``default`` waits for what ``other`` has."""
    settings.DISTRIBUTED_LOCKS = {alias: {"BACKEND": DATABASE, "LOCATION": "locks"} for alias in ("default", "other")}
    yield locks
    locks.close()


@pytest.fixture(params=["sync", "async"])
def waiting(request, backends):
    yield from waiters_of(request.param)


@pytest.fixture
def unconfirmed(monkeypatch):
    """Nothing is sent after the message, and the renewer asks for nothing."""
    monkeypatch.setattr(Pool, "post", lambda *_: True)
    monkeypatch.setattr(Timing, "confirmed_after", 3600.0)


def columns():
    """Of the row, by their names."""
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"SELECT * FROM {TABLE} WHERE name = %s", [row_key(locks["default"], "name")])
        return dict(zip([column.name for column in cursor.description], cursor.fetchone(), strict=True))


def row():
    return SimpleNamespace(**columns())


def put(**changes):
    changed = ", ".join(f"{column} = %s" for column in changes)
    with connections["locks"].cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET {changed} WHERE name = %s", [*changes.values(), row_key(locks["default"], "name")]
        )
        assert cursor.rowcount == 1


def hand_over(waiting, *, before=lambda: None, ttl=60, **options):
    """A waiter that got the lock when ``other`` released it, and its lease. ``ttl``: of the lease before."""
    other = lock("name", using="other", ttl=ttl)
    assert other.acquire()
    waiter = waiting(**{"ttl": 60, **options})
    eventually(lambda: row().waiters)
    before()
    other.release()
    return waiter, waiter.gets_in()


def handed(waiting, **options):
    """The same, by the message. A busy machine may need more than one."""

    def taken():
        waiter, lease = hand_over(waiting, **options)
        if isinstance(lease, HandedLease):
            return waiter, lease
        return waiter.leaves()

    return eventually(taken)


@pytest.fixture
def listening(waiting):
    """One took its lease by the message before, so that nothing but the test's own reason lets others look."""
    handed(waiting)[0].leaves()


class TestTaken:
    def test_without_a_look(self, waiting):
        waiter, lease = handed(waiting)
        assert lease.is_held
        eventually(lambda: row().state == HELD)
        found = row()
        assert (found.token, found.fence, found.holder) == (lease.token, lease.fence, lease.holder.to_text())
        eventually(lambda: lease.remaining > Timing.grant_ttl)  # the renewer has asked for the whole TTL
        waiter.leaves()
        assert waiter.error is None
        assert row().state == FREE

    def test_one_after_the_other(self, waiting):
        waiters = [waiting(using=alias) for alias in ("default", "other") * 3]
        fences = []
        for _ in waiters:
            inside = eventually(lambda: [one for one in waiters if one.lease and one.lease.is_held])
            assert len(inside) == 1
            fences.append(inside[0].lease.fence)
            inside[0].leaves()
        assert fences == sorted(set(fences))

    def test_by_a_look_where_no_connection_is_at_hand(self, waiting, listening, monkeypatch):
        monkeypatch.setattr(Pool, "post", lambda *_: False)
        _, lease = hand_over(waiting)
        assert type(lease) is Lease

    def test_by_a_look_where_the_lease_before_ends_while_it_would_be_believed(self, waiting, listening):
        """A crash that brought it back would bring it back for too short."""
        _, lease = hand_over(waiting, before=lambda: put(expires=row().version + 1_500_000))
        assert type(lease) is Lease

    def test_by_a_look_where_the_lease_before_was_for_a_short_time(self, waiting, listening):
        _, lease = hand_over(waiting, ttl=Timing.grant_ttl)
        assert type(lease) is Lease

    def test_by_a_look_of_a_notification_that_something_else_sent(self, waiting, listening):
        def send():
            with connections["locks"].cursor() as cursor:
                cursor.execute(
                    "SELECT pg_notify(%s, %s)", [CHANNEL + row().waiters[58:70], f"{row().waiters[32:58]} x"]
                )

        waiter, lease = hand_over(waiting, before=send)
        assert lease.is_held
        waiter.leaves()
        assert waiter.error is None

    def test_by_a_look_where_the_number_is_ahead_of_the_clock(self, waiting, listening):
        """After a crash, the next one would get the same."""
        _, lease = hand_over(waiting, before=lambda: put(fence=row().fence + 3600 * 1_000_000))
        assert type(lease) is Lease


class TestPlaced:
    """A waiter goes by a message only while its question for a place is its last one, and was answered."""

    @pytest.fixture
    def asking(self, backends):
        """A request that may go by the message, while another one has the lock."""
        backend, before, request = backends["default"], lock_request("name", ttl=60), lock_request("name", ttl=60)
        backend.acquire(before, queue=False)
        request.takes_by_message = True
        yield request
        for one in (request, before):
            backend.release(one)

    def test_by_its_question(self, backends, asking):
        began = clock()
        backends["default"].acquire(asking, queue=True)
        assert began <= asking.placed_at <= clock()

    def test_not_after_a_look(self, backends, asking):
        for _ in range(2):
            backends["default"].acquire(asking, queue=True)
        assert asking.place
        assert asking.placed_at < 0

    def test_not_by_a_question_that_was_repeated(self, backends, asking):
        end_sessions()
        backends["default"].acquire(asking, queue=True)
        assert asking.place
        assert asking.in_doubt
        assert asking.placed_at < 0


class TestUnconfirmed:
    def test_it_is_confirmed_by_the_renewer(self, waiting, monkeypatch):
        monkeypatch.setattr(Pool, "post", lambda *_: True)
        _, lease = handed(waiting)
        eventually(lambda: row().state == HELD)
        eventually(lambda: lease.remaining > Timing.grant_ttl)
        assert row().holder == lease.holder.to_text()

    def test_it_is_released(self, waiting, unconfirmed):
        waiter, _ = handed(waiting)
        assert row().state == CLAIMED
        waiter.leaves()
        assert waiter.error is None
        assert row().state == FREE

    def test_it_ends_where_nothing_confirms_it(self, waiting, unconfirmed, monkeypatch):
        monkeypatch.setattr(Timing, "grant_ttl", 0.3)
        waiter, lease = handed(waiting)
        assert 0 < lease.remaining <= 0.3
        assert lease.wait_lost(PATIENCE)
        with lock("name", using="other", wait=PATIENCE) as following:
            assert following.fence > lease.fence
        waiter.leaves()
        assert isinstance(waiter.error, LockLost)

    def test_a_renewal_confirms_it(self, waiting, unconfirmed):
        _, lease = handed(waiting)
        lease.renew(ttl=100)
        assert lease.remaining > 90
        assert row().state == HELD

    def test_it_goes_to_another_process(self, waiting, unconfirmed):
        waiter, lease = handed(waiting, on_lost="log")
        with adopt(lease.detach()) as adopted:
            assert adopted.remaining > 50
            assert (row().token, row().state) == (adopted.token, HELD)
        waiter.leaves()

    def test_it_may_be_renewed_while_the_renewer_is_busy_with_others(self, waiting, unconfirmed, monkeypatch):
        _, lease = handed(waiting, on_lost="log")
        backend, other, renew = locks["default"], lock_request("other", ttl=60), Statements.renew
        backend.acquire(other, queue=False)
        same = lock_request("name", ttl=60)
        same.token, same.is_unconfirmed = lease.token, True

        def meanwhile(*arguments, **options):
            same.is_unconfirmed = False
            return renew(*arguments, **options)

        monkeypatch.setattr(Statements, "renew", meanwhile)
        assert backend.renew([(other, 60.0), (same, 60.0)]) == [True, True]
        backend.release(other)

    def test_what_cannot_be_read_ends_no_other_lease(self, waiting, unconfirmed, caplog):
        _, lease = handed(waiting, on_lost="log")
        backend, other = locks["default"], lock_request("other", ttl=60)
        backend.acquire(other, queue=False)
        token = row().token
        put(others="no JSON")
        unread = lock_request("name", ttl=60)
        unread.token, unread.is_unconfirmed = token, True
        assert backend.renew([(unread, 60.0), (other, 60.0)]) == [None, True]
        assert "Some leases are not renewed" in caplog.text
        backend.release(other)
        put(others="")
        assert lease.is_held


class TestACrash:
    """It loses the last of the statements that nobody waits for: here the row is put back as it was."""

    def test_brings_back_the_lease_before_which_keeps_others_away(self, waiting, unconfirmed):
        kept = {}

        def keep():
            kept.update(columns())
            kept.pop("name")

        waiter, lease = handed(waiting, before=keep, on_lost="log")
        put(**kept)
        assert lease.is_held
        assert not lock("name", using="other").acquire(blocking=False)
        with pytest.raises(LockLost):
            lease.renew()
        assert not lease.is_held
        waiter.leaves()
        assert row().token == kept["token"]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, InDoubt("no answer")], ids=str)
    def test_so_does_one_that_was_interrupted(self, backends, monkeypatch, error):
        backend, request = backends["default"], lock_request("name", ttl=60)
        backend.acquire(request, queue=False)

        def fail(*_, **__):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Operations, "release", fail)
            with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else InDoubt):
                backend.release(request)
        assert backend.release(request)
        [[info]] = backend.look(["name"])
        assert info.resting

    def test_so_does_one_whose_task_was_cancelled(self, backends, monkeypatch):
        """Its thread goes on, and the release is repeated in the background."""
        backend, request, release = backends["default"], lock_request("name", ttl=60), Operations.release
        begun, may_go_on = Event(), Event()
        backend.acquire(request, queue=False)

        def late(*arguments, **options):
            if not begun.is_set():
                begun.set()
                assert may_go_on.wait(PATIENCE)
            return release(*arguments, **options)

        async def main():
            task = asyncio.create_task(backend.arelease(request))
            await aeventually(begun.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        monkeypatch.setattr(Operations, "release", late)
        asyncio.run(main())
        assert backend.release(request)
        [[info]] = backend.look(["name"])
        assert info.resting
        may_go_on.set()

    def test_a_release_that_failed_for_certain_does_not(self, backends, monkeypatch):
        backend, request = backends["default"], lock_request("name", ttl=60)
        backend.acquire(request, queue=False)

        def refuse(*_, **__):
            raise LockBackendError("refused")

        with monkeypatch.context() as patch:
            patch.setattr(Operations, "release", refuse)
            with pytest.raises(LockBackendError):
                backend.release(request)
        assert backend.release(request)
        assert backend.look(["name"]) == [[]]

    def test_a_repeated_release_is_no_reason_for_the_loss_of_an_unconfirmed_lease(self, backends):
        backend, request, over = backends["default"], lock_request("name", ttl=60), lock_request("name", ttl=60)
        backend.acquire(request, queue=False)
        over.is_unconfirmed = True
        end_sessions()
        assert not backend.release(over)
        assert backend.release(request)

    def test_a_release_that_was_repeated_leaves_the_lock_taken_for_as_long_as_a_waiter_may_believe(self, backends):
        """The first attempt may have handed the lock over, before the crash brought the lease back."""
        backend, request = backends["default"], lock_request("name", ttl=60)
        backend.acquire(request, queue=False)
        end_sessions()
        assert backend.release(request)
        [[info]] = backend.look(["name"])
        assert info.resting
        assert 0 < info.remaining <= Timing.grant_ttl
