"""What explains a lock, as each store has it: who stands in its queue, which queues there are, and the journal."""

from __future__ import annotations

import threading
import time

import pytest

from django_distlock import lock, locks
from django_distlock.journal import Event, JournalEntry, entries_in
from django_distlock.monitoring.situation import gather
from django_distlock.testing.tools import eventually, lock_request
from django_distlock.types import Holder, LockRequest, digest
from tests.support.leases import hold_elsewhere
from tests.support.stores import REDIS
from tests.support.tenants import of_tenants, tenant

STORES = ["valkey", "cluster", "postgres", "mariadb", "sqlite", "locmem"]


@pytest.fixture(params=STORES)
def backend(request):
    return request.getfixturevalue(f"{request.param}_locks")


@pytest.fixture
def kept(backend, settings):
    """The backend, with a journal of five."""
    settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "JOURNAL": 5}}
    yield locks["default"]
    locks.close()


def text(number, **about):
    holder = Holder("web-1", 7, "MainThread", "pay", 1_795_700_000.0)
    return JournalEntry(1_795_700_000.0 + number, Event.GRANTED, f"order:{number}", "digest", holder, **about).to_text()


def names(backend):
    return [entry.name for entry in entries_in(backend.read_journal())]


class TestJournal:
    def test_what_is_written_is_read(self, kept):
        assert kept.read_journal() == []
        entry = text(1, fence=17, ttl=30.0, seconds=0.5, text="é\x00|'\"", prefix="tenant")
        kept.write_journal([entry])
        assert kept.read_journal() == [entry]
        [read] = entries_in(kept.read_journal())
        assert (read.fence, read.ttl, read.seconds, read.text, read.prefix) == (17, 30.0, 0.5, "é\x00|'\"", "tenant")
        assert read.to_text() == entry

    def test_the_last_ones_are_kept(self, kept):
        kept.write_journal([text(number) for number in range(4)])
        assert names(kept) == [f"order:{number}" for number in range(4)]
        kept.write_journal([text(number) for number in range(4, 7)])
        assert names(kept) == [f"order:{number}" for number in range(2, 7)]
        kept.write_journal([text(number) for number in range(7, 12)])
        assert names(kept) == [f"order:{number}" for number in range(7, 12)]

    def test_what_others_wrote_is_left_out(self, kept):
        newer = text(1).replace("1", "2", 1)
        kept.write_journal([text(1), "", "nonsense", newer, "1 {}"])
        assert names(kept) == ["order:1"]

    def test_an_entry_that_was_written_twice_counts_once(self, kept):
        kept.write_journal([text(1), text(1)])
        assert names(kept) == ["order:1"]


class TestQueues:
    def queued(self, backend, name, label):
        request = lock_request(name, 60.0, label)
        backend.acquire(request, queue=True)
        return request

    def test_who_waits_in_which_order(self, backend):
        holder = hold_elsewhere("order:42")
        first, second = (self.queued(backend, "order:42", label) for label in ("first", "second"))
        [waiting, nobody] = backend.waiters(["order:42", "order:43"])
        assert [one.lease for one in waiting] == [digest(first.token), digest(second.token)]
        assert waiting[0].since <= waiting[1].since
        assert abs(waiting[0].since - time.time()) < 60
        assert nobody == []
        for request in (first, second, holder):
            backend.release(request)
        assert backend.waiters(["order:42"]) == [[]]

    def test_which_locks_are_waited_for(self, backend):
        holders = [hold_elsewhere(name) for name in ("order:42", "order:43", "mail:1")]
        waiting = [self.queued(backend, name, "waits") for name in ("order:42", "mail:1")]
        assert sorted(backend.waited_for()) == ["mail:1", "order:42"]
        assert list(backend.waited_for("order:")) == ["order:42"]
        for request in (*waiting, *holders):
            backend.release(request)
        assert list(backend.waited_for()) == []

    def test_nothing_is_asked(self, backend):
        assert backend.waiters([]) == []


@pytest.mark.parametrize("backend", ["valkey", "cluster"], indirect=True)
def test_a_place_in_redis_tells_host_and_process(backend):
    here = Holder.here()
    with lock("order:42"):
        thread = threading.Thread(target=lambda: lock("order:42", wait=30).acquire(timeout=1))
        thread.start()
        [[waiting]] = eventually(lambda: any(found := backend.waiters(["order:42"])) and found)
        assert (waiting.holder.host, waiting.holder.pid) == (here.host, here.pid)
        assert waiting.holder.thread == ""
        thread.join()


@pytest.mark.parametrize("protocol", [2, 3])
def test_each_protocol_of_redis(valkey, store, settings, protocol):
    location = f"{valkey.url}{'&' if '?' in valkey.url else '?'}protocol={protocol}"
    entry = {"BACKEND": REDIS, "LOCATION": location, "JOURNAL": 5}
    settings.DISTRIBUTED_LOCKS = {"default": entry}
    backend = locks["default"]
    holder, waiter = hold_elsewhere("order:42"), lock_request("order:42", 60.0)
    backend.acquire(waiter, queue=True)
    [[waiting]] = backend.waiters(["order:42"])
    assert waiting.lease == digest(waiter.token)
    assert list(backend.waited_for()) == ["order:42"]
    backend.write_journal([text(1)])
    assert backend.read_journal() == [text(1)]
    for request in (waiter, holder):
        backend.release(request)
    locks.close()


class TestTenants:
    @pytest.fixture
    def kept_by_tenants(self, kept, settings):
        return of_tenants(settings)

    def test_each_is_explained_its_own_locks(self, kept_by_tenants):
        for one in ("acme", "globex"):
            with tenant(one), lock("order:42", label=one):
                pass
        eventually(lambda: len(kept_by_tenants.read_journal()) == 4)
        for one in ("acme", "globex"):
            with tenant(one):
                found = gather(kept_by_tenants, "order:42")
            assert [entry.holder.label for entry in found.history] == [one, one]

    def test_each_sees_its_own_queues(self, kept_by_tenants):
        with tenant("acme"):
            held = [hold_of("acme", "order:42"), hold_of("acme", "order:42")]
            assert list(kept_by_tenants.waited_for()) == ["order:42"]
            assert [len(queue) for queue in kept_by_tenants.waiters(["order:42"])] == [1]
        with tenant("globex"):
            assert list(kept_by_tenants.waited_for()) == []
            assert kept_by_tenants.waiters(["order:42"]) == [[]]
        for request in reversed(held):
            kept_by_tenants.release(request)


def hold_of(prefix, name):
    """Held by the first who asks; the next one waits."""
    request = LockRequest(name, 60.0, Holder.here("test"), prefix=prefix)
    locks["default"].acquire(request, queue=True)
    return request
