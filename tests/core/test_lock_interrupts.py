"""A handler of a signal may raise between any two steps. Whatever was acquired then is given back, or runs out."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from contextlib import suppress

import pytest
from django.db import transaction

from django_distlock import LockBackendError, LockLost, adopt, distributed_lock, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import client
from tests.support.inside import client_of, filling_of, lines_of, listener_of, nodes_of
from tests.support.interrupts import at_each_point
from tests.support.leases import deadline_of, lease_of
from tests.support.quorum import spread
from tests.support.stores import LOCMEM
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request, locked_names, queue_of, renewer_of

TTL = 2.0

backend = backend_on("redis", "locmem", "sqlite")

handles = []

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning",  # what is raised in a finalizer
        "ignore:A handle of lock .* was dropped:ResourceWarning",
    ),
    pytest.mark.seconds(4),
]


def kept_handle(name, **options):
    handles.append(lock(name, ttl=TTL, **options))
    return handles[-1]


def with_a_handle_that_is_kept(name):
    with kept_handle(name):
        pass


def with_a_handle(name):
    with lock(name, ttl=TTL):
        pass


def acquired_and_released(name):
    handle = kept_handle(name)
    handle.acquire()
    handle.release()


def entered_again(name):
    outer, inner = kept_handle(name, reentrant=True), kept_handle(name, reentrant=True)
    with outer, inner, outer:
        pass


@distributed_lock(name=lambda name: name, ttl=TTL)
def decorated(name):
    pass


@distributed_lock(name=lambda name: name, ttl=TTL)
def iterator(name):
    yield


def iterated(name):
    list(iterator(name))


def adopted(name):
    with lock(name, ttl=TTL) as lease:
        text = lease.detach()
    with adopt(text):
        pass


def in_a_transaction(name):
    with transaction.atomic(), lock(name, ttl=TTL):
        pass


def held_for_ever(way, *files):
    """What is renewed after it was interrupted: by name, the point."""
    way("warm")
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        points = dict(at_each_point(way, *files))
        assert len(points) > 10
        gc.collect()
        before = {lease: deadline_of(lease) for lease in locks.leases()}

        def is_renewed(lease):
            return lease.remaining and deadline_of(lease) > before[lease] + 0.01

        eventually(lambda: all(is_renewed(lease) or not lease.remaining for lease in before))
        held = {lease.name: points.get(lease.name, "") for lease in before if is_renewed(lease)}
        handles.clear()
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    assert not lines_of(queue_of(locks["default"]))
    return held


def on_stores_by(way, *ways, stores=("redis", "locmem")):
    """On each store by one way; the others call it as that one does, and are interrupted above it."""
    cases = [*((store, way) for store in stores), *(("locmem", other) for other in ways)]
    return pytest.mark.parametrize(("backend", "way"), cases, indirect=["backend"])


@on_stores_by(with_a_handle, decorated, iterated, stores=("redis", "locmem", "sqlite"))
def test_nothing_is_held_for_ever(backend, way):
    assert held_for_ever(way) == {}
    eventually(lambda: not locked_names(backend))


@pytest.mark.parametrize("backend", ["locmem"], indirect=True)
def test_an_adopted_lease_is_held_by_whoever_has_begun_its_with(backend):
    """Before its first step, neither the begin nor the end of the ``with`` knows that it was called."""
    begins = ("__enter__ at its begin", "__exit__ at its begin")
    held = {name: point for name, point in held_for_ever(adopted).items() if not point.endswith(begins)}
    for lease in locks.leases():
        with suppress(LockLost):
            lease.release()  # nobody else does
    assert held == {}


@on_stores_by(acquired_and_released, with_a_handle_that_is_kept, entered_again)
def test_a_handle_that_is_kept_holds_what_nobody_has_begun_to_leave(backend, way):
    """Before its first step, the end of a ``with`` cannot know that it was called."""
    begins = ("__exit__ at its begin", "release at its begin", "<lambda> at its begin")
    held = {name: point for name, point in held_for_ever(way).items() if not point.endswith(begins)}
    assert held == {}
    eventually(lambda: not locked_names(backend))


@pytest.mark.parametrize("backend", ["redis", "locmem"], indirect=True)
def test_an_adoption_that_does_not_end_leaves_the_lease_to_run_out(backend):
    def adopted(name):
        handle = lock(name, ttl=TTL)
        handle.acquire()
        adopt(lease_of(handle).detach()).release()

    assert held_for_ever(adopted, "core/adoption.py", "core/detached.py", "utils/drive.py") == {}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("backend", ["locmem"], indirect=True)
def test_the_end_of_a_transaction_frees_what_was_being_left_for_it(backend):
    """What a handler raises inside a finalizer is lost, and its call with it."""
    held = held_for_ever(in_a_transaction, "core/transactions.py")
    assert [point for point in held.values() if "__del__" not in point and " over" not in point] == []
    eventually(lambda: not [name for name in locked_names(backend) if name not in held])


@pytest.mark.parametrize("kind", ["valkey_locks", "redlock_locks"])
def test_every_connection_may_be_used_again(kind, request, settings):
    request.getfixturevalue(kind)
    entry = settings.DISTRIBUTED_LOCKS["default"]
    settings.DISTRIBUTED_LOCKS = {"default": {**entry, "OPTIONS": {**entry.get("OPTIONS", {}), "max_connections": 1}}}
    assert held_for_ever(with_a_handle) == {}
    with_a_handle("afterwards")


def test_nodes_of_a_quorum_are_connected_to_however_often_that_was_interrupted(redlock_locks):
    def with_a_handle_over_new_connections(name):
        redlock_locks.close()
        with_a_handle(name)

    assert held_for_ever(with_a_handle_over_new_connections, "backends/redlock/connections.py") == {}
    nodes = client_of(redlock_locks)
    eventually(lambda: not any(node.is_connecting for node in nodes_of(nodes)))
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("distlock-connect-")])
    assert filling_of(nodes) == []
    redlock_locks.close()
    spread(redlock_locks, lock_request("afterwards"))


def test_a_request_that_failed_stands_in_no_line(settings, monkeypatch):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
    left = []

    def refused(request, *, queue):
        raise LockBackendError("no")

    def acquire(name):
        with suppress(LockBackendError):
            lock(name, wait=10).acquire()

    monkeypatch.setattr(locks["default"], "acquire", refused)
    for name, point in at_each_point(acquire, "core/local_queue.py", "core/acquire.py", "utils/drive.py"):
        if queue_of(locks["default"]).length(name):
            left.append(point)
    assert left == []


def test_who_stands_behind_in_the_line_is_woken(valkey_locks, settings, monkeypatch):
    """Not by a look, which would come a minute later."""
    entry = settings.DISTRIBUTED_LOCKS["default"]
    settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
    monkeypatch.setattr(Timing, "look_interval", 60.0)
    backend, other = locks["default"], locks["other"]
    listener_of(backend).start("name", PATIENCE)
    late, heirs = [], {}

    def leave_to_an_heir(name):
        held, heir = lock_request(name, ttl=60.0), Heir(name)
        heirs[name] = held, heir
        taking = threading.Thread(
            target=other.acquire, args=(held,), kwargs={"queue": False}
        )  # where nobody interrupts
        taking.start()
        taking.join()
        heir.thread.start()
        try:
            lock(name, wait=0.2).acquire()
        finally:
            heir.may_come.set()

    def heir_comes(name):
        held, heir = heirs[name]
        eventually(lambda: queue_of(backend).length(name) == 1)
        other.release(held)
        heir.thread.join(PATIENCE)
        return heir.is_in

    for name, point in at_each_point(leave_to_an_heir, "core/local_queue.py", "core/acquire.py", "utils/drive.py"):
        if not heir_comes(name):
            late.append(point)
    assert len(heirs) > 40
    assert late == []
    assert heir_comes(max(heirs))  # of the call that was not interrupted
    assert not lines_of(queue_of(backend))


@pytest.mark.parametrize("is_task", [False, True], ids=["sync", "async"])
def test_a_second_interrupt_leaves_no_place_in_the_queue(is_task, valkey_locks, store, monkeypatch):
    """The first one ends a wait, the second one strikes what is done about that."""

    def interrupted(request, timeout):
        raise KeyboardInterrupt

    async def cancelled(request, timeout):
        raise asyncio.CancelledError

    async def acquire(name):
        with suppress(asyncio.CancelledError):
            await lock(name, wait=10).aacquire()

    def wait_in_vain(name):
        holding = threading.Thread(
            target=valkey_locks.acquire, args=(lock_request(name, ttl=60.0),), kwargs={"queue": False}
        )
        holding.start()
        holding.join()
        with suppress(KeyboardInterrupt):
            if is_task:
                asyncio.run(acquire(name))
            else:
                lock(name, wait=10).acquire()

    listener_of(valkey_locks).start("name", PATIENCE)
    monkeypatch.setattr(valkey_locks, "wait_for_turn", interrupted)
    monkeypatch.setattr(valkey_locks, "await_for_turn", cancelled)
    queued = set()

    def undo_is_struck():
        points = dict(at_each_point(wait_in_vain, "core/acquire.py", "core/local_queue.py", "core/holds.py"))
        queued.update(f"lock|q:{name}" for name in points)
        return any(" undo" in point for point in points.values())

    eventually(undo_is_struck)  # tasks pass more points where an answer takes long, so a number may miss its point
    eventually(lambda: store.exists(*queued) == 0, Timing.queue_ttl / 2)  # in which no queue ends by itself


class Heir:
    """A thread that wants the lock after another one of its process."""

    def __init__(self, name):
        self.thread = threading.Thread(target=self._come, args=(name,))
        self.may_come = threading.Event()
        self.is_in = False

    def _come(self, name):
        lines = locks.service("default").queue
        eventually(lambda: lines.length(name) or self.may_come.is_set())
        with lock(name, wait=5.0):
            self.is_in = True


def test_an_alarm_that_raises_an_error_of_the_system_leaves_nothing_behind(valkey_locks, monkeypatch):
    """It looks as one of the connection does, though the server has granted the lock by then."""

    def ring(*_, **__):
        monkeypatch.setattr(client, "Reply", answer)
        raise TimeoutError("time is up")

    answer = client.Reply
    monkeypatch.setattr(client, "Reply", ring)
    with pytest.raises(LockBackendError, match="time is up"), lock("name", ttl=600):
        pass
    eventually(lambda: not locked_names(valkey_locks))
