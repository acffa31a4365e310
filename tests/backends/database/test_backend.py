"""The database backend: transactions, connections, waiting, and faults. What every backend does is tested elsewhere."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, connections, transaction
from django.test import override_settings

from django_distlock import InvalidLockBackend, LockBackendError, LockNotAcquired, lock, locks
from django_distlock.backends.common.state import Attempt
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database import notify
from django_distlock.backends.database.connections import Pool
from django_distlock.backends.database.polling import PollBackoff
from django_distlock.backends.database.sql import QueuePosition, Statements
from django_distlock.models import DatabaseLock
from django_distlock.types import Grant, LockInfo
from django_distlock.utils.clock import clock
from tests.support.databases import (
    ALIAS,
    TABLE,
    Waiter,
    end_sessions,
    fast_path_for,
    known_database,
    known_wrong,
    open_connections,
    row_key,
    run_in,
    sessions,
    statements_for,
    through,
    waiting,
)
from tests.support.inside import keep_sessions, listener_of
from tests.support.postgres import PLACES_OF_BOUNCER, Bouncer
from tests.support.programs import in_a_fork
from tests.support.requirements import missing
from tests.support.stores import DATABASE
from tests.support.tools import (
    PATIENCE,
    ending_within,
    eventually,
    lock_request,
    locked_names,
    queue_of,
    renewer_of,
    threads_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=["postgres", "sqlite", "mariadb"])
def backend(request):
    return request.getfixturevalue(f"{request.param}_locks")


@pytest.fixture
def bouncer(postgres, postgres_database):
    """The alias ``pooled`` leads through pgbouncer."""
    if (program := shutil.which("pgbouncer", path=PLACES_OF_BOUNCER)) is None:
        missing("pgbouncer", "install the package pgbouncer")
    with Bouncer(program, postgres) as bouncer, known_database(bouncer.settings(), "pooled"):
        connections["pooled"].close()
        yield bouncer


def no_full_looks(monkeypatch):
    """A waiter that would look only at the full second, as one that is notified does, would now not look in time."""
    monkeypatch.setattr(Timing, "look_interval", 2 * PATIENCE)
    monkeypatch.setattr(Timing, "waiter_expires_after", 3 * PATIENCE)


class TestTransactions:
    """The caller's transaction neither holds nor hides a lock."""

    def test_a_lock_taken_in_a_transaction_is_seen_by_others_at_once(self, backend):
        with transaction.atomic(using=ALIAS), lock("name", ttl=60):
            assert isinstance(backend.acquire(lock_request(), queue=False), LockInfo)

    def test_a_rollback_does_not_free_it(self, backend):
        mine = lock("name", ttl=60)
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=ALIAS):
            assert mine.acquire()
            raise ZeroDivisionError
        assert mine.locked()
        mine.release()

    def test_inside_a_transaction_that_writes(self, backend):
        """On SQLite it has its whole file to itself; so the locks are in another one."""
        with transaction.atomic(using=ALIAS):
            with connections[ALIAS].cursor() as cursor:
                cursor.execute("CREATE TABLE own (id integer)")
                cursor.execute("INSERT INTO own VALUES (1)")
            with lock("name", ttl=60):
                pass
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("DROP TABLE own")

    def test_a_database_in_memory_has_its_locks_in_a_file_that_goes_with_them(self, settings, django_db_blocker):
        memory = {"ENGINE": "django.db.backends.sqlite3", "NAME": "file:tests?mode=memory&cache=shared"}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": ALIAS}}
        with django_db_blocker.unblock(), known_database(memory):
            with transaction.atomic(using=ALIAS), lock("name"):
                file = locks["default"].pool.file
                assert Path(file).exists()
            locks.close()
        assert not Path(file).exists()


