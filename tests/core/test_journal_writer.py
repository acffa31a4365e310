"""What happens to locks is written to the journal of their alias, and nobody waits for it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.http import StreamingHttpResponse
from django.test import RequestFactory

from django_distlock import (
    LockBackendError,
    LockLost,
    LockReentry,
    LockTimeout,
    adopt,
    distributed_lock,
    lock,
    lock_all,
    locks,
)
from django_distlock.core import journal_writer
from django_distlock.core.succession import Succession
from django_distlock.journal import NOT_RENEWED, RESPONSE, TRANSACTION, Event, entries_in
from django_distlock.monitoring.causes import causes
from django_distlock.monitoring.situation import from_journal
from django_distlock.testing import lose, store_down
from django_distlock.types import Holder, LockRequest, digest
from tests.support.leases import hold_elsewhere
from tests.support.programs import heard, in_a_fork
from tests.support.stores import LOCMEM
from tests.support.tools import backend_on, eventually, keeping_a_journal, on_stores

pytestmark = pytest.mark.seconds(1)

backend_without = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "sqlite", fixture="backend_without")


@pytest.fixture
def backend(backend_without, settings):
    """With a journal."""
    with keeping_a_journal(settings) as found:
        yield found


def written(backend):
    return entries_in(backend.read_journal())


def entries(backend, count):
    """So many at least, when they are there."""

    def found():
        there = written(backend)
        return there if len(there) >= count else None

    return eventually(found)


@contextmanager
def no_locks_of(backend):
    """It answers nobody who wants a lock or has one, and takes what the journal is told."""

    def fail(*_, **__):
        raise LockBackendError("It does not answer.")

    async def afail(*_, **__):
        raise LockBackendError("It does not answer.")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("acquire", "release"):
            patch.setattr(backend, name, fail)
            patch.setattr(backend, f"a{name}", afail)
        yield


def events(backend, count):
    return [entry.event for entry in entries(backend, count)]


class TestEvents:
    @on_each_store
    def test_a_grant_and_a_release(self, backend, calls):
        handle = lock("order:{}", 42, ttl=20)
        calls(handle).acquire()
        lease = handle.lease
        calls(handle).release()
        granted, released = entries(backend, 2)
        assert (granted.event, released.event) == (Event.GRANTED, Event.RELEASED)
        assert {(entry.name, entry.lease, entry.fence, entry.ttl) for entry in (granted, released)} == {
            ("order:42", digest(lease.token), lease.fence, 20)
        }
        assert granted.holder == released.holder == lease.holder
        assert 0 <= granted.seconds < 60
        assert 0 <= released.seconds < 60
        assert granted.at <= released.at <= time.time()

    def test_a_wait_that_ends_without_the_lock(self, backend, calls):
        hold_elsewhere("order:42")
        assert calls(lock("order:42")).acquire(timeout=1) is False
        waits, timed_out = entries(backend, 2)
        assert (waits.event, timed_out.event) == (Event.WAITS, Event.TIMED_OUT)
        assert waits.seconds == pytest.approx(1)
        assert timed_out.seconds >= 1
        assert timed_out.text.startswith("somebody else (pid ")
        assert calls(lock("order:42")).acquire(timeout=0) is False  # of which there may be very many
        with pytest.raises(LockTimeout), lock("order:42", wait=1):
            pass
        assert events(backend, 4) == [Event.WAITS, Event.TIMED_OUT] * 2

    @staticmethod
    def acquire_and_release():
        with lock("order:42", wait=None):
            pass

    @on_each_store
    def test_a_wait_that_ends_with_the_lock(self, backend):
        with lock("order:42"):
            thread = threading.Thread(target=self.acquire_and_release)
            thread.start()
            [_, waits] = entries(backend, 2)
            assert (waits.event, waits.seconds) == (Event.WAITS, None)
        thread.join()
        assert events(backend, 5)[2:] == [Event.RELEASED, Event.GRANTED, Event.RELEASED]

    @on_each_store
    def test_a_wait_that_is_cancelled(self, backend):
        async def main(acquire):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await acquire()

        async def acquire_all():
            async with lock_all(lock("order:42"), lock("order:43"), wait=None):
                pass

        hold_elsewhere("order:42")
        for number, acquire in enumerate((lock("order:42").aacquire, acquire_all), 1):
            asyncio.run(main(acquire))
            waits, ended = entries(backend, 2 * number)[-2:]
            assert (waits.event, ended.event, ended.text) == (Event.WAITS, Event.WAIT_ENDED, "CancelledError")
            assert ended.holder.thread == waits.holder.thread
            assert ended.seconds > 0

    @pytest.mark.parametrize("on_unavailable", ["raise", "run"])
    def test_a_wait_that_an_error_ends(self, backend, calls, on_unavailable):
        """One that waits asks a store that fails again; at the deadline that is the end."""
        hold_elsewhere("order:42")
        handle, store = lock("order:42", on_unavailable=on_unavailable), ExitStack()
        thread = threading.Thread(target=lambda: entries(backend, 1) and store.enter_context(no_locks_of(backend)))
        with store:
            thread.start()
            with suppress(LockBackendError):
                calls(handle).acquire(timeout=2)
            thread.join()
        waits, ended = entries(backend, 2)
        assert (waits.event, ended.event, ended.text) == (Event.WAITS, Event.WAIT_ENDED, "LockBackendError")

    @pytest.mark.django_db(transaction=True)
    def test_a_wait_that_ends_with_a_lease_of_the_same_transaction(self, locmem_locks, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "JOURNAL": 100}}
        backend = locks["default"]

        async def enter(entered, may_leave):
            async with lock("order:42", wait=60):
                entered.set()
                await may_leave.wait()

        async def main():
            first, second, may_leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
            holder = asyncio.create_task(enter(first, may_leave))
            await first.wait()
            waiter = asyncio.create_task(enter(second, may_leave))
            await asyncio.to_thread(eventually, lambda: Event.WAITS in [one.event for one in written(backend)])
            may_leave.set()
            await asyncio.gather(holder, waiter)

        with transaction.atomic():
            async_to_sync(main)()
        ended = [entry for entry in entries(backend, 4) if entry.event is Event.WAIT_ENDED]
        assert [entry.text for entry in ended] == ["a lease of its own is in the way"]
        locks.close()

    def test_a_lease_that_is_lost(self, backend):
        with pytest.raises(LockLost), lock("order:42") as lease:
            lose(lease)
        assert events(backend, 2) == [Event.GRANTED, Event.LOST]
        assert written(backend)[-1].text == "a test let it be lost"

    def test_a_release_by_force(self, backend):
        with lock("order:42", on_lost="log") as lease:
            assert lock("order:42").force_release(by="ada")
        granted, freed, *_ = entries(backend, 3)
        assert (freed.event, freed.text, freed.lease, freed.seconds) == (Event.FREED, "ada", granted.lease, None)
        assert freed.holder == lease.holder

    def test_a_lease_that_goes_to_another_process(self, backend):
        handle = lock("order:42")
        handle.acquire()
        with adopt(handle.lease.detach()):
            pass
        own = [Event.GRANTED, Event.DETACHED, Event.ADOPTED, Event.RELEASED]
        eventually(lambda: [entry.event for entry in written(backend) if entry.name == "order:42"] == own)

    @pytest.mark.django_db(transaction=True)
    def test_what_keeps_a_lease(self, backend):
        with transaction.atomic(), lock("order:42"):
            pass
        _, kept, _ = entries(backend, 3)
        assert (kept.event, kept.text) == (Event.KEPT, TRANSACTION)

    @pytest.mark.django_db
    def test_a_response_that_keeps_a_lease(self, backend):
        @distributed_lock("report")
        def report(request):
            return StreamingHttpResponse(["1", "2"])

        response = report(RequestFactory().get("/"))
        _, kept = entries(backend, 2)
        assert (kept.event, kept.text) == (Event.KEPT, RESPONSE)
        list(response)
        response.close()
        assert events(backend, 3)[-1] == Event.RELEASED

    def test_a_lease_that_is_not_renewed(self, backend):
        with lock("order:42", renew=False):
            pass
        assert [entry.text for entry in entries(backend, 2)] == [
            NOT_RENEWED,
            "",
        ]

    def test_a_lease_that_waits_in_a_message_is_not_renewed(self, backend):
        succession = Succession("default")
        asked, works, repeats = (LockRequest("a", 30.0, Holder.here(label)) for label in ("asked", "works", "repeats"))
        succession.claim(asked)
        lease = succession.begin(asked, works)
        succession.requeue(lease, repeats)
        told = [(entry.holder.label, entry.event, entry.text) for entry in entries(backend, 4)]
        assert told == [
            ("asked", "granted", NOT_RENEWED),
            ("works", "granted", ""),
            ("works", "detached", ""),
            ("repeats", "granted", NOT_RENEWED),
        ]
        assert causes(from_journal(entries(backend, 4), "a", "default", time.time() + 20, None)) == []

    def test_a_lease_that_reaches_its_bound(self, backend):
        with lock("order:42", ttl=2, max_hold=0.5, on_lost="log") as lease:
            eventually(lambda: not lease.is_held)
        reached = [entry for entry in entries(backend, 3) if entry.event is Event.BOUND_REACHED]
        assert [entry.text for entry in reached] == ["its max_hold of 0.5 s"]

    def test_a_release_that_is_repeated_in_the_background(self, backend, calls):
        handle = lock("order:42")
        calls(handle).acquire()
        with no_locks_of(backend), suppress(LockBackendError):
            calls(handle).release()
        with lock("order:42", wait=60):
            pass
        eventually(lambda: events(backend, 4).count(Event.RELEASED) == 2)  # of two leases

    @pytest.mark.seconds(8)
    @on_each_store
    def test_a_lease_whose_handle_is_dropped(self, backend):
        with pytest.warns(ResourceWarning, match="was dropped"):
            lock("order:42", ttl=9).acquire()
            gc.collect()
        dropped = entries(backend, 2)[-1]
        assert (dropped.event, dropped.text) == (Event.BOUND_REACHED, "its handle was dropped")
        eventually(lambda: not backend.look(["order:42"])[0])

    def test_a_thread_that_waits_tells_which_leases_it_has(self, backend):
        hold_elsewhere("order:42")
        with lock("left"):
            pass
        with lock("order:43") as first, lock("order:44") as second:
            lock("order:42").acquire(timeout=1)
        [waits] = [entry for entry in entries(backend, 8) if entry.event is Event.WAITS]
        assert waits.text.split() == [digest(lease.token) for lease in (second, first)]

    def test_a_task_that_waits_does_not_tell_those_of_the_one_that_began_it(self, backend):
        async def child():
            async with lock("order:43") as own:
                await lock("order:42").aacquire(timeout=1)
            return own

        async def main():
            async with lock("order:44"):
                return await asyncio.create_task(child())

        hold_elsewhere("order:42")
        own = asyncio.run(main())
        [waits] = [entry for entry in entries(backend, 6) if entry.event is Event.WAITS]
        assert waits.text == digest(own.token)

    def test_a_lock_that_is_entered_again_is_no_wait(self, backend):
        with lock("order:42"), pytest.raises(LockReentry), lock("order:42"):
            pass
        assert Event.TIMED_OUT not in events(backend, 2)

    def test_what_runs_without_the_lock_is_no_lease(self, backend):
        with store_down(), lock("order:42", on_unavailable="run"):
            pass
        with lock("order:43"):
            pass
        assert Event.RELEASED in events(backend, 2)
        assert {entry.name for entry in written(backend)} == {"order:43"}


class TestOff:
    def test_nothing_is_kept(self, valkey_locks, store):
        with lock("order:42"):
            pass
        assert locks.service("default").journal is None
        assert store.keys("lock|j*") == []

    def test_a_store_that_keeps_none_refuses_it(self, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend", "JOURNAL": 5}
        }
        with pytest.raises(Exception, match="JOURNAL'] is set, but DummyBackend keeps no journal"):
            locks["default"]

    @pytest.mark.parametrize("length", [-1, 1.5, True, "1000", 100_001])
    def test_what_is_no_length(self, settings, length):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "JOURNAL": length}}
        with pytest.raises(Exception, match="It is how many of the last events are kept"):
            locks["default"]


class TestWriting:
    def test_nobody_waits_for_it(self, backend, monkeypatch):
        may_write = threading.Event()
        write = type(backend).write_journal
        monkeypatch.setattr(
            type(backend), "write_journal", lambda self, entries: may_write.wait(60) and write(self, entries)
        )
        for _ in range(3):
            with lock("order:42"):
                pass
        assert written(backend) == []
        may_write.set()
        assert len(events(backend, 6)) == 6

    def test_what_the_journal_would_not_keep_is_not_written(self, backend, monkeypatch):
        monkeypatch.setattr(journal_writer, "INTERVAL", 60)
        batches = []
        monkeypatch.setattr(type(backend), "write_journal", lambda self, entries: batches.append(entries))
        with lock("first"):
            pass
        eventually(lambda: batches)
        for _ in range(200):
            with lock("order:42"):
                pass
        locks.service("default").journal.write_last()
        assert len(batches[-1]) == 100

    @on_each_store
    def test_a_store_that_fails_is_told_once(self, backend, caplog, monkeypatch):
        def fail(entries):
            raise LockBackendError("It is away.")

        monkeypatch.setattr(journal_writer, "INTERVAL", 0.01)
        with monkeypatch.context() as patched:
            patched.setattr(backend, "write_journal", fail)
            for number in range(1, 4):
                with lock("order:42"):
                    pass
                eventually(lambda: caplog.records and not locks.service("default").journal.unwritten)
                assert len(caplog.records) == 1, number
        assert "is not written until its store takes it again: It is away." in caplog.text
        caplog.clear()
        with lock("order:43"):
            pass
        assert {entry.name for entry in entries(backend, 2)} == {"order:43"}
        assert not caplog.records

    def test_a_thread_that_was_refused_once(self, backend, caplog, monkeypatch):
        start = threading.Thread.start

        def refuse(thread):
            if thread.name == "distlock-journal-default":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                with lock("order:42"):
                    pass
        [record] = caplog.records
        assert record.distlock["event"] == "thread-refused"
        with lock("order:43"):
            pass
        assert len(events(backend, 6)) == 6

    @on_each_store
    def test_a_child_writes_its_own(self, backend, monkeypatch):
        if not backend.supports_processes:
            pytest.skip("this backend keeps the journal in its process, which cannot see that of a child")
        monkeypatch.setattr(journal_writer, "INTERVAL", 60)
        with lock("parent"):
            pass
        noted = in_a_fork(lambda: locks.service("default").journal.unwritten)
        assert noted == "0"

    def test_what_is_noted_last_is_written_at_the_exit(self, valkey_locks, program, settings):
        process = program(
            'settings.DISTRIBUTED_LOCKS["default"]["JOURNAL"] = 100\n'
            "from django_distlock.core import journal_writer\njournal_writer.INTERVAL = 60\n"
            'with lock("first"): pass\n'
            "time.sleep(1)\n"
            'last = lock("last"); last.__enter__()\n'
            'say("done")',
            like=None,
        )
        assert heard(process) == "done"
        process.wait()
        found = entries_in(valkey_locks.read_journal())
        assert [(entry.event, entry.name) for entry in found][-2:] == [
            (Event.GRANTED, "last"),
            (Event.RELEASED, "last"),
        ]