class TestTestCase:
    @pytest.mark.django_db
    def test_inside_the_transaction_of_a_test(self, settings):
        """The default database of these tests is in memory, and a test runs inside its transaction."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE}}
        assert locks["default"].location == "default"
        with lock("name") as lease:
            assert [info.fence for info in locks["default"].held()] == [lease.fence]
        locks.close()

    def test_a_test_database_is_made_and_dropped_though_locks_had_connections(self, postgres_locks):
        """CREATE DATABASE and DROP DATABASE are refused while others are connected."""
        with lock("name"):
            pass
        creation = connections[ALIAS].creation
        before = connections[ALIAS].settings_dict["NAME"]
        connections.settings[ALIAS]["TEST"]["MIGRATE"] = False
        creation.create_test_db(verbosity=0, autoclobber=True)
        try:
            assert connections[ALIAS].settings_dict["NAME"] != before
            holder = lock_request(ttl=60)
            assert isinstance(postgres_locks.acquire(holder, queue=False), Grant)
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(f"SELECT count(*) FROM {TABLE}")
                assert cursor.fetchone() == (1,)
            postgres_locks.release(holder)
        finally:
            creation.destroy_test_db(before, verbosity=0)
        assert connections[ALIAS].settings_dict["NAME"] == before
        with lock("name"):
            pass

    @pytest.mark.django_db
    def test_dumps_and_checks_know_nothing_of_the_rows(self):
        DatabaseLock.objects.create(
            name=b"lock:x", format=1, version=1, token="", state="f", fence=1, expires=1, holder="", waiters="",
            retired="", careful_until=0,
        )  # fmt: skip
        out = io.StringIO()
        call_command("dumpdata", "distlock", stdout=out)
        assert json.loads(out.getvalue()) == []
        call_command("makemigrations", "distlock", check_changes=True, dry_run=True, verbosity=0)
        assert str(DatabaseLock(name=b"lock:x")) == "lock:x"


class TestConnections:
    def test_a_thread_that_waits_has_none(self, postgres_locks):
        with lock("name", ttl=60):
            waiters = [Waiter() for _ in range(12)]
            eventually(lambda: waiting(postgres_locks) == 1 and listener_of(postgres_locks).is_ready)
            eventually(lambda: queue_of(postgres_locks).length("name") == 12)
            time.sleep(0.2)
            # One that listens, one or two that asked last, one of the renewal.
            assert len(sessions()) <= 6
        for waiter in waiters:
            waiter.leave.set()
        for waiter in waiters:
            waiter.end()

    @pytest.mark.parametrize(("max_age", "stays"), [(0.01, False), (600, True), (None, True), (0, True)])
    def test_an_age_above_none_is_obeyed(self, postgres_locks, max_age, stays):
        connections.settings[ALIAS]["CONN_MAX_AGE"] = max_age
        eventually(lambda: len(sessions()) == 0)
        postgres_locks.look(["name"])
        assert len(sessions()) == 1
        time.sleep(0.02)
        request_finished.send(sender=None)
        eventually(lambda: len(sessions()) == stays)
        postgres_locks.close()
        eventually(lambda: len(sessions()) == 0)

    def test_without_an_age_requests_share_one_until_it_is_idle_for_long(self, postgres_locks):
        connections.settings[ALIAS]["CONN_MAX_AGE"] = 0
        pids = set()
        for _ in range(3):
            request_started.send(sender=None)
            pids.add(run_in(postgres_locks, _server_pid))
            request_finished.send(sender=None)
        assert len(pids) == 1
        postgres_locks.timing.database_idle_kept = 0.1
        time.sleep(0.2)
        request_started.send(sender=None)
        eventually(lambda: len(sessions()) == 0)

    def test_without_requests_a_call_uses_none_that_was_idle_for_long(self, postgres_locks):
        connections.settings[ALIAS]["CONN_MAX_AGE"] = 0
        before = run_in(postgres_locks, _server_pid)
        assert run_in(postgres_locks, _server_pid) == before
        postgres_locks.timing.database_idle_kept = 0.1
        time.sleep(0.2)
        assert run_in(postgres_locks, _server_pid) != before
        eventually(lambda: len(sessions()) == 1)

    def test_those_that_are_young_can_be_used_while_old_ones_are_closed(self, postgres_locks):
        connections.settings[ALIAS]["CONN_MAX_AGE"] = 600
        pool = postgres_locks.pool
        with pool.connection(PATIENCE) as young, pool.connection(PATIENCE) as old:
            pass
        old.close_at = time.monotonic() - 1
        close, used_meanwhile = old.close, []

        def close_slowly():
            with pool.connection(PATIENCE) as wrapper:
                used_meanwhile.append(wrapper)
            close()

        old.close = close_slowly
        pool.close_old()
        assert used_meanwhile == [young]
        assert old.connection is None

    def test_one_past_its_age_is_not_used_again(self, postgres_locks, monkeypatch):
        connections.settings[ALIAS]["CONN_MAX_AGE"] = 600
        postgres_locks.look(["name"])
        with postgres_locks.pool.connection(PATIENCE) as wrapper:
            pass
        wrapper.close_at = time.monotonic() - 1
        with postgres_locks.pool.connection(PATIENCE) as other:
            pass
        assert other is not wrapper
        assert wrapper.connection is None

    def test_after_all_were_cut_the_next_call_works(self, postgres_locks):
        mine = lock_request(ttl=60)
        assert isinstance(postgres_locks.acquire(mine, queue=False), Grant)
        end_sessions()
        assert postgres_locks.renew([(mine, 60.0)]) == [True]
        end_sessions()
        assert postgres_locks.release(mine) is True
        assert not mine.in_doubt

    def test_those_that_fail_their_health_check_are_not_used(self, postgres_locks):
        connections.settings[ALIAS].update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True)
        before = run_in(postgres_locks, _server_pid)
        request_finished.send(sender=None)
        assert run_in(postgres_locks, _server_pid) == before
        request_finished.send(sender=None)
        end_sessions()
        _, repeated = postgres_locks.calls.run_or_repeat(_server_pid)
        assert not repeated

    def test_a_child_neither_uses_nor_ends_those_of_its_parent(self, postgres_locks):
        with lock("name", ttl=60) as lease:
            pid = run_in(postgres_locks, _server_pid)

            def work():
                locks["default"].look(["name"])
                gc.collect()
                return str(run_in(locks["default"], _server_pid))

            assert int(in_a_fork(work)) != pid
            assert run_in(postgres_locks, _server_pid) == pid
            lease.ensure_held()

    def test_the_begin_of_a_request_is_no_query(self, sqlite_locks, django_db_blocker):
        with lock("name"):
            pass
        request_started.disconnect(close_old_connections)  # Django's own looks after them by a query
        try:
            with django_db_blocker.block():
                request_started.send(sender=None)
        finally:
            request_started.connect(close_old_connections)

    def test_many_may_open_a_new_file_at_once(self, sqlite_locks, tmp_path):
        for number in range(60):
            sqlite_locks.pool.file = str(tmp_path / str(number))
            start, failures = threading.Barrier(6), []

            def open_it(start=start, failures=failures):
                start.wait(10)
                try:
                    sqlite_locks.pool.close(sqlite_locks.pool.open())
                except Exception as error:
                    failures.append(error)

            threads = [threading.Thread(target=open_it) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []

    def test_a_lock_that_is_free_needs_one(self, postgres_locks):
        eventually(lambda: not threads_of("listener"))  # of another test
        for _ in range(3):
            with lock("name"):
                assert not threads_of("listener")
        assert len(sessions()) == 1

    def test_those_of_a_burst_are_not_all_kept(self, sqlite_locks):
        pool = sqlite_locks.pool
        with ExitStack() as stack:
            wrappers = [stack.enter_context(pool.connection(1)) for _ in range(12)]
        assert sum(wrapper.connection is not None for wrapper in wrappers) == 8

    def test_what_was_not_used_for_long_is_closed(self, sqlite_locks):
        connections.settings[ALIAS]["CONN_MAX_AGE"] = None
        sqlite_locks.timing.database_idle_kept = 0.1
        pool = sqlite_locks.pool
        with pool.connection(1) as used_last, pool.connection(1) as old:
            pass
        time.sleep(0.2)
        sqlite_locks.look(["name"])
        assert (old.connection, used_last.connection is None) == (None, False)


def _server_pid(connection):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


class TestWaiting:
    def test_on_postgresql_they_are_woken_and_hardly_ask(self, postgres_locks, monkeypatch):
        assert postgres_locks.supports_wakeup
        with lock("name", ttl=60):
            waiter = Waiter()
            eventually(lambda: listener_of(postgres_locks).is_ready)
            asked = []
            monkeypatch.setattr(Statements, "position", lambda *_, **which: asked.append(which))
            time.sleep(0.3)
        assert waiter.got_in.wait(PATIENCE)
        assert asked == []
        waiter.end()

    def test_looks_become_rare_while_nothing_moves_and_with_the_distance(self):
        first, behind = (PollBackoff(Timing(), is_file=False) for _ in range(2))
        for backoff in (first, behind):
            backoff.begin(60)
        pauses = []
        for _ in range(20):
            first.update(QueuePosition(False, fence=7))
            pauses.append(first.next_pause())
        assert pauses[0] < 0.01
        assert 0.17 < pauses[-1] <= 0.25
        first.update(QueuePosition(False, fence=8))
        assert first.next_pause() < 0.01
        behind.update(QueuePosition(False, fence=7, waiters_before=9))
        assert 0.012 < behind.next_pause() < 0.03

    @pytest.mark.seconds(4)
    def test_a_waiter_looks_some_four_times_a_second_at_a_lock_that_does_not_move(self, sqlite_locks, monkeypatch):
        looks, real = [], Statements.position

        def noted(*arguments, **which):
            looks.append(clock())
            return real(*arguments, **which)

        monkeypatch.setattr(Statements, "position", noted)
        with lock("name", ttl=60):
            waiter = Waiter()
            eventually(lambda: looks and clock() - looks[0] > 1)  # at first they are quicker
            before, began = len(looks), clock()
            eventually(lambda: clock() - began > 3)
            assert len(looks) - before < 7 * (clock() - began)
        waiter.end()

    def test_elsewhere_they_look_and_say_so(self, sqlite_locks, monkeypatch):
        assert not sqlite_locks.supports_wakeup
        no_full_looks(monkeypatch)
        with lock("name", ttl=60):
            waiter = Waiter(wait=3 * PATIENCE)
            eventually(lambda: waiting(sqlite_locks) == 1)
        assert waiter.got_in.wait(PATIENCE)
        waiter.end()

    @staticmethod
    def _position(backend, request):
        def look(connection):
            return statements_for(backend).position(
                connection, row_key(backend, request.name), request.token, request.slots
            )

        return run_in(backend, look)

    @pytest.mark.parametrize("slots", [1, 2])
    def test_who_looks_sees_the_end_of_leases_in_other_slots(self, backend, slots):
        first, second = (lock_request(ttl=60, slots=2) for _ in range(2))
        waiter, behind = lock_request(slots=slots), lock_request(slots=5)
        for request in (first, second):
            assert isinstance(backend.acquire(request, queue=False), Grant)
        for request in (waiter, behind):
            assert isinstance(backend.acquire(request, queue=True), LockInfo)
        if slots == 1:
            assert backend.release(first) is True
        assert not self._position(backend, waiter).is_turn
        assert backend.release(second, 0.2) is True  # a rest, of which nobody is told
        eventually(lambda: self._position(backend, waiter).is_turn)
        assert isinstance(backend.acquire(waiter, queue=True), Grant)

    def test_who_stands_behind_does_not_look_anew_for_a_slot_that_the_first_does_not_want(self, backend):
        holders = [lock_request(ttl=60, slots=2) for _ in range(2)]
        for request in holders:
            assert isinstance(backend.acquire(request, queue=False), Grant)
        first, behind = lock_request(), lock_request(slots=5)
        for request in (first, behind):
            assert isinstance(backend.acquire(request, queue=True), LockInfo)
        assert not self._position(backend, behind).is_turn

    def test_a_pooler_that_passes_on_nothing(self, postgres_locks, monkeypatch, caplog):
        monkeypatch.setattr(Timing, "echo_timeout", 0.2)
        monkeypatch.setattr(Timing, "listener_nap", 0.05)
        no_full_looks(monkeypatch)
        monkeypatch.setattr(notify.PostgresListener, "_receive", lambda *_: None)
        with lock("name", ttl=60):
            waiter = Waiter(wait=3 * PATIENCE)
            eventually(lambda: "LOCATION that leads directly to the server" in caplog.text)
        assert waiter.got_in.wait(PATIENCE)
        waiter.end()
        eventually(lambda: not threads_of("listener"))

    def test_behind_pgbouncer_in_transaction_mode(self, bouncer, settings, monkeypatch, caplog):
        """Nothing that locks say depends on a session; only notifications do, and are done without."""
        monkeypatch.setattr(Timing, "echo_timeout", 0.3)
        monkeypatch.setattr(Timing, "listener_nap", 0.05)
        entry = {"BACKEND": DATABASE, "LOCATION": "pooled"}
        settings.DISTRIBUTED_LOCKS = dict.fromkeys(("default", "a", "b", "c"), entry)
        inside, numbers = [], []

        def work(alias):
            for _ in range(5):
                with lock("name", using=alias, wait=PATIENCE) as lease:
                    inside.append(lease.fence)
                    assert inside == [lease.fence]
                    time.sleep(0.02)
                    inside.remove(lease.fence)
                    numbers.append(lease.fence)

        threads = [threading.Thread(target=work, args=(alias,)) for alias in ("default", "a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 20
        assert "LOCATION that leads directly to the server" in caplog.text
        locks.close()

    @pytest.mark.parametrize("recognised", [True, False])
    def test_statements_are_not_prepared_behind_a_pooler(self, bouncer, settings, monkeypatch, recognised):
        """One session knows them; the next call of the same connection may be sent to another."""
        monkeypatch.setattr(Pool, "prepare_after", 0)
        if not recognised:
            keep_sessions(monkeypatch, True)
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "pooled"}}
        backend = locks["default"]
        backend.look(["name"])
        sessions_before = run_in(backend, _server_pid)
        with transaction.atomic(using="pooled"):
            assert _server_pid(connections["pooled"]) == sessions_before
            assert run_in(backend, _server_pid) != sessions_before
            assert backend.look(["name"]) == [[]]
        assert backend.pool.uses_prepared_statements == recognised
        assert backend.look(["name"]) == [[]]
        locks.close()

    def test_statements_are_prepared_where_no_pooler_is_in_between(self, postgres_locks):
        for _ in range(postgres_locks.pool.prepare_after + 1):
            postgres_locks.look(["name"])

        def prepared(connection):
            with connection.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE %s", ["%distlock%"])
                return cursor.fetchone()[0]

        assert run_in(postgres_locks, prepared) == 1

    def test_a_listener_that_was_cut_listens_again(self, postgres_locks, monkeypatch):
        with lock("name", ttl=60):
            waiter = Waiter()
            eventually(lambda: listener_of(postgres_locks).is_ready)
            end_sessions()
            eventually(lambda: not listener_of(postgres_locks).is_ready)
            eventually(lambda: listener_of(postgres_locks).is_ready)
        assert waiter.got_in.wait(PATIENCE)
        waiter.end()

    def test_idle_it_closes_its_connection(self, postgres_locks, monkeypatch):
        monkeypatch.setattr(Timing, "listener_idle", 0.2)
        monkeypatch.setattr(Timing, "listener_nap", 0.05)
        postgres_locks.acquire(lock_request(ttl=60), queue=False)
        with pytest.raises(LockNotAcquired), lock("name", wait=0.1):
            pass
        eventually(lambda: not threads_of("listener"))

    @pytest.mark.seconds(4)
    def test_many_tasks_wait_without_blocking_their_loop(self, backend, monkeypatch):
        before = open_connections(backend)
        real, users = Pool.connection, set()

        def noted(*arguments):
            users.add(threading.current_thread())
            return real(*arguments)

        async def work():
            async with lock("name", wait=4 * PATIENCE, ttl=60, renew=False):
                pass

        async def main():
            await asyncio.gather(*(work() for _ in range(200)))

        monkeypatch.setattr(Pool, "connection", noted)
        asyncio.run(main())
        assert users
        assert threading.main_thread() not in users
        assert len(open_connections(backend, but=before)) <= 8


@pytest.fixture
def proxy(request, postgres, postgres_database, settings, tmp_path_factory, long_calls):
    timeout = getattr(request, "param", PATIENCE)
    with through(postgres, tmp_path_factory.mktemp("p"), settings, timeout) as proxy:
        yield proxy


soon = pytest.mark.parametrize("proxy", [3.0], indirect=True)  # gives up a server that does not answer


class TestFaults:
    @pytest.mark.parametrize("times", [1, 2])
    def test_the_reply_to_acquire_is_lost(self, proxy, calls, times):
        """S3: asked again with the same token; S4: and if that fails as well, nothing is left."""
        with lock("name", using="direct"):
            pass  # the row is there
        proxy.cut_reply("AS excluded", times)
        handle = calls(lock("name", ttl=60, wait=0))
        if times == 1:
            assert handle.acquire()
            assert locks["direct"].look(["name"]) != [[]]
            handle.release()
        else:
            with pytest.raises(LockBackendError):
                handle.acquire()
        assert proxy.cuts == times
        eventually(lambda: locks["direct"].look(["name"]) == [[]])

    def test_the_reply_to_release_is_lost(self, proxy, calls):
        handle = calls(lock("name", ttl=60))
        assert handle.acquire()
        proxy.cut_reply("UPDATE distlock_lock SET version = GREATEST")
        handle.release()
        assert proxy.cuts == 1
        assert locks["direct"].look(["name"]) == [[]]

    def test_the_reply_to_a_renewal_is_lost(self, proxy):
        with lock("name", ttl=60, renew=False) as lease:
            proxy.cut_reply("UPDATE distlock_lock SET version = version + 1")
            lease.renew(120)
            assert lease.remaining > 60
        assert proxy.cuts == 1

    @pytest.mark.parametrize("marker", ["THEN pg_notify(", "state = 'h', expires = GREATEST"])
    def test_the_reply_to_a_hand_off_is_lost(self, proxy, marker):
        """Of the release that hands the lock on, and of the attempt that takes it."""

        def hand_off():
            with lock("name", ttl=60):
                waiter = Waiter()
                eventually(lambda: waiting(locks["direct"]) == 1)
                proxy.cut_reply(marker)
            assert waiter.got_in.wait(PATIENCE)
            waiter.end()
            return proxy.cuts

        eventually(hand_off)  # on a busy machine the waiter may come too late for what it was handed

    def test_a_command_that_arrives_late_makes_no_ghost(self, backend):
        late = lock_request(ttl=60)
        request = Attempt(late.token, 60_000_000, "", queue=True, inbox="x")
        late.in_doubt = True
        assert backend.release(late) is False
        if fast_path := fast_path_for(backend):
            for queue, place in ((True, 0), (True, 1), (False, 0)):
                changed = replace(request, queue=queue, place=place)
                assert (
                    run_in(backend, partial(fast_path.acquire, name=row_key(backend, "name"), attempt=changed)) is None
                )
        with pytest.raises(LockBackendError, match="given back"):
            backend.acquire(late, queue=True)
        assert backend.look(["name"]) == [[]]
        assert isinstance(backend.acquire(lock_request(), queue=False), Grant)

    def test_a_token_in_doubt_that_was_exchanged_makes_no_ghost(self, backend):
        old, new = lock_request(ttl=60), lock_request(ttl=60)
        backend.acquire(old, queue=False)
        old.in_doubt = True
        backend.exchange(old, new)
        backend.release(new)
        with pytest.raises(LockBackendError, match="given back"):
            backend.acquire(old, queue=False)
        assert backend.look(["name"]) == [[]]

    def test_an_exchange_that_arrives_late_makes_no_ghost(self, backend):
        old, late = lock_request(ttl=60), lock_request(ttl=60)
        backend.acquire(old, queue=False)
        late.in_doubt = True
        backend.release(late)
        with pytest.raises(LockBackendError, match="given back"):
            backend.exchange(old, late)
        assert backend.look(["name"])[0][0].token == old.token

    def test_the_reply_to_an_exchange_is_lost(self, proxy):
        """The row is read before it is written: the cut reply is that of the write."""
        direct, proxied = locks["direct"], locks["default"]
        old, new = lock_request(ttl=60), lock_request(ttl=60)
        direct.acquire(old, queue=False)
        proxy.cut_reply("UPDATE distlock_lock SET")
        granted = proxied.exchange(old, new)
        assert proxy.cuts == 1
        [[lease]] = direct.look(["name"])
        assert (lease.token, lease.fence) == (new.token, granted.fence)

    def test_a_write_that_arrives_late_changes_nothing(self, backend):
        key = row_key(backend, "name")
        backend.acquire(lock_request(ttl=60), queue=False)
        row = run_in(backend, lambda it: statements_for(backend).read(it, key))
        backend.acquire(lock_request(), queue=True)
        row.leases = [replace(lease, token="late", expires=lease.expires * 2) for lease in row.leases]
        assert run_in(backend, lambda it: statements_for(backend).write(it, key, row)) is False
        assert backend.look(["name"])[0][0].token != "late"

    @pytest.mark.seconds(5)
    @soon
    def test_a_server_that_hangs_is_an_error_in_time(self, proxy, calls):
        """S16, also for a call that has a connection."""
        calls(locks["default"]).look(["name"])
        proxy.hang = True
        with ending_within(9), pytest.raises(LockBackendError, match="'proxied' of the locks 'default'"):
            calls(lock("name", wait=0)).acquire()

    @pytest.mark.parametrize("way", ["acquire", "release", "renew"])
    def test_a_server_that_restarts_is_tried_again(self, postgres, postgres_database, settings, tmp_path_factory, way):
        """It takes no connections for a moment; nobody who has that time is told."""
        folder = tmp_path_factory.mktemp("p")
        with through(postgres, folder, settings, timeout=3 * PATIENCE) as proxy:
            mine = lock_request(ttl=60)
            locks["default"].acquire(mine, queue=False)
            locks["default"].pool.close_idle()
            proxy.refuse()
            again = threading.Timer(0.5, proxy.accept)
            again.start()
            try:
                if way == "acquire":
                    with lock("another", wait=3 * PATIENCE):
                        pass
                elif way == "release":
                    assert locks["default"].release(mine) is True
                else:
                    assert locks["default"].renew([(mine, 120.0)]) == [True]
            finally:
                again.join()

    @pytest.mark.parametrize(
        ("wrong", "says"), [({"NAME": "nowhere"}, "does not exist"), ({"USER": "nobody"}, "does not exist")]
    )
    def test_settings_that_are_wrong_are_told_at_once(self, postgres_database, settings, wrong, says):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": DATABASE, "LOCATION": "wrong", "OPTIONS": {"timeout": 6 * PATIENCE}}
        }
        with known_wrong({**postgres_database, **wrong}), pytest.raises(LockBackendError, match=says):
            began = time.monotonic()
            try:
                lock("name").acquire()
            finally:
                assert time.monotonic() - began < 6 * PATIENCE
        locks.close()

    @pytest.mark.seconds(5)
    @soon
    def test_a_server_that_is_gone_is_an_error(self, proxy):
        proxy.refuse()
        with pytest.raises(LockBackendError) as caught:
            lock("name", wait=0).acquire()
        assert caught.value.__cause__ is not None

    @pytest.mark.seconds(11)
    @soon
    def test_a_lease_outlives_a_short_outage(self, proxy):
        with lock("name", ttl=20) as lease:
            proxy.refuse()
            eventually(lambda: lease.state == "unknown")
            proxy.accept()
            eventually(lambda: lease.state == "held")

    def test_without_its_table(self, postgres_locks):
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
        try:
            with pytest.raises(LockBackendError, match=f"no table {TABLE}. Run manage.py migrate --database=locks"):
                lock("name").acquire()
        finally:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")

    def test_a_sqlite_file_that_another_process_writes_to_for_long(self, sqlite_database, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": ALIAS, "OPTIONS": {"timeout": 0.2}}}
        pool = locks["default"].pool
        with pool.connection(1) as writer:
            writer.connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(LockBackendError, match="longer than DISTRIBUTED_LOCKS"):
                lock("name").acquire()
            writer.connection.execute("ROLLBACK")
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
        locks.close()

    def test_a_transaction_that_writes_to_the_file_of_the_locks_itself(self, sqlite_locks, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": ALIAS, "OPTIONS": {"timeout": 0.2}}}
        wrong = {"ENGINE": "django.db.backends.sqlite3", "NAME": locks["default"].pool.file}
        with known_database(wrong, "wrong"), transaction.atomic(using="wrong"):
            with connections["wrong"].cursor() as cursor:
                cursor.execute("CREATE TABLE own (id integer)")
            with pytest.raises(LockBackendError, match="database 'wrong'.*would wait for itself.*Give DATABASES"):
                lock("name").acquire()
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
        locks.close()


class TestPruning:
    def test_old_rows_go_and_what_is_needed_stays(self, backend):
        free, waited, held = lock_request("free"), lock_request("waited", ttl=60), lock_request("held", ttl=60)
        number = backend.acquire(free, queue=False).fence
        backend.release(free)
        backend.acquire(held, queue=False)
        backend.acquire(waited, queue=False)
        backend.acquire(lock_request("waited"), queue=True)
        assert backend.prune(3600) == 0
        time.sleep(0.01)
        assert backend.prune(0) == 1
        assert locked_names(backend) == ["held", "waited"]
        assert backend.acquire(lock_request("free"), queue=False).fence > number

    def test_a_row_whose_number_is_ahead_of_the_clock_stays(self, backend):
        """After the clock was set back: the next number would be smaller."""
        free = lock_request()
        number = backend.acquire(free, queue=False).fence
        backend.release(free)

        def set_back(connection):
            row = statements_for(backend).read(connection, row_key(backend, "name"))
            row.fence = number + 3_600_000_000
            assert statements_for(backend).write(connection, row_key(backend, "name"), row)

        run_in(backend, set_back)
        assert backend.prune(0) == 0
        assert backend.acquire(lock_request(), queue=False).fence == number + 3_600_000_001

    @pytest.mark.parametrize("age", [-1, float("inf"), float("nan")])
    def test_an_age_that_is_none(self, sqlite_locks, age):
        with pytest.raises(ValueError, match="older_than_seconds is"):
            sqlite_locks.prune(age)


class TestSettings:
    @pytest.mark.parametrize(
        ("entry", "says"),
        [
            ({"LOCATION": "nope"}, "is 'nope'. It is an alias of DATABASES, which has 'default'"),
            ({"KEY_PREFIX": ""}, "of 1 to 100 bytes"),
            ({"OPTIONS": {"timeout": 0}}, "is 0; it is a number of seconds above 0"),
            ({"OPTIONS": {"timeout": None}}, "is None; it is a number"),
            ({"OPTIONS": {"socket_timeout": 1}}, "unknown option 'socket_timeout'. DatabaseBackend knows: timeout"),
        ],
    )
    def test_mistakes(self, settings, entry, says):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, **entry}}
        with pytest.raises(InvalidLockBackend, match=says):
            locks["default"]

    def test_the_app_must_be_installed(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE}}
        with (
            override_settings(INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"]),
            pytest.raises(InvalidLockBackend, match="INSTALLED_APPS"),
        ):
            locks["default"]

    def test_routers_choose_where_no_location_does(self, sqlite_database, settings):
        class Router:
            def db_for_write(self, model, **hints):
                return ALIAS if model is DatabaseLock else None

        settings.DATABASE_ROUTERS = [Router()]
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE}}
        assert locks["default"].location == ALIAS
        locks.close()

    def test_two_prefixes_share_a_table(self, sqlite_database, settings):
        entry = {"BACKEND": DATABASE, "LOCATION": ALIAS}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": {**entry, "KEY_PREFIX": "other"}}
        with lock("name", wait=0), lock("name", wait=0, using="other"):
            assert locked_names(locks["default"]) == locked_names(locks["other"]) == ["name"]
        locks.close()

    def test_entries_on_the_same_table_with_the_same_prefix_are_the_same_locks(self, sqlite_database, settings):
        entry = {"BACKEND": DATABASE, "LOCATION": ALIAS}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "same": entry, "other": {**entry, "KEY_PREFIX": "other"}}
        assert locks["default"].keyspace == locks["same"].keyspace != locks["other"].keyspace
        locks.close()


class TestChecks:
    def test_silent_when_all_is_well(self, backend):
        assert backend.check_settings() == []
        assert backend.supports_processes

    def test_a_database_in_the_file_of_the_locks(self, sqlite_locks):
        """A transaction that writes there would keep its own locks from being written."""
        with known_database({"ENGINE": "django.db.backends.sqlite3", "NAME": sqlite_locks.pool.file}, "wrong"):
            [error] = sqlite_locks.check_settings()
        assert error.id == "distlock.E020"
        assert "would wait for itself" in error.msg

    def test_routers_that_keep_the_table_away(self, postgres_locks, settings):
        class Router:
            def allow_migrate(self, db, app_label, **hints):
                return None if app_label != "distlock" else False

        settings.DATABASE_ROUTERS = [Router()]
        [warning] = postgres_locks.check_settings()
        assert warning.id == "distlock.W020"

    def test_routers_that_could_send_each_process_elsewhere(self, sqlite_database, settings):
        class Router:
            def db_for_write(self, model, **hints):
                return ALIAS

        settings.DATABASE_ROUTERS = [Router()]
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE}}
        [warning] = locks["default"].check_settings()
        assert warning.id == "distlock.W021"
        assert "processes do not exclude each other" in warning.msg
        assert warning.hint.endswith("'LOCATION': 'locks'.")
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": ALIAS}}
        assert locks["default"].check_settings() == []
        locks.close()

    def test_in_memory_locks_exclude_one_process(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE}}
        assert not locks["default"].supports_processes


def test_waiters_are_counted(backend, calls):
    backend.acquire(lock_request(ttl=60), queue=False)
    for _ in range(3):
        backend.acquire(lock_request(), queue=True)
    assert calls(backend).count_waiters(["name", "other"]) == [3, 0]


def test_an_operator_frees_a_lock_that_rests(backend):
    mine = lock_request(ttl=60)
    backend.acquire(mine, queue=False)
    assert backend.release(mine, 60) is True
    assert backend.release(mine, force=True) is True
    assert backend.look(["name"]) == [[]]
